"""Requests and engines for a fleet without models: a token is a function of its request's seed, index and position."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from zlib import crc32

import msgspec

from pagetide.engine.requests.outputs import Completion, RequestOutput, StreamChunk, Timings
from pagetide.fleet.links import QueueUnavailable
from pagetide.fleet.messages import FleetModel, NewRequest, WorkerState
from pagetide.fleet.queue_server import QueueOptions, QueueServer
from pagetide.fleet.worker import FleetWorker

FAR_S = 60.0
BLOCK_SIZE = 16
MODEL = FleetModel("demo", "demo", "stand-in", "1", "none", "none", 1024, 4096, BLOCK_SIZE, 1, [1], 0, {}, "0")
STOP_ID = 1


def other_model(**changes: Any) -> FleetModel:
    """MODEL with changes."""
    return msgspec.structs.replace(MODEL, **changes)


def new_request(
    request_id: str, prompt: int = 8, new: int = 6, n: int = 1, *, priority: int = 0, tenant: str = "", **more: Any
) -> NewRequest:
    """A request of `prompt` prompt tokens for `new` tokens in `n` continuations."""
    sampling: dict[str, Any] = {"max_new_tokens": new, "stop_token_ids": [STOP_ID], "seed": crc32(request_id.encode())}
    handover = {
        "version": 2, "model": MODEL.name, "vocab_size": MODEL.vocab_size, "prompt": None,
        "prompt_token_ids": list(range(2, 2 + prompt)), "token_ids": [], "sampling": sampling, "index": 0,
        "priority": priority, "cache_salt": None, "num_told_tokens": 0, "num_told_characters": 0, "num_preemptions": 0,
        "num_cached_tokens": None, "first_token_s": None, "total_s": 0.0,
        "logprobs": None, "prompt_logprobs": None,
    }  # fmt: skip
    return NewRequest(request_id, handover, n, tenant=tenant, max_new_tokens=new, **more)


def token_of(handover: Mapping[str, Any], position: int) -> int:
    """The token of a continuation at a position of its output."""
    return 10 + crc32(f"{handover['sampling']['seed']} {handover['index']} {position}".encode()) % 2000


def text_of(token: int) -> str:
    """The text of a token."""
    return f"{token} "


def outputs_of(request: NewRequest) -> list[list[int]]:
    """The undisturbed output of each continuation."""
    of_index = [{**request.handover, "index": index} for index in range(request.num_sequences)]
    return [[token_of(one, position) for position in range(request.most_new_tokens)] for one in of_index]


def worker_state(limit: int = 1000, usable: int | None = None) -> WorkerState:
    """A worker's state with a lease of `limit` blocks, all of them mapped unless said otherwise."""
    return WorkerState(limit if usable is None else usable, limit, limit if usable is None else usable)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(FAR_S):
        while not condition():
            await asyncio.sleep(0.001)


class StandInEngine:
    """What `FleetWorker` uses of an `AsyncLLM`. Each step computes a token of each request.

    Attributes:
        fault: The error that ends a continuation at this position of its output, if any.
        refusals: What the next calls of `import_request` raise.
        held_at: No output grows beyond so many tokens.
    """

    tokenizer = None

    def __init__(
        self, max_seqs: int = 64, limit: int = 1000, held_at: int = 1 << 30, refusals: Sequence[Exception] = (),
        fault: Callable[[Mapping[str, Any], int], str | None] = lambda handover, position: None,
    ) -> None:  # fmt: skip
        self.config = SimpleNamespace(max_seqs=max_seqs, max_step_tokens=2048, kv_events=False)
        self.limit = limit
        self.fault = fault
        self.refusals = list(refusals)
        self.held_at = held_at
        self.heartbeat = (0, 0.0)
        self.num_running = 0
        self.num_started = 0

    async def stats(self) -> dict[str, Any]:
        blocks = {"usable": self.limit, "limit": self.limit, "free": self.limit, "live": 0}
        return {"blocks": blocks, "waiting": 0, "preemptions": 0, "device": "stand-in"}

    async def import_request(self, data: Sequence[Mapping[str, Any]], **options: Any) -> AsyncGenerator[StreamChunk, None]:
        """Continue a request, a token of each continuation in turn."""
        if self.refusals:
            raise self.refusals.pop(0)
        self.num_running += 1
        self.num_started += 1
        try:
            outputs = [list(one["token_ids"]) for one in data]
            going = list(range(len(data)))
            for place in itertools.cycle(range(len(data))):
                if place not in going:
                    continue
                if place == going[0]:
                    await asyncio.sleep(0)
                while len(outputs[place]) >= self.held_at:
                    await asyncio.sleep(0.001)
                chunk = self._chunk(place, data[place], outputs[place])
                if chunk.completion is not None:
                    going.remove(place)
                yield chunk
                if not going:
                    return
        finally:
            self.num_running -= 1

    def _chunk(self, place: int, one: Mapping[str, Any], output: list[int]) -> StreamChunk:
        if (error := self.fault(one, len(output))) is not None:
            return self._end(place, one, output, "error", error)
        token = token_of(one, len(output))
        output.append(token)
        if len(output) == one["sampling"]["max_new_tokens"]:
            return self._end(place, one, output, "length", None)
        return StreamChunk(place, text_of(token), [token])

    def _end(self, place: int, one: Mapping[str, Any], output: list[int], reason: Any, error: str | None) -> StreamChunk:
        tokens = output[-1:] if error is None else []
        text = "".join(map(text_of, output))
        completion = Completion(text, list(output), reason, Timings(0.0, 0.0), error=error)
        whole = RequestOutput("", None, one["prompt_token_ids"], (completion,))
        return StreamChunk(place, "".join(map(text_of, tokens)), tokens, 0, completion, whole)


