"""Long random lives of the scheduler; seeds are printed, so that a failing one can be run again."""

from __future__ import annotations

import os
import random

import pytest
from random_walk import elastic_walk, walk

pytestmark = pytest.mark.stress
DRAW = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))  # the same in every worker
SEEDS = [int(s) for s in os.environ.get("PAGETIDE_SEEDS", "").split(",") if s] or DRAW.sample(range(2**32), 100)


@pytest.mark.parametrize("seed", SEEDS[:25])
def test_walk(seed):
    print("seed", seed)
    walk(seed, events=1_000, host=bool(seed % 2), ahead=bool(seed & 2))


@pytest.mark.parametrize("seed", SEEDS[:25])
def test_elastic_walk(seed):
    print("seed", seed)
    elastic_walk(seed, events=1_000, ahead=bool(seed & 2))


@pytest.mark.parametrize("seed", SEEDS)
def test_elastic_walk_with_prefixes_and_a_host_tier(seed):
    """Prefixes, swaps, evictions and extents together, half of them with steps planned ahead: 100,000 events."""
    print("seed", seed)
    elastic_walk(seed, events=1_000, host=True, ahead=bool(seed & 2))
