"""Recalls of free blocks and of live blocks that are swapped out, and the cost of an elastic pool per step.

A recall is timed from the order, sent to the broker as `vram-monitor recall` sends it, until the driver reports the memory
free. Real: broker, lease, keeper thread, preemption, swap, unmapping. No step runs or is pending in the first two
measurements. In the third, a step's time is the interval between the ends of two consecutive steps.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.figures import Figure, percentile
from benchmarks.processes import recalled
from pagetide import LLM
from pagetide.engine.llm import Stream

from .bandwidth import TO_HOST
from .bench import Bench
from .decode import engine, greedy
from .parts import Item, bounded, unmeasured
from .steps import Steps, watched

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from monitors import MonitorProcess

DEADLINE_S = 30.0
FOR_EVER_S = 1e6


class PoolRig:
    """The engine's inside: its pool brought into shape, recalls ordered as people order them."""

    def __init__(self, bench: Bench, llm: LLM, socket: Path) -> None:
        self.bench, self.llm = bench, llm
        self._socket = socket
        with llm.locked_engine() as engine:
            if engine.core.memory is None or engine.core.memory.lease is None:
                raise RuntimeError("the engine has no elastic pool with a lease here; its log says why")
            self.arena, self.lease = engine.arena, engine.core.memory.lease
            self.blocks_per_extent = engine.core.scheduler.cache.pool.blocks_per_extent
            self.block_size = engine.plan.block_size

    @property
    def extent_bytes(self) -> int:
        return int(self.arena.extent_bytes)

    def held_bytes(self) -> int:
        """What is held of the device, as its driver says; on a CPU, where others come and go, as the arena says."""
        if self.bench.clock.cuda:
            free, total = torch.cuda.mem_get_info()
            return total - free
        return int(self.arena.mapped_bytes)

    def have_granted(self, more_bytes: int) -> None:
        """Ask until the lease covers so much more than is held; steps may go on meanwhile. Raises TimeoutError.

        Until a recall is answered the grant stays and growth is called off: `recall` returns while a little of the memory still
        goes back in the background.
        """
        deadline = time.monotonic() + DEADLINE_S
        while self.lease.granted_bytes < (target := self.lease.held_bytes + more_bytes) or self.lease.recall is not None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{target:,} bytes are not granted, only {self.lease.granted_bytes:,}")
            self.lease.ask(target, expires_s=1.0)  # not granted before the cool-down of the last recall is over
            time.sleep(0.02)  # meanwhile steps, or the keeper of memory, take in what the broker says

    def resize_to(self, num_extents: int) -> None:
        """Resize the pool to `num_extents` mapped extents while no request needs them.

        Raises TimeoutError if the lease is not granted more, and RuntimeError if another number is mapped afterwards.
        """
        missing = num_extents - len(self.arena.mapped_extents)
        if missing > 0:
            self.have_granted(missing * self.extent_bytes)
        with self.llm.locked_engine() as engine:
            scheduler = engine.core.scheduler
            missing = num_extents - scheduler.pool.num_extents
            if missing > 0:
                scheduler.pool.grow(missing)
            else:
                scheduler.pool.give_back(-missing)
            engine.core.step(ahead=False)
            if len(self.arena.mapped_extents) != num_extents:
                raise RuntimeError(f"{len(self.arena.mapped_extents)} extents are mapped instead of {num_extents}")

    def idle_extents(self) -> int:
        """Extents that a recall has without preempting anybody."""
        with self.llm.locked_engine() as engine:
            return int(engine.core.scheduler.pool.idle_extents)

    def recall(self, num_bytes: int) -> float:
        """Seconds from the order until the device has the memory back, but for 1/64 of it. Raises TimeoutError."""
        but_for_bytes = num_bytes // 64
        return recalled(self._socket, self.lease.name, num_bytes, self.held_bytes, but_for_bytes, DEADLINE_S)[1]


