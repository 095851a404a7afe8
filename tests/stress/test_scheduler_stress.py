"""Long random lives of the scheduler; seeds are printed, so that a failing one can be run again.

PAGETIDE_SEEDS, numbers with commas, names the seeds; each of them is run in all variants.
"""

from __future__ import annotations

import os
import random

import pytest
from random_walk import VARIANTS, walk

pytestmark = pytest.mark.stress
DRAW = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))  # the same in every worker
SEEDS = [int(s) for s in os.environ.get("PAGETIDE_SEEDS", "").split(",") if s] or DRAW.sample(range(2**32), 8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_walk(variant, seed):
    print("seed", seed)
    walk(seed, variant, events=500, check_every=8)
