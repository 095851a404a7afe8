"""The engine gives the tokens and logits of plain transformers: one family for each kind of attention.

What is found, computed again or swapped changes nothing: tokens, samples and log-probabilities at every position that was
computed, not only at those that were sampled from.
"""

from __future__ import annotations

import functools

import pytest
from engines import TinyEngine
from equality import GREEDY, NEW, check_logits, check_prefixes, check_tokens, engine_for, family

from pagetide.scheduler.request import Sampling

KEPT = {"cached": {"caching": True}, "swapped": {"caching": True, "host_slots": 2000}}


def forced_out(engine: TinyEngine) -> bool:
    """Whether somebody was preempted, and what he had came back from the host if there is one."""
    stats = engine.core.scheduler.stats
    swapped = stats.promoted_blocks > 0 == stats.recomputed_tokens
    return stats.preemptions > 0 and (swapped if engine.host is not None else stats.recomputed_tokens > 0)


def test_same_tokens_as_plain_transformers() -> None:
    check_tokens("llama", [(4, None, 12, 0.3), (4, 1, 12, 1.0)])


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_same_logits_behind_chunks_and_resumes(name: str) -> None:
    check_logits(name, 8)


def test_same_tokens_and_logits_behind_cached_prefixes() -> None:
    check_prefixes("llama", [(4, 7, 0.5)])


def test_the_same_prompt_at_the_same_time_and_in_the_middle_of_it() -> None:
    """B 16: nobody reads what another has not written yet; it would be NaN."""
    model, inputs, expected = family("llama")
    engine = engine_for(model, inputs, 4, 1.0, caching=True, max_chunk_tokens=24)
    for i in range(3):
        engine.add(f"at once {i}", inputs[9], GREEDY)
    ends, late = {}, 0
    while engine.core.has_work:
        if late < 4:
            engine.add(f"late {late}", inputs[9], GREEDY)
            late += 1
        ends.update({end.request_id: end for end in engine.core.step().finished})
        engine.core.scheduler.check_invariants()
    assert {tuple(end.token_ids.tolist()) for end in ends.values()} == {tuple(expected[9])} and len(ends) == 7
    assert 0 < engine.core.scheduler.stats.prefix_lookups.hit_tokens


@pytest.mark.parametrize("way", KEPT)
def test_a_seed_is_a_promise(way: str) -> None:
    """L 78: alone, among 16, forced out, behind what is found, and in another order."""
    inputs, settings, alone = samples_alone()
    model, _, _ = family("llama")
    engine = engine_for(model, inputs, 4, 0.3, max_chunk_tokens=24, **KEPT[way])
    assert engine.generate(inputs, settings) == alone
    assert forced_out(engine)
    assert engine.generate(inputs[::-1], settings[::-1]) == alone[::-1]
    assert engine.core.scheduler.stats.prefix_lookups.hit_tokens > 300
    assert all(alone[5 + i] != alone[12 + i] for i in range(4)), "the same prompts with other seeds"


@functools.lru_cache(maxsize=1)
def samples_alone() -> tuple[list[list[int]], list[Sampling], list[list[int]]]:
    """16 prompts, four of them twice, how they are sampled, and what each gives in an engine of its own."""
    model, inputs, _ = family("llama")
    inputs = [*inputs, *inputs[5:9]]
    settings = [
        Sampling(NEW, temperature=0.9, top_k=40 * (i % 2), top_p=1 - 0.05 * (i % 3), min_p=0.02 * (i % 2),
                 repetition_penalty=1 + 0.1 * (i % 3), seed=i) for i in range(16)
    ]  # fmt: skip
    each = zip(inputs, settings, strict=True)
    return inputs, settings, [engine_for(model, [p], 16, 1.0).generate([p], one)[0] for p, one in each]
