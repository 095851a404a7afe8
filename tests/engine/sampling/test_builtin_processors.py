"""What is done to logits, against transformers' own processors in transformers' own order, and against naive counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sampling_oracle import Case, admitted, as_ids, distribution, processed
from torch import Tensor
from transformers import LogitsProcessor

from pagetide.scheduler.request import Sampling


def _sampling(**settings: Any) -> Sampling:
    return Sampling(**{"max_new_tokens": 100, **settings})


class Waves(LogitsProcessor):
    """A processor that looks at the tokens and at all scores."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = torch.arange(scores.shape[-1])
        return scores + torch.cos(ids * (1.0 + input_ids[0, -1])) * input_ids.shape[1] - scores.clamp(max=0) / 3


@st.composite
def _case(draw: st.DrawFn, vocab_size: int) -> Case:
    """Settings, tokens so far, and how many of these are the prompt. Words often begin with what the tokens end with."""
    token = st.integers(0, vocab_size - 1)
    tokens = draw(st.lists(token, min_size=1, max_size=9))
    tail = st.integers(1, min(4, len(tokens))).flatmap(lambda n: token.map(lambda last: (*tokens[-n:], last)))
    word = st.one_of(token.map(lambda i: (i,)), tail, st.lists(token, min_size=2, max_size=12).map(tuple))

    def maybe(default: Any, other: st.SearchStrategy[Any]) -> Any:
        return draw(st.one_of(st.just(default), other))

    sampling = _sampling(
        temperature=1.0,
        logit_bias=maybe((), st.dictionaries(token, st.floats(-50, 50, width=32), max_size=4).map(lambda d: (*d.items(),))),
        repetition_penalty=maybe(1.0, st.floats(0.3, 3)),
        frequency_penalty=maybe(0.0, st.sampled_from([-2.0, -0.3, 0.5, 1.0, 2.0])),
        presence_penalty=maybe(0.0, st.sampled_from([-2.0, 0.7, 1.5])),
        bad_words=maybe((), st.lists(word, max_size=4).map(tuple)),
        min_new_tokens=maybe(0, st.integers(1, 9)),
        stop_token_ids=tuple(draw(st.lists(token, max_size=2, unique=True))),
        logits_processors=maybe((), st.just((Waves(),))),
    )
    return sampling, as_ids(tokens), draw(st.integers(1, len(tokens)))


@given(st.data())
def test_all_of_them_together_are_those_of_transformers(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([8, 40, 200]))
    cases = [data.draw(_case(vocab_size)) for _ in range(data.draw(st.integers(1, 4)))]
    numbers = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    x = torch.randn((len(cases), vocab_size), generator=numbers) * 3
    expected = torch.stack([processed(case, x[i : i + 1])[0] for i, case in enumerate(cases)])
    assume(bool((expected.amax(-1) > -torch.inf).all()))  # one with nothing left has a test of its own
    rows, positions = np.arange(len(cases)), np.array([len(tokens) for _, tokens, _ in cases])
    ours = distribution(admitted(cases, vocab_size), rows, positions, x)
    wanted = expected.softmax(-1)
    assert (wanted[(ours == 0) != (wanted == 0)] < torch.finfo(torch.float32).tiny).all()
    assert torch.allclose(ours, expected.softmax(-1), rtol=2e-5, atol=1e-12)
    greedy = [(Sampling(**{**_fields(s), "temperature": 0.0}), tokens, n) for s, tokens, n in cases]
    best, bad = admitted(greedy, vocab_size).sample(rows, positions, x.clone())
    assert bad is None
    chosen = expected.gather(1, torch.from_numpy(best.astype(np.int64))[:, None])[:, 0]
    assert torch.allclose(chosen, expected.amax(-1), rtol=1e-6, atol=1e-6)


def _fields(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in Sampling.__slots__}


def test_an_end_id_alone_is_no_bad_word() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 0.0]])
    for ends, expected in (((2,), 2), ((), 1)):
        sampler = admitted([(_sampling(bad_words=((2,), (1, 2)), stop_token_ids=ends), as_ids([0]), 1)], 4)
        assert sampler.sample(as_ids([0]), np.array([1]), x.clone())[0].tolist() == [expected]
    sampler = admitted([(_sampling(bad_words=((2,), (1, 2)), stop_token_ids=(2,)), as_ids([1]), 1)], 4)
    # Behind 1 it would end a longer word.
    assert sampler.sample(as_ids([0]), np.array([1]), x.clone())[0].tolist() == [1]


def test_ids_beyond_the_logits_are_of_no_matter() -> None:
    """Checked before; a row of another model's settings must not break the step all the same."""
    sampling = _sampling(logit_bias=((9, 5.0), (1, 3.0)), bad_words=((9,), (0, 9)), frequency_penalty=1.0)
    sampler = admitted([(sampling, as_ids([0, 9, 9]), 1)], 3)
    assert sampler.sample(as_ids([0]), np.array([3]), torch.tensor([[1.0, 0.0, 2.0]]))[0].tolist() == [1]
