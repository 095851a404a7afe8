"""Long random lives of the scheduler; seeds are printed, so that a failing one can be run again."""

from __future__ import annotations

import os
import random

import pytest
from random_walk import elastic_walk, walk

pytestmark = pytest.mark.stress
DRAW = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))  # the same in every worker
SEEDS = [int(s) for s in os.environ.get("PAGETIDE_SEEDS", "").split(",") if s] or DRAW.sample(range(2**32), 100)


@pytest.mark.parametrize("seed", SEEDS[:50])
def test_walk(seed):
    print("seed", seed)
    walk(seed, events=1_000, host=bool(seed % 2))


@pytest.mark.parametrize("seed", SEEDS[:50])
def test_elastic_walk(seed):
    print("seed", seed)
    elastic_walk(seed, events=1_000)


@pytest.mark.parametrize("seed", SEEDS)
def test_elastic_walk_with_prefixes_and_a_host_tier(seed):
    """Prefixes, swaps, evictions and extents together: 100,000 events."""
    print("seed", seed)
    elastic_walk(seed, events=1_000, host=True)
