"""The speed of growing and shrinking an engine's pool, compared with mapping and copying the same bytes alone.

    python -m benchmarks.elastic [--json FILE] [--rounds 7] [--only free,half,...] [--moved 1GiB] [--seed 0]

Three processes: this one, which orders and measures; `vram-monitor serve` with its broker on a test device of 6 GiB; and
an engine pinned to a core of its own, with the demo model, extents of 32 MiB of host memory, and one
thread for arithmetic.

A recall is timed from the order, sent to the broker as `vram-monitor recall` sends it, until the engine's resident set, as
the kernel tells it to another process, is 1 GiB smaller; it is looked at every 0.1 ms. But for 16 MiB, since other memory
of the process comes and goes too; after compaction but for 64 MiB, since torch's staging of copies stays in the heap.

Real: broker, lease, keeper thread, preemption, compaction, mapping and unmapping. In `free`, `half` and `live` no steps
run; in `free-decode` the demo model decodes 8 sequences. In the other two under decode, and to fill pools, a stand-in for
the model always samples the same token and takes 5 ms a step, since the CPU cannot decode 1 GiB of context that fast. The
pool does not grow by itself while a recall is measured: before the recall it has its maximum size, and after a recall the
broker grants nothing for two seconds.

    free   1 GiB of extents without a live block       bare: unmapping 1 GiB
    cached 1 GiB full of blocks that only the prefix cache holds   bare: unmapping 1 GiB
    half   2 GiB of extents, every other row ended     bare: copying 0.5 GiB block by block, and unmapping 1 GiB
    live   1 GiB full of running rows                  bare: unmapping 1 GiB

The bare cost is measured in the engine's process, on an arena of its own, just before each recall. A ratio is that of the
medians over the rounds. `cached`, `half` and `idle` have engines of their own; only in `cached` something is cached. With
`--moved` recalls, growth and pools are of another size; what 1 GiB is above is that size then.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.arguments import names_of, parser_of, size, whole
from benchmarks.figures import Figure, median, median_time, percentile, report
from benchmarks.processes import Worker, recalled
from benchmarks.stand_ins import Always
from pagetide import LLM, SamplingParams
from pagetide.allocator.blocks import BlockAllocator
from pagetide.allocator.host_arena import HostArena
from pagetide.allocator.lease_policy import Rules
from pagetide.cache.block_table import Index
from pagetide.cache.manager import CacheManager
from pagetide.cache.row_tables import RowTables
from pagetide.common.units import GIB, MIB
from pagetide.engine.build import Engine
from pagetide.pressure import PrivateDevice
from pagetide.scheduler.forecast import ForecastPeak, LengthForecast
from pagetide.scheduler.request import Request, Sampling
from pagetide.scheduler.scheduler import Scheduler

FOR_EVER = 1e6  # seconds
CONTEXT = 1024
FILLER = 512  # tokens for which a row that fills the pool has blocks: 32
SLACK = 15  # of these are still to come, so that some steps need no more blocks
MAX_SEQS = 640  # so many of them
TOKEN = 7  # that the stand-in gives


class Forecast(LengthForecast):
    """The engine's length forecast. While the pool is filled, running sequences are expected to end at once, so that every
    request that fits is admitted.
    """

    filling = False

    def peak(self, known: Index, generated: Index, allowed: Index, block_size: int) -> ForecastPeak:
        """See `LengthForecast`."""
        if not self.filling:
            return super().peak(known, generated, allowed, block_size)
        blocks = int((-(-known // block_size)).sum())
        return ForecastPeak(blocks, float(blocks), 0.0, 0)


class ElasticRig:
    """One engine in its process, with its pool brought into any shape between two measurements."""

    def __init__(self, max_bytes: int, min_bytes: int, idle_s: float = FOR_EVER, caching: bool = False) -> None:
        self.llm = LLM(
            "demo", device="cpu", dtype="float32", kv_memory={"min": min_bytes, "max": max_bytes}, idle_s=idle_s,
            max_seqs=MAX_SEQS, prefix_caching=caching,
        )  # fmt: skip
        self._numbers = iter(range(1 << 60))
        self._names: list[str] = []  # of all requests that were not ended by `clear`
        self._forecast = Forecast()
        self._decoding: threading.Thread | None = None
        self._stop = threading.Event()
        self._steps: list[tuple[float, float]] = []  # (began, ended) of each step of the driving thread
        with self.llm.locked_engine() as engine:
            core, scheduler = engine.core, engine.core.scheduler
            limits = replace(scheduler.state.limits, max_step_tokens=MAX_SEQS * FILLER)  # so that one step fills a pool
            core.scheduler = Scheduler(scheduler.cache, limits, scheduler.state.cost)
            core.scheduler.state.forecast = self._forecast
            self._model = core.runner.model
            self._vocab_size = engine.encoder.vocab_size

    def computing(self, on: bool, step_s: float = 0.0) -> None:
        """Let the model compute, or let a step take `step_s`, in which other threads run as they do beside torch."""
        with self.llm.locked_engine() as engine:
            engine.core.runner.model = self._model if on else Always(TOKEN, self._vocab_size, step_s)

    def resize_to(self, num_extents: int) -> float:
        """Resize the pool to `num_extents` while no request needs it. To grow, it first has the memory granted.

        Returns the seconds from the plan to its result.
        """
        with self.llm.locked_engine() as engine:
            return _resize(engine, num_extents)

    def regrow(self, num_extents: int) -> float:
        """Give `num_extents` idle extents back, and take them again, granted still. Returns the seconds of the taking."""
        with self.llm.locked_engine() as engine:
            now = engine.core.scheduler.pool.num_extents
            _resize(engine, now - num_extents)
            return _resize(engine, now)

    def fill(self, every: int = 1) -> int:
        """Have the pool as large as it may be, and rows in all of it but an extent; of each `every` of them all but one are
        ended again. Returns those left.

        Rows lie one behind the other, so the ended ones leave holes in every extent.
        """
        self.computing(False)
        with self.llm.locked_engine() as engine:
            core, cache = engine.core, engine.core.scheduler.cache
            blocks = (engine.arena.num_extents - 1) * cache.pool.blocks_per_extent
            names = [self._add(engine, FILLER - SLACK, CONTEXT - FILLER) for _ in range(blocks // (FILLER // cache.block_size))]
            self._forecast.filling = True
            _resize(engine, engine.arena.num_extents)  # with requests there, so that nothing of it counts as idle
            if core.scheduler.num_running < len(names):  # the new blocks can be had in the step behind
                core.step()
            self._forecast.filling = False
            assert core.scheduler.num_running == len(names), "the pool does not hold the rows"
            for i, name in enumerate(names):
                if i % every:
                    core.abort(name)
            core.step()
            return core.scheduler.num_running

    def forget(self) -> None:
        """Let nothing be cached."""
        self.llm.reset_prefix_cache()

    def clear(self) -> None:
        """End all requests. What they computed stays cached, if that is kept."""
        with self.llm.locked_engine() as engine:
            for name in self._names:
                engine.core.abort(name)
            self._names.clear()
            while engine.core.has_work:
                engine.core.step()
            assert engine.core.scheduler.cache.pool.counts().live == 0

    def bare(self, num_extents: int, copied_blocks: int) -> dict[str, float]:
        """Seconds to map extents of an arena of its own, to copy as many blocks of it one by one, and to unmap it.

        It is mapped twice and timed the second time: a virtual machine's host lends free memory to others, and what comes
        back from there is slow, once.
        """
        with self.llm.locked_engine() as engine:
            extent_bytes, block_bytes = engine.arena.extent_bytes, engine.plan.geometry.block_stride
        arena = HostArena((2 if copied_blocks else 1) * num_extents, extent_bytes)
        every = range(num_extents)
        arena.map(every)
        arena.unmap(every)
        costs = {"map": timed(lambda: arena.map(every)), "copy": 0.0}
        if copied_blocks:
            arena.map(range(num_extents, 2 * num_extents))
            blocks = np.frombuffer(arena.buffer, np.uint8).reshape(-1, block_bytes)
            half = len(blocks) // 2
            every_other = range(0, half, half // copied_blocks)[:copied_blocks]

            def copy() -> None:
                for block in every_other:
                    blocks[half + block] = blocks[block]

            costs["copy"] = timed(copy)
            del blocks
        costs["unmap"] = timed(lambda: arena.unmap(every))
        arena.close()
        return costs

    def decode(self, rows: int, tokens: int) -> None:
        """Start a thread that steps, with `rows` requests of `tokens` tokens and what they generate always running."""
        self._stop.clear()
        self._steps = []

        def drive() -> None:
            while not self._stop.is_set():
                with self.llm.locked_engine() as engine:
                    scheduler = engine.core.scheduler
                    for _ in range(rows - scheduler.num_running - scheduler.num_waiting):
                        self._add(engine, tokens, CONTEXT - tokens)
                    began = time.perf_counter()
                    engine.core.step()
                    self._steps.append((began, time.perf_counter()))

        self._decoding = threading.Thread(target=drive)
        self._decoding.start()

    def rest(self) -> list[tuple[float, float]]:
        """Stop that thread. Returns when its steps began and ended, by time.perf_counter, which processes share."""
        assert self._decoding is not None
        self._stop.set()
        self._decoding.join()
        return self._steps

    def state(self) -> dict[str, Any]:
        """What the engine holds."""
        with self.llm.locked_engine() as engine:
            scheduler = engine.core.scheduler
            lease = None if engine.core.memory is None else engine.core.memory.lease
            return {
                "extents": len(engine.arena.mapped_extents),
                "most_extents": engine.arena.num_extents,
                "min_extents": engine.plan.min_extents,
                "extent_bytes": engine.arena.extent_bytes,
                "blocks_per_extent": scheduler.cache.pool.blocks_per_extent,
                "lease": None if lease is None else lease.name,
            }

    def _add(self, engine: Engine, tokens: int, new: int) -> str:
        number = next(self._numbers)
        prompt = np.random.default_rng(number).integers(5, 900, tokens).astype(np.int32)
        engine.core.add(Request(f"b{number}", prompt, Sampling(new), arrival=engine.core.clock()))
        self._names.append(f"b{number}")
        return f"b{number}"


def _resize(engine: Engine, num_extents: int) -> float:
    """See `ElasticRig.resize_to`."""
    scheduler = engine.core.scheduler
    missing = num_extents - scheduler.pool.num_extents
    if missing > 0:
        _have_granted(engine, missing * engine.arena.extent_bytes)
    began = time.perf_counter()
    moved = scheduler.pool.grow(missing) if missing > 0 else scheduler.pool.give_back(-missing)
    engine.core.step()
    took = time.perf_counter() - began
    assert moved == abs(missing) and len(engine.arena.mapped_extents) == num_extents, "no such pool"
    return took


def _have_granted(engine: Engine, more_bytes: int) -> None:
    lease = None if engine.core.memory is None else engine.core.memory.lease
    if lease is None:
        return
    target = lease.held_bytes + more_bytes
    deadline = time.monotonic() + 20
    while lease.granted_bytes < target:  # not before the cool-down of the last recall is over
        lease.ask(target, expires_s=1.0)
        lease.wait_granted(target, 0.3)
        assert time.monotonic() < deadline, f"{target:,} bytes are not granted, only {lease.granted_bytes:,}"


def timed(work: Callable[[], None]) -> float:
    """Seconds that it took."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare_pools(pipe: Connection, rounds: int, pool_bytes: int, new_tokens: int) -> None:
    """The process: sends output tokens a second of an LLM with a fixed pool and of one that may be resized; no extent moves."""
    torch.set_num_threads(1)
    ids = np.random.default_rng(0).integers(5, 900, (16, 48)).tolist()
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
    fixed_pool: dict[str, Any] = {"kv_memory": pool_bytes, "share": False, "prefix_caching": False}
    with LLM("demo", device="cpu", dtype="float32", **fixed_pool) as fixed:
        fix_pool(fixed)
        rig = ElasticRig(pool_bytes, pool_bytes // 16)
        rig.resize_to(rig.state()["most_extents"])
        with rig.llm as elastic:

            def rate(llm: LLM) -> float:
                began = time.perf_counter()
                outputs = llm.generate(ids, sampling, progress=False)
                return sum(len(o.token_ids) for o in outputs) / (time.perf_counter() - began)

            rate(fixed), rate(elastic)
            before = rig.state()["extents"]
            pairs = []
            for i in range(rounds):
                first = rate(elastic) if i % 2 else None
                at_fixed = rate(fixed)
                pairs.append((at_fixed, rate(elastic) if first is None else first))
            assert rig.state()["extents"] == before, "the pool moved"
            pipe.send(pairs)


def fix_pool(llm: LLM) -> None:
    """Replace an LLM's pool by a fixed one: mapped as a whole, without extents, never resized."""
    with llm.locked_engine() as engine:
        core, arena, limits = engine.core, engine.arena, engine.core.scheduler.state.limits
        arena.map([e for e in range(arena.num_extents) if e not in arena.mapped_extents])
        core.memory = None
        plan = engine.plan
        tables = RowTables(BlockAllocator(plan.num_blocks), plan.block_size, limits.num_rows, plan.max_model_len)
        core.scheduler = Scheduler(CacheManager(tables), limits)


def serve(pipe: Connection, arguments: dict[str, Any]) -> None:
    """The process: `(method, positional arguments)` in, what it returned out, until the pipe is closed."""
    torch.set_num_threads(1)
    rig = ElasticRig(**arguments)
    with rig.llm:
        pipe.send(rig.state())
        while True:
            try:
                method, given = pipe.recv()
            except EOFError:
                return
            call: Callable[..., Any] = getattr(rig, method)
            try:
                pipe.send(call(*given))
            except Exception as error:
                pipe.send(error)
                raise


CAPACITY_BYTES = 6 * GIB  # of the test device
STEP_S = 0.005  # of the stand-in for the model
WARM_S = 0.3
DEADLINE_S = 10.0
IDLE_S = 0.3
ROUNDS = 7
SPEED_ROUNDS = 11  # of the comparison of speeds, unless --rounds says something else
SPEED_BYTES = 256 * MIB  # of the pools compared
KINDS = {
    "free": "free blocks",
    "cached": "cached blocks",
    "half": "half-live blocks (compaction)",
    "live": "live blocks (preempted)",
}
BUT_FOR_BYTES = {"free": 16 * MIB, "cached": 16 * MIB, "half": 64 * MIB, "live": 16 * MIB}  # at most half of a recall
BEYOND_MS = {"free": 2, "cached": 4, "live": 6}  # bounds
TARGETS = {"free": 1.3, "cached": 1.3, "half": 2.0, "live": None}
PARTS = (*KINDS, *(f"{kind}-decode" for kind in KINDS), "growth", "speed", "idle")
Samples = list[float]


class EngineProcess:
    """An engine's process. `call` runs a method of its `Rig`."""

    def __init__(self, worker: Worker, socket: Path, moved_bytes: int) -> None:
        self._worker = worker
        self._socket = socket
        self._memory = psutil.Process(worker.pid)
        self.first = worker.receive()
        self.extent_bytes: int = self.first["extent_bytes"]
        self.moved_extents = moved_bytes // self.extent_bytes
        self.amount = f"{self.moved_extents * self.extent_bytes / GIB:g} GiB"  # that is recalled at a time

    def call(self, method: str, *given: Any) -> Any:
        self._worker.send((method, given))
        answer = self._worker.receive()
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def resident_bytes(self) -> int:
        return int(self._memory.memory_info().rss)

    def recall(self, but_for_bytes: int) -> tuple[float, float]:
        """(when it was ordered, seconds until the memory was back, but for so much). Raises TimeoutError."""
        num_bytes = self.moved_extents * self.extent_bytes
        but_for_bytes = min(but_for_bytes, num_bytes // 2)
        return recalled(self._socket, self.first["lease"], num_bytes, lambda: self.resident_bytes, but_for_bytes, DEADLINE_S)


@contextmanager
def engine(device: PrivateDevice, moved_bytes: int, max_bytes: int, **arguments: Any) -> Iterator[EngineProcess]:
    """Start a process with an engine; its pool holds at most `max_bytes`."""
    arguments = {"max_bytes": max_bytes, "min_bytes": moved_bytes // 16, **arguments}
    with Worker(serve, arguments, core=0) as worker:
        yield EngineProcess(worker, device.socket, moved_bytes)


def shape(rig: EngineProcess, kind: str) -> None:
    """The pool at its largest: 5/4 of what is recalled of it, or 9/4 where half of each extent stays live."""
    rig.call("forget")
    if kind == "free":
        rig.call("resize_to", rig.first["most_extents"])
    else:
        rig.call("fill", 2 if kind == "half" else 1)
    if kind == "cached":
        rig.call("clear")


def recalls(rig: EngineProcess, kind: str, rounds: int, busy: bool) -> tuple[Samples, Samples, Samples, Samples, Samples]:
    """Seconds of recalls, under decode or idle, and of their bare cost; of the steps within a recall and of the others; of
    recalls from the end of the step that ran.
    """
    took, bare, within, outside, behind = Samples(), Samples(), Samples(), Samples(), Samples()
    copied = rig.moved_extents * rig.first["blocks_per_extent"] // 2 if kind == "half" else 0
    light = kind in ("free", "cached")
    for _ in range(rounds):
        shape(rig, kind)
        cost = rig.call("bare", rig.moved_extents, copied)
        bare.append(cost["copy"] + cost["unmap"])
        if busy:
            rig.call("computing", light, STEP_S)
            rig.call("decode", 8 if light else 0, 32)
        time.sleep((WARM_S if light else 0.03) if busy else 0.2)
        began, seconds = rig.recall(BUT_FOR_BYTES[kind])
        took.append(seconds)
        if busy:
            time.sleep(0.3)
            steps = rig.call("rest")[1:]
            behind.append(began + seconds - max((end for start, end in steps if start <= began < end), default=began))
            for start, end in steps:
                (within if end > began and start < began + seconds else outside).append(end - start)
            rig.call("computing", False)
        rig.call("clear")
    return took, bare, within, outside, behind


def ratio(name: str, over: Samples, under: Samples, target: float | None) -> Figure:
    """The ratio of the medians, and those within rounds."""
    within = [round(a / b, 3) for a, b in zip(over, under, strict=True)]
    return Figure(name, statistics.median(over) / statistics.median(under), "x", target, samples=within)


def recall_figures(rig: EngineProcess, kinds: list[str], parts: list[str], rounds: int) -> list[Figure]:
    figures = []
    for kind in kinds:
        for part, how, bound in ((kind, "idle", TARGETS[kind]), (f"{kind}-decode", "under decode", 3.0)):
            if part not in parts:
                continue
            took, bare, within, outside, behind = recalls(rig, kind, rounds, part != kind)
            figures += [
                ratio(f"recall of {rig.amount} of {KINDS[kind]}, {how} / bare", took, bare, bound),
                median_time("... recall", took, "ms"),
                median_time("... bare", bare, "ms"),
            ]
            if part != kind:
                if within:
                    share = percentile(within, 0.99) / percentile(outside, 0.99)
                    figures.append(Figure("... p99 of the steps within a recall / of the others", share, "x", 2.0))
                figures.append(median_time("... steps otherwise", outside, "ms"))
                if kind == "half":
                    figures.append(ratio("... from the end of the step that ran / bare", behind, bare, 1.3))
                else:
                    beyond = [a - b for a, b in zip(behind, bare, strict=True)]
                    figures.append(
                        median_time("... beyond bare, from the end of the step that ran", beyond, "ms", BEYOND_MS[kind])
                    )
    return figures


def growth_figures(rig: EngineProcess, rounds: int) -> list[Figure]:
    """An idle engine takes 1 GiB that it is granted, against mapping as much."""
    took, bare = Samples(), Samples()
    rig.call("resize_to", rig.first["most_extents"])
    for _ in range(rounds):
        rig.call("regrow", rig.moved_extents)  # what a virtual machine's host has lent to others is slow, once
        bare.append(rig.call("bare", rig.moved_extents, 0)["map"])
        took.append(rig.call("regrow", rig.moved_extents))
    return [
        ratio(f"growth by {rig.amount}, idle / bare mapping", took, bare, 1.3),
        median_time("... growth", took, "ms"),
        median_time("... bare", bare, "ms"),
    ]


def idle_figures(rig: EngineProcess, rounds: int) -> list[Figure]:
    """What an engine that grew, and has nothing to do any more, holds against what it held before it did."""
    least = rig.first["min_extents"]
    residents, pools = [], []
    for i in range(rounds + 1):
        before = rig.resident_bytes
        rig.call("fill")
        rig.call("clear")
        deadline = time.monotonic() + DEADLINE_S
        while (extents := rig.call("state")["extents"]) > least:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{extents - least} idle extents were not given back within {DEADLINE_S:g} s")
            time.sleep(0.01)
        if i:  # the first time code is loaded
            residents.append(rig.resident_bytes / before)
            pools.append(extents / least)
    return [
        median(f"idle memory, resident / before it grew by {rig.amount}", residents, "x", 1.05),
        median("idle memory, pool / its minimum", pools, "x", 1.05),
    ]


def speed_figures(rounds: int, new_tokens: int) -> list[Figure]:
    with Worker(compare_pools, rounds, SPEED_BYTES, new_tokens, core=0) as worker:
        pairs: list[tuple[float, float]] = worker.receive()
    return [
        median("tokens/s, elastic pool at rest / fixed pool", [b / a for a, b in pairs], "x", 0.98, "higher"),
        median("... fixed", [a for a, _ in pairs], "tokens/s"),
        median("... elastic", [b for _, b in pairs], "tokens/s"),
    ]


def figures_of(device: PrivateDevice, parts: list[str], moved: int, rounds: int | None, new_tokens: int) -> list[Figure]:
    """The figures of these parts; an engine serves those that want the same pool."""
    each = rounds or ROUNDS
    figures: list[Figure] = []
    pools: tuple[tuple[int, bool, tuple[str, ...]], ...] = (
        (5, True, ("cached",)),
        (5, False, ("free", "live", "growth")),
        (9, False, ("half",)),
    )
    for quarters, caching, served in pools:
        if not any(part.removesuffix("-decode") in served for part in parts):
            continue
        with engine(device, moved, moved * quarters // 4, caching=caching) as rig:
            figures += recall_figures(rig, [kind for kind in served if kind in KINDS], parts, each)
            if "growth" in served and "growth" in parts:
                figures += growth_figures(rig, each)
    if "idle" in parts:
        with engine(device, moved, moved * 17 // 16, idle_s=IDLE_S) as rig:
            figures += idle_figures(rig, each)
    if "speed" in parts:
        figures += speed_figures(rounds or SPEED_ROUNDS, new_tokens)
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=whole, help=f"default: {ROUNDS}, and {SPEED_ROUNDS} of the comparison of speeds")
    parser.add_argument("--only", type=names_of(PARTS, "part"), default=list(PARTS), metavar="PART,...")
    parser.add_argument("--moved", type=size, default=GIB, metavar="SIZE", help="recalled at a time (default 1GiB)")
    parser.add_argument("--new-tokens", type=whole, default=128, help="in the comparison of speeds (default %(default)s)")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    with PrivateDevice(CAPACITY_BYTES, Rules.of(CAPACITY_BYTES).headroom_bytes) as device, device.here():
        figures = figures_of(device, args.only, args.moved, args.rounds, args.new_tokens)
    report("elastic: recalls, growth, and what resizing costs", figures, args.seed, args.json)


if __name__ == "__main__":
    main()
