"""Plans over the shards of a model, in threads: the tokens and logits of one device, whatever happens on the way."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_kernel import DenseKernel
from engines import TinyEngine, prompts
from sharded_engines import ShardedTinyEngine, geometry_of, saved, undivided
from tape import Tape, recorder

from pagetide.scheduler.request import Sampling

VOCAB = 160
INPUTS = prompts([3, 17, 9, 30, 5], VOCAB)
INPUTS.append([*INPUTS[3][:24], 7, 8])  # a prefix that another has
NEW = 14
SURE = 1e-3  # margin between the two best logits above which the token must be the same
PAIRS = [("llama", 4), ("mistral", 2), ("gemma2", 2), ("qwen3_moe", 4)]  # a model and its number of shards


@cache
def right_of(name: str) -> tuple[dict[str, list[int]], dict[tuple[str, int], torch.Tensor]]:
    """Tokens and logits of one device, with nothing in the way."""
    engine = TinyEngine(undivided(name), usable=200, block_size=4, max_model_len=64)
    engine.watch_logits()
    tokens = engine.generate(INPUTS, Sampling(NEW))
    return {f"r{i}": one for i, one in enumerate(tokens)}, engine.logits


def compare(name: str, engine: ShardedTinyEngine, tokens: list[list[int]]) -> float:
    """Check tokens and logits of `engine` against one device's. Returns the share of tokens that had to be the same."""
    right, logits = right_of(name)
    sure = total = 0
    for i, found in enumerate(tokens):
        request, prompt = f"r{i}", len(INPUTS[i])
        for j in range(NEW):
            at = (request, prompt + j)
            # 2e-6 to 5e-5 mostly; a norm of a small state makes it 1.2e-4 with sums in the order of one processor's library.
            assert torch.allclose(engine.logits[at], logits[at], rtol=0, atol=5e-4), (request, j)
            best = logits[at].topk(2).values
            total += 1
            sure += int(best[0] - best[1] > SURE)
            if found[j] != right[request][j]:
                assert best[0] - best[1] <= SURE, (request, j)
                break  # another history from here on
    return sure / total


def made(name: str, size: int, folder: Path, **pool: Any) -> ShardedTinyEngine:
    _, checkpoint = saved(name, folder)
    engine = ShardedTinyEngine(checkpoint, size, max_model_len=64, **{"usable": 200} | pool)
    engine.watch_logits()
    return engine


@pytest.mark.parametrize(("name", "size"), PAIRS)
def test_chunks_preemptions_prefixes_and_a_host_tier_change_nothing(name: str, size: int, tmp_path: Path) -> None:
    usable = 14 if name == "mistral" else 26  # its layers keep the last tokens only
    engine = made(name, size, tmp_path, usable=usable, max_step_tokens=12, caching=True, host_slots=12)
    share = compare(name, engine, engine.generate(INPUTS, Sampling(NEW)))
    stats = engine.core.scheduler.stats
    assert share > 0.95
    assert stats.demoted_blocks and stats.prefix_lookups.hit_tokens
    assert stats.preemptions or name == "mistral", "of which no layer keeps more than some tokens"


@pytest.mark.parametrize(("name", "size"), PAIRS)
def test_a_pool_that_shrinks_and_grows_in_between_changes_nothing(name: str, size: int, tmp_path: Path) -> None:
    engine = made(name, size, tmp_path, usable=120, caching=True)
    engine.add_all(INPUTS, Sampling(NEW))
    ends, pool = {}, engine.core.scheduler.pool
    for step in itertools.count():
        if not engine.core.has_work:
            break
        if step % 3 == 1:
            pool.give_back(99)  # all but what requests hold, which moves together
        elif step % 3 == 2:
            pool.grow(7)
        ends.update({end.request_id: end for end in engine.core.step().finished})
        engine.core.scheduler.check_invariants()
        for runner in engine.runner.runners:
            assert runner.arena.mapped_extents == engine.runner.arena.mapped_extents
    compare(name, engine, [ends[f"r{i}"].token_ids.tolist() for i in range(len(INPUTS))])
    stats = engine.core.scheduler.stats
    assert stats.grown_extents and stats.given_back_extents
    assert stats.moved_blocks or engine.core.scheduler.cache.pool.blocks_per_extent == 1


