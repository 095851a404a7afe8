"""A worker: continues what it is assigned, reports it under its epoch, and hands back what its engine fails on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pagetide import EngineClosed
from pagetide.fleet import worker as worker_module
from pagetide.fleet.messages import Assignment, StaleEpoch, WorkerRefused, decode_record
from pagetide.fleet.output_log import OutputLog
from pagetide.fleet.queue_server import QueueOptions, QueueServer
from pagetide.fleet.worker import FleetWorker
from pagetide.scheduler.errors import NO_TOKEN_LEFT, PromptTooLong, RequestRejected
from pagetide.server.messages import Failed, Piece, RequestEnd
from tests.fleet_stand_ins import MODEL, StandInEngine, UnreliableLink, new_request, other_model, outputs_of

FAR_S = 60.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "AGAIN_S", 0.001)
    monkeypatch.setattr(worker_module, "STATE_EVERY_S", 0.01)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(FAR_S):
        while not condition():
            await asyncio.sleep(0.001)


class Rig:
    """A queue and workers around stand-in engines. `records` has what the queue shows of each request."""

    def __init__(self, folder: Path, **engines: StandInEngine) -> None:
        self.now = 0.0
        self.options = QueueOptions(folder / "journal.sqlite")
        self.server = QueueServer(self.options, lambda: self.now)
        self.server.start()
        self.link = UnreliableLink(self.server)
        self.engines = engines
        self.workers: dict[str, FleetWorker] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        for name, engine in self.engines.items():
            self.add(name, engine)
        await until(lambda: len(self.server.queue.workers) == len(self.engines))

    def add(self, name: str, engine: StandInEngine, /, **model: Any) -> asyncio.Task[None]:
        self.engines[name] = engine
        worker = self.workers[name] = FleetWorker(name, engine, other_model(**model), self.link)  # type: ignore[arg-type]
        self.tasks[name] = asyncio.create_task(worker.run())
        return self.tasks[name]

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

    async def stop(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        self.server.queue.check_invariants()
        assert all(not engine.num_running for engine in self.engines.values()), "a stream is left in an engine"
        await self.server.close()


@pytest.fixture
def with_rig(tmp_path: Path) -> Callable[..., None]:
    def run(check: Callable[[Rig], Awaitable[None]], **engines: StandInEngine) -> None:
        async def main() -> None:
            rig = Rig(tmp_path, **engines)
            await rig.start()
            await check(rig)
            await rig.stop()

        asyncio.run(main())

    return run


With = Callable[..., None]


def tokens_of(log: OutputLog) -> list[list[int]]:
    return [one.token_ids for one in log.sequences]


def test_requests_end_with_their_outputs(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        numbers = [await rig.submit(f"r{i}", new=20, n=1 + i % 3, logprobs=1 if i % 2 else None) for i in range(12)]
        for number, log in [(number, await rig.ended(number)) for number in numbers]:
            request = new_request(f"r{number - 1}", new=20, n=1 + (number - 1) % 3)
            assert isinstance(log.end, RequestEnd) and tokens_of(log) == outputs_of(request)
            assert all(len(one.scores) == (0 if number % 2 else 20) for one in log.sequences)

    with_rig(check, a=StandInEngine(), b=StandInEngine())


def test_an_engine_fault_moves_the_request_and_the_tokens_are_those_without_it(with_rig: With) -> None:
    broken = StandInEngine()
    broken.fault = lambda handover, position: "RuntimeError: CUDA error" if position == 3 else None
    broken.held_at = 2

    async def check(rig: Rig) -> None:
        number = await rig.submit("r", new=8, n=3)
        await until(lambda: rig.server.queue.entries[number].log.num_tokens > 0)
        rig.add("b", StandInEngine())
        await until(lambda: len(rig.server.queue.workers) == 2)
        broken.held_at = 1 << 30
        log = await rig.ended(number)
        assert rig.server.queue.counters.faults == 1
        assert isinstance(log.end, RequestEnd) and tokens_of(log) == outputs_of(new_request("r", new=8, n=3))
        assert [one.finish_reason for one in log.sequences] == ["length"] * 3

    with_rig(check, a=broken)


def test_a_request_that_every_engine_fails_on_ends_with_the_engines_error_and_others_do_not(with_rig: With) -> None:
    engines = [StandInEngine(), StandInEngine()]
    for engine in engines:
        engine.fault = lambda handover, position: "the step failed" if len(handover["prompt_token_ids"]) == 33 else None

    async def check(rig: Rig) -> None:
        bad, good = await rig.submit("bad", prompt=33), await rig.submit("good")
        log = await rig.ended(bad)
        assert log.end == Failed(bad, "internal", "the step failed")
        assert rig.server.queue.counters.faults == 3
        assert tokens_of(await rig.ended(good)) == outputs_of(new_request("good"))
        assert engines[0].num_started and engines[1].num_started, "it went on elsewhere"

    with_rig(check, a=engines[0], b=engines[1])


def test_what_a_request_itself_rules_out_is_its_end_at_once(with_rig: With) -> None:
    engine = StandInEngine()
    engine.fault = lambda handover, position: NO_TOKEN_LEFT if position == 2 else None

    async def check(rig: Rig) -> None:
        log = await rig.ended(await rig.submit("r"))
        assert isinstance(log.end, RequestEnd) and log.sequences[0].finish_reason == "error"
        assert rig.server.queue.counters.faults == 0 and engine.num_started == 1
        last = decode_record(log.records[-2])
        assert isinstance(last, Piece) and last.error == NO_TOKEN_LEFT

    with_rig(check, a=engine)


@pytest.mark.parametrize(
    ("error", "kind"), [(RequestRejected("no such bias"), "invalid"), (PromptTooLong("too long"), "too_long")]
)
def test_a_request_that_the_engine_rejects_fails_with_its_words(with_rig: With, error: Exception, kind: Any) -> None:
    engine = StandInEngine()
    engine.refusals = [error]

    async def check(rig: Rig) -> None:
        number = await rig.submit("r")
        assert (await rig.ended(number)).end == Failed(number, kind, str(error))

    with_rig(check, a=engine)


def test_an_engine_that_raises_hands_the_request_back_like_one_that_fails_in_a_step(with_rig: With) -> None:
    broken = StandInEngine()
    broken.refusals = [RuntimeError("the engine thread has died")]

    async def check(rig: Rig) -> None:
        number = await rig.submit("r")
        await until(lambda: rig.server.queue.counters.faults >= 1)
        assert tokens_of(await rig.ended(number)) == outputs_of(new_request("r"))

    with_rig(check, a=broken)


def test_a_request_in_an_engine_that_is_being_closed_goes_on_elsewhere_and_is_no_failure(with_rig: With) -> None:
    closing = StandInEngine()
    closing.refusals = [EngineClosed("this LLM is closed")]

    async def check(rig: Rig) -> None:
        number = await rig.submit("r")
        await until(lambda: not rig.workers["a"]._tasks and not rig.server.queue.num_waiting)
        rig.tasks["a"].cancel()
        rig.server.lose("a", "has ended")
        rig.add("b", StandInEngine())
        assert tokens_of(await rig.ended(number)) == outputs_of(new_request("r"))
        assert rig.server.queue.counters.failed == rig.server.queue.counters.faults == 0

    with_rig(check, a=closing)


def test_a_worker_that_hangs_loses_its_requests_and_comes_back_under_a_new_epoch(with_rig: With) -> None:
    slow, quick = StandInEngine(), StandInEngine()
    slow.held_at = 2

    async def check(rig: Rig) -> None:
        number = await rig.submit("r", new=10)
        await until(lambda: rig.server.queue.entries[number].log.num_tokens == 2)
        old = rig.server.queue.workers.get("a").epoch
        rig.link.fails = lambda method: "before"  # it says nothing more
        await until(lambda: rig.workers["a"]._buffer.is_empty and not slow.num_running)
        rig.now += rig.options.hang_s + 1.0
        await until(lambda: not len(rig.server.queue.workers))
        assert rig.server.queue.num_waiting == 1
        with pytest.raises(StaleEpoch):
            await rig.server.pull("a", old)
        rig.link.fails = lambda method: ""
        slow.held_at = 1 << 30
        assert tokens_of(await rig.ended(number)) == outputs_of(new_request("r", new=10))
        assert rig.server.queue.workers.get("a").epoch > old and rig.workers["a"].num_epochs == 2

    with_rig(check, a=slow)
    assert quick.num_started == 0


@pytest.mark.parametrize("fault", ["before", "after"])
@pytest.mark.parametrize("method", ["register", "cache", "pull", "report"])
def test_a_worker_begins_anew_when_any_call_fails(with_rig: With, method: str, fault: str) -> None:
    async def check(rig: Rig) -> None:
        count = 0

        def fails(called: str) -> str:
            nonlocal count
            count += called == method
            return fault if called == method and count in (2, 5) else ""

        rig.link.fails = fails
        if method in ("register", "cache"):  # called once an epoch
            rig.server.lose("a", "is lost")
        numbers = [await rig.submit(f"r{i}", new=30) for i in range(4)]
        for number in numbers:
            log = await rig.ended(number)
            assert tokens_of(log) == outputs_of(new_request(f"r{number - 1}", new=30))
        rig.server.lose("a", "is lost")
        await until(lambda: count >= 3)

    with_rig(check, a=StandInEngine())


def test_a_cancelled_request_is_aborted_in_the_engine_and_nothing_of_it_is_reported(with_rig: With) -> None:
    engine = StandInEngine()
    engine.held_at = 3

    async def check(rig: Rig) -> None:
        number = await rig.submit("r")
        await until(lambda: rig.server.queue.entries[number].log.num_tokens == 3)
        await rig.server.leave("front", [number], True)
        await until(lambda: engine.num_running == 0)
        log = await rig.ended(number)
        assert isinstance(log.end, Failed) and log.end.error == "the request was cancelled by its client"

    with_rig(check, a=engine)


def test_a_drained_worker_hands_over_and_ends_and_its_requests_go_on(with_rig: With) -> None:
    engines = {"a": StandInEngine(), "b": StandInEngine()}
    for engine in engines.values():
        engine.held_at = 4

    async def check(rig: Rig) -> None:
        numbers = [await rig.submit(f"r{i}", new=12, n=2) for i in range(8)]
        await until(lambda: all(one.log.num_tokens == 8 for one in rig.server.queue.entries.values()))
        assert rig.server.queue.workers.get("a").running
        rig.server.drain("a")
        await asyncio.wait_for(asyncio.shield(rig.tasks["a"]), FAR_S)
        assert not engines["a"].num_running
        engines["b"].held_at = 1 << 30
        for place, number in enumerate(numbers):
            assert tokens_of(await rig.ended(number)) == outputs_of(new_request(f"r{place}", new=12, n=2))

    with_rig(check, **engines)


def test_the_last_worker_ends_once_its_requests_have_ended_there(with_rig: With) -> None:
    engine = StandInEngine()
    engine.held_at = 2

    async def check(rig: Rig) -> None:
        number = await rig.submit("r")
        await until(lambda: rig.server.queue.entries[number].log.num_tokens == 2)
        rig.server.drain("a")
        later = await rig.submit("later")
        engine.held_at = 1 << 30
        await asyncio.wait_for(asyncio.shield(rig.tasks["a"]), FAR_S)
        assert tokens_of(await rig.ended(number)) == outputs_of(new_request("r"))
        assert rig.server.queue.num_waiting == 1
        rig.add("b", StandInEngine())
        assert tokens_of(await rig.ended(later)) == outputs_of(new_request("later"))

    with_rig(check, a=engine)


def test_requests_are_handed_back_on_a_recall_while_another_worker_has_room(with_rig: With) -> None:
    engines = {"a": StandInEngine(limit=100), "b": StandInEngine(limit=100)}
    for engine in engines.values():
        engine.held_at = 1

    async def check(rig: Rig) -> None:
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

    with_rig(check, **engines)


def test_a_worker_with_another_model_is_refused_with_both_named_and_ends(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
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

    with_rig(check, a=StandInEngine())


def test_a_released_request_whose_end_is_in_the_buffer_is_not_handed_back() -> None:
    async def main() -> None:
        worker = FleetWorker("a", StandInEngine(), MODEL, UnreliableLink(None))  # type: ignore[arg-type]
        request = new_request("r", new=2)
        await worker._generate(Assignment(1, OutputLog(request).handovers()))
        await worker._follow(worker_module.Orders(released=[1, 2], cancelled=[3]))
        records, released, faults = worker._buffer.take()
        assert [type(decode_record(data)) for data in records] == [Piece, RequestEnd] and (released, faults) == ([], {})

    asyncio.run(main())


def test_what_was_assigned_and_released_at_once_is_handed_back_without_records() -> None:
    async def main() -> None:
        worker = FleetWorker("a", StandInEngine(), MODEL, UnreliableLink(None))  # type: ignore[arg-type]
        assignment = Assignment(1, OutputLog(new_request("r")).handovers())
        await worker._follow(worker_module.Orders([assignment], released=[1]))
        assert worker._buffer.take() == ([], [1], {}) and not worker._tasks
        await worker._follow(worker_module.Orders([assignment], cancelled=[1]))
        assert worker._buffer.take() == ([], [], {}) and not worker._tasks

    asyncio.run(main())
