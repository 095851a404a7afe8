"""The sampler against transformers' own processors, and its promise that a row depends on itself alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pagetide.engine.sampling.builtin_processors import RepetitionPenalty
from pagetide.engine.sampling.noise import uniform
from pagetide.engine.sampling.sampler import Sampler
from pagetide.scheduler.request import Sampling

NUM_PROMPT = 4


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small tensors: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _sampling(**settings: Any) -> Sampling:
    return Sampling(**{"max_new_tokens": 100, **settings})


def _ids(values: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    return np.asarray(values, np.int32)


def _logits(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Logits [*shape]: smooth, or with many equal ones, or with excluded tokens."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    if kind == "rounded":
        return x.round()
    if kind == "bf16":
        return x.bfloat16().float()
    if kind == "equal":
        return torch.full(shape, 1.25)
    if kind == "excluded":
        return torch.where(x < 0, -torch.inf, x).index_fill(-1, torch.tensor([shape[-1] - 1]), 0.5)
    return x


def _scores(sampling: Sampling, history: npt.NDArray[np.int32], x: Tensor) -> Tensor:
    """float32[1, vocab]: what transformers makes of the logits x [vocab], up to top-k."""
    ids, scores = torch.from_numpy(history.astype(np.int64))[None], x.float()[None]
    stops = list(sampling.stop_token_ids)
    if sampling.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    if sampling.min_new_tokens and stops:
        scores = MinNewTokensLengthLogitsProcessor(NUM_PROMPT, sampling.min_new_tokens, stops)(ids, scores)
    if sampling.temperature > 0:
        scores = TemperatureLogitsWarper(sampling.temperature)(ids, scores)
        if sampling.top_k:
            scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    return scores


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
def _rows(draw: st.DrawFn) -> tuple[list[Sampling], list[npt.NDArray[np.int32]], Tensor]:
    """(settings, histories, logits [n, vocab]) of some rows."""
    vocab_size, n = draw(st.sampled_from([2, 7, 128, 300])), draw(st.integers(1, 5))
    numbers = np.random.default_rng(draw(st.integers(0, 999)))
    histories = [_ids(numbers.integers(0, vocab_size, NUM_PROMPT + draw(st.integers(0, 5)))) for _ in range(n)]
    kinds = st.sampled_from(["smooth", "rounded", "bf16", "equal", "excluded"])
    x = torch.stack([_logits(draw(kinds), (vocab_size,), draw(st.integers(0, 999))) for _ in range(n)])
    return [draw(_settings(vocab_size)) for _ in range(n)], histories, x


def _admitted(
    settings: Sequence[Sampling],
    histories: Sequence[npt.NDArray[np.int32]],
    vocab_size: int,
    at_hand: bool | None = None,
) -> Sampler:
    sampler = Sampler(len(settings), vocab_size, at_hand=at_hand)
    for row, (sampling, history) in enumerate(zip(settings, histories, strict=True)):
        sampler.admit(row, sampling, history, NUM_PROMPT)
    return sampler


@settings(max_examples=80, deadline=None)
@given(_rows())
def test_distribution_is_that_of_transformers(case: tuple[list[Sampling], list[npt.NDArray[np.int32]], Tensor]) -> None:
    sampling, histories, x = case
    sampler = _admitted(sampling, histories, x.shape[-1])
    rows, positions = _ids(np.arange(len(x))), np.array([len(history) for history in histories])
    ours = sampler.distribution(rows, positions, x).double()
    unread = _admitted(sampling, histories, x.shape[-1], at_hand=False)
    other = unread.distribution(rows, positions, x).double()
    assert torch.equal(
        other > 1e-36, ours > 1e-36
    )  # smaller ones are 0 in one of two vector units, and subnormal in another
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


@pytest.mark.parametrize("top_p", [0.1, 0.25, 0.3, 0.5, 0.7, 0.75, 0.9])
@pytest.mark.parametrize("count", [2, 4, 10, 200])
def test_top_p_of_equal_logits(count: int, top_p: float) -> None:
    for x in (torch.zeros(count), torch.tensor([5.0] * (count // 2) + [1.0] * (count - count // 2))):
        sampler = _admitted([_sampling(temperature=1.0, top_p=top_p)], [_ids([0])], count)
        ours = sampler.distribution(_ids([0]), np.array([4]), x[None])[0]
        kept = (ours > 0).nonzero().flatten().tolist()
        if x[0] == x[-1]:
            assert kept == list(
                range(int(np.ceil(np.float32(top_p * count))))
            )  # the fewest that hold it, lowest ids first
        if x[0] != x[-1] or count in (2, 4):  # there transformers' float32 sums are exact enough
            scores = TopPLogitsWarper(top_p)(torch.zeros((1, 1), dtype=torch.long), x[None])[0]
            assert len(kept) == int((scores > -torch.inf).sum())


def test_top_k_keeps_ties_and_top_p_counts_them() -> None:
    x = torch.tensor([[0.0, 3, 2, 2, 2, 1, -1, 2] + [-9.0] * 100])
    for top_p, kept in ((1.0, [1, 2, 3, 4, 7]), (0.99, [1, 2, 3, 4, 7]), (0.6, [1, 2, 3]), (0.01, [1])):
        sampling = _sampling(temperature=1.0, top_k=2, top_p=top_p)
        sampler = _admitted([sampling], [_ids([0])], x.shape[-1])
        ours = sampler.distribution(_ids([0]), np.array([4]), x)[0]
        assert ours.nonzero().flatten().tolist() == kept
        assert torch.equal(ours > 0, _expected(sampling, _scores(sampling, _ids([0]), x[0])) > 0)


def test_frequencies() -> None:
    """100 seeds at 200 positions: counts as the distribution says (chi square, far beyond its 99.99 % point of 45)."""
    x = _logits("smooth", (16,), 5) / 2
    sampling = [_sampling(temperature=1.0, seed=seed) for seed in range(100)]
    sampler = _admitted(sampling, [_ids([0])] * 100, 16)
    rows = _ids(np.arange(100))
    drawn = np.stack([sampler.sample(rows, np.full(100, at), x.repeat(100, 1))[0] for at in range(200)])
    for some in (drawn, drawn[:, :50], drawn[::2]):
        expected = x.double().softmax(-1).numpy() * some.size
        counts = np.bincount(some.ravel(), minlength=16)
        assert ((counts - expected) ** 2 / expected).sum() < 45
    assert len({tuple(column) for column in drawn.T}) == 100  # seeds differ
    alike = float((x.double().softmax(-1) ** 2).sum())
    assert (drawn[1:] == drawn[:-1]).mean() == pytest.approx(alike, abs=0.02)  # and so do positions


def test_tail_of_a_large_vocabulary_is_reached() -> None:
    """Half of the mass on one token, the rest spread over 256k: all parts of it are drawn, in proportion."""
    vocab_size, n = 256_000, 16
    x = torch.zeros(vocab_size)
    x[1000] = float(np.log(vocab_size - 1))
    sampler = _admitted([_sampling(temperature=1.0, seed=seed) for seed in range(n)], [_ids([0])] * n, vocab_size)
    rows = _ids(np.arange(n))
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


@pytest.mark.parametrize(
    ("vocab_size", "kind", "steps"), [(131, "bf16", 12), (1003, "smooth", 12), (70_001, "bf16", 2)]
)
def test_a_row_depends_on_itself_alone(vocab_size: int, kind: str, steps: int) -> None:
    """Alone, in a batch of 16, in another order, in other rows, beside bad rows, read or not: bit for bit the same tokens."""
    n = 16
    settings = [_wild(seed, vocab_size) for seed in range(n)]
    histories = [_ids([seed, seed + 1, 2 * seed, 3]) for seed in range(n)]
    together, shuffled = _admitted(settings, histories, vocab_size), Sampler(2 * n, vocab_size)
    each = zip(settings, histories, strict=True)
    alone = [_admitted([s], [h], vocab_size, at_hand=i % 2 == 0) for i, (s, h) in enumerate(each)]
    order = np.random.default_rng(1).permutation(n)
    for i in range(n):
        shuffled.admit(2 * i, _sampling(temperature=1.0, top_p=0.5, repetition_penalty=2.0), _ids([1, 2]), 1)
        shuffled.admit(2 * i + 1, settings[i], histories[i], NUM_PROMPT)
    for step in range(steps):
        x = _logits(kind, (n, vocab_size), step)
        at = np.full(n, NUM_PROMPT + step)
        expected, bad = together.sample(_ids(np.arange(n)), at, x.clone())
        assert bad is None
        single = [alone[i].sample(_ids([0]), at[:1], x[i : i + 1].clone())[0][0] for i in range(n)]
        assert single == expected.tolist()
        wild = torch.full((n, vocab_size), torch.nan) if step % 2 else _logits("rounded", (n, vocab_size), 99) * 50
        rows = np.concatenate((2 * order + 1, 2 * order))
        got, bad = shuffled.sample(_ids(rows), np.tile(at, 2), torch.cat((x[order], wild)))
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
            sampler.admit(row, settings[row], _ids([row, row + 1, 2 * row, 3]), NUM_PROMPT)
    for step in range(6):
        x, at = _logits("smooth", (n, vocab_size), step), np.full(n, NUM_PROMPT + step)
        ours, theirs = (
            s.sample(np.arange(n), at, x.to(d, copy=True)) for s, d in zip(samplers, ("cpu", "cuda"), strict=True)
        )
        assert ours[0].tolist() == theirs[0].tolist()
        assert ours[1] is theirs[1] is None


def test_resumed_rows_go_on_the_same() -> None:
    """Admitted again with what they had generated, or in another sampler: same tokens, history included."""
    vocab_size, n, steps = 97, 12, 10
    settings = [_wild(seed, vocab_size) for seed in range(50, 50 + n)]
    assert any(s.repetition_penalty != 1 for s in settings)
    tokens = [list(range(seed, seed + NUM_PROMPT)) for seed in range(n)]
    through, broken = (_admitted(settings, [_ids(t) for t in tokens], vocab_size) for _ in range(2))
    rows = _ids(np.arange(n))
    for step in range(steps):
        x, at = _logits("smooth", (n, vocab_size), step), np.full(n, NUM_PROMPT + step)
        expected, _ = through.sample(rows, at, x.clone())
        if step in (3, 4, 8):
            broken.release(rows[::2])
            for row in range(0, n, 2):
                broken.admit(row, settings[row], _ids(tokens[row]), NUM_PROMPT)
        got, _ = broken.sample(rows, at, x.clone())
        assert got.tolist() == expected.tolist()
        for row in range(n):
            tokens[row].append(int(got[row]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_greedy(dtype: torch.dtype) -> None:
    x = _logits("rounded", (40, 501), 3).to(dtype)
    x[0] = 0.0
    x[1, 3:9] = 77.0
    sampler = _admitted([_sampling(min_new_tokens=1)] * 40, [_ids([1] * NUM_PROMPT)] * 40, 501)
    tokens, bad = sampler.sample(_ids(np.arange(40)), np.full(40, 9), x.clone())
    assert tokens.tolist() == x.float().argmax(-1).tolist()
    assert tokens[:2].tolist() == [0, 3]  # the lowest id of equal ones
    assert bad is None
    never_admitted = Sampler(40, 501)
    assert never_admitted.sample(_ids([7]), np.array([0]), x[1:2].clone())[0].tolist() == [3]


def test_no_rows() -> None:
    tokens, bad = Sampler(4, 9).sample(_ids([]), np.zeros(0, np.int64), torch.empty(0, 9))
    assert tokens.shape == (0,)
    assert bad is None


def test_low_precision_logits_are_treated_in_float32() -> None:
    settings = [_wild(seed, 300) for seed in range(20)]
    x = _logits("bf16", (20, 300), 8)
    rows, at = _ids(np.arange(20)), np.full(20, NUM_PROMPT + 9)
    got = [
        _admitted(settings, [_ids([5, 6, 7, 8])] * 20, 300).sample(rows, at, x.to(dtype, copy=True))[0].tolist()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert got[0] == got[1]


def test_minimum_length_by_position() -> None:
    """Neither end id comes before the minimum, counted from the prompt's end; afterwards both may."""
    x = torch.tensor([[0.0, 9.0, 8.0, 7.0]])
    for temperature in (0.0, 1e-9):
        sampling = _sampling(temperature=temperature, min_new_tokens=2, stop_token_ids=(1, 2, 400))
        sampler = _admitted([sampling], [_ids([0] * NUM_PROMPT)], 4)
        got = [
            sampler.sample(_ids([0]), np.array([at]), x.clone())[0].item() for at in range(NUM_PROMPT, NUM_PROMPT + 4)
        ]
        assert got == [3, 3, 1, 1]


