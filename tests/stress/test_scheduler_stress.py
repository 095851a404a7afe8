"""Long random lives of the scheduler; seeds are printed, so that a failing one can be run again."""

from __future__ import annotations

import os
import random

import pytest
from random_walk import elastic_walk, walk

pytestmark = pytest.mark.stress
SEEDS = [int(s) for s in os.environ.get("PAGETIDE_SEEDS", "").split(",") if s] or random.sample(range(2**32), 100)


@pytest.mark.parametrize("seed", SEEDS)
def test_walk(seed):
    print("seed", seed)
    walk(seed, events=1_000)


@pytest.mark.parametrize("seed", SEEDS)
def test_elastic_walk(seed):
    print("seed", seed)
    elastic_walk(seed, events=1_000)
