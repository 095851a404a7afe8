"""Draws that are only queued on the device: the tokens of `sample`, and nothing that would wait for a value."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nowhere import Nowhere
from sampling_oracle import admitted, logits_of
from torch import Tensor

from pagetide.engine.sampling.sampler import Sampler
from pagetide.scheduler.request import Sampling

HISTORY = np.array([1, 0, 1], np.int32)
Told = tuple[list[int], list[bool], list[str | None]]  # tokens, bad rows, troubles


def _sampler(each: Sequence[Sampling], vocab_size: int, *, at_hand: bool, device: str = "cpu") -> Sampler:
    return admitted([(sampling, HISTORY, len(HISTORY)) for sampling in each], vocab_size, device, at_hand=at_hand)


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


KINDS = ["smooth", "rounded", "equal", "excluded", "one", "wild", "nothing"]


@st.composite
def _batches(draw: st.DrawFn) -> tuple[list[Sampling], Tensor]:
    vocab_size, n = draw(st.sampled_from([2, 7, 128, 129, 300])), draw(st.integers(1, 6))
    rows = [logits_of(draw(st.sampled_from(KINDS)), (vocab_size,), draw(st.integers(0, 999))) for _ in range(n)]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return [draw(_plain(vocab_size)) for _ in range(n)], torch.stack(rows).to(dtype)


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
    x = torch.stack([logits_of("smooth", (vocab_size,), row).bfloat16() for row in range(n)])
    rows = list(range(n))
    expected = _sampled(_sampler(each, vocab_size, at_hand=True), rows, 9, x)
    assert len(set(expected[0])) > n / 2
    assert _queued(_sampler(each, vocab_size, at_hand=False), rows, 9, x) == expected
    assert _sampled(_sampler(each, vocab_size, at_hand=True), rows, 9, x.float()) == expected


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
        with Nowhere(), torch.inference_mode():
            drawn = sampler.draw(logits, asked, uploaded)
            for waits in (logits.nonzero, logits.cpu, lambda logits=logits: bool(logits[0, 0] > 0)):
                with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):  # it would be seen
                    waits()
        assert (drawn.tokens.shape, drawn.tokens.dtype) == ((n,), torch.int64)
        assert (drawn.packed.shape, drawn.packed.dtype) == ((2, n), torch.float64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_sees_no_wait_and_gives_the_tokens_of_sample() -> None:
    n, vocab_size = 2 * len(KIND_OF_ROW) + 2, 151_936
    each = [Sampling(100, seed=row, **kind) for row, kind in enumerate([{}, *KIND_OF_ROW, {}, *KIND_OF_ROW])]
    sampler = _sampler(each, vocab_size, at_hand=False, device="cuda")
    rows = np.arange(n)
    for at, kind in enumerate(["smooth", "rounded", "excluded", "equal"], start=7):
        x = torch.stack([logits_of(kind, (vocab_size,), row) for row in range(n)]).bfloat16().cuda()
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