def test_a_row_that_can_only_end_may_end() -> None:
    x = torch.tensor([[1.0, 2.0, -torch.inf], [1.0, 2.0, 0.5]])
    sampling = _sampling(min_new_tokens=5, stop_token_ids=(0, 1), repetition_penalty=1.1)
    sampler = _admitted([sampling] * 2, [_ids([2])] * 2, 3)
    tokens, bad = sampler.sample(_ids([0, 1]), np.array([4, 4]), x)
    assert tokens.tolist() == [1, 2]
    assert bad is None


@pytest.mark.parametrize(
    "broken", [[torch.nan, 1, 2], [0, torch.inf, 1], [-torch.inf] * 3, [torch.nan] * 3, [torch.inf] * 3]
)
def test_rows_without_finite_logits_are_told(broken: list[float]) -> None:
    x = torch.tensor([[0.0, 5.0, 1.0], broken, [9.0, 0.0, -torch.inf], broken])
    settings = [_sampling(temperature=t, repetition_penalty=p) for t, p in ((0, 1), (0, 1), (1e-9, 1.5), (0.7, 1.5))]
    settings[1:2] = [_sampling(temperature=1.0, top_p=0.5, top_k=2, min_p=0.1, min_new_tokens=3, stop_token_ids=(0,))]
    for order in ([0, 1, 2, 3], [1, 0, 3, 2]):
        sampler = _admitted(settings, [_ids([1] * NUM_PROMPT)] * 4, 3)
        tokens, bad = sampler.sample(_ids(order), np.full(4, NUM_PROMPT), x[order])
        assert tokens.tolist() == [[1, 0, 0, 0][i] for i in order]
        assert bad is not None
        assert bad.tolist() == [[False, True, False, True][i] for i in order]


