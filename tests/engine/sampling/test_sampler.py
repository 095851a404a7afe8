"""The sampler against transformers' own processors, and its promise that a row depends on itself alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_oracle import Ids, admitted, as_ids, distribution, logits_of, processed, warped
from torch import Tensor
from transformers import MinPLogitsWarper, TopPLogitsWarper

from pagetide.engine.sampling.builtin_processors import RepetitionPenalty
from pagetide.engine.sampling.noise import uniform
from pagetide.engine.sampling.sampler import Sampler
from pagetide.scheduler.request import Sampling

NUM_PROMPT = 4


def _sampling(**settings: Any) -> Sampling:
    return Sampling(**{"max_new_tokens": 100, **settings})


def _scores(sampling: Sampling, history: Ids, x: Tensor) -> Tensor:
    """float32[1, vocab]: what transformers makes of the logits x [vocab], up to top-k."""
    return warped(replace(sampling, top_p=1.0, min_p=0.0), processed((sampling, history, NUM_PROMPT), x.float()[None]))


def _expected(sampling: Sampling, scores: Tensor, nudge: float = 0.0) -> Tensor:
    """float64[vocab]: the probabilities then; `nudge` moves the borders of top-p and min-p towards more tokens.

    The sums are taken in float64, as transformers does if the scores are. Which of several equal logits top-p keeps is
    an accident of its sort; here as in the sampler it is the lowest ids.
    """
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(scores[0].argmax(), scores.shape[-1]).double()
    nothing, scores = torch.zeros((1, 1), dtype=torch.long), scores.double()
    if sampling.top_p < 1:
        kept = TopPLogitsWarper(min(1.0, max(0.0, sampling.top_p + nudge)))(nothing, scores)
        tied = (scores == kept[kept > -torch.inf].min()).nonzero()[:, 1]
        lowest = tied[: int((kept[0, tied] > -torch.inf).sum())]
        kept[0, tied] = -torch.inf
        kept[0, lowest] = scores[0, lowest]
        scores = kept
    if sampling.min_p:
        scores = MinPLogitsWarper(min(1.0, sampling.min_p * (1 - nudge)))(nothing, scores)
    return scores[0].softmax(-1)


@st.composite
def _settings(draw: st.DrawFn, vocab_size: int) -> Sampling:
    def often(default: float, other: st.SearchStrategy[Any]) -> Any:
        return draw(st.one_of(st.just(default), other))

    return _sampling(
        temperature=often(1.0, st.sampled_from([0.0, 0.5, 0.7, 2.0]) | st.floats(0.05, 5)),
        top_k=often(0, st.integers(1, vocab_size + 3)),
        top_p=often(1.0, st.sampled_from([0.1, 0.5, 0.9]) | st.floats(0.01, 0.999)),
        min_p=often(0.0, st.sampled_from([0.05, 0.5, 1.0]) | st.floats(0.001, 1)),
        repetition_penalty=often(1.0, st.floats(0.3, 3)),
        min_new_tokens=draw(st.integers(0, 4)),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, vocab_size - 2), max_size=3, unique=True))),
        seed=draw(st.integers(0, 2**64 - 1)),
    )


@st.composite
def _rows(draw: st.DrawFn) -> tuple[list[Sampling], list[Ids], Tensor]:
    """(settings, histories, logits [n, vocab]) of some rows."""
    vocab_size, n = draw(st.sampled_from([2, 7, 128, 300])), draw(st.integers(1, 5))
    numbers = np.random.default_rng(draw(st.integers(0, 999)))
    histories = [as_ids(numbers.integers(0, vocab_size, NUM_PROMPT + draw(st.integers(0, 5)))) for _ in range(n)]
    kinds = st.sampled_from(["smooth", "rounded", "bf16", "equal", "excluded"])
    x = torch.stack([logits_of(draw(kinds), (vocab_size,), draw(st.integers(0, 999))) for _ in range(n)])
    return [draw(_settings(vocab_size)) for _ in range(n)], histories, x


def _admitted(settings: Sequence[Sampling], histories: Sequence[Ids], vocab_size: int, at_hand: bool | None = None) -> Sampler:
    cases = [(sampling, history, NUM_PROMPT) for sampling, history in zip(settings, histories, strict=True)]
    return admitted(cases, vocab_size, at_hand=at_hand)


@given(_rows())
def test_distribution_is_that_of_transformers(case: tuple[list[Sampling], list[Ids], Tensor]) -> None:
    sampling, histories, x = case
    sampler = _admitted(sampling, histories, x.shape[-1])
    rows, positions = as_ids(np.arange(len(x))), np.array([len(history) for history in histories])
    ours = distribution(sampler, rows, positions, x).double()
    unread = _admitted(sampling, histories, x.shape[-1], at_hand=False)
    other = distribution(unread, rows, positions, x).double()
    # Smaller ones are 0 in one of two vector units, and subnormal in another.
    assert torch.equal(other > 1e-36, ours > 1e-36)
    torch.testing.assert_close(other, ours, atol=1e-7, rtol=2e-6)  # exponentials of torch, or of the native kernels
    noise = uniform(np.array([s.seed for s in sampling], np.uint64), np.zeros(len(x), np.uint64), positions)
    tokens, bad = sampler.sample(rows, positions, x.clone())
    assert bad is None
    assert tokens.dtype == np.int32
    for row in range(len(x)):
        # A border that the last bits of a sum decide may lie on either side, between the nudged ones.
        scores = _scores(sampling[row], histories[row], x[row])
        least, most = (_expected(sampling[row], scores, nudge) for nudge in (-2e-7, 2e-7))
        kept, at_least, at_most = (p > 1e-36 for p in (ours[row], least, most))  # what float32 can tell from 0
        if torch.equal(at_least, at_most):
            assert torch.equal(kept, at_most)
            assert torch.allclose(ours[row], most, rtol=1e-5, atol=1e-12)
        else:
            assert bool((kept >= at_least).all() and (kept <= at_most).all())
        ends = (ours[row] / ours[row].sum()).cumsum(-1)
        assert kept[tokens[row]]
        assert noise[row] < ends[tokens[row]] + 1e-6  # the inverse of the distribution function, in vocabulary order
        assert noise[row] >= ends[tokens[row]] - ours[row][tokens[row]] - 1e-6


def test_tail_of_a_large_vocabulary_is_reached() -> None:
    """Half of the mass on one token, the rest spread over 256k: all parts of it are drawn, in proportion."""
    vocab_size, n = 256_000, 16
    x = torch.zeros(vocab_size)
    x[1000] = float(np.log(vocab_size - 1))
    sampler = _admitted([_sampling(temperature=1.0, seed=seed) for seed in range(n)], [as_ids([0])] * n, vocab_size)
    rows = as_ids(np.arange(n))
    drawn = np.stack([sampler.sample(rows, np.full(n, at), x.expand(n, -1).clone())[0] for at in range(4)]).ravel()
    noise = np.concatenate([uniform(rows.astype(np.uint64), np.zeros(n, np.uint64), np.full(n, at)) for at in range(4)])
    below, at = 1000 / (vocab_size - 1) / 2, 0.5  # shares before the large token, and its own
    ranks = np.where(noise < below, noise, np.where(noise < below + at, below, noise - at)) * 2 * (vocab_size - 1)
    assert np.abs(drawn - ranks).max() < 2


def _wild(seed: int, vocab_size: int) -> Sampling:
    """Settings drawn at random, of every kind."""
    numbers = np.random.default_rng(seed)

    def often(default: float, value: float) -> float:
        return default if numbers.random() < 0.4 else value

    return _sampling(
        temperature=often(0.0, numbers.uniform(0.2, 3)),
        top_k=int(often(0, numbers.integers(1, 60))),
        top_p=often(1.0, numbers.uniform(0.05, 0.99)),
        min_p=often(0.0, numbers.uniform(0.001, 0.3)),
        repetition_penalty=often(1.0, numbers.uniform(0.5, 2)),
        min_new_tokens=int(numbers.integers(0, 4)),
        stop_token_ids=tuple(numbers.integers(0, vocab_size, 2).tolist()),
        seed=int(numbers.integers(0, 2**63)),
        frequency_penalty=often(0.0, numbers.uniform(-2, 2)),
        presence_penalty=often(0.0, numbers.uniform(-2, 2)),
        logit_bias=() if numbers.random() < 0.6 else ((3, 4.0), (vocab_size - 1, -100.0)),
        bad_words=() if numbers.random() < 0.6 else ((5,), *((i, j) for i in range(9) for j in range(60))),
        logits_processors=() if numbers.random() < 0.6 else (_overwriting,),
    )


def _overwriting(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A processor that counts on being given copies."""
    scores *= 1 + float(input_ids.sum() % 7) / 7
    input_ids.zero_()
    return scores


