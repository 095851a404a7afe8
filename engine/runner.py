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
from ..scheduler.plan import NO_EXTENTS, NO_TOKENS, Failure, Plan, Result
from .attention.context import Kernel, StepContext, running
from .host_pool import Copies, HostPool, Swapped
from .sampler import Sampler

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Moved:
    """What became of what a plan does to memory, as a result says it."""

    mapped: Index
    unmapped: Index
    refused: str | None = None
    swaps: list[Swapped] = field(default_factory=list)


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
                tokens, failures = self._compute(plan, every)
            except Exception as error:
                log.exception("step %d raised; trying its %d chunks one by one", plan.step_id, len(every))
                tokens, failures = self._one_by_one(plan, error)
            finally:
                try:
                    if self.host is not None:
                        self._fence()  # else what samples nothing would look as if it took no time
                    compute_s = time.perf_counter() - began
                finally:
                    if copies is not None:
                        moved.swaps.append(copies.wait())
        failed = [f.index for f in failures]
        counts = plan.samples.astype(np.int64)
        counts[failed] = 0
        got = tokens[counts > 0]
        rows = plan.rows[counts > 0]
        self._tokens[rows, (plan.starts + plan.lengths)[counts > 0]] = got
        return Result(
            plan.step_id, counts, got, tuple(failures), moved.mapped, moved.unmapped, moved.refused,
            np.concatenate([NO_TOKENS, *(swap.lost_slots for swap in moved.swaps)]),
            sum(swap.num_timed for swap in moved.swaps), sum(swap.seconds for swap in moved.swaps), compute_s,
        )  # fmt: skip

    def close(self) -> None:
        """Let go of the model and of the views of the arena, give the host tier back. Nothing can be executed afterwards.
        Idempotent.
        """
        if (host := self.__dict__.pop("host", None)) is not None:
            host.close()
        for name in ("model", "storage", "arena", "kernel", "_layers"):
            self.__dict__.pop(name, None)

    def _follow(self, plan: Plan) -> None:
        """Take in what changed: rows left and taken, tables grown."""
        if len(plan.released):
            self.sampler.release(plan.released)
        for new in plan.admitted:
            self._tokens[new.row, : len(new.token_ids)] = new.token_ids
            self.sampler.admit(new.row, new.sampling, new.token_ids, new.num_prompt)
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

    def _compute(self, plan: Plan, chunks: Index) -> tuple[Int32, list[Failure]]:
        """Run the given chunks as one batch. Returns a token for every chunk (what has no sample is 0), and failures."""
        tokens = np.zeros(len(chunks), np.int32)
        if not len(chunks):
            return tokens, []
        rows = plan.rows[chunks]
        starts, lengths = plan.starts[chunks], plan.lengths[chunks]
        step, input_ids, positions = self._pack(rows, starts, lengths)
        sampling = np.flatnonzero(plan.samples[chunks])
        keep = (step.q_starts + lengths - 1)[sampling] if len(sampling) else np.zeros(1, np.int64)
        logits = self._forward(step, input_ids, positions, keep)
        if not len(sampling):
            return tokens, []
        at = (starts + lengths)[sampling]
        sampled, bad = self.sampler.sample(rows[sampling], at, logits)
        tokens[sampling] = sampled
        failures = []
        if bad is not None:
            failures = [
                Failure(int(chunks[sampling[i]]), f"the model's logits behind token {at[i]:,} are not finite numbers")
                for i in np.flatnonzero(bad)
            ]
        return tokens, failures

    def _one_by_one(self, plan: Plan, error: Exception) -> tuple[Int32, list[Failure]]:
        n = len(plan.rows)
        if n == 1:
            return np.zeros(1, np.int32), [Failure(0, _told(error))]
        tokens, failures = np.zeros(n, np.int32), []
        for i in range(n):
            try:
                tokens[i : i + 1], bad = self._compute(plan, np.array([i]))
                failures += bad
            except Exception as own:
                failures.append(Failure(i, _told(own)))
        return tokens, failures

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
