"""Goodput of two engines on one device: static halves, elastic pools, and a whole device for each engine.

    python -m benchmarks.goodput [--json FILE] [--data DIR] [--rounds 3] [--only static,pagetide,oracle]
                                 [--seconds 20] [--step-ms 10] [--seed 0]

Goodput is output tokens a second of the requests within the SLO: the first token at most 250 ms after the request was due,
and of the pauses between its tokens 95 % at most 50 ms. The seconds are those in which requests come. Three arrangements take
turns and serve the same requests:

    static    each engine has a pool of half of POOL_BYTES, and no lease
    pagetide  both lease from one broker, a `vram-monitor serve`; each pool is between LEAST_BYTES and POOL_BYTES
    oracle    each engine has a pool of POOL_BYTES, and no lease

Under pagetide both pools together come to what the usual headroom (a sixteenth) and band (2 %) would leave of a device of
POOL_BYTES: less than the halves of `static` together. The test device is larger than that, since a lease covers a whole
process; what is over, besides its own headroom and band, is kept reserved from before the first growth on.

Each engine is a process on a core of its own with one thread (its model is a stand-in with a step time
of its own, everything else is real). The requests are the trace of code completions of Azure's, thinned, compressed in
time, prompts a fifth as long and outputs four times (16 to 192 tokens), so that memory is what is short; the second engine
gets the same stream an eighth of the time earlier, so that its bursts mostly come in the gaps of the first
(load.py; with `--data none` a synthetic one).
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.arguments import above_0, add_data, names_of, parser_of
from benchmarks.figures import Figure, median, percentile, report
from benchmarks.load import BadTrace, Turn, two_streams
from benchmarks.processes import Worker
from benchmarks.stand_ins import output_of
from pagetide import LLM, SamplingParams
from pagetide.allocator.lease_policy import Rules
from pagetide.allocator.reservation import Reservation
from pagetide.common.units import GIB, MIB
from pagetide.engine import demo_model
from pagetide.engine.attention.context import StepContext
from pagetide.engine.llm import Stream
from pagetide.pressure import PrivateDevice
from pagetide.scheduler.outcome import StepOutputs

MAX_SEQS = 256
MAX_STEP_TOKENS = 512  # so that no step takes long for a prompt's sake
MODULUS = 1 << 23  # a float32 holds whole numbers below it exactly


@dataclass(frozen=True, slots=True)
class Job:
    """What one engine is to do. With bounds of its pool it has a lease. A step takes `step_s`, and TOKEN_S for each token."""

    arrivals: Sequence[Turn]
    seed: int
    kv_memory: int | dict[str, int]
    step_s: float


@dataclass(slots=True)
class ServedRequest:
    """One request as its user saw it; times by time.monotonic, which processes share. Filled as tokens come."""

    due: float = 0.0
    token_at: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


def serve_job(pipe: Connection, job: Job) -> None:
    """The process: sends what its lease promises it (None without one); told when to begin, serves all and says so; told to,
    sends what it served and ends.
    """
    torch.set_num_threads(1)
    share = isinstance(job.kv_memory, dict)
    options: dict[str, Any] = {"max_seqs": MAX_SEQS, "max_step_tokens": MAX_STEP_TOKENS}
    with LLM("demo", device="cpu", dtype="float32", kv_memory=job.kv_memory, share=share, **options) as llm:
        driver = LoadDriver(llm, job)
        lease = llm.stats()["memory"]["lease"]
        pipe.send(None if lease is None else lease["min_bytes"])
        pipe.recv()
        driver.warm_up()
        pipe.send("ready")
        served = driver.replay(pipe.recv())
        pipe.send("done")
        pipe.recv()  # the others are done too; until then its memory may be recalled
        pipe.send(served)


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
    """Brings requests to an engine when they are due, and writes down when each token came."""

    def __init__(self, llm: LLM, job: Job) -> None:
        self._llm, self._job = llm, job
        self._prompts = _prompts(llm, job.arrivals, job.seed)
        self._records: dict[str, ServedRequest] = {}  # by request id
        with llm.locked_engine() as engine:
            core = engine.core
            core.runner.model = StandIn(engine.encoder.vocab_size, job.step_s, TOKEN_S)
            core.step = self._and_tokens_noted(core.step)  # also of steps that the keeper of memory makes

    def warm_up(self) -> None:
        """Serve a request: the first is slow."""
        stream, _ = self._submit(0, time.monotonic())
        while not _ended(stream):
            pass

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
        params = SamplingParams(max_new_tokens=self._job.arrivals[index].output_tokens, temperature=0.0, ignore_eos=True)
        stream = self._llm.stream(self._prompts[index], params)
        (request,) = stream.requests
        record = self._records.setdefault(request.request_id, ServedRequest())
        record.due = due
        return stream, record

    def _and_tokens_noted(self, step: Callable[[bool], StepOutputs]) -> Callable[[bool], StepOutputs]:
        def noted(ahead: bool) -> StepOutputs:
            emissions = step(ahead)
            now = time.monotonic()
            for request_id, token in zip(emissions.request_ids, emissions.tokens, strict=True):
                record = self._records.setdefault(request_id, ServedRequest())
                record.token_at.append(now)
                record.token_ids.append(token)
            return emissions

        return noted


def _ended(stream: Stream) -> bool:
    """Whether a request has all its tokens, after the next of them. Raises RuntimeError where it ended without them."""
    output = next(stream).output
    if output is not None and output.finish_reason != "length":
        raise RuntimeError(f"a request ended as {output.finish_reason!r}: {output.error}")
    return output is not None


def _prompts(llm: LLM, arrivals: Sequence[Turn], seed: int) -> list[list[int]]:
    """Pieces of the text that the model has not seen, as long as the trace says."""
    text = Path(str(demo_model.__file__)).with_name("heldout.txt").read_text("utf-8")
    tokens = [token for passage in text.split("\n%%\n") if passage.strip() for token in llm.tokenize(passage.strip())]
    rng = random.Random(seed)
    starts = [rng.randrange(len(tokens) - arrival.prompt_tokens) for arrival in arrivals]
    return [tokens[at : at + arrival.prompt_tokens] for at, arrival in zip(starts, arrivals, strict=True)]


FIRST_TOKEN_S, BETWEEN_S = 0.25, 0.05  # the SLO
STEP_MS, TOKEN_S = 10.0, 40e-6  # a step takes STEP_MS, and TOKEN_S for each token that it computes
PER_SECOND = 8.0  # requests of each engine, on average
POOL_BYTES = 96 * MIB
LEAST_BYTES = 9 * MIB  # whole extents: they are a 32nd of the pool
CAPACITY_BYTES = 4 * GIB  # of the test device; all but what is contended is reserved
HEADROOM_BYTES = POOL_BYTES // 16
SETTLE_S = 2.5  # until the broker has forgotten how the processes grew at their start
STEADY_HEAP = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "2"}  # large tensors go back when freed (glibc)
POOLS: dict[str, int | dict[str, int]] = {
    "static": POOL_BYTES // 2,
    "pagetide": {"min": LEAST_BYTES, "max": POOL_BYTES},
    "oracle": POOL_BYTES,
}


@dataclass(frozen=True, slots=True)
class Round:
    """What one arrangement gave in one round."""

    goodput: float  # tokens a second
    missed: float  # share of the requests
    outputs: list[list[int]]  # token ids of all requests of both engines


def run(arrangement: str, arrivals: Sequence[list[Turn]], seconds: float, step_s: float, seed: int) -> Round:
    """One arrangement, from the start of both engines to their last token."""
    with ExitStack() as stack:
        if arrangement == "pagetide":
            device = stack.enter_context(PrivateDevice(CAPACITY_BYTES, HEADROOM_BYTES))
            stack.enter_context(device.here())
        jobs = [Job(some, seed + 100_000 * i, POOLS[arrangement], step_s) for i, some in enumerate(arrivals)]
        workers = [stack.enter_context(Worker(serve_job, job, core=number)) for number, job in enumerate(jobs)]
        promised = [worker.receive() for worker in workers]
        if arrangement == "pagetide":  # before anybody grows
            (uuid,) = {lease.device_uuid for lease in device.leases()}
            stack.enter_context(Reservation.granted(device.socket, uuid, _reserved_bytes(promised), wait_s=30))
            time.sleep(SETTLE_S)
        _told_each(workers, "warm up")
        _told_each(workers, time.monotonic() + 0.2)
        served: list[ServedRequest] = [one for told in _told_each(workers, "tell") for one in told]
    good = [one for one in served if _within(one)]
    goodput = sum(len(one.token_ids) for one in good) / seconds
    return Round(goodput, 1 - len(good) / len(served), [one.token_ids for one in served])


def _reserved_bytes(promised: list[int]) -> int:
    """What is to be reserved, so that both pools come to the contended bytes together."""
    usual = Rules.of(POOL_BYTES)
    growth = POOL_BYTES - usual.headroom_bytes - usual.band_bytes - len(promised) * LEAST_BYTES
    rules = Rules.of(CAPACITY_BYTES, HEADROOM_BYTES)
    return CAPACITY_BYTES - rules.headroom_bytes - rules.band_bytes - sum(promised) - growth


def _told_each(workers: list[Worker], message: object) -> list[Any]:
    """What each engine answers to `message`."""
    for worker in workers:
        worker.send(message)
    return [worker.receive() for worker in workers]


def _within(one: ServedRequest) -> bool:
    between = [after - before for before, after in pairwise(one.token_at)]
    return one.token_at[0] - one.due <= FIRST_TOKEN_S and percentile(between, 0.95) <= BETWEEN_S


def figures(rounds: dict[str, list[Round]]) -> list[Figure]:
    """Ratios within a round, their medians; then each arrangement's own figures side by side."""
    every = [one.outputs for some in rounds.values() for one in some]
    differing = sum(mine != theirs for outputs in every for mine, theirs in zip(outputs, every[0], strict=True))
    result = [
        _ratio(f"goodput, pagetide / {what}", rounds["pagetide"], rounds[name], target)
        for name, what, target in (("static", "static halves", 1.3), ("oracle", "oracle", 0.92))
        if {"pagetide", name} <= rounds.keys()
    ]
    if "static" in rounds:
        missed = [100 * r.missed for r in rounds["static"]]
        result.append(median("requests of the static halves that miss the SLO", missed, "%", 30, "higher"))
    result.append(Figure("outputs that differ between arrangements or rounds", float(differing), "", 0))
    result += [median(f"{name}: goodput", [r.goodput for r in some], "tokens/s") for name, some in rounds.items()]
    return result


