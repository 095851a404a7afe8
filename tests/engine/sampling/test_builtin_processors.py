"""What is done to logits, against transformers' own processors in transformers' own order, and against naive counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from pagetide.engine.sampling.sampler import Sampler
from pagetide.scheduler.request import Sampling

Ids = npt.NDArray[np.int32]


def _ids(values: Sequence[int]) -> Ids:
    return np.asarray(values, np.int32)


def _sampling(**settings: Any) -> Sampling:
    return Sampling(**{"max_new_tokens": 100, **settings})


def _admitted(cases: Sequence[tuple[Sampling, Ids, int]], vocab_size: int) -> Sampler:
    """A sampler whose row i has the settings, tokens and length of the prompt of case i."""
    sampler = Sampler(len(cases), vocab_size)
    for row, (sampling, tokens, num_prompt) in enumerate(cases):
        sampler.admit(row, sampling, tokens, num_prompt)
    return sampler


class Waves(LogitsProcessor):
    """A processor that looks at the tokens and at all scores."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = torch.arange(scores.shape[-1])
        return scores + torch.cos(ids * (1.0 + input_ids[0, -1])) * input_ids.shape[1] - scores.clamp(max=0) / 3


def _expected(sampling: Sampling, tokens: Ids, num_prompt: int, x: Tensor) -> Tensor:
    """float32[vocab]: what transformers makes of the logits x [vocab], and OpenAI's penalties behind repetition's."""
    ids, scores, ends = torch.from_numpy(tokens.astype(np.int64))[None], x[None], list(sampling.stop_token_ids)
    if sampling.logit_bias:
        scores = SequenceBiasLogitsProcessor({(i,): bias for i, bias in sampling.logit_bias})(ids, scores)
    if sampling.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    for token in tokens[num_prompt:]:
        scores = scores.index_add(1, torch.tensor([int(token)]), torch.tensor([[-sampling.frequency_penalty]]))
    for token in set(tokens[num_prompt:].tolist()):
        scores = scores.index_add(1, torch.tensor([token]), torch.tensor([[-sampling.presence_penalty]]))
    words = [list(word) for word in sampling.bad_words if list(word) not in [[i] for i in ends]]
    if words:
        scores = NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words], ends or None)(ids, scores)
    if sampling.min_new_tokens and ends:
        scores = MinNewTokensLengthLogitsProcessor(num_prompt, sampling.min_new_tokens, ends)(ids, scores)
    for processor in sampling.logits_processors:
        scores = processor(ids, scores)
    return scores[0]


@st.composite
def _case(draw: st.DrawFn, vocab_size: int) -> tuple[Sampling, Ids, int]:
    """Settings, tokens so far, and how many of these are the prompt. Words often begin with what the tokens end with."""
    token = st.integers(0, vocab_size - 1)
    tokens = draw(st.lists(token, min_size=1, max_size=9))
    tail = st.integers(1, min(4, len(tokens))).flatmap(lambda n: token.map(lambda last: (*tokens[-n:], last)))
    word = st.one_of(token.map(lambda i: (i,)), tail, st.lists(token, min_size=2, max_size=12).map(tuple))

    def maybe(default: Any, other: st.SearchStrategy[Any]) -> Any:
        return draw(st.one_of(st.just(default), other))

    sampling = _sampling(
        temperature=1.0,
        logit_bias=maybe(
            (), st.dictionaries(token, st.floats(-50, 50, width=32), max_size=4).map(lambda d: (*d.items(),))
        ),
        repetition_penalty=maybe(1.0, st.floats(0.3, 3)),
        frequency_penalty=maybe(0.0, st.sampled_from([-2.0, -0.3, 0.5, 1.0, 2.0])),
        presence_penalty=maybe(0.0, st.sampled_from([-2.0, 0.7, 1.5])),
        bad_words=maybe((), st.lists(word, max_size=4).map(tuple)),
        min_new_tokens=maybe(0, st.integers(1, 9)),
        stop_token_ids=tuple(draw(st.lists(token, max_size=2, unique=True))),
        logits_processors=maybe((), st.just((Waves(),))),
    )
    return sampling, _ids(tokens), draw(st.integers(1, len(tokens)))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_all_of_them_together_are_those_of_transformers(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([8, 40, 200]))
    cases = [data.draw(_case(vocab_size)) for _ in range(data.draw(st.integers(1, 4)))]
    numbers = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    x = torch.randn((len(cases), vocab_size), generator=numbers) * 3
    expected = torch.stack([_expected(*case, x[i]) for i, case in enumerate(cases)])
    assume(bool((expected.amax(-1) > -torch.inf).all()))  # one with nothing left has a test of its own
    rows, positions = np.arange(len(cases)), np.array([len(tokens) for _, tokens, _ in cases])
    ours = _admitted(cases, vocab_size).distribution(rows, positions, x)
    wanted = expected.softmax(-1)
    assert (wanted[(ours == 0) != (wanted == 0)] < torch.finfo(torch.float32).tiny).all()
    assert torch.allclose(ours, expected.softmax(-1), rtol=2e-5, atol=1e-12)
    greedy = [(Sampling(**{**_fields(s), "temperature": 0.0}), tokens, n) for s, tokens, n in cases]
    best, bad = _admitted(greedy, vocab_size).sample(rows, positions, x.clone())
    assert bad is None
    chosen = expected.gather(1, torch.from_numpy(best.astype(np.int64))[:, None])[:, 0]
    assert torch.allclose(chosen, expected.amax(-1), rtol=1e-6, atol=1e-6)


