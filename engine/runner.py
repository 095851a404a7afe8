"""The runner: executes plans. It follows the scheduler's rows by what plans tell it, and answers with plain results.

It keeps, per row, the tokens (from admissions and from its own samples) and the block tables, packs the chunks of a plan
into one batch without padding, runs the model over it and samples. It also carries out what a plan says about the pool's
memory: extents are mapped, blocks swapped out and copied, extents unmapped, in that order and before the model runs; beside it
goes what its chunks do not touch.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..allocator.arena import Arena
from ..allocator.errors import BlockMisuse
from ..cache.block_table import Index, Int32
from ..cache.host_tier import Swaps
from ..cache.storage import Storage
from ..scheduler.plan import NO_EXTENTS, NO_LOGPROBS, NO_TOKENS, Candidates, Failure, Plan, Result, Scores
from .attention.context import Kernel, StepContext, running
from .host_pool import Copies, HostPool, Swapped
from .sampler import Sampler
from .scoring import Askers, Stretch, score

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Moved:
    """What became of what a plan does to memory, as a result says it."""

    mapped: Index
    unmapped: Index
    refused: str | None = None
    swaps: list[Swapped] = field(default_factory=list)


@dataclass(slots=True)
class _Computed:
    """What some chunks of a plan gave. Mutated while they are computed."""

    tokens: Int32  # one for each chunk; what has no sample is 0
    failures: dict[int, str] = field(default_factory=dict)  # by chunk of the plan
    scores: list[Scores] = field(default_factory=list)
    candidates: list[Candidates] = field(default_factory=list)
    complete: list[int] = field(default_factory=list)  # chunks of the plan


class Runner:
    """One model on one device, with its rows. Not thread-safe; `execute` plans in the order they were made.

    `arena` is what `storage` was built over; without it no plan may resize the pool. Without `host` none may swap.
    """

    def __init__(
        self, model: Any, storage: Storage, kernel: Kernel, sampler: Sampler, *, num_rows: int, max_tokens: int,
        arena: Arena | None = None, host: HostPool | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.storage = storage
        self.arena = arena
        self.host = host
        self.kernel = kernel
        self.sampler = sampler
        self._askers = Askers(num_rows)
        self._steered = np.zeros(num_rows, np.bool_)  # whose tokens somebody else chooses
        geometry = storage.geometry
        self._block_size = geometry.block_size
        self._layers = tuple(storage.layer(i) for i in range(len(geometry.layers)))
        self._device = self._layers[0].key.device
        self._tokens = np.zeros((num_rows, max_tokens), np.int32)  # memory only where rows reached
        num_groups = 1 + max(layer.group for layer in geometry.layers)
        self._tables = tuple(
            np.zeros((num_rows, geometry.blocks_for_tokens(max_tokens)), np.int32) for _ in range(num_groups)
        )
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def mapped_extents(self) -> frozenset[int] | None:
        """The pool's extents that have memory; None without an arena."""
        return None if self.arena is None else self.arena.mapped_extents

    def execute(self, plan: Plan) -> Result:
        """Run `plan`. A chunk that cannot be computed is a failure in the result; the others have their tokens.

        When the batch raises, each chunk is tried alone: what a chunk writes lies in its own sequence's blocks and is the
        same however often it is written. An arena that refuses to map or unmap stops nothing else: the result says so.
        """
        with torch.inference_mode():
            self._follow(plan)
            moved = self._move_memory(plan)
            copies = self._begin_swaps(plan.swaps)
            began = time.perf_counter()
            every = np.arange(len(plan.rows))
            try:
                computed = self._compute(plan, every)
            except Exception as error:
                log.exception("step %d raised; trying its %d chunks one by one", plan.step_id, len(every))
                computed = self._one_by_one(plan, error)
            finally:
                try:
                    if self.host is not None:
                        self._fence()  # else what samples nothing would look as if it took no time
                    compute_s = time.perf_counter() - began
                finally:
                    if copies is not None:
                        moved.swaps.append(copies.wait())
        failed = computed.failures
        counts = plan.samples.astype(np.int64)
        counts[[*failed, *(c.index for c in computed.candidates)]] = 0
        got = computed.tokens[counts > 0]
        rows = plan.rows[counts > 0]
        self._tokens[rows, (plan.starts + plan.lengths)[counts > 0]] = got
        return Result(
            plan.step_id,
            counts,
            got,
            tuple(Failure(i, message) for i, message in failed.items()),
            moved.mapped,
            moved.unmapped,
            moved.refused,
            lost_slots=np.concatenate([NO_TOKENS, *(swap.lost_slots for swap in moved.swaps)]),
            swapped=sum(swap.num_timed for swap in moved.swaps),
            swap_s=sum(swap.seconds for swap in moved.swaps),
            compute_s=compute_s,
            scores=tuple(scores for scores in computed.scores if scores.index not in failed),
            candidates=tuple(computed.candidates),
            complete=np.array([i for i in computed.complete if i not in failed], np.int64),
        )

    def close(self) -> None:
        """Let go of the model and of the views of the arena, give the host tier back. Nothing can be executed afterwards.
        Idempotent.
        """
        if (host := self.__dict__.pop("host", None)) is not None:
            host.close()
        for name in ("model", "storage", "arena", "kernel", "_layers"):
            self.__dict__.pop(name, None)

    def _follow(self, plan: Plan) -> None:
        """Take in what changed: rows left and taken, tokens given, tables grown."""
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
        for table, update in zip(self._tables, plan.tables, strict=False):
            table[update.rows, update.slots] = update.blocks

    def _move_memory(self, plan: Plan) -> _Moved:
        """Map, swap out what the chunks depend on, copy, unmap, as the plan says.

        The device is idle while extents change: under a kernel that runs, a mapping that comes or goes may be a fault.
        """
        resize, arena, swaps = plan.resize, self.arena, plan.swaps
        if resize and arena is None:
            raise BlockMisuse("a runner without an arena cannot resize the pool")
        moved = _Moved(NO_EXTENTS, NO_EXTENTS)
        if arena is not None and len(resize.map):
            self._fence()
            moved.refused = _refusal(arena.map, resize.map)
            moved.mapped = NO_EXTENTS if moved.refused else resize.map
        if swaps is not None:
            self._swap_before(swaps, moved)
        if plan.copies is not None:
            self.storage.copy(plan.copies.sources, plan.copies.targets)
        if arena is not None and len(resize.unmap):
            self._fence()  # the copies read there
            moved.refused = _refusal(arena.unmap, resize.unmap) or moved.refused
            moved.unmapped = resize.unmap[~np.isin(resize.unmap, list(arena.mapped_extents))]
        return moved

    def _swap_before(self, swaps: Swaps, moved: _Moved) -> None:
        """Copy out what has to leave first, and what is wanted again already to its new place."""
        if self.host is None:
            raise BlockMisuse("a runner without a host tier cannot swap")
        first = slice(swaps.num_before)
        if swaps.num_before:
            moved.swaps.append(self.host.swap(self.storage, swaps.out_blocks[first], swaps.out_slots[first]))
        if swaps.back is not None:
            self.storage.copy(swaps.back.sources, swaps.back.targets)

    def _begin_swaps(self, swaps: Swaps | None) -> Copies | None:
        """Begin the copies that are done beside the chunks."""
        if self.host is None or swaps is None or not swaps.any_beside:
            return None
        rest = slice(swaps.num_before, None)
        return self.host.begin(
            self.storage, swaps.out_blocks[rest], swaps.out_slots[rest], swaps.in_slots, swaps.in_blocks
        )

    def _fence(self) -> None:
        """Wait until everything queued on the device is done. A CPU has done it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _compute(self, plan: Plan, chunks: Index) -> _Computed:
        """Run the given chunks as one batch."""
        computed = _Computed(np.zeros(len(chunks), np.int32))
        if not len(chunks):
            return computed
        rows = plan.rows[chunks]
        starts, lengths = plan.starts[chunks], plan.lengths[chunks]
        step, input_ids, positions = self._pack(rows, starts, lengths)
        sampling = np.flatnonzero(plan.samples[chunks])
        keep = (step.q_starts + lengths - 1)[sampling]
        prompts = self._askers.of_prompts(rows, starts, lengths)
        if prompts:
            behind = [(step.q_starts - starts)[p.place] + p.first - 1 + np.arange(p.length) for p in prompts]
            keep = np.concatenate([keep, *behind])
        logits = self._forward(step, input_ids, positions, keep if len(keep) else np.zeros(1, np.int64))
        if prompts:
            told = np.concatenate([self._tokens[rows[p.place], p.first : p.first + p.length] for p in prompts])
            self._score(computed, chunks, prompts, logits[len(sampling) :], told)
        if len(sampling):
            self._sample(computed, chunks, rows, sampling, (starts + lengths)[sampling], logits[: len(sampling)])
        return computed

    def _sample(
        self, computed: _Computed, chunks: Index, rows: Index, sampling: Index, at: Index, logits: torch.Tensor
    ) -> None:
        """Draw the token `at[i]` of the chunk `sampling[i]` from `logits[i]`, which may be overwritten, and score it."""
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
        computed.tokens[sampling] = sampled
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
                one = self._compute(plan, np.array([i]))
            except Exception as own:
                all_of_it.failures[i] = _told(own)
                continue
            all_of_it.tokens[i] = one.tokens[0]
            all_of_it.failures |= one.failures
            all_of_it.scores += one.scores
            all_of_it.candidates += one.candidates
            all_of_it.complete += one.complete
        return all_of_it

    def _forward(self, step: StepContext, input_ids: Index, positions: Index, keep: Index) -> torch.Tensor:
        """Logits [len(keep), vocab] behind the batch's tokens `keep`."""
        index = self._to_device(keep)
        with running(step):
            output = self.model(
                input_ids=self._to_device(input_ids)[None],
                position_ids=self._to_device(positions)[None],
                use_cache=False,
                step=step,
                **({"logits_to_keep": index} if self._keeps else {}),
            )
        return output.logits[0] if self._keeps else output.logits[0, index]

    def _pack(self, rows: Index, starts: Index, lengths: Index) -> tuple[StepContext, Index, Index]:
        """Chunks as one batch of T tokens: the context, the input ids [T] and the positions [T]."""
        q_ends = np.cumsum(lengths, dtype=np.int64)
        q_starts = q_ends - lengths
        kv_lens = starts + lengths
        owners = np.repeat(np.arange(len(rows)), lengths)  # [T] the chunk of each token
        positions = np.arange(len(owners)) + (starts - q_starts)[owners]
        slots, offsets = np.divmod(positions, self._block_size)
        width = -(-int(kv_lens.max()) // self._block_size)
        tables = [table[rows, :width] for table in self._tables]  # [n, width]
        for table in tables:
            table[np.arange(width) * self._block_size >= kv_lens[:, None]] = 0  # what the row holds beyond is stale
        step = StepContext(
            layers=self._layers,
            kernel=self.kernel,
            q_starts=q_starts,
            q_lens=lengths,
            kv_lens=kv_lens,
            num_decodes=int(np.count_nonzero(lengths == 1)),
            tables=tuple(self._to_device(table.astype(np.int64)) for table in tables),
            write_blocks=tuple(self._to_device(table[owners, slots].astype(np.int64)) for table in tables),
            write_offsets=self._to_device(offsets),
            block_size=self._block_size,
        )
        return step, self._tokens[rows[owners], positions].astype(np.int64), positions

    def _to_device(self, array: Index) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _not_finite(position: int) -> str:
    return f"the model's logits behind token {position:,} are not finite numbers"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _refusal(change: Callable[[list[int]], None], extents: Index) -> str | None:
    """Let the arena map or unmap `extents`. Returns what the device said against it; None when it was done.

    Raises BlockMisuse: then the scheduler's books differ from what is mapped, and no step can be right.
    """
    try:
        change(extents.tolist())
    except BlockMisuse:
        raise
    except Exception as error:
        log.warning("the device refused to %s %d extents: %s", change.__name__, len(extents), _told(error))
        return _told(error)
    return None