def test_what_one_shard_cannot_map_none_keeps(tmp_path: Path) -> None:
    engine = made("llama", 2, tmp_path, usable=120)
    pool, arenas = engine.core.scheduler.pool, [runner.arena for runner in engine.runner.runners]
    pool.give_back(12)
    engine.core.step()
    mapped = engine.runner.arena.mapped_extents
    arenas[1].full = True
    engine.add_all(INPUTS, Sampling(NEW))
    pool.grow(6)
    engine.core.step()
    assert engine.runner.arena.mapped_extents == mapped == arenas[1].mapped_extents
    assert len(arenas[0].mapped_extents) == len(mapped) + 6, "until the next plan"
    assert engine.core.scheduler.stats.refused_resizes == 1
    engine.core.step()
    assert arenas[0].mapped_extents == mapped
    arenas[1].full = False
    pool.grow(6)
    tokens = {end: one.token_ids.tolist() for end, one in engine.run().items()}
    assert len(engine.runner.arena.mapped_extents) == len(mapped) + 6
    compare("llama", engine, [tokens[f"r{i}"] for i in range(len(INPUTS))])


@pytest.mark.parametrize(("name", "size"), PAIRS[:2])
def test_recorded_steps_with_collectives_give_the_same_tokens(name: str, size: int, tmp_path: Path) -> None:
    engine = made(name, size, tmp_path, max_step_tokens=16, kernel=DenseKernel)
    tapes: list[list[Tape]] = [[] for _ in range(size)]
    order = {id(runner): rank for rank, runner in enumerate(engine.runner.runners)}
    engine.runner.on_all(lambda runner: runner.record((1, 2, 4, 8), recorder(tapes[order[id(runner)]])))
    compare(name, engine, engine.generate(INPUTS, Sampling(NEW)))
    for rank, runner in enumerate(engine.runner.runners):
        assert runner.graphs.sizes == (1, 2, 4, 8), "none was found to be wrong"
        assert sum(tape.num_replays for tape in tapes[rank]) > 8


def test_a_graph_that_one_shard_does_not_trust_none_uses(tmp_path: Path) -> None:
    engine = made("llama", 2, tmp_path, kernel=DenseKernel)
    engine.runner.on_all(lambda runner: runner.record((8,), recorder([])))
    graphs = engine.runner.runners[1].graphs
    replay = graphs._replays[8]
    graphs._replays[8] = lambda: (replay(), graphs._logits.add_(torch.rand_like(graphs._logits)))[0]
    compare("llama", engine, engine.generate(INPUTS, Sampling(NEW)))
    assert [runner.graphs.sizes for runner in engine.runner.runners] == [(), ()]


def test_steps_that_overlap_pass_tokens_on_the_device(tmp_path: Path) -> None:
    engine = made("mistral", 2, tmp_path, usable=60, max_step_tokens=12, caching=True, overlaps=True)
    right, _ = right_of("mistral")
    tokens = engine.generate(INPUTS, Sampling(NEW))
    assert {f"r{i}": one for i, one in enumerate(tokens)} == right


def test_beams_forks_penalties_and_seeds_are_those_of_one_device(tmp_path: Path) -> None:
    each = [
        Sampling(NEW, temperature=1.0, seed=3), Sampling(NEW, repetition_penalty=1.4),
        Sampling(NEW, temperature=0.7, top_k=9, seed=5), Sampling(NEW, temperature=1.3, top_p=0.8, min_p=0.02, seed=8),
        Sampling(NEW, logprobs=3), Sampling(NEW, prompt_logprobs=2),
    ]  # fmt: skip
    right = TinyEngine(undivided("qwen3"), usable=200, block_size=4, max_model_len=64).generate(INPUTS, each)
    engine = made("qwen3", 2, tmp_path, usable=40, max_step_tokens=16, caching=True, host_slots=6)
    assert engine.generate(INPUTS, each) == right


