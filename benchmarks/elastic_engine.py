"""The engine that `benchmarks.elastic` measures: a process with a real `LLM("demo")`, told what to do over a pipe.

Real: the engine and its pool (HostArena within a LeasedArena), its lease, its keeper thread, the runner's mapping, copying
and unmapping. Stands in, where `computing` is off: the forward pass, which takes a fixed time and samples the same token
always, so that a pool of 1 GiB (131,072 tokens of the demo model) is filled in a moment, and a decode step of many long
rows takes as long as on a device that is fast enough for them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from pagetide import LLM, SamplingParams
from pagetide.allocator.host_arena import HostArena
from pagetide.cache.manager import CacheManager
from pagetide.scheduler.plan import Failure, Plan
from pagetide.scheduler.request import Request, Sampling
from pagetide.scheduler.scheduler import Scheduler

MIB = 1 << 20
FOR_EVER = 1e6  # seconds
CONTEXT = 1024
FILLER = 512  # tokens for which a row that fills the pool has blocks: 32
SLACK = 15  # of these are still to come, so that some steps need no more blocks
MAX_SEQS = 640  # so many of them


class Rig:
    """One engine in its process, with its pool brought into any shape between two measurements."""

    def __init__(
        self, max_kv: str, min_kv: str = "64MiB", idle_s: float = FOR_EVER, share: bool = True, caching: bool = False
    ) -> None:
        self.llm = LLM(
            "demo", kv_memory={"min": min_kv, "max": max_kv}, idle_s=idle_s, share=share, max_seqs=MAX_SEQS,
            prefix_caching=caching,
        )  # fmt: skip
        engine = self.llm._desk.engine
        assert engine is not None
        self.engine, self.core = engine, engine.core
        assert self.core.memory is not None
        self.memory = self.core.memory
        self.lock = self.llm._desk.lock
        self._numbers = iter(range(1 << 60))
        self._computed = self.core.runner._compute
        self._step_s = 0.0
        self._decoding: threading.Thread | None = None
        self._stop = threading.Event()
        self._steps: list[tuple[float, float]] = []  # (began, ended) of each step of the driving thread

    # ---- the stand-in of the model ----------------------------------------------------------------

    def computing(self, on: bool, step_s: float = 0.0) -> None:
        """Let the model compute, or let a step take `step_s`, in which other threads run as they do beside torch."""
        self._step_s = step_s
        self.core.runner._compute = self._computed if on else self._pretend

    def _pretend(self, plan: Plan, chunks: np.ndarray) -> tuple[np.ndarray, list[Failure]]:
        if self._step_s:
            time.sleep(self._step_s)
        return np.full(len(chunks), 7, np.int32), []

    # ---- the pool ---------------------------------------------------------------------------------

    @property
    def extent_bytes(self) -> int:
        return self.engine.arena.extent_bytes

    def resize_to(self, num_extents: int) -> float:
        """Have the pool at `num_extents` while nobody needs it. Growth is granted first.

        Returns the seconds from the plan to its result.
        """
        with self.lock:
            scheduler = self.core.scheduler
            missing = num_extents - scheduler.num_extents
            if missing > 0:
                self._have_granted(missing * self.extent_bytes)
            began = time.perf_counter()
            moved = scheduler.grow(missing) if missing > 0 else scheduler.give_back(-missing)
            self.core.step()
            took = time.perf_counter() - began
            assert moved == abs(missing) and len(self.engine.arena.mapped_extents) == num_extents, "no such pool"
            return took

    def _have_granted(self, more_bytes: int) -> None:
        lease = self.memory.lease
        if lease is None:
            return
        target = lease.held_bytes + more_bytes
        deadline = time.monotonic() + 20
        while lease.granted_bytes < target:  # not before the cool-down of the last recall is over
            lease.ask(target, expires_s=1.0)
            lease.wait_granted(target, 0.3)
            assert time.monotonic() < deadline, f"{target:,} bytes are not granted, only {lease.granted_bytes:,}"

    def regrow(self, num_extents: int) -> float:
        """Give `num_extents` idle extents back, and take them again, granted still. Returns the seconds of the taking."""
        now = self.core.scheduler.num_extents
        self.resize_to(now - num_extents)
        return self.resize_to(now)

    def idle_after(self, seconds: float) -> None:
        """What nobody needs goes after so long."""
        self.memory._idle_s = seconds

    def growing(self, on: bool) -> None:
        """Whether the pool may grow by itself: not while a recall is measured by what the whole process holds."""
        self.memory._grow_at = 0.0 if on else FOR_EVER + time.monotonic()

    def add(self, tokens: int, new: int, priority: int = 0) -> str:
        number = next(self._numbers)
        prompt = np.random.default_rng(number).integers(5, 900, tokens).astype(np.int32)
        self.core.add(Request(f"b{number}", prompt, Sampling(new), priority, self.core.clock()))
        return f"b{number}"

    def fill(self, blocks: int, every: int) -> int:
        """Rows that hold about `blocks` blocks; of each `every` of them all but one are ended again. Returns those left.

        Rows lie one behind the other, so the ended ones leave holes in every extent.
        """
        self.computing(False)
        scheduler = self.core.scheduler
        limits = scheduler.limits
        with self.lock:
            names = [
                self.add(FILLER - SLACK, CONTEXT - FILLER)
                for _ in range(blocks // (FILLER // scheduler.cache.block_size))
            ]
            scheduler.limits = replace(limits, max_step_tokens=len(names) * FILLER, forecast=False)
            self.core.step()
            scheduler.limits = limits
            assert scheduler.num_running == len(names), "the pool does not hold the rows"
            for i, name in enumerate(names):
                if i % every:
                    self.core.abort(name)
            self.core.step()
            return self.core.scheduler.num_running

    def forget(self) -> None:
        """Let nothing be cached."""
        self.llm.reset_prefix_cache()

    def clear(self) -> None:
        """End all requests. What they computed stays cached, if that is kept."""
        with self.lock:
            for name in list(self.core.scheduler._sequences):
                self.core.abort(name)
            while self.core.has_work:
                self.core.step()
        assert self.core.scheduler.cache.counts().live == 0

    def bare(self, num_extents: int, copied_blocks: int) -> dict[str, float]:
        """Seconds to map extents of an arena of its own, to copy as many blocks of it one by one, and to unmap it.

        It is mapped twice and timed the second time: a virtual machine's host lends free memory to others, and what comes
        back from there is slow, once.
        """
        arena = HostArena((2 if copied_blocks else 1) * num_extents, self.extent_bytes)
        every = range(num_extents)
        arena.map(every)
        arena.unmap(every)
        costs = {"map": timed(lambda: arena.map(every)), "copy": 0.0}
        if copied_blocks:
            arena.map(range(num_extents, 2 * num_extents))
            blocks = np.frombuffer(arena.buffer, np.uint8).reshape(-1, self.engine.plan.geometry.block_stride)
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

    # ---- decoding ---------------------------------------------------------------------------------

    def decode(self, rows: int, tokens: int) -> None:
        """Start a thread that steps, with `rows` requests of `tokens` tokens and what they generate always running."""
        self._stop.clear()
        self._steps = []

        def drive() -> None:
            while not self._stop.is_set():
                with self.lock:
                    scheduler = self.core.scheduler
                    for _ in range(rows - scheduler.num_running - scheduler.num_waiting):
                        self.add(tokens, CONTEXT - tokens)
                    began = time.perf_counter()
                    self.core.step()
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
        with self.lock:
            scheduler, lease = self.core.scheduler, self.memory.lease
            return {
                "extents": len(self.engine.arena.mapped_extents),
                "extent_bytes": self.extent_bytes,
                "min_extents": self.engine.plan.min_extents,
                "blocks_per_extent": scheduler.cache.blocks_per_extent,
                "live": scheduler.cache.counts().live,
                "cached": scheduler.cache.counts().cached,
                "running": scheduler.num_running,
                "waiting": scheduler.num_waiting,
                "preemptions": scheduler.stats.preemptions,
                "moved": scheduler.stats.moved_blocks,
                "wanted": scheduler.wanted_blocks(),
                "name": None if lease is None else lease.name,
                "held": None if lease is None else lease.held_bytes,
                "granted": None if lease is None else lease.granted_bytes,
                "recall": None if lease is None or lease.recall is None else lease.recall.target_bytes,
            }


def timed(work: Callable[[], None]) -> float:
    """Seconds that it took."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare_pools(rounds: int, size: str) -> list[tuple[float, float]]:
    """Output tokens a second of an LLM with a fixed pool and of one that could breathe, which take turns; no extent moves."""
    ids = np.random.default_rng(0).integers(5, 900, (16, 48)).tolist()
    sampling = SamplingParams(max_new_tokens=128, temperature=0, ignore_eos=True)
    with LLM("demo", kv_memory=size, share=False, prefix_caching=False) as fixed:
        fix_pool(fixed)
        rig = Rig(size, idle_s=FOR_EVER)
        rig.resize_to(rig.engine.arena.num_extents)
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
            return pairs


def fix_pool(llm: LLM) -> None:
    """Make an LLM's pool what it was before pools could breathe: mapped as a whole, without extents, nobody to move it."""
    engine = llm._desk.engine
    assert engine is not None
    core, old = engine.core, engine.core.scheduler
    engine.arena.map([e for e in range(engine.arena.num_extents) if e not in engine.arena.mapped_extents])
    cache = CacheManager(engine.plan.num_blocks, engine.plan.block_size, old.limits.seats, engine.plan.max_model_len)
    core.memory = None
    core.scheduler = Scheduler(cache, old.limits)


def serve_comparison(pipe: Connection, core: int | None, arguments: dict[str, Any]) -> None:
    """The process of `compare_pools`."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    pipe.send(compare_pools(**arguments))


def serve(pipe: Connection, core: int | None, arguments: dict[str, Any]) -> None:
    """The process: `(method, positional arguments)` in, what it returned out, until None comes."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    rig = Rig(**arguments)
    pipe.send(rig.state())
    try:
        while (asked := pipe.recv()) is not None:
            method, given = asked
            call: Callable[..., Any] = getattr(rig, method)
            try:
                pipe.send(call(*given))
            except Exception as error:
                pipe.send(error)
                raise
    finally:
        rig.llm.close()
