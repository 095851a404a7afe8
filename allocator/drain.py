"""Drain planning: which extents to give back, and which blocks to evict and move for it. Pure.

k extents of B blocks must lose their contents. With F free blocks, a of them in these extents, kB - a blocks must leave
and F - a holes elsewhere can take them. So whichever extents are chosen, exactly max(0, kB - F) blocks must be evicted,
and with C evictable blocks at most (F + C) // B extents can go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .extents import ExtentIds

BlockIds = npt.NDArray[np.int32]
BlockIndex = npt.NDArray[np.int64]  # int64, which numpy indexes with fastest
Worth = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True, eq=False)
class DrainPlan:
    """Extents that can be given back, cheapest first, once `evictions` are forgotten and `moves` have been moved.

    `evictions` is the smallest possible set, least worth first. `moves` is what is left in the extents after them, in
    the order of the extents. If more blocks are forgotten than planned, fewer are left to move: see
    `BlockAllocator.occupied`.
    """

    extents: ExtentIds
    moves: BlockIds
    evictions: BlockIds


class Evictable(NamedTuple):
    """Which blocks may be evicted, and their worth: both [extents, blocks per extent]."""

    cached: npt.NDArray[np.bool_]
    worth: Worth


def plan_drain(
    num_extents: int, candidates: ExtentIds, free: npt.NDArray[np.bool_], num_free: int, evictable: Evictable | None
) -> DrainPlan:
    """Plan to give back up to `num_extents` of `candidates` (lowest first).

    `free` [extents, blocks per extent] is the mask of free blocks; `num_free` counts those in all open extents. Without
    `evictable` nothing is evicted. `BlockAllocator.plan_drain` documents the choice.
    """
    per = free.shape[1]
    extents = candidates[::-1]  # highest first: the stable sort keeps this order among equals
    used = per - np.count_nonzero(free[extents], axis=1)
    num_cached = 0 if evictable is None else int(np.count_nonzero(evictable.cached))
    most = min(num_extents, len(extents), (num_free + num_cached) // per)
    lacking = most * per - num_free
    if evictable is None or lacking <= 0:
        extents = extents[np.argsort(used, kind="stable")[:most]]
        return DrainPlan(extents, occupied(extents, free), np.empty(0, np.int32))
    cached, worth = evictable
    live = used - np.count_nonzero(cached[extents], axis=1)
    dearest = np.where(cached, worth, -np.inf).max(axis=1)[extents]
    extents = extents[np.lexsort((dearest, live))[:most]]
    chosen = np.zeros((len(free), 1), np.bool_)
    chosen[extents] = True
    evictions = _cheapest(cached & chosen, cached & ~chosen, worth, lacking)
    left = free.copy()
    left.ravel()[evictions] = True
    return DrainPlan(extents, occupied(extents, left), evictions.astype(np.int32))


def occupied(extents: ExtentIds, free: npt.NDArray[np.bool_]) -> BlockIds:
    """The blocks of `extents` that are not `free` [extents, blocks per extent], in the order of the extents."""
    held = ~free[extents]
    if not held.any():
        return np.empty(0, np.int32)
    per = free.shape[1]
    blocks: BlockIndex = extents[:, None] * per + np.arange(per)
    return blocks[held].astype(np.int32)


def _cheapest(inside: npt.NDArray[np.bool_], outside: npt.NDArray[np.bool_], worth: Worth, n: int) -> BlockIndex:
    """The `n` blocks of least worth, least first and `inside` before `outside`; of equals the lowest id."""
    worth = worth.ravel()

    def least(blocks: BlockIndex, most: int) -> BlockIndex:
        values = worth[blocks]
        if 0 < 2 * most < len(blocks):  # sorting a large pool entirely would take ten times as long
            blocks = blocks[values <= np.partition(values, most - 1)[most - 1]]
            values = worth[blocks]
        return blocks[np.argsort(values, kind="stable")[:most]]

    chosen = least(np.flatnonzero(inside), n)
    if len(chosen) == n:
        return chosen
    return least(np.concatenate((chosen, least(np.flatnonzero(outside), n - len(chosen)))), n)
