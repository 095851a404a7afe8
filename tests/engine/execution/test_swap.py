"""Swapping with real tensors: the tokens and logits of plain transformers, whatever has to leave the device and come back."""

from __future__ import annotations

import functools
import json
import threading
from concurrent import futures
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import TinyEngine, blocks_needed, plain, prompts
from families import VOCAB, tiny

from pagetide import LLM, SamplingParams
from pagetide.allocator.errors import OutOfDeviceMemory
from pagetide.allocator.host_arena import HostArena
from pagetide.cache.geometry import Geometry
from pagetide.cache.host_tier import Swaps
from pagetide.cache.storage import Storage
from pagetide.engine.errors import ConfigError, NotEnoughMemory
from pagetide.engine.execution.host_pool import NONE, HostPool
from pagetide.scheduler.plan import NO_EXTENTS, NO_TOKENS, Plan
from pagetide.scheduler.request import Sampling

LENGTHS = [1, 7, 16, 33, 64, 99, 130, 180]
NEW = 20
GREEDY = Sampling(NEW)
# The shares of pools in which some are forced out, where windows give blocks back. These are 55 blocks: the longest sequence
# takes 53, and the first five hold 44 when they are admitted, and 69 in the end.
SHARES = {"gemma2": 0.3, "gpt_oss": 0.3}


@functools.lru_cache(maxsize=1)
def family(name: str):
    model = tiny(name)
    inputs = prompts(LENGTHS, VOCAB)
    return model, inputs, plain(model, inputs, NEW)


