"""An engine without a model for the workers of a fleet: its steps sleep, so that several on few cores show what a fleet adds.

A step takes `step_s`, and `token_s` more for each token that it computes: one of each running request, and the prompts of new
ones. The output is "tide ", token 7, as long as the request may get.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pagetide.engine.requests.outputs import Completion, RequestOutput, StreamChunk, Timings
from pagetide.fleet.cluster import NAMESPACE, RayLink, import_ray, queue_name
from pagetide.fleet.links import QueueLink
from pagetide.fleet.messages import FleetModel
from pagetide.fleet.worker import FleetWorker
from pagetide.version import __version__

TOKEN, TEXT = 7, "tide "
BLOCKS, BLOCK_SIZE = 1 << 16, 16  # of its pool, which never binds
STEP_TOKENS = 2048
# What front ends are told; they load the demo's tokenizer.
MODEL = FleetModel(
    "demo", "demo", "stand-in", "", "none", "none", 1024, 4096, BLOCK_SIZE, 1, [1], 0, {}, __version__
)  # fmt: skip


@dataclass(slots=True, eq=False)
class _Running:
    """A request in the engine. The engine puts its chunks into `chunks`."""

    prompt: list[int]
    left: int
    generated: list[int]
    is_computed: bool = False  # its prompt
    chunks: asyncio.Queue[StreamChunk] = field(default_factory=asyncio.Queue)


class SleepingEngine:
    """What `FleetWorker` uses of an `AsyncLLM`. Make it on its event loop."""

    tokenizer = None

    def __init__(self, max_seqs: int, step_s: float, token_s: float) -> None:
        self.config = SimpleNamespace(max_seqs=max_seqs, max_step_tokens=STEP_TOKENS, kv_events=False)
        self._step_s, self._token_s = step_s, token_s
        self._running: list[_Running] = []
        self._wanted = asyncio.Event()
        self._stepping = asyncio.create_task(self._run())

    async def import_request(self, data: Sequence[Mapping[str, Any]]) -> AsyncGenerator[StreamChunk]:
        """Continue a request of one continuation, token by token."""
        (one,) = data
        tokens = list(one["token_ids"])
        request = _Running(one["prompt_token_ids"], one["sampling"]["max_new_tokens"] - len(tokens), tokens)
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

    async def stats(self) -> dict[str, Any]:
        """The counters that `FleetWorker` reads."""
        blocks = {"usable": BLOCKS, "limit": BLOCKS, "free": BLOCKS}
        return {"blocks": blocks, "waiting": 0, "preemptions": 0, "device": "stand-in"}

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
            tokens = sum(1 if one.is_computed else len(one.prompt) + len(one.generated) for one in running)
            until = max(until + self._step_s + self._token_s * tokens, loop.time())
            await asyncio.sleep(until - loop.time())  # one that woke late is not late for ever
            for one in running:
                self._advance(one)
            self._running = [one for one in self._running if one.left]

    @staticmethod
    def _advance(request: _Running) -> None:
        request.is_computed = True
        request.left -= 1
        request.generated.append(TOKEN)
        if request.left:
            request.chunks.put_nowait(StreamChunk(0, TEXT, [TOKEN]))
            return
        tokens = request.generated
        completion = Completion(TEXT * len(tokens), tokens, "length", Timings(0.0, 0.0, 0.0))
        output = RequestOutput("", None, request.prompt, (completion,))
        request.chunks.put_nowait(StreamChunk(0, TEXT, [TOKEN], 0, completion, output))


async def run_stand_in(link: QueueLink, name: str, max_seqs: int, step_s: float, token_s: float) -> None:
    """Serve a queue with a stand-in, until it orders the end."""
    engine: Any = SleepingEngine(max_seqs, step_s, token_s)
    try:
        await FleetWorker(name, engine, MODEL, link).run()
    finally:
        await engine.stop()


class StandInActor:
    """The process of a worker with a stand-in, on the Ray of a fleet. Its `run` ends with it."""

    async def run(self, fleet: str, name: str, max_seqs: int, step_s: float, token_s: float) -> None:
        """See `run_stand_in`."""
        link: Any = RayLink(import_ray().get_actor(queue_name(fleet), namespace=NAMESPACE))
        await run_stand_in(link, name, max_seqs, step_s, token_s)
