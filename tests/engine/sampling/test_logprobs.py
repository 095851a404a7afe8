"""Log-probabilities are those of a plain forward, whatever the chunks, blocks, pool and neighbours (L 80)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import TinyEngine, blocks_needed, prompts, step
from families import VOCAB, tiny
from transformers import AutoModelForCausalLM

from pagetide import LLM, SamplingParams
from pagetide.engine.requests.outputs import Completion
from pagetide.engine.sampling import logprobs as scoring
from pagetide.scheduler.request import Sampling

LENGTHS = [1, 2, 17, 33, 64, 99]
NEW = 8
K = 5
CLOSE = 1e-4
ASKING = Sampling(NEW, temperature=1.3, repetition_penalty=1.4, top_k=9, logprobs=K, prompt_logprobs=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_like_torch_in_pieces(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bits make many equal logits: the lower id comes first, and all that are equal count for the rank."""
    monkeypatch.setattr(scoring, "_CPU_CHUNK", 3000)
    logits = (4 * torch.randn(50, 999, generator=torch.Generator().manual_seed(0))).to(dtype)
    logits[7, 200:300] = -torch.inf
    logits[8, ::2], logits[8, 1::2] = 0.0, -0.0
    ids = np.arange(50) * 19 % 999
    before = logits.clone()
    got = scoring.score(logits, ids, 20)
    assert torch.equal(logits, before)
    right = torch.log_softmax(logits.float(), -1)
    order = right.sort(descending=True, stable=True)
    own = right.gather(1, torch.from_numpy(ids)[:, None])
    assert got.token_ids[:, 0].tolist() == ids.tolist()
    assert got.token_ids[:, 1:].tolist() == order.indices[:, :20].tolist()
    np.testing.assert_allclose(got.logprobs[:, :1], own, atol=1e-5)
    np.testing.assert_allclose(got.logprobs[:, 1:], order.values[:, :20], atol=1e-5)
    np.testing.assert_allclose(got.logprobs[:, 1:], right.topk(20).values, atol=1e-5)
    assert got.ranks.tolist() == (logits >= logits.gather(1, torch.from_numpy(ids)[:, None])).sum(-1).tolist()
    assert not got.bad.any()


def test_more_than_there_are_and_none() -> None:
    logits = torch.tensor([[1.0, 3.0, -torch.inf]])
    got = scoring.score(logits, np.array([2]), 10)
    assert got.token_ids.tolist() == [[2, 1, 0, 2]]
    assert got.ranks.tolist() == [3]
    assert got.logprobs[0, 0] == np.finfo(np.float32).min, "what is ruled out is a number all the same"
    assert scoring.score(logits, np.array([1]), 0).token_ids.tolist() == [[1]]


def test_what_is_no_distribution_is_told() -> None:
    logits = torch.zeros(4, 9)
    logits[0, 3], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    assert scoring.score(logits, np.zeros(4, np.int64), 1).bad.tolist() == [True, True, True, False]


class ScoredEngine(TinyEngine):
    """Keeps what steps tell of each request: by position the last one, and how often."""

    def __init__(self, *args, **more) -> None:
        super().__init__(*args, **more)
        self.told: dict[tuple[str, int], tuple[list[int], list[float], int]] = {}
        self.times: dict[tuple[str, int], int] = {}
        step = self.core.step

        def watched():
            emissions = step()
            for name, scores in emissions.scores:
                for j, rank in enumerate(scores.ranks.tolist()):
                    at = (name, scores.first + j)
                    self.told[at] = scores.token_ids[j].tolist(), scores.logprobs[j].tolist(), rank
                    self.times[at] = self.times.get(at, 0) + 1
            return emissions

        self.core.step = watched