def engine_for(model, inputs, block_size: int, share: float, host_slots: int, **more) -> TinyEngine:
    """An engine whose pool is `share` of what all need together, and at least what the longest does."""
    least = -(-(max(LENGTHS) + NEW - 1) // block_size)
    usable = max(least, int(share * blocks_needed(inputs, NEW, block_size)))
    return TinyEngine(model, usable=usable, block_size=block_size, caching=True, host_slots=host_slots, **more)


# ---- the same tokens and logits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(n, marks=pytest.mark.stress) for n in ("gemma2", "gpt2", "gpt_oss", "mistral", "qwen3"))],
)
def test_same_tokens_and_logits_with_a_host_tier_too_small_exact_and_ample(name):
    """D 34, 35; L 77, 80. Twice the prompts, so that what was demoted is found again as well."""
    model, inputs, expected = family(name)
    needed = blocks_needed(inputs, NEW, 4)
    for slots in 0, 5, needed, 4 * needed:
        engine = engine_for(model, inputs, 4, SHARES.get(name, 0.4), slots, max_chunk_tokens=29)
        engine.watch_logits()
        stats = engine.core.scheduler.stats
        assert engine.generate(inputs, GREEDY) == expected, slots
        assert stats.preemptions > 0
        for _ in range(2):
            for i in sorted(range(len(inputs)), key=lambda i: i * 5 % len(inputs)):
                assert engine.generate([inputs[i]], GREEDY) == [expected[i]], (slots, i)
        assert (stats.demoted_blocks > 0) == (slots > 0) >= (stats.promoted_blocks > 0)
        if slots >= needed:
            assert stats.recomputed_tokens == 0, "everything that was computed came back"
            assert stats.promoted_blocks > (0 if engine.core.scheduler.cache.row_tables.has_windows else needed // 2)
        assert (
            engine.host is None
            or engine.core.scheduler.cache.host.num_used <= engine.core.scheduler.cache.host.capacity
        )
        longest = max(range(len(inputs)), key=lambda i: len(inputs[i]))
        assert engine.generate([inputs[longest]], GREEDY) == [expected[longest]]
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            right = model(torch.tensor([inputs[longest] + expected[longest]]), use_cache=False).logits[0]
        for position in range(len(inputs[longest]), len(inputs[longest]) + NEW):
            ours = engine.logits["r0", position]
            difference = torch.log_softmax(ours.double(), -1) - torch.log_softmax(right[position - 1].double(), -1)
            assert difference.abs().max() < 1e-4


def test_samples_with_seeds_are_the_same_behind_a_swap():
    """L 78, 79."""
    model, inputs, _ = family("llama")
    settings = [Sampling(NEW, temperature=0.9, top_k=40, seed=i, repetition_penalty=1.3) for i in range(len(inputs))]
    alone = [engine_for(model, inputs, 16, 1.0, 0).generate([p], s)[0] for p, s in zip(inputs, settings, strict=True)]
    engine = engine_for(model, inputs, 4, 0.4, 500)
    assert engine.generate(inputs, settings) == alone
    assert engine.core.scheduler.stats.promoted_blocks > 0 == engine.core.scheduler.stats.recomputed_tokens


# ---- host memory (D 33, 34) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn"])
def test_a_round_trip_is_exact_to_the_bit(dtype):
    """D 33. Ten blocks with patterns of their own go out, are overwritten, and come back to other ids."""
    model, _, _ = family("llama")
    geometry = Geometry.from_config(model.config, block_size=16, dtype=dtype).with_extents(64 << 10)
    arena = HostArena(geometry.extents_for_blocks(40), geometry.extent_bytes)
    arena.map(range(arena.num_extents))
    storage = Storage(geometry, arena)
    rng = np.random.default_rng(0)
    blocks = rng.permutation(np.arange(1, 20, dtype=np.int32))[:10]
    patterns = rng.integers(0, 256, (10, geometry.payload_bytes), dtype=np.uint8)  # NaNs and all
    for block, pattern in zip(blocks.tolist(), patterns, strict=True):
        storage.block_bytes(block).copy_(torch.from_numpy(pattern))
    pool = HostPool(geometry, geometry.bytes_for_blocks(30))
    slots = rng.permutation(np.arange(1, pool.num_slots + 1, dtype=np.int32))[:10]
    assert not len(pool.swap(storage, blocks, slots).lost_slots)
    storage.clear(np.arange(1, storage.num_blocks))
    back = np.arange(21, 31, dtype=np.int32)
    pool.swap(storage, NONE, NONE, slots, back)
    for block, pattern in zip(back.tolist(), patterns, strict=True):
        assert storage.block_bytes(block).tolist() == pattern.tolist()
    assert not storage.blocks[1:21].any(), "nothing else is written"
    pool.close()
    pool.close()
    arena.close()


def test_memory_comes_as_slots_are_written_and_goes_at_the_end():
    model, _, _ = family("llama")
    geometry = Geometry.from_config(model.config, block_size=16, dtype="float32").with_extents(64 << 10)
    per = geometry.blocks_per_extent
    pool = HostPool(geometry, 5 * geometry.extent_bytes + 17)
    assert (pool.num_slots, pool.mapped_bytes) == (5 * per - 1, 0)
    arena = HostArena(2, geometry.extent_bytes)
    arena.map([0, 1])
    storage = Storage(geometry, arena)
    pool.swap(storage, np.array([1], np.int32), np.array([1], np.int32))
    assert pool.mapped_bytes == geometry.extent_bytes
    pool.swap(storage, np.array([1, 2], np.int32), np.array([4 * per, 2], np.int32))
    assert pool.mapped_bytes == 2 * geometry.extent_bytes
    pool.close()
    assert pool.mapped_bytes == 0
    arena.close()
    with pytest.raises(ValueError, match="hold no block"):
        HostPool(geometry, geometry.bytes_for_blocks(2) - 1)


def refuse_memory(engine: TinyEngine, after: int) -> None:
    """From the host's extent number `after` on there is none."""
    arena = engine.host._extents._arena
    map_ = arena.map

    def refused(extents):
        if len(arena.mapped_extents) + len(extents) > after:
            raise OutOfDeviceMemory(1, 0, "host memory")
        map_(extents)

    arena.map = refused


def test_a_host_without_memory_costs_nobody_a_token(caplog):
    """What could not be written is forgotten, and the tier stays as large as it is."""
    model, inputs, expected = family("llama")
    for after in 0, 9:
        engine = engine_for(model, inputs, 4, 0.4, 100)
        refuse_memory(engine, after)
        assert engine.generate(inputs, GREEDY) == expected
        assert [engine.generate([p], GREEDY)[0] for p in inputs] == expected
        tier = engine.core.scheduler.cache.host
        assert tier.num_used <= tier.num_slots < 100
        assert engine.host.mapped_bytes <= after * engine.host._extents._arena.extent_bytes
        assert "host tier stays at" in caplog.text


@pytest.mark.parametrize("kind", ["in", "out"])
@pytest.mark.parametrize("always", [False, True])
def test_a_swap_that_fails_costs_nobody_a_token(kind, always, caplog):
    """It is made again once; after that, what was not copied is not found, and who needs it computes it again."""
    model, inputs, expected = family("llama")
    engine = engine_for(model, inputs, 4, 0.4, 500)
    copy, num_raised = engine.host._copy, 0

    def broken(device, out_blocks, out_slots, in_slots, in_blocks):
        nonlocal num_raised
        if len(in_slots if kind == "in" else out_slots) and (always or not num_raised):
            num_raised += 1
            raise RuntimeError("lost the host")
        return copy(device, out_blocks, out_slots, in_slots, in_blocks)

    engine.host._copy = broken
    assert engine.generate(inputs, GREEDY) == expected
    assert num_raised == 1 or (always and num_raised % 2 == 0)
    engine.host._copy = copy
    assert engine.generate(inputs, GREEDY) == expected
    assert engine.core.scheduler.cache.host.num_used


def test_aborts_in_every_phase_leave_no_slot_behind():
    """H 59."""
    model, inputs, expected = family("llama")
    for when in range(2, 40, 5):
        engine = engine_for(model, inputs, 4, 0.4, 500, max_chunk_tokens=29)
        core = engine.core
        for i, prompt in enumerate(inputs):
            engine.add(f"r{i}", prompt, GREEDY, arrival=float(i))
        ends = {}
        for step in range(1000):
            if step == when:
                for name in ("r7", "r5", "r2"):
                    core.abort(name)
            if not core.has_work:
                break
            ends.update({end.request_id: end for end in core.step().finished})
            core.scheduler.check_invariants()
        for i, tokens in enumerate(expected):
            got = ends[f"r{i}"].token_ids.tolist()
            assert got == tokens[: len(got)] and (len(got) == NEW or i in (7, 5, 2))
        host = core.scheduler.cache.host
        assert not host.tails
        core.scheduler.cache.reset()
        assert host.num_used == 0 and core.scheduler.cache.pool.counts().cached == 0


def test_a_runner_without_a_host_tier_refuses_to_swap():
    model, inputs, _ = family("llama")
    engine = engine_for(model, inputs, 4, 1.0, 0)
    one = np.array([1], np.int32)
    plan = Plan(
        0, NO_EXTENTS, NO_EXTENTS, NO_EXTENTS, NO_EXTENTS.astype(bool), swaps=Swaps(one, one, NO_TOKENS, NO_TOKENS)
    )  # fmt: skip
    assert plan.moves_memory and not plan.is_empty
    with pytest.raises(Exception, match="without a host tier cannot swap"):
        engine.core.runner.begin(plan)


# ---- the engine's option --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    model, _, _ = family("llama")
    model.save_pretrained(path)
    return path


def admit_whatever_fits(llm: LLM) -> None:
    """Else the forecast, which knows how long these outputs may be, lets nobody in who has to give way."""
    scheduler = llm._manager.open().core.scheduler
    scheduler.limits = replace(scheduler.limits, forecast=False)


def test_an_engine_swaps_within_its_host_memory(saved):
    """C 27 too: what was asked for is what comes back, however often it was preempted, and counts once."""
    model, _, _ = family("llama")
    inputs = prompts([120] * 24, VOCAB, seed=1)
    expected = plain(model, inputs, 12)
    options = {"device": "cpu", "dtype": "float32", "share": False, "kv_memory": 1 << 20, "block_size": 4}
    with LLM(saved, host_kv_memory="4MiB", **options) as llm:
        assert llm.config.host_kv_memory == 4 << 20
        before = llm.stats()["host_tier"]
        assert (before["bytes"], before["used_blocks"], before["swapped_out_bytes"]) == (0, 0, 0)
        params = SamplingParams(max_new_tokens=12, temperature=0.0)
        admit_whatever_fits(llm)
        for _ in range(2):
            outputs = llm.generate(inputs, params)
            assert [output.token_ids for output in outputs] == expected
            assert [output.prompt_token_ids for output in outputs] == inputs
            assert any(output.num_preemptions for output in outputs)
        after = llm.stats()["host_tier"]
        assert after["swapped_out_bytes"] > 0 and 0 < after["bytes"] <= 4 << 20
        assert 0 < after["used_blocks"] <= after["total_blocks"]
        json.dumps(after)
        json.dumps(llm.explain())
        pool = llm._manager.open().core.runner.host
    assert pool.mapped_bytes == 0
    with LLM(saved, prefix_caching=False, **options) as llm:
        assert llm.stats()["host_tier"] is None
        admit_whatever_fits(llm)
        outputs = llm.generate(inputs, params)
        assert [(output.prompt_token_ids, output.token_ids) for output in outputs] == list(
            zip(inputs, expected, strict=True)
        )
        stats = llm.stats()
        assert any(output.num_preemptions for output in outputs) and stats["recomputed_tokens"] > 0
        assert stats["computed_tokens"] - stats["recomputed_tokens"] == 24 * (120 + 11), "each entry counts once"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"host_kv_memory": -1}, "at least 1 byte"), ({"host_kv_memory": "many"}, "cannot read 'many'"),
        ({"host_kv_memory": True}, "host_kv_memory"), ({"host_kv_memory": 1.5}, "host_kv_memory"),
        ({"host_kv_memory": 100}, "hold no block"),
        ({"host_kv_memory": "1GiB", "prefix_caching": False}, "leave prefix_caching on"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_at_the_door(saved, given, says):
    with pytest.raises(ConfigError, match=says):
        LLM(saved, device="cpu", share=False, kv_memory=1 << 20, **given)


def test_more_than_the_host_has_is_refused_with_both_numbers(saved):
    with pytest.raises(NotEnoughMemory, match="the host tier of"):
        LLM(saved, device="cpu", share=False, kv_memory=1 << 20, host_kv_memory="900TiB")


def test_an_interrupt_waits_for_the_copies(monkeypatch):
    """Whoever goes on before they are done would give their blocks to others."""
    done, waits = threading.Event(), iter(range(10**6))
    wait = futures.wait

    def interrupted(some):
        if next(waits) == 0:
            raise KeyboardInterrupt
        done.set()
        return wait(some)

    monkeypatch.setattr(futures, "wait", interrupted)
    model, _, _ = family("llama")
    geometry = Geometry.from_config(model.config, block_size=16, dtype="float32").with_extents(64 << 10)
    pool, arena = HostPool(geometry, 4 * geometry.extent_bytes), HostArena(1, geometry.extent_bytes)
    arena.map([0])
    copy, one = pool._copy, np.array([1], np.int32)

    def slow(*args):
        assert done.wait(60), "nobody waits any more"
        return copy(*args)

    monkeypatch.setattr(pool, "_copy", slow)
    copies = pool.begin(Storage(geometry, arena), one, one, NONE, NONE)
    with pytest.raises(KeyboardInterrupt):
        copies.wait()
    assert pool.mapped_bytes == geometry.extent_bytes, "it was done"
    pool.close()
    arena.close()