@pytest.mark.parametrize(("vocab_size", "kind", "steps"), [(131, "bf16", 12), (1003, "smooth", 12), (70_001, "bf16", 2)])
def test_a_row_depends_on_itself_alone(vocab_size: int, kind: str, steps: int) -> None:
    """Alone, in a batch of 16, in another order, in other rows, beside bad rows, read or not: bit for bit the same tokens."""
    n = 16
    settings = [_wild(seed, vocab_size) for seed in range(n)]
    histories = [as_ids([seed, seed + 1, 2 * seed, 3]) for seed in range(n)]
    together, shuffled = _admitted(settings, histories, vocab_size), Sampler(2 * n, vocab_size)
    each = zip(settings, histories, strict=True)
    alone = [_admitted([s], [h], vocab_size, at_hand=i % 2 == 0) for i, (s, h) in enumerate(each)]
    order = np.random.default_rng(1).permutation(n)
    for i in range(n):
        shuffled.admit(2 * i, _sampling(temperature=1.0, top_p=0.5, repetition_penalty=2.0), as_ids([1, 2]), 1)
        shuffled.admit(2 * i + 1, settings[i], histories[i], NUM_PROMPT)
    for step in range(steps):
        x = logits_of(kind, (n, vocab_size), step)
        at = np.full(n, NUM_PROMPT + step)
        expected, bad = together.sample(as_ids(np.arange(n)), at, x.clone())
        assert bad is None
        single = [alone[i].sample(as_ids([0]), at[:1], x[i : i + 1].clone())[0][0] for i in range(n)]
        assert single == expected.tolist()
        wild = torch.full((n, vocab_size), torch.nan) if step % 2 else logits_of("rounded", (n, vocab_size), 99) * 50
        rows = np.concatenate((2 * order + 1, 2 * order))
        got, bad = shuffled.sample(as_ids(rows), np.tile(at, 2), torch.cat((x[order], wild)))
        assert got[:n].tolist() == expected[order].tolist()
        assert (bad is not None and bad.tolist() == [False] * n + [True] * n) if step % 2 else bad is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_gives_the_same_tokens() -> None:
    """The last bits of sums differ; a number between two tokens that they decide about is not among these."""
    n, vocab_size = 16, 1003
    settings = [_wild(seed, vocab_size) for seed in range(n)]
    samplers = [Sampler(n, vocab_size, device) for device in ("cpu", "cuda")]
    for sampler in samplers:
        for row in range(n):
            sampler.admit(row, settings[row], as_ids([row, row + 1, 2 * row, 3]), NUM_PROMPT)
    for step in range(6):
        x, at = logits_of("smooth", (n, vocab_size), step), np.full(n, NUM_PROMPT + step)
        ours, theirs = (s.sample(np.arange(n), at, x.to(d, copy=True)) for s, d in zip(samplers, ("cpu", "cuda"), strict=True))
        assert ours[0].tolist() == theirs[0].tolist()
        assert ours[1] is theirs[1] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_greedy(dtype: torch.dtype) -> None:
    x = logits_of("rounded", (40, 501), 3).to(dtype)
    x[0] = 0.0
    x[1, 3:9] = 77.0
    sampler = _admitted([_sampling(min_new_tokens=1)] * 40, [as_ids([1] * NUM_PROMPT)] * 40, 501)
    tokens, bad = sampler.sample(as_ids(np.arange(40)), np.full(40, 9), x.clone())
    assert tokens.tolist() == x.float().argmax(-1).tolist()
    assert tokens[:2].tolist() == [0, 3]  # the lowest id of equal ones
    assert bad is None
    never_admitted = Sampler(40, 501)
    assert never_admitted.sample(as_ids([7]), np.array([0]), x[1:2].clone())[0].tolist() == [3]
    tokens, bad = never_admitted.sample(as_ids([]), np.zeros(0, np.int64), torch.empty(0, 501))
    assert tokens.shape == (0,) and bad is None