def plain(model, tokens: list[int]) -> torch.Tensor:
    """[len(tokens) - 1, vocabulary]: line p is of token p + 1."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    model.set_attn_implementation(ours)
    return torch.log_softmax(logits.float(), -1)


def check(engine: ScoredEngine, name: str, prompt: list[int], output: list[int], sampling: Sampling = ASKING) -> None:
    """All that was asked for, and no more, within CLOSE of a plain forward."""
    tokens = prompt + output
    wanted = dict.fromkeys(range(1, len(prompt)), sampling.prompt_logprobs)
    wanted |= dict.fromkeys(range(len(prompt), len(tokens)), sampling.logprobs)
    wanted = {p: k for p, k in wanted.items() if k is not None}
    assert {p for of, p in engine.told if of == name} == set(wanted)
    right = plain(engine.core.runner.model, tokens)
    for p, k in wanted.items():
        (token, *ids), (logprob, *logprobs), rank = engine.told[name, p]
        line = right[p - 1]
        assert token == tokens[p]
        assert abs(logprob - line[token]) < CLOSE
        assert int((line > line[token] + CLOSE).sum()) < rank <= int((line >= line[token] - CLOSE).sum())
        torch.testing.assert_close(torch.tensor(logprobs), line.topk(k).values, atol=CLOSE, rtol=0)
        torch.testing.assert_close(torch.tensor(logprobs), line[ids], atol=CLOSE, rtol=0)
        assert len(set(ids)) == k


@pytest.mark.parametrize(
    ("name", "share", "pool"),
    [
        ("llama", 1.0, {"block_size": 16, "max_chunk_tokens": 7}),
        ("llama", 0.5, {"block_size": 4, "max_chunk_tokens": 7}),
        ("gemma2", 0.5, {"block_size": 4, "caching": True}),
        ("llama", 0.5, {"block_size": 4, "caching": True, "host_slots": 40}),
    ],
    ids=["chunks", "computed again", "found again, with windows", "swapped"],
)
def test_as_a_plain_forward(name: str, share: float, pool: dict) -> None:
    """Behind chunk borders, resumes, prefix hits and swap-ins, beside neighbours that ask for nothing or for other things."""
    model, inputs = tiny(name), prompts(LENGTHS, VOCAB)
    settings = [ASKING, Sampling(NEW), Sampling(NEW, logprobs=0), Sampling(NEW, prompt_logprobs=1)]
    settings = [settings[-i % 4] for i in range(len(inputs))]
    if name == "gemma2" and share < 1:
        share *= 0.8  # windows give blocks back
    engine = ScoredEngine(model, usable=int(share * blocks_needed(inputs, NEW, pool["block_size"])), **pool)
    outputs = engine.generate(inputs, settings)
    for i, (prompt, output, sampling) in enumerate(zip(inputs, outputs, settings, strict=True)):
        check(engine, f"r{i}", prompt, output, sampling)
    stats = engine.core.scheduler.stats
    assert (stats.preemptions > 0) == (share < 1)
    assert (stats.promoted_blocks > 0) == ("host_slots" in pool)
    generated = [times for (of, p), times in engine.times.items() if p >= len(inputs[int(of[1:])])]
    assert set(generated) == {1}, "what was generated is told once"


def test_behind_a_prefix_hit_and_of_a_prompt_that_is_cached_as_a_whole() -> None:
    model, (prompt,) = tiny("llama"), prompts([64], VOCAB)
    engine = ScoredEngine(model, usable=200, block_size=4, caching=True)
    stats = engine.core.scheduler.stats
    engine.generate([prompt], Sampling(NEW))
    for sampling, found in ((Sampling(NEW, logprobs=K), 60), (ASKING, 0), (Sampling(NEW, prompt_logprobs=0), 0)):
        engine.told.clear()
        before = stats.prefix_lookups.hit_tokens
        (output,) = engine.generate([prompt], sampling)
        check(engine, "r0", prompt, output, sampling)
        assert stats.prefix_lookups.hit_tokens - before == found, "a prompt that is scored is computed"


@pytest.mark.parametrize("kind", ["gives all logits", "takes one chunk at a time"])
def test_models_that_do_not_do_as_they_are_asked_tell_the_same(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = tiny("llama"), prompts([9, 33], VOCAB)
    engine = ScoredEngine(model, usable=200, max_chunk_tokens=16)

    def alone(**keywords):
        if keywords["position_ids"].shape[1] > 16 or (keywords["position_ids"][0].diff() < 1).any():
            raise RuntimeError("more than one")
        return model(**keywords)

    if kind == "gives all logits":
        engine.core.runner._keeps = False
    else:
        engine.core.runner.model = alone
    outputs = engine.generate(inputs, ASKING)
    engine.core.runner.model = model
    for i, (prompt, output) in enumerate(zip(inputs, outputs, strict=True)):
        check(engine, f"r{i}", prompt, output)
    assert set(engine.times.values()) == {1}


def test_a_prompt_without_a_distribution_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Not even behind a position that nothing is sampled from."""
    model, inputs = tiny("llama"), prompts([33, 33], VOCAB)
    engine = ScoredEngine(model, usable=200, max_chunk_tokens=16)

    def broken(*, logits_to_keep, **keywords):
        output = model(logits_to_keep=logits_to_keep, **keywords)
        at = keywords["position_ids"][0, logits_to_keep]
        output.logits[0, (at == 20).nonzero()[:1]] = torch.nan  # the first of both
        return output

    engine.core.runner.model = broken
    engine.add_all(inputs, ASKING)
    ends = engine.run()
    engine.core.runner.model = model
    assert ends["r0"].error == "the model's logits behind token 21 are not finite numbers"
    assert max(p for name, p in engine.told if name == "r0") == 16, "a chunk that failed tells nothing"
    check(engine, "r1", inputs[1], ends["r1"].token_ids.tolist())


