"""The elastic pool: what the engine's memory asks of the scheduler, and the resize that the next plan executes.

A resize is requested between steps (`grow`, `give_back`), executed by the next plan (`take_resize`) and applied with
its result (`apply_resize`):

    grow       unmapped  ──► growing ── plan, result ──► blocks are free
    give_back  blocks are free, live blocks move ──► leaving ── plan, result ──► unmapped

A resize that no plan has taken yet can be cancelled: `grow` first cancels leaving extents, `give_back` first cancels
growing ones.
"""

from __future__ import annotations

import numpy as np

from ..cache.block_table import BlockCopies, Index, joined
from .admission import expected_blocks
from .plan import NO_RESIZE, InvalidCallOrder, Plan, Resize, Result
from .preemption import preempt_until
from .state import SchedulerState


class ElasticPool:
    """The size of the cache's pool, its limit, and requests to change them. Mutates the cache.

    `grow`, `give_back` and `make_idle` raise InvalidCallOrder while a plan is pending: the plan refers to the present
    blocks and extents. Sequences may be preempted by `make_idle` only.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._pool = state.cache.pool
        self._resizer = state.cache.resizer
        self._growing: list[int] = []
        self._leaving: list[int] = []
        self._copies: list[BlockCopies] = []
        self._moving: list[BlockCopies] = []  # by the pending plan

    @property
    def limit_blocks(self) -> int:
        """Upper bound of the pool's size in blocks: its capacity, unless the caller sets less.

        A limit below the mapped size takes nothing from running sequences, but no request is admitted above it, and
        `excess_extents` says how many extents to give back. Pins that leave too little below it end. Values are clamped to
        the capacity. It may be set while a plan is pending.
        """
        return self._state.limit_blocks

    @limit_blocks.setter
    def limit_blocks(self, blocks: int) -> None:
        cache = self._state.cache
        if blocks < 0:
            raise ValueError(f"limit_blocks cannot be negative, got {blocks}")
        self._state.limit_blocks = min(blocks, self._pool.capacity)
        while len(cache.pins) and cache.pins.num_promised > self._state.most_pinned:
            cache.end_newest_pin()
        self._state.waiting.requeue_deferred()

    @property
    def num_extents(self) -> int:
        """Extents with memory once all requested resizes are done."""
        return len(self._pool.mapped_extents) + len(self._growing) - len(self._leaving)

    @property
    def excess_extents(self) -> int:
        """Extents above the limit that are still to be given back; 0 when the limit is met."""
        return max(0, self.num_extents - self._most_extents)

    @property
    def idle_extents(self) -> int:
        """Extents that `give_back` could give back now."""
        from_pool = min(len(self._pool.drainable_extents), self._pool.available // self._pool.blocks_per_extent)
        return len(self._growing) + from_pool

    @property
    def is_resizing(self) -> bool:
        """Whether the next plan has a resize or copies to execute."""
        return bool(self._growing or self._leaving or self._copies)

    def running_blocks(self) -> int:
        """Forecast peak of blocks for the running sequences; a smaller pool soon preempts one."""
        return expected_blocks(self._state, [])

    def wanted_blocks(self) -> int:
        """Forecast peak of blocks for the running sequences and the waiting ones that free rows can take.

        At least what the next step needs, at most the pool's capacity. Costs about as much as planning a step: not for
        every step.
        """
        newcomers, needed = [], 0
        for sequence in self._state.waiting.queue[: self._state.rows.num_free]:
            if needed >= self._pool.capacity:
                break
            newcomers.append(sequence)
            needed += self._state.cache.blocks_for(len(sequence.tokens))
        return expected_blocks(self._state, newcomers)

    def grow(self, num_extents: int) -> int:
        """Let the next plan map up to `num_extents` more extents, within the limit. Returns how many it will.

        Their blocks are available when the plan's result is in.
        """
        self._check_turn(num_extents)
        allowed = max(0, min(num_extents, self._most_extents - self.num_extents))
        kept = self._leaving[len(self._leaving) - min(allowed, len(self._leaving)) :]
        if kept:
            self._resizer.keep(kept)
            del self._leaving[-len(kept) :]
        unmapped = np.setdiff1d(self._pool.unmapped_extents, self._growing, assume_unique=True)
        fresh = unmapped[: allowed - len(kept)].tolist()
        self._growing += fresh
        grown = len(kept) + len(fresh)
        if grown:  # extents kept from unmapping are available at once
            self.reopen_admission()
            self._state.waiting.look_again()
        return grown

    def give_back(self, num_extents: int) -> int:
        """Let the next plan unmap up to `num_extents` unneeded extents. Returns how many it will.

        Empty extents go first, then those with the fewest live blocks, which move into holes elsewhere.
        """
        self._check_turn(num_extents)
        self._state.end_aborted()
        cancelled = self._growing[max(0, len(self._growing) - num_extents) :]
        del self._growing[len(self._growing) - len(cancelled) :]
        given = len(cancelled)
        shrink = self._resizer.shrink(num_extents - given)
        if shrink is not None:
            given += len(shrink.extents)
            self._leaving += shrink.extents.tolist()
            if shrink.copies is not None:
                self._copies.append(shrink.copies)
            if shrink.tables:
                self._state.changes.tables.append(shrink.tables)
        self._state.withheld_blocks = max(0, self._state.withheld_blocks - given * self._pool.blocks_per_extent)
        return given

    def make_idle(self, num_extents: int) -> None:
        """Preempt sequences, in the order of preemption.py, until `give_back` has `num_extents` or none runs; then end pins.

        The next step withholds these extents from admission.
        """
        self._check_turn(num_extents)
        self._state.end_aborted()
        removable = len(self._growing) + len(self._pool.drainable_extents)  # if no row held a block
        due = min(num_extents, removable)
        from_pool = (due - len(self._growing)) * self._pool.blocks_per_extent
        lacking = preempt_until(self._state, lambda: from_pool - self._pool.available, self._state.by_row)
        while lacking > 0 and len(self._state.cache.pins):
            self._state.cache.end_newest_pin()
            lacking = from_pool - self._pool.available
        self._state.withheld_blocks = due * self._pool.blocks_per_extent

    def reopen_admission(self) -> None:
        """Withhold nothing from admission any more."""
        if self._state.withheld_blocks:
            self._state.withheld_blocks = 0
            self._state.waiting.look_again()
        self._state.has_preempted = False

    def take_resize(self) -> tuple[Resize, list[BlockCopies]]:
        """Return the resize and copies of the plan being made; pass its result to `apply_resize`."""
        if not self.is_resizing:
            return NO_RESIZE, []
        resize = Resize(_sorted(self._growing), _sorted(self._leaving))
        self._moving, self._growing, self._leaving, self._copies = self._copies, [], [], []
        return resize, self._moving

    def apply_resize(self, plan: Plan, result: Result) -> int:
        """Apply the result of the plan's resize. Returns how many blocks moved.

        Raises InvalidCallOrder, with no change, for extents that the plan did not name.
        """
        asked, done = plan.resize, result
        some = len(done.mapped) and not np.array_equal(np.sort(done.mapped), asked.map)
        if some or not np.isin(done.unmapped, asked.unmap).all():
            raise InvalidCallOrder(f"step {plan.step_id}: extents were mapped or unmapped that the plan did not name so")
        moves = joined(self._moving)
        if moves is not None:
            self._resizer.moved(moves)
        self._moving = []
        self._resizer.grow(done.mapped)
        self._resizer.unmapped(done.unmapped)
        self._resizer.keep(np.setdiff1d(asked.unmap, done.unmapped))
        return 0 if moves is None else len(moves.sources)

    @property
    def _most_extents(self) -> int:
        """Extents within the limit; at least 1, because the extent of the null block always has memory."""
        return max(1, (self._state.limit_blocks + 1) // self._pool.blocks_per_extent)

    def _check_turn(self, num_extents: int) -> None:
        if num_extents < 0:
            raise ValueError(f"cannot resize by {num_extents} extents")
        self._state.plans.check_turn()


def _sorted(extents: list[int]) -> Index:
    return np.array(sorted(extents), np.int64)
