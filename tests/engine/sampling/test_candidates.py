"""The candidates that a beam search chooses among, against what transformers' has before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_oracle import admitted, logits_of, processed, warped
from torch import Tensor

from pagetide.engine.sampling.noise import gumbel
from pagetide.engine.sampling.sampler import Sampler
from pagetide.scheduler.request import Sampling

HISTORY = np.array([1, 2, 3, 4, 1], np.int32)
NUM_PROMPT = 3


def _sampler(vocab_size: int, *settings: Sampling) -> Sampler:
    return admitted([(sampling, HISTORY, NUM_PROMPT) for sampling in settings], vocab_size)


def _found(sampler: Sampler, x: Tensor) -> list[Any]:
    n = len(x)
    return sampler.candidates(np.arange(n), np.full(n, len(HISTORY)), x.clone())


def _scores(sampling: Sampling, x: Tensor) -> npt.NDArray[np.float32]:
    """float32[vocab]: transformers' scores of the logits x [vocab] in a beam search, whose ends are never ruled out."""
    endless = replace(sampling, stop_token_ids=())
    scores = processed((endless, HISTORY, NUM_PROMPT), torch.log_softmax(x[None], -1))
    result: npt.NDArray[np.float32] = warped(sampling, scores, max(2, 1 + len(sampling.stop_token_ids)))[0].numpy()
    return result


@st.composite
def _settings(draw: st.DrawFn) -> Sampling:
    def maybe(default: Any, other: Any) -> Any:
        return draw(st.sampled_from([default, other]))

    return Sampling(
        100, num_candidates=draw(st.sampled_from([1, 4, 10, 60])), repetition_penalty=maybe(1.0, 1.7),
        logit_bias=maybe((), ((5, 2.5), (9, -4.0))), bad_words=maybe((), ((7,), (4, 1, 8), (1, 3))),
        logits_processors=maybe((), (lambda ids, scores: scores * 1.25,)),
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0, 2.0])), top_k=draw(st.sampled_from([0, 1, 5, 500])),
        top_p=draw(st.sampled_from([1.0, 0.05, 0.8])), min_p=draw(st.sampled_from([0.0, 0.03, 0.9])),
        stop_token_ids=draw(st.sampled_from([(), (11,), (11, 12, 13)])), seed=draw(st.integers(0, 2**64 - 1)),
        index=draw(st.integers(0, 5)),
    )  # fmt: skip


@given(st.lists(_settings(), min_size=1, max_size=4), st.sampled_from([40, 300]), st.integers(0, 999))
def test_they_are_the_best_of_transformers_scores(rows: list[Sampling], vocab_size: int, seed: int) -> None:
    x = logits_of("smooth", (len(rows), vocab_size), seed)
    for sampling, logits, got in zip(rows, x, _found(_sampler(vocab_size, *rows), x), strict=True):
        scores = _scores(sampling, logits)
        ids = np.flatnonzero(scores > -np.inf)
        noise = gumbel(sampling.seed, sampling.index, len(HISTORY), ids) if sampling.temperature else 0.0
        keys = (scores[ids] + noise).astype(np.float32)
        best = np.argsort(-keys, kind="stable")[: sampling.num_candidates]
        token_ids, logprobs, got_keys = got
        assert (token_ids.dtype, logprobs.dtype, got_keys.dtype) == (np.int32, np.float32, np.float32)
        assert token_ids.tolist() == ids[best].tolist()
        assert logprobs == pytest.approx(scores[ids[best]], rel=1e-5, abs=1e-5)
        assert got_keys == pytest.approx(keys[best], rel=1e-5, abs=1e-5)
        assert (got_keys == logprobs).all() or sampling.temperature


def test_ties_go_to_the_lowest_ids_and_what_is_ruled_out_is_none() -> None:
    x = torch.tensor([[0.0, 2, 1, 2, 1, 1, -torch.inf, 1]])
    for k, expected in ((1, [1]), (2, [1, 3]), (4, [1, 3, 2, 4]), (5, [1, 3, 2, 4, 5]), (20, [1, 3, 2, 4, 5, 7, 0])):
        token_ids, logprobs, keys = _found(_sampler(8, Sampling(9, num_candidates=k)), x)[0]
        assert token_ids.tolist() == expected
        assert logprobs == pytest.approx(torch.log_softmax(x[0], -1)[expected].numpy(), rel=1e-6)
        assert keys.tolist() == logprobs.tolist()


def test_a_row_that_has_none_is_told_and_harms_nobody() -> None:
    well, ruled_out = Sampling(9, num_candidates=2), Sampling(9, num_candidates=2, bad_words=((0,), (1,), (2,)))
    sampler = _sampler(3, well, well, ruled_out, Sampling(9, num_candidates=2, temperature=1.0, seed=3), well)
    x = torch.tensor([[1.0, 2, 3]]).repeat(5, 1)
    x[1, 1], x[4] = torch.nan, -torch.inf
    found = _found(sampler, x)
    assert [one is None for one in found] == [False, True, True, False, True]
    assert found[0][0].tolist() == [2, 1]
    alone = _found(_sampler(3, Sampling(9, num_candidates=2, temperature=1.0, seed=3)), x[:1])[0]
    assert found[3][0].tolist() == alone[0].tolist()
    assert sampler.trouble(1) is None  # its logits themselves
    assert "rules out every token" in (sampler.trouble(2) or "")


def test_who_chooses_tells_what_was_taken() -> None:
    """Candidates remember nothing; tokens that somebody else chose count like sampled ones."""
    sampling = Sampling(9, num_candidates=3, frequency_penalty=1.0, bad_words=((6, 5),))
    sampler, x = _sampler(8, sampling), torch.arange(8.0)[None]
    assert _found(sampler, x)[0][0].tolist() == _found(sampler, x)[0][0].tolist() == [7, 6, 5]
    sampler.record_tokens(np.array([0]), np.array([7]))
    sampler.record_tokens(np.array([0]), np.array([6], np.int32))
    assert _found(sampler, x)[0][0].tolist() == [7, 6, 3]  # 5 would end a bad word, and 4 is in the output already
    sampler.record_tokens(np.array([0]), np.array([7]))
    assert _found(sampler, x)[0][0].tolist() == [5, 6, 7]
