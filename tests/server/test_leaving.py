"""A client that leaves: two steps of the engine later its request has ended. An engine that leaves or hangs is lost."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import pytest
from async_rig import until
from page_rig import LocalServer

from pagetide import AsyncLLM
from pagetide.engine.errors import ShardLost
from pagetide.server import app, engine_process, streams
from pagetide.server.choices import error_event
from pagetide.server.config import ModelOptions
from pagetide.server.connection import MessageConnection
from pagetide.server.engine_client import LoadFailed, RemoteEngine
from pagetide.server.messages import Start, ToServer
from pagetide.server.residency import Residency

PROMPT_TOKENS = 50
BLOCK_SIZE = 16
FAR_S = 60.0
PATH = "/v1/completions"
OPTIONS = {"device": "cpu", "dtype": "float32", "kv_memory": "8MiB", "share": False, "block_size": BLOCK_SIZE}


class Gate:
    """Lets an engine do as many steps as it is told to."""

    def __init__(self) -> None:
        self.llm: AsyncLLM
        self.num_steps = 0
        self.num_cancelled = 0  # calls of which the engine's thread has been told
        self._permits = threading.Semaphore(0)

    def load(self, start: Start) -> AsyncLLM:
        self.llm = engine_process.load(start)
        core, thread = self.llm._manager.open().core, self.llm._engine_thread
        step, cancel = core.step, thread.cancel

        def gated(ahead: bool) -> Any:
            self._permits.acquire()
            outputs = step(ahead)
            self.num_steps += 1
            return outputs

        def told(call: Any) -> None:
            cancel(call)
            self.num_cancelled += 1

        core.step, thread.cancel = gated, told  # type: ignore[method-assign]
        return self.llm

    async def steps(self, count: int) -> None:
        """Let it do `count` steps, and wait for them."""
        done = self.num_steps + count
        self._permits.release(count)
        await until(lambda: self.num_steps == done)

    async def at_most(self, count: int) -> None:
        """Let it do `count` steps, or fewer if its work ends before."""
        done = self.num_steps + count
        self._permits.release(count)
        await until(lambda: self.num_steps == done or not self.llm._manager.has_work)
        for _ in range(done - self.num_steps):
            self._permits.acquire(blocking=False)

    def open_for_good(self) -> None:
        self._permits.release(1_000_000)


class NoProcess:
    """The process of an engine that is served in this one."""

    status = 0

    def kill(self) -> None:
        pass


async def served_here(gate: Gate, model: str, options: dict[str, Any], name: str) -> RemoteEngine:
    """As `RemoteEngine.start`, with the engine in this process."""
    ours, theirs = socket.socketpair()
    engine = RemoteEngine(NoProcess(), name)  # type: ignore[arg-type]
    engine._serving = asyncio.create_task(engine_process.serve(theirs, gate.load))  # type: ignore[attr-defined]
    engine._connection = await MessageConnection.open(ours, ToServer, engine._receive, engine._lost)
    engine._connection.send(Start(model, options, name))
    await engine._ready
    return engine


async def test_two_steps_after_a_client_has_left_its_blocks_are_cached() -> None:
    gate = Gate()

    async def start(model: str, options: dict[str, Any], name: str) -> RemoteEngine:
        return await served_here(gate, model, options, name)

    async with (
        LocalServer(start, [ModelOptions("served", "demo", OPTIONS)]) as server,
        httpx2.AsyncClient(base_url=server.url, timeout=FAR_S) as client,
    ):
        engine = server.models.get("served").engine
        assert gate.llm.config.model.name == "served"
        await leave(gate, engine, client, 100, streams=True)
        await leave(gate, engine, client, 200, streams=False)
        gate.open_for_good()
        for first in (100, 200):  # they come again
            usage = (await client.post(PATH, json=body_of(first, max_tokens=1))).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == PROMPT_TOKENS // BLOCK_SIZE * BLOCK_SIZE


MESSAGES = [{"role": "user", "content": "x"}]
STREAMS = {  # the body of a stream of each API, and of the event of a failed loading
    PATH: ({"prompt": "x"}, '"type":"service_unavailable_error"'),
    "/v1/chat/completions": ({"messages": MESSAGES}, '"type":"service_unavailable_error"'),
    "/v1/responses": ({"input": "x"}, '"type":"error"'),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 1}, '"type":"overloaded_error"'),
    "/api/generate": ({"prompt": "x"}, ""),
}


async def test_a_stream_that_waits_for_its_model_begins_with_comments_and_then_fails_or_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "QUIET_S", 0.02)
    gate, loading = Gate(), asyncio.Event()
    gate.open_for_good()

    async def start(model: str, options: dict[str, Any], name: str) -> RemoteEngine:
        await loading.wait()
        if name == "broken":
            raise LoadFailed("CheckpointError", "no weights")
        return await served_here(gate, model, options, name)

    on_demand = Residency(-1, pinned=False, preload=False)
    names = {"broken": {}, "served": OPTIONS}
    models = [ModelOptions(name, "demo", options, residency=on_demand) for name, options in names.items()]
    async with LocalServer(start, models) as server, httpx2.AsyncClient(base_url=server.url, timeout=FAR_S) as client:
        begun: list[str] = []

        async def ask(path: str, name: str) -> httpx2.Response:
            async with client.stream("POST", path, json=STREAMS[path][0] | {"model": name, "stream": True}) as response:
                begun.append(path)
                await response.aread()
            return response

        early = [asyncio.create_task(ask(path, "broken")) for path in STREAMS]
        served = asyncio.create_task(ask(PATH, "served"))
        async with client.stream("POST", PATH, json={"model": "served", "prompt": "x", "stream": True}) as left:
            assert await anext(left.aiter_lines()) == streams.COMMENT.decode().strip()
        waiting = [server.models.get(name) for name in names]
        await until(lambda: [one.num_waiting for one in waiting] == [len(STREAMS), 1] and len(begun) == len(STREAMS))
        loading.set()
        for answer, (path, (_, event)) in zip(await asyncio.gather(*early), STREAMS.items(), strict=True):
            if path.startswith("/api/"):  # lines of JSON have no comments
                assert answer.status_code == 503 and answer.headers["retry-after"]
                continue
            assert answer.status_code == 200 and answer.content.startswith(streams.COMMENT)
            data = answer.text.split("data: ")
            assert event in data[1] and "broken cannot be loaded: no weights" in data[1], path
        text = (await served).text
        assert text.startswith(streams.COMMENT.decode()) and text.endswith("data: [DONE]\n\n") and "error" not in text
        monkeypatch.undo()
        again = await ask(PATH, "broken")  # at once
        assert again.status_code == 503 and again.headers["retry-after"]


def body_of(first: int, **fields: Any) -> dict[str, Any]:
    """A request for a completion of the token ids from `first` on."""
    return {"prompt": list(range(first, first + PROMPT_TOKENS)), "ignore_eos": True} | fields


async def leave(gate: Gate, engine: RemoteEngine, client: httpx2.AsyncClient, first: int, streams: bool) -> None:
    """Ask for a long completion, and leave in its midst; two steps later nothing of it is left but cached blocks."""
    pool, told = gate.llm._manager.open().core.scheduler.cache.pool, gate.num_cancelled
    cached = pool.counts().cached
    begun = asyncio.Event()

    async def read() -> None:
        async with client.stream("POST", PATH, json=body_of(first, max_tokens=500, stream=streams)) as answer:
            async for _ in answer.aiter_raw():
                begun.set()

    asking = asyncio.create_task(read())
    await until(lambda: engine.num_unfinished == 1)
    await gate.steps(4)
    if streams:
        await begun.wait()
    assert pool.counts().live > PROMPT_TOKENS // BLOCK_SIZE
    asking.cancel()  # and its connection is closed
    await until(lambda: gate.num_cancelled == told + 1)
    assert engine.num_unfinished == 0
    await gate.at_most(2)  # it is held at its next step, or between two
    await until(lambda: not gate.llm._manager.has_work)
    counts = pool.counts()
    assert (counts.live, counts.in_flight, counts.cached) == (0, 0, cached + PROMPT_TOKENS // BLOCK_SIZE)


async def test_a_step_that_does_not_end_is_noticed_after_as_long_as_it_said_and_rest_never() -> None:
    engine = await served_here(gate := Gate(), "demo", OPTIONS, "demo")

    def hangs(first: int, count: int) -> bool:
        for second in range(first, first + count):
            engine._receive(engine._alive)  # it says the same again
            engine.look(second)
        return bool(engine._hang)

    assert not hangs(0, 100)
    generation = engine.submit(asyncio.Event(), prompt=[5, 6, 7], params={})
    await until(lambda: engine._alive.allowed_s > 0)
    allowed_s = int(engine._alive.allowed_s)
    assert 20 <= allowed_s < 30 and not hangs(100, allowed_s - 1), "the first look begins to count"
    assert not hangs(10**6, 1), "what holds up the server itself counts for two looks"
    assert hangs(10**6 + 1, 1)
    await engine.ended.wait()
    assert str(generation.error) == f"the engine of demo hung: it was at work, and came no further for {allowed_s} s"
    gate.open_for_good()
    await engine._serving  # type: ignore[attr-defined]


async def test_a_process_whose_engine_has_ended_by_itself_ends_too() -> None:
    engine = await served_here(gate := Gate(), "demo", OPTIONS, "demo")
    gate.llm._engine_thread._inbox.put(lambda: raise_(ShardLost("shard 1 is gone")))
    await engine.ended.wait()


def raise_(error: Exception) -> None:
    raise error


class Made:
    """The work of a request that waits for its model, and what it makes."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.error: Exception | None = None
        self.num_closed = 0

    async def make(self) -> streams.StreamedResponse:
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        held = AsyncExitStack()
        held.callback(self._close)
        return streams.StreamedResponse(self._parts(), held)

    def _close(self) -> None:
        self.num_closed += 1

    async def _parts(self) -> AsyncIterator[bytes]:
        yield b"data: [DONE]\n\n"


