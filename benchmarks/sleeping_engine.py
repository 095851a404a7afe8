"""An engine without a model as a fleet's worker on Ray: a step takes time, and gives each running request a token."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagetide.engine.requests.outputs import StreamChunk
from pagetide.fleet.cluster import NAMESPACE, RayLink, import_ray, queue_name
from pagetide.fleet.messages import FleetModel
from pagetide.fleet.worker import FleetWorker
from pagetide.version import __version__

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from fleet_stand_ins import StandInEngine

BLOCKS, BLOCK_SIZE = 1 << 16, 16  # of its pool, which never binds
# What front ends are told; they load the demo's tokenizer.
MODEL = FleetModel("demo", "demo", "stand-in", "", "none", "none", 1024, 4096, BLOCK_SIZE, 1, [1], 0, {}, __version__)


@dataclass(slots=True, eq=False)
class _Running:
    """A request in the engine, which puts its chunks into `chunks`."""

    handover: Mapping[str, Any]
    output: list[int]
    is_computed: bool = False  # its prompt
    chunks: asyncio.Queue[StreamChunk] = field(default_factory=asyncio.Queue)


class SleepingEngine(StandInEngine):
    """A step takes `step_s`, and `token_s` for each token that it computes. Make it on its event loop."""

    def __init__(self, max_seqs: int, step_s: float, token_s: float) -> None:
        super().__init__(max_seqs, BLOCKS)
        self._step_s, self._token_s = step_s, token_s
        self._running: list[_Running] = []
        self._wanted = asyncio.Event()
        self._stepping = asyncio.create_task(self._run())

    async def import_request(self, data: Sequence[Mapping[str, Any]], **options: Any) -> AsyncGenerator[StreamChunk, None]:
        """Continue a request of one continuation, token by token."""
        (one,) = data
        request = _Running(one, list(one["token_ids"]))
        self._running.append(request)
        self._wanted.set()
        try:
            while True:
                chunk = await request.chunks.get()
                yield chunk
                if chunk.output is not None:
                    return
        finally:
            if request in self._running:
                self._running.remove(request)

    async def stop(self) -> None:
        """End the steps."""
        self._stepping.cancel()
        await asyncio.gather(self._stepping, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time()
        while True:
            if not self._running:
                self._wanted.clear()
                await self._wanted.wait()
                until = loop.time()
            running = list(self._running)
            prompts = sum(len(one.handover["prompt_token_ids"]) + len(one.output) for one in running if not one.is_computed)
            tokens = prompts + sum(one.is_computed for one in running)
            until = max(until + self._step_s + self._token_s * tokens, loop.time())
            await asyncio.sleep(until - loop.time())  # one that woke late is not late for ever
            for one in running:
                one.is_computed = True
                chunk = self._chunk(0, one.handover, one.output)
                one.chunks.put_nowait(chunk)
                if chunk.output is not None and one in self._running:
                    self._running.remove(one)


class StandInActor:
    """The process of a worker. Its `run` ends with it."""

    async def run(self, fleet: str, name: str, max_seqs: int, step_s: float, token_s: float) -> None:
        """Serve the fleet's queue, until it orders the end."""
        link: Any = RayLink(import_ray().get_actor(queue_name(fleet), namespace=NAMESPACE))
        engine: Any = SleepingEngine(max_seqs, step_s, token_s)
        try:
            await FleetWorker(name, engine, MODEL, link).run()
        finally:
            await engine.stop()
