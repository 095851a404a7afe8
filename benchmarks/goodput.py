"""Goodput of two engines on one device, for real and simulated: static halves, elastic pools, a whole device for each engine.

    python -m benchmarks.goodput [--json FILE] [--data DIR] [--rounds 1] [--only static,leases,whole]
                                 [--seconds 60] [--step-ms 20] [--per-second 3] [--events FILE] [--seed 0]

Goodput is output tokens a second of the requests within the SLO: the first token at most FIRST_TOKEN_S after the request was
due, the others BETWEEN_S apart on average. The seconds are those in which requests come. Three arrangements take turns and
serve the same requests:

    static    each engine has a pool of half of POOL_BYTES, and no lease
    leases    both lease from one broker, a `vram-monitor serve`; each pool is between LEAST_BYTES and POOL_BYTES
    whole     each engine has a pool of POOL_BYTES, and no lease: more than the device has

With leases both pools together come to what the usual headroom (a sixteenth) and band (2 %) would leave of a device of
POOL_BYTES: less than the halves of `static` together. The test device is larger than that, since a lease covers a whole
process; what is over, besides its own headroom and band, is kept reserved from before the first growth on.

Each engine is a process on a core of its own with one thread (its model is a stand-in with a step time
of its own, everything else is real). The requests are the trace of code completions of Azure's, thinned, compressed in
time, prompts a fifth as long and outputs four times (16 to 192 tokens), so that memory is what is short; the second engine
gets the same stream an eighth of the time earlier, so that its bursts mostly come in the gaps of the first
(load.py; with `--data none` a synthetic one). Each engine is told of a request when it is due.

Each arrangement is then simulated with the real schedulers and policies (shared_device.py). A simulated step takes what the
steps of the fixed pools took in the same round, by a fit over tokens and sequences; mapping and unmapping what they take of
an arena beside them. `pool`, simulated alone, is one pool without a broker, of as many bytes as the leases come to: any idle
block goes to the engine that needs it, without delay. `--events` writes each step and first token of both kinds of run.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.arguments import above_0, add_data, names_of, parser_of
from benchmarks.figures import Figure, median, percentile, report
from benchmarks.load import BadTrace, Turn, two_streams
from benchmarks.processes import Worker
from benchmarks.shared_device import (
    Clock,
    ModelledBroker,
    ModelledDevice,
    ModelledEngine,
    PooledMemory,
    Served,
    Shape,
    SharedPool,
    lease_memory,
)
from benchmarks.stand_ins import output_of
from pagetide import LLM, SamplingParams
from pagetide.allocator.host_arena import HostArena
from pagetide.allocator.lease_policy import Rules
from pagetide.allocator.reservation import Reservation
from pagetide.common.units import GIB, MIB
from pagetide.engine import demo_model
from pagetide.engine.attention.context import StepContext
from pagetide.engine.execution.runner import PendingStep
from pagetide.engine.llm import Stream
from pagetide.engine.memory.engine_memory import EngineMemory
from pagetide.pressure import PrivateDevice
from pagetide.scheduler.outcome import StepOutputs
from pagetide.scheduler.plan import Plan, Result
from pagetide.scheduler.scheduler import Scheduler

MAX_SEQS = 256
MAX_STEP_TOKENS = 512  # so that no step takes long for a prompt's sake
MODULUS = 1 << 23  # a float32 holds whole numbers below it exactly


@dataclass(frozen=True, slots=True)
class Job:
    """What one engine is to do. With bounds of its pool it has a lease. A step takes `step_s`, and `token_s` for each token."""

    arrivals: Sequence[Turn]
    seed: int
    kv_memory: int | dict[str, int]
    step_s: float
    token_s: float


@dataclass(frozen=True, slots=True)
class Pool:
    """What a simulation has to know of an engine."""

    least_bytes: int | None  # what its lease promises; None without one
    block_bytes: int
    block_size: int
    blocks_per_extent: int
    num_blocks: int
    max_tokens: int  # of a sequence


@dataclass(slots=True)
class ServedRequest:
    """One request as its user saw it; times by time.monotonic, which processes share. Filled as tokens come."""

    due: float = 0.0
    first: float | None = None
    last: float | None = None
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step, real or simulated. Counters are those after it, since the start."""

    at_s: float  # its end
    took_s: float
    tokens: int
    chunks: int
    mapped: int  # extents
    unmapped: int
    moved: int  # blocks
    running: int  # sequences, after it
    waiting: int
    extents: int  # of the pool
    preemptions: int
    recalls: int = 0
    allowed_bytes: int = 0  # for the pool, by the lease
    base_bytes: int = 0  # that the process holds besides

    @classmethod
    def of(cls, began: float, now: float, plan: Plan, scheduler: Scheduler, memory: EngineMemory | None) -> StepRecord:
        """A step that has just ended."""
        moved = 0 if plan.copies is None else len(plan.copies.sources)
        step = cls(
            now, now - began, plan.num_tokens, len(plan.rows), len(plan.resize.map), len(plan.resize.unmap), moved,
            scheduler.num_running, scheduler.num_waiting, len(scheduler.cache.pool.mapped_extents), scheduler.stats.preemptions,
        )  # fmt: skip
        if memory is None or memory.lease is None:
            return step
        base_bytes: int = memory.to_dict()["base_bytes"]
        allowed_bytes = memory.lease.granted_bytes - base_bytes
        return replace(step, recalls=memory.stats.recalls, allowed_bytes=allowed_bytes, base_bytes=base_bytes)


