"""A front end's side of the queue: all records once and in order, whatever calls fail and whenever the queue is killed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from pagetide.fleet import client as client_module
from pagetide.fleet import queue_server as server_module
from pagetide.fleet import worker as worker_module
from pagetide.fleet.client import FleetClient
from pagetide.fleet.messages import FleetInfo, NewRequest
from pagetide.fleet.queue_server import QueueOptions, QueueServer
from pagetide.fleet.worker import FleetWorker
from pagetide.server.choices import joined
from pagetide.server.engine_client import EngineUnavailable, Generation, RequestFailed
from pagetide.server.messages import Piece
from tests.fleet_stand_ins import MODEL, StandInEngine, UnreliableLink, kill, new_request, outputs_of, text_of

FAR_S = 60.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "AGAIN_S", 0.001)
    monkeypatch.setattr(worker_module, "AGAIN_S", 0.001)
    monkeypatch.setattr(worker_module, "STATE_EVERY_S", 0.01)
    monkeypatch.setattr(server_module, "READ_S", 0.05)
    monkeypatch.setattr(server_module, "PULL_S", 0.05)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(FAR_S):
        while not condition():
            await asyncio.sleep(0.001)


class Rig:
    """A queue with a journal, stand-in workers, and front ends that follow prepared requests."""

    def __init__(self, folder: Path) -> None:
        self.options = QueueOptions(folder / "journal.sqlite")
        self.server = QueueServer(self.options)
        self.server.start()
        self.engines = {"a": StandInEngine(max_seqs=6), "b": StandInEngine(max_seqs=6)}
        self.link = UnreliableLink(self.server)
        self.workers = {
            name: FleetWorker(name, engine, MODEL, self.link)  # type: ignore[arg-type]
            for name, engine in self.engines.items()
        }
        self.tasks = [asyncio.create_task(worker.run()) for worker in self.workers.values()]
        self.clients: list[FleetClient] = []

    def client(self) -> FleetClient:
        """A client without the model's tokenizer: it takes prepared requests."""
        client = FleetClient(self.link, "fleet", FleetInfo(MODEL, bytes(32), 12), cast(Any, None))
        for work in (client._read(), client._send(), client._refresh()):
            client._keep(work)
        self.clients.append(client)
        return client

    async def restart(self) -> None:
        """Kill the queue, and start it again from its journal."""
        self.link.cut()
        await kill(self.server)
        self.server = QueueServer(self.options)
        self.server.start()
        self.link.server = self.server

    async def stop(self) -> None:
        self.link.fails = lambda method: ""
        assert [client._tasks for client in self.clients if not client._tasks] == []
        for client in self.clients:
            assert client.num_unfinished == 0
            await client.stop()
        await until(lambda: not self.server.queue.entries)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.server.queue.check_invariants()
        await self.server.close()


async def ended(generation: Generation) -> dict[int, Piece]:
    """The whole output of a request by continuation. Raises its error."""
    await until(lambda: generation.finished is not None or generation.error is not None)
    if generation.error is not None:
        raise generation.error
    by_index: dict[int, list[Piece]] = {}
    for piece in generation.pieces:
        by_index.setdefault(piece.index, []).append(piece)
    return {index: joined(pieces) for index, pieces in sorted(by_index.items())}


def check_output(request: NewRequest, found: dict[int, Piece]) -> None:
    whole = outputs_of(request)
    assert [piece.token_ids for piece in found.values()] == whole
    assert [piece.text for piece in found.values()] == ["".join(map(text_of, tokens)) for tokens in whole]
    assert {piece.finish_reason for piece in found.values()} == {"length"}


@pytest.fixture
def with_rig(tmp_path: Path) -> Callable[..., None]:
    def run(check: Callable[[Rig], Awaitable[None]]) -> None:
        async def main() -> None:
            rig = Rig(tmp_path)
            await until(lambda: len(rig.server.queue.workers) == 2)
            await check(rig)
            await rig.stop()

        asyncio.run(main())

    return run


With = Callable[..., None]


@pytest.mark.parametrize(
    ("method", "fault"), [("submit", "before"), ("submit", "after"), ("read", "before"), ("read", "after")]
)
def test_a_call_that_fails_before_or_after_it_took_effect_changes_no_output(
    with_rig: With, method: str, fault: str
) -> None:
    async def check(rig: Rig) -> None:
        count = 0

        def fails(called: str) -> str:
            nonlocal count
            count += called == method
            return fault if called == method and count % 3 == 1 else ""

        client = rig.client()
        rig.link.fails = fails
        requests = [new_request(f"r{place}", new=30, n=1 + place % 2) for place in range(8)]
        generations = [client.follow(request, asyncio.Event()) for request in requests]
        for request, generation in zip(requests, generations, strict=True):
            check_output(request, await ended(generation))
        assert count > 1 and rig.server.queue.counters.accepted == 8

    with_rig(check)


