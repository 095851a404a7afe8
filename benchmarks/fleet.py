"""What a fleet costs: its queue with the journal on one core, one worker against `AsyncLLM`, and several workers.

    python -m benchmarks.fleet [--json FILE] [--only PART,...] [--rounds 5] [--requests 20000] [--streams 64] [--hidden 512]
        [--layers 8] [--singles 50] [--workers 4] [--seconds 8] [--seed 0]

    queue      requests/s through the queue with its journal, in a process on one core
    speed      tokens/s of `--streams` streams of 64 to 128 tokens by `Fleet`, with one worker on Ray, and by `AsyncLLM` in this
               process; in turn, the ratio of each round. The bundled model, and a random one of --hidden and --layers
    first      time to the first token of single requests, in turn
    workers    tokens/s of `--workers` stand-ins (`sleeping_engine`) against one, each a process on Ray, as much as they take

Fleets are started by `pagetide fleet start`, each on a Ray of its own, and have ended when the benchmark ends. A worker and
`AsyncLLM` have the same settings and one thread each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch

from benchmarks.arguments import above_0, names_of, parser_of, whole
from benchmarks.figures import Figure, median, report
from benchmarks.load import save_text_model
from benchmarks.processes import Worker
from benchmarks.sleeping_engine import BLOCK_SIZE, BLOCKS, MODEL, StandInActor
from pagetide import AsyncLLM, Fleet, SamplingParams
from pagetide.fleet.cluster import RayLink, connect, import_ray
from pagetide.fleet.journal import Durability
from pagetide.fleet.links import QueueLink, answer_call, result_of
from pagetide.fleet.messages import CacheChanges, NewRequest, Registration, Report, WorkerState, encode, encode_record
from pagetide.fleet.queue_server import QueueOptions, QueueServer
from pagetide.server.messages import Piece, RequestEnd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from fleets import FleetProcess

TARGET_PER_S = 5000.0  # requests in and out, on one core
DURABILITIES: tuple[Durability, ...] = ("process", "power")
BATCH = 64  # requests in a submission
TOKENS = 8  # of an output
QUEUED_TOKENS = 64  # of a prompt
QUEUED_AHEAD = 1024  # requests of the front end that have not ended
WORKERS, MAX_SEQS = 4, 256


SAMPLING: dict[str, Any] = {
    "max_new_tokens": TOKENS, "min_new_tokens": 0, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": None, "stop": [],
    "stop_token_ids": [], "ignore_eos": True, "n": 1, "logprobs": None,
}  # fmt: skip


def request(number: int) -> NewRequest:
    """A request as `RequestPreparer` makes them. No two have a block in common."""
    handover = {
        "version": 1, "model": "stand-in", "vocab_size": 1 << 16, "prompt": None,
        "prompt_token_ids": [number % 60_000 + i for i in range(QUEUED_TOKENS)], "token_ids": [], "sampling": SAMPLING,
        "index": 0, "priority": 0, "cache_salt": None, "num_told_tokens": 0, "num_told_characters": 0, "num_preemptions": 0,
        "num_cached_tokens": None, "first_token_s": None, "total_s": 0.0, "logprobs": None, "prompt_logprobs": None,
    }  # fmt: skip
    digests = [(number * 4 + i) * 0x9E3779B97F4A7C15 % 2**64 for i in range(QUEUED_TOKENS // BLOCK_SIZE)]
    return NewRequest(f"req-{number:024x}", handover, 1, digests, created=time.time(), max_new_tokens=TOKENS)


class BytesLink:
    """A link to a queue in this process that encodes and decodes all calls and results, as the link of Ray does."""

    def __init__(self, server: QueueServer) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            return result_of(name, await answer_call(self._server, name, encode(list(arguments))))

        return call


class ScriptedFront:
    """Submits `requests` and reads all their records."""

    def __init__(self, link: QueueLink, requests: Sequence[NewRequest]) -> None:
        self._link, self._requests = link, requests
        self._room = asyncio.Semaphore(QUEUED_AHEAD)

    async def run(self) -> None:
        """Return when all have ended."""
        await asyncio.gather(self._submit(), self._read())

    async def _submit(self) -> None:
        for first in range(0, len(self._requests), BATCH):
            batch = self._requests[first : first + BATCH]
            for _ in batch:
                await self._room.acquire()
            for answer in await self._link.submit("front", batch):
                assert answer.number is not None, answer.error

    async def _read(self) -> None:
        ended = delivered = 0
        while ended < len(self._requests):
            deliveries = await self._link.read("front", None)
            for position, records in deliveries.records.values():
                delivered += len(records)
                if position + len(records) == RECORDS:
                    ended += 1
                    self._room.release()
        assert delivered == RECORDS * ended, "a record came twice or never"


RECORDS = 3  # of a request: its first token, the other tokens, and the end


async def work(link: QueueLink, name: str) -> None:
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
            if numbers:
                reports += _reports(numbers)
        if reports:
            sequence += 1
            await link.report(Report(name, epoch, sequence, reports.pop(0)))
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


async def through_queue(durability: Durability, count: int, folder: Path) -> float:
    """Serve `count` requests. Returns the seconds."""
    server = QueueServer(QueueOptions(folder / f"{durability}.sqlite", durability))
    server.start()
    link = cast(QueueLink, BytesLink(server))
    requests = [request(number) for number in range(count)]
    workers = [asyncio.create_task(work(link, f"worker-{i}")) for i in range(WORKERS)]
    began = time.perf_counter()
    await ScriptedFront(link, requests).run()
    seconds = time.perf_counter() - began
    for task in workers:
        task.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    server.queue.check_invariants()
    await server.close()
    return seconds


def serve_requests(pipe: Connection, count: int, rounds: int, scratch: str) -> None:
    """A process that measures, and answers with the requests/s by name of a figure."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for durability in DURABILITIES:
            with TemporaryDirectory(dir=scratch) as folder:
                seconds = asyncio.run(through_queue(durability, count, Path(folder)))
            found.setdefault(f"requests through the queue, durability {durability}", []).append(count / seconds)
    pipe.send(found)


