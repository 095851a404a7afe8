"""The engine gives the tokens and logits of plain transformers, whatever the blocks, chunks, seats and pool."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from engines import TinyEngine, blocks_needed, plain, prompts
from families import FAMILIES, VOCAB, tiny

from pagetide.scheduler.request import Sampling

LENGTHS = [1, 2, 7, 15, 16, 17, 33, 64, 99, 100, 180, 300]
NEW = 20
GREEDY = Sampling(NEW)
# (block size, tokens a chunk, seats, pool as a share of the joint need; 0 is just enough for the longest)
CASES = [
    (4, 1, 12, 1.0), (4, None, 12, 0.3), (16, 1, 3, 0.5), (16, 7, 12, 0.4), (16, None, 1, 0.0),
    (100, 7, 3, 0.5), (100, None, 12, 0.5), (256, 7, 12, 0.0), (256, None, 3, 0.5),
]  # fmt: skip
# Together these have all that attention can be asked for; what is not tried with the others here is in `make stress`.
ATTENDING = ("llama", "qwen3", "mistral", "gemma2", "gpt2", "gpt_oss")
MOSTLY_STRESS = [pytest.param(name, marks=() if name in ATTENDING else pytest.mark.stress) for name in FAMILIES]
# Those whose positions differ in kind: none to learn, learned ones, windows.
KEEPING = ("llama", "gemma2", "gpt2")
MORE_STRESS = [pytest.param(name, marks=() if name in KEEPING else pytest.mark.stress) for name in FAMILIES]
# Each family in some of the cases, the two with the least room first; tests/stress has every combination for all.
SOME = [(1, 6, 4), (3, 6, 0, 2), (1, 6, 5), (3, 6, 7, 8)]


@functools.cache
def family(name: str):
    model = tiny(name)
    inputs = prompts(LENGTHS, VOCAB)
    return model, inputs, plain(model, inputs, NEW)


def engine_for(model, inputs, case, **more) -> TinyEngine:
    block_size, chunk, num_rows, share = case
    just_enough = -(-(max(LENGTHS) + NEW - 1) // block_size)
    usable = max(just_enough, int(share * blocks_needed(inputs, NEW, block_size)))
    return TinyEngine(model, usable=usable, block_size=block_size, max_seqs=num_rows, max_chunk_tokens=chunk, **more)


@pytest.mark.parametrize("name", FAMILIES)
def test_same_tokens_as_plain_transformers(name):
    model, inputs, expected = family(name)
    preemptions = 0
    some = SOME[list(FAMILIES).index(name) % len(SOME)]
    for case in [CASES[i] for i in (some if name in ATTENDING else some[:2])]:
        few = 8 if case[1] == 1 else len(inputs)  # a token at a time takes a step for each
        engine = engine_for(model, inputs[:few], case)
        assert engine.generate(inputs[:few], GREEDY) == expected[:few], case
        preemptions += engine.preemptions
    assert preemptions >= 2, "nothing was forced out"


@pytest.mark.parametrize("name", MOSTLY_STRESS)
def test_same_logits_behind_chunks_and_resumes(name):
    model, inputs, expected = family(name)
    engine = engine_for(model, inputs, (4, 7, 12, 0.3))
    engine.watch_logits()
    assert engine.generate(inputs, GREEDY) == expected
    assert engine.preemptions > 0
    model.set_attn_implementation("eager")
    for i, (prompt, tokens) in enumerate(zip(inputs, expected, strict=True)):
        with torch.inference_mode():
            right = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
        for position in range(len(prompt), len(prompt) + NEW):
            ours = engine.logits[f"r{i}", position]
            torch.testing.assert_close(ours, right[position - 1], rtol=1e-4, atol=1e-4)
            log_probs = torch.log_softmax(ours.double(), -1), torch.log_softmax(right[position - 1].double(), -1)
            assert (log_probs[0] - log_probs[1]).abs().max() < 1e-4


@pytest.mark.parametrize("name", MORE_STRESS)
def test_same_tokens_and_logits_behind_cached_prefixes(name):
    """Twice the same prompts, and longer ones behind them: most of it is found, under pressure too."""
    model, inputs, expected = family(name)
    # Behind the prompt stands what was generated, so that a second turn goes on with the very tokens of the first.
    turns = [prompt + tokens[:12] for prompt, tokens in zip(inputs, expected, strict=True)]
    for case in (4, 7, 12, 0.5), (100, None, 12, 0.7):
        engine = engine_for(model, inputs, case, caching=True)
        stats = engine.core.scheduler.stats
        engine.watch_logits()
        assert engine.generate(inputs, GREEDY) == expected, case
        first = stats.prefix_lookups.hit_tokens
        chosen = sorted(range(len(inputs)), key=lambda i: i * 7 % len(inputs))[1::2]
        for i in chosen:
            assert engine.generate([inputs[i]], GREEDY) == [expected[i]], (case, i)
            assert engine.generate([turns[i]], Sampling(NEW - 12)) == [expected[i][12:]], (case, i)
        # With windows, hits end where each layer can go on: at the ends of prompts and sequences, in whole blocks.
        share = 0.95 if engine.core.scheduler.cache.row_tables.has_windows else 1
        assert stats.prefix_lookups.hit_tokens > first + share * sum(LENGTHS[i] for i in chosen), case
        engine.core.scheduler.check_invariants()
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            right = model(torch.tensor([turns[chosen[-1]] + expected[chosen[-1]][12:]]), use_cache=False).logits[0]
        for position in range(len(turns[chosen[-1]]), len(turns[chosen[-1]]) + NEW - 12):
            ours = engine.logits["r0", position]
            difference = torch.log_softmax(ours.double(), -1) - torch.log_softmax(right[position - 1].double(), -1)
            assert difference.abs().max() < 1e-4


# -- tests of the tests: a planted fault changes tokens ----------------------------------------------------------------


def shift_tables(engine: TinyEngine) -> None:
    rows = engine.core.runner._rows
    context = rows.context

    def shifted(*how):
        tables = [table.clone() for table in rows.tables]
        for table in rows.tables:
            table[:, 1:] = table[:, :-1].clone()
        try:
            return context(*how)
        finally:
            for table, whole in zip(rows.tables, tables, strict=True):
                table.copy_(whole)

    rows.context = shifted


def drop_last_block(engine: TinyEngine) -> None:
    kernel = engine.core.runner.kernel
    attend = kernel.attend

    def dropped(call):
        step = call.step
        if step.num_decodes == len(step.q_lens):
            for table in step.tables:
                table[range(len(step.kv_lens)), torch.as_tensor((step.kv_lens - 1) // step.block_size)] = 0
        return attend(call)

    kernel.attend = dropped


def change_window(by: int):
    def plant(engine: TinyEngine) -> None:
        kernel = engine.core.runner.kernel
        attend = kernel.attend

        def changed(call):
            return attend(replace(call, window=call.window and call.window + by))

        kernel.attend = changed

    return plant


def shift_positions(engine: TinyEngine) -> None:
    """Only behind the first chunk: a rotation by one everywhere would change nothing."""
    rows = engine.core.runner._rows
    context = rows.context

    def shifted(*how):
        step, ids, positions = context(*how)
        return step, ids, positions + (positions > 9)

    rows.context = shifted


def write_elsewhere(engine: TinyEngine) -> None:
    rows = engine.core.runner._rows
    context = rows.context

    def moved(*how):
        step, ids, positions = context(*how)
        step.write_offsets[:] = (step.write_offsets + 1) % step.block_size
        return step, ids, positions

    rows.context = moved


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("llama", shift_tables), ("llama", drop_last_block), ("mistral", change_window(1)),
        ("mistral", change_window(-1)), ("llama", shift_positions), ("llama", write_elsewhere),
    ],
    ids=["table shifted", "last block dropped", "window + 1", "window - 1", "position + 1", "offset + 1"],
)  # fmt: skip
def test_planted_faults_are_noticed(name, plant):
    model, inputs, expected = family(name)
    engine = engine_for(model, inputs, (16, 7, 12, 1.0))
    plant(engine)
    for i, prompt in enumerate(inputs):
        engine.add(f"r{i}", prompt, GREEDY, arrival=float(i))
    ends = engine.run()
    assert [ends[f"r{i}"].token_ids.tolist() for i in range(len(inputs))] != expected


# -- faults of the model -----------------------------------------------------------------------------------------------


def test_a_request_that_breaks_the_model_ends_alone(caplog):
    """The forward raises whenever a certain token is in the batch: its request ends, the others' tokens are the same."""
    model, inputs, expected = family("llama")
    poison = next(t for t in range(VOCAB) if all(t not in one for one in [*inputs[:4], *expected]))
    inputs, expected = inputs[:4], expected[:4]
    engine = engine_for(model, inputs, (16, None, 12, 2.0))
    forward = model.forward
    engine.core.runner.model = lambda **kw: (
        (_ for _ in ()).throw(RuntimeError("bad token")) if (kw["input_ids"] == poison).any() else forward(**kw)
    )
    for i, prompt in enumerate(inputs):
        engine.add(f"r{i}", [poison, *prompt] if i == 2 else prompt, GREEDY, arrival=float(i))
    ends = engine.run()
    assert (ends["r2"].reason, ends["r2"].error) == ("error", "RuntimeError: bad token")
    assert all(ends[f"r{i}"].token_ids.tolist() == expected[i] for i in (0, 1, 3))


