"""A fleet in one process without Ray, on the caller's event loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self

from pagetide import AsyncLLM, Fleet, StreamChunk
from pagetide.fleet.links import answer_call, result_of
from pagetide.fleet.messages import encode
from pagetide.fleet.queue_server import QueueServer
from pagetide.fleet.worker import model_of
from tests.fleet_stand_ins import FAR_S, QueueRig, until


class EncodedLink:
    """A link to a queue, perhaps on another event loop, that encodes what it carries as the link of Ray does."""

    def __init__(self, server: QueueServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            work = answer_call(self._server, name, encode(list(arguments)))
            if self._loop is asyncio.get_running_loop():
                answer = self._loop.create_task(work)
            else:
                answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
            return result_of(name, await asyncio.shield(answer))  # the queue goes on when its caller is cancelled

        return call


class HeldEngine:
    """An engine with requests that stand still when they are told to, so that a test may take its time meanwhile.

    Attributes:
        most_chunks: A request that came gives no more chunks than that, and does not end.
        from_tokens: Requests for fewer tokens go on all the same.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.most_chunks = math.inf
        self.from_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def import_request(self, data: Sequence[Mapping[str, Any]], **options: Any) -> AsyncGenerator[StreamChunk, None]:
        """Continue a request."""
        count, num_tokens = 0, data[0]["sampling"]["max_new_tokens"]
        async with aclosing(self._llm.import_request(data, **options)) as stream:
            async for chunk in stream:
                count += 1
                while num_tokens >= self.from_tokens and (
                    count > self.most_chunks or (chunk.completion is not None and self.most_chunks < math.inf)
                ):
                    await asyncio.sleep(0.001)
                yield chunk


class FleetRig(QueueRig):
    """A queue and workers around engines that are there. Use it as an async context manager."""

    def __init__(self, folder: Path, model: str, **engines: AsyncLLM) -> None:
        super().__init__(folder, time.monotonic, hang_s=3600.0)
        self._model = model
        self._first = engines

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.link = EncodedLink(self.server, asyncio.get_running_loop())
        await self.start(**self._first)
        return self

    def add(self, name: str, llm: AsyncLLM) -> asyncio.Task[None]:
        return self.keep(name, HeldEngine(llm), model_of(llm, self._model))

    def hold(self, most_chunks: float, from_tokens: int = 0) -> None:
        """Let requests for at least so many tokens give no more chunks than `most_chunks`, and not end, until this is inf."""
        for engine in self.engines.values():
            engine.most_chunks, engine.from_tokens = most_chunks, from_tokens

    def fleet(self) -> Fleet:
        """A Fleet that is connected to it once it is used."""
        fleet = Fleet("link")
        fleet._open_link = lambda: self.link
        return fleet

    async def kill(self, worker: str) -> None:
        """End a worker amid its requests, as a process that dies."""
        self.tasks[worker].cancel()
        await asyncio.gather(self.tasks[worker], return_exceptions=True)
        self.server.lose(worker, "was killed")

    @property
    def is_empty(self) -> bool:
        """Whether no request is left: in the queue, in the workers and in their engines."""
        return not self.server.queue.entries and not any(worker._tasks for worker in self.workers.values())


class IdleRig(FleetRig):
    """One that sees to it that nothing is left of a test's requests, neither in the queue nor in the engines."""

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            await until(lambda: self.is_empty)
            async with asyncio.timeout(FAR_S):
                for engine in self.engines.values():
                    while (await engine.stats())["running"]:  # the current step is the last that computes them
                        await asyncio.sleep(0.005)
        await super().__aexit__(kind, *_)
