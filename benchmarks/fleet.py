"""What a fleet costs: its queue with the journal on one core, one worker against `AsyncLLM`, several workers, and kills.

    python -m benchmarks.fleet [--json FILE] [--only PART,...] [--rounds 5] [--requests 20000] [--streams 64] [--threads 1]
        [--hidden 512] [--layers 8] [--singles 50] [--workers 4] [--seconds 8] [--kills 20] [--one-process] [--seed 0]

    queue      requests/s through the queue with its journal, in a process on one core: see `fleet_requests`
    speed      tokens/s of `--streams` streams of 64 to 128 tokens by `Fleet`, with one worker on Ray, and by `AsyncLLM` in this
               process; in turn, the ratio of each round. The bundled model, and a random one of --hidden and --layers
    first      time to the first token of single requests, in turn
    workers    tokens/s of `--workers` stand-ins (`fleet_stand_in`) against one, each a process on Ray, as much as they take
    memory     resident memory of each process of a fleet, and of `AsyncLLM` in a process
    kills      from the SIGKILL of one of two workers to the next token of each of its streams

Fleets are started by `pagetide fleet start`, each on a Ray of its own, and have ended when the benchmark ends. A worker and
`AsyncLLM` have the same settings and `--threads` each. `--one-process` is for a quick look without Ray: queue, worker and
reader on one event loop, with all messages encoded; "memory" and "kills" are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import torch

from benchmarks.arguments import above_0, whole
from benchmarks.figures import Figure, report
from benchmarks.fleet_live import ENGINE, LiveFleet, StandIns, fleet_on_ray, live_fleet, stand_in_fleet
from benchmarks.fleet_requests import queue_figures
from benchmarks.processes import Worker
from benchmarks.random_batches import save_model
from pagetide import AsyncLLM, Fleet, SamplingParams

PARTS = ("queue", "speed", "first", "workers", "memory", "kills")
ONLY_ON_RAY = ("memory", "kills")
TARGET_SHARE = 0.9  # tokens/s through the fleet, of those of AsyncLLM
TARGET_FIRST_MS = 15.0  # more than AsyncLLM's
TARGET_SCALING = 3.7  # of 4 workers
TARGET_KILL_S = 2.0  # p99
OUTPUT = (64, 128)  # tokens of a stream
PROMPT_TOKENS = 32
VOCABULARY = (8, 4000)  # ids of prompts
STAND_INS = StandIns(max_seqs=32, step_s=0.010, token_s=40e-6)
AHEAD = 1.5  # streams for each sequence that the workers can run
WARM_S = 1.0
KILL_STREAMS, KILL_OUTPUT = 12, 400
KILL_WAIT_S = 30.0
LOOKED_AT = 3  # chunks after a kill in which the gap is looked for
MIB = 1 << 20

Door = AsyncLLM | Fleet


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


# ---- one worker against AsyncLLM ------------------------------------------------------------------------------------


async def streamed(door: Door, work: Work) -> tuple[list[list[int]], float]:
    """The tokens of all streams at once, and the tokens/s."""

    async def one(prompt: list[int], length: int) -> list[int]:
        tokens: list[int] = []
        async for chunk in door.stream([prompt], params(length)):
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
        doors: list[Door] = [llm, fleet] if number % 2 else [fleet, llm]
        found = {type(door): await streamed(door, work) for door in doors}
        same = sum(a == b for a, b in zip(found[AsyncLLM][0], found[Fleet][0], strict=True))
        if same < args.streams * 0.9:  # batches differ, and so may the last bits of near ties
            raise RuntimeError(f"the fleet gave other tokens in {args.streams - same} of {args.streams} streams")
        if number:  # the first warms up
            direct.append(found[AsyncLLM][1])
            through.append(found[Fleet][1])
    ratios = [theirs / ours for theirs, ours in zip(through, direct, strict=True)]
    return [
        Figure(f"tokens/s by AsyncLLM, {name}", statistics.median(direct), "tokens/s", None, "higher", direct),
        Figure(f"tokens/s through a fleet, {name}", statistics.median(through), "tokens/s", None, "higher", through),
        Figure(f"fleet / AsyncLLM, {name}", statistics.median(ratios), "x", TARGET_SHARE, "higher", ratios),
    ]


async def first_tokens(llm: AsyncLLM, fleet: Fleet, args: argparse.Namespace) -> list[Figure]:
    """Time to the first token of single requests."""
    rng = random.Random(args.seed + 1)
    doors: list[Door] = [llm, fleet]
    times: dict[type, list[float]] = {AsyncLLM: [], Fleet: []}
    for number in range(2 * args.singles + 4):
        door = doors[number % 2]
        prompt = [rng.randint(*VOCABULARY) for _ in range(PROMPT_TOKENS)]
        began = time.perf_counter()
        async for _ in door.stream([prompt], params(2)):
            if number >= 4:  # the others warm up
                times[type(door)].append(1000 * (time.perf_counter() - began))
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
    """The parts "speed", "first" and "memory"."""
    figures = []
    random_model = folder / "random"
    if "speed" in args.only:
        random_model.mkdir()
        save_model(random_model, args.hidden, args.layers, args.seed)
    models = {"the bundled model": "demo"} | (
        {f"{args.layers} layers of {args.hidden}": str(random_model)} if "speed" in args.only else {}
    )
    for name, model in models.items():
        async with AsyncExitStack() as stack:
            live = await stack.enter_async_context(live_fleet(folder, model, args.one_process, args.threads))
            llm = await asyncio.to_thread(lambda model=model: AsyncLLM(model, **ENGINE))
            stack.push_async_callback(llm.stop)
            if "speed" in args.only:
                figures += await speed(name, llm, live.fleet, args)
            if "first" in args.only and model == "demo":
                figures += await first_tokens(llm, live.fleet, args)
            if "memory" in args.only and model == "demo":
                figures += await memory(live, args)
    return figures


# ---- memory ---------------------------------------------------------------------------------------------------------

ROLES = {  # what is in the command lines of a fleet's processes
    "queue": "ray::QueueActor", "front end": "ray::FrontActor", "worker": "ray::WorkerActor", "Ray, gcs_server": "gcs_server",
    "Ray, raylet": "raylet/raylet",
}  # fmt: skip


async def memory(live: LiveFleet, args: argparse.Namespace) -> list[Figure]:
    """Resident memory of the processes."""
    assert live.process is not None
    await streamed(live.fleet, Work.of(args.streams, random.Random(args.seed + 2)))
    found: dict[str, list[float]] = {}
    for process in live.process.processes():
        try:
            line, mib = " ".join(process.cmdline()), process.memory_info().rss / MIB
        except psutil.Error:
            continue
        role = next((role for role, part in ROLES.items() if part in line), "Ray, the others")
        found.setdefault(role, []).append(mib)
    figures = [
        Figure(f"resident, {role}", sum(found.get(role, ())), "MiB", samples=found.get(role, []))
        for role in (*ROLES, "Ray, the others")
    ]
    with Worker(serve_async_llm, args.streams, args.threads, args.seed) as alone:
        mib = float(alone.receive())
    return [
        *figures,
        Figure("resident, AsyncLLM in a process", mib, "MiB"),
        Figure("resident, worker more than AsyncLLM", sum(found.get("worker", ())) - mib, "MiB"),
    ]


def serve_async_llm(pipe: Connection, streams: int, threads: int, seed: int) -> None:
    """A process with an engine that has served the same streams: its resident memory."""
    torch.set_num_threads(threads)

    async def run() -> None:
        async with AsyncLLM("demo", **ENGINE) as llm:
            await streamed(llm, Work.of(streams, random.Random(seed + 2)))
            pipe.send(psutil.Process().memory_info().rss / MIB)

    asyncio.run(run())


# ---- several workers ------------------------------------------------------------------------------------------------


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
    async with stand_in_fleet(folder, STAND_INS, args.one_process) as live:
        for _ in range(args.rounds):
            for count in (1, args.workers):
                await live.set_workers(count)
                streams = int(AHEAD * STAND_INS.max_seqs * count)
                speeds.setdefault(count, []).append(await saturated(live.fleet, streams, args.seconds, rng))
    one, several = speeds[1], speeds[args.workers]
    ratios = [more / less for more, less in zip(several, one, strict=True)]
    target = TARGET_SCALING if args.workers == 4 else None
    return [
        Figure("tokens/s, one stand-in", statistics.median(one), "tokens/s", None, "higher", one),
        Figure(f"tokens/s, {args.workers} stand-ins", statistics.median(several), "tokens/s", None, "higher", several),
        Figure(f"{args.workers} stand-ins / one", statistics.median(ratios), "x", target, "higher", ratios),
    ]


# ---- kills ----------------------------------------------------------------------------------------------------------


class KillStreams:
    """Streams that go on and on, each with the times at which tokens have come since the last kill."""

    def __init__(self, fleet: Fleet, count: int, seed: int) -> None:
        self._fleet, self._seed = fleet, seed
        self._arrivals: list[list[float]] = [[] for _ in range(count)]
        self._tasks = [asyncio.create_task(self._stream(place)) for place in range(count)]

    async def _stream(self, place: int) -> None:
        rng = random.Random(self._seed + place)
        while True:
            prompt = [rng.randint(*VOCABULARY) for _ in range(PROMPT_TOKENS)]
            async for chunk in self._fleet.stream([prompt], params(rng.randint(KILL_OUTPUT // 2, KILL_OUTPUT))):
                if chunk.token_ids:
                    self._arrivals[place].append(time.perf_counter())

    async def after(self, began: float, number: int) -> list[float]:
        """The `number` longest waits, from `began` to the token that ends the longest gap: what was on its way still comes."""
        for arrivals in self._arrivals:
            arrivals.clear()
        async with asyncio.timeout(KILL_WAIT_S):
            while any(len(arrivals) < LOOKED_AT for arrivals in self._arrivals):
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.005)
        waits = []
        for arrivals in self._arrivals:
            times = [began, *arrivals[:LOOKED_AT]]
            waits.append(max((b - a, b - began) for a, b in pairwise(times))[1])
        return sorted(waits)[len(waits) - number :]

    async def stop(self) -> None:
        """End the streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def kills(args: argparse.Namespace, folder: Path) -> list[Figure]:
    """From the kill of a worker to the next token of each of its streams."""
    rng, waits = random.Random(args.seed), list[float]()
    settings = {"workers": 2, "threads": 1, "engine": ENGINE}
    async with fleet_on_ray(folder, **settings) as process, Fleet(name=process.name) as fleet:
        streams = KillStreams(fleet, KILL_STREAMS, args.seed)
        for _ in range(args.kills):
            await _both_run(fleet)
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            victim = rng.choice((await fleet.stats())["workers"])
            began = time.perf_counter()
            os.kill(victim["pid"], signal.SIGKILL)
            waits += await streams.after(began, victim["requests"])
        await streams.stop()
    p50, p99 = (float(np.percentile(waits, share)) for share in (50, 99))
    return [
        Figure(f"next token after a kill, median of {len(waits)} streams, {args.kills} kills", p50, "s", samples=waits),
        Figure("next token after a kill, p99", p99, "s", TARGET_KILL_S),
        Figure("next token after a kill, longest", max(waits), "s"),
    ]


