"""Draws that are only queued on the device: the tokens of `sample`, and nothing that would wait for a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagetide.engine.sampling.sampler import Sampler
from pagetide.scheduler.request import Sampling

HISTORY = np.array([1, 0, 1], np.int32)
Told = tuple[list[int], list[bool], list[str | None]]  # tokens, bad rows, troubles


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small tensors: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _sampler(each: Sequence[Sampling], vocab_size: int, *, at_hand: bool, device: str = "cpu") -> Sampler:
    sampler = Sampler(len(each), vocab_size, device, at_hand=at_hand)
    for row, sampling in enumerate(each):
        sampler.admit(row, sampling, HISTORY, len(HISTORY))
    return sampler


def _told(sampler: Sampler, rows: Sequence[int], tokens: npt.NDArray[np.int32], bad: Any) -> Told:
    assert tokens.dtype == np.int32
    return tokens.tolist(), [False] * len(rows) if bad is None else bad.tolist(), [sampler.trouble(r) for r in rows]


def _sampled(sampler: Sampler, rows: Sequence[int], at: int, x: Tensor) -> Told:
    return _told(sampler, rows, *sampler.sample(np.array(rows), np.full(len(rows), at), x.clone()))


def _queued(sampler: Sampler, rows: Sequence[int], at: int, x: Tensor) -> Told:
    who, positions = np.array(rows), np.full(len(rows), at)
    assert sampler.plain(who, positions)
    asked = sampler.settings(who, positions)
    drawn = sampler.draw(x.clone(), asked, [torch.from_numpy(array) for array in asked.arrays])
    assert drawn.tokens.dtype == torch.int64
    told = _told(sampler, rows, *sampler.collect_samples(who, drawn.packed.numpy()))
    assert drawn.tokens.tolist() == told[0]
    return told


@st.composite
def _plain(draw: st.DrawFn, vocab_size: int) -> Sampling:
    def often(default: float, *others: Any) -> Any:
        return draw(st.one_of(st.just(default), *others))

    return Sampling(
        100,
        temperature=often(1.0, st.sampled_from([0.0, 1e-9, 0.5, 0.7, 1e30, 1e300]), st.floats(0.05, 5)),
        top_k=often(0, st.integers(1, 3), st.integers(1, vocab_size + 3)),
        top_p=often(1.0, st.sampled_from([1e-300, 0.1, 0.5, 0.9, 0.9999999999]), st.floats(0.01, 0.999)),
        min_p=often(0.0, st.sampled_from([0.05, 0.5, 1.0]), st.floats(0.001, 1)),
        seed=draw(st.integers(0, 2**64 - 1)),
        index=draw(st.integers(0, 3)),
    )


def _logits(kind: str, vocab_size: int, seed: int) -> Tensor:
    """float32[vocab]: smooth, or full of ties, or with tokens that are ruled out, or not all finite."""
    x = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    if kind == "rounded":
        return x.round()
    if kind == "equal":
        return torch.full_like(x, 1.25)
    if kind == "excluded":
        return torch.where(x < 0, -torch.inf, x).index_fill(-1, torch.tensor([vocab_size - 1]), 0.5)
    if kind == "one":
        return torch.full_like(x, -torch.inf).index_fill(-1, torch.tensor([seed % vocab_size]), 0.5)
    if kind == "wild":
        x[seed % vocab_size] = (torch.nan, torch.inf, 3e38, -3e38)[seed % 4]
    if kind == "nothing":
        return torch.full_like(x, (torch.nan, torch.inf, -torch.inf, -3e38)[seed % 4])
    return x


KINDS = ["smooth", "rounded", "equal", "excluded", "one", "wild", "nothing"]


@st.composite
def _batches(draw: st.DrawFn) -> tuple[list[Sampling], Tensor]:
    vocab_size, n = draw(st.sampled_from([2, 7, 128, 129, 300])), draw(st.integers(1, 6))
    rows = [_logits(draw(st.sampled_from(KINDS)), vocab_size, draw(st.integers(0, 999))) for _ in range(n)]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return [draw(_plain(vocab_size)) for _ in range(n)], torch.stack(rows).to(dtype)


@settings(max_examples=80, deadline=None)
@given(_batches(), st.randoms(use_true_random=False))
def test_they_are_those_of_sample(case: tuple[list[Sampling], Tensor], random: Any) -> None:
    """Bit for bit, together and alone, and beside a row that asks for more than a plain draw can do."""
    each, x = case
    n, vocab_size = x.shape
    rows = random.sample(range(n), n)
    tokens, bad, troubles = expected = _sampled(_sampler(each, vocab_size, at_hand=True), rows, 7, x)
    for at_hand in (True, False):
        assert _queued(_sampler(each, vocab_size, at_hand=at_hand), rows, 7, x) == expected
    queued = _sampler(each, vocab_size, at_hand=False)
    for place, row in enumerate(rows):
        alone = _queued(queued, [row], 7, x[place : place + 1])
        assert alone == ([tokens[place]], [bad[place]], [troubles[place]])
    beside = [*each, Sampling(100, temperature=1.0, repetition_penalty=1.3)]
    for at_hand in (True, False):
        got = _sampled(_sampler(beside, vocab_size, at_hand=at_hand), [*rows, n], 7, torch.cat((x, x[:1])))
        assert (got[0][:n], got[1][:n], got[2][:n]) == expected


def test_many_rows_of_a_large_vocabulary() -> None:
    """More than are treated at once, of every kind in turn: some lie one behind the other in the logits, some do not."""
    n, vocab_size = 24, 70_001
    asked: list[dict[str, Any]] = [{"top_k": 20}, {"top_k": 5, "top_p": 0.9}, {"top_p": 0.3}, {"min_p": 0.1}, {}]
    each = [Sampling(100, temperature=0.8, seed=row, **asked[row % 5 if row > 9 else 0]) for row in range(n)]
    each[12] = Sampling(100)
    x = torch.stack([_logits("smooth", vocab_size, row).bfloat16() for row in range(n)])
    rows = list(range(n))
    expected = _sampled(_sampler(each, vocab_size, at_hand=True), rows, 9, x)
    assert len(set(expected[0])) > n / 2
    assert _queued(_sampler(each, vocab_size, at_hand=False), rows, 9, x) == expected
    assert _sampled(_sampler(each, vocab_size, at_hand=True), rows, 9, x.float()) == expected


class _Nowhere(TorchDispatchMode):
    """Lets only operations through that stay on the device "meta", whose tensors have no values: who asks for one, or for a
    shape that depends on one, raises there. Numbers that go along with an operation are no tensors that are uploaded.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        assert tensors and all(t.device.type == "meta" for t in tensors), f"{func} is not on the device alone"
        indexed = func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)
        assert not indexed or all(i is None or i.dtype == torch.int64 for i in args[1]), f"{func} by a mask"
        return result