@pytest.mark.parametrize("seed", range(8))
def test_every_request_has_its_undisturbed_output_under_faults_kills_and_hangs(with_rig: With, seed: int) -> None:
    async def check(rig: Rig) -> None:
        rng = random.Random(seed)
        clients = [rig.client(), rig.client()]
        followed: list[tuple[NewRequest, Generation]] = []
        rate = 0.03

        def fails(method: str) -> str:
            return rng.choice(["before", "after"]) if rng.random() < rate else ""

        rig.link.fails = fails
        faults: Counter[int] = Counter()  # by request: a third one would end it

        def fault(handover: Mapping[str, Any], position: int) -> str | None:
            seed = handover["sampling"]["seed"]
            if rng.random() >= 0.002 or faults[seed] == 2:
                return None
            faults[seed] += 1
            return "a step failed"

        for engine in rig.engines.values():
            engine.fault = fault
        for place in range(24):
            request = new_request(
                f"r{place}", prompt=rng.randrange(1, 60), new=rng.randrange(1, 40), n=rng.randrange(1, 4),
                priority=rng.randrange(2), tenant=rng.choice("xy"), may_exist=rng.random() < 0.5,
            )  # fmt: skip
            client = rng.choice(clients)
            followed.append((request, client.follow(request, asyncio.Event())))
            if rng.random() < 0.2:  # attached again, perhaps by the same front end
                again, _ = rng.choice(followed)
                again = msgspec.structs.replace(again, may_exist=True)
                followed.append((again, rng.choice(clients).follow(again, asyncio.Event())))
            elif rng.random() < 0.1:
                client.leave(followed.pop()[1])
            for _ in range(rng.randrange(20)):
                await asyncio.sleep(0)
            what = rng.random()
            if what < 0.1:
                await rig.restart()
            elif what < 0.2:
                rig.server.lose(rng.choice("ab"), "has said nothing")
            elif what < 0.25:
                await asyncio.sleep(0.005)
        for request, generation in followed:
            check_output(request, await ended(generation))
        await until(lambda: not rig.server.queue.entries)

    with_rig(check)


def test_two_front_ends_that_follow_one_request_each_get_all_of_it(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        for engine in rig.engines.values():
            engine.held_at = 5
        request = new_request("r", new=12, may_exist=True)
        one, two = rig.client(), rig.client()
        first = one.follow(request, asyncio.Event())
        await until(lambda: first.num_tokens == 5)
        second = two.follow(request, asyncio.Event())
        await until(lambda: second.num_tokens == 5)
        assert second.is_attached and not first.is_attached
        for engine in rig.engines.values():
            engine.held_at = 1 << 30
        for generation in (first, second):
            check_output(request, await ended(generation))
        third = two.follow(request, asyncio.Event())
        check_output(request, await ended(third))
        assert rig.server.queue.counters.accepted == 1

    with_rig(check)


def test_records_that_come_before_the_answer_to_the_submission_are_kept(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        client, gate = rig.client(), asyncio.Event()
        submit = rig.server.submit

        async def late(*arguments: Any) -> Any:
            answers = await submit(*arguments)
            await gate.wait()
            return answers

        rig.server.submit = late  # type: ignore[method-assign]
        generation = client.follow(request := new_request("r"), asyncio.Event())
        await until(lambda: bool(client._received) and not rig.server.queue.entries)
        assert generation.prompt_token_ids is None
        gate.set()
        check_output(request, await ended(generation))

    with_rig(check)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 21, 40, 90])
def test_a_front_end_that_attaches_twice_gives_each_reader_all_records(with_rig: With, steps: int) -> None:
    async def check(rig: Rig) -> None:
        client, request = rig.client(), new_request("r", new=12, n=2, may_exist=True)
        generations = []
        for _ in range(3):
            generations.append(client.follow(request, asyncio.Event()))
            for _ in range(steps):
                await asyncio.sleep(0)
        for generation in generations:
            check_output(request, await ended(generation))
        assert rig.server.queue.counters.accepted == 1

    with_rig(check)


