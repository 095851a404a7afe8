"""What front ends are handed: each record once and in order, whatever reads are lost, repeated or late."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pagetide.fleet.followers import Followers


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def followed(*records: bytes, name: str = "front", complete: bool = False) -> Followers:
    followers = Followers()
    followers.add(1, records, complete)
    followers.follow(name, 1)
    return followers


def test_records_come_once_and_with_their_position() -> None:
    async def main() -> None:
        followers = followed(b"a", b"b")
        assert await followers.read("front", 0.0) == {1: (0, [b"a", b"b"])}
        assert await followers.read("front", 0.0) == {}
        followers.show(1, b"c", False)
        followers.show(1, b"d", True)
        assert 1 in followers
        assert await followers.read("front", 0.0) == {1: (2, [b"c", b"d"])}
        assert 1 not in followers and followers.positions() == {"front": 0}

    run(main())


def test_a_read_waits_for_the_next_record() -> None:
    async def main() -> None:
        followers = followed()
        reading = asyncio.ensure_future(followers.read("front", 60.0))
        await asyncio.sleep(0)
        assert not reading.done()
        followers.show(1, b"a", False)
        assert await reading == {1: (0, [b"a"])}

    run(main())


def test_two_front_ends_each_get_all_and_the_output_stays_until_both_have_it() -> None:
    async def main() -> None:
        followers = followed(b"a", name="one")
        followers.follow("two", 1)
        followers.show(1, b"b", True)
        assert await followers.read("one", 0.0) == {1: (0, [b"a", b"b"])}
        assert 1 in followers
        assert await followers.read("two", 0.0) == {1: (0, [b"a", b"b"])}
        assert 1 not in followers

    run(main())


def test_a_later_read_takes_the_records_and_ends_the_earlier_one_whose_answer_goes_astray() -> None:
    async def main() -> None:
        followers = followed()
        lost = asyncio.ensure_future(followers.read("front", 60.0))
        await asyncio.sleep(0)
        read = asyncio.ensure_future(followers.read("front", 60.0))
        await asyncio.sleep(0)
        followers.show(1, b"a", False)
        assert await lost == {} and await read == {1: (0, [b"a"])}

    run(main())


def test_a_front_end_that_follows_again_gets_records_from_the_earlier_of_both_positions() -> None:
    async def main() -> None:
        followers = followed(b"a", b"b", b"c")
        await followers.read("front", 0.0)
        followers.follow("front", 1, 1)
        followers.follow("front", 1, 2)
        assert await followers.read("front", 0.0) == {1: (1, [b"b", b"c"])}
        followers.follow("front", 1)
        followers.follow("front", 1, 3)  # what another attachment of this front end said
        assert await followers.read("front", 0.0) == {1: (0, [b"a", b"b", b"c"])}

    run(main())


def test_a_front_end_that_is_forgotten_and_comes_back_is_told_what_it_followed_once() -> None:
    async def main() -> None:
        now = 0.0
        followers = Followers(lambda: now)
        followers.add(1, [b"a"])
        followers.add(2, [b"x"])
        followers.follow("front", 1)
        followers.follow("front", 2)
        await followers.read("front", 0.0)
        now = 20.0
        followers.forget(30.0, 600.0)
        assert followers.num_fronts == 1
        now = 31.0
        followers.forget(30.0, 600.0)
        assert followers.num_fronts == 0
        followers.show(1, b"b", False)
        followers.show(2, b"y", True)
        assert 2 not in followers, "an output that is complete and followed by none is dropped"
        assert followers.returned("front") == {1: 1, 2: 1}
        assert followers.returned("front") == {}
        followers.follow("front", 1, 1)
        assert await followers.read("front", 0.0) == {1: (1, [b"b"])}
        now = 2000.0
        followers.forget(30.0, 600.0)
        now = 4000.0
        followers.forget(30.0, 600.0)
        assert followers.returned("front") == {} and not followers._gone

    run(main())


def test_outputs_that_the_journal_may_not_have_are_kept_until_it_has_them() -> None:
    async def main() -> None:
        is_written = False
        followers = Followers(may_drop=lambda: is_written)
        followers.add(1)
        followers.follow("front", 1)
        followers.show(1, b"a", True)
        assert await followers.read("front", 0.0) == {1: (0, [b"a"])}
        assert 1 in followers
        followers.follow("other", 1)
        assert await followers.read("other", 0.0) == {1: (0, [b"a"])}
        is_written = True
        followers.forget(30.0, 600.0)
        assert 1 not in followers

    run(main())


def test_a_complete_output_that_was_added_and_never_followed_is_dropped() -> None:
    followers = Followers()
    followers.add(1, [b"a"], is_complete=True)
    followers.forget(30.0, 600.0)
    assert 1 not in followers


def test_a_withdrawn_output_is_followed_by_none_and_later_records_of_it_are_ignored() -> None:
    async def main() -> None:
        followers = followed(b"a")
        followers.withdraw(1)
        followers.show(1, b"b", True)
        assert 1 not in followers and await followers.read("front", 0.0) == {}
        assert followers.positions() == {"front": 0}
        followers.withdraw(1)

    run(main())


def test_leaving_what_is_not_followed_does_nothing() -> None:
    followers = followed(b"a")
    followers.leave("other", [1, 2])
    followers.leave("front", [2])
    assert followers.positions() == {"front": 1}
    followers.leave("front", [1])
    assert 1 in followers and followers.positions() == {"front": 0}
    followers.show(1, b"b", True)
    assert 1 not in followers


STEPS = st.lists(st.tuples(st.sampled_from(["show", "end", "read", "lost", "follow", "leave"]), st.integers(0, 2),
                           st.sampled_from(["one", "two"])), max_size=60)  # fmt: skip


@given(STEPS)
@hypothesis_settings(derandomize=True, max_examples=150)
def test_no_record_is_skipped_or_repeated_whatever_happens_to_the_answers(steps: list[tuple[str, int, str]]) -> None:
    async def main() -> None:
        followers = Followers()
        outputs: dict[int, list[bytes]] = {number: [] for number in range(3)}
        have: dict[tuple[str, int], list[bytes]] = {}
        ended: set[int] = set()
        for number in outputs:
            followers.add(number)
        for what, number, name in steps:
            if what in ("show", "end") and number not in ended:
                outputs[number].append(data := f"{number}:{len(outputs[number])}".encode())
                followers.show(number, data, what == "end")
                ended |= {number} if what == "end" else set()
            elif what == "follow" and number in followers:
                followers.follow(name, number)
                have[name, number] = []
            elif what == "leave":
                followers.leave(name, [number])
                have.pop((name, number), None)
            elif what in ("read", "lost"):
                found = await followers.read(name, 0.0)
                for each, (position, records) in found.items():
                    assert position == len(have[name, each]), "records are skipped or repeated"
                    if what == "read":
                        have[name, each] += records
                if what == "lost":  # the front end says what it has, as far as it is there
                    for one, each in [key for key in have if key[0] == name]:
                        followers.add(each, outputs[each], each in ended)
                        followers.follow(one, each, len(have[one, each]))
        for name in ("one", "two"):
            for each, (position, records) in (await followers.read(name, 0.0)).items():
                assert position == len(have[name, each])
                have[name, each] += records
        assert all(records == outputs[each] for (_, each), records in have.items())

    run(main())
