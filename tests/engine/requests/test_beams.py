"""Beams: those of transformers, however little memory there is for them."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
import pytest
import torch
from engines import TinyEngine
from families import VOCAB, tiny

from pagetide import LLM, RequestRejected, SamplingParams
from pagetide.engine.requests.beams import BeamRules, BeamSearch
from pagetide.engine.requests.groups import BeamGroup
from pagetide.engine.requests.inputs import PromptInput
from pagetide.engine.requests.outputs import Completion
from pagetide.engine.requests.states import GroupActions
from pagetide.engine.text.encoder import PreparedParams
from pagetide.scheduler.outcome import Finished
from pagetide.scheduler.plan import Candidates
from pagetide.scheduler.request import Request

NEW = 24
ENDS = (3, 77, 140)  # of 160 ids: some beams end early, most go on


@lru_cache(maxsize=8)
def family(name: str):
    return tiny(name, seed=11)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCAB, length).tolist()


def theirs(name: str, ids: list[int], ends: tuple[int, ...], **kwargs) -> list[list[int]]:
    """What transformers' beams give, without the padding behind the end."""
    model = family(name)
    model.set_attn_implementation("eager")
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)).long(), do_sample=False, max_new_tokens=NEW,
        eos_token_id=list(ends) or None, pad_token_id=0, **kwargs
    )  # fmt: skip
    rows = [row[len(ids) :].tolist() for row in out]
    return [row[: next((i + 1 for i, token in enumerate(row) if token in ends), NEW)] for row in rows]


def ours(
    engine: TinyEngine, ids: list[int], ends: tuple[int, ...], name: str = "b", **kwargs
) -> tuple[list[Completion], ...]:
    """One search, driven without an `LLM`."""
    return searched(engine, {name: ids}, ends, **kwargs)[name]


def as_input(ids: list[int], params: SamplingParams) -> PromptInput:
    return PromptInput(None, np.array(ids, np.int32), params, PreparedParams())


def searched(engine: TinyEngine, prompts: dict[str, list[int]], ends, **kwargs) -> dict[str, list[Completion]]:
    """Searches side by side."""
    params = SamplingParams(max_new_tokens=NEW, temperature=0, stop_token_ids=ends, **kwargs)
    rules = BeamRules.resolve(params, ends, NEW)
    scheduler, by_request, groups = engine.core.scheduler, {}, {}
    for name, ids in prompts.items():
        sampling = params.resolve()
        sampling = type(sampling)(
            **{f: getattr(sampling, f) for f in sampling.__slots__} | {"num_candidates": rules.num_candidates}
        )
        requests = Request(name, np.array(ids, np.int32), sampling).forked(rules.num_beams)
        groups[name] = BeamGroup(0, as_input(ids, params), requests, rules)
        for request in requests:
            engine.core.add(request)
            by_request[request.request_id] = groups[name]
    for _ in range(5000):
        if not engine.core.has_work:
            break
        outputs = engine.core.step()
        scheduler.check_invariants()
        for request_id, event in [*((end.request_id, end) for end in outputs.finished), *outputs.candidates]:
            if (actions := by_request[request_id].deliver(request_id, event, 0.0)) is None:
                continue
            if actions.moves:
                scheduler.apply_beam_moves(actions.moves, spare=actions.spare)
            for other, reason in actions.aborts:
                engine.core.abort(other, reason)
        scheduler.check_invariants()
    assert scheduler.cache.pool.counts().live == 0, "blocks are left"
    return {name: list(group.output.completions) for name, group in groups.items()}


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


WAYS = {
    "plain": {"num_beams": 4, "n": 4},
    "the first of three": {"num_beams": 3},
    "early": {"num_beams": 3, "n": 3, "early_stopping": True, "length_penalty": 0.0},
    "never, for the long": {"num_beams": 4, "n": 2, "early_stopping": "never", "length_penalty": 2.0},
    "for the short": {"num_beams": 5, "n": 5, "length_penalty": -1.0},
    "penalised": {"num_beams": 2, "n": 2, "repetition_penalty": 1.5, "min_new_tokens": 6},
}


