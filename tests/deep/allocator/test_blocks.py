"""The block allocator's invariants notice damage."""

from __future__ import annotations

import numpy as np
import pytest

from pagetide.allocator.blocks import BlockAllocator

DAMAGES = (
    lambda pool: pool._references.__setitem__(7, 1),
    lambda pool: pool._references.__setitem__(1, 0),
    lambda pool: pool._references.__setitem__(10, 1),
    lambda pool: pool._free.__setitem__(0, True),
    lambda pool: pool._free.__setitem__(7, False),
    lambda pool: pool._free.__setitem__(10, True),
    lambda pool: pool._pins.__setitem__(0, 1),
    lambda pool: pool._pins.__setitem__(1, 1),
    lambda pool: setattr(pool, "_num_free", 4),
    lambda pool: setattr(pool, "_num_draining", 1),
    lambda pool: setattr(pool, "_in_flight", 1),
    lambda pool: setattr(pool, "_mapped", 11),
    lambda pool: setattr(pool, "_usable", 6),
    lambda pool: pool._extents.room.__setitem__(2, 1),
    lambda pool: pool._extents._states.__setitem__(1, 2),
    lambda pool: setattr(pool, "_at_hand", np.array([7])),
    lambda pool: pool._findable.__setitem__(0, True),
    lambda pool: pool._findable.__setitem__(7, True),
    lambda pool: pool._findable.__setitem__(10, True),
    lambda pool: setattr(pool, "_num_findable", 1),
    lambda pool: setattr(pool, "_num_cached", 1),
    lambda pool: pool.publish([1]) or pool.release([1, 2]) is None or pool._free.__setitem__(1, True),
)


def test_invariants_notice_damage():
    for number, damage in enumerate(DAMAGES):
        pool = BlockAllocator(12, blocks_per_extent=3, mapped=[0, 1, 2])
        pool.allocate(3)
        pool.check_invariants([np.array([1, 2, 3])])
        damage(pool)
        try:
            pool.check_invariants()
        except AssertionError:
            continue
        pytest.fail(f"damage {number} was not noticed")