def test_overflow_is_told_and_harms_nobody() -> None:
    x = torch.tensor([[3e38, 1.0, 2.0], [0.0, 5.0, 1.0], [10.0, 0.0, 0.0], [-3e38, -3e38, -3.1e38]])
    settings = [
        _sampling(temperature=0.5, top_p=0.9),
        _sampling(temperature=1e-30),
        _sampling(repetition_penalty=1e-40),
    ]
    sampler = _admitted([*settings, _sampling(temperature=1e300)], [_ids([0])] * 4, 3)
    tokens, bad = sampler.sample(_ids([0, 1, 2, 3]), np.full(4, 4), x)
    assert bad is not None
    assert bad.tolist() == [True, False, True, False]
    assert tokens[1] == 1


def test_histories_are_kept_only_where_asked_for() -> None:
    sampler = Sampler(64, 1000)

    def held() -> int:
        return sum(t.seen.data.numel() for t in sampler._builtin if isinstance(t, RepetitionPenalty))

    for row in range(60):
        sampler.admit(row, _sampling(temperature=1.0, top_k=5), _ids([1]), 1)
    assert held() == 0
    for row in range(3):
        sampler.admit(row, _sampling(repetition_penalty=1.2), _ids([1, 2000]), 1)
    assert 3000 <= held() <= 4000
    sampler.admit(0, _sampling(), _ids([1]), 1)
    sampler.admit(60, _sampling(repetition_penalty=1.2), _ids([1]), 1)
    assert held() <= 4000  # the place of row 0 is used again
    sampler.release(np.arange(64))
    assert held() == 0