def as_theirs(kwargs: dict) -> dict:
    return {**{k: v for k, v in kwargs.items() if k != "n"}, "num_return_sequences": kwargs.get("n", 1)}


WHOLE = {
    ("llama", "room for all"),
    ("gpt_oss", "preempted"),
}  # where every way is tried; elsewhere the first and the last


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_oss"])
@pytest.mark.parametrize("pressure", ["room for all", "preempted", "preempted, nothing kept"])
def test_the_beams_of_transformers(name, pressure):
    caching, usable = pressure != "preempted, nothing kept", 120 if pressure == "room for all" else 13
    preemptions = 0
    ways = list(WAYS.values()) if (name, pressure) in WHOLE else list(WAYS.values())[:: len(WAYS) - 1]
    for seed, kwargs in enumerate(ways):
        ids = prompt(21 + seed, seed)
        engine = TinyEngine(
            family(name), usable=usable, block_size=4, caching=caching, max_chunk_tokens=8, max_step_tokens=64
        )  # fmt: skip
        found = ours(engine, ids, ENDS, **kwargs)
        preemptions += engine.preemptions
        assert tokens(found) == theirs(name, ids, ENDS, **as_theirs(kwargs)), kwargs
        for completion in found:
            assert completion.finish_reason == ("stop" if completion.token_ids[-1] in ENDS else "length")
    assert (preemptions > 0) == (usable == 13)


