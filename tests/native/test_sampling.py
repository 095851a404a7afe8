"""Tokens by the native kernel against a loop over sorted tokens in float64, and against torch's operators."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_oracle import logits_of
from torch import Tensor
from triton_checks import sparse

from pagetide import native

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="the native kernels are not built")
TYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["smooth", "rounded", "equal", "excluded", "steep", "sorted"]


@dataclass(frozen=True)
class Draw:
    """The settings of a row that draws; `top_p` inf and `min_p` 0 are off."""

    temperature: float = 1.0
    top_k: int = 10**9
    top_p: float = math.inf
    min_p: float = 0.0
    noise: float = 0.5


def sample(logits: Tensor, draws: list[Draw | None], want_weights: bool = False) -> tuple[list[int], Tensor, Tensor]:
    """(tokens, largest logits float64 [rows], weights [drawing rows, vocab]) of rows, of which some draw."""
    places = [place for place, draw in enumerate(draws) if draw is not None]
    drawing = [draw for draw in draws if draw is not None]
    tokens, packed, weights = torch.ops.pagetide.sample(
        logits,
        torch.tensor(places, dtype=torch.int64),
        torch.tensor([d.temperature for d in drawing], dtype=torch.float32),
        torch.tensor([min(d.top_k, logits.shape[-1]) for d in drawing], dtype=torch.int64),
        torch.tensor([d.top_p for d in drawing], dtype=torch.float64),
        torch.tensor([d.min_p for d in drawing], dtype=torch.float32),
        torch.tensor([d.noise for d in drawing], dtype=torch.float64),
        want_weights,
    )
    assert packed[0].tolist() == tokens.tolist()
    return tokens.tolist(), packed[1], weights


def kept_by_loop(x: list[float], draw: Draw, nudge: float) -> set[int]:
    """From the k-th logit upwards the fewest tokens, ties by id, that hold more than top-p; of them what reaches min-p."""
    floor = sorted(x, reverse=True)[min(draw.top_k, len(x)) - 1]
    order = sorted((i for i, value in enumerate(x) if value >= floor), key=lambda i: (-x[i], i))
    weights = [math.exp(x[i] - x[order[0]]) for i in order]
    kept, held, total = set(), 0.0, math.fsum(weights)
    for i, weight in zip(order, weights, strict=True):
        if weight >= draw.min_p * (1 - nudge):
            kept.add(i)
        held += weight
        if held > (draw.top_p + nudge) * total:
            break
    return kept


def check_row(logits: Tensor, draw: Draw, token: int, weights: Tensor) -> None:
    """`logits` [vocab]: the token and the weights are those of the loop, but for the last bits of a sum."""
    x = (logits.float() / draw.temperature).tolist()
    exact = torch.tensor([math.exp(value - max(x)) for value in x], dtype=torch.float64)
    least, most = kept_by_loop(x, draw, -1e-6), kept_by_loop(x, draw, 1e-6)
    kept = set(weights.nonzero().flatten().tolist())
    visible = {i for i in least if exact[i] > 1e-37}  # smaller weights are 0
    assert visible <= kept <= most
    mask = torch.zeros(len(x), dtype=torch.bool)
    mask[sorted(kept)] = True
    torch.testing.assert_close(weights.double(), exact * mask, atol=1e-37, rtol=1e-5)  # distances in float32
    running = (exact * mask).cumsum(0)
    assert token in kept
    share = draw.noise * running[-1]
    slack = 1e-6 * running[-1]
    assert running[token] - exact[token] - slack <= share <= running[token] + slack


DRAWS = st.builds(
    Draw,
    temperature=st.sampled_from([1.0, 0.5, 0.8, 3.0]),
    top_k=st.sampled_from([10**9, 1, 2, 7, 50, 300]) | st.integers(1, 2000),
    top_p=st.just(math.inf) | st.sampled_from([-1e-46, 0.1, 0.5, 0.9, 0.999]) | st.floats(0.01, 0.999),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0]),
    noise=st.sampled_from([0.0, 1 - 2**-53]) | st.floats(0, 0.999),
)


@given(
    st.sampled_from([1, 2, 15, 16, 17, 255, 256, 257, 1000, 3001]),
    st.sampled_from(TYPES),
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 999), DRAWS), min_size=1, max_size=4),
)
def test_random_rows(vocab: int, dtype: torch.dtype, rows: list[tuple[str, int, Draw]]) -> None:
    """In memory that is NaN around the rows."""
    memory = torch.full((len(rows) + 2, vocab + 37), torch.nan, dtype=dtype)
    logits = memory[1:-1, 5 : 5 + vocab]
    for row, (kind, seed, _) in zip(logits, rows, strict=True):
        row.copy_(logits_of(kind, (vocab,), seed))
    draws = [draw for *_, draw in rows]
    tokens, tops, weights = sample(logits, draws, want_weights=True)
    for i, draw in enumerate(draws):
        check_row(logits[i], draw, tokens[i], weights[i])
    assert tops.tolist() == logits.double().amax(-1).tolist()
    largest, tops, _ = sample(logits, [None] * len(rows))
    assert largest == [row.float().tolist().index(max(row.float().tolist())) for row in logits]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_that_are_not_finite_have_token_0_and_change_no_other(dtype: torch.dtype) -> None:
    for bad in [math.nan, math.inf, -math.inf]:
        x = torch.randn(6, 700, generator=torch.Generator().manual_seed(0)).to(dtype)
        draws: list[Draw | None] = [Draw(), None, Draw(top_k=5), None, Draw(top_p=0.5), Draw(min_p=0.1)]
        expected, tops, _ = sample(x, draws)
        for row in range(6):
            for column in (0, 333, 699):
                other = x.clone()
                other[row, column] = bad
                if bad == -math.inf:
                    other[row] = bad
                tokens, now, _ = sample(other, draws)
                assert tokens == [0 if i == row else token for i, token in enumerate(expected)]
                torch.testing.assert_close(now[row], torch.tensor(bad).double(), atol=0, rtol=0, equal_nan=True)
                assert torch.equal(now[torch.arange(6) != row], tops[torch.arange(6) != row])


def test_a_temperature_that_makes_logits_infinite() -> None:
    tokens, tops, _ = sample(torch.tensor([[1.0, 3e38]]), [Draw(temperature=1e-6)])
    assert (tokens, tops.float().tolist()) == ([0], torch.tensor([3e38]).tolist())


def test_a_row_depends_on_itself_alone() -> None:
    """Neither on other rows nor on threads: bits of weights and tokens."""
    x = torch.randn(40, 9000, generator=torch.Generator().manual_seed(1)) * 2
    kinds = [Draw(0.8), Draw(0.7, 40), Draw(1.0, 40, 0.9), Draw(1.3, top_p=0.95), Draw(min_p=0.02), Draw(0.9, 5000, 0.99, 0.01)]
    draws: list[Draw | None] = [Draw(**{**vars(kinds[i % 6]), "noise": i / 41}) if i % 7 else None for i in range(40)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        tokens, tops, weights = sample(x, draws, want_weights=True)
        for threads in (2, 5):
            torch.set_num_threads(threads)
            again = sample(x, draws, want_weights=True)
            assert again[0] == tokens and torch.equal(again[1], tops) and torch.equal(again[2], weights)
    finally:
        torch.set_num_threads(before)
    drawing = [i for i in range(40) if draws[i] is not None]
    for i in range(40):
        alone = sample(x[i : i + 1], draws[i : i + 1], want_weights=True)
        assert alone[0] == [tokens[i]]
        if i in drawing:
            assert torch.equal(alone[2][0], weights[drawing.index(i)])


def test_logits_beyond_two_to_the_31_elements() -> None:
    """Rows 2^30 elements apart, in memory that is not there but for the pages in use."""
    stride, vocab = 1 << 30, 300
    logits = sparse((3 * stride + vocab,), torch.bfloat16).as_strided((4, vocab), (stride, 1))
    logits.copy_(torch.randn(4, vocab, generator=torch.Generator().manual_seed(2)))
    draws: list[Draw | None] = [Draw(), Draw(top_k=5), None, Draw(top_p=0.7)]
    far, near = sample(logits, draws, want_weights=True), sample(logits.clone(), draws, want_weights=True)
    assert far[0] == near[0] and torch.equal(far[1], near[1]) and torch.equal(far[2], near[2])


def test_no_rows() -> None:
    assert sample(torch.empty(0, 10), [])[0] == []


BAD: list[tuple[dict[str, Any], str]] = [
    ({"logits": torch.zeros(9)}, "two dimensions"), ({"logits": torch.zeros(2, 0)}, "a vocabulary of 0"),
    ({"logits": torch.zeros(2, 9, dtype=torch.float64)}, "must be float32"),
    ({"logits": torch.zeros(9, 2).T}, "last stride"), ({"places": torch.tensor([2])}, "is 2 of 2"),
    ({"places": torch.tensor([-1])}, "is -1 of 2"), ({"temperature": torch.tensor([0.0])}, "temperature"),
    ({"temperature": torch.tensor([math.inf])}, "positive and finite"),
    ({"temperature": torch.tensor([math.nan])}, "positive and finite"),
    ({"temperature": torch.tensor([1.0, 1.0])}, "temperature must have 1"), ({"top_k": torch.tensor([0])}, "top_k"),
    ({"top_k": torch.tensor([10])}, "top_k"), ({"top_p": torch.tensor([math.nan], dtype=torch.float64)}, "top_p"),
    ({"min_p": torch.tensor([1.5])}, "min_p"), ({"noise": torch.tensor([1.0], dtype=torch.float64)}, "noise"),
    (
        {
            "places": torch.tensor([1, 1]), "temperature": torch.ones(2), "top_k": torch.tensor([9, 9]),
            "top_p": torch.ones(2).double(), "min_p": torch.zeros(2), "noise": torch.zeros(2).double(),
        },
        "another for the same row",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    arguments = {
        "logits": torch.zeros(2, 9), "places": torch.tensor([1]), "temperature": torch.tensor([1.0]),
        "top_k": torch.tensor([9]), "top_p": torch.tensor([0.5], dtype=torch.float64), "min_p": torch.tensor([0.0]),
        "noise": torch.tensor([0.5], dtype=torch.float64),
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=message):
        torch.ops.pagetide.sample(*{**arguments, **change}.values(), False)