def _fields(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in Sampling.__slots__}


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0.0), (0.0, 1.5), (0.8, -0.4), (-0.2, 0.0)])
def test_penalties_count_the_output_alone(frequency: float, presence: float) -> None:
    """Thirty greedy tokens as by a naive count; admitted again now and then with all tokens, it goes on as it was."""
    vocab_size, prompt = 12, [3, 3, 3, 7, 11]
    sampling = _sampling(frequency_penalty=frequency, presence_penalty=presence)
    sampler = _admitted([(sampling, _ids(prompt), len(prompt))], vocab_size)
    numbers, output = torch.Generator().manual_seed(1), []
    for _ in range(30):
        x = torch.randn(vocab_size, generator=numbers)
        counts = torch.tensor([output.count(i) for i in range(vocab_size)])
        naive = int((x - frequency * counts - presence * (counts > 0)).argmax())
        tokens, _ = sampler.sample(_ids([0]), np.array([len(prompt) + len(output)]), x[None].clone())
        assert int(tokens[0]) == naive
        output.append(naive)
        if len(output) in (4, 5, 17):
            sampler.admit(0, sampling, _ids(prompt + output), len(prompt))


def test_a_word_may_begin_in_the_prompt_and_be_the_whole_of_it() -> None:
    words = ((5, 6, 7, 1), (6, 2), (9, 5, 6, 7, 3), (7, 1, 4))
    sampler = _admitted([(_sampling(temperature=1.0, bad_words=words), _ids([5, 6]), 2)], 10)
    for token, banned in (
        (7, [2]),
        (1, [1]),
        (0, [4]),
        (0, []),
    ):  # behind 5 6, behind 5 6 7, behind 5 6 7 1, behind a 0
        shares = sampler.distribution(_ids([0]), np.array([2]), torch.zeros(1, 10))[0]
        assert (shares == 0).nonzero().flatten().tolist() == banned
        sampler.record_tokens(_ids([0]), _ids([token]))


def test_an_end_id_alone_is_no_bad_word() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 0.0]])
    for ends, expected in (((2,), 2), ((), 1)):
        sampler = _admitted([(_sampling(bad_words=((2,), (1, 2)), stop_token_ids=ends), _ids([0]), 1)], 4)
        assert sampler.sample(_ids([0]), np.array([1]), x.clone())[0].tolist() == [expected]
    sampler = _admitted([(_sampling(bad_words=((2,), (1, 2)), stop_token_ids=(2,)), _ids([1]), 1)], 4)
    assert sampler.sample(_ids([0]), np.array([1]), x.clone())[0].tolist() == [1]  # behind 1 it would end a longer word


def test_what_leaves_no_token_is_told() -> None:
    """Its neighbours have theirs, and it has a sentence of its own."""
    cases = [
        (_sampling(bad_words=((0,), (1,), (2,))), _ids([0]), 1),
        (_sampling(), _ids([0]), 1),
        (_sampling(logit_bias=((0, 3e38),), temperature=0.1), _ids([0]), 1),
        (_sampling(temperature=1.0, bad_words=((1,), (2,))), _ids([0]), 1),
    ]
    sampler = _admitted(cases, 3)
    x = torch.tensor([0.0, 5.0, 1.0]).repeat(4, 1)
    tokens, bad = sampler.sample(_ids([0, 1, 2, 3]), np.full(4, 1), x)
    assert bad is not None
    assert (tokens.tolist(), bad.tolist()) == ([0, 1, 0, 0], [True, False, True, False])
    troubles = [sampler.trouble(row) for row in range(4)]
    assert troubles[0] is not None
    assert "rules out every token" in troubles[0]
    assert troubles[2] is not None
    assert "overflow" in troubles[2]
    assert troubles[1] is troubles[3] is None
    sampler.release(np.arange(4))
    assert sampler.trouble(0) is None


def test_ids_beyond_the_logits_are_of_no_matter() -> None:
    """Checked at the door; a row of another model's settings must not break the step all the same."""
    sampling = _sampling(logit_bias=((9, 5.0), (1, 3.0)), bad_words=((9,), (0, 9)), frequency_penalty=1.0)
    sampler = _admitted([(sampling, _ids([0, 9, 9]), 1)], 3)
    assert sampler.sample(_ids([0]), np.array([3]), torch.tensor([[1.0, 0.0, 2.0]]))[0].tolist() == [1]
