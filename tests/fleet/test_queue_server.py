"""The queue's service: what it acknowledges is journaled, each request ends once, and it goes on after a kill at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pagetide.fleet import queue_server as server_module
from pagetide.fleet.journal import JournalError, JournalWriter
from pagetide.fleet.messages import (
    Deliveries,
    NewRequest,
    Orders,
    Registration,
    Report,
    StaleEpoch,
    Submission,
    WorkerRefused,
    decode_record,
    encode_record,
)
from pagetide.fleet.queue_server import CONFLICT, UNKNOWN, QueueOptions, QueueServer
from pagetide.server.messages import Failed, Piece, RequestEnd
from tests.fleet_stand_ins import MODEL, kill, new_request, other_model, worker_state


class Clock:
    """A clock that is moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A queue without workers of its own: tests call it as workers and front ends do."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.options = QueueOptions(folder / "journal.sqlite", **options)
        self.clock = Clock()
        self.begin()

    def begin(self) -> None:
        self.server = QueueServer(self.options, self.clock)

    async def restart(self) -> None:
        await kill(self.server)
        self.begin()

    async def register(self, name: str = "w", max_seqs: int = 8, /, **model: Any) -> int:
        return await self.server.register(Registration(name, other_model(**model), max_seqs, worker_state()))

    async def submit(self, request: NewRequest | str, front: str = "front") -> Submission:
        (answer,) = await self.server.submit(
            front, [request if isinstance(request, NewRequest) else new_request(request)]
        )
        return answer

    async def orders(self, epoch: int, name: str = "w") -> Orders:
        return await self.server.pull(name, epoch)

    async def report(self, epoch: int, sequence: int, *records: Any, **more: Any) -> None:
        await self.server.report(Report("w", epoch, sequence, [encode_record(one) for one in records], **more))

    async def read(self, front: str = "front", positions: dict[int, int] | None = None) -> dict[int, Any]:
        """What a front end is delivered: the position and the decoded records by request."""
        found = await self.server.read(front, positions)
        return {
            number: (at, [decode_record(one) for one in records]) for number, (at, records) in found.records.items()
        }