def test_records_that_were_read_before_the_answer_to_an_attachment_are_given_to_it(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        client, request, gate = rig.client(), new_request("r", may_exist=True), asyncio.Event()
        for engine in rig.engines.values():
            engine.held_at = 2
        first = client.follow(request, asyncio.Event())
        await until(lambda: first.num_tokens == 2)
        submit = rig.server.submit

        async def late(*arguments: Any) -> Any:
            answers = await submit(*arguments)
            await gate.wait()
            return answers

        rig.server.submit = late  # type: ignore[method-assign]
        second = client.follow(request, asyncio.Event())
        for engine in rig.engines.values():
            engine.held_at = 1 << 30
        check_output(request, await ended(first))
        gate.set()
        check_output(request, await ended(second))

    with_rig(check)


def test_a_gap_in_the_records_is_read_again(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        client, request = rig.client(), new_request("r", new=30)
        read, count = rig.server.read, 0

        async def lossy(*arguments: Any) -> Any:
            nonlocal count
            found = await read(*arguments)
            count += bool(found.records)
            return msgspec.structs.replace(found, records={}) if count % 3 == 1 else found

        rig.server.read = lossy  # type: ignore[method-assign]
        check_output(request, await ended(client.follow(request, asyncio.Event())))

    with_rig(check)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 40])
def test_a_request_that_is_cancelled_at_any_moment_leaves_nothing(with_rig: With, steps: int) -> None:
    async def check(rig: Rig) -> None:
        client = rig.client()
        for engine in rig.engines.values():
            engine.held_at = 3
        generation = client.follow(new_request("r", n=2), asyncio.Event())
        for _ in range(steps):
            await asyncio.sleep(0)
        client.cancel(generation)
        assert client.num_unfinished == 0
        await until(lambda: not client._leaving and not rig.server.queue.entries)
        await until(lambda: not any(engine.num_running for engine in rig.engines.values()))
        await until(lambda: set(rig.server._followers.positions().values()) <= {0})

    with_rig(check)


def test_an_error_of_the_request_comes_as_its_kind_and_words(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        for engine in rig.engines.values():
            engine.refusals = [ValueError("no such constraint")] * 9
        generation = rig.client().follow(new_request("r"), asyncio.Event())
        with pytest.raises(RequestFailed, match="no such constraint") as caught:
            await ended(generation)
        assert caught.value.kind == "invalid"
        for engine in rig.engines.values():
            engine.refusals = []

    with_rig(check)


def test_a_request_that_the_journal_has_forgotten_ends_for_its_follower(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        for engine in rig.engines.values():
            engine.held_at = 2
        generation = rig.client().follow(new_request("r"), asyncio.Event())
        await until(lambda: generation.num_tokens == 2)
        rig.link.cut()
        await rig.server.writer.commit(ended=[1])
        rig.server.writer.journal.forget(1e12, 0)
        await kill(rig.server)
        rig.server = QueueServer(rig.options)
        rig.server.start()
        rig.link.server = rig.server
        with pytest.raises(EngineUnavailable, match="does not know this request any more"):
            await ended(generation)

    with_rig(check)


def test_requests_wait_for_a_queue_that_is_away_and_no_longer_than_that(
    with_rig: With, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(rig: Rig) -> None:
        client = rig.client()
        server, rig.link.server = rig.link.server, None
        waiting = client.follow(request := new_request("r"), asyncio.Event())
        for _ in range(50):
            await asyncio.sleep(0)
        assert waiting.error is None
        rig.link.server = server
        check_output(request, await ended(waiting))
        monkeypatch.setattr(client_module, "AWAY_S", 0.01)
        rig.link.server = None
        with pytest.raises(EngineUnavailable, match="the fleet's queue is away"):
            await ended(client.follow(new_request("s"), asyncio.Event()))
        rig.link.server = server

    with_rig(check)


def test_a_closed_client_lets_its_requests_go_on(with_rig: With) -> None:
    async def check(rig: Rig) -> None:
        for engine in rig.engines.values():
            engine.held_at = 2
        client = rig.client()
        request = new_request("r", may_exist=True)
        generation = client.follow(request, asyncio.Event())
        await until(lambda: generation.num_tokens == 2)
        await client.stop()
        rig.clients.remove(client)
        with pytest.raises(EngineUnavailable, match="goes on there"):
            await ended(generation)
        with pytest.raises(EngineUnavailable, match="is closed"):
            client.follow(request, asyncio.Event())
        for engine in rig.engines.values():
            engine.held_at = 1 << 30
        check_output(request, await ended(rig.client().follow(request, asyncio.Event())))

    with_rig(check)
