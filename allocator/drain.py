"""Which extents to give back, what to evict for it and what to move: a pure function of who holds what.

k extents of B blocks have to lose what lies in them. With F free blocks and a of them in these extents, kB - a blocks have to
go and F - a holes elsewhere can take them in. So whichever extents they are, they can go once kB - F blocks are evicted,
and that many are needed: none while kB <= F, and at most (F + C) // B extents can go where C blocks may be evicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .extents import ExtentIds

BlockIds = npt.NDArray[np.int32]
BlockIndex = npt.NDArray[np.int64]  # the same, as numpy indexes fastest
Worth = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True, eq=False)
class DrainPlan:
    """Extents that can be given back, the cheapest first, once `evictions` are forgotten and `moves` have been moved.

    `moves` are what is then left in the extents, in their order; `evictions` the fewest there can be, least worth first.
    Where more is forgotten than planned, less is left to move: `BlockAllocator.occupied` tells.
    """

    extents: ExtentIds
    moves: BlockIds
    evictions: BlockIds


class Evictable(NamedTuple):
    """Which blocks may be evicted, and what these are worth: both [extents, blocks of one]."""

    cached: npt.NDArray[np.bool_]
    worth: Worth


def plan_drain(
    num_extents: int,
    candidates: ExtentIds,
    free: npt.NDArray[np.bool_],
    num_free: int,
    evictable: Evictable | None,
) -> DrainPlan:
    """Give back up to `num_extents` of `candidates` (lowest first), with `num_free` free blocks in all open extents.

    `free` [extents, blocks of one] says which blocks are. Where nothing is `evictable`, nothing is evicted. Read-only. See
    `BlockAllocator.plan_drain` for what is chosen.
    """
    per = free.shape[1]
    extents = candidates[::-1]  # of equals the highest: sorting keeps the order
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
    """The blocks of `extents` that are not `free` [extents, blocks of one], in the order of the extents."""
    held = ~free[extents]
    if not held.any():
        return np.empty(0, np.int32)
    per = free.shape[1]
    blocks: BlockIndex = extents[:, None] * per + np.arange(per)
    return blocks[held].astype(np.int32)


def _cheapest(inside: npt.NDArray[np.bool_], outside: npt.NDArray[np.bool_], worth: Worth, n: int) -> BlockIndex:
    """The `n` blocks that are worth least, `inside` ones before others; of equals the first. Least worth first."""
    worth = worth.ravel()

    def least(blocks: BlockIndex, most: int) -> BlockIndex:
        values = worth[blocks]
        if 0 < 2 * most < len(blocks):  # sorting all of a large pool would take ten times as long
            blocks = blocks[values <= np.partition(values, most - 1)[most - 1]]
            values = worth[blocks]
        return blocks[np.argsort(values, kind="stable")[:most]]

    chosen = least(np.flatnonzero(inside), n)
    if len(chosen) == n:
        return chosen
    return least(np.concatenate((chosen, least(np.flatnonzero(outside), n - len(chosen)))), n)
