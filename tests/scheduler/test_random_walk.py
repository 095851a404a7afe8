"""Short random lives of a scheduler; tests/deep has all variants, and `make stress` long lives."""

from __future__ import annotations

import pytest
from random_walk import PAIRWISE, walk


@pytest.mark.parametrize("variant", PAIRWISE)
def test_any_seed(variant: str) -> None:
    for seed in range(2):
        walk(seed, variant, events=100, naps=seed > 0)


@pytest.mark.parametrize(("variant", "seed"), [("fixed-disk-alternate-sound-full", 7), ("fixed-disk-ahead-sound-states", 15)])
def test_reads_go_where_blocks_leave_for_the_host_tier(variant: str, seed: int) -> None:
    """What leaves is copied out before, and what was read is not copied out by the same plan."""
    walk(seed, variant, events=100)
