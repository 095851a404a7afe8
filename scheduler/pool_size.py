"""The pool's size: which extents the next plan maps and unmaps, and what its result says about them.

Asked for between steps (`grow`, `give_back`), carried out by the next plan (`take`), true when its result is in (`settle`):

    grow       unmapped  ──► growing ── plan, result ──► blocks are free
    give_back  blocks are free, what lived there moves ──► leaving ── plan, result ──► unmapped

What has not been taken by a plan can be called off: to grow first calls off leaving, to give back first calls off growing.
"""

from __future__ import annotations

import numpy as np

from ..cache.block_table import BlockCopies, Index, TableUpdate
from ..cache.manager import CacheManager
from .errors import InvalidCallOrder
from .plan import NO_RESIZE, Plan, Resize, Result


class PoolSize:
    """Extents of `cache` on their way. `limit_blocks` is the most that growth may lead to. Mutates the cache."""

    def __init__(self, cache: CacheManager) -> None:
        self.cache = cache
        self.limit_blocks = cache.capacity
        self._growing: list[int] = []
        self._leaving: list[int] = []
        self._copies: list[BlockCopies] = []
        self._moving: list[BlockCopies] = []  # by the plan that is out

    @property
    def pending(self) -> bool:
        """Whether the next plan has anything to do for it."""
        return bool(self._growing or self._leaving or self._copies)

    @property
    def num_extents(self) -> int:
        """Extents with memory once everything asked for is done."""
        return len(self.cache.mapped_extents) + len(self._growing) - len(self._leaving)

    @property
    def most_extents(self) -> int:
        """Extents that lie within the limit: at least that of the null block, which always has memory."""
        return max(1, (self.limit_blocks + 1) // self.cache.blocks_per_extent)

    @property
    def idle_extents(self) -> int:
        """Extents that `give_back` has for the asking."""
        from_pool = min(len(self.cache.drainable_extents), self.cache.available // self.cache.blocks_per_extent)
        return len(self._growing) + from_pool

    @property
    def removable_extents(self) -> int:
        """Extents that `give_back` would have if nobody held a block."""
        return len(self._growing) + len(self.cache.drainable_extents)

    def missing_blocks(self, num_extents: int) -> int:
        """Blocks that somebody has to give up before `give_back` has so many extents, no more than are removable."""
        from_pool = num_extents - len(self._growing)
        return 0 if from_pool <= 0 else from_pool * self.cache.blocks_per_extent - self.cache.available

    def grow(self, num_extents: int) -> int:
        """Ask for up to `num_extents` more, as far as the limit and the reserved pool go. Returns how many."""
        allowed = max(0, min(num_extents, self.most_extents - self.num_extents))
        kept = self._leaving[len(self._leaving) - min(allowed, len(self._leaving)) :]
        if kept:
            self.cache.keep(kept)
            del self._leaving[-len(kept) :]
        unmapped = np.setdiff1d(self.cache.unmapped_extents, self._growing, assume_unique=True)
        fresh = unmapped[: allowed - len(kept)].tolist()
        self._growing += fresh
        return len(kept) + len(fresh)

    def give_back(self, num_extents: int) -> tuple[int, tuple[TableUpdate, ...]]:
        """Give up to `num_extents` back that nobody needs. Returns how many, and the table entries that moved."""
        called_off = self._growing[max(0, len(self._growing) - num_extents) :]
        del self._growing[len(self._growing) - len(called_off) :]
        shrink = self.cache.shrink(num_extents - len(called_off))
        if shrink is None:
            return len(called_off), ()
        self._leaving += shrink.extents.tolist()
        if shrink.copies is not None:
            self._copies.append(shrink.copies)
        return len(called_off) + len(shrink.extents), shrink.tables

    def take(self) -> tuple[Resize, list[BlockCopies]]:
        """What the plan that is being made does; its result must come to `settle`."""
        if not self.pending:
            return NO_RESIZE, []
        resize = Resize(_sorted(self._growing), _sorted(self._leaving))
        self._moving, self._growing, self._leaving, self._copies = self._copies, [], [], []
        return resize, self._moving

    def settle(self, plan: Plan, result: Result) -> int:
        """Take in what became of the plan's resize. Returns how many blocks moved.

        Raises InvalidCallOrder, with no change, for extents it did not name.
        """
        asked, done = plan.resize, result
        some = len(done.mapped) and not np.array_equal(np.sort(done.mapped), asked.map)
        if some or not np.isin(done.unmapped, asked.unmap).all():
            raise InvalidCallOrder(
                f"step {plan.step_id}: extents were mapped or unmapped that the plan did not name so"
            )
        moves = joined(self._moving)
        if moves is not None:
            self.cache.moved(moves)
        self._moving = []
        self.cache.grow(done.mapped)
        self.cache.unmapped(done.unmapped)
        self.cache.keep(np.setdiff1d(asked.unmap, done.unmapped))
        return 0 if moves is None else len(moves.sources)


def _sorted(extents: list[int]) -> Index:
    return np.array(sorted(extents), np.int64)


def joined(copies: list[BlockCopies]) -> BlockCopies | None:
    """All of `copies` as one, as if at once; None for none."""
    if len(copies) <= 1:
        return copies[0] if copies else None
    return BlockCopies(*(np.concatenate([getattr(c, name) for c in copies]) for name in ("sources", "targets")))
