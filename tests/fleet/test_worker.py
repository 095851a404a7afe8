"""A worker: continues what it is assigned, reports it under its epoch, and hands back what its engine fails on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pagetide import EngineClosed
from pagetide.fleet import worker as worker_module
from pagetide.fleet.messages import Assignment, WorkerRefused, decode_record
from pagetide.fleet.output_log import OutputLog
from pagetide.fleet.worker import EngineHangs, FleetWorker
from pagetide.scheduler.request import NO_TOKEN_LEFT, PromptTooLong, RequestRejected
from pagetide.server.messages import Failed, Piece, RequestEnd
from tests.fleet_stand_ins import FAR_S, MODEL, QueueRig, StandInEngine, UnreliableLink, new_request, outputs_of, until


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "AGAIN_S", 0.001)
    monkeypatch.setattr(worker_module, "STATE_EVERY_S", 0.01)


class Rig(QueueRig):
    """The queue's journal is read for what has ended."""

    async def submit(self, request_id: str, **how: Any) -> int:
        (answer,) = await self.server.submit("front", [new_request(request_id, **how)])
        assert answer.number is not None, answer.error
        return answer.number

    async def ended(self, number: int) -> OutputLog:
        """The output of a request once it has ended."""
        await until(lambda: number not in self.server.queue.entries)
        await self.server.writer.commit()
        stored = await self.server.writer.find_number(number)
        assert stored is not None
        log = OutputLog(stored.request)
        for data in stored.records:
            log.append(decode_record(data), data)
        assert log.end is not None
        return log


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def tokens_of(log: OutputLog) -> list[list[int]]:
    return [one.token_ids for one in log.sequences]


async def test_what_a_request_itself_rules_out_is_its_end_at_once(rig: Rig) -> None:
    engine = StandInEngine(fault=lambda handover, position: NO_TOKEN_LEFT if position == 2 else None)
    await rig.start(a=engine)
    log = await rig.ended(await rig.submit("r"))
    assert isinstance(log.end, RequestEnd) and log.sequences[0].finish_reason == "error"
    assert rig.server.queue.counters.faults == 0 and engine.num_started == 1
    last = decode_record(log.records[-2])
    assert isinstance(last, Piece) and last.error == NO_TOKEN_LEFT


async def test_a_request_that_the_engine_rejects_fails_with_its_words(rig: Rig) -> None:
    errors = {"invalid": RequestRejected("no such bias"), "too_long": PromptTooLong("too long")}
    await rig.start(a=StandInEngine(refusals=list(errors.values())))
    for kind, error in errors.items():
        number = await rig.submit(kind)
        assert (await rig.ended(number)).end == Failed(number, kind, str(error))  # type: ignore[arg-type]


async def test_an_engine_that_raises_hands_the_request_back_like_one_that_fails_in_a_step(rig: Rig) -> None:
    broken = StandInEngine(refusals=[RuntimeError("the engine thread has died")])
    await rig.start(a=broken)
    number = await rig.submit("r")
    await until(lambda: rig.server.queue.counters.faults >= 1)
    assert tokens_of(await rig.ended(number)) == outputs_of(new_request("r"))


async def test_a_request_in_an_engine_that_is_being_closed_goes_on_elsewhere_and_is_no_failure(rig: Rig) -> None:
    closing = StandInEngine(refusals=[EngineClosed("this LLM is closed")])
    await rig.start(a=closing)
    number = await rig.submit("r")
    await until(lambda: not rig.workers["a"]._tasks and not rig.server.queue.num_waiting)
    rig.tasks["a"].cancel()
    rig.server.lose("a", "has ended")
    rig.add("b", StandInEngine())
    assert tokens_of(await rig.ended(number)) == outputs_of(new_request("r"))
    assert rig.server.queue.counters.failed == rig.server.queue.counters.faults == 0


