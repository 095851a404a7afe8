"""Tokens that are kept for several steps, against lists that get each token at once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagetide.engine.requests.kept_tokens import KEPT_STEPS, KeptTokens


@given(seed=st.integers(0, 2**32 - 1))
def test_all_tokens_arrive_in_order(seed: int) -> None:
    """Requests come, skip steps, change places and leave. Lists are read at random, and when their request leaves."""
    rng, kept = np.random.default_rng(seed), KeptTokens()
    lists: dict[str, list[int]] = {}
    expected: dict[str, list[int]] = {}
    order: list[str] = ["unknown"]
    for step in range(100):
        if rng.random() < 0.05:
            name = f"r{step}"
            lists[name], expected[name] = [], []
            kept.add(name, lists[name])
            order.append(name)
        if rng.random() < 0.05:
            order = rng.permutation(order).tolist()
        names = order[int(rng.random() < 0.1) :]
        ids: list[int] = rng.integers(0, 1000, len(names)).tolist()
        kept.put(names, ids)
        for name, token in zip(names, ids, strict=True):
            expected.setdefault(name, []).append(token)
        assert all(len(expected[name]) - len(tokens) < KEPT_STEPS for name, tokens in lists.items())
        if rng.random() < 0.05:
            kept.settle()
            assert lists == {name: expected[name] for name in lists}
        if rng.random() < 0.04:
            left = order[int(rng.integers(len(order)))]
            kept.remove(left)
            order = [name for name in order if name != left or left == "unknown"]
            assert left not in kept and lists.pop(left, expected[left]) == expected[left]
    assert len(kept) == len(lists)
    kept.settle()
    assert lists == {name: expected[name] for name in lists}
