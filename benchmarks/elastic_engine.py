"""The engine process that `benchmarks.elastic` measures: a real `LLM("demo")`, controlled over a pipe.

Real: the engine and its pool (HostArena within a LeasedArena), its lease, its keeper thread, the runner's mapping, copying
and unmapping, the sampler. A stand-in, where `computing` is off: the model's forward pass, which takes a fixed time and gives
the same token always, so that a pool of 1 GiB (131,072 tokens of the demo model) is filled in a moment, and a decode step of
many long rows takes as long as on a device that is fast enough for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from benchmarks.stand_ins import Always
from pagetide import LLM, SamplingParams
from pagetide.allocator.host_arena import HostArena
from pagetide.cache.block_table import Index
from pagetide.cache.manager import CacheManager
from pagetide.engine.build import Engine
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

    def __init__(
        self, max_bytes: int, min_bytes: int, idle_s: float = FOR_EVER, share: bool = True, caching: bool = False
    ) -> None:  # fmt: skip
        self.llm = LLM(
            "demo", device="cpu", dtype="float32", kv_memory={"min": min_bytes, "max": max_bytes}, idle_s=idle_s,
            share=share, max_seqs=MAX_SEQS, prefix_caching=caching,
        )  # fmt: skip
        self._numbers = iter(range(1 << 60))
        self._names: list[str] = []  # of all requests that were not ended by `clear`
        self._forecast = Forecast()
        self._decoding: threading.Thread | None = None
        self._stop = threading.Event()
        self._steps: list[tuple[float, float]] = []  # (began, ended) of each step of the driving thread
        with self.llm.locked_engine() as engine:
            core, scheduler = engine.core, engine.core.scheduler
            limits = replace(scheduler.limits, max_step_tokens=MAX_SEQS * FILLER)  # so that one step fills a pool
            core.scheduler = Scheduler(scheduler.cache, limits, scheduler.cost, self._forecast)
            self._model = core.runner.model
            self._vocab_size = engine.encoder.vocab_size

    def computing(self, on: bool, step_s: float = 0.0) -> None:
        """Let the model compute, or let a step take `step_s`, in which other threads run as they do beside torch."""
        with self.llm.locked_engine() as engine:
            engine.core.runner.model = self._model if on else Always(TOKEN, self._vocab_size, step_s)

    # ---- the pool ---------------------------------------------------------------------------------

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
            names = [
                self._add(engine, FILLER - SLACK, CONTEXT - FILLER)
                for _ in range(blocks // (FILLER // cache.block_size))
            ]
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

    # ---- decoding ---------------------------------------------------------------------------------

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
                "live": scheduler.cache.pool.counts().live,
                "cached": scheduler.cache.pool.counts().cached,
                "running": scheduler.num_running,
                "waiting": scheduler.num_waiting,
                "preemptions": scheduler.stats.preemptions,
                "moved": scheduler.stats.moved_blocks,
                "wanted": scheduler.pool.wanted_blocks(),
                "name": None if lease is None else lease.name,
                "held": None if lease is None else lease.held_bytes,
                "granted": None if lease is None else lease.granted_bytes,
                "recall": None if lease is None or lease.recall is None else lease.recall.target_bytes,
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


def compare_pools(rounds: int, pool_bytes: int, new_tokens: int) -> list[tuple[float, float]]:
    """Output tokens a second of an LLM with a fixed pool and of one that could breathe, which take turns; no extent moves."""
    ids = np.random.default_rng(0).integers(5, 900, (16, 48)).tolist()
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
    with LLM(
        "demo", device="cpu", dtype="float32", kv_memory=pool_bytes, share=False, prefix_caching=False
    ) as fixed:  # fmt: skip
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
            return pairs


def fix_pool(llm: LLM) -> None:
    """Replace an LLM's pool by a fixed one: mapped as a whole, without extents, never resized."""
    with llm.locked_engine() as engine:
        core, arena, limits = engine.core, engine.arena, engine.core.scheduler.limits
        arena.map([e for e in range(arena.num_extents) if e not in arena.mapped_extents])
        core.memory = None
        plan = engine.plan
        core.scheduler = Scheduler(
            CacheManager(plan.num_blocks, plan.block_size, limits.num_rows, plan.max_model_len), limits
        )


def serve_comparison(pipe: Connection, *arguments: Any) -> None:
    """The process of `compare_pools`."""
    torch.set_num_threads(1)
    pipe.send(compare_pools(*arguments))


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