def _ratio(name: str, over: list[Round], under: list[Round], target: float) -> Figure:
    within = [mine.goodput / max(theirs.goodput, 1e-9) for mine, theirs in zip(over, under, strict=True)]
    return median(name, within, "x", target, "higher")


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, rounds=3)
    add_data(parser, "the trace", "a synthetic trace")
    parser.add_argument("--only", type=names_of(list(POOLS), "arrangement"), default=list(POOLS), metavar="NAMES")
    parser.add_argument("--seconds", type=above_0, default=20.0, help="in which requests come (20, for which the load is)")
    parser.add_argument(
        "--step-ms", type=above_0, default=STEP_MS, metavar="MS",
        help="what a step takes besides its tokens (default %(default)g, for which load and SLO are set)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    os.environ |= STEADY_HEAP | {"OMP_NUM_THREADS": "1"}
    try:
        arrivals, source = two_streams(args.data, args.seconds, PER_SECOND)
    except BadTrace as error:
        parser.error(str(error))
    print(
        f"{len(arrivals[0])} and {len(arrivals[1])} requests in {args.seconds:g} s, from {source}; pools of "
        f"{POOL_BYTES // MIB} MiB; a step takes {args.step_ms:g} ms and {1e6 * TOKEN_S:g} us a token",
        flush=True,
    )
    rounds: dict[str, list[Round]] = {name: [] for name in args.only}
    for number in range(args.rounds):
        for turn in range(len(args.only)):
            name = args.only[(number + turn) % len(args.only)]
            rounds[name].append(run(name, arrivals, args.seconds, args.step_ms / 1e3, args.seed))
            print(f"  round {number + 1}, {name}: {rounds[name][-1].goodput:,.0f} tokens/s", flush=True)
    report("goodput: two engines, one device", figures(rounds), args.seed, args.json)


if __name__ == "__main__":
    main()