async def test_a_drained_worker_hands_over_and_ends_and_its_requests_go_on(rig: Rig) -> None:
    engines = {name: StandInEngine(held_at=4) for name in "ab"}
    await rig.start(**engines)
    numbers = [await rig.submit(f"r{i}", new=12, n=2) for i in range(8)]
    await until(lambda: all(one.log.num_tokens == 8 for one in rig.server.queue.entries.values()))
    assert rig.server.queue.workers.get("a").running
    rig.server.drain("a")
    await asyncio.wait_for(asyncio.shield(rig.tasks["a"]), FAR_S)
    assert not engines["a"].num_running
    engines["b"].held_at = 1 << 30
    for place, number in enumerate(numbers):
        assert tokens_of(await rig.ended(number)) == outputs_of(new_request(f"r{place}", new=12, n=2))


async def test_requests_are_handed_back_on_a_recall_while_another_worker_has_room(rig: Rig) -> None:
    engines = {name: StandInEngine(limit=100, held_at=1) for name in "ab"}
    await rig.start(**engines)
    numbers = [await rig.submit(f"r{i}", prompt=160, new=8) for i in range(6)]
    await until(lambda: all(one.log.num_tokens for one in rig.server.queue.entries.values()))
    before = len(rig.server.queue.workers.get("a").running)
    engines["a"].limit = 15
    await until(lambda: len(rig.server.queue.workers.get("a").running) == 1)
    await until(lambda: len(rig.server.queue.workers.get("b").running) == 5)
    assert rig.server.queue.counters.returned == before - 1
    for engine in engines.values():
        engine.held_at = 1 << 30
    for place, number in enumerate(numbers):
        assert tokens_of(await rig.ended(number)) == outputs_of(new_request(f"r{place}", prompt=160, new=8))


async def test_a_worker_with_another_model_is_refused_with_both_named_and_ends(rig: Rig) -> None:
    await rig.start(a=StandInEngine())
    task = rig.add("b", StandInEngine(), identity="2", name="another")
    with pytest.raises(
        WorkerRefused, match=r"the worker b has identity '2' instead of '1' .the model another instead of stand-in"
    ):
        await asyncio.wait_for(task, FAR_S)
    for change in ({"dtype": "float16"}, {"layout": "int8"}, {"block_size": 32}, {"max_model_len": 4}):
        with pytest.raises(WorkerRefused, match=next(iter(change))):
            await rig.add("b", StandInEngine(), **change)
    assert [worker.name for worker in rig.server.queue.workers] == ["a"]
    del rig.engines["b"]


async def test_a_released_request_whose_end_is_in_the_buffer_is_not_handed_back() -> None:
    worker = FleetWorker("a", StandInEngine(), MODEL, UnreliableLink(None))  # type: ignore[arg-type]
    request = new_request("r", new=2)
    await worker._generate(Assignment(1, OutputLog(request).handovers()))
    await worker._follow(worker_module.Orders(released=[1, 2], cancelled=[3]))
    records, released, faults = worker._buffer.take()
    assert [type(decode_record(data)) for data in records] == [Piece, RequestEnd] and (released, faults) == ([], {})


async def test_what_was_assigned_and_released_at_once_is_handed_back_without_records() -> None:
    worker = FleetWorker("a", StandInEngine(), MODEL, UnreliableLink(None))  # type: ignore[arg-type]
    assignment = Assignment(1, OutputLog(new_request("r")).handovers())
    await worker._follow(worker_module.Orders([assignment], released=[1]))
    assert worker._buffer.take() == ([], [1], {}) and not worker._tasks
    await worker._follow(worker_module.Orders([assignment], cancelled=[1]))
    assert worker._buffer.take() == ([], [], {}) and not worker._tasks


async def test_a_worker_whose_engine_hangs_ends_without_waiting_for_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "BEAT_S", 0.001)
    await rig.start(a=(engine := StandInEngine(held_at=1)))
    number = await rig.submit("r")
    await until(lambda: bool(rig.workers["a"]._tasks))
    engine.heartbeat = (7, 0.01)
    with pytest.raises(EngineHangs, match=r"its engine came no further for 0\.01 s"):
        await rig.tasks["a"]
    rig.server.lose("a", "failed: its engine came no further for 0.01 s")
    assert rig.server.queue.entries[number].failures.reasons == ["failed: its engine came no further for 0.01 s"]
    engine.held_at = 1 << 30  # the stand-in, unlike one that hangs, can still be ended
    rig.add("b", StandInEngine())
    assert tokens_of(await rig.ended(number)) == outputs_of(new_request("r"))