async def _both_run(fleet: Fleet) -> None:
    """Wait until both workers have a share of the streams."""
    async with asyncio.timeout(4 * KILL_WAIT_S):
        while True:
            workers = (await fleet.stats())["workers"]
            if len(workers) == 2 and all(worker["requests"] >= KILL_STREAMS // 4 for worker in workers):
                return
            await asyncio.sleep(0.1)


# ---- the program ----------------------------------------------------------------------------------------------------


async def measured(args: argparse.Namespace, folder: Path) -> list[Figure]:
    """The figures of the wanted parts, each part printed when it has ended."""
    figures: list[Figure] = []

    def add(found: list[Figure]) -> None:
        figures.extend(found)
        print("\n".join(f"{one.name}: {one.value:,.2f} {one.unit}" for one in found), flush=True)

    if "queue" in args.only:
        add(queue_figures(args.requests, args.rounds, folder))
    if {"speed", "first", "memory"} & set(args.only):
        add(await against_async_llm(args, folder))
    if "workers" in args.only:
        add(await several_workers(args, folder))
    if "kills" in args.only:
        add(await kills(args, folder))
    return figures


def _parts(text: str) -> list[str]:
    if unknown := [part for part in text.split(",") if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"there is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    return text.split(",")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--only", type=_parts, default=list(PARTS), metavar="PART,...")
    parser.add_argument("--rounds", type=whole, default=5)
    parser.add_argument("--requests", type=whole, default=20_000, help="through the queue, in a round")
    parser.add_argument("--streams", type=whole, default=64)
    parser.add_argument("--threads", type=whole, default=1, help="of an engine's computations")
    parser.add_argument("--hidden", type=whole, default=512, help="of the random model")
    parser.add_argument("--layers", type=whole, default=8, help="of the random model")
    parser.add_argument("--singles", type=whole, default=50, help="single requests to each")
    parser.add_argument("--workers", type=whole, default=4, help="stand-ins")
    parser.add_argument("--seconds", type=above_0, default=8.0, help="of a round of stand-ins")
    parser.add_argument("--kills", type=whole, default=20)
    parser.add_argument("--one-process", action="store_true", help="without Ray")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.one_process:
        args.only = [part for part in args.only if part not in ONLY_ON_RAY]
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        with tempfile.TemporaryDirectory(prefix="pagetide-fleet-") as folder:
            figures = asyncio.run(measured(args, Path(folder)))
    finally:
        torch.set_num_threads(threads)
    report("Fleet", figures, args.seed, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
