"""Engines of the demo, each in a process of its own as those of `pagetide serve`, and the requests that they serve."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..common.units import MIB
from ..server.engine_client import Batch, EngineUnavailable, LoadFailed, RemoteEngine, RequestFailed
from ..server.messages import Score

SAMPLE_S = 0.1
# Large tensors go back to the system when they are freed (glibc).
STEADY_HEAP = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "2"}
OPTIONS = {"dtype": "float32", "block_size": 16}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """A request of an engine: its prompt, arguments of `SamplingParams`, and the second at which it comes."""

    prompt: str | list[int]
    params: Mapping[str, Any]
    at_s: float = 0.0


@dataclass(slots=True)
class DemoOutput:
    """What is generated for a request. Filled while it is served."""

    prompt: str | list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    num_preemptions: int = 0
    first_token_s: float = 0.0
    longest_gap_s: float = 0.0  # between two pieces of text
    ended_at: float | None = None
    scores: list[Score] = field(default_factory=list)  # of its tokens, where the request asks for them

    @property
    def is_failed(self) -> bool:
        """Whether the request was not served to its end."""
        return self.finish_reason not in ("stop", "length")


class DemoEngine:
    """An engine's process. Make it with `start`, and `close` it.

    Attributes:
        outputs: Of the requests so far, in the order in which they were given.
        stats: The engine's statistics, as `look` read them last.
        recalls: When memory was recalled: the second since `began`, and the bytes so far.
    """

    def __init__(self, name: str, remote: RemoteEngine) -> None:
        self.name = name
        self.outputs: list[DemoOutput] = []
        self.stats: dict[str, Any] = {}
        self.recalls: list[tuple[float, int]] = []
        self.began = time.monotonic()
        self._remote = remote

    @classmethod
    async def start(cls, name: str, options: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> DemoEngine:
        """Start the process and load the bundled model with these arguments of `AsyncLLM`.

        Raises ValueError if the model cannot be loaded so, and ChildProcessError if the process ends.
        """
        variables = {**STEADY_HEAP, **(environ or {})}
        with tempfile.TemporaryFile("w+") as errors, _told(name):
            try:
                remote = await RemoteEngine.start(
                    "demo", OPTIONS | dict(options), name=name, environ=variables, log=errors.fileno()
                )
            except EngineUnavailable as error:
                errors.seek(0)
                said = errors.read().strip().splitlines()
                raise EngineUnavailable(": ".join([str(error), *said[-1:]])) from error
        return cls(name, remote)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._remote.process.pid

    @property
    def device(self) -> str:
        """The engine's device: "cpu", "cuda:0"."""
        return self._remote.info.device

    async def serve(self, requests: Sequence[DemoRequest]) -> list[DemoOutput]:
        """Serve each request from its second after `began` on, and return their outputs, which `outputs` has at once.

        Raises ChildProcessError if the process ends.
        """
        outputs = [DemoOutput(request.prompt) for request in requests]
        first = len(self.outputs)
        self.outputs += outputs
        await asyncio.gather(*(self._serve(first + i, one, outputs[i]) for i, one in enumerate(requests)))
        return outputs

    async def _serve(self, number: int, request: DemoRequest, output: DemoOutput) -> None:
        await asyncio.sleep(self.began + request.at_s - time.monotonic())
        with _told(self.name):
            batch = Batch(self._remote)
            batch.request_id = str(number)
            batch.submit(prompt=request.prompt, params=dict(request.params))
            last_at: float | None = None
            while read := await batch.read():
                now = time.monotonic()
                output.longest_gap_s = max(output.longest_gap_s, 0.0 if last_at is None else now - last_at)
                last_at = now
                for piece in (piece for _, pieces in read for piece in pieces):
                    output.text += piece.text
                    output.token_ids += piece.token_ids
                    output.scores += piece.scores or []
                    output.finish_reason = piece.finish_reason or output.finish_reason
            (end,) = await batch.whole()
        output.num_preemptions, output.first_token_s = end.num_preemptions, end.first_token_s or 0.0
        output.ended_at = time.monotonic()

    async def look(self) -> None:
        """Read the engine's statistics."""
        self.stats = await self.call("stats")
        memory = self.stats["memory"]
        if memory["recalls"] > len(self.recalls):
            now = time.monotonic() - self.began, memory["recalled_bytes"]
            self.recalls += [now] * (memory["recalls"] - len(self.recalls))

    async def frame(self) -> dict[str, Any]:
        """The engine's blocks and requests now: a full frame (frames/source.py)."""
        encoded, _ = await self.call("frame", full=True)
        frame: dict[str, Any] = json.loads(encoded)
        return frame

    async def call(self, method: str, **arguments: Any) -> Any:
        """The result of a call of `server.engine_process.EngineServer.calls`."""
        with _told(self.name):
            return await self._remote.call(method, **arguments)

    async def close(self) -> None:
        """Kill the process. Idempotent."""
        await asyncio.shield(self._remote.kill())


async def start_with_room(most_bytes: int = 512 * MIB, device: str = "cpu") -> DemoEngine:
    """The engine with room for all requests, outside of every lease: it serves what the others do, to compare the tokens.

    It has served a long request, so that `base_bytes` of its memory tells what such a process holds besides KV.
    """
    kv_memory = {"min": 16 * MIB, "max": most_bytes}
    engine = await DemoEngine.start("the engine with room", {"device": device, "kv_memory": kv_memory, "share": False})
    await engine.serve([DemoRequest([17] * 1000, {"max_new_tokens": 2})])
    engine.outputs.clear()
    await engine.look()
    return engine


async def while_looking(work: Awaitable[T], look: Callable[[], Awaitable[None]]) -> T:
    """The result of `work`. Meanwhile `look` is called ten times a second; what it raises ends the work."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await look()
            await asyncio.wait([task], timeout=SAMPLE_S)
        return await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def changed_tokens(ours: Sequence[DemoOutput], theirs: Sequence[DemoOutput]) -> int:
    """Tokens that differ, place by place; a missing token differs."""
    changed = 0
    for mine, other in ((a.token_ids, b.token_ids) for a, b in zip(ours, theirs, strict=True)):
        changed += abs(len(mine) - len(other)) + sum(a != b for a, b in zip(mine, other, strict=False))
    return changed


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Turn what a remote engine raises into errors for the user."""
    try:
        yield
    except (LoadFailed, RequestFailed) as error:
        raise ValueError(f"{name}: {error}") from error
    except EngineUnavailable as error:
        raise ChildProcessError(str(error)) from error