async def queue_figures(args: argparse.Namespace, scratch: Path) -> list[Figure]:
    """Requests/s through the queue, by a process on one core."""
    with Worker(serve_requests, args.requests, args.rounds, str(scratch), core=-1) as process:
        found = process.receive()
    (first, speeds), *others = found.items()
    figures = [median(first, speeds, "/s", TARGET_PER_S, "higher")]
    return [*figures, *(median(name, speeds, "/s", None, "higher") for name, speeds in others)]


ENGINE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_memory": "128MiB", "max_seqs": 64, "share": False}
WAIT_S = 60.0


@asynccontextmanager
async def fleet_on_ray(folder: Path, **settings: Any) -> AsyncIterator[FleetProcess]:
    """A fleet on a Ray of its own. All fleets of this process have one `folder`, which holds the token of their clusters."""
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    # Ray's own niceness, 15, gives way to every other program, as `AsyncLLM` does not.
    os.environ.setdefault("RAY_worker_niceness", "0")
    process = FleetProcess(folder, **settings)
    try:
        await asyncio.to_thread(process.__enter__)
        yield process
    finally:
        import_ray().shutdown()
        await asyncio.to_thread(process.end)
        for file in (folder / "state").glob("**/journal.*"):
            file.unlink()


class StandInFleet:
    """A queue with stand-ins as workers, as many as are wanted."""

    def __init__(self, ray_fleet: str) -> None:
        self._ray_fleet = ray_fleet
        self._link = cast(QueueLink, RayLink(connect("local", ray_fleet)))
        self._workers: list[Any] = []  # actors
        self._number = 0

    async def set_workers(self, count: int) -> None:
        """Start or kill stand-ins, and wait until the queue knows it."""
        while len(self._workers) > count:
            import_ray().kill(self._workers.pop())
        while len(self._workers) < count:
            self._workers.append(self._start(f"stand-in-{self._number}"))
            self._number += 1
        async with asyncio.timeout(WAIT_S):
            info = None
            while info is None or info.max_seqs != count * STAND_IN_SEQS:
                info = await self._link.info(WAIT_S)
                await asyncio.sleep(0.05)

    def _start(self, name: str) -> Any:
        path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), *filter(None, sys.path)])
        actor = import_ray().remote(StandInActor)
        handle = actor.options(num_cpus=0, runtime_env={"env_vars": {"PYTHONPATH": path}}).remote()
        handle.run.remote(self._ray_fleet, name, STAND_IN_SEQS, STEP_S, TOKEN_S)
        return handle


