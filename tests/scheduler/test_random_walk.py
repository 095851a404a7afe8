"""Short random lives of a scheduler; tests/deep has all variants, and `make stress` long lives."""

from __future__ import annotations

import pytest
from random_walk import PAIRWISE, walk


@pytest.mark.parametrize("variant", PAIRWISE)
def test_any_seed(variant: str) -> None:
    for seed in range(4):
        walk(seed, variant, events=100)
