"""The queue's service: what it acknowledges is journaled, each request ends once, and it goes on after a kill at any moment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pagetide.fleet import queue_server as server_module
from pagetide.fleet.journal import JournalError, JournalWriter
from pagetide.fleet.messages import (
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
from pagetide.fleet.queue_server import CONFLICT, UNKNOWN, UNREAD, QueueOptions, QueueServer
from pagetide.fleet.request_queue import CANCELLED
from pagetide.fleet_command import describe
from pagetide.server.messages import Failed, Piece, RequestEnd
from tests.fleet_stand_ins import MODEL, QueueRig, new_request, other_model, until, worker_state


class Rig(QueueRig):
    """Without workers of its own: tests call the queue as workers and front ends do."""

    async def running(self, *requests: NewRequest | str) -> int:
        """Submit these requests, and assign them to a worker. Its epoch."""
        epoch = await self.register()
        for request in requests:
            await self.submit(request)
        await self.orders(epoch)
        return epoch

    async def register(self, name: str = "w", /, **model: Any) -> int:
        return await self.server.register(Registration(name, other_model(**model), 64, worker_state()))

    async def submit(self, request: NewRequest | str, front: str = "front") -> Submission:
        (answer,) = await self.server.submit(front, [request if isinstance(request, NewRequest) else new_request(request)])
        return answer

    async def orders(self, epoch: int, name: str = "w") -> Orders:
        return await self.server.pull(name, epoch)

    async def report(self, epoch: int, sequence: int, *records: Any, **more: Any) -> None:
        await self.server.report(Report("w", epoch, sequence, [encode_record(one) for one in records], **more))

    async def read(self, front: str = "front", positions: dict[int, int] | None = None) -> dict[int, Any]:
        """What a front end is delivered: the position and the decoded records by request."""
        found = await self.server.read(front, positions)
        return {number: (at, [decode_record(one) for one in records]) for number, (at, records) in found.records.items()}


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(server_module, "PULL_S", 0.001)
    monkeypatch.setattr(server_module, "READ_S", 0.001)
    monkeypatch.setattr(JournalWriter, "RETRY_S", 0.005)
    return Rig(tmp_path)


def piece(number: int, *tokens: int, reason: Any = None) -> Piece:
    return Piece(number, 0, "t" * len(tokens), list(tokens), None, reason)


async def test_a_record_is_shown_after_its_commit_and_never_before(rig: Rig) -> None:
    epoch = await rig.running("r")
    with rig.server.writer._lock:  # the disk is slow
        reporting = asyncio.ensure_future(rig.report(epoch, 1, piece(1, 5)))
        assert await rig.read() == {} and not reporting.done()
    await reporting
    assert await rig.read() == {1: (0, [piece(1, 5)])}


async def test_the_secret_the_model_and_what_was_drained_outlast_the_queue(rig: Rig) -> None:
    await rig.register("w")
    stale = await rig.register("v")
    rig.server.drain("w")
    await rig.server.writer.commit()
    before = await rig.server.info(0.0)
    await rig.restart()
    after = await rig.server.info(0.0)
    assert before is not None and after is not None
    assert (before.secret, before.model) == (after.secret, after.model) and len(after.secret) == 32
    assert await rig.register("v") > stale
    epoch = await rig.register("w")
    await rig.submit("r")
    orders = await rig.orders(epoch)
    assert orders.stop and not orders.assignments, "it was ordered to end before"
    with pytest.raises(WorkerRefused, match="the model another instead of stand-in"):
        await rig.register("x", identity="2", name="another")


async def test_a_submission_that_is_repeated_attaches_and_another_body_or_tenant_does_not(rig: Rig) -> None:
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


@pytest.mark.parametrize("ended", [False, True])
async def test_an_id_that_is_used_again_attaches_and_is_no_fault_of_the_journal(rig: Rig, ended: bool) -> None:
    epoch = await rig.running("r")
    await rig.report(epoch, 1, piece(1, 5), *([RequestEnd(1, [], 0)] if ended else []))
    answers = await rig.server.submit("other", [new_request("r"), new_request("s")])
    assert [answer.number for answer in answers] == [1, 3 if ended else 2]
    assert rig.server.writer.fault is None
    records = [piece(1, 5), *([RequestEnd(1, [], 0)] if ended else [])]
    assert await rig.read("other") == {1: (0, records)}
    refused = await rig.submit(new_request("r", tenant="b"))
    assert refused == Submission(kind="not_found", error=UNKNOWN)
    if ended:
        await rig.server.leave("other", [3], True)
    await rig.restart()
    assert [one.request.request_id for one in rig.server.queue.entries.values()] == ([] if ended else ["r", "s"])
    assert (await rig.submit("t")).number == (4 if ended else 3), "a number is not given twice"


@pytest.mark.parametrize("how", ["attach", "submit"])
@pytest.mark.parametrize("is_full", [False, True])
async def test_an_attachment_to_a_request_is_answered_after_the_commit_of_that_request(
    rig: Rig, how: str, is_full: bool
) -> None:
    """A queue that is killed before would give the request's number to another one."""
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