PARTS = ("queue", "speed", "first", "workers")
TARGET_SHARE = 0.9  # tokens/s through the fleet, of those of AsyncLLM
TARGET_FIRST_MS = 15.0  # more than AsyncLLM's
TARGET_SCALING = 3.7  # of 4 workers
OUTPUT = (64, 128)  # tokens of a stream
PROMPT_TOKENS = 32
VOCABULARY = (8, 4000)  # ids of prompts
STAND_IN_SEQS, STEP_S, TOKEN_S = 32, 0.010, 40e-6  # of a stand-in: sequences at a time, a step, more for each token
AHEAD = 1.5  # streams for each sequence that the workers can run
WARM_S = 1.0

Api = AsyncLLM | Fleet


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts as token ids, and the tokens of each output."""

    prompts: list[list[int]]
    lengths: list[int]

    @classmethod
    def of(cls, count: int, rng: random.Random) -> Work:
        """Prompts without a common beginning."""
        prompts = [[rng.randint(*VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
        return cls(prompts, [rng.randint(*OUTPUT) for _ in range(count)])


def params(length: int) -> SamplingParams:
    """Greedy, and exactly so long."""
    return SamplingParams(max_new_tokens=length, temperature=0, ignore_eos=True)


async def streamed(api: Api, work: Work) -> tuple[list[list[int]], float]:
    """The tokens of all streams at once, and the tokens/s."""

    async def one(prompt: list[int], length: int) -> list[int]:
        tokens: list[int] = []
        async for chunk in api.stream([prompt], params(length)):
            tokens += chunk.token_ids
        return tokens

    began = time.perf_counter()
    outputs = await asyncio.gather(*map(one, work.prompts, work.lengths))
    return outputs, sum(work.lengths) / (time.perf_counter() - began)


async def speed(name: str, llm: AsyncLLM, fleet: Fleet, args: argparse.Namespace) -> list[Figure]:
    """Tokens/s by both. Raises RuntimeError where they give other tokens."""
    rng = random.Random(args.seed)
    direct, through = [], []
    for number in range(args.rounds + 1):
        work = Work.of(args.streams, rng)
        apis: list[Api] = [llm, fleet] if number % 2 else [fleet, llm]
        found = {type(api): await streamed(api, work) for api in apis}
        same = sum(a == b for a, b in zip(found[AsyncLLM][0], found[Fleet][0], strict=True))
        if same < args.streams * 0.9:  # batches differ, and so may the last bits of near ties
            raise RuntimeError(f"the fleet gave other tokens in {args.streams - same} of {args.streams} streams")
        if number:  # the first warms up
            direct.append(found[AsyncLLM][1])
            through.append(found[Fleet][1])
    ratios = [theirs / ours for theirs, ours in zip(through, direct, strict=True)]
    return [
        median(f"tokens/s by AsyncLLM, {name}", direct, "tokens/s", None, "higher"),
        median(f"tokens/s through a fleet, {name}", through, "tokens/s", None, "higher"),
        median(f"fleet / AsyncLLM, {name}", ratios, "x", TARGET_SHARE, "higher"),
    ]


async def first_tokens(llm: AsyncLLM, fleet: Fleet, args: argparse.Namespace) -> list[Figure]:
    """Time to the first token of single requests."""
    rng = random.Random(args.seed + 1)
    apis: list[Api] = [llm, fleet]
    times: dict[type, list[float]] = {AsyncLLM: [], Fleet: []}
    for number in range(2 * args.singles + 4):
        api = apis[number % 2]
        prompt = [rng.randint(*VOCABULARY) for _ in range(PROMPT_TOKENS)]
        began = time.perf_counter()
        async for _ in api.stream([prompt], params(2)):
            if number >= 4:  # the others warm up
                times[type(api)].append(1000 * (time.perf_counter() - began))
            break
        await asyncio.sleep(0.05)
    figures = []
    for name, share in (("median", 50), ("p95", 95)):
        ours, theirs = (float(np.percentile(times[kind], share)) for kind in (Fleet, AsyncLLM))
        figures += [
            Figure(f"first token by AsyncLLM, {name}", theirs, "ms", samples=times[AsyncLLM]),
            Figure(f"first token through a fleet, {name}", ours, "ms", samples=times[Fleet]),
            Figure(f"... more than AsyncLLM, {name}", ours - theirs, "ms", TARGET_FIRST_MS),
        ]
    return figures


async def against_async_llm(args: argparse.Namespace, folder: Path) -> list[Figure]:
    """The parts "speed" and "first"."""
    figures = []
    random_model = folder / "random"
    if "speed" in args.only:
        random_model.mkdir()
        save_text_model(random_model, args.hidden, args.layers, args.seed)
    models = {"the bundled model": "demo"} | (
        {f"{args.layers} layers of {args.hidden}": str(random_model)} if "speed" in args.only else {}
    )
    settings = {"workers": 1, "threads": 1, "engine": ENGINE}
    for name, model in models.items():
        async with AsyncExitStack() as stack:
            process = await stack.enter_async_context(fleet_on_ray(folder, model=model, **settings))
            fleet = await stack.enter_async_context(Fleet(name=process.name))
            llm = await asyncio.to_thread(lambda model=model: AsyncLLM(model, **ENGINE))
            stack.push_async_callback(llm.stop)
            if "speed" in args.only:
                figures += await speed(name, llm, fleet, args)
            if "first" in args.only and model == "demo":
                figures += await first_tokens(llm, fleet, args)
    return figures


async def saturated(fleet: Fleet, streams: int, seconds: float, rng: random.Random) -> float:
    """Tokens/s while `streams` streams are always there."""
    count = 0

    async def client(seed: int) -> None:
        nonlocal count
        own = random.Random(seed)
        while True:
            work = Work.of(1, own)
            async for chunk in fleet.stream(work.prompts, params(work.lengths[0])):
                count += len(chunk.token_ids)

    tasks = [asyncio.create_task(client(rng.randrange(2**32))) for _ in range(streams)]
    await asyncio.sleep(min(WARM_S, seconds))
    began, before = time.perf_counter(), count
    await asyncio.sleep(seconds)
    speed = (count - before) / (time.perf_counter() - began)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return speed


async def several_workers(args: argparse.Namespace, folder: Path) -> list[Figure]:
    """Tokens/s of one stand-in and of several."""
    rng, speeds = random.Random(args.seed), dict[int, list[float]]()
    settings = {"workers": 0, "front_ends": 0, "hang_s": 2.0}  # the queue forgets one that was killed after `hang_s`
    async with fleet_on_ray(folder, **settings) as process:
        stand_ins = StandInFleet(process.name)
        await stand_ins.set_workers(1)
        async with Fleet(name=process.name) as fleet:
            for _ in range(args.rounds):
                for count in (1, args.workers):
                    await stand_ins.set_workers(count)
                    streams = int(AHEAD * STAND_IN_SEQS * count)
                    speeds.setdefault(count, []).append(await saturated(fleet, streams, args.seconds, rng))
    one, several = speeds[1], speeds[args.workers]
    ratios = [more / less for more, less in zip(several, one, strict=True)]
    target = TARGET_SCALING if args.workers == 4 else None
    return [
        median("tokens/s, one stand-in", one, "tokens/s", None, "higher"),
        median(f"tokens/s, {args.workers} stand-ins", several, "tokens/s", None, "higher"),
        median(f"{args.workers} stand-ins / one", ratios, "x", target, "higher"),
    ]


async def measured(args: argparse.Namespace, folder: Path) -> list[Figure]:
    """The figures of the wanted parts, each part printed when it has ended."""
    figures: list[Figure] = []
    for parts, measure in (({"queue"}, queue_figures), ({"speed", "first"}, against_async_llm), ({"workers"}, several_workers)):
        if parts & set(args.only):
            found = await measure(args, folder)
            print("\n".join(f"{one.name}: {one.value:,.2f} {one.unit}" for one in found), flush=True)
            figures += found
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--only", type=names_of(PARTS, "part"), default=list(PARTS), metavar="PART,...")
    parser.add_argument("--requests", type=whole, default=20_000, help="through the queue, in a round")
    parser.add_argument("--streams", type=whole, default=64)
    parser.add_argument("--hidden", type=whole, default=512, help="of the random model")
    parser.add_argument("--layers", type=whole, default=8, help="of the random model")
    parser.add_argument("--singles", type=whole, default=50, help="single requests to each")
    parser.add_argument("--workers", type=whole, default=4, help="stand-ins")
    parser.add_argument("--seconds", type=above_0, default=8.0, help="of a round of stand-ins")
    args = parser.parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="pagetide-fleet-") as folder:
            figures = asyncio.run(measured(args, Path(folder)))
    finally:
        torch.set_num_threads(threads)
    report("Fleet", figures, args.seed, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
