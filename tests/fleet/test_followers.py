"""What front ends are handed: each record once and in order, whatever reads are lost, repeated or late."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from pagetide.fleet.followers import Followers


def followed(*records: bytes, name: str = "front", complete: bool = False) -> Followers:
    followers = Followers()
    followers.add(1, records, complete)
    followers.follow(name, 1)
    return followers


async def test_a_later_read_takes_the_records_and_ends_the_earlier_one_whose_answer_goes_astray() -> None:
    followers = followed()
    lost = asyncio.ensure_future(followers.read("front", 60.0))
    await asyncio.sleep(0)
    read = asyncio.ensure_future(followers.read("front", 60.0))
    for _ in range(5):
        await asyncio.sleep(0)
    assert lost.done()
    followers.show(1, b"a", False)
    assert await lost == {} and await read == {1: (0, [b"a"])}


async def test_a_front_end_that_follows_again_gets_records_from_the_earlier_of_both_positions() -> None:
    followers = followed(b"a", b"b", b"c")
    await followers.read("front", 0.0)
    followers.follow("front", 1, 1)
    followers.follow("front", 1, 2)
    assert await followers.read("front", 0.0) == {1: (1, [b"b", b"c"])}
    followers.follow("front", 1)
    followers.follow("front", 1, 3)  # what another attachment of this front end said
    assert await followers.read("front", 0.0) == {1: (0, [b"a", b"b", b"c"])}


async def test_a_front_end_that_is_forgotten_and_comes_back_is_told_what_it_followed_once() -> None:
    now = 10.0
    followers = Followers(lambda: now)
    followers.add(1, [b"a"])
    followers.add(2, [b"x"])
    followers.follow("front", 1)
    followers.follow("front", 2)
    await followers.read("front", 0.0)
    now = 40.0
    followers.forget(30.0, 600.0)
    now = 40.1
    followers.forget(30.0, 600.0)
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


async def test_a_withdrawn_output_is_followed_by_none_and_later_records_of_it_are_ignored() -> None:
    followers = followed(b"a")
    followers.withdraw(1)
    followers.show(1, b"b", True)
    assert 1 not in followers and await followers.read("front", 0.0) == {}
    assert followers.positions() == {"front": 0}
    followers.withdraw(1)


STEPS = st.lists(st.tuples(st.sampled_from(["show", "end", "read", "lost", "follow", "leave"]), st.integers(0, 2),
                           st.sampled_from(["one", "two"])), max_size=60)  # fmt: skip


@given(STEPS)
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
        assert all((number in followers) == (number not in ended) for number in outputs), "complete and read: dropped"

    asyncio.run(main())