async def test_what_a_waiting_stream_holds_is_given_back_whenever_its_client_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "QUIET_S", 0.0)
    made, leaves = Made(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message.get("body"):  # the client reads no comment
            made.may_end.set()
            await asyncio.Event().wait()

    response = await streams.awaited_stream(made.make(), error_event)
    sending = asyncio.create_task(response({"type": "http"}, receive, send))
    await made.may_end.wait()
    await asyncio.sleep(0.001)
    leaves.set()
    await sending
    assert made.num_closed == 1
    monkeypatch.setattr(streams, "QUIET_S", FAR_S)
    for turns in range(6):
        made = Made()
        waiting = asyncio.create_task(streams.awaited_stream(made.make(), error_event))
        await asyncio.sleep(0.001)
        made.may_end.set()
        for _ in range(turns + 1):
            await asyncio.sleep(0)
        waiting.cancel()
        (found,) = await asyncio.gather(waiting, return_exceptions=True)
        if isinstance(found, streams.StreamedResponse):
            await found({"type": "http"}, receive, send)
        assert made.num_closed == 1, turns


async def test_a_waiting_stream_that_fails_as_no_one_foresaw_ends_with_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "QUIET_S", 0.0)
    made, sent = Made(), list[bytes]()
    made.error = KeyError("x")

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if sent[-1] == streams.COMMENT:
            made.may_end.set()

    response = await streams.awaited_stream(made.make(), error_event)
    await response({"type": "http"}, receive, send)
    assert streams.COMMENT in sent and sent[-1] == b"" and b"the server failed on this request" in sent[-2]


