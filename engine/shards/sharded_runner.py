"""The driver's runner: hands each plan to all shards, and joins what they answer."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import numpy.typing as npt

from ...cache.block_table import BlockBytes, Int32
from ...common.heartbeat import Progress
from ...scheduler.plan import NO_EXTENTS, NO_TOKENS, Plan, Resize, Result
from ..errors import Attempt, ShardLost, format_error
from .messages import CopyBlocks, ExecutePlan, PlanDone, PutBytes, ShardLoaded
from .sharded_arena import ResizeOutcome, ShardedArena
from .team import ShardTeam

_PUT_BYTES = 8 << 20  # sent at once to a shard


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """The attention kernel of the shards, by name."""

    name: str
    captures: bool


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """The sizes of the decode steps that the shards have captured."""

    sizes: tuple[int, ...]


class ShardedHostPool:
    """The host tier, of which each shard has its part of every slot."""

    def __init__(self, team: ShardTeam, num_slots: int) -> None:
        self.num_slots = num_slots
        self._team = team

    @property
    def mapped_bytes(self) -> int:
        """Host memory that the largest part takes now."""
        return max(self._team.sign(rank).host_bytes for rank in range(self._team.size))

    def give_back(self, num_bytes: int) -> None:
        """Free up to `num_bytes` of each part. Raises ShardLost."""
        self._team.call("give_back_host", num_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class ShardedCopy:
    """Copies of blocks on their way from all shards."""

    _team: ShardTeam
    _number: int

    def wait(self) -> npt.NDArray[np.uint8]:
        """The bytes [n, shards * payload_bytes]: of each block the parts of the shards, by rank. Once, from any thread.

        Raises ShardLost, and the error of a shard that could not copy.
        """
        try:
            parts = self._team.wait(self._number, range(self._team.size))
        finally:
            self._team.forget(self._number)
        for part in parts:
            if isinstance(part, Exception):
                raise part
        return np.concatenate(parts, axis=1)


@dataclass(slots=True, eq=False)
class StepTimes:
    """Steps since the start, and their seconds: writing and sending plans, waiting for results, and of that computing."""

    steps: int = 0
    sending_s: float = 0.0
    waiting_s: float = 0.0
    computing_s: float = 0.0  # of the first shard, its collectives included


class ShardedRunner:
    """Has what the engine's core needs of a `ModelRunner`. Not thread-safe. Plans must come in the order they were made."""

    def __init__(self, team: ShardTeam, arena: ShardedArena | None, loaded: Sequence[ShardLoaded]) -> None:
        first = loaded[0]
        self.arena = arena
        self.kernel = KernelFacts(first.kernel, first.captures)
        self.overlaps = first.overlaps
        self.graphs = GraphFacts(first.graph_sizes) if first.graph_sizes else None
        self.fused_layers = 0  # collectives lie within layers
        self.host = ShardedHostPool(team, first.num_slots) if first.num_slots else None
        self.collectives = first.collectives
        self.times = StepTimes()
        self.on_refused: Callable[[], None] = lambda: None  # called when a shard could not map what its lease allows
        self.progress = Progress()  # the wait for shards that are well is progress: the team judges these
        team.on_well = self.progress.beat
        self._team = team
        self._put = 0, 0.0  # bytes sent for plans to put them somewhere, in so many seconds
        self.drain = None  # see `Scheduler.suspend`: each shard has its part of every block

    @property
    def lost(self) -> ShardLost | None:
        """Why the shards are gone; None while they are there."""
        return self._team.lost

    @property
    def mapped_extents(self) -> frozenset[int] | None:
        """The pool's extents that have memory on all shards; None for a pool of fixed size."""
        return None if self.arena is None else self.arena.mapped_extents

    @property
    def put_s_per_byte(self) -> float:
        """Seconds that a byte takes to where a plan puts it, as measured so far; 0 before."""
        num_bytes, seconds = self._put
        return seconds / num_bytes if num_bytes else 0.0

    def copy_blocks(self, blocks: Int32) -> ShardedCopy:
        """Begin to copy the parts of `blocks` that all shards have, between two steps. Raises ShardLost."""
        return ShardedCopy(self._team, self._team.post([CopyBlocks(blocks)] * self._team.size))

    def begin(self, plan: Plan) -> ShardedStep:
        """Send `plan` to all shards. Raises ShardLost."""
        began = time.perf_counter()
        team, arena, sent = self._team, self.arena, plan
        refused: str | None = None
        undo: list[tuple[int, ...]] = [()] * team.size
        if arena is not None:
            undo = [tuple(arena.undo(rank)) for rank in range(team.size)]
            if plan.resize and (refused := arena.expect(plan.resize)) is not None:
                sent = replace(plan, resize=Resize(NO_EXTENTS, plan.resize.unmap))
        everywhere = sent.moves_memory or not len(sent.rows) or any(undo)
        if sent.reads:
            self._send_reads(sent)
            sent = replace(sent, reads=())
        data = pickle.dumps(sent, pickle.HIGHEST_PROTOCOL)
        ranks = range(team.size) if everywhere else range(1)
        number = team.post([ExecutePlan(data, undo[rank], rank in ranks) for rank in range(team.size)])
        step = ShardedStep(self, plan, sent, refused, ranks, number)
        self.times.steps += 1
        self.times.sending_s += time.perf_counter() - began
        return step

    def close(self) -> None:
        """Does nothing: the shards are ended by their team."""

    def empty_caches(self) -> None:
        """Free the caches of libraries and kernels on all shards. Raises ShardLost."""
        self._team.call("empty_caches")

    def tidy(self) -> None:
        """Return free heap memory of all shards to the system. Raises ShardLost."""
        self._team.call("tidy")

    def _send_reads(self, plan: Plan) -> None:
        """Send each shard its part of what `plan` puts into blocks, in pieces, before the plan."""
        began, size, num_bytes = time.perf_counter(), self._team.size, 0
        for blocks, data in ((read.blocks, read.data) for read in plan.reads):
            part = data.shape[1] // size
            rows = max(1, _PUT_BYTES // part)
            num_bytes += data.nbytes
            for first in range(0, len(blocks), rows):
                of_piece, bytes_of = blocks[first : first + rows], data[first : first + rows].reshape(-1, size, part)
                messages = [PutBytes(plan.step_id, BlockBytes(of_piece, bytes_of[:, rank])) for rank in range(size)]
                self._team.forget(self._team.post(messages))
        self._put = self._put[0] + num_bytes, self._put[1] + time.perf_counter() - began

    def _wait(self, step: ShardedStep) -> Result:
        """The result of `step`. Raises ShardLost."""
        with Attempt() as attempt:
            result = self._result_of(step)
        if (error := attempt.error) is None:
            self._team.forget(step.number)
            return result
        if isinstance(error, ShardLost):
            raise error
        raise self._team.fail(f"a step failed: {format_error(error)}") from error

    def _result_of(self, step: ShardedStep) -> Result:
        """Wait for the answers to `step`, and take what they say of the pool."""
        began = time.perf_counter()
        answers: list[PlanDone] = self._team.wait(step.number, step.ranks)
        self.times.waiting_s += time.perf_counter() - began
        self.times.computing_s += answers[0].result.compute_s
        result = joined_results([answer.result for answer in answers])
        if self.arena is None:
            return result
        for rank, answer in enumerate(answers):
            if answer.undone:
                self.arena.undone(rank, answer.undone)
        if not step.sent.resize:
            return result if step.refused is None else replace(result, refused=step.refused)
        outcomes = [ResizeOutcome(_ids(a.result.mapped), _ids(a.result.unmapped), a.result.refused) for a in answers]
        settled = self.arena.settle(step.sent.resize, outcomes)
        if len(step.sent.resize.map) and not settled.mapped:
            self.on_refused()
        applied = settled.applied_to(result)
        return applied if step.refused is None else replace(applied, refused=step.refused)


@dataclass(slots=True, eq=False)
class ShardedStep:
    """A plan that the shards execute."""

    _runner: ShardedRunner
    plan: Plan
    sent: Plan
    refused: str | None
    ranks: range
    number: int

    def wait(self) -> Result:
        """Wait for the plan's result. Call it once per plan, in the order the plans were begun. Raises ShardLost."""
        return self._runner._wait(self)


def _ids(extents: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[int, ...]:
    return tuple(extents.tolist())


def joined_results(results: Sequence[Result]) -> Result:
    """The first shard's result, with what failed on any of them: a block is whole only if all its parts are."""
    first = results[0]
    if len(results) == 1:
        return first
    return replace(
        first,
        lost_slots=_union([one.lost_slots for one in results]),
        failed_slots=_union([one.failed_slots for one in results]),
        failed_blocks=_union([one.failed_blocks for one in results]),
        swapped=min(one.swapped for one in results),
        swap_s=max(one.swap_s for one in results),
    )


def _union(ids: Sequence[Int32]) -> Int32:
    union: Int32 = reduce(np.union1d, ids, NO_TOKENS).astype(np.int32)
    return union
