"""The runner: executes plans. It follows the scheduler's rows by what plans tell it, and answers with plain results.

It keeps, per row, the tokens (from admissions and from its own samples) and, on the device, the block tables, packs the chunks
of a plan into one batch without padding, runs the model over it and samples. What a plan says about the pool's memory is done
before (`moves.py`), and beside the chunks what they do not touch.

On a device that works by itself a plan is queued (`begin`) and its result waited for later (`Underway.wait`): its tokens are
drawn there, and stay there as inputs of the plan behind it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..allocator.arena import Arena
from ..cache.block_table import Index, Int32
from ..cache.storage import Storage
from ..scheduler.plan import NO_LOGPROBS, NO_TOKENS, Candidates, Failure, Plan, Result, Scores
from .attention.context import Kernel, StepContext, running
from .batch import ON_ITS_WAY, Batch, DeviceRows, pack
from .graphs import DecodeGraphs, Record
from .host_pool import HostPool, Swapped
from .moves import Mover, Moves
from .sampler import Sampler
from .scoring import Askers, Stretch, score
from .transfers import Array, Download, Stopwatch, Upload

if TYPE_CHECKING:
    from .warpers import Settings

log = logging.getLogger(__name__)

_UPLOAD_BYTES = 64  # of a token of the largest step: some eight numbers


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """Some chunks of a plan, as they are to be computed."""

    chunks: Index  # of the plan
    rows: Index
    starts: Index
    lengths: Index
    batch: Batch
    sampling: Index  # places of those chunks that sample
    at: Index  # where the tokens will stand that they sample
    prompts: list[Stretch]  # to be scored
    keep: Index  # tokens of the batch whose logits are wanted
    settings: Settings | None  # of draws that wait for nothing; None: somebody asks for more than those can do
    graph: int | None  # the size of the recorded step that does it

    @property
    def arrays(self) -> list[Array]:
        """What it needs on the device; the batch first, so that it lies where recorded steps read it."""
        return [
            *self.batch.arrays, self.keep, self.rows[self.sampling], *(() if self.settings is None else self.settings.arrays)
        ]  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Drawn:
    """Tokens that are on their way from the device: those `at` of `rows`, sampled by the chunks at `places`."""

    places: Index  # of the chunks computed together
    chunks: Index  # of the plan
    rows: Index
    at: Index
    found: Download


@dataclass(slots=True)
class _Computed:
    """What some chunks of a plan gave. Mutated while they are computed."""

    tokens: Int32  # one for each chunk; what has no sample is 0
    failures: dict[int, str] = field(default_factory=dict)  # by chunk of the plan
    scores: list[Scores] = field(default_factory=list)
    candidates: list[Candidates] = field(default_factory=list)
    complete: list[int] = field(default_factory=list)  # chunks of the plan
    drawn: _Drawn | None = None  # tokens that are yet to come


@dataclass(frozen=True, slots=True, eq=False)
class Underway:
    """A plan that was begun."""

    _runner: Runner
    _plan: Plan
    _moves: Moves
    _computed: _Computed
    _watch: Stopwatch

    def wait(self) -> Result:
        """What came of it, once it is done. Once, and of several plans in the order they were begun.

        Raises what the device or a copy raises that was not noticed before; then nobody knows what of the plan was done.
        """
        swaps: list[Swapped] = []
        with self._runner.at_work():
            try:
                self._runner._take_in(self._computed)
            finally:
                swaps = self._moves.done()
        plan, moves, computed = self._plan, self._moves, self._computed
        failed = computed.failures
        counts = plan.samples.astype(np.int64)
        counts[[*failed, *(c.index for c in computed.candidates)]] = 0
        return Result(
            plan.step_id,
            counts,
            computed.tokens[counts > 0],
            tuple(Failure(i, message) for i, message in failed.items()),
            moves.mapped,
            moves.unmapped,
            moves.refused,
            lost_slots=np.concatenate([NO_TOKENS, *(swap.lost_slots for swap in swaps)]),
            swapped=sum(swap.num_timed for swap in swaps),
            swap_s=sum(swap.seconds for swap in swaps),
            compute_s=self._watch.seconds(),
            scores=tuple(scores for scores in computed.scores if scores.index not in failed),
            candidates=tuple(computed.candidates),
            complete=np.array([i for i in computed.complete if i not in failed], np.int64),
        )


class Runner:
    """One model on one device, with its rows. Not thread-safe; plans in the order they were made.

    Args:
        arena: What `storage` was built over; without it no plan may resize the pool.
        host: Without it none may swap.
        max_step_tokens: Of a step that is sent at once; larger ones take memory of their own.
        overlaps: Whether tokens are drawn on the device and left there, so that a plan can be begun behind another one.
    """

    def __init__(
        self, model: Any, storage: Storage, kernel: Kernel, sampler: Sampler, *, num_rows: int, max_tokens: int,
        max_step_tokens: int = 8192, arena: Arena | None = None, host: HostPool | None = None, overlaps: bool = False,
    ) -> None:  # fmt: skip
        self.model = model
        self.storage = storage
        self.arena = arena
        self.host = host
        self.kernel = kernel
        self.sampler = sampler
        self.overlaps = overlaps
        self.graphs: DecodeGraphs | None = None
        self._mover = Mover(storage, arena, host)
        self._askers = Askers(num_rows)
        self._steered = np.zeros(num_rows, np.bool_)  # whose tokens somebody else chooses
        geometry = storage.geometry
        self._layers = tuple(storage.layer(i) for i in range(len(geometry.layers)))
        self._device = self._layers[0].key.device
        self._stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        self._block_size = geometry.block_size
        self._max_tokens = max_tokens
        self._tokens = np.zeros((num_rows, max_tokens), np.int32)  # memory only where rows reached
        self._rows = DeviceRows(num_rows, max_tokens, geometry, self._device)
        self._upload = Upload(self._device, _UPLOAD_BYTES * (max_step_tokens + num_rows) + 4096)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def mapped_extents(self) -> frozenset[int] | None:
        """The pool's extents that have memory; None without an arena."""
        return None if self.arena is None else self.arena.mapped_extents

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """What is queued on the device goes to the stream that the runner was made on, whichever is the caller's.

        So all steps stand in one order.
        """
        with torch.inference_mode(), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def record(self, sizes: Sequence[int], record: Record) -> None:
        """Have decode steps of these sizes recorded. Raises what speaks against it; nothing is recorded then."""
        graphs = DecodeGraphs(self._decode, record)
        with self.at_work():
            for size in sorted(sizes, reverse=True):
                self._upload.put(self._padding(size).arrays)
                graphs.add(size)
        self.graphs = graphs

    def begin(self, plan: Plan) -> Underway:
        """Have `plan` executed. A chunk that cannot be computed is a failure in the result; the others have their tokens.

        When the batch raises, each chunk is tried alone: what a chunk writes lies in its own sequence's blocks and is the
        same however often it is written. An arena that refuses to map or unmap stops nothing else: the result says so.
        """
        with self.at_work():
            self._follow(plan)
            moves = Moves()
            try:
                self._mover.begin(plan, moves)
                watch = Stopwatch(self._device)
                work, changes = self._work(plan, np.arange(len(plan.rows))), self._rows.changes(plan)
                there = self._upload.put([*work.arrays, *changes])
                self._rows.follow(plan, there[len(there) - len(changes) :])
                try:
                    computed = self._compute(work, there)
                except Exception as error:
                    log.exception("step %d raised; trying its %d chunks one by one", plan.step_id, len(plan.rows))
                    computed = self._one_by_one(plan, error)
                watch.stop()
                moves.fence()
            except BaseException:
                moves.done()
                raise
        return Underway(self, plan, moves, computed, watch)

    def close(self) -> None:
        """Let go of the model and of the views of the arena, give the host tier back. Nothing can be executed afterwards.
        Idempotent.
        """
        if self._stream is not None:
            self._stream.synchronize()
        if (host := self.__dict__.pop("host", None)) is not None:
            host.close()
        for name in ("model", "storage", "arena", "kernel", "graphs", "_mover", "_layers", "_rows", "_upload"):
            self.__dict__.pop(name, None)

    def _follow(self, plan: Plan) -> None:
        """Take in what changed: rows left and taken, tokens given."""
        if len(plan.released):
            self.sampler.release(plan.released)
            self._askers.release(plan.released)
        for new in plan.admitted:
            self._tokens[new.row, : len(new.token_ids)] = new.token_ids
            self.sampler.admit(new.row, new.sampling, new.token_ids, new.num_prompt)
            self._askers.admit(new.row, new.sampling, new.num_prompt)
            self._steered[new.row] = new.sampling.num_candidates > 0
        if plan.given is not None:
            self._tokens[plan.given.rows, plan.given.positions] = plan.given.tokens
            self.sampler.took(plan.given.rows, plan.given.tokens)

    def _work(self, plan: Plan, chunks: Index) -> _Work:
        """How the given chunks are computed as one batch."""
        rows, starts, lengths = plan.rows[chunks], plan.starts[chunks], plan.lengths[chunks]
        sampling = np.flatnonzero(plan.samples[chunks])
        seated, at = rows[sampling], (starts + lengths)[sampling]
        prompts = self._askers.of_prompts(rows, starts, lengths)
        settings = self.sampler.settings(seated, at) if self.overlaps and self._plain(seated, at) else None
        graph = None
        if self.graphs is not None and not prompts and 0 < len(sampling) == len(rows) == lengths.sum():
            graph = self.graphs.size_for(len(rows))
        batch = pack(self._tokens, rows, starts, lengths, graph or 0)
        keep = (batch.q_starts[: len(rows)] + lengths - 1)[sampling]
        if prompts:
            behind = [(batch.q_starts - starts)[p.place] + p.first - 1 + np.arange(p.length) for p in prompts]
            keep = np.concatenate([keep, *behind])
        return _Work(chunks, rows, starts, lengths, batch, sampling, at, prompts, keep, settings, graph)

    def _plain(self, rows: Index, at: Index) -> bool:
        """Whether the tokens `at` of `rows`, one at least, can be drawn and left on the device."""
        if not len(rows) or self._steered[rows].any() or self._askers.of_samples(rows, at):
            return False
        return self.sampler.plain(rows, at)

    def _compute(self, work: _Work, there: Sequence[torch.Tensor]) -> _Computed:
        """Run a batch whose arrays are `there` on the device."""
        computed = _Computed(np.zeros(len(work.chunks), np.int32))
        if not len(work.chunks):
            return computed
        num_sampling = len(work.sampling)
        if work.graph is not None and self.graphs is not None:
            logits = self.graphs.logits(work.graph, num_sampling)
        else:
            width = -(-int(work.batch.kv_lens.max()) // self._block_size)
            inputs = there[: len(work.batch.arrays)]
            step = self._rows.context(work.batch, inputs, width, self._layers, self.kernel)
            logits = self._forward(*step, there[len(inputs)] if len(work.keep) else None)
        if work.prompts:
            told = np.concatenate(
                [self._tokens[work.rows[p.place], p.first : p.first + p.length] for p in work.prompts]
            )
            self._score(computed, work.chunks, work.prompts, logits[num_sampling:], told)
        if num_sampling and work.settings is not None:
            self._draw(computed, work, logits[:num_sampling], there[len(work.batch.arrays) + 1 :])
        elif num_sampling:
            self._sample(computed, work, logits[:num_sampling])
        return computed

    def _draw(self, computed: _Computed, work: _Work, logits: torch.Tensor, there: Sequence[torch.Tensor]) -> None:
        """Have tokens drawn on the device, and wait for none of them. `there` are the rows, and what the draws need."""
        assert work.settings is not None
        rows, settings = there[0], there[1 : 1 + len(work.settings.arrays)]
        found = self.sampler.draw(logits, work.settings, settings)
        seated, chunks = work.rows[work.sampling], work.chunks[work.sampling]
        computed.drawn = _Drawn(work.sampling, chunks, seated, work.at, Download(found.packed))
        self._rows.newest.index_copy_(
            0, rows, found.tokens
        )  # last: what raised before it is tried again, with these as inputs
        self._tokens[seated, work.at] = ON_ITS_WAY

    def _take_in(self, computed: _Computed) -> None:
        """Wait for tokens that are on their way."""
        drawn, computed.drawn = computed.drawn, None
        if drawn is None:
            return
        tokens, bad = self.sampler.drew(drawn.rows, drawn.found.wait())
        self._tokens[drawn.rows, drawn.at] = computed.tokens[drawn.places] = tokens
        for i in np.flatnonzero(bad):
            why = self.sampler.trouble(int(drawn.rows[i])) or _not_finite(int(drawn.at[i]))
            computed.failures.setdefault(int(drawn.chunks[i]), why)

    def _sample(self, computed: _Computed, work: _Work, logits: torch.Tensor) -> None:
        """Draw the token `at[i]` of the chunk `sampling[i]` from `logits[i]`, which may be overwritten, and score it."""
        chunks, rows, sampling, at = work.chunks, work.rows, work.sampling, work.at
        steered = self._steered[rows[sampling]]
        if np.count_nonzero(steered):
            self._tell(
                computed, chunks, rows, sampling[steered], at[steered], logits[self._to_device(np.flatnonzero(steered))]
            )
            logits = logits[self._to_device(np.flatnonzero(~steered))]
            sampling, at = sampling[~steered], at[~steered]
            if not len(sampling):
                return
        samples = self._askers.of_samples(rows[sampling], at)
        asked = np.array([s.place for s in samples], np.int64)
        raw = logits[self._to_device(asked)] if samples else None  # a copy
        sampled, bad = self.sampler.sample(rows[sampling], at, logits)
        computed.tokens[sampling] = self._tokens[rows[sampling], at] = sampled
        if (whole := self.sampler.complete(rows[sampling])) is not None:
            computed.complete += chunks[sampling[whole]].tolist()
        if bad is not None:
            for i in np.flatnonzero(bad):
                why = self.sampler.trouble(int(rows[sampling[i]])) or _not_finite(int(at[i]))
                computed.failures.setdefault(int(chunks[sampling[i]]), why)
        if raw is not None:
            try:
                self._score(computed, chunks[sampling], samples, raw, sampled[asked])
            except Exception as error:  # what is drawn is remembered by the sampler: nobody may draw a second time
                log.exception("the log-probabilities of %d tokens raised; their requests end", len(samples))
                computed.failures.update({int(chunks[sampling[i]]): _told(error) for i in asked})

    def _tell(
        self, computed: _Computed, chunks: Index, rows: Index, sampling: Index, at: Index, logits: torch.Tensor
    ) -> None:
        """Add the candidates for the token `at[i]` of the chunk `sampling[i]`, out of `logits[i]`."""
        whole = self.sampler.complete(rows[sampling])
        for i, found in enumerate(self.sampler.candidates(rows[sampling], at, logits)):
            chunk, row = int(chunks[sampling[i]]), int(rows[sampling[i]])
            if whole is not None and whole[i]:
                computed.candidates.append(Candidates(chunk, NO_TOKENS, NO_LOGPROBS, NO_LOGPROBS))
            elif found is None:
                computed.failures[chunk] = self.sampler.trouble(row) or _not_finite(int(at[i]))
            else:
                computed.candidates.append(Candidates(chunk, *found))

    def _score(
        self, computed: _Computed, chunks: Index, stretches: list[Stretch], logits: torch.Tensor, tokens: Int32
    ) -> None:
        """Add the scores of `tokens`, which are those of the stretches one behind the other, like `logits`."""
        scored = score(logits, tokens, max(s.k for s in stretches))
        end = 0
        for s in stretches:
            begin, end = end, end + s.length
            bad = np.flatnonzero(scored.bad[begin:end])
            if len(bad):
                computed.failures.setdefault(int(chunks[s.place]), _not_finite(s.first + int(bad[0])))
                continue
            ids, logprobs = scored.token_ids[begin:end, : 1 + s.k], scored.logprobs[begin:end, : 1 + s.k]
            computed.scores.append(Scores(int(chunks[s.place]), s.first, ids, logprobs, scored.ranks[begin:end]))

    def _one_by_one(self, plan: Plan, error: Exception) -> _Computed:
        n = len(plan.rows)
        if n == 1:
            return _Computed(np.zeros(1, np.int32), {0: _told(error)})
        all_of_it = _Computed(np.zeros(n, np.int32))
        for i in range(n):
            try:
                work = self._work(plan, np.array([i]))
                one = self._compute(work, self._upload.put(work.arrays))
                self._take_in(one)
            except Exception as own:
                all_of_it.failures[i] = _told(own)
                continue
            all_of_it.tokens[i] = one.tokens[0]
            all_of_it.failures |= one.failures
            all_of_it.scores += one.scores
            all_of_it.candidates += one.candidates
            all_of_it.complete += one.complete
        return all_of_it

    def _forward(
        self, step: StepContext, input_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits [len(keep), vocab] behind the batch's tokens `keep`; None: behind the last one, which nobody wants."""
        with running(step):
            output = self.model(
                input_ids=input_ids[None],
                position_ids=positions[None],
                use_cache=False,
                step=step,
                **({"logits_to_keep": 1 if keep is None else keep} if self._keeps else {}),
            )
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps or keep is None else logits[keep]

    def _padding(self, size: int) -> Batch:
        """A batch of decodes that are nobody's."""
        none = np.empty(0, np.int64)
        return pack(self._tokens, none, none, none, size)

    def _decode(self, size: int) -> torch.Tensor:
        """Logits [size, vocab] of the batch of decodes that was put on the device last, whatever rows and lengths it has."""
        batch = self._padding(size)
        there = self._upload.like(batch.arrays)
        batch = replace(batch, kv_lens=np.full(size, self._max_tokens))  # bounds
        step, ids, positions = self._rows.context(
            batch, there, self._rows.num_slots, self._layers, self.kernel, bounded=True
        )
        with running(step):
            output = self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, step=step)
        logits: torch.Tensor = output.logits[0]
        return logits

    def _to_device(self, array: Index) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _not_finite(position: int) -> str:
    return f"the model's logits behind token {position:,} are not finite numbers"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
