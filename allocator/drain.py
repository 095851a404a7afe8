"""Which extents to give back, what to evict for it and what to move: a pure function of who holds what.

k extents of B blocks have to lose what lies in them. With F free blocks and a of them in these extents, kB - a blocks have to
go and F - a holes elsewhere can take them in. So whichever extents they are, they can go once kB - F blocks are evicted,
and that many are needed: none while kB <= F, and at most (F + C) // B extents can go where C blocks may be evicted.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def plan_drain(
    num_extents: int,
    candidates: ExtentIds,
    free: npt.NDArray[np.bool_],
    num_free: int,
    cached: BlockIndex,
    worth: Worth,
) -> DrainPlan:
    """Give back up to `num_extents` of `candidates` (lowest first), with `num_free` free blocks in all open extents.

    `free` [extents, blocks of one] says which blocks are; `cached` are those that may be evicted, and `worth[i]` what
    `cached[i]` is worth. Read-only. See `BlockAllocator.plan_drain` for what is chosen.
    """
    per = free.shape[1]
    extents = candidates[::-1]  # of equals the highest: sorting keeps the order
    used = per - np.count_nonzero(free[extents], axis=1)
    most = min(num_extents, len(extents), (num_free + len(cached)) // per)
    lacking = most * per - num_free
    if lacking <= 0:
        extents = extents[np.argsort(used, kind="stable")[:most]]
        return DrainPlan(extents, occupied(extents, free), np.empty(0, np.int32))
    home = cached // per
    live = used - np.bincount(home, minlength=len(free))[extents]
    dearest = np.full(len(free), -np.inf)
    np.maximum.at(dearest, home, worth)
    extents = extents[np.lexsort((dearest[extents], live))[:most]]
    evictions = cached[_cheapest(np.isin(home, extents), worth, lacking)].astype(np.int32)
    moves = occupied(extents, free)
    return DrainPlan(extents, moves[~np.isin(moves, evictions)], evictions)


def occupied(extents: ExtentIds, free: npt.NDArray[np.bool_]) -> BlockIds:
    """The blocks of `extents` that are not `free` [extents, blocks of one], in the order of the extents."""
    which, offsets = np.nonzero(~free[extents])
    blocks: BlockIds = (extents[which] * free.shape[1] + offsets).astype(np.int32)
    return blocks


def _cheapest(inside: npt.NDArray[np.bool_], worth: Worth, n: int) -> BlockIndex:
    """Where the `n` are that are worth least, `inside` ones before others; of equals the first. Least worth first."""

    def least(places: BlockIndex, most: int) -> BlockIndex:
        if 0 < most < len(places):  # sorting all of a large pool would take ten times as long
            values = worth[places]
            places = places[values <= np.partition(values, most - 1)[most - 1]]
        return places[np.argsort(worth[places], kind="stable")[:most]]

    chosen = least(np.flatnonzero(inside), n)
    if len(chosen) == n:
        return chosen
    return least(np.concatenate((chosen, least(np.flatnonzero(~inside), n - len(chosen)))), n)
