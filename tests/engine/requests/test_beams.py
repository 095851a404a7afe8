"""Beams: those of transformers, however little memory there is for them; and continuations that share their prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from beam_rig import ENDS, NEW, check_few_candidates, check_ways, family, ours, prompt, searched, theirs, tokens
from engines import TinyEngine, step
from fork_rig import check_forks
from transformers import AutoModelForCausalLM

import pagetide.engine.demo_model as demo_model
from pagetide import LLM, SamplingParams
from pagetide.engine.requests.beams import BeamSearch
from pagetide.engine.requests.groups import BeamGroup


def test_the_beams_of_transformers() -> None:
    check_ways("llama", "room for all", ["early"])
    check_ways("llama", "preempted", ["for the short", "penalised"])


def test_continuations_have_the_tokens_that_each_has_alone() -> None:
    check_forks("llama")


def test_fewer_candidates_than_beams() -> None:
    check_few_candidates(4, allowed=3, steps=1, usable=13)


def test_searches_side_by_side_out_of_one_pool():
    prompts = {f"s{i}": prompt(10 + 3 * i, i) for i in range(4)}
    engine = TinyEngine(family("llama"), usable=30, block_size=4, caching=True, host_slots=12, max_seqs=9)
    found = searched(engine, prompts, ENDS, num_beams=3, n=3)
    assert engine.preemptions > 0
    for name, ids in prompts.items():
        assert tokens(found[name]) == theirs("llama", ids, ENDS, num_beams=3, num_return_sequences=3)


def test_a_pool_that_is_too_small_gives_what_was_found():
    ids = prompt(6)
    engine = TinyEngine(family("llama"), usable=4, block_size=4)
    found = ours(engine, ids, (), num_beams=2, n=2)
    assert [completion.finish_reason for completion in found] == ["length", "length"]
    assert all(8 <= len(completion.token_ids) <= 11 for completion in found)


def test_blocks_are_shared_by_beams():
    engine = TinyEngine(family("llama"), usable=100, block_size=4)
    ours(engine, prompt(40), (), num_beams=4, n=4)
    apart = 4 * (-(-(40 + NEW) // 4))
    assert engine.core.scheduler.stats.peak_used_blocks < apart / 2
    assert engine.preemptions == engine.core.scheduler.stats.recomputed_tokens == 0


def test_drawn_beams_are_a_function_of_the_seed():
    def drawn(usable: int, seed: int):
        engine = TinyEngine(family("llama"), usable=usable, block_size=4, caching=True)
        found = ours(engine, prompt(12), (), num_beams=3, n=3, top_k=20, temperature=1.5, seed=seed)
        return tokens(found), engine.preemptions > 0

    plain, _ = drawn(100, 5)
    assert drawn(9, 5) == (plain, True)
    assert drawn(100, 6)[0] != plain


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", dtype="float32", kv_memory="8MiB", device="cpu") as llm:
        yield llm


def test_generate_and_stream(llm):
    ids = llm.tokenize("The sea was")
    params = SamplingParams(num_beams=4, num_return_sequences=2, max_new_tokens=16, temperature=0)
    model = AutoModelForCausalLM.from_pretrained(Path(demo_model.__file__).parent, dtype=torch.float32)
    want = model.generate(
        torch.tensor([ids]), num_beams=4, num_return_sequences=2, do_sample=False, max_new_tokens=16,
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
    )[:, len(ids) :].tolist()  # fmt: skip
    (output,) = llm.generate("The sea was", params)
    assert [c.token_ids for c in output.completions] == want
    tokenizer = llm._manager.open().encoder.tokenizer
    assert [c.text for c in output.completions] == [tokenizer.decode(row) for row in want]
    chunks = list(llm.stream("The sea was", params))
    assert [(c.number, c.token_ids) for c in chunks] == [(0, want[0]), (1, want[1])]
    assert [c.text for c in chunks] == [c.text for c in output.completions]
    assert not llm._manager.delivery.groups


def test_a_search_has_a_request_for_each_beam(llm):
    intake = llm._manager.intake
    params = SamplingParams(num_beams=3, n=2, stop_token_ids=[1, 2], ignore_eos=True)
    group, requests = intake.build(3, *intake.encode([5, 6], params), 2, "salt", False)
    assert isinstance(group, BeamGroup) and (group.index, len(group.states)) == (3, 2)
    assert group.request_ids == [request.request_id for request in requests] and len(requests) == 3
    assert {(request.priority, request.cache_salt) for request in requests} == {(2, b"salt")}
    assert {request.sampling.num_candidates for request in requests} == {9}, "even if all end ids are among the best"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_beams_of_a_form_end_when_it_is_whole(llm, ignore_eos):
    pytest.importorskip("llguidance")
    params = SamplingParams(num_beams=3, n=3, max_new_tokens=20, temperature=0, regex="(abc|de) (x|yz)", ignore_eos=ignore_eos)
    completions = llm.generate("Call me", params)[0].completions
    assert {c.finish_reason for c in completions} == {"stop"}
    assert {c.text for c in completions} <= {"abc x", "abc yz", "de x", "de yz"}
    assert len({tuple(c.token_ids) for c in completions}) == 3


def test_a_search_whose_first_beam_lost_its_place_can_be_ended(llm):
    """The best beam ends at once, and the only one that goes on is another request than the first of its group."""
    ids = llm.tokenize("Call me")

    def allow(input_ids, scores):
        only = torch.full_like(scores, -torch.inf)
        if input_ids.shape[1] == len(ids):
            only[:, 100], only[:, 101] = 0.0, -1.0
        else:
            only[:, 1 if input_ids[0, len(ids)] == 100 else 102] = 0.0
        return only

    params = SamplingParams(num_beams=2, max_new_tokens=900, temperature=0, logits_processors=[allow])
    stream = llm.stream([ids], params)
    for _ in range(6):
        step(llm)
    assert llm.stats()["running"] == 1
    before = llm.stats()["steps"]
    stream.close()
    assert llm.stats()["steps"] <= before + 2
    assert llm.stats()["blocks"]["live"] == 0 and not llm._manager.delivery.groups


def test_a_search_that_breaks_ends_alone(llm, monkeypatch, caplog):
    greedy = SamplingParams(max_new_tokens=8, temperature=0)
    good = llm.generate("Call me", greedy)[0].token_ids
    with monkeypatch.context() as patch:
        patch.setattr(BeamSearch, "choose", Mock(side_effect=RuntimeError("planted")))
        bad, other = llm.generate(["Call me"] * 2, [replace(greedy, num_beams=3), greedy])
    assert bad.finish_reason == "error" and "planted" in bad.error
    search, stream = llm.stream("Call me", replace(greedy, num_beams=3)), llm.stream("Call me", greedy)
    with monkeypatch.context() as patch:
        patch.setattr(BeamGroup, "deliver", Mock(side_effect=RuntimeError("planted")))
        step(llm)
    assert [token for chunk in stream for token in chunk.token_ids] == good
    assert search.outputs()[0].error == "RuntimeError: planted"
    assert other.token_ids == good and llm.stats()["blocks"]["live"] == 0 and not llm._manager.delivery.groups


def test_a_length_penalty_beyond_what_numbers_hold_ends_nobody(llm):
    greedy = SamplingParams(max_new_tokens=12, temperature=0)
    good = llm.generate("Call me", greedy)[0].token_ids
    beams = [replace(greedy, num_beams=2, n=2, length_penalty=penalty) for penalty in (-300.0, 1e308)]
    *searched, other = llm.generate(["Call me"] * 3, [*beams, greedy])
    for output in searched:
        assert [c.finish_reason for c in output.completions] == ["length", "length"]
        assert [len(c.token_ids) for c in output.completions] == [12, 12]
    assert other.token_ids == good and llm.stats()["blocks"]["live"] == 0 and not llm._manager.delivery.groups


@pytest.mark.parametrize(
    "given", [{"num_beams": 2, "n": 3}, {"num_beams": 2, "best_of": 2}, {"num_beams": 2, "stop": "a"}, {"num_beams": 0},
              {"num_beams": 2, "logprobs": 1}, {"num_beams": 2, "early_stopping": "perhaps"}],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(given):
    with pytest.raises(ValueError):
        SamplingParams(**given)