def test_a_fault_of_one_step_costs_nobody_a_token(caplog):
    model, inputs, expected = family("llama")
    engine = engine_for(model, inputs, (16, None, 12, 1.0))
    calls = iter(range(10**6))

    def flaky(**keywords):
        if next(calls) == 7:
            raise RuntimeError("once")
        return model(**keywords)

    engine.core.runner.model = flaky
    assert engine.generate(inputs, GREEDY) == expected


def test_logits_that_are_no_numbers_end_their_request(caplog):
    model, inputs, expected = family("llama")
    engine = engine_for(model, inputs, (16, None, 12, 1.0))
    sample = engine.core.runner.sampler.sample

    def broken(rows, positions, logits):
        for i, row in enumerate(rows):
            if engine.core.scheduler.rows.request_ids[row] == "r3" and positions[i] > len(inputs[3]) + 4:
                logits[i] = float("nan")
        return sample(rows, positions, logits)

    engine.core.runner.sampler.sample = broken
    for i, prompt in enumerate(inputs):
        engine.add(f"r{i}", prompt, GREEDY, arrival=float(i))
    ends = engine.run()
    assert ends["r3"].reason == "error"
    assert "not finite" in ends["r3"].error
    assert ends["r3"].token_ids.tolist() == expected[3][:5]
    assert all(ends[f"r{i}"].token_ids.tolist() == tokens for i, tokens in enumerate(expected) if i != 3)


