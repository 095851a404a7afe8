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
FILLER = 512  # tokens of a row that fills the pool: 32 blocks
MAX_SEQS = 640  # so many of them


class Rig:
    """One engine in its process, with its pool brought into any shape between two measurements."""

    def __init__(self, max_kv: str, min_kv: str = "64MiB", idle_s: float = FOR_EVER, share: bool = True) -> None:
        self.llm = LLM("demo", kv_memory={"min": min_kv, "max": max_kv}, idle_s=idle_s, share=share, max_seqs=MAX_SEQS)
        engine = self.llm._engine
        assert engine is not None
        self.engine, self.core = engine, engine.core
        self.lock = self.llm._lock
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

    def grow_to(self, num_extents: int) -> float:
        """Have the pool at `num_extents`, granted first. Returns the seconds from the plan to its result."""
        memory, lease = self.core.memory, self.core.memory.lease if self.core.memory else None
        assert memory is not None
        missing = num_extents - self.core.scheduler.num_extents
        if missing <= 0:
            return 0.0
        if lease is not None:
            target = lease.held_bytes + missing * self.extent_bytes
            deadline = time.monotonic() + 20
            while lease.granted_bytes < target:
                lease.ask(target, expires_s=1.0)
                lease.wait_granted(target, 0.3)
                assert time.monotonic() < deadline, f"{target:,} bytes are not granted but {lease.granted_bytes:,}"
        with self.lock:
            began = time.perf_counter()
            grown = self.core.scheduler.grow(missing)
            self.core.step()
            took = time.perf_counter() - began
        assert grown == missing and len(self.engine.arena.mapped_extents) == num_extents, "the pool did not grow"
        return took

    def regrow(self, num_extents: int) -> float:
        """Give `num_extents` idle extents back, and take them again, granted still. Returns the seconds of the taking."""
        with self.lock:
            now = self.core.scheduler.num_extents
            assert self.core.scheduler.give_back_idle(num_extents) == num_extents
            self.core.step()
        return self.grow_to(now)

    def add(self, tokens: int, new: int, priority: int = 0) -> str:
        name = f"b{next(self._numbers)}"
        prompt = np.random.default_rng(len(name)).integers(5, 900, tokens).astype(np.int32)
        self.core.add(Request(name, prompt, Sampling(new), priority, self.core.clock()))
        return name

    def fill(self, blocks: int, every: int) -> int:
        """Rows that hold about `blocks` blocks; of each `every` of them all but one are ended again. Returns those left.

        Rows lie one behind the other, so the ended ones leave holes in every extent.
        """
        self.computing(False)
        scheduler = self.core.scheduler
        limits = scheduler.limits
        with self.lock:
            names = [self.add(FILLER - 1, CONTEXT - FILLER) for _ in range(blocks // (FILLER // scheduler.cache.block_size))]
            scheduler.limits = replace(limits, max_step_tokens=len(names) * FILLER, forecast=False)
            self.core.step()
            scheduler.limits = limits
            assert scheduler.num_running == len(names), "the pool does not hold the rows"
            for i, name in enumerate(names):
                if i % every:
                    self.core.abort(name)
            self.core.step()
            return self.core.scheduler.num_running

    def clear(self) -> None:
        """End all requests."""
        with self.lock:
            for name in list(self.core.scheduler._sequences):
                self.core.abort(name)
            while self.core.has_work:
                self.core.step()
        assert self.core.scheduler.cache.counts().live == 0

    def bare(self, num_extents: int, copied_blocks: int) -> dict[str, float]:
        """Seconds to map, to copy `copied_blocks` blocks within, and to unmap as many extents of an arena of its own."""
        arena = HostArena(2 * num_extents if copied_blocks else num_extents, self.extent_bytes)
        began = time.perf_counter()
        arena.map(range(num_extents))
        mapped = time.perf_counter() - began
        copied = 0.0
        if copied_blocks:
            arena.map(range(num_extents, 2 * num_extents))
            blocks = np.frombuffer(arena.buffer, np.uint8).reshape(-1, self.engine.plan.geometry.block_stride)
            half = len(blocks) // 2
            step = half // copied_blocks
            began = time.perf_counter()
            for i in range(copied_blocks):
                blocks[half + i * step] = blocks[i * step]
            copied = time.perf_counter() - began
            del blocks
        began = time.perf_counter()
        arena.unmap(range(num_extents))
        unmapped = time.perf_counter() - began
        arena.close()
        return {"map": mapped, "copy": copied, "unmap": unmapped}

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
            scheduler, memory = self.core.scheduler, self.core.memory
            assert memory is not None
            lease = memory.lease
            return {
                "extents": len(self.engine.arena.mapped_extents),
                "extent_bytes": self.extent_bytes,
                "min_extents": self.engine.plan.min_extents,
                "blocks_per_extent": scheduler.cache.blocks_per_extent,
                "live": scheduler.cache.counts().live,
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


def compare_pools(rounds: int, size: str) -> list[tuple[float, float]]:
    """Output tokens a second of an LLM with a fixed pool and of one that could breathe, which take turns; no extent moves."""
    ids = np.random.default_rng(0).integers(5, 900, (16, 48)).tolist()
    sampling = SamplingParams(max_new_tokens=128, temperature=0, ignore_eos=True)
    with LLM("demo", kv_memory=size, share=False) as fixed:
        fix_pool(fixed)
        rig = Rig(size, idle_s=FOR_EVER)
        rig.grow_to(rig.engine.arena.num_extents)
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
    engine = llm._engine
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