TEXTS = ["Natásha went to the window and", '"What is the matter," said', "CORIOLANUS:\n"]
DEMO = Path(scoring.__file__).parents[1] / "demo_model"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="cpu", kv_memory="8MiB", max_chunk_tokens=5, host_kv_memory="1MiB") as llm:
        yield llm


def check_completion(completion: Completion, right: torch.Tensor, k: int) -> None:
    """`right` has a line for each of its tokens."""
    assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids) > 0
    for told, token, line in zip(completion.logprobs, completion.token_ids, right, strict=True):
        assert told.token_id == token
        assert abs(told.logprob - line[token]) < CLOSE
        assert [i for i, _ in told.top] == line.topk(k).indices.tolist()
        assert all(abs(logprob - line[i]) < CLOSE for i, logprob in told.top)
        assert told.rank == int((line >= line[token]).sum())
    assert completion.cumulative_logprob == pytest.approx(sum(told.logprob for told in completion.logprobs))


def test_the_demo_model(llm: LLM) -> None:
    """Twice: the second time all prompts are cached. Two continuations each, which are those that nobody asks about."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    params = SamplingParams(max_new_tokens=6, n=2, temperature=1, seed=5, logprobs=3, prompt_logprobs=2)
    expected = [
        [c.token_ids for c in output.completions]
        for output in llm.generate(TEXTS, replace(params, logprobs=None, prompt_logprobs=None))
    ]
    llm.reset_prefix_cache()
    for _ in range(2):
        for output, tokens in zip(llm.generate(TEXTS, params), expected, strict=True):
            assert [c.token_ids for c in output.completions] == tokens
            prompt = output.prompt_token_ids
            for completion in output.completions:
                right = plain(model, prompt + completion.token_ids)
                check_completion(completion, right[len(prompt) - 1 :], 3)
            assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
            assert output.prompt_logprobs[0] is None
            for told, token, line in zip(output.prompt_logprobs[1:], prompt[1:], right, strict=False):
                assert told is not None and told.token_id == token
                assert abs(told.logprob - line[token]) < CLOSE
                assert [i for i, _ in told.top] == line.topk(2).indices.tolist()
            data = output.to_dict()
            assert json.loads(json.dumps(data, allow_nan=False))["prompt_logprobs"][0] is None


def test_nothing_is_told_that_nobody_asked_for(llm: LLM) -> None:
    (output,) = llm.generate(TEXTS[0], SamplingParams(max_new_tokens=2))
    assert output.prompt_logprobs is None
    assert (output.completions[0].logprobs, output.completions[0].cumulative_logprob) == (None, None)
    (output,) = llm.generate(TEXTS[0], SamplingParams(max_new_tokens=2, prompt_logprobs=0))
    assert output.completions[0].logprobs is None and output.prompt_logprobs is not None
    assert [told and told.top for told in output.prompt_logprobs] == [None, *[()] * (len(output.prompt_token_ids) - 1)]
    (output,) = llm.generate([[5]], SamplingParams(max_new_tokens=2, prompt_logprobs=0))
    assert output.prompt_logprobs == (None,)


def test_streamed_ones_are_those_of_the_chunks_tokens(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=7, ignore_eos=True, seed=1, logprobs=1, prompt_logprobs=0, stop=["zzz"])
    chunks = list(llm.stream(TEXTS[:2], params, stream_interval=3))
    for i in range(2):
        own = [chunk for chunk in chunks if chunk.index == i]
        assert [len(chunk.logprobs or ()) for chunk in own] == [3, 3, 1]
        told = [one for chunk in own for one in chunk.logprobs or ()]
        assert [one.token_id for one in told] == [token for chunk in own for token in chunk.token_ids]
        assert own[-1].output is not None and own[-1].completion is not None
        assert own[-1].completion.logprobs == tuple(told)
        assert own[-1].output.prompt_logprobs is not None
    assert all(chunk.logprobs is None for chunk in llm.stream(TEXTS[0], SamplingParams(max_new_tokens=3)))


def test_one_for_each_token_behind_a_stop_string_and_of_what_is_aborted(llm: LLM) -> None:
    (whole,) = llm.generate(TEXTS[0], SamplingParams(max_new_tokens=12, temperature=0, logprobs=0))
    params = SamplingParams(max_new_tokens=12, temperature=0, logprobs=0, stop=str(whole.text)[8:12])
    (stopped,) = llm.generate(TEXTS[0], params)
    assert stopped.finish_reason == "stop" and len(stopped.token_ids) < 12
    logprobs = stopped.completions[0].logprobs
    assert logprobs is not None and [one.token_id for one in logprobs] == stopped.token_ids
    stream = llm.stream(TEXTS[0], SamplingParams(max_new_tokens=99, logprobs=0, prompt_logprobs=0), stream_interval=99)
    step(llm)
    stream.close()
    (output,) = stream.outputs()
    assert (output.finish_reason, output.completions[0].logprobs) == ("aborted", ())
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 6, "as far as it was computed"