def test_a_runner_that_raises_ends_the_requests_of_its_step_only(caplog):
    model, inputs, expected = family("llama")
    engine = engine_for(model, inputs, (16, None, 6, 1.0))
    begin, calls = engine.core.runner.begin, iter(range(10**6))

    def broken(plan):
        if next(calls) == 3:
            raise RuntimeError("lost the device")
        return begin(plan)

    engine.core.runner.begin = broken
    for i, prompt in enumerate(inputs):
        engine.add(f"r{i}", prompt, GREEDY, arrival=float(i))
    ends = engine.run()
    failed = [i for i in range(len(inputs)) if ends[f"r{i}"].reason == "error"]
    assert failed == [0, 1, 2, 3, 4, 5]
    assert all(ends[f"r{i}"].token_ids.tolist() == expected[i] for i in range(6, 12))


# -- seeds -------------------------------------------------------------------------------------------------------------


def sampled(seed: int, **more) -> Sampling:
    return Sampling(NEW, temperature=0.9, top_k=40, top_p=0.95, seed=seed, **more)


def test_a_seed_is_a_promise():
    """Alone, in a batch of wild neighbours, after preemption, in another order: the same tokens."""
    model, inputs, _ = family("llama")
    settings = [sampled(i, repetition_penalty=1.0 + 0.1 * (i % 3), min_p=0.02 * (i % 2)) for i in range(12)]
    alone = []
    for prompt, one in zip(inputs, settings, strict=True):
        alone += engine_for(model, inputs, (16, None, 1, 1.0)).generate([prompt], one)
    together = engine_for(model, inputs, (16, 7, 12, 1.0)).generate(inputs, settings)
    assert together == alone
    pressed = engine_for(model, inputs, (4, 7, 12, 0.3))
    assert pressed.generate(inputs, settings) == alone
    assert pressed.preemptions > 0
    assert engine_for(model, inputs, (16, None, 3, 0.4)).generate(inputs[::-1], settings[::-1]) == alone[::-1]
    others = engine_for(model, inputs, (16, None, 12, 1.0)).generate(inputs, [sampled(100 + i) for i in range(12)])
    assert others != alone


def test_parameters_do_not_leak_between_neighbours():
    model, inputs, expected = family("llama")
    settings = [GREEDY if i % 2 else sampled(i, repetition_penalty=1.7, min_new_tokens=9) for i in range(12)]
    got = engine_for(model, inputs, (4, 7, 12, 0.3)).generate(inputs, settings)
    assert [t for i, t in enumerate(got) if i % 2] == [t for i, t in enumerate(expected) if i % 2]


def test_repetition_penalty_sees_prompt_and_output_also_after_a_resume():
    """Against transformers' own processor, with the pool plentiful and then too small."""
    model, inputs, _ = family("llama")
    model.set_attn_implementation("eager")
    expected = []
    for prompt in inputs:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0, repetition_penalty=1.4
        )
        expected.append(ids[0, len(prompt) :].tolist())
    penalised = Sampling(NEW, repetition_penalty=1.4)
    assert engine_for(model, inputs, (16, None, 12, 1.0)).generate(inputs, penalised) == expected
    pressed = engine_for(model, inputs, (4, 7, 12, 0.3))
    assert pressed.generate(inputs, penalised) == expected
    assert pressed.preemptions > 0