class UnreliableLink:
    """A link to a queue on this event loop, of which calls fail before or after they took effect, and which can be cut.

    Attributes:
        fails: Says of each call, by its name, whether it fails: "before", "after" or "" for not.
    """

    def __init__(self, server: QueueServer | None, fails: Callable[[str], str] = lambda method: "") -> None:
        self.server = server
        self.fails = fails
        self._running: set[asyncio.Task[Any]] = set()

    def cut(self) -> None:
        """Let all calls that wait for an answer fail, and those to come, until `server` is set."""
        self.server = None
        for task in self._running:
            task.cancel()

    def __getattr__(self, method: str) -> Any:
        async def call(*arguments: Any) -> Any:
            fault = self.fails(method)
            if self.server is None or fault == "before":
                await asyncio.sleep(0)
                raise QueueUnavailable("the queue is away")
            work = asyncio.create_task(self._call(self.server, method, arguments))
            self._running.add(work)
            work.add_done_callback(self._done)
            await asyncio.wait({work})  # a caller that is cancelled leaves the call to the queue, as over a network
            if work.cancelled() or (fault == "after" and work.exception() is None):
                raise QueueUnavailable("the answer is lost")
            return work.result()

        return call

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone

    async def _call(self, server: QueueServer, method: str, arguments: Sequence[Any]) -> Any:
        await asyncio.sleep(0)
        return await getattr(server, method)(*arguments)


async def kill(server: QueueServer) -> None:
    """End a queue as a kill does: what is not in the journal is lost."""
    if server._held is not None:
        server._held.cancel()
    for task in server._tasks:
        task.cancel()
    writer = server.writer
    writer._is_closed = True
    await writer._locked(writer.journal.close)  # a commit that runs is over, or fails
    if writer._retry is not None:
        writer._retry.cancel()


class QueueRig:
    """A queue, and workers around stand-in engines, on this event loop. Use it as an async context manager."""

    def __init__(self, folder: Path, clock: Callable[[], float] | None = None, **options: Any) -> None:
        self.now = 0.0
        self.clock = clock or (lambda: self.now)
        self.options = QueueOptions(folder / "journal.sqlite", **options)
        self.engines: dict[str, Any] = {}
        self.workers: dict[str, FleetWorker] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        self.server = QueueServer(self.options, self.clock)
        self.link: Any = UnreliableLink(self.server)
        return self

    async def start(self, **engines: Any) -> None:
        """Start the queue's own tasks and a worker around each engine, and wait until the queue knows them."""
        self.server.start()
        for name, engine in engines.items():
            self.add(name, engine)
        await until(lambda: len(self.server.queue.workers) == len(self.engines))

    def add(self, name: str, engine: Any, /, **model: Any) -> asyncio.Task[None]:
        return self.keep(name, engine, other_model(**model))

    def keep(self, name: str, engine: Any, model: FleetModel) -> asyncio.Task[None]:
        """Let a worker of this model run."""
        self.engines[name] = engine
        worker = self.workers[name] = FleetWorker(name, engine, model, self.link)
        self.tasks[name] = asyncio.create_task(worker.run())
        return self.tasks[name]

    async def restart(self) -> None:
        """Kill the queue, and make it again from its journal."""
        self.link.cut()
        await kill(self.server)
        self.link.server = self.server = QueueServer(self.options, self.clock)

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        self.server.queue.check_invariants()
        streams = [engine for engine in self.engines.values() if isinstance(engine, StandInEngine) and engine.num_running]
        assert not streams, "a stream is left in an engine"
        await self.server.close()