KIND_OF_ROW: list[dict[str, Any]] = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
    for t, k, p, m in product([0.7, 1.0], [0, 40], [1.0, 0.9], [0.0, 0.1])
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_waits(dtype: torch.dtype) -> None:
    vocab_size = 1003
    batches = [[{}], [{}] * 3, *([kind] * 3 for kind in KIND_OF_ROW), [{}, *KIND_OF_ROW, {}, *KIND_OF_ROW]]
    for batch in batches:
        n = len(batch)
        sampler = _sampler([Sampling(100, **kind) for kind in batch], vocab_size, at_hand=False, device="meta")
        asked = sampler.settings(np.arange(n), np.full(n, 9))
        uploaded = [torch.from_numpy(array).to("meta") for array in asked.arrays]
        logits = torch.empty((n, vocab_size), dtype=dtype, device="meta")
        with _Nowhere(), torch.inference_mode():
            drawn = sampler.draw(logits, asked, uploaded)
        assert (drawn.tokens.shape, drawn.tokens.dtype) == ((n,), torch.int64)
        assert (drawn.packed.shape, drawn.packed.dtype) == ((2, n), torch.float64)


WAITS: list[Callable[[Tensor], Any]] = [
    lambda x: bool((x > 0).any()), lambda x: x[0, 0].item(), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x.cpu(),
    lambda x: x.numpy(), lambda x: torch.from_numpy(np.ones(2)).to(x), lambda x: torch.equal(x, x), lambda x: x.tolist(),
    lambda x: torch.where(x > 0, x, torch.tensor(0.0)), lambda x: x.masked_select(x > 0), lambda x: torch.unique(x),
]  # fmt: skip


@pytest.mark.parametrize("wait", range(len(WAITS)))
def test_what_waits_is_seen(wait: int) -> None:
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError, TypeError)), _Nowhere():
        WAITS[wait](torch.empty((2, 9), device="meta"))


def test_asking_is_seen() -> None:
    x = torch.empty((2, 9), device="meta")
    at_hand = _sampler([Sampling(100, temperature=1.0)], 9, at_hand=True, device="meta")
    asked = at_hand.settings(np.arange(1), np.full(1, 9))
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError, TypeError)), _Nowhere():
        at_hand.draw(x[:1], asked, [torch.from_numpy(array).to("meta") for array in asked.arrays])


