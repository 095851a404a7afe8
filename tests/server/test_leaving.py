"""A client that leaves: two steps of the engine later its request has ended, and what it computed is in the cache."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import pytest
from async_rig import until

from pagetide import AsyncLLM

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")

from pagetide.server import engine_process  # noqa: E402
from pagetide.server.app import AppOptions, Server, make_app  # noqa: E402
from pagetide.server.connection import MessageConnection  # noqa: E402
from pagetide.server.engine_client import RemoteEngine  # noqa: E402
from pagetide.server.keys import ApiKeys  # noqa: E402
from pagetide.server.messages import Start, ToServer  # noqa: E402
from pagetide.server.models import ModelOptions, ModelRegistry  # noqa: E402

PROMPT_TOKENS = 50
BLOCK_SIZE = 16
FAR_S = 60.0


class Gate:
    """Lets an engine do as many steps as it is told to."""

    def __init__(self) -> None:
        self.llm: AsyncLLM
        self.num_steps = 0
        self.num_cancelled = 0  # calls of which the engine's thread has been told
        self._permits = threading.Semaphore(0)

    def load(self, model: str, options: Any) -> AsyncLLM:
        self.llm = AsyncLLM(model, **options)
        core, thread = self.llm._manager.open().core, self.llm._engine_thread
        step, cancel = core.step, thread.cancel

        def gated() -> Any:
            self._permits.acquire()
            outputs = step()
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

    def open_for_good(self) -> None:
        self._permits.release(1_000_000)


class NoProcess:
    """The process of an engine that is served in this one."""

    def poll(self) -> int:
        return 0

    wait = kill = poll


async def served_here(gate: Gate, model: str, options: dict[str, Any], name: str) -> RemoteEngine:
    """As `RemoteEngine.start`, with the engine in this process."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    engine = RemoteEngine(NoProcess(), name)  # type: ignore[arg-type]
    engine._serving = asyncio.create_task(engine_process.serve(theirs, gate.load))  # type: ignore[attr-defined]
    engine._connection = await MessageConnection.open(ours, ToServer, engine._receive, engine._lost)
    engine._connection.send(Start(model, options))
    await engine._ready
    return engine


def test_two_steps_after_a_client_has_left_its_blocks_are_cached() -> None:
    gate = Gate()
    options = {"device": "cpu", "dtype": "float32", "kv_memory": "8MiB", "share": False, "block_size": BLOCK_SIZE}

    async def run() -> None:
        models = ModelRegistry(lambda model, options, name: served_here(gate, model, options, name))
        http = uvicorn.Server(uvicorn.Config(make_app(Server(models, ApiKeys(), AppOptions())), log_config=None))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            models.add(ModelOptions("demo", "demo", options))
            serving = asyncio.create_task(http.serve(sockets=[listening]))
            await until(lambda: models.is_ready and http.started)
            port = listening.getsockname()[1]
            await leave(gate, models.get("demo").engine, port, 100, streams=True)
            await leave(gate, models.get("demo").engine, port, 200, streams=False)
            gate.open_for_good()
            for first in (100, 200):  # they come again
                reader, writer = await asked(port, first, max_tokens=1)
                whole = PROMPT_TOKENS // BLOCK_SIZE * BLOCK_SIZE
                assert f'"cached_tokens":{whole}}}'.encode() in await asyncio.wait_for(reader.read(), FAR_S)
                writer.close()
            http.should_exit = True
            await serving
            await models.stop()

    asyncio.run(run())


async def asked(port: int, first: int, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request for a completion of the token ids from `first` on."""
    prompt = list(range(first, first + PROMPT_TOKENS))
    body = json.dumps({"prompt": prompt, "ignore_eos": True} | fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    return reader, writer


async def leave(gate: Gate, engine: RemoteEngine, port: int, first: int, streams: bool) -> None:
    """Ask for a long completion, and leave in its midst; two steps later nothing of it is left but cached blocks."""
    pool, told = gate.llm._manager.open().core.scheduler.cache.pool, gate.num_cancelled
    cached = pool.counts().cached
    reader, writer = await asked(port, first, max_tokens=500, stream=streams)
    await until(lambda: engine.num_unfinished == 1)
    await gate.steps(4)
    if streams:
        await asyncio.wait_for(reader.readuntil(b"data: "), FAR_S)
    assert pool.counts().live > PROMPT_TOKENS // BLOCK_SIZE
    writer.close()
    await until(lambda: gate.num_cancelled == told + 1)  # the engine is held at its next step meanwhile
    assert engine.num_unfinished == 0
    await gate.steps(2)
    await until(lambda: not gate.llm._manager.has_work)
    counts = pool.counts()
    assert (counts.live, counts.in_flight, counts.cached) == (0, 0, cached + PROMPT_TOKENS // BLOCK_SIZE)
