"""The engine that `benchmarks.goodput` measures: a process with an `LLM("demo")` on a core of its own, fed by arrivals.

The engine, its pool, the lease and the broker are real; the model's forward pass is `StandIn`. On one core the demo model takes
0.13 to 0.19 ms for a token of a prompt, so 60 ms for a prompt of the load's mean length, which is ten decode steps; and
decoding 16 rows of 300 tokens takes 2.8 times as long as one. The core would be short before memory is.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.goodput_load import LoadArrival
from benchmarks.stand_ins import output_of
from pagetide import LLM, SamplingParams
from pagetide.engine import demo_model
from pagetide.engine.attention.context import StepContext
from pagetide.engine.execution.runner import PendingStep
from pagetide.engine.llm import Stream
from pagetide.scheduler.outcome import StepOutputs
from pagetide.scheduler.plan import Plan

MAX_SEQS = 256
MAX_STEP_TOKENS = 512  # so that no step takes long for a prompt's sake
UNLOADED = 5  # requests, where there are as many, served one by one before the load comes
MODULUS = 1 << 23  # a float32 holds whole numbers below it exactly


@dataclass(frozen=True, slots=True)
class Job:
    """What one engine is to do. A step takes `step_s`, and `token_s` for each token that it computes."""

    arrivals: Sequence[LoadArrival]
    seed: int
    kv_memory: int | dict[str, int]
    share: bool
    idle_s: float
    step_s: float
    token_s: float


@dataclass(slots=True)
class ServedRequest:
    """One request as its user saw it; times by time.monotonic, which processes share. Filled as tokens come."""

    due: float = 0.0
    token_at: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Told:
    """What an engine tells at its end."""

    unloaded: list[ServedRequest]
    served: list[ServedRequest]
    pool: list[tuple[float, int]]  # (time, bytes of KV mapped since then)
    copied_bytes: int  # by compaction
    stats: dict[str, Any]


def serve(pipe: Connection, job: Job) -> None:
    """The process: sends what its lease promises it (None without one); told to, serves some requests alone and says so;
    told when to begin, serves all and says so; told to, sends `Told` and ends.
    """
    torch.set_num_threads(1)
    with LLM(
        "demo", device="cpu", dtype="float32", kv_memory=job.kv_memory, share=job.share, idle_s=job.idle_s,
        max_seqs=MAX_SEQS, max_step_tokens=MAX_STEP_TOKENS,
    ) as llm:  # fmt: skip
        driver = LoadDriver(llm, job)
        lease = llm.stats()["memory"]["lease"]
        pipe.send(None if lease is None else lease["min_bytes"])
        pipe.recv()
        unloaded = driver.one_by_one(UNLOADED)
        pipe.send("ready")
        served = driver.replay(pipe.recv())
        pipe.send("done")
        pipe.recv()  # the others are done too; until then its memory may be recalled
        pipe.send(Told(unloaded, served, driver.pool, driver.copied_bytes(), llm.stats()))


class StandIn:
    """In place of the model: a step takes as long as the job says, and generates what the KV in the pool says.

    Each token leaves in its place, in K of the first layer, a sum over all tokens up to it. The next token follows from the
    sums that stand in one place of each block of its sequence, another place each step: so a block that was lost, moved to
    where its table does not say, or not computed again shows in the output.
    """

    def __init__(self, vocab_size: int, step_s: float, token_s: float, begun: Callable[[], None]) -> None:
        """`begun` is called when a step has begun."""
        self._vocab_size, self._step_s, self._token_s, self._begun = vocab_size, step_s, token_s, begun
        self._weights = np.random.default_rng(0).integers(1, MODULUS, 1 << 16)  # of positions

    def __call__(
        self, *, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool, step: StepContext,
        logits_to_keep: torch.Tensor | int,
    ) -> SimpleNamespace:  # fmt: skip
        """See `Runner.model`."""
        until = time.monotonic() + self._step_s + self._token_s * input_ids.shape[1]
        self._begun()
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
    """Brings requests to an engine when they are due, and writes down when each token came."""

    def __init__(self, llm: LLM, job: Job) -> None:
        self._llm, self._job = llm, job
        self._prompts = _prompts(llm, job.arrivals, job.seed)
        self._records: dict[str, ServedRequest] = {}  # by request id
        self.pool: list[tuple[float, int]] = []
        with llm.locked_engine() as engine:
            core, runner = engine.core, engine.core.runner
            self._arena = engine.arena
            runner.model = StandIn(engine.encoder.vocab_size, job.step_s, job.token_s, self._note_pool)
            runner.begin = self._and_pool_noted(runner.begin)  # also of steps that compute nothing
            core.step = self._and_tokens_noted(core.step)  # also of steps that the keeper of memory makes

    def copied_bytes(self) -> int:
        """What compaction has copied."""
        with self._llm.locked_engine() as engine:
            return engine.core.scheduler.stats.moved_blocks * engine.plan.geometry.block_stride

    def one_by_one(self, count: int) -> list[ServedRequest]:
        """Some requests out of the whole stream, each by itself; the very first twice, since it is slow."""
        count = min(count, len(self._prompts))
        indices = [i * len(self._prompts) // count for i in range(count)]
        served = []
        for index in (0, *indices):
            stream, record = self._submit(index, time.monotonic())
            while not _ended(stream):
                pass
            served.append(record)
        return served[1:]

    def replay(self, began: float) -> list[ServedRequest]:
        """All requests, each when it is due, until the last has ended."""
        arrivals = self._job.arrivals
        served, waiting = list[ServedRequest](), deque[Stream]()
        while waiting or len(served) < len(arrivals):
            now = time.monotonic()
            while len(served) < len(arrivals) and began + arrivals[len(served)].at_s <= now:
                stream, record = self._submit(len(served), began + arrivals[len(served)].at_s)
                waiting.append(stream)
                served.append(record)
            if waiting:
                # Reading one stream runs a step, which advances all requests.
                if _ended(waiting[0]):
                    waiting.popleft()
            elif len(served) < len(arrivals):
                time.sleep(max(0.0, min(0.005, began + arrivals[len(served)].at_s - time.monotonic())))
        return served

    def _submit(self, index: int, due: float) -> tuple[Stream, ServedRequest]:
        params = SamplingParams(
            max_new_tokens=self._job.arrivals[index].output_tokens, temperature=0.0, ignore_eos=True
        )
        stream = self._llm.stream(self._prompts[index], params)
        (request,) = stream.requests
        record = self._records.setdefault(request.request_id, ServedRequest())
        record.due = due
        return stream, record

    def _and_tokens_noted(self, step: Callable[[], StepOutputs]) -> Callable[[], StepOutputs]:
        def noted() -> StepOutputs:
            emissions = step()
            now = time.monotonic()
            for request_id, token in zip(emissions.request_ids, emissions.tokens, strict=True):
                record = self._records.setdefault(request_id, ServedRequest())
                record.token_at.append(now)
                record.token_ids.append(token)
            return emissions

        return noted

    def _and_pool_noted(self, begin: Callable[[Plan], PendingStep]) -> Callable[[Plan], PendingStep]:
        def noted(plan: Plan) -> PendingStep:
            underway = begin(plan)
            self._note_pool()
            return underway

        return noted

    def _note_pool(self) -> None:
        """In a step: what its plan maps is mapped by now, and what it unmaps is not yet granted to anybody else."""
        mapped = self._arena.mapped_bytes
        if not self.pool or self.pool[-1][1] != mapped:
            self.pool.append((time.monotonic(), mapped))


def _ended(stream: Stream) -> bool:
    """Whether a request has all its tokens, after the next of them. Raises RuntimeError where it ended without them."""
    output = next(stream).output
    if output is not None and output.finish_reason != "length":
        raise RuntimeError(f"a request ended as {output.finish_reason!r}: {output.error}")
    return output is not None


def _prompts(llm: LLM, arrivals: Sequence[LoadArrival], seed: int) -> list[list[int]]:
    """Pieces of the text that the model has not seen, as long as the trace says."""
    text = Path(str(demo_model.__file__)).with_name("heldout.txt").read_text("utf-8")
    tokens = [token for passage in text.split("\n%%\n") if passage.strip() for token in llm.tokenize(passage.strip())]
    rng = random.Random(seed)
    starts = [rng.randrange(len(tokens) - arrival.prompt_tokens) for arrival in arrivals]
    return [tokens[at : at + arrival.prompt_tokens] for at, arrival in zip(starts, arrivals, strict=True)]