async def test_a_request_that_begins_as_its_model_falls_asleep_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reached, goes_on = Gate(), asyncio.Event(), asyncio.Event()
    gate.open_for_good()

    async def start(model: str, options: dict[str, Any], name: str) -> RemoteEngine:
        return await served_here(gate, model, options, name)

    async def held(*_: Any) -> None:
        reached.set()
        await goes_on.wait()

    async with (
        LocalServer(start, [ModelOptions("served", "demo", OPTIONS)]) as server,
        httpx2.AsyncClient(base_url=server.url, timeout=FAR_S) as client,
    ):
        model, tokenize = server.models.get("served"), gate.llm.tokenize

        async def slowly(*arguments: Any) -> list[int]:
            await held()
            return await tokenize(*arguments)

        for where, what in ((app, "_durable"), (gate.llm, "tokenize")):  # here, and in the engine
            reached.clear()
            goes_on.clear()
            monkeypatch.setattr(where, what, held if where is app else slowly)
            asked = asyncio.create_task(client.post(PATH, json={"prompt": "x", "max_tokens": 2}))
            await reached.wait()
            await server.models.sleep(model, FAR_S)
            goes_on.set()
            answer = await asked
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2, (what, answer.text)
            monkeypatch.undo()
        assert model.comings == {"load": 1, "wake": 2} and not model.is_used


async def test_a_silent_stream_of_events_gets_comments_and_no_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "QUIET_S", 0.01)
    for media_type in (streams.EVENTS, "application/json"):
        sent, goes_on = list[bytes](), asyncio.Event()

        async def parts(goes_on: asyncio.Event = goes_on) -> AsyncIterator[bytes]:
            yield b"first"
            await goes_on.wait()
            yield b"last"

        async def send(message: Any, sent: list[bytes] = sent) -> None:
            sent.append(message.get("body", b""))

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        response = streams.StreamedResponse(parts(), AsyncExitStack(), media_type=media_type)
        sending = asyncio.create_task(response({"type": "http"}, receive, send))
        await until(lambda sent=sent, wanted=2 if media_type != streams.EVENTS else 4: len(sent) >= wanted)
        await asyncio.sleep(0.03)
        goes_on.set()
        await sending
        assert (sent[1], sent[-2:]) == (b"first", [b"last", b""])
        assert (streams.PAUSED in sent) == (media_type == streams.EVENTS)