@pytest.mark.parametrize(("num_beams", "allowed", "steps"), [(2, 1, 1), (4, 3, 1), (4, 1, 3), (6, 2, 2)])
@pytest.mark.parametrize("usable", [120, 13])
def test_fewer_candidates_than_beams(num_beams, allowed, steps, usable):
    """Where the first steps allow few tokens beams are missing, and come when there are enough: as in transformers, whose
    beams of probability 0 are passed by all others.
    """
    ids = prompt(17, 5)

    def narrow(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= len(ids) + steps:
            return scores
        best = scores.topk(allowed).indices
        return torch.full_like(scores, -torch.inf).scatter(1, best, scores.gather(1, best))

    engine = TinyEngine(family("llama"), usable=usable, block_size=4, max_chunk_tokens=8, max_step_tokens=64)
    found = ours(engine, ids, ENDS, num_beams=num_beams, n=num_beams, logits_processors=[narrow])
    kwargs = {"num_beams": num_beams, "num_return_sequences": num_beams}
    assert tokens(found) == theirs("llama", ids, ENDS, logits_processor=[narrow], **kwargs)


def test_without_an_end_id():
    ids = prompt(9)
    engine = TinyEngine(family("llama"), usable=100, block_size=4)
    assert tokens(ours(engine, ids, (), num_beams=3, n=3)) == theirs(
        "llama", ids, (), num_beams=3, num_return_sequences=3
    )


@pytest.mark.parametrize("host_slots", [0, 12])
def test_searches_side_by_side_out_of_one_pool(host_slots):
    prompts = {f"s{i}": prompt(10 + 3 * i, i) for i in range(4)}
    engine = TinyEngine(family("llama"), usable=30, block_size=4, caching=True, host_slots=host_slots, max_seqs=9)
    found = searched(engine, prompts, ENDS, num_beams=3, n=3)
    assert engine.preemptions > 0
    for name, ids in prompts.items():
        assert tokens(found[name]) == theirs("llama", ids, ENDS, num_beams=3, num_return_sequences=3)


def test_a_pool_for_one_beam_is_enough_for_all():
    ids = prompt(6)
    engine = TinyEngine(family("llama"), usable=8, block_size=4)  # 31 tokens at most; a beam comes to 29
    assert tokens(ours(engine, ids, (), num_beams=3, n=3)) == theirs(
        "llama", ids, (), num_beams=3, num_return_sequences=3
    )
    num_rows = TinyEngine(family("llama"), usable=100, block_size=4, max_seqs=1)
    assert tokens(ours(num_rows, ids, (), num_beams=3, n=3)) == theirs(
        "llama", ids, (), num_beams=3, num_return_sequences=3
    )


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
    ids, kwargs = prompt(12), {"num_beams": 3, "n": 3, "top_k": 20}
    params = {"seed": 5, **kwargs}

    def drawn(usable: int, **more):
        engine = TinyEngine(family("llama"), usable=usable, block_size=4, caching=True)
        one = SamplingParams(max_new_tokens=NEW, temperature=1.5, **{**params, **more})
        sampling = one.resolve()
        rules = BeamRules.resolve(one, (), NEW)
        fields = {f: getattr(sampling, f) for f in sampling.__slots__} | {"num_candidates": rules.num_candidates}
        requests = Request("b", np.array(ids, np.int32), type(sampling)(**fields)).forked(3)
        search = BeamSearch(rules, [r.request_id for r in requests])
        for request in requests:
            engine.core.add(request)
        while not search.over:
            for request_id, candidates in engine.core.step().candidates:
                search.record(request_id, candidates)
            if search.ready:
                engine.core.scheduler.apply_beam_moves(search.choose())
        return [h.token_ids for h in search.best], engine.preemptions

    plain, _ = drawn(100)
    pressed, preemptions = drawn(9)
    assert pressed == plain
    assert preemptions > 0
    assert drawn(100, seed=6)[0] != plain


# -- through the door --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", dtype="float32", kv_memory="8MiB", device="cpu") as llm:
        yield llm


@lru_cache(maxsize=1)
def demo():
    from pathlib import Path

    from transformers import AutoModelForCausalLM

    import pagetide.engine.demo_model as demo_model

    return AutoModelForCausalLM.from_pretrained(Path(demo_model.__file__).parent, dtype=torch.float32)


def test_generate_and_stream(llm):
    ids = llm.tokenize("The sea was")
    params = SamplingParams(num_beams=4, num_return_sequences=2, max_new_tokens=16, temperature=0)
    want = demo().generate(
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


def test_beams_beside_others_that_draw(llm):
    plain, beams = (
        SamplingParams(temperature=1.0, seed=3, max_new_tokens=12),
        SamplingParams(num_beams=3, max_new_tokens=12, temperature=0),
    )
    alone = [llm.generate("Call me", p)[0].token_ids for p in (plain, beams)]
    both = llm.generate(["Call me", "Call me", "Call me"], [plain, beams, plain])
    assert [output.token_ids for output in both] == [alone[0], alone[1], alone[0]]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_beams_of_a_form_end_when_it_is_whole(llm, ignore_eos):
    pytest.importorskip("llguidance")
    params = SamplingParams(
        num_beams=3, n=3, max_new_tokens=20, temperature=0, regex="(abc|de) (x|yz)", ignore_eos=ignore_eos
    )
    completions = llm.generate("Call me", params)[0].completions
    assert {c.finish_reason for c in completions} == {"stop"}
    assert {c.text for c in completions} <= {"abc x", "abc yz", "de x", "de yz"}
    assert len({tuple(c.token_ids) for c in completions}) == 3


def test_a_stream_that_is_closed_ends_its_beams(llm):
    stream = llm.stream("Call me", SamplingParams(num_beams=4, n=2, max_new_tokens=200, temperature=0))
    for _ in range(5):
        llm._manager.step()
    stream.close()
    stats = llm.stats()
    assert (stats["running"], stats["waiting"], stats["blocks"]["live"]) == (0, 0, 0)
    assert not llm._manager.delivery.groups


def test_a_search_whose_first_beam_lost_its_place_can_be_ended(llm):
    """The best beam ends at once, and the only one that goes on has another request than the ticket."""
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
        llm._manager.step()
    assert llm.stats()["running"] == 1
    before = llm.stats()["steps"]
    stream.close()
    assert llm.stats()["steps"] <= before + 2
    assert llm.stats()["blocks"]["live"] == 0 and not llm._manager.delivery.groups


def test_a_search_that_breaks_ends_alone(llm, monkeypatch, caplog):
    def broken(self):
        raise RuntimeError("planted")

    good = llm.generate("Call me", SamplingParams(max_new_tokens=8, temperature=0))[0].token_ids
    with monkeypatch.context() as patch:
        patch.setattr(BeamSearch, "choose", broken)
        bad, other = llm.generate(
            ["Call me", "Call me"],
            [SamplingParams(num_beams=3, max_new_tokens=8, temperature=0), SamplingParams(max_new_tokens=8, temperature=0)],
        )  # fmt: skip
    assert bad.finish_reason == "error" and "planted" in bad.error
    assert other.token_ids == good and llm.stats()["blocks"]["live"] == 0 and not llm._manager.delivery.groups


@pytest.mark.parametrize("penalty", [300.0, -300.0, 1e308, -1e308])
def test_a_length_penalty_beyond_what_numbers_hold_ends_nobody(llm, penalty):
    good = llm.generate("Call me", SamplingParams(max_new_tokens=20, temperature=0))[0].token_ids
    beams = SamplingParams(num_beams=2, n=2, length_penalty=penalty, max_new_tokens=20, temperature=0)
    searched, other = llm.generate(["Call me", "Call me"], [beams, SamplingParams(max_new_tokens=20, temperature=0)])
    assert [c.finish_reason for c in searched.completions] == ["length", "length"]
    assert [len(c.token_ids) for c in searched.completions] == [20, 20]
    assert other.token_ids == good and llm.stats()["blocks"]["live"] == 0 and not llm._manager.delivery.groups


@pytest.mark.parametrize(
    "given",
    [{"num_beams": 2, "regex": "x[0-9]{3}"}, {"num_beams": 4, "top_k": 3}, {"num_beams": 4, "top_p": 0.05},
     {"num_beams": 64}, {"num_beams": 4, "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}],
)  # fmt: skip
def test_beams_where_few_tokens_are_allowed(llm, given):
    if {"regex", "json_schema"} & given.keys():
        pytest.importorskip("llguidance")
    temperature = 0 if {"regex", "json_schema"} & given.keys() else 1.0
    new = 6 if given["num_beams"] == 64 else 24
    params = SamplingParams(max_new_tokens=new, temperature=temperature, n=given["num_beams"], seed=1, **given)
    (output,) = llm.generate("Call me", params)
    assert {c.finish_reason for c in output.completions} <= {"stop", "length"}, output.error
    if "regex" in given:
        assert all(re.fullmatch("x[0-9]{3}", c.text) for c in output.completions)
    assert llm.stats()["blocks"]["live"] == 0 and not llm._manager.delivery.groups


@pytest.mark.parametrize(
    "given", [{"num_beams": 2, "n": 3}, {"num_beams": 2, "best_of": 2}, {"num_beams": 2, "stop": "a"}, {"num_beams": 0},
              {"num_beams": 2, "logprobs": 1}, {"num_beams": 2, "early_stopping": "perhaps"}],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(given):
    with pytest.raises(ValueError):
        SamplingParams(**given)


def test_beams_of_a_prompt_that_is_refused(llm):
    with pytest.raises(RequestRejected):
        llm.generate("word " * 10_000, SamplingParams(num_beams=2))
    assert not llm._manager.delivery.groups


def test_a_search_hands_on_what_ended_it():
    rules = BeamRules(2, 1.0, False, frozenset(), 5)
    params = SamplingParams(num_beams=2)
    requests = Request("b", np.array([1, 2], np.int32), params.resolve()).forked(2)
    group = BeamGroup(0, as_input([1, 2], params), requests, rules)
    values = np.array([-0.5, -1.0], np.float32)
    none = np.empty(0, np.int32)
    assert group.deliver("b", Candidates(0, np.array([7, 8], np.int32), values, values), 0.0) is not None
    broken = group.deliver("b.1", Finished("b.1", "error", none, 1, "the device is gone", 1), 1.0)
    assert broken == GroupActions(aborts=[("b", "aborted")])
    assert group.deliver("b", Finished("b", "aborted", none, 0), 1.0) == GroupActions(aborts=[])
    completion = group.output.completions[0]
    assert (completion.finish_reason, completion.error, completion.token_ids) == ("error", "the device is gone", [7])
    assert (completion.num_preemptions, group.output.num_cached_tokens) == (1, 1)
