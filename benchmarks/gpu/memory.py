"""An engine with more demand than memory, beside an external process that allocates and frees memory at random.

The external process (external_process.py) asks the driver alone, in pieces of at most the headroom. Every 20 ms the bytes that
the engine's pool holds are compared with those it could hold: its own, and what the driver calls free, less the headroom. A
share above 1 means that the headroom is not whole at that moment; it counts as 1.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.figures import Figure
from pagetide.allocator.lease_policy import Rules

from .bench import Bench
from .decode import greedy
from .external_process import AllocatingProcess
from .parts import Item, Note, bounded, unmeasured
from .recall import PoolRig, rig

LOOK_S = 0.02
REQUESTS = 512  # at a time: many more than fit
SHORTEST, LONGEST, GENERATED = 1, 4, 8  # of their prompts and outputs, in contexts of the scale
INTERVAL = 64  # tokens of a request between two looks whether the time is over
RAMP_SHARE = 0.9  # what the engine has to reach once before the average begins, or
RAMP_MOST = 0.4  # so much of the time has gone


def measure(bench: Bench) -> Iterator[Item]:
    """For `memory_s` seconds, less where the time box ends before."""
    scale = bench.scale
    total = _total(bench)
    headroom = Rules.of(total).headroom_bytes
    with (
        AllocatingProcess(bench.clock.cuda, scale.external_bytes, bench.seed) as external,
        rig(
            bench, (external.pid,), kv_memory={"min": scale.kv_bytes // 16, "max": _most(bench, total)}, idle_s=2.0,
            max_model_len=16 * scale.context, max_seqs=256,
        ) as one,
    ):  # fmt: skip
        yield from _watch(bench, one, external, total, headroom, min(bench.memory_s, bench.left_s - 8))


def _watch(
    bench: Bench, one: PoolRig, external: AllocatingProcess, total: int, headroom: int, seconds: float
) -> Iterator[Item]:
    shares, pools = [], []
    with _demand(bench, one) as demand:
        began = time.monotonic()
        external.begin(headroom, seconds / 80)
        ramp_s = None
        while (now := time.monotonic() - began) < seconds and not demand.raised:
            pool = int(one.arena.mapped_bytes)
            room = pool + _free(bench, total, external) - headroom
            share = min(1.0, pool / room) if room > 0 else 1.0
            if ramp_s is None and (share >= RAMP_SHARE or now > RAMP_MOST * seconds):
                ramp_s = now
            if ramp_s is not None:
                shares.append(share)
            pools.append(pool)
            time.sleep(LOOK_S)
        external_failures = external.end()
    failures = [external_failures, demand.failures, len(demand.raised)]
    yield bounded("failures", float(sum(failures)), failures)
    yield Note("memory", _told(one, demand, pools, headroom))
    if shares:
        yield bounded("held", statistics.fmean(shares), shares[:: max(1, len(shares) // 500)])
    else:
        yield unmeasured("held", "nothing was noted: see what the engine raised")
    if ramp_s is not None:
        yield Figure("... until the engine held its share first", ramp_s, "s")


def _told(one: PoolRig, demand: RequestLoad, pools: list[int], headroom: int) -> tuple[str, ...]:
    stats = one.llm.stats()
    memory = stats["memory"]
    return (
        f"engine: {demand.outputs} outputs, {demand.failures} of them errors; {stats['steps']} steps, "
        f"{stats['preemptions']} preemptions, {memory['refused_resizes']} refused resizes",
        f"pool: {min(pools, default=0) / 1e9:.2f} to {max(pools, default=0) / 1e9:.2f} GB; headroom {headroom / 1e9:.2f} GB",
        *(f"raised: {type(error).__name__}: {error}" for error in demand.raised),
        *(f"{key}: {memory[key]:,}" for key in ("recalls", "recalled_bytes", "grown_bytes", "given_back_bytes")),
    )


class RequestLoad:
    """Requests without end. Counts what came of them."""

    def __init__(self) -> None:
        self.outputs = self.failures = 0
        self.raised: list[BaseException] = []


@contextmanager
def _demand(bench: Bench, one: PoolRig) -> Iterator[RequestLoad]:
    """More requests than fit, all the time, in a thread of their own."""
    demand, stop = RequestLoad(), threading.Event()
    scale, rng = bench.scale, np.random.default_rng(bench.seed)

    def ask() -> None:
        while not stop.is_set():
            lengths = rng.integers(SHORTEST * scale.context, LONGEST * scale.context, REQUESTS).tolist()
            prompts = [rng.integers(1, scale.vocab, length).tolist() for length in lengths]
            stream = one.llm.stream(prompts, greedy(GENERATED * scale.context), stream_interval=INTERVAL)
            try:
                for chunk in stream:
                    if chunk.output is not None:
                        demand.outputs += 1
                        demand.failures += any(c.finish_reason == "error" for c in chunk.output.completions)
                    if stop.is_set():
                        break
            finally:
                stream.close()

    def run() -> None:
        try:
            ask()
        except BaseException as error:
            demand.raised.append(error)

    thread = threading.Thread(target=run, name="demand")
    thread.start()
    try:
        yield demand
    finally:
        stop.set()
        thread.join(60)


def _total(bench: Bench) -> int:
    if bench.scale.capacity_bytes is not None:
        return bench.scale.capacity_bytes
    return int(torch.cuda.mem_get_info()[1])


def _most(bench: Bench, total: int) -> int:
    """The pool's bound: what the device has; of a test device, as much as its host surely has."""
    return total if bench.clock.cuda else 4 * bench.scale.kv_bytes


def _free(bench: Bench, total: int, external: AllocatingProcess) -> int:
    if bench.clock.cuda:
        return int(torch.cuda.mem_get_info()[0])
    members: list[Any] = [psutil.Process(), psutil.Process(external.pid)]
    return total - sum(process.memory_info().rss for process in members)
