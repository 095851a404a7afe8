"""Pool resizing: which extents the next plan maps and unmaps, and how its result is applied.

A resize is requested between steps (`grow`, `give_back`), executed by the next plan (`take`) and applied with its
result (`settle`):

    grow       unmapped  ──► growing ── plan, result ──► blocks are free
    give_back  blocks are free, live blocks move ──► leaving ── plan, result ──► unmapped

A resize that no plan has taken yet can be cancelled: `grow` first cancels leaving extents, `give_back` first cancels
growing ones.
"""

from __future__ import annotations

import numpy as np

from ..cache.block_table import BlockCopies, Index, TableUpdate
from ..cache.manager import CacheManager
from .errors import InvalidCallOrder
from .plan import NO_RESIZE, Plan, Resize, Result


class PoolSize:
    """Extents of `cache` that are being resized. `limit_blocks` bounds growth. Mutates the cache."""

    def __init__(self, cache: CacheManager) -> None:
        self.cache = cache
        self.limit_blocks = cache.pool.capacity
        self._growing: list[int] = []
        self._leaving: list[int] = []
        self._copies: list[BlockCopies] = []
        self._moving: list[BlockCopies] = []  # by the pending plan

    @property
    def pending(self) -> bool:
        """Whether the next plan has a resize or copies to execute."""
        return bool(self._growing or self._leaving or self._copies)

    @property
    def num_extents(self) -> int:
        """Extents with memory once all requested resizes are done."""
        return len(self.cache.pool.mapped_extents) + len(self._growing) - len(self._leaving)

    @property
    def most_extents(self) -> int:
        """Extents within the limit; at least 1, because the extent of the null block always has memory."""
        return max(1, (self.limit_blocks + 1) // self.cache.pool.blocks_per_extent)

    @property
    def idle_extents(self) -> int:
        """Extents that `give_back` could give back now."""
        from_pool = min(
            len(self.cache.pool.drainable_extents), self.cache.pool.available // self.cache.pool.blocks_per_extent
        )
        return len(self._growing) + from_pool

    @property
    def removable_extents(self) -> int:
        """Extents that `give_back` could give back if no row held a block."""
        return len(self._growing) + len(self.cache.pool.drainable_extents)

    def missing_blocks(self, num_extents: int) -> int:
        """Blocks to free before `give_back` has `num_extents`, which must be removable."""
        from_pool = num_extents - len(self._growing)
        return 0 if from_pool <= 0 else from_pool * self.cache.pool.blocks_per_extent - self.cache.pool.available

    def grow(self, num_extents: int) -> int:
        """Request up to `num_extents` more extents, within the limit and the reserved pool. Returns how many."""
        allowed = max(0, min(num_extents, self.most_extents - self.num_extents))
        kept = self._leaving[len(self._leaving) - min(allowed, len(self._leaving)) :]
        if kept:
            self.cache.resizer.keep(kept)
            del self._leaving[-len(kept) :]
        unmapped = np.setdiff1d(self.cache.pool.unmapped_extents, self._growing, assume_unique=True)
        fresh = unmapped[: allowed - len(kept)].tolist()
        self._growing += fresh
        return len(kept) + len(fresh)

    def give_back(self, num_extents: int) -> tuple[int, tuple[TableUpdate, ...]]:
        """Give back up to `num_extents` unneeded extents. Returns how many, and the table entries that moved."""
        called_off = self._growing[max(0, len(self._growing) - num_extents) :]
        del self._growing[len(self._growing) - len(called_off) :]
        shrink = self.cache.resizer.shrink(num_extents - len(called_off))
        if shrink is None:
            return len(called_off), ()
        self._leaving += shrink.extents.tolist()
        if shrink.copies is not None:
            self._copies.append(shrink.copies)
        return len(called_off) + len(shrink.extents), shrink.tables

    def take(self) -> tuple[Resize, list[BlockCopies]]:
        """Return the resize and copies of the plan being made; its result must be passed to `settle`."""
        if not self.pending:
            return NO_RESIZE, []
        resize = Resize(_sorted(self._growing), _sorted(self._leaving))
        self._moving, self._growing, self._leaving, self._copies = self._copies, [], [], []
        return resize, self._moving

    def settle(self, plan: Plan, result: Result) -> int:
        """Apply the result of the plan's resize. Returns how many blocks moved.

        Raises InvalidCallOrder, with no change, for extents that the plan did not name.
        """
        asked, done = plan.resize, result
        some = len(done.mapped) and not np.array_equal(np.sort(done.mapped), asked.map)
        if some or not np.isin(done.unmapped, asked.unmap).all():
            raise InvalidCallOrder(
                f"step {plan.step_id}: extents were mapped or unmapped that the plan did not name so"
            )
        moves = joined(self._moving)
        if moves is not None:
            self.cache.resizer.moved(moves)
        self._moving = []
        self.cache.resizer.grow(done.mapped)
        self.cache.resizer.unmapped(done.unmapped)
        self.cache.resizer.keep(np.setdiff1d(asked.unmap, done.unmapped))
        return 0 if moves is None else len(moves.sources)


def _sorted(extents: list[int]) -> Index:
    return np.array(sorted(extents), np.int64)


def joined(copies: list[BlockCopies]) -> BlockCopies | None:
    """All of `copies` as one simultaneous copy; None for none."""
    if len(copies) <= 1:
        return copies[0] if copies else None
    return BlockCopies(*(np.concatenate([getattr(c, name) for c in copies]) for name in ("sources", "targets")))
