"""The engine that `benchmarks.goodput` measures: a process with an `LLM("demo")` on a core of its own, fed by arrivals.

The engine, its pool, the lease and the broker are real; the forward pass is `StandIn`. On one core the demo model takes
0.13 to 0.19 ms for a token of a prompt, so 60 ms for a prompt of the load's mean length, which is ten decode steps; and
decoding 16 rows of 300 tokens takes 2.8 times as long as one. The core would be short before memory is.

One number is set by hand: what the process counts as held besides KV is what its lease's minimum has in mind for that
(weights, workspaces, 192 MiB of libraries), in place of what is resident. On a test device whose KV pools are smaller than
that allowance the pools would otherwise grow within it, and nothing would be contended.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.goodput_load import Arrival
from pagetide import LLM, SamplingParams
from pagetide.engine import demo_model
from pagetide.engine.runner import Runner, _Computed
from pagetide.scheduler.outcome import Emissions

MAX_SEQS = 256
MAX_STEP_TOKENS = 512  # so that no step takes long for a prompt's sake
UNLOADED = 5  # requests served one by one before the load comes
STEP_S, TOKEN_S = 0.010, 40e-6  # a step takes STEP_S + TOKEN_S for each token that it computes
MODULUS = 1 << 23  # a float32 holds whole numbers below it exactly


@dataclass(frozen=True, slots=True)
class Job:
    """What one engine is to do."""

    arrivals: Sequence[Arrival]
    seed: int
    kv_memory: int | dict[str, int]
    share: bool
    idle_s: float


@dataclass(slots=True)
class Served:
    """One request as its user saw it; times by time.monotonic, which processes share. Filled as tokens come."""

    due: float
    token_at: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Told:
    """What an engine tells at its end."""

    unloaded: list[Served]
    served: list[Served]
    pool: list[tuple[float, int]]  # (time, bytes of KV mapped since then)
    copied_bytes: int  # by compaction
    stats: dict[str, Any]


def serve(pipe: Connection, core: int | None, job: Job) -> None:
    """The process: sends what its lease promises it (None without one); told to, serves some requests alone and says so;
    told when to begin, serves all and says so; told to, sends `Told` and ends.
    """
    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    with LLM(
        "demo", device="cpu", dtype="float32", kv_memory=job.kv_memory, share=job.share, idle_s=job.idle_s,
        max_seqs=MAX_SEQS, max_step_tokens=MAX_STEP_TOKENS,
    ) as llm:  # fmt: skip
        driver = Driver(llm, job)
        pipe.send(driver.promised_bytes())
        pipe.recv()
        unloaded = driver.one_by_one(UNLOADED)
        pipe.send("ready")
        served = driver.replay(pipe.recv())
        pipe.send("done")
        pipe.recv()  # the others are done too; until then its memory may be recalled
        pipe.send(Told(unloaded, served, driver.pool, driver.copied_bytes, llm.stats()))


class StandIn:
    """In place of the model's forward pass: takes STEP_S + TOKEN_S a token, and generates what the KV in the pool says.

    Each token leaves in its place a sum over all tokens up to it. The next token follows from the sums that stand in one
    place of each block of its sequence, another place each step: so a block that was lost, moved to where its table does
    not say, or not computed again shows in the output.
    """

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        self._runner, self._vocab_size = runner, vocab_size
        self._sums = runner.storage.layer(0).key.numpy()[:, :, 0, 0]  # [blocks, places]
        self._block_size = self._sums.shape[1]
        self._weights = np.random.default_rng(0).integers(1, MODULUS, 1 << 16)  # of positions

    def compute(self, work: Any, there: Any) -> _Computed:
        """As `Runner._compute`."""
        until = time.monotonic() + STEP_S + TOKEN_S * int(work.lengths.sum())
        tokens = np.zeros(len(work.chunks), np.int32)
        if len(work.chunks):
            self._write(work.rows, work.starts, work.lengths)
            tokens[:] = self._read(work.rows, work.starts + work.lengths)
            seated = work.rows[work.sampling]
            self._runner._tokens[seated, work.at] = tokens[work.sampling]
        time.sleep(max(0.0, until - time.monotonic()))
        return _Computed(tokens)

    def _write(self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        """The sums of the chunks' tokens, each on top of what stands before it."""
        table = self._runner._rows.tables[0].numpy()
        firsts = np.cumsum(lengths) - lengths
        owners = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(len(owners)) + (starts - firsts)[owners]
        summands = self._runner._tokens[rows[owners], positions] * self._weights[positions] % MODULUS
        sums = np.cumsum(summands)
        before = self._sums[table[rows, (starts - 1) // self._block_size], (starts - 1) % self._block_size]
        sums += (np.where(starts > 0, before, 0).astype(np.int64) - (sums - summands)[firsts])[owners]
        slots, places = np.divmod(positions, self._block_size)
        self._sums[table[rows[owners], slots], places] = sums % MODULUS

    def _read(self, rows: np.ndarray, known: np.ndarray) -> np.ndarray:
        """The next token of each row, of which so many tokens have their sums in the pool."""
        table = self._runner._rows.tables[0].numpy()
        width = -(-int(known.max()) // self._block_size)
        places = (known - 1) % self._block_size
        written = np.arange(width) * self._block_size + places[:, None] < known[:, None]  # [rows, blocks]
        blocks = np.where(written, table[rows, :width], 0)
        sums = np.where(written, self._sums[blocks, places[:, None]], 0).astype(np.int64)
        tokens: np.ndarray = (sums * self._weights[:width]).sum(axis=1) // 64 % self._vocab_size
        return tokens


class Driver:
    """Brings requests to an engine when they are due, and writes down when each token came."""

    def __init__(self, llm: LLM, job: Job) -> None:
        engine = llm._desk.engine
        assert engine is not None and engine.core.memory is not None
        self._llm, self._engine, self._job = llm, engine, job
        self._prompts = _prompts(llm, job.arrivals, job.seed)
        self._records: dict[str, Served] = {}  # by request id
        self.pool: list[tuple[float, int]] = []
        self._stand_in = StandIn(engine.core.runner, engine.encoder.vocab_size)
        engine.core.runner._compute = self._computed  # type: ignore[method-assign]
        self._step = engine.core.step
        engine.core.step = self._recorded  # type: ignore[method-assign]  # also the keeper's steps are seen

    def promised_bytes(self) -> int | None:
        """Let the process hold, by its books, what its lease promises it besides KV; returns the lease's minimum."""
        memory = self._engine.core.memory
        assert memory is not None
        if memory.lease is None:
            return None
        memory._planned_bytes = memory.lease.min_bytes - self._engine.plan.min_kv_bytes
        with self._llm._desk.lock:
            memory._report()
        return memory.lease.min_bytes

    @property
    def copied_bytes(self) -> int:
        """What compaction has copied."""
        return self._engine.core.scheduler.stats.moved_blocks * self._engine.plan.geometry.block_stride

    def one_by_one(self, count: int) -> list[Served]:
        """Some requests out of the whole stream, each by itself; the very first twice, since it is slow."""
        indices = [i * len(self._prompts) // count for i in range(count)]
        served = []
        for index in (0, *indices):
            record = Served(time.monotonic())
            ticket = self._submit(index, record)
            while not _ended(ticket):
                self._llm._desk.step_for(ticket)
            served.append(record)
        return served[1:]

    def replay(self, began: float) -> list[Served]:
        """All requests, each when it is due, until the last has ended."""
        arrivals = self._job.arrivals
        served, waiting = [], list[Any]()
        while waiting or len(served) < len(arrivals):
            now = time.monotonic()
            while len(served) < len(arrivals) and began + arrivals[len(served)].at_s <= now:
                record = Served(began + arrivals[len(served)].at_s)
                waiting.append(self._submit(len(served), record))
                served.append(record)
            waiting = [ticket for ticket in waiting if not _ended(ticket)]
            if waiting:
                self._llm._desk.step_for(waiting[0])  # which is everybody's
            elif len(served) < len(arrivals):
                time.sleep(max(0.0, min(0.005, began + arrivals[len(served)].at_s - time.monotonic())))
        return served

    def _submit(self, index: int, record: Served) -> Any:
        params = SamplingParams(
            max_new_tokens=self._job.arrivals[index].output_tokens, temperature=0.0, ignore_eos=True
        )
        (ticket,) = self._llm._desk.submit(
            self._llm._desk.encode([self._prompts[index]], params), priority=0, cache_salt=None
        )
        self._records[ticket.request.request_id] = record
        return ticket

    def _recorded(self) -> Emissions:
        emissions = self._step()
        now = time.monotonic()
        for request_id, token in zip(emissions.request_ids, emissions.tokens, strict=True):
            record = self._records[request_id]
            record.token_at.append(now)
            record.token_ids.append(token)
        return emissions

    def _computed(self, work: Any, there: Any) -> _Computed:
        """What the plan maps is mapped by now, and what it unmaps is not yet granted to anybody else."""
        mapped = self._engine.arena.mapped_bytes
        if not self.pool or self.pool[-1][1] != mapped:
            self.pool.append((time.monotonic(), mapped))
        return self._stand_in.compute(work, there)


def _ended(ticket: Any) -> bool:
    """Whether a request has all its tokens. Raises RuntimeError where it ended without them."""
    if ticket.completion is None:
        return False
    if ticket.completion.finish_reason != "length":
        raise RuntimeError(f"a request ended as {ticket.completion.finish_reason!r}: {ticket.completion.error}")
    return True


def _prompts(llm: LLM, arrivals: Sequence[Arrival], seed: int) -> list[list[int]]:
    """Pieces of the text that the model has not seen, as long as the trace says."""
    text = Path(str(demo_model.__file__)).with_name("heldout.txt").read_text("utf-8")
    tokens = [token for passage in text.split("\n%%\n") if passage.strip() for token in llm.tokenize(passage.strip())]
    rng = random.Random(seed)
    starts = [rng.randrange(len(tokens) - arrival.prompt_tokens) for arrival in arrivals]
    return [tokens[at : at + arrival.prompt_tokens] for at, arrival in zip(starts, arrivals, strict=True)]
