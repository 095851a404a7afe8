"""Recalls of free blocks and of live blocks that are swapped out, and the cost of an elastic pool per step.

A recall is timed from the order, sent to the broker as `vram-monitor recall` sends it, until the driver reports the memory
free. Real: broker, lease, keeper thread, preemption, swap, unmapping. No step runs or is pending in the first two
measurements. In the third, a step's time is the interval between the ends of two consecutive steps.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.figures import Figure
from pagetide.engine.llm import Stream

from .bandwidth import TO_HOST
from .bench import Bench
from .decode import greedy
from .report import Item, bounded, unmeasured
from .shared import FOR_EVER_S, PoolRig, rig
from .steps import Steps, watched

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
        yield from _breathing(bench, one)


def _free(bench: Bench, one: PoolRig) -> Iterator[Item]:
    extents = bench.scale.recall_bytes // one.extent_bytes
    least = len(one.arena.mapped_extents)
    samples, alone = [], []
    for _ in range(bench.scale.recall_rounds):
        one.resize_to(least + extents)
        began = time.perf_counter()
        one.resize_to(least)
        alone.append(1e3 * (time.perf_counter() - began))
        one.resize_to(least + extents)
        samples.append(1e3 * one.recall(extents * one.extent_bytes))
    yield bounded("recall_free", statistics.median(samples), samples)
    yield Figure("... the step that unmaps them, by itself", statistics.median(alone), "ms", samples=alone)


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
    yield Figure(
        "... of the recalled bytes, swapped out", statistics.median(shares), "x", better="higher", samples=shares
    )
    yield Figure("... their copy, as one large one", 1e3 * copy_s, "ms")


def _breathing(bench: Bench, one: PoolRig) -> Iterator[Item]:
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
                        raise RuntimeError(
                            f"the rows decoded their {MANY_TOKENS:,} tokens before the recalls were over"
                        )
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
    p99 = [samples[min(len(samples) - 1, int(0.99 * len(samples)))] for samples in (quiet, busy)]
    yield bounded("breathing", p99[1] / p99[0])
    yield Figure("... steps without, p99", p99[0], "ms", samples=quiet)
    yield Figure("... steps while the pool breathes, p99", p99[1], "ms", samples=busy)
    yield Figure("... steps while the pool breathes, median", statistics.median(busy), "ms")


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