@contextmanager
def rig(bench: Bench, members: tuple[int, ...] = (), **options: Any) -> Iterator[PoolRig]:
    """An LLM with a lease from a monitor that is its own. On a CPU both share a test device with the processes `members`."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "run"
        arguments: list[str] = []
        if bench.scale.capacity_bytes is not None:
            arguments += ["--capacity", str(bench.scale.capacity_bytes)]
            arguments += ["--members", ",".join(map(str, members))] if members else []
        source = "nvml" if bench.clock.cuda else "host"
        with (
            patch.dict(os.environ, PAGETIDE_RUNTIME_DIR=str(directory)),
            MonitorProcess(directory, *arguments, source=source),
            engine(bench, share=True, **options) as llm,
        ):
            socket = next(path for path in directory.iterdir() if path.is_socket())
            yield PoolRig(bench, llm, socket)


BREATHING_ROWS = 16
FEW_TOKENS, MANY_TOKENS = 16, 4096  # still to come, of rows that stand still and of rows that decode all the while


def measure(bench: Bench) -> Iterator[Item]:
    """The three bounds; raw samples in ms."""
    scale = bench.scale
    pool = {"min": scale.recall_bytes // 2, "max": scale.kv_bytes}
    tier = 4 * scale.recall_bytes
    with rig(bench, kv_memory=pool, host_kv_memory=tier, idle_s=FOR_EVER_S) as one:
        yield from _free(bench, one)
        yield from _live(bench, one)
        yield from _resizing(bench, one)


def _free(bench: Bench, one: PoolRig) -> Iterator[Item]:
    extents = bench.scale.recall_bytes // one.extent_bytes
    least = len(one.arena.mapped_extents)
    samples = []
    for _ in range(bench.scale.recall_rounds):
        one.resize_to(least + extents)
        samples.append(1e3 * one.recall(extents * one.extent_bytes))
    yield bounded("recall_free", statistics.median(samples), samples)


def _live(bench: Bench, one: PoolRig) -> Iterator[Item]:
    """The pool is as full of running rows as they fill it; the recall preempts some, which are swapped out."""
    scale = bench.scale
    if TO_HOST not in bench.known:
        yield unmeasured("recall_live", "the large copy to the host was not measured")
        return
    copy_s = scale.recall_bytes / 1e9 / bench.known[TO_HOST]
    ratios, shares = [], []
    rows = max(1, 2 * scale.recall_bytes // (scale.recall_context * scale.kv_bytes_per_token))
    extents = _extents_for(one, rows, scale.recall_context + FEW_TOKENS)
    warm = int(bench.clock.cuda)  # a round in which the host's memory is taken and pinned
    for number in range(scale.recall_rounds + warm):
        one.llm.reset_prefix_cache()  # what the last round left
        one.resize_to(extents)
        with running(bench, one, rows, scale.recall_context, FEW_TOKENS, seed=100 + number):
            swapped = _swapped(one)
            idle = one.idle_extents()  # those ahead of need go first, and on top
            took = one.recall((scale.recall_bytes // one.extent_bytes + idle) * one.extent_bytes)
            if number >= warm:
                ratios.append(took / copy_s)
                shares.append((_swapped(one) - swapped) / scale.recall_bytes)
    yield bounded("recall_live", statistics.median(ratios), ratios)
    yield Figure("... of the recalled bytes, swapped out", statistics.median(shares), "x", better="higher", samples=shares)


def _resizing(bench: Bench, one: PoolRig) -> Iterator[Item]:
    """Rows decode; the pool, larger than they need, loses its free extents to recalls and gets them again, over and over."""
    scale = bench.scale
    extents = scale.recall_bytes // one.extent_bytes
    rows = min(BREATHING_ROWS, scale.rows)
    context = 1 + scale.context // 2
    one.llm.reset_prefix_cache()
    least = max(len(one.arena.mapped_extents), _extents_for(one, rows, context + MANY_TOKENS))
    one.resize_to(least + extents)
    with running(bench, one, rows, context, MANY_TOKENS, seed=200) as stream, watched(one.llm) as steps:
        stop = threading.Event()
        failed: list[BaseException] = []

        def drive() -> None:
            try:
                while not stop.is_set():
                    if next(stream, None) is None:
                        raise RuntimeError(f"the rows decoded {MANY_TOKENS:,} tokens before the recalls were over")
            except BaseException as error:
                failed.append(error)

        driver = threading.Thread(target=drive, name="steps")
        driver.start()
        try:
            _wait_for_steps(steps, scale.steps, failed)
            began = len(steps.all)
            for _ in range(scale.recall_rounds):
                one.recall(extents * one.extent_bytes)
                _grow_in_slices(one, least + extents, failed)
            _wait_for_steps(steps, len(steps.all) + 1, failed)
        finally:
            stop.set()
            driver.join()
    if failed:
        raise failed[0]
    took = [1e3 * step.took_s for step in steps.all]
    skipped = min(10, began // 2)
    quiet, busy = sorted(took[skipped:began]), sorted(took[began:])
    p99 = [percentile(samples, 0.99) for samples in (quiet, busy)]
    yield bounded("resizing", p99[1] / p99[0])
    yield Figure("... steps without, p99", p99[0], "ms", samples=quiet)
    yield Figure("... steps while the pool is resized, p99", p99[1], "ms", samples=busy)


def _grow_in_slices(one: PoolRig, num_extents: int, failed: list[BaseException]) -> None:
    """As the engine grows under load: as many extents before a step as its slice holds."""
    deadline = time.monotonic() + 20
    while (missing := num_extents - len(one.arena.mapped_extents)) > 0 and not failed:
        one.have_granted(missing * one.extent_bytes)  # again and again: steps measure what the process holds besides
        slice_extents = max(1, one.llm.stats()["memory"]["map_slice_bytes"] // one.extent_bytes)
        with one.llm.locked_engine() as engine:
            missing = num_extents - engine.core.scheduler.pool.num_extents
            if missing > 0:
                engine.core.scheduler.pool.grow(min(missing, slice_extents))
        if time.monotonic() > deadline:
            raise TimeoutError("the pool did not grow within 20 s")
        time.sleep(0.001)


def _wait_for_steps(steps: Steps, count: int, failed: list[BaseException]) -> None:
    deadline = time.monotonic() + 60
    while len(steps.all) < count and not failed:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(steps.all)} of {count} steps were made within a minute")
        time.sleep(0.005)


def _extents_for(one: PoolRig, rows: int, tokens: int) -> int:
    """Extents for rows of so many tokens each."""
    return -(-(rows * -(-tokens // one.block_size) + 1) // one.blocks_per_extent)


@contextmanager
def running(bench: Bench, one: PoolRig, rows: int, context: int, new_tokens: int, seed: int) -> Iterator[Stream]:
    """Rows of nearly `context` tokens that run, with about `new_tokens` still to come, and what they generate; the pool holds
    them all. No step is under way. Ended afterwards.
    """
    tokens = context - 8
    goal = one.llm.stats()["computed_tokens"] + rows * tokens
    stream = one.llm.stream(bench.prompts(rows, tokens, seed), greedy(new_tokens))
    try:
        while one.llm.stats()["computed_tokens"] < goal:
            if next(stream, None) is None:
                raise RuntimeError(f"{rows} rows did not run together: the first ended before the last had begun")
        with one.llm.locked_engine():  # has no step under way
            pass
        yield stream
    finally:
        stream.close()


def _swapped(one: PoolRig) -> int:
    """Bytes swapped out since the start."""
    stats = one.llm.stats()["host_tier"]
    return 0 if stats is None else int(stats["swapped_out_bytes"])
