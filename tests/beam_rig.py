"""Searches with beams over a tiny engine, and transformers' own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from engines import TinyEngine
from families import VOCAB, tiny

from pagetide import SamplingParams
from pagetide.engine.requests.beams import BeamRules
from pagetide.engine.requests.groups import BeamGroup
from pagetide.engine.requests.inputs import PromptInput
from pagetide.engine.requests.outputs import Completion
from pagetide.engine.text.encoder import PreparedParams
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


def ours(engine: TinyEngine, ids: list[int], ends: tuple[int, ...], name: str = "b", **kwargs) -> tuple[list[Completion], ...]:
    """One search, driven without an `LLM`."""
    return searched(engine, {name: ids}, ends, **kwargs)[name]


def as_input(ids: list[int], params: SamplingParams) -> PromptInput:
    return PromptInput(None, np.array(ids, np.int32), params, PreparedParams())


def searched(engine: TinyEngine, prompts: dict[str, list[int]], ends, **kwargs) -> dict[str, list[Completion]]:
    """Searches side by side."""
    params = SamplingParams(**{"max_new_tokens": NEW, "temperature": 0, "stop_token_ids": ends} | kwargs)
    rules = BeamRules.resolve(params, ends, NEW)
    scheduler, by_request, groups = engine.core.scheduler, {}, {}
    for name, ids in prompts.items():
        sampling = replace(params.resolve(), num_candidates=rules.num_candidates)
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


def check_ways(name: str, pressure: str, ways: Iterable[str]) -> None:
    """The beams are those of transformers, and a small pool preempts them."""
    caching, usable = pressure != "preempted, nothing kept", 120 if pressure == "room for all" else 13
    preemptions = 0
    for way in ways:
        seed, kwargs = list(WAYS).index(way), WAYS[way]
        ids = prompt(21 + seed, seed)
        engine = TinyEngine(family(name), usable=usable, block_size=4, caching=caching, max_chunk_tokens=8, max_step_tokens=64)
        found = ours(engine, ids, ENDS, **kwargs)
        preemptions += engine.preemptions
        assert tokens(found) == theirs(name, ids, ENDS, **as_theirs(kwargs)), kwargs
        for completion in found:
            assert completion.finish_reason == ("stop" if completion.token_ids[-1] in ENDS else "length")
    assert (preemptions > 0) == (usable == 13)


def check_few_candidates(num_beams: int, allowed: int, steps: int, usable: int) -> None:
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