@pytest.fixture
def with_rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(server_module, "PULL_S", 0.001)
    monkeypatch.setattr(server_module, "READ_S", 0.001)
    monkeypatch.setattr(JournalWriter, "RETRY_S", 0.005)

    def run(check: Callable[[Rig], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            rig = Rig(tmp_path, **options)
            await check(rig)
            rig.server.queue.check_invariants()
            await rig.server.close()

        asyncio.run(main())

    return run


With = Callable[..., None]


def piece(number: int, *tokens: int, reason: Any = None) -> Piece:
    return Piece(number, 0, "t" * len(tokens), list(tokens), None, reason)


def test_a_request_goes_through_and_its_output_can_be_read_again(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        epoch = await rig.register()
        assert await rig.submit("r") == Submission(1)
        (assignment,) = (await rig.orders(epoch)).assignments
        assert (assignment.number, assignment.handovers) == (1, [new_request("r").handover])
        await rig.report(epoch, 1, piece(1, 5))
        assert await rig.read() == {1: (0, [piece(1, 5)])}
        await rig.report(epoch, 2, piece(1, 6, reason="length"), RequestEnd(1, [], 0))
        whole = [piece(1, 5), piece(1, 6, reason="length"), RequestEnd(1, [], 0)]
        assert await rig.read() == {1: (1, whole[1:])}
        assert await rig.read() == {}
        answer = await rig.server.attach("other", "r", "", "")
        assert (answer.number, answer.request) == (1, new_request("r"))
        assert await rig.read("other") == {1: (0, whole)}

    with_rig(check)


def test_a_record_is_shown_after_its_commit_and_never_before(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        epoch = await rig.register()
        await rig.submit("r")
        await rig.orders(epoch)
        with rig.server.writer._lock:  # the disk is slow
            reporting = asyncio.ensure_future(rig.report(epoch, 1, piece(1, 5)))
            assert await rig.read() == {} and not reporting.done()
        await reporting
        assert await rig.read() == {1: (0, [piece(1, 5)])}

    with_rig(check)


def test_a_submission_is_answered_after_its_commit(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        with rig.server.writer._lock:
            submitting = asyncio.ensure_future(rig.submit("r"))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not submitting.done()
        assert (await submitting).number == 1

    with_rig(check)


def test_after_a_kill_all_accepted_requests_go_on_from_their_records_under_new_epochs(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        epoch = await rig.register()
        for name in "rst":
            await rig.submit(name)
        await rig.orders(epoch)
        await rig.report(epoch, 1, piece(1, 5, 6), piece(2, 7), RequestEnd(2, [], 0))
        await rig.restart()
        assert rig.server.num_recovered == 2 and (await rig.server.info(0.0)) is not None
        with pytest.raises(StaleEpoch):
            await rig.report(epoch, 2, piece(1, 8))
        with pytest.raises(StaleEpoch):
            await rig.orders(epoch)
        new = await rig.register()
        assert new > epoch
        assigned = {one.number: one.handovers[0]["token_ids"] for one in (await rig.orders(new)).assignments}
        assert assigned == {1: [5, 6], 3: []}
        assert await rig.read(positions={1: 1, 2: 0, 3: 0, 9: 4}) == {2: (0, [piece(2, 7), RequestEnd(2, [], 0)])}
        assert (await rig.server.read("front", {9: 4})).unknown == [9]
        await rig.report(new, 1, piece(1, 8))
        assert await rig.read() == {1: (1, [piece(1, 8)])}
        assert (await rig.submit("u")).number == 4

    with_rig(check)


def test_the_secret_the_model_and_what_was_drained_outlast_the_queue(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        await rig.register("w")
        await rig.register("v")
        rig.server.drain("w")
        await rig.server.writer.commit()
        before = await rig.server.info(0.0)
        await rig.restart()
        after = await rig.server.info(0.0)
        assert before is not None and after is not None
        assert (before.secret, before.model) == (after.secret, after.model) and len(after.secret) == 32
        await rig.register("v")
        epoch = await rig.register("w")
        await rig.submit("r")
        orders = await rig.orders(epoch)
        assert orders.stop and not orders.assignments, "it was ordered to end before"
        with pytest.raises(WorkerRefused, match="the model another instead of stand-in"):
            await rig.register("x", identity="2", name="another")

    with_rig(check)


def test_a_submission_that_is_repeated_attaches_and_another_body_or_tenant_does_not(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        request = new_request("r", tenant="a", fingerprint="f", may_exist=True)
        first, second = await rig.server.submit("front", [request, request])
        assert first == Submission(1) and (second.number, second.request) == (1, request)
        other_body = new_request("r", tenant="a", fingerprint="g", may_exist=True)
        assert await rig.submit(other_body) == Submission(kind="conflict", error=CONFLICT)
        other_tenant = new_request("r", tenant="b", fingerprint="f", may_exist=True)
        assert await rig.submit(other_tenant) == Submission(kind="not_found", error=UNKNOWN)
        assert await rig.server.attach("front", "r", "b", "f") == Submission(kind="not_found", error=UNKNOWN)
        assert await rig.server.attach("front", "r", "a", "g") == Submission(kind="conflict", error=CONFLICT)
        assert len(rig.server.queue.entries) == 1

    with_rig(check)


@pytest.mark.parametrize("ended", [False, True])
def test_an_id_that_is_used_again_attaches_and_is_no_fault_of_the_journal(with_rig: With, ended: bool) -> None:
    async def check(rig: Rig) -> None:
        epoch = await rig.register()
        await rig.submit("r")
        await rig.orders(epoch)
        await rig.report(epoch, 1, piece(1, 5), *([RequestEnd(1, [], 0)] if ended else []))
        answers = await rig.server.submit("other", [new_request("r"), new_request("s")])
        assert [answer.number for answer in answers] == [1, 3 if ended else 2]
        assert rig.server.writer.fault is None
        records = [piece(1, 5), *([RequestEnd(1, [], 0)] if ended else [])]
        assert await rig.read("other") == {1: (0, records)}
        refused = await rig.submit(new_request("r", tenant="b"))
        assert refused == Submission(kind="not_found", error=UNKNOWN)
        await rig.restart()
        assert [one.request.request_id for one in rig.server.queue.entries.values()] == (["s"] if ended else ["r", "s"])

    with_rig(check)


@pytest.mark.parametrize("how", ["attach", "submit"])
@pytest.mark.parametrize("is_full", [False, True])
def test_an_attachment_to_a_request_is_answered_after_the_commit_of_that_request(
    with_rig: With, how: str, is_full: bool
) -> None:
    """A queue that is killed before would give the request's number to another one."""

    async def check(rig: Rig) -> None:
        await rig.register()
        request = new_request("r", prompt=4000)
        full(rig, is_full)
        with rig.server.writer._lock:
            first = asyncio.ensure_future(rig.submit(request))
            while not rig.server.queue.entries:
                await asyncio.sleep(0)
            second = asyncio.ensure_future(
                rig.server.attach("other", "r", "", "") if how == "attach" else rig.submit(request, "other")
            )
            for _ in range(20):
                await asyncio.sleep(0)
            assert not first.done() and not second.done()
        answers = [await first, await second]
        if is_full:
            assert [answer.number for answer in answers] == [None, None]
            assert {answer.kind for answer in answers} <= {"unavailable", "not_found"}
        else:
            assert [answer.number for answer in answers] == [1, 1]
            await rig.restart()
            assert list(rig.server.queue.entries) == [1]
        full(rig, False)

    with_rig(check)


def full(rig: Rig, is_full: bool) -> None:
    database = rig.server.writer.journal._database
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count={pages if is_full else 1 << 30}").fetchone()


def test_with_a_full_disk_new_requests_are_refused_and_running_ones_reach_their_clients(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        epoch = await rig.register()
        await rig.submit(new_request("r", new=100))
        await rig.submit("s")
        await rig.orders(epoch)
        full(rig, True)
        refused = await rig.submit(new_request("large", prompt=4000, fingerprint="f", may_exist=True))
        assert refused.kind == "unavailable" and "disk is full" in refused.error and refused.number is None
        assert (await rig.submit("another")).kind == "unavailable"
        pieces = [Piece(1, 0, "t" * 3000, [5] * 10, None, None) for _ in range(8)]
        for count, one in enumerate(pieces):
            await rig.report(epoch, 1 + count, one)
        await rig.report(epoch, 9, RequestEnd(1, [], 0))
        assert rig.server.status()["journal"]["fault"] is not None and rig.server.writer.num_unwritten
        assert await rig.read() == {1: (0, [*pieces, RequestEnd(1, [], 0)])}
        assert await rig.read(positions={1: 3}) == {1: (3, [*pieces[3:], RequestEnd(1, [], 0)])}, "its answer was lost"
        assert (await rig.submit(new_request("r", may_exist=True), "other")).number == 1
        assert await rig.read("other") == {1: (0, [*pieces, RequestEnd(1, [], 0)])}
        full(rig, False)
        async with asyncio.timeout(30):
            while rig.server.writer.fault is not None:
                await asyncio.sleep(0.001)
        again = await rig.submit(new_request("large", prompt=4000, fingerprint="f", may_exist=True))
        assert again.number is not None and again.request is None, "it begins: the refused one left nothing"
        rig.server._followers.forget(1.0, 1.0)
        assert 1 not in rig.server._followers
        await rig.restart()
        assert {one.request.request_id for one in rig.server.queue.entries.values()} == {"s", "large"}
        assert await rig.read(positions={1: 0}) == {1: (0, [*pieces, RequestEnd(1, [], 0)])}

    with_rig(check)


def test_a_request_that_was_assigned_before_its_commit_failed_is_aborted_at_its_worker(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        epoch = await rig.register()
        await rig.orders(epoch)
        full(rig, True)
        with rig.server.writer._lock:
            submitting = asyncio.ensure_future(rig.submit(new_request("r", prompt=4000)))
            await asyncio.sleep(0)
            (assignment,) = (await rig.orders(epoch)).assignments
            reporting = asyncio.ensure_future(rig.report(epoch, 1, piece(assignment.number, 5)))
            await asyncio.sleep(0)
        assert (await submitting).kind == "unavailable"
        await reporting
        assert (await rig.orders(epoch)).cancelled == [1] and not rig.server.queue.entries
        await rig.report(epoch, 2, piece(1, 6))
        assert await rig.read() in ({}, {1: (0, [piece(1, 5)])})
        full(rig, False)

    with_rig(check)


def test_a_cancelled_request_ends_once_whoever_follows_it(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        epoch = await rig.register()
        await rig.submit("r")
        await rig.server.attach("other", "r", "", "")
        await rig.orders(epoch)
        await rig.report(epoch, 1, piece(1, 5))
        await asyncio.gather(*(rig.server.leave("front", [1], True) for _ in range(3)))
        assert (await rig.orders(epoch)).cancelled == [1]
        await rig.report(epoch, 2, piece(1, 6), RequestEnd(1, [], 0))
        (_, records) = (await rig.read("other"))[1]
        assert records == [piece(1, 5), Failed(1, "unavailable", "the request was cancelled by its client")]
        assert await rig.read("front") == {}
        await rig.server.leave("front", [1, 77], True)

    with_rig(check)


def test_leaving_without_cancelling_lets_the_request_go_on(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        epoch = await rig.register()
        await rig.submit("r")
        await rig.orders(epoch)
        await rig.server.leave("front", [1], False)
        await rig.report(epoch, 1, piece(1, 5))
        assert await rig.read() == {} and 1 in rig.server.queue.entries
        await rig.server.attach("front", "r", "", "")
        assert await rig.read() == {1: (0, [piece(1, 5)])}

    with_rig(check)


def test_a_repeated_report_is_recorded_once(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        epoch = await rig.register()
        await rig.submit("r")
        await rig.orders(epoch)
        await asyncio.gather(*(rig.report(epoch, 1, piece(1, 5)) for _ in range(3)))
        assert await rig.read() == {1: (0, [piece(1, 5)])}
        assert rig.server.queue.counters.repeated_reports == 2

    with_rig(check)


def test_orders_wake_a_pull_that_waits(with_rig: With, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(rig: Rig) -> None:
        monkeypatch.setattr(server_module, "PULL_S", 60.0)
        epoch = await rig.register()
        pulling = asyncio.ensure_future(rig.orders(epoch))
        await asyncio.sleep(0)
        await rig.submit("r")
        assert [one.number for one in (await pulling).assignments] == [1]
        pulling = asyncio.ensure_future(rig.orders(epoch))
        await asyncio.sleep(0)
        rig.server.lose("w", "has ended")
        with pytest.raises(StaleEpoch):
            await pulling

    with_rig(check)


def test_a_worker_that_hangs_is_lost_by_the_clock_and_one_that_pulls_is_not(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        rig.server.start()
        hanging, alive = await rig.register("w"), await rig.register("v")
        await rig.submit("r")
        both = {"w": await rig.orders(hanging), "v": await rig.orders(alive, "v")}
        assert sum(len(one.assignments) for one in both.values()) == 1
        rig.clock.now += rig.options.hang_s * 0.9
        await rig.orders(alive, "v")
        rig.clock.now += rig.options.hang_s * 0.9
        async with asyncio.timeout(30):
            while rig.server.queue.workers.find("w") is not None:
                await asyncio.sleep(0.005)
        assert rig.server.queue.workers.find("v") is not None
        with pytest.raises(StaleEpoch):
            await rig.report(hanging, 1, piece(1, 5))
        with pytest.raises(StaleEpoch):
            await rig.server.cache("w", hanging, server_module.CacheChanges())
        assert (await rig.register("w")) > alive > hanging

    with_rig(check, hang_s=0.5)


def test_a_front_end_that_was_forgotten_gets_what_it_has_not_read(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        epoch = await rig.register()
        await rig.submit("r")
        await rig.submit("s")
        await rig.orders(epoch)
        await rig.report(epoch, 1, piece(1, 5))
        await rig.read()
        rig.clock.now += server_module.GONE_S + 1.0
        rig.server._followers.forget(server_module.GONE_S, rig.options.keep_s)
        assert rig.server.status()["front_ends"] == {}
        await rig.report(epoch, 2, piece(1, 6), piece(2, 7), RequestEnd(2, [], 0))
        assert (await rig.submit("t")).number == 3  # it submits before it reads
        assert await rig.read() == {1: (1, [piece(1, 6)]), 2: (0, [piece(2, 7), RequestEnd(2, [], 0)])}

    with_rig(check)


def test_the_answer_to_a_read_is_lost_and_the_next_one_has_its_records(with_rig: With, monkeypatch: Any) -> None:
    async def check(rig: Rig) -> None:
        monkeypatch.setattr(server_module, "READ_S", 60.0)
        epoch = await rig.register()
        await rig.submit("r")
        await rig.orders(epoch)
        lost = asyncio.ensure_future(rig.server.read("front"))  # the link fails, and the queue does not know
        await asyncio.sleep(0)
        again = asyncio.ensure_future(rig.server.read("front", {1: 0}))
        await asyncio.sleep(0)
        await rig.report(epoch, 1, piece(1, 5))
        assert await lost == Deliveries() and (await again).records[1][0] == 0

    with_rig(check)


def test_refusals_to_attach_leave_no_output_in_memory(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        epoch = await rig.register()
        await rig.submit(new_request("r", tenant="a"))
        await rig.orders(epoch)
        await rig.report(epoch, 1, RequestEnd(1, [], 0))
        await rig.read()
        assert (await rig.server.attach("other", "r", "b", "")).kind == "not_found"
        rig.server._followers.forget(1.0, 1.0)
        assert 1 not in rig.server._followers

    with_rig(check)


def test_a_held_journal_or_a_damaged_one_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        options = QueueOptions(tmp_path / "journal.sqlite")
        server = QueueServer(options)
        with pytest.raises(JournalError, match="is in use by another queue"):
            QueueServer(options)
        await server.submit("front", [new_request("r")])
        server.writer.journal._database.execute("UPDATE requests SET data = x'ff'")
        await server.close()
        with pytest.raises(JournalError, match=r"journal\.sqlite cannot be opened"):
            QueueServer(options)
        with pytest.raises(JournalError, match=r"journal\.sqlite cannot be opened"):  # and not "in use"
            QueueServer(options)

    asyncio.run(main())


def test_ended_requests_are_forgotten_by_number_and_by_age(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        epoch = await rig.register("w", 64)
        for place in range(10):
            await rig.submit(f"r{place}")
        await rig.orders(epoch)
        await rig.report(epoch, 1, *(RequestEnd(number, [], 0) for number in range(1, 10)))
        await rig.read()
        await rig.server.writer.forget(0.0, 3)
        found = [(await rig.server.attach("other", f"r{place}", "", "")).number for place in range(10)]
        assert found == [None] * 6 + [7, 8, 9, 10]
        await rig.restart()
        assert (await rig.submit("next")).number == 11

    with_rig(check)


def test_closing_twice_the_timers_are_gone(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        full(rig, True)
        await rig.submit(new_request("r", prompt=4000))
        assert rig.server.writer._retry is not None
        full(rig, False)

    with_rig(check)


def test_a_prompt_without_room_in_any_worker_is_refused(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        await rig.server.register(Registration("w", MODEL, 8, worker_state(4)))
        answer = await rig.submit(new_request("r", prompt=100))
        assert answer.kind == "too_long" and "need 7 blocks" in answer.error and "may have 4" in answer.error

    with_rig(check)


def test_another_start_of_the_fleet_takes_the_settings_and_a_restart_of_the_queue_keeps_what_was_changed(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        def opened(start_id: str) -> QueueServer:
            return QueueServer(QueueOptions(tmp_path / "journal.sqlite", start_id=start_id))

        server = opened("first")
        await server.register(Registration("a", MODEL, 8, worker_state()))
        await server.writer.set_fact("workers", [["worker-5"], 6])
        await server.close()
        server = opened("first")
        assert server.queue.workers.model is not None
        assert await server.writer.fact("workers") == [["worker-5"], 6]
        (answer,) = await server.submit("front", [new_request("r")])
        await server.close()
        server = opened("second")
        assert server.queue.workers.model is not None, "a request of this model is unfinished"
        assert await server.writer.fact("workers") is None
        assert answer.number is not None
        await server.leave("front", [answer.number], True)
        await server.close()
        server = opened("third")
        assert server.queue.workers.model is None, "nothing is left that another model could not continue"
        await server.close()

    asyncio.run(check())
