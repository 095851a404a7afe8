"""Requests through a queue with a journal, in one process on one core: a scripted front end, and workers without engines.

The front end submits as `FleetClient` does, up to `BATCH` requests in a call, one call after the other, and reads. A worker
pulls, and reports of each request a first record (of one token), and then the rest and the end. Nobody waits for anything but
the queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, cast

from benchmarks.figures import Figure
from benchmarks.processes import Worker
from pagetide.fleet.journal import Durability, Journal, JournalWriter
from pagetide.fleet.links import QueueLink, answer_call, result_of
from pagetide.fleet.messages import (
    CacheChanges,
    FleetModel,
    NewRequest,
    Registration,
    Report,
    WorkerState,
    encode,
    encode_record,
)  # fmt: skip
from pagetide.fleet.queue_server import QueueOptions, QueueServer
from pagetide.server.messages import Piece, RequestEnd

TARGET_PER_S = 5000.0  # requests in and out, on one core
DURABILITIES: tuple[Durability, ...] = ("process", "power")
BATCH = 64  # requests in a submission
TOKENS = 8  # of an output
PROMPT_TOKENS, BLOCK_SIZE = 64, 16
AHEAD = 1024  # requests of the front end that have not ended
WORKERS, MAX_SEQS = 4, 256
BLOCKS = 1 << 16  # of a worker's pool: it never binds
MODEL = FleetModel(
    "stand-in", "", "stand-in", "", "none", "", 1 << 16, 1 << 16, BLOCK_SIZE, 1, [], None, {}, "0"
)  # fmt: skip
SAMPLING: dict[str, Any] = {
    "max_new_tokens": TOKENS, "min_new_tokens": 0, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": None, "stop": [],
    "stop_token_ids": [], "ignore_eos": True, "n": 1, "logprobs": None,
}  # fmt: skip


def request(number: int) -> NewRequest:
    """A request as `RequestPreparer` makes them. No two have a block in common."""
    handover = {
        "version": 1, "model": "stand-in", "vocab_size": 1 << 16, "prompt": None,
        "prompt_token_ids": [number % 60_000 + i for i in range(PROMPT_TOKENS)], "token_ids": [], "sampling": SAMPLING,
        "index": 0, "priority": 0, "cache_salt": None, "num_told_tokens": 0, "num_told_characters": 0, "num_preemptions": 0,
        "num_cached_tokens": None, "first_token_s": None, "total_s": 0.0, "logprobs": None, "prompt_logprobs": None,
    }  # fmt: skip
    digests = [(number * 4 + i) * 0x9E3779B97F4A7C15 % 2**64 for i in range(PROMPT_TOKENS // BLOCK_SIZE)]
    return NewRequest(f"req-{number:024x}", handover, 1, digests, created=time.time(), max_new_tokens=TOKENS)


class BytesLink:
    """A link to a queue in this process that encodes and decodes all calls and results, as the link of Ray does."""

    def __init__(self, server: QueueServer) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            return result_of(name, await answer_call(self._server, name, encode(list(arguments))))

        return call


@dataclass(slots=True)
class RequestCounts:
    """What has happened, as the two ends see it."""

    accepted: int = 0
    assigned: int = 0
    recorded: int = 0
    ended: int = 0
    delivered: int = 0
    first_s: list[float] = field(default_factory=list)  # from the submission to the first record, of each request


class ScriptedFront:
    """Submits `requests` and reads all their records."""

    def __init__(self, link: QueueLink, requests: Sequence[NewRequest], counts: RequestCounts) -> None:
        self._link, self._requests, self._counts = link, requests, counts
        self._room = asyncio.Semaphore(AHEAD)
        self._began: dict[int, float] = {}

    async def run(self) -> None:
        """Return when all have ended."""
        await asyncio.gather(self._submit(), self._read())

    async def _submit(self) -> None:
        for first in range(0, len(self._requests), BATCH):
            batch = self._requests[first : first + BATCH]
            for _ in batch:
                await self._room.acquire()
            now = time.perf_counter()
            answers = await self._link.submit("front", batch)
            for answer in answers:
                assert answer.number is not None, answer.error
                self._began[answer.number] = now
            self._counts.accepted += len(answers)

    async def _read(self) -> None:
        counts, seen = self._counts, set[int]()
        while counts.ended < len(self._requests):
            deliveries = await self._link.read("front", None)
            now = time.perf_counter()
            for number, (position, records) in deliveries.records.items():
                counts.delivered += len(records)
                if number not in seen:
                    seen.add(number)
                    counts.first_s.append(now - self._began.get(number, now))
                if position + len(records) == RECORDS:
                    counts.ended += 1
                    self._room.release()


RECORDS = 3  # of a request: its first token, the other tokens, and the end


async def work(link: QueueLink, name: str, counts: RequestCounts) -> None:
    """A scripted worker, until it is cancelled."""
    state = WorkerState(BLOCKS, BLOCKS, BLOCKS)
    epoch = await link.register(Registration(name, MODEL, MAX_SEQS, state))
    await link.cache(name, epoch, CacheChanges(cleared=True))
    sequence, reports = 0, list[list[bytes]]()
    pulling = asyncio.create_task(link.pull(name, epoch))
    while True:
        if pulling.done():
            numbers = [one.number for one in pulling.result().assignments]
            pulling = asyncio.create_task(link.pull(name, epoch))
            counts.assigned += len(numbers)
            if numbers:
                reports += _reports(numbers)
        if reports:
            sequence += 1
            records = reports.pop(0)
            await link.report(Report(name, epoch, sequence, records))
            counts.recorded += len(records)
        else:
            await asyncio.wait([pulling])


def _reports(numbers: Sequence[int]) -> Iterator[list[bytes]]:
    """What a worker says of these requests, report by report."""
    yield [encode_record(Piece(number, 0, "tide ", [7])) for number in numbers]
    yield [
        encode_record(record)
        for number in numbers
        for record in (
            Piece(number, 0, "tide " * (TOKENS - 1), [7] * (TOKENS - 1), None, "length"),
            RequestEnd(number, [], 0, None, 0.0, 0.0, 0.0, TOKENS),
        )
    ]


async def through_queue(durability: Durability, count: int, folder: Path, encodes: bool) -> tuple[RequestCounts, float]:
    """Serve `count` requests. Returns what happened, and the seconds."""
    server = QueueServer(QueueOptions(folder / f"{durability}.sqlite", durability))
    server.start()
    link = cast(QueueLink, BytesLink(server) if encodes else server)
    counts, requests = RequestCounts(), [request(number) for number in range(count)]
    workers = [asyncio.create_task(work(link, f"worker-{i}", counts)) for i in range(WORKERS)]
    began = time.perf_counter()
    await ScriptedFront(link, requests, counts).run()
    seconds = time.perf_counter() - began
    for task in workers:
        task.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    server.queue.check_invariants()
    await server.close()
    return counts, seconds


async def through_journal(durability: Durability, count: int, folder: Path) -> float:
    """Write what the queue writes of `count` requests, in commits of BATCH requests. Returns the seconds."""
    writer = JournalWriter(Journal(folder / "journal.sqlite", durability))
    requests = [(number, request(number)) for number in range(1, count + 1)]
    first, rest, end = (b"x" * size for size in (30, 75, 60))
    began = time.perf_counter()
    for at in range(0, count, BATCH):
        batch = requests[at : at + BATCH]
        await writer.commit(requests=batch)
        await writer.commit(records=[(number, 0, first) for number, _ in batch])
        records = [(number, place, data) for number, _ in batch for place, data in ((1, rest), (2, end))]
        await writer.commit(records=records, ended=[number for number, _ in batch])
    seconds = time.perf_counter() - began
    writer.journal.close()
    return seconds


def serve_requests(pipe: Connection, count: int, rounds: int, scratch: str) -> None:
    """A process that measures, and answers with (name of a figure, requests/s, seconds to the first records)."""
    for _ in range(rounds):
        for durability in DURABILITIES:
            with TemporaryDirectory(dir=scratch) as folder:
                counts, seconds = asyncio.run(through_queue(durability, count, Path(folder), True))
            assert counts.assigned == counts.ended == count, counts
            assert counts.delivered == counts.recorded == RECORDS * count, counts
            pipe.send(("queue", durability, count / seconds, sorted(counts.first_s)))
            with TemporaryDirectory(dir=scratch) as folder:
                seconds = asyncio.run(through_journal(durability, count, Path(folder)))
            pipe.send(("journal", durability, count / seconds, []))


def queue_figures(count: int, rounds: int, scratch: Path) -> list[Figure]:
    """Requests/s through the queue and into the journal, by a process on one core."""
    found: dict[tuple[str, str], list[float]] = {}
    waits: list[float] = []
    with Worker(serve_requests, count, rounds, str(scratch), core=-1) as process:
        for _ in range(2 * len(DURABILITIES) * rounds):
            what, durability, speed, first_s = process.receive()
            found.setdefault((what, durability), []).append(speed)
            waits += first_s if durability == "process" else []
    figures = []
    for (what, durability), speeds in found.items():
        target = TARGET_PER_S if (what, durability) == ("queue", "process") else None
        name = "requests through the queue" if what == "queue" else "... into the journal alone"
        name = f"{name}, durability {durability}"
        figures.append(Figure(name, median(speeds), "/s", target, "higher", speeds))
    wait_ms = 1000 * median(waits)
    return [*figures, Figure(f"... first record with {AHEAD} requests ahead, median", wait_ms, "ms")]