def test_settings_are_plain_arrays_by_kind() -> None:
    each = [
        Sampling(100, temperature=0.5, top_p=0.5),
        Sampling(100),
        Sampling(100, temperature=2.0, top_k=3, min_p=0.25),
        Sampling(100, temperature=1.0),
        Sampling(100, temperature=1.0, top_k=5, top_p=0.75),
    ]
    sampler = _sampler(each, 100, at_hand=False)
    asked = sampler.settings(np.array([4, 3, 2, 1, 0]), np.full(5, 9))
    places, temperature, top_k, top_p, min_p, noise = asked.arrays
    assert places.tolist() == [1, 0, 2, 4]  # nothing to sort, the k largest, all
    assert temperature.tolist() == [1.0, 1.0, 2.0, 0.5]
    assert top_k.tolist() == [100, 5, 3, 100]
    assert top_p.tolist() == pytest.approx([np.inf, 0.75, np.inf, 0.5])
    assert min_p.tolist() == [0.0, 0.0, 0.25, 0.0]
    assert len(set(noise.tolist())) == 1  # one seed, one position
    assert [array.dtype.str[1:] for array in asked.arrays] == ["i8", "f4", "i8", "f8", "f4", "f8"]
    assert [(p.rows, p.places, p.num_sorted) for p in asked.parts] == [
        (slice(0, 1), slice(1, 2), 0),
        (slice(1, 3), None, 5),
        (slice(3, 4), slice(4, 5), 100),
    ]
    assert [(p.warm, p.top_k, p.top_p, p.min_p) for p in asked.parts] == [
        (False, False, False, False),
        (True, True, True, True),
        (True, False, True, False),
    ]
    greedy = sampler.settings(np.array([1]), np.full(1, 9))
    assert (greedy.arrays, greedy.parts) == ((), ())


def test_who_is_plain() -> None:
    other = [
        {"repetition_penalty": 1.2}, {"frequency_penalty": 0.1}, {"presence_penalty": 0.1}, {"bad_words": ((5,),)},
        {"logit_bias": ((3, 1.0),)}, {"logits_processors": (lambda ids, scores: scores,)},
    ]  # fmt: skip
    plain: list[dict[str, Any]] = [{}, {"stop_token_ids": (3,)}, KIND_OF_ROW[-1], {"min_new_tokens": 9}]
    late = {"min_new_tokens": 4, "stop_token_ids": (3,)}
    kinds = [*plain, late, *other]
    sampler = _sampler([Sampling(100, **kind) for kind in kinds], 100, at_hand=False)
    for at in (3, 6, 7):
        got = [sampler.plain(np.array([row]), np.array([at])) for row in range(len(kinds))]
        assert got == [True] * len(plain) + [at == 7] + [False] * len(other)
        assert sampler.plain(np.arange(len(plain)), np.full(len(plain), at))
        assert not sampler.plain(np.array([0, len(kinds) - 1]), np.full(2, at))
    sampler.release(np.arange(len(kinds)))
    assert sampler.plain(np.arange(len(kinds)), np.full(len(kinds), 3))
    assert sampler.plain(np.zeros(0, np.int64), np.zeros(0, np.int64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_sees_no_wait_and_gives_the_tokens_of_sample() -> None:
    n, vocab_size = 2 * len(KIND_OF_ROW) + 2, 151_936
    each = [Sampling(100, seed=row, **kind) for row, kind in enumerate([{}, *KIND_OF_ROW, {}, *KIND_OF_ROW])]
    sampler = _sampler(each, vocab_size, at_hand=False, device="cuda")
    rows = np.arange(n)
    for at, kind in enumerate(["smooth", "rounded", "excluded", "equal"], start=7):
        x = torch.stack([_logits(kind, vocab_size, row) for row in range(n)]).bfloat16().cuda()
        expected = sampler.sample(rows, np.full(n, at), x.clone())[0]
        asked = sampler.settings(rows, np.full(n, at))
        uploaded, copy = [torch.from_numpy(array).cuda() for array in asked.arrays], x.clone()
        torch.cuda.set_sync_debug_mode("error")
        try:
            drawn = sampler.draw(copy, asked, uploaded)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert sampler.collect_samples(rows, drawn.packed.cpu().numpy())[0].tolist() == expected.tolist()
        assert drawn.tokens.tolist() == expected.tolist()