def full(rig: Rig, is_full: bool) -> None:
    database = rig.server.writer.journal._database
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count={pages if is_full else 1 << 30}").fetchone()


async def test_with_a_full_disk_new_requests_are_refused_and_running_ones_reach_their_clients(rig: Rig) -> None:
    epoch = await rig.running(new_request("r", new=100), "s")
    full(rig, True)
    refused = await rig.submit(new_request("large", prompt=4000, fingerprint="f", may_exist=True))
    assert refused.kind == "unavailable" and "disk is full" in refused.error and refused.number is None
    assert (await rig.submit("another")).kind == "unavailable"
    pieces = [Piece(1, 0, "t" * 3000, [5] * 10, None, None) for _ in range(8)]
    for count, one in enumerate(pieces):
        await rig.report(epoch, 1 + count, one)
    await rig.report(epoch, 9, RequestEnd(1, [], 0))
    assert (await rig.server.status())["journal"]["fault"] is not None and rig.server.writer.num_unwritten
    assert await rig.read() == {1: (0, [*pieces, RequestEnd(1, [], 0)])}
    assert await rig.read(positions={1: 3}) == {1: (3, [*pieces[3:], RequestEnd(1, [], 0)])}, "its answer was lost"
    assert (await rig.submit(new_request("r", may_exist=True), "other")).number == 1
    assert await rig.read("other") == {1: (0, [*pieces, RequestEnd(1, [], 0)])}
    full(rig, False)
    await until(lambda: rig.server.writer.fault is None)
    again = await rig.submit(new_request("large", prompt=4000, fingerprint="f", may_exist=True))
    assert again.number is not None and again.request is None, "it begins: the refused one left nothing"
    rig.server._followers.forget(1.0, 1.0)
    assert 1 not in rig.server._followers
    await rig.restart()
    assert {one.request.request_id for one in rig.server.queue.entries.values()} == {"s", "large"}
    assert await rig.read(positions={1: 0}) == {1: (0, [*pieces, RequestEnd(1, [], 0)])}


async def test_a_request_that_was_assigned_before_its_commit_failed_is_aborted_at_its_worker(rig: Rig) -> None:
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


