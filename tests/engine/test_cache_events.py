"""`cache_events` of `LLM` and `AsyncLLM`: what a program that follows the prefix cache from outside knows of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from async_rig import loads
from engines import swap_whatever_it_costs
from families import tiny
from prefix_fakes import EventCopy, blocks_of

from pagetide import LLM, AsyncLLM, SamplingParams
from pagetide.cache.cache_events import CacheEvents, PendingEvents, StoredBlock
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.engine.async_llm import _send
from pagetide.engine.errors import ConfigError
from pagetide.engine.watch import EngineWatch

SECRET = b"a key that several workers share"
OPTIONS = {"device": "cpu", "kv_memory": 1 << 18, "kv_events": True, "prefix_hash_secret": SECRET}


@pytest.fixture
def load() -> Iterator[Callable[..., AsyncLLM]]:
    with loads(OPTIONS) as make:
        yield make


def digests_of(tokens: list[int], salt: bytes | None = None) -> list[int]:
    chain = PrefixHasher(16, SECRET).chain(tokens, salt)
    return [first << 64 | second for first, second in chain.digests(chain.num_blocks).tolist()]


def test_exact_events_of_a_prompt_and_its_output() -> None:
    """The blocks of the prompt and of all but the last token of the output, whose K and V are not computed."""
    with LLM(tiny("llama"), **OPTIONS) as llm:
        assert llm.cache_events() == CacheEvents(cleared=True)
        prompt = [*range(1, 30)]
        tokens = prompt + llm.generate([prompt], SamplingParams(max_new_tokens=20))[0].token_ids
        one, two, _ = digests_of(tokens)
        first, second = (StoredBlock(one, None, tuple(tokens[:16])), StoredBlock(two, one, tuple(tokens[16:32])))
        stored = llm.cache_events().stored
        assert stored[:2] == [first, second] and len(stored) == (len(tokens) - 1) // 16
        assert llm.cache_snapshot() == CacheEvents(stored, cleared=True)
        llm.generate([prompt], SamplingParams(max_new_tokens=2), cache_salt="tenant")
        (salted,) = llm.cache_events().stored
        assert salted == StoredBlock(digests_of(prompt, b"tenant")[0], None, tuple(prompt[:16]), salt=b"tenant")
        llm.reset_prefix_cache()
        assert llm.cache_events() == CacheEvents(cleared=True) and not llm.cache_events()


@pytest.mark.parametrize("host_bytes", [0, 1 << 16])
def test_a_consumer_has_the_findable_blocks_at_every_look(load: Callable[..., AsyncLLM], host_bytes: int) -> None:
    """While more prompts than the pool holds run, so that blocks are evicted, or swapped out and in."""
    llm = load(host_kv_memory=host_bytes)
    swap_whatever_it_costs(llm._manager.open().core.scheduler)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 160, 40 + int(rng.integers(1, 30))).tolist() for _ in range(24)]
    copy, looks = EventCopy(), 0

    def taken(watch: EngineWatch) -> tuple[PendingEvents, dict[int, StoredBlock]]:
        return watch.cache_events(), blocks_of(llm._manager.open().core.scheduler.cache.index)

    async def look() -> None:
        nonlocal looks
        pending, findable = await _send(llm._engine_thread.look, taken)  # both between the same two steps
        copy.apply(pending.events())
        assert copy.blocks == findable
        looks += bool(findable)

    async def main() -> None:
        for n in range(2):
            running = asyncio.create_task(llm.generate(prompts, SamplingParams(max_new_tokens=16, seed=n)))
            while not running.done():
                await look()
            await running
            copy.apply(await llm.cache_events())
            assert {block.digest: block for block in (await llm.cache_snapshot()).stored} == copy.blocks

    asyncio.run(main())
    assert looks > 10
    index = llm._manager.open().core.scheduler.cache.index
    assert {block.on_host for block in copy.blocks.values()} == ({False, True} if host_bytes else {False})
    assert len(copy.blocks) == index.num_nodes < sum(len(prompt) // 16 for prompt in prompts) * 2


async def test_a_late_consumer_begins_with_a_snapshot(load: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(kv_memory=1 << 20)
    llm._manager.open().core.scheduler.cache.index.events._most = 3  # of blocks in the log
    copy = EventCopy()
    await llm.generate([[*range(1, 100)]], SamplingParams(max_new_tokens=2))
    assert await llm.cache_events() == CacheEvents(lost=True)
    await llm.generate([[7] * 20], SamplingParams(max_new_tokens=2))
    snapshot = await llm.cache_snapshot()
    assert snapshot.cleared and not snapshot.lost
    copy.apply(snapshot)
    assert [block.digest for block in snapshot.stored if block.parent is None] != []
    await llm.generate([[9] * 20], SamplingParams(max_new_tokens=2))
    copy.apply(await llm.cache_events())
    assert copy.blocks == blocks_of(llm._manager.open().core.scheduler.cache.index) and len(copy.blocks) == 8
    monkeypatch.setattr("pagetide.engine.async_llm.MOST_ON_LOOP", 0)  # as for many blocks: in another thread
    await llm.generate([[5] * 20], SamplingParams(max_new_tokens=2))
    assert [block.tokens for block in (await llm.cache_events()).stored] == [(5,) * 16]


async def test_a_broken_step_clears(load: Callable[..., AsyncLLM]) -> None:
    """An error in the bookkeeping replaces scheduler and cache; the consumer goes on."""
    llm = load()
    core = llm._manager.open().core
    await llm.generate([[3] * 40], SamplingParams(max_new_tokens=2))
    assert len((await llm.cache_events()).stored) == 2
    apply = core.scheduler.apply
    core.scheduler.apply = lambda *_: 1 / 0
    (output,) = await llm.generate([[4] * 40], SamplingParams(max_new_tokens=2))
    assert output.finish_reason == "error" and core.scheduler.apply != apply
    await llm.generate([[5] * 40], SamplingParams(max_new_tokens=2))
    events = await llm.cache_events()
    assert events.cleared and [block.tokens for block in events.stored] == [(5,) * 16] * 2


def test_without_the_option_there_is_no_log(load: Callable[..., AsyncLLM]) -> None:
    llm = load(kv_events=False)
    for call in (llm.cache_events, llm.cache_snapshot):
        with pytest.raises(ConfigError, match="keeps no log of its prefix cache: make it with kv_events=True"):
            asyncio.run(call())
    with pytest.raises(ConfigError, match="leave prefix_caching on, or kv_events out"):
        LLM("demo", device="cpu", kv_events=True, prefix_caching=False)
    with pytest.raises(ConfigError, match="kv_events must be true or false, got 1"):
        LLM("demo", device="cpu", kv_events=1)