@pytest.mark.parametrize("rank", [1, 0])
def test_every_shard_has_all_states(rank: int, tmp_path: Path) -> None:
    """Chunks, prefixes, and faults on one shard, between layers and within a mixer behind a kernel, change no token."""
    _, checkpoint = saved("qwen3_5", tmp_path)
    engine = ShardedTinyEngine(checkpoint, 2, max_model_len=64, usable=60, max_step_tokens=12, caching=True)
    engine.watch_logits()
    calls, layers = itertools.count(), engine.runner.runners[rank].model.model.layers

    def fail(*_: Any) -> None:
        if next(calls) in (20, 21, 40, 60, 61):
            raise RuntimeError("planted")

    layers[1].mlp.register_forward_pre_hook(fail)
    layers[2].linear_attn.norm.register_forward_hook(fail)
    assert compare("qwen3_5", engine, engine.generate(INPUTS, Sampling(NEW))) > 0.9
    assert next(calls) > 61
    whole, part = geometry_of(checkpoint, 4, max_tokens=64), engine.runner.runners[rank].storage.geometry
    assert part.state_bytes == whole.state_bytes and 2 * part.kv_bytes_per_token == whole.kv_bytes_per_token


@pytest.mark.parametrize(("rank", "times"), [(0, 3), (1, 1)])
def test_a_step_that_fails_on_one_shard_is_repeated_on_all(rank: int, times: int, tmp_path: Path) -> None:
    engine = made("llama", 2, tmp_path, max_step_tokens=24, caching=True)
    calls, failing = itertools.count(), range(3, 3 + times)

    def fail(module: Any, args: Any) -> None:
        if next(calls) in failing:
            raise RuntimeError("CUDA out of memory, says a test")

    engine.runner.runners[rank].model.model.layers[1].mlp.register_forward_pre_hook(fail)
    compare("llama", engine, engine.generate(INPUTS, Sampling(NEW)))
    assert next(calls) > failing[-1] + 1


def test_a_request_that_fails_again_and_again_on_one_shard_ends_alone(tmp_path: Path) -> None:
    engine = made("llama", 2, tmp_path)
    bad = 159

    def poisoned(module: Any, args: Any, kwargs: Any) -> None:
        if bool((kwargs["input_ids"] == bad).any()):
            raise RuntimeError("this token breaks the shard")

    engine.runner.runners[1].model.register_forward_pre_hook(poisoned, with_kwargs=True)
    engine.add_all([*INPUTS[:3], [4, 9, bad, 2]], Sampling(NEW))
    ends = engine.run()
    assert ends["r3"].reason == "error" and "this token breaks the shard" in ends["r3"].error
    right, _ = right_of("llama")
    for i in range(3):
        found, sure = ends[f"r{i}"].token_ids.tolist(), right[f"r{i}"]
        assert found == sure[: len(found)] and ends[f"r{i}"].reason == "length"


def test_sampling_that_fails_on_the_first_shard_ends_its_request_alone(tmp_path: Path) -> None:
    def bad(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    engine = made("llama", 2, tmp_path)
    sampler, admit = engine.runner.sampler, engine.runner.sampler.admit

    def failing(row: int, sampling: Sampling, *more: Any) -> None:
        if sampling.seed == 77:
            raise RuntimeError("it cannot be admitted")
        admit(row, sampling, *more)

    sampler.admit = failing
    each = [Sampling(NEW), Sampling(NEW, logits_processors=(bad,)), Sampling(NEW, seed=77), Sampling(NEW)]
    engine.add_all(INPUTS[:4], each)
    ends = engine.run()
    right, _ = right_of("llama")
    assert [ends[f"r{i}"].reason for i in range(4)] == ["length", "error", "error", "length"]
    assert "it cannot be admitted" in ends["r2"].error
    assert [ends[f"r{i}"].token_ids.tolist() for i in (0, 3)] == [right["r0"], right["r3"]]
