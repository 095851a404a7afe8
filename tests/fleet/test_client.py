"""A front end's side of the queue: all records once and in order, whatever calls fail and whenever the queue is killed."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

import msgspec
import pytest

from pagetide.fleet import client as client_module
from pagetide.fleet import queue_server as server_module
from pagetide.fleet import worker as worker_module
from pagetide.fleet.client import FleetClient
from pagetide.fleet.messages import FleetInfo, NewRequest
from pagetide.server.choices import joined
from pagetide.server.engine_client import EngineUnavailable, Generation, RequestFailed
from pagetide.server.messages import Piece
from tests.fleet_stand_ins import MODEL, QueueRig, StandInEngine, new_request, outputs_of, text_of, until


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "AGAIN_S", 0.001)
    monkeypatch.setattr(worker_module, "AGAIN_S", 0.001)
    monkeypatch.setattr(worker_module, "STATE_EVERY_S", 0.01)
    monkeypatch.setattr(server_module, "READ_S", 0.05)
    monkeypatch.setattr(server_module, "PULL_S", 0.05)


class Rig(QueueRig):
    """A queue with two workers, and front ends that follow prepared requests."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, time.monotonic, hang_s=3600.0)
        self.clients: list[FleetClient] = []

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        await self.start(a=StandInEngine(max_seqs=6), b=StandInEngine(max_seqs=6))
        return self

    def hold(self, num_tokens: int = 1 << 30) -> None:
        """Let no engine's outputs grow beyond so many tokens."""
        for engine in self.engines.values():
            engine.held_at = num_tokens

    def client(self) -> FleetClient:
        """A client without the model's tokenizer: it takes prepared requests."""
        client = FleetClient(self.link, "fleet", FleetInfo(MODEL, bytes(32), 12), cast(Any, None))
        for work in (client._read(), client._send(), client._refresh()):
            client._keep(work)
        self.clients.append(client)
        return client

    def answer_after(self, gate: asyncio.Event) -> None:
        """Let answers to submissions be late."""
        submit = self.server.submit

        async def late(*arguments: Any) -> Any:
            answers = await submit(*arguments)
            await gate.wait()
            return answers

        self.server.submit = late  # type: ignore[method-assign]

    async def restart(self) -> None:
        await super().restart()
        self.server.start()

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.link.fails = lambda method: ""
            assert [client._tasks for client in self.clients if not client._tasks] == []
            for client in self.clients:
                assert client.num_unfinished == 0
                await client.stop()
            await until(lambda: not self.server.queue.entries)
        await super().__aexit__(kind)


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
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.mark.parametrize("seed", range(5))
async def test_every_request_has_its_undisturbed_output_under_faults_kills_and_hangs(rig: Rig, seed: int) -> None:
    rng = random.Random(seed)
    clients = [rig.client(), rig.client()]
    followed: list[tuple[NewRequest, Generation]] = []

    def fails(method: str) -> str:
        rate = 0.3 if method in ("register", "cache") else 0.03  # which are called once an epoch
        return rng.choice(["before", "after"]) if rng.random() < rate else ""

    rig.link.fails = fails
    faults: Counter[int] = Counter()  # by request: with those of workers, a third one would end it
    most_faults, hangs = seed % 3, 2 - seed % 3

    def fault(handover: Mapping[str, Any], position: int) -> str | None:
        seed = handover["sampling"]["seed"]
        if rng.random() >= 0.002 or faults[seed] == most_faults:
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
        elif what < 0.2 and hangs:
            hangs -= 1
            rig.server.lose(rng.choice("ab"), "has said nothing")
        elif what < 0.25:
            await asyncio.sleep(0.005)
    for request, generation in followed:
        check_output(request, await ended(generation))
    await until(lambda: not rig.server.queue.entries)


async def test_records_that_come_before_the_answer_to_the_submission_are_kept(rig: Rig) -> None:
    client, gate = rig.client(), asyncio.Event()
    rig.answer_after(gate)
    generation = client.follow(request := new_request("r"), asyncio.Event())
    await until(lambda: bool(client._received) and not rig.server.queue.entries)
    assert generation.prompt_token_ids is None
    gate.set()
    check_output(request, await ended(generation))


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 21, 40, 90])
async def test_front_ends_that_attach_again_give_each_reader_all_records(rig: Rig, steps: int) -> None:
    one, other, request = rig.client(), rig.client(), new_request("r", new=12, n=2, may_exist=True)
    generations = []
    for client in (one, one, other):
        generations.append(client.follow(request, asyncio.Event()))
        for _ in range(steps):
            await asyncio.sleep(0)
    for generation in generations:
        check_output(request, await ended(generation))
    # Which front end the queue hears first is open; one of them begins the request.
    assert sorted(generation.is_attached for generation in generations) == [False, True, True]
    assert rig.server.queue.counters.accepted == 1


async def test_records_that_were_read_before_the_answer_to_an_attachment_are_given_to_it(rig: Rig) -> None:
    client, request, gate = rig.client(), new_request("r", may_exist=True), asyncio.Event()
    rig.hold(2)
    first = client.follow(request, asyncio.Event())
    await until(lambda: first.num_tokens == 2)
    rig.answer_after(gate)
    second = client.follow(request, asyncio.Event())
    rig.hold()
    check_output(request, await ended(first))
    gate.set()
    check_output(request, await ended(second))


async def test_a_gap_in_the_records_is_read_again(rig: Rig) -> None:
    read, num_lost = rig.server.read, 0

    async def lossy(*arguments: Any) -> Any:
        nonlocal num_lost
        found = await read(*arguments)
        if num_lost or not found.records:
            return found
        num_lost += 1
        return msgspec.structs.replace(found, records={})

    rig.server.read = lossy  # type: ignore[method-assign]
    rig.hold(2)
    generation = rig.client().follow(request := new_request("r", new=30), asyncio.Event())
    await until(lambda: num_lost == 1)
    rig.hold()
    check_output(request, await ended(generation))


async def test_an_error_of_the_request_comes_as_its_kind_and_words(rig: Rig) -> None:
    for engine in rig.engines.values():
        engine.refusals = [ValueError("no such constraint")] * 9
    generation = rig.client().follow(new_request("r"), asyncio.Event())
    with pytest.raises(RequestFailed, match="no such constraint") as caught:
        await ended(generation)
    assert caught.value.kind == "invalid"
    for engine in rig.engines.values():
        engine.refusals = []


async def test_a_request_that_the_journal_has_forgotten_ends_for_its_follower(rig: Rig) -> None:
    rig.hold(2)
    generation = rig.client().follow(new_request("r"), asyncio.Event())
    await until(lambda: generation.num_tokens == 2)
    await rig.server.writer.commit(ended=[1])
    rig.server.writer.journal.forget(1e12, 0)
    await rig.restart()
    with pytest.raises(EngineUnavailable, match="does not know this request any more"):
        await ended(generation)


async def test_requests_wait_for_a_queue_that_is_away_and_no_longer_than_that(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    clock = client._clock
    client._clock = lambda: clock() + client_module.STILL_S
    assert not client.is_alive, "so that no new request is sent to this front end"
    with pytest.raises(EngineUnavailable, match="the fleet's queue is away"):
        await ended(client.follow(new_request("s"), asyncio.Event()))
    rig.link.server = server
    await until(lambda: client.is_alive)


async def test_a_closed_client_lets_its_requests_go_on(rig: Rig) -> None:
    rig.hold(2)
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
    rig.hold()
    check_output(request, await ended(rig.client().follow(request, asyncio.Event())))