@dataclass(frozen=True, slots=True)
class ServedRun:
    """What one engine did."""

    served: list[ServedRequest]
    steps: list[StepRecord]


def serve_job(pipe: Connection, job: Job) -> None:
    """The process: sends its `Pool`; told when to begin, serves all and says so; told to, sends its `ServedRun` and ends."""
    torch.set_num_threads(1)
    share = isinstance(job.kv_memory, dict)
    options: dict[str, Any] = {"max_seqs": MAX_SEQS, "max_step_tokens": MAX_STEP_TOKENS}
    with LLM("demo", device="cpu", dtype="float32", kv_memory=job.kv_memory, share=share, **options) as llm:
        driver = LoadDriver(llm, job)
        pipe.send(driver.pool)
        pipe.recv()
        driver.warm_up()
        pipe.send("ready")
        run = driver.replay(pipe.recv())
        pipe.send("done")
        pipe.recv()  # the others are done too; until then its memory may be recalled
        pipe.send(run)


class StandIn:
    """In place of the model: a step takes as long as the job says, and generates what the KV in the pool says.

    Each token leaves in its place, in K of the first layer, a sum over all tokens up to it. The next token follows from the
    sums that stand in one place of each block of its sequence, another place each step: so a block that was lost, moved to
    where its table does not say, or not computed again shows in the output.
    """

    def __init__(self, vocab_size: int, step_s: float, token_s: float) -> None:
        self._vocab_size, self._step_s, self._token_s = vocab_size, step_s, token_s
        self._weights = np.random.default_rng(0).integers(1, MODULUS, 1 << 16)  # of positions

    def __call__(
        self, *, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool, step: StepContext,
        logits_to_keep: torch.Tensor | int,
    ) -> SimpleNamespace:  # fmt: skip
        """See `Runner.model`."""
        until = time.monotonic() + self._step_s + self._token_s * input_ids.shape[1]
        positions = position_ids[0].numpy()
        chunks = np.repeat(np.arange(len(step.q_lens)), step.q_lens)  # by token
        self._write(step, chunks, input_ids[0].numpy(), positions)
        wanted = np.empty(0, np.int64) if isinstance(logits_to_keep, int) else logits_to_keep.numpy()
        tokens = self._read(step, chunks[wanted], positions[wanted] + 1)
        time.sleep(max(0.0, until - time.monotonic()))
        return output_of(torch.from_numpy(tokens), self._vocab_size)

    def _write(self, step: StepContext, chunks: np.ndarray, tokens: np.ndarray, positions: np.ndarray) -> None:
        """The sums of the step's tokens, each on top of what stands before its chunk."""
        stored, table = _sums(step), step.tables[0].numpy()
        starts = step.kv_lens - step.q_lens
        last = np.maximum(starts - 1, 0)
        before = stored[table[np.arange(len(starts)), last // step.block_size], last % step.block_size]
        summands = tokens * self._weights[positions] % MODULUS
        sums = np.cumsum(summands)
        sums += (np.where(starts > 0, before, 0).astype(np.int64) - (sums - summands)[step.q_starts])[chunks]
        stored[step.write_blocks[0].numpy(), step.write_offsets.numpy()] = sums % MODULUS

    def _read(self, step: StepContext, chunks: np.ndarray, known: np.ndarray) -> np.ndarray:
        """The next token of each of `chunks`, of which so many tokens have their sums in the pool."""
        if not len(chunks):
            return np.empty(0, np.int64)
        width = -(-int(known.max()) // step.block_size)
        places = (known - 1) % step.block_size
        written = np.arange(width) * step.block_size + places[:, None] < known[:, None]  # [chunks, blocks]
        blocks = np.where(written, step.tables[0].numpy()[chunks, :width], 0)
        sums = np.where(written, _sums(step)[blocks, places[:, None]], 0).astype(np.int64)
        tokens: np.ndarray = (sums * self._weights[:width]).sum(axis=1) // 64 % self._vocab_size
        return tokens


def _sums(step: StepContext) -> np.ndarray:
    """Where the sums are: [blocks, places in a block]."""
    sums: np.ndarray = step.layers[0].key.numpy()[:, :, 0, 0]
    return sums


class LoadDriver:
    """Brings requests to an engine when they are due, and writes down its steps and when tokens came."""

    def __init__(self, llm: LLM, job: Job) -> None:
        self._llm, self._job = llm, job
        self._prompts = _prompts(llm, job.arrivals, job.seed)
        self._records: dict[str, ServedRequest] = {}  # by request id
        self._steps: list[StepRecord] = []
        self._plan: Plan | None = None  # of the step that runs
        with llm.locked_engine() as engine:
            core, plan = engine.core, engine.plan
            lease = None if core.memory is None else core.memory.lease
            self.pool = Pool(
                None if lease is None else lease.min_bytes, plan.geometry.block_stride, plan.block_size,
                plan.geometry.blocks_per_extent, plan.num_blocks, plan.max_model_len,
            )  # fmt: skip
            core.runner.model = StandIn(engine.encoder.vocab_size, job.step_s, job.token_s)
            core.runner.begin = self._and_plans_noted(core.runner.begin)
            core.step = self._and_tokens_noted(core.step)  # also of steps that the keeper of memory makes
            self._core = core

    def warm_up(self) -> None:
        """Serve a request: the first is slow."""
        stream, _ = self._submit(0, time.monotonic())
        _read_all(stream)

    def replay(self, began: float) -> ServedRun:
        """All requests, each when it is due, until the last has ended."""
        streams: SimpleQueue[Stream | None] = SimpleQueue()
        served: list[ServedRequest] = []
        del self._steps[:]
        with ThreadPoolExecutor(1) as reader:
            read = reader.submit(_read_each, streams)
            try:
                for number, turn in enumerate(self._job.arrivals):
                    time.sleep(max(0.0, began + turn.at_s - time.monotonic()))
                    stream, record = self._submit(number, began + turn.at_s)
                    served.append(record)
                    streams.put(stream)
            finally:
                streams.put(None)
            read.result()
        return ServedRun(
            [_since(began, one) for one in served], [replace(step, at_s=step.at_s - began) for step in self._steps]
        )

    def _submit(self, index: int, due: float) -> tuple[Stream, ServedRequest]:
        params = SamplingParams(max_new_tokens=self._job.arrivals[index].output_tokens, temperature=0.0, ignore_eos=True)
        stream = self._llm.stream(self._prompts[index], params, stream_interval=1 << 20)
        (request,) = stream.requests
        record = self._records.setdefault(request.request_id, ServedRequest())
        record.due = due
        return stream, record

    def _and_plans_noted(self, begin: Callable[[Plan], PendingStep]) -> Callable[[Plan], PendingStep]:
        def noted(plan: Plan) -> PendingStep:
            self._plan = plan
            return begin(plan)

        return noted

    def _and_tokens_noted(self, step: Callable[[bool], StepOutputs]) -> Callable[[bool], StepOutputs]:
        def noted(ahead: bool) -> StepOutputs:
            self._plan, began = None, time.monotonic()
            emissions = step(ahead)
            now = time.monotonic()
            for request_id, token in zip(emissions.request_ids, emissions.tokens, strict=True):
                record = self._records.setdefault(request_id, ServedRequest())
                record.first, record.last = now if record.first is None else record.first, now
                record.token_ids.append(token)
            if self._plan is not None:
                scheduler = self._core.scheduler
                self._steps.append(StepRecord.of(began, now, self._plan, scheduler, self._core.memory))
            return emissions

        return noted


def _since(began: float, one: ServedRequest) -> ServedRequest:
    first, last = (None if at is None else at - began for at in (one.first, one.last))
    return replace(one, due=one.due - began, first=first, last=last)


def _read_each(streams: SimpleQueue[Stream | None]) -> None:
    """Read streams one after the other, until there is None: reading one runs steps, which advance all requests."""
    while (stream := streams.get()) is not None:
        _read_all(stream)


def _read_all(stream: Stream) -> None:
    """Read a request's stream to its end. Raises RuntimeError where it ended without all its tokens."""
    (output,) = stream.outputs()
    if output.finish_reason != "length":
        raise RuntimeError(f"a request ended as {output.finish_reason!r}: {output.error}")


def _prompts(llm: LLM, arrivals: Sequence[Turn], seed: int) -> list[list[int]]:
    """Pieces of the text that the model has not seen, as long as the trace says."""
    text = Path(str(demo_model.__file__)).with_name("heldout.txt").read_text("utf-8")
    tokens = [token for passage in text.split("\n%%\n") if passage.strip() for token in llm.tokenize(passage.strip())]
    rng = random.Random(seed)
    starts = [rng.randrange(len(tokens) - arrival.prompt_tokens) for arrival in arrivals]
    return [tokens[at : at + arrival.prompt_tokens] for at, arrival in zip(starts, arrivals, strict=True)]


FIRST_TOKEN_S, BETWEEN_S = 0.5, 0.075  # the SLO
STEP_MS, TOKEN_SHARE = 20.0, 0.004  # a step takes STEP_MS, and TOKEN_SHARE of that for each token that it computes
PER_SECOND = 3.0  # requests of each engine, on average
POOL_BYTES = 96 * MIB
LEAST_BYTES = 9 * MIB  # whole extents: they are a 32nd of the pool
CAPACITY_BYTES = 4 * GIB  # of the test device; all but what is contended is reserved
HEADROOM_BYTES = POOL_BYTES // 16
SETTLE_S = 2.5  # until the broker has forgotten how the processes grew at their start
STEADY_HEAP = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "2"}  # large tensors go back when freed (glibc)
POOLS: dict[str, int | dict[str, int]] = {
    "static": POOL_BYTES // 2,
    "leases": {"min": LEAST_BYTES, "max": POOL_BYTES},
    "whole": POOL_BYTES,
}
MOST_OFF = 10.0  # percent between a run's goodput and its simulation's
_ARENA_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """What all arrangements serve."""

    arrivals: Sequence[list[Turn]]  # of each engine
    seconds: float
    step_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class Round:
    """What one arrangement gave in one round, for real or simulated."""

    engines: list[ServedRun]
    pools: list[Pool]  # of a real one
    seconds: float

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return sum(tokens for one, tokens in self._each() if _in_time(one, tokens)) / self.seconds

    @property
    def in_time(self) -> float:
        """Share of the requests."""
        good = [_in_time(one, tokens) for one, tokens in self._each()]
        return sum(good) / len(good)

    @property
    def outputs(self) -> list[list[int]]:
        """Token ids of all requests of both engines."""
        return [one.token_ids for one, _ in self._each()]

    @property
    def first_s(self) -> float:
        """Seconds to the first token, p95."""
        return percentile([float("inf") if one.first is None else one.first - one.due for one, _ in self._each()], 0.95)

    @property
    def plain_s(self) -> float:
        """Seconds of a step that only computed, median."""
        return statistics.median(took for _, took in _plain_steps(self.engines))

    def count(self, name: str) -> int:
        """Preemptions or recalls of both engines."""
        return sum(getattr(engine.steps[-1], name) - getattr(engine.steps[0], name) for engine in self.engines)

    def _each(self) -> list[tuple[ServedRequest, int]]:
        return [(one, len(one.token_ids)) for engine in self.engines for one in engine.served]


def _in_time(one: ServedRequest, tokens: int) -> bool:
    if one.first is None or one.last is None:
        return False
    return one.first - one.due <= FIRST_TOKEN_S and one.last - one.first <= BETWEEN_S * (tokens - 1)


def run(arrangement: str, load: TraceLoad) -> Round:
    """One arrangement, from the start of both engines to their last token."""
    with ExitStack() as stack:
        if arrangement == "leases":
            device = stack.enter_context(PrivateDevice(CAPACITY_BYTES, HEADROOM_BYTES))
            stack.enter_context(device.here())
        jobs = [
            Job(some, load.seed + 100_000 * i, POOLS[arrangement], load.step_s, TOKEN_SHARE * load.step_s)
            for i, some in enumerate(load.arrivals)
        ]
        workers = [stack.enter_context(Worker(serve_job, job, core=number)) for number, job in enumerate(jobs)]
        pools: list[Pool] = [worker.receive() for worker in workers]
        if arrangement == "leases":  # before anybody grows
            (uuid,) = {lease.device_uuid for lease in device.leases()}
            stack.enter_context(Reservation.granted(device.socket, uuid, _reserved_bytes(pools), wait_s=30))
            time.sleep(SETTLE_S)
        _told_each(workers, "warm up")
        _told_each(workers, time.monotonic() + 0.2)
        return Round(_told_each(workers, "tell"), pools, load.seconds)


def _contended_bytes() -> int:
    """What both pools come to under leases."""
    usual = Rules.of(POOL_BYTES)
    return POOL_BYTES - usual.headroom_bytes - usual.band_bytes


def _reserved_bytes(pools: Sequence[Pool]) -> int:
    """What is to be reserved, so that both pools come to the contended bytes together."""
    promised = [pool.least_bytes for pool in pools if pool.least_bytes is not None]
    growth = _contended_bytes() - len(promised) * LEAST_BYTES
    rules = Rules.of(CAPACITY_BYTES, HEADROOM_BYTES)
    return CAPACITY_BYTES - rules.headroom_bytes - rules.band_bytes - sum(promised) - growth


def _told_each(workers: list[Worker], message: object) -> list[Any]:
    """What each engine answers to `message`."""
    for worker in workers:
        worker.send(message)
    return [worker.receive() for worker in workers]


# ---- the simulation -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured seconds: of a step, for each of its tokens and sequences, and to map and unmap an extent."""

    step_s: float
    token_s: float
    chunk_s: float
    map_s: float
    unmap_s: float

    @classmethod
    def measured(cls, engines: Sequence[ServedRun], extent_bytes: int) -> Costs:
        """By least squares over the plain steps of `engines`, but for the quarter furthest off; and by an arena of its own."""
        plain = _plain_steps(engines)
        sizes = np.array([(1.0, step.tokens, step.chunks) for step, _ in plain])
        took_s = np.array([took for _, took in plain])
        kept = np.ones(len(plain), np.bool_)
        for _ in range(4):
            fit = np.linalg.lstsq(sizes[kept], took_s[kept], rcond=None)[0]
            off = np.abs(sizes @ fit - took_s)
            kept = off <= np.quantile(off, 0.75)
        arena = HostArena(8, extent_bytes)
        map_s, unmap_s = [], []
        for _ in range(_ARENA_ROUNDS):
            began = time.perf_counter()
            arena.map(range(8))
            mapped = time.perf_counter()
            arena.unmap(range(8))
            map_s.append((mapped - began) / 8)
            unmap_s.append((time.perf_counter() - mapped) / 8)
        arena.close()
        return cls(*fit.tolist(), statistics.median(map_s), statistics.median(unmap_s))

    def plan_s(self, plan: Plan) -> float:
        """Seconds of a step that computes `plan`."""
        return self.step_s + self.token_s * plan.num_tokens + self.chunk_s * len(plan.rows)


def _plain_steps(engines: Sequence[ServedRun]) -> list[tuple[StepRecord, float]]:
    """The steps that only computed and began when the one before had ended, each with the seconds between the two ends."""
    return [
        (step, step.at_s - before.at_s)
        for engine in engines
        for before, step in zip(engine.steps, engine.steps[1:], strict=False)
        if before.running and step.tokens and not (step.mapped or step.unmapped or step.moved)
    ]


class NotedEngine(ModelledEngine):
    """Writes its steps down."""

    def __init__(self, number: int, shape: Shape, num_extents: int, mapped: int, max_tokens: int, *, forecast: bool) -> None:
        super().__init__(number, shape, num_extents, mapped, max_tokens, forecast=forecast)
        self.steps: list[StepRecord] = []
        self._began = 0.0

    def begin(self, now: float) -> tuple[Plan, Result, float]:
        """See `ModelledEngine`."""
        self._began = now
        return super().begin(now)

    def end(self, plan: Plan, result: Result, now: float) -> int:
        """See `ModelledEngine`."""
        ended = super().end(plan, result, now)
        memory = self.memory if isinstance(self.memory, EngineMemory) else None
        if not plan.is_empty:
            self.steps.append(StepRecord.of(self._began, now, plan, self.scheduler, memory))
        return ended


def simulated(arrangement: str, load: TraceLoad, pool: Pool, costs: Costs) -> Round:
    """An arrangement on a modelled clock, with the pools that it had for real."""
    clock = Clock()
    shape = Shape(
        costs.plan_s, pool.block_bytes, pool.block_size, pool.blocks_per_extent, MAX_SEQS, MAX_STEP_TOKENS,
        costs.map_s, costs.unmap_s, knows_lengths=True,
    )  # fmt: skip
    least, most = LEAST_BYTES // shape.extent_bytes, pool.num_blocks // pool.blocks_per_extent
    mapped = {"leases": least, "pool": 1}.get(arrangement, most)
    engines = [NotedEngine(number, shape, most, mapped, pool.max_tokens, forecast=arrangement != "pool") for number in range(2)]
    device = ModelledDevice(clock, engines, cores=True)
    if arrangement == "leases":
        base_bytes = 32 * MIB
        usual = Rules.of(POOL_BYTES)
        broker = ModelledBroker(clock, POOL_BYTES + len(engines) * base_bytes, usual)
        broker.device = device
        for engine in engines:
            engine.memory = lease_memory(engine, broker, base_bytes=base_bytes, min_extents=least)
    elif arrangement == "pool":
        shared = SharedPool(_contended_bytes(), evicts_others=True)
        for engine in engines:
            engine.memory = PooledMemory(engine, shared, gives_back=False)
    served = [
        [Served(number, turn.at_s, turn.prompt_tokens, turn.output_tokens, turn.ids) for turn in some]
        for number, some in enumerate(load.arrivals)
    ]
    device.serve([one for some in served for one in some])
    return Round(
        [
            ServedRun([ServedRequest(one.due, one.first, one.last, [0] * one.output_tokens) for one in some], engine.steps)
            for some, engine in zip(served, engines, strict=True)
        ],
        [],
        load.seconds,
    )


# ---- figures ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Both:
    """A round of one arrangement, and its simulation."""

    real: Round
    model: Round

    @property
    def off(self) -> float:
        """Percent between the two goodputs."""
        return 100 * abs(self.real.goodput / max(self.model.goodput, 1e-9) - 1)


def figures(rounds: dict[str, list[Both]], pools: list[Round]) -> list[Figure]:
    """The comparisons, as medians over rounds; then each arrangement's own figures, real and simulated. `pools`: one pool."""
    every = [one.real.outputs for some in rounds.values() for one in some]
    differing = sum(mine != theirs for outputs in every for mine, theirs in zip(outputs, every[0], strict=True))
    result = [median(f"{name}: goodput off its simulation", [one.off for one in some], "%", MOST_OFF)
              for name, some in rounds.items()]  # fmt: skip
    result.append(Figure("outputs that differ between arrangements or rounds", float(differing), "", 0))
    if (leases := rounds.get("leases")) is not None:
        real = [one.real.goodput for one in leases]
        result.append(_ratio("goodput, leases / one pool of as many bytes, simulated", real, pools, 0.92))
        for name in ("static", "whole"):
            if name in rounds:
                result.append(_ratio(f"goodput, leases / {name}", real, [one.real for one in rounds[name]], None))
    for name, some in rounds.items():
        for what, each in (("", [one.real for one in some]), (", simulated", [one.model for one in some])):
            result += _own(name + what, each)
    return result + (_own("pool, simulated", pools) if pools else [])


def _own(name: str, rounds: list[Round]) -> list[Figure]:
    return [
        median(f"{name}: goodput", [one.goodput for one in rounds], "tokens/s"),
        median(f"{name}: requests in time", [100 * one.in_time for one in rounds], "%"),
        median(f"{name}: first token, p95", [one.first_s for one in rounds], "s"),
        median(f"{name}: a plain step", [1e3 * one.plain_s for one in rounds], "ms"),
        median(f"{name}: preemptions", [float(one.count("preemptions")) for one in rounds], ""),
        median(f"{name}: recalls", [float(one.count("recalls")) for one in rounds], ""),
    ]


def _ratio(name: str, over: list[float], under: list[Round], target: float | None) -> Figure:
    within = [mine / max(theirs.goodput, 1e-9) for mine, theirs in zip(over, under, strict=True)]
    return median(name, within, "x", target, "higher")


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, rounds=1)
    add_data(parser, "the trace", "a synthetic trace")
    parser.add_argument("--only", type=names_of(list(POOLS), "arrangement"), default=list(POOLS), metavar="NAMES")
    parser.add_argument("--seconds", type=above_0, default=60.0, help="in which requests come (%(default)g)")
    parser.add_argument(
        "--step-ms", type=above_0, default=STEP_MS, metavar="MS",
        help="what a step takes besides its tokens (default %(default)g, for which load and SLO are set)",
    )  # fmt: skip
    parser.add_argument("--per-second", type=above_0, default=PER_SECOND, help="requests of each engine (%(default)g)")
    parser.add_argument("--events", type=Path, metavar="FILE", help="where steps and first tokens go, real and simulated")
    args = parser.parse_args(argv)
    os.environ |= STEADY_HEAP | {"OMP_NUM_THREADS": "1"}
    try:
        arrivals, source = two_streams(args.data, args.seconds, args.per_second)
    except BadTrace as error:
        parser.error(str(error))
    if not all(arrivals):
        parser.error(f"no request comes to each engine in {args.seconds:g} s: more --seconds, or more --per-second")
    load = TraceLoad(arrivals, args.seconds, args.step_ms / 1e3, args.seed)
    print(
        f"{len(arrivals[0])} and {len(arrivals[1])} requests in {args.seconds:g} s, from {source}; pools of "
        f"{POOL_BYTES // MIB} MiB; a step takes {args.step_ms:g} ms and {1e6 * TOKEN_SHARE * load.step_s:g} us a token; "
        f"first token within {FIRST_TOKEN_S:g} s, the others {BETWEEN_S:g} s apart; seed {args.seed}",
        flush=True,
    )
    rounds: dict[str, list[Both]] = {name: [] for name in args.only}
    pools: list[Round] = []
    for number in range(args.rounds):
        real = {}
        for turn in range(len(args.only)):
            name = args.only[(number + turn) % len(args.only)]
            real[name] = run(name, load)
            print(f"  round {number + 1}, {name}: {real[name].goodput:,.0f} tokens/s", flush=True)
        fixed = [engine for name in real if name != "leases" for engine in real[name].engines]
        first = real[args.only[0]]
        extent_bytes = POOL_BYTES // 32
        costs = Costs.measured(fixed or first.engines, extent_bytes)
        print(f"  round {number + 1}, measured: {costs}, load {os.getloadavg()[0]:.1f}", flush=True)
        for name, one in real.items():
            rounds[name].append(Both(one, simulated(name, load, one.pools[0], costs)))
        if (widest := real.get("leases", real.get("whole"))) is not None:
            pools.append(simulated("pool", load, widest.pools[0], costs))
    if args.events is not None:
        _write_events(args.events, rounds, pools)
    report("goodput: two engines, one device", figures(rounds, pools), args.seed, args.json)


def _write_events(file: Path, rounds: dict[str, list[Both]], pools: list[Round]) -> None:
    """Of the last round: by arrangement, real and simulated, each engine's steps and requests."""
    told = {name: {"real": some[-1].real.engines, "simulated": some[-1].model.engines} for name, some in rounds.items()}
    if pools:
        told["pool"] = {"simulated": pools[-1].engines}
    file.write_text(json.dumps(told, default=asdict) + "\n")


if __name__ == "__main__":
    main()