def test_a_row_that_can_only_end_may_end() -> None:
    x = torch.tensor([[1.0, 2.0, -torch.inf], [1.0, 2.0, 0.5]])
    sampling = _sampling(min_new_tokens=5, stop_token_ids=(0, 1), repetition_penalty=1.1)
    sampler = _admitted([sampling] * 2, [as_ids([2])] * 2, 3)
    tokens, bad = sampler.sample(as_ids([0, 1]), np.array([4, 4]), x)
    assert tokens.tolist() == [1, 2]
    assert bad is None


def test_rows_without_finite_logits_are_told() -> None:
    for broken in [[torch.nan, 1, 2], [0, torch.inf, 1], [-torch.inf] * 3, [torch.nan] * 3, [torch.inf] * 3]:
        x = torch.tensor([[0.0, 5.0, 1.0], broken, [9.0, 0.0, -torch.inf], broken])
        settings = [_sampling(temperature=t, repetition_penalty=p) for t, p in ((0, 1), (1e-9, 1.5), (0.7, 1.5))]
        cut = _sampling(temperature=1.0, top_p=0.5, top_k=2, min_p=0.1, min_new_tokens=3, stop_token_ids=(0,))
        settings.insert(1, cut)
        for order in ([0, 1, 2, 3], [1, 0, 3, 2]):
            sampler = _admitted(settings, [as_ids([1] * NUM_PROMPT)] * 4, 3)
            tokens, bad = sampler.sample(as_ids(order), np.full(4, NUM_PROMPT), x[order])
            assert tokens.tolist() == [[1, 0, 0, 0][i] for i in order]
            assert bad is not None
            assert bad.tolist() == [[False, True, False, True][i] for i in order]


