"""`best_of`: the likeliest of several continuations of a prompt, by the mean of their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from beam_rig import as_input

from pagetide import LLM, SamplingParams
from pagetide.engine.requests.groups import ContinuationGroup
from pagetide.engine.requests.outputs import Completion
from pagetide.scheduler.outcome import Finished
from pagetide.scheduler.plan import ChunkLogprobs
from pagetide.scheduler.request import Request, RequestRejected

PROMPTS = ["Natásha went to the window and", '"What is the matter," said', "CORIOLANUS:\n"]
DRAWN = SamplingParams(max_new_tokens=9, temperature=1.2, seed=11, stop=[".", ","])  # so that the lengths differ


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="cpu", kv_memory="8MiB") as llm:
        yield llm


def mean(completion: Completion) -> float:
    assert completion.cumulative_logprob is not None
    return completion.cumulative_logprob / len(completion.token_ids)


def test_the_best_of_those_that_n_gives(llm: LLM) -> None:
    """Chosen by hand among all continuations of the same seed; shown only when asked for."""
    all_of_them = llm.generate(PROMPTS, replace(DRAWN, n=6, logprobs=0))
    for n, asked in ((1, None), (3, 2)):
        outputs = llm.generate(PROMPTS, replace(DRAWN, n=n, best_of=6, logprobs=asked))
        for output, every in zip(outputs, all_of_them, strict=True):
            best = sorted(every.completions, key=mean, reverse=True)[:n]
            assert [c.token_ids for c in output.completions] == [c.token_ids for c in best]
            assert [c.text for c in output.completions] == [c.text for c in best]
            sums = [c.cumulative_logprob for c in best]
            assert [c.cumulative_logprob for c in output.completions] == pytest.approx(sums, abs=1e-4)
            assert all((c.logprobs is None) == (asked is None) for c in output.completions)
    assert len({len(c.token_ids) for output in all_of_them for c in output.completions}) > 2
    assert any(list(o.completions) != sorted(o.completions, key=mean, reverse=True) for o in all_of_them)
    params = replace(DRAWN, best_of=4, prompt_logprobs=0)  # the prompt is scored once, whoever is chosen
    outputs = llm.generate(PROMPTS, params)
    in_turn = llm.generate_each(iter(PROMPTS), params, look_ahead=2)
    assert [output.token_ids for output in in_turn] == [output.token_ids for output in outputs]
    assert [len(o.prompt_logprobs or ()) for o in outputs] == [len(o.prompt_token_ids) for o in outputs]


def test_streams_are_refused_with_the_reason(llm: LLM) -> None:
    with pytest.raises(RequestRejected, match="best_of 3 cannot be streamed with n 2"):
        llm.stream(PROMPTS[0], replace(DRAWN, n=2, best_of=3))
    assert not llm.stats()["running"] and not llm.stats()["waiting"]
    assert len([chunk for chunk in llm.stream(PROMPTS[0], replace(DRAWN, n=2, best_of=2)) if chunk.completion]) == 2


def test_failed_ones_come_last_and_of_equal_ones_the_first_is_first() -> None:
    params = SamplingParams(n=4, best_of=7, max_new_tokens=4)
    prompt = as_input([0, 1, 2], params)
    requests = Request("r", prompt.token_ids, params.resolve()).forked(7)
    group = ContinuationGroup(0, prompt, requests)
    ends = [
        ("error", [-0.1]), ("length", [-2.0, -4.0]), ("aborted", [-0.1]), ("length", []),
        ("stop", [-1.0]), ("length", [-3.0]), ("length", [-3.0, -3.5]),
    ]  # fmt: skip
    for state, (reason, logprobs) in zip(group.states, ends, strict=True):
        for j, logprob in enumerate(logprobs):
            one = np.full((1, 1), 50 + state.number, np.int32)
            state.score(ChunkLogprobs(0, 3 + j, one, np.full((1, 1), logprob, np.float32), np.ones(1, np.int32)))
            state.push(50 + state.number, 1.0)
        tokens = np.full(len(logprobs), 50 + state.number, np.int32)
        state.finish(Finished(state.request.request_id, reason, tokens, 0), 2.0)
    assert [c.token_ids[:1] for c in group.output.completions] == [[54], [51], [55], [56]]
    group.params = replace(params, n=6)
    assert [c.finish_reason for c in group.output.completions[4:]] == ["error", "aborted"]
    assert group.output.completions[4].token_ids == [50]
