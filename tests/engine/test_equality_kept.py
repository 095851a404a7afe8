"""What is found, computed again or swapped changes nothing: tokens, samples and log-probabilities at every position.

test_equality.py has all families without a cache and test_swap.py has sizes of the host tier; here are the ways against each
other, and every position that was computed, not only those that were sampled from.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import pytest
import torch
from engines import TinyEngine, blocks_needed, plain, prompts
from families import VOCAB, tiny

from pagetide.engine.execution.parts import ChunkGroup
from pagetide.scheduler.plan import Admission, Plan
from pagetide.scheduler.request import Sampling

LENGTHS = [1, 2, 7, 15, 16, 17, 33, 64, 99, 130, 180, 300]
NEW = 20
GREEDY = Sampling(NEW)
KEPT = {"computed again": {}, "cached": {"caching": True}, "swapped": {"caching": True, "host_slots": 2000}}
every_way = pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)


@functools.lru_cache(maxsize=2)
def family(name: str):
    model = tiny(name)
    inputs = prompts(LENGTHS, VOCAB)
    return model, inputs, plain(model, inputs, NEW)


def engine_for(model: Any, inputs: list[list[int]], block_size: int, share: float, **more: Any) -> TinyEngine:
    """An engine whose pool is `share` of what all need together, and at least what the longest does."""
    least = -(-(max(map(len, inputs)) + NEW - 1) // block_size)
    usable = max(least, int(share * blocks_needed(inputs, NEW, block_size)))
    return TinyEngine(model, usable=usable, block_size=block_size, **more)


def forced_out(engine: TinyEngine) -> bool:
    """Whether somebody was preempted, and what he had came back from the host if there is one."""
    stats = engine.core.scheduler.stats
    swapped = stats.promoted_blocks > 0 == stats.recomputed_tokens
    return stats.preemptions > 0 and (swapped if engine.host is not None else stats.recomputed_tokens > 0)


# ---- tokens ----------------------------------------------------------------------------------------------------------


# (block size, tokens a chunk, seats, pool as a share of the joint need; 0 is just enough for the longest)
CASES = {
    "computed again": [(32, 24, 12, 0.4)],
    "cached": [(4, None, 12, 0.3), (32, 24, 3, 0.3), (100, 24, 12, 0.4), (16, 24, 12, 1.0)],
    "swapped": [(16, 24, 12, 0.3), (32, None, 3, 0.0), (100, None, 12, 0.4)],
}


@pytest.mark.parametrize("way", CASES)
def test_same_tokens_as_plain_transformers(way: str) -> None:
    """L 77, some of all combinations; `make stress` has them all. The second time much of the prompts is found."""
    model, inputs, expected = family("llama")
    preemptions = hit_tokens = promoted = 0
    for block_size, chunk, num_rows, share in CASES[way]:
        engine = engine_for(model, inputs, block_size, share, max_seqs=num_rows, max_chunk_tokens=chunk, **KEPT[way])
        assert engine.generate(inputs, GREEDY) == expected, (block_size, chunk, num_rows, share)
        assert engine.generate(inputs[::-1], GREEDY) == expected[::-1], (block_size, chunk, num_rows, share)
        stats = engine.core.scheduler.stats
        preemptions += stats.preemptions
        hit_tokens += stats.prefix_lookups.hit_tokens + stats.resumed_lookups.hit_tokens
        promoted += stats.promoted_blocks
    assert preemptions > 0
    assert (hit_tokens > 1000) == (way != "computed again") and (promoted > 50) == (way == "swapped")


@every_way
def test_same_tokens_in_two_fifths_of_the_need(kept: dict) -> None:
    """C 28: 24 requests."""
    model, _, _ = family("llama")
    inputs, expected = two_dozen()
    engine = engine_for(model, inputs, 4, 0.4, max_seqs=24, **kept)
    assert engine.generate(inputs, GREEDY) == expected
    assert forced_out(engine)


@functools.lru_cache(maxsize=1)
def two_dozen() -> tuple[list[list[int]], list[list[int]]]:
    model, _, _ = family("llama")
    inputs = prompts([3 + 3 * i for i in range(24)], VOCAB, seed=2)
    return inputs, plain(model, inputs, NEW)


@pytest.mark.parametrize("chunk", [None, 24])
def test_the_same_prompt_at_the_same_time_and_in_the_middle_of_it(chunk: int | None) -> None:
    """B 16: nobody reads what another has not written yet; it would be NaN."""
    model, inputs, expected = family("llama")
    engine = engine_for(model, inputs, 4, 1.0, caching=True, max_chunk_tokens=chunk)
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


# ---- samples ---------------------------------------------------------------------------------------------------------


@every_way
def test_a_seed_is_a_promise(kept: dict) -> None:
    """L 78: alone, among 16, forced out, behind what is found, and in another order."""
    inputs, settings, alone = samples_alone()
    model, _, _ = family("llama")
    engine = engine_for(model, inputs, 4, 0.3, max_chunk_tokens=24, **kept)
    assert engine.generate(inputs, settings) == alone
    assert forced_out(engine)
    assert engine.generate(inputs[::-1], settings[::-1]) == alone[::-1]
    assert (engine.core.scheduler.stats.prefix_lookups.hit_tokens > 300) == bool(kept)
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


@every_way
def test_parameters_do_not_leak_and_see_the_whole_history(kept: dict) -> None:
    """L 79: greedy ones, penalised ones with a least length as transformers' own, and wild neighbours, forced out and found."""
    model, inputs, expected = family("llama")
    penalised = penalised_by_transformers()
    settings = [
        (
            GREEDY,
            Sampling(NEW, 9, repetition_penalty=1.4, stop_token_ids=(penalised[i // 3][0],)),
            Sampling(NEW, 5, temperature=3.0, top_k=3, top_p=0.7, min_p=0.1, repetition_penalty=1.9, seed=i,
                     stop_token_ids=tuple(range(40))),
        )[i % 3] for i in range(12)
    ]  # fmt: skip
    engine = engine_for(model, inputs, 4, 0.3, max_chunk_tokens=24, **kept)
    for _ in range(2):
        got = engine.generate(inputs, settings)
        assert got[::3] == expected[::3]
        assert got[1::3] == [tokens for _, tokens in penalised]
    assert forced_out(engine)


@functools.lru_cache(maxsize=1)
def penalised_by_transformers() -> list[tuple[int, list[int]]]:
    """Of prompts 1, 4, 7 and 10, penalised: an end id that would have come third, and the tokens that are 9 at least."""
    model, inputs, _ = family("llama")
    model.set_attn_implementation("eager")
    out = []
    for prompt in inputs[1::3]:
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "repetition_penalty": 1.4}
        free = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        ids = model.generate(torch.tensor([prompt]), min_new_tokens=9, eos_token_id=free[2], **options)
        out.append((free[2], ids[0, len(prompt) :].tolist()))
    assert any(len(tokens) < NEW for _, tokens in out) and all(len(tokens) > 9 for _, tokens in out)
    return out


# ---- log-probabilities at every position -----------------------------------------------------------------------------


class EveryPosition:
    """Keeps the logits behind every token that `engine` computes, by (request id, position), and why a chunk began there."""

    def __init__(self, engine: TinyEngine) -> None:
        self.logits: defaultdict[tuple[str, int], list[torch.Tensor]] = defaultdict(list)
        self.behind: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)  # kind of start -> where
        self._engine = engine
        self._waits: dict[int, Admission] = {}
        self._promoted: set[int] = set()
        runner = engine.core.runner
        self._work, self._forward, self._begin = runner._prepare, runner._forward, runner.begin
        runner._prepare, runner._forward, runner.begin = self._worked, self._forwarded, self._begun

    def _begun(self, plan: Plan) -> Any:
        new = {a.row: a for a in plan.admitted} | self._waits  # whose copies were done beside the last plan's chunks
        promoted = self._promoted | (set() if plan.swaps is None else set(plan.swaps.in_blocks.tolist()))
        self._waits = {row: a for row, a in new.items() if row not in plan.rows}
        self._promoted = promoted if self._waits else set()
        for row, start, length in zip(plan.rows.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True):
            name = str(self._engine.core.scheduler.rows.request_ids[row])
            if row not in new:
                kind = "decode" if length == 1 else "chunk border"
            elif promoted & set(self._engine.core.scheduler.cache.tables[0].of(row)[0].tolist()):
                kind = "swap-in"
            elif len(new[row].token_ids) > new[row].num_prompt:
                kind = "resume"
            else:
                kind = "prefix hit" if start else "begin"
            self.behind[kind].add((name, start))
        return self._begin(plan)

    def _worked(self, part: ChunkGroup, recorded: bool = True) -> Any:
        work = self._work(part, recorded)
        names = self._engine.core.scheduler.rows.request_ids[part.rows]
        self._places = [
            (str(name), position)
            for name, start, length in zip(names, part.starts.tolist(), part.lengths.tolist(), strict=True)
            for position in range(start, start + length)
        ]
        return work

    def _forwarded(self, step: Any, input_ids: Any, positions: Any, keep: Any) -> torch.Tensor:
        logits = self._forward(step, input_ids, positions, torch.arange(len(input_ids)))
        for place, one in zip(self._places, logits, strict=True):
            self.logits[place].append(one.clone())
        return logits[-1:] if keep is None else logits[keep]


EXPECTED_STARTS = {
    "computed again": {"begin", "decode", "chunk border", "resume"},
    "cached": {"begin", "decode", "chunk border", "resume", "prefix hit"},
    "swapped": {"begin", "decode", "chunk border", "prefix hit", "swap-in"},
}


@pytest.mark.parametrize(("name", "way"), [*(("llama", way) for way in KEPT), ("gemma2", "swapped")])
def test_log_probabilities_at_every_position(name: str, way: str) -> None:
    """L 80: of a plain forward, also directly behind a prefix hit, a chunk's border, a resume and a swap-in."""
    model, inputs, expected = family(name)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        right = [
            torch.log_softmax(model(torch.tensor([prompt + tokens]), use_cache=False).logits[0].double(), -1)
            for prompt, tokens in zip(inputs, expected, strict=True)
        ]
    engine = engine_for(model, inputs, 4, 0.35, max_chunk_tokens=24, **KEPT[way])
    seen = EveryPosition(engine)
    assert engine.generate(inputs, GREEDY) == expected
    assert forced_out(engine)
    for i in reversed(range(len(inputs))):  # what ran last is there still
        engine.add(f"r{i}", inputs[i], GREEDY, arrival=-i)
    ends = engine.run()
    assert [ends[f"r{i}"].token_ids.tolist() for i in range(len(inputs))] == expected
    assert EXPECTED_STARTS[way] <= set(seen.behind), "some kind of start did not come"
    assert set(seen.logits) >= set().union(*seen.behind.values())
    for (request_id, position), times in seen.logits.items():
        for logits in times:
            difference = torch.log_softmax(logits.double(), -1) - right[int(request_id[1:])][position]
            assert difference.abs().max() < 1e-4, (request_id, position)
    computed = {place for place in seen.logits if place[0] == "r11"}
    assert computed == {("r11", position) for position in range(LENGTHS[11] + NEW - 1)}