def test_overflow_is_told_and_harms_nobody() -> None:
    x = torch.tensor([[3e38, 1.0, 2.0], [0.0, 5.0, 1.0], [10.0, 0.0, 0.0], [-3e38, -3e38, -3.1e38]])
    settings = [_sampling(temperature=0.5, top_p=0.9), _sampling(temperature=1e-30), _sampling(repetition_penalty=1e-40)]
    sampler = _admitted([*settings, _sampling(temperature=1e300)], [as_ids([0])] * 4, 3)
    tokens, bad = sampler.sample(as_ids([0, 1, 2, 3]), np.full(4, 4), x)
    assert bad is not None
    assert bad.tolist() == [True, False, True, False]
    assert tokens[1] == 1
    assert "overflow" in (sampler.trouble(2) or "") and sampler.trouble(1) is None
    sampler.release(np.arange(4))
    assert sampler.trouble(2) is None


def test_histories_are_kept_only_where_asked_for() -> None:
    sampler = Sampler(64, 1000)

    def held() -> int:
        return sum(t.seen.data.numel() for t in sampler._builtin if isinstance(t, RepetitionPenalty))

    for row in range(60):
        sampler.admit(row, _sampling(temperature=1.0, top_k=5), as_ids([1]), 1)
    assert held() == 0
    for row in range(3):
        sampler.admit(row, _sampling(repetition_penalty=1.2), as_ids([1, 2000]), 1)
    assert 3000 <= held() <= 4000
    sampler.admit(0, _sampling(), as_ids([1]), 1)
    sampler.admit(60, _sampling(repetition_penalty=1.2), as_ids([1]), 1)
    assert held() <= 4000  # the place of row 0 is used again
    sampler.release(np.arange(64))
    assert held() == 0