async def test_orders_wake_a_pull_that_waits(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_a_worker_that_hangs_is_lost_by_the_clock_and_one_that_pulls_is_not(rig: Rig) -> None:
    rig.server.start()
    hanging, alive = await rig.register("w"), await rig.register("v")
    await rig.submit("r")
    both = {"w": await rig.orders(hanging), "v": await rig.orders(alive, "v")}
    assert sum(len(one.assignments) for one in both.values()) == 1
    rig.now += rig.options.hang_s * 0.9
    await rig.orders(alive, "v")
    rig.now += rig.options.hang_s * 0.9
    await until(lambda: rig.server.queue.workers.find("w") is None)
    assert rig.server.queue.workers.find("v") is not None
    with pytest.raises(StaleEpoch):
        await rig.report(hanging, 1, piece(1, 5))
    with pytest.raises(StaleEpoch):
        await rig.server.cache("w", hanging, server_module.CacheChanges())
    assert (await rig.register("w")) > alive > hanging


async def test_requests_are_cancelled_by_owner_operator_or_age_and_stay_so_over_a_restart(rig: Rig) -> None:
    rig.server.start()
    epoch = await rig.running(*(new_request(f"cmpl-a.{i}", tenant="bob") for i in range(3)))
    await rig.report(epoch, 1, piece(1, 5), RequestEnd(1, [], 0))
    cancel = rig.server.cancel
    assert await cancel("cmpl-a", "eve", 0.0, "no") is None and await cancel("cmpl-b", "bob", 0.0, "no") is None
    assert await cancel("cmpl-a", "bob", 0.0, CANCELLED) == 2
    assert (await rig.orders(epoch)).cancelled == [2, 3]
    assert await cancel("cmpl-a", "bob", 0.0, "again") == 0
    await rig.submit(new_request("old", tenant="eve"))
    rig.now += 10.0
    await rig.submit(new_request("new", tenant="eve"))
    await rig.submit(new_request("other", tenant="bob"))
    assert await cancel(None, None, 10.5, "no") == 0
    assert await cancel(None, "eve", 9.5, "by the operator") == 1
    await rig.server.leave("front", [5], False)
    rig.now += rig.options.unread_s + 1.0
    await until(lambda: 5 not in rig.server.queue.entries)
    assert list(rig.server.queue.entries) == [6] and rig.server.queue.counters.cancelled == 4
    assert rig.server.queue.counters.failed == 0
    await rig.server.writer.commit()
    await rig.restart()
    assert list(rig.server.queue.entries) == [6]
    assert (status := await rig.server.status())["tenants"] == {"bob": {"unfinished": 1, "waiting": 1, "oldest_s": 0.0}}
    assert describe(status).splitlines()[-1].split() == ["bob", "1", "1", "0", "s"]
    why = {2: CANCELLED, 3: CANCELLED, 4: "by the operator", 5: f"{UNREAD} for 3,600 s: it was cancelled"}
    for number, error in why.items():
        assert (await rig.read(f"front{number}", {number: 0}))[number][1][-1] == Failed(number, "cancelled", error)


async def test_deaths_count_over_a_restart_of_the_queue(rig: Rig) -> None:
    await rig.submit("r")
    for count in range(3):
        await rig.orders(await rig.register())
        rig.server.lose("w", f"died of {count}")
        await rig.server.writer.commit()
        await rig.restart()
    assert not rig.server.queue.entries
    (end,) = (await rig.read(positions={1: 0}))[1][1]
    assert isinstance(end, Failed) and end.kind == "internal"
    assert end.error.endswith(": w died of 0; w died of 1; w died of 2")


async def test_a_front_end_that_was_forgotten_gets_what_it_has_not_read(rig: Rig) -> None:
    epoch = await rig.running("r", "s")
    await rig.report(epoch, 1, piece(1, 5))
    await rig.read()
    rig.now += server_module.GONE_S + 1.0
    rig.server._followers.forget(server_module.GONE_S, rig.options.keep_s)
    assert (await rig.server.status())["front_ends"] == {}
    await rig.report(epoch, 2, piece(1, 6), piece(2, 7), RequestEnd(2, [], 0))
    assert (await rig.submit("t")).number == 3  # it submits before it reads
    assert await rig.read() == {1: (1, [piece(1, 6)]), 2: (0, [piece(2, 7), RequestEnd(2, [], 0)])}


async def test_refusals_to_attach_leave_no_output_in_memory(rig: Rig) -> None:
    epoch = await rig.running(new_request("r", tenant="a"))
    await rig.report(epoch, 1, RequestEnd(1, [], 0))
    await rig.read()
    assert (await rig.server.attach("other", "r", "b", "")).kind == "not_found"
    rig.server._followers.forget(1.0, 1.0)
    assert 1 not in rig.server._followers


async def test_a_held_journal_or_a_damaged_one_is_named(tmp_path: Path) -> None:
    options = QueueOptions(tmp_path / "journal.sqlite")
    server = QueueServer(options)
    with pytest.raises(JournalError, match="is in use by another queue"):
        QueueServer(options)
    await server.submit("front", [new_request("r")])
    server.writer.journal._database.execute("UPDATE requests SET data = x'ff'")
    await server.close()
    for _ in range(2):  # and not "in use"
        with pytest.raises(JournalError, match=r"journal\.sqlite is damaged: request 1 cannot be read"):
            QueueServer(options)


async def test_another_start_of_the_fleet_takes_the_settings_and_a_restart_of_the_queue_keeps_what_was_changed(
    tmp_path: Path,
) -> None:
    def opened(start_id: str) -> QueueServer:
        return QueueServer(QueueOptions(tmp_path / "journal.sqlite", start_id=start_id))

    server = opened("first")
    await server.register(Registration("a", MODEL, 8, worker_state()))
    await server.writer.set_fact("workers", [["worker-5"], 6])
    await server.close()
    server = opened("first")
    assert server.queue.workers.model is not None
    assert await server.writer.fact("workers", list) == [["worker-5"], 6]
    (answer,) = await server.submit("front", [new_request("r")])
    await server.close()
    server = opened("second")
    assert server.queue.workers.model is not None, "a request of this model is unfinished"
    assert await server.writer.fact("workers", list) is None
    assert answer.number is not None
    await server.leave("front", [answer.number], True)
    await server.close()
    server = opened("third")
    assert server.queue.workers.model is None, "nothing is left that another model could not continue"
    await server.close()
