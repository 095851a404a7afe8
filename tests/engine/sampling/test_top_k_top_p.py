"""Top-k and top-p against a loop over tokens, with many ties."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetide.engine.sampling.top_k_top_p import cut

WAYS = pytest.mark.parametrize("at_hand", [True, False])


def _kept(logits: Sequence[float], k: int, share: float, nudge: float) -> set[int]:
    """Ids of the tokens that stay: from the k-th logit upwards the fewest, ties by id, that hold more than the share."""
    floor = sorted(logits, reverse=True)[k - 1]
    order = sorted((i for i, x in enumerate(logits) if x >= floor), key=lambda i: (-logits[i], i))
    weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
    kept, held = set(), 0.0
    for i, weight in zip(order, weights, strict=True):
        kept.add(i)
        held += weight
        if held > (share + nudge) * math.fsum(weights):
            break
    return kept


@settings(max_examples=80, deadline=None)
@given(
    st.integers(2, 300).flatmap(
        lambda n: st.lists(
            st.tuples(
                st.integers(0, 10**6),  # seed
                st.integers(1, 12),  # different logits
                st.integers(1, min(4, n)) | st.integers(1, n),  # k
                st.floats(0.01, 0.99) | st.just(math.inf),
            ),
            min_size=1,
            max_size=5,
        ).map(lambda rows: (n, rows))
    )
)
def test_they_keep_what_a_loop_keeps(case: tuple[int, list[tuple[int, int, int, float]]]) -> None:
    """Also that a row's tokens do not depend on its neighbours, or on whether values may be read."""
    n, rows = case
    drawn = [torch.randint(levels, (n,), generator=torch.Generator().manual_seed(seed)) for seed, levels, _, _ in rows]
    x = torch.stack(drawn).float() * 0.7
    top_k, top_p = torch.tensor([k for _, _, k, _ in rows]), torch.tensor([p for *_, p in rows], dtype=torch.float64)
    most = int(top_k.max())
    got = cut(x.clone(), most, top_k, top_p, at_hand=True)
    assert torch.equal(cut(x.clone(), most, top_k, top_p, at_hand=False), got)
    for i, (_, _, k, share) in enumerate(rows):
        one = slice(i, i + 1)
        for at_hand in (True, False):
            assert torch.equal(cut(x[one].clone(), k, top_k[one], top_p[one], at_hand)[0], got[i])
        kept = set(got[i].nonzero().flatten().tolist())
        least, most_kept = (_kept(x[i].tolist(), k, share, nudge) for nudge in (-1e-6, 1e-6))
        assert least <= kept <= most_kept  # they differ only where the last bits of a sum decide


@WAYS
def test_more_tie_for_the_kth_place_than_k(at_hand: bool) -> None:
    """One of weight 1, then 1,000 that weigh a half each: they all count, and the lowest ids of them stay."""
    x = torch.full((1, 2000), -9.0)
    x[0, 1::2] = 1.0 - math.log(2)
    x[0, 1501] = 1.0
    for share, among in ((0.001, 0), (0.25, 249), (0.9, 899), (math.inf, 999)):
        kept = cut(x.clone(), 3, torch.tensor([3]), torch.tensor([share], dtype=torch.float64), at_hand)[0].nonzero()
        tied = [i for i in range(1, 2000, 2) if i != 1501]
        assert kept.flatten().tolist() == sorted([1501, *tied[:among]])
    kept = cut(x.clone(), 3, torch.tensor([3]), None, at_hand)[0].nonzero()
    assert len(kept) == 1000


@WAYS
def test_top_p_alone_of_two_levels(at_hand: bool) -> None:
    x = torch.tensor([[0.0, 0.0, -math.log(4), 0.0, -math.log(4)]]) + 5  # weights 1, 1, 1/4, 1, 1/4
    for share, kept in ((0.1, [0]), (0.5, [0, 1]), (0.7, [0, 1, 3]), (0.9, [0, 1, 2, 3]), (0.95, [0, 1, 2, 3, 4])):
        got = cut(x.clone(), 5, None, torch.tensor([share], dtype=torch.float64), at_hand)[0]
        assert got.nonzero().flatten().tolist() == kept
        assert got.max() == 1
