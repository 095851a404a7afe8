"""An engine on a CPU that sleeps and wakes up many times: its bytes, its lease and its tokens."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from async_rig import is_idle
from families import tiny
from monitors import wait_until
from nearly import alike

from benchmarks.loading import cached_bytes
from pagetide import AsyncLLM, SamplingParams, native
from pagetide.allocator.broker_client import BrokerClient
from pagetide.engine.process.memory_usage import trim
from pagetide.monitor.watching import watch

MIB = 1 << 20
CPU = torch.device("cpu")
GREEDY = SamplingParams(max_new_tokens=8, temperature=0)
PROMPTS = [list(range(5, 40)), [7, 8, 9]]
NEEDS_KERNELS = pytest.mark.skipif(native.instructions() is None, reason="weights in oneDNN's layout do not lie in files")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some 30 MiB in float32."""
    folder = tmp_path_factory.mktemp("model")
    tiny("llama", hidden_size=768, intermediate_size=1536, num_hidden_layers=2).save_pretrained(folder)
    return folder


def resident_bytes() -> int:
    gc.collect()
    trim(CPU)
    return int(psutil.Process().memory_info().rss)


def leases() -> list[Any]:
    with watch() as watched:
        return [one for one in BrokerClient(watched.directory.socket).leases() if one.pid == psutil.Process().pid]


@NEEDS_KERNELS
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
async def test_tokens_stay_and_memory_does_not_grow_over_sleeps(saved: Path, quantization: Any) -> None:
    async with AsyncLLM(str(saved), device="cpu", kv_memory=MIB, share=False, quantization=quantization) as llm:
        expected = [one.token_ids for one in await llm.generate(PROMPTS, GREEDY)]

        async def cycles(count: int) -> int:
            for i in range(count):
                await llm.sleep(1 + i % 2)
                await llm.wake_up()
                assert [one.token_ids for one in await llm.generate(PROMPTS, GREEDY)] == expected
            await llm.sleep(2)
            slept = resident_bytes()
            await llm.wake_up()
            return slept

        before = await cycles(50)  # by then free pieces of the heap, 3 MiB more than at first, have become no more
        counts = [80, *[10] * 5] if quantization is None else [20]
        assert min([await cycles(count) for count in counts]) <= before + 4 * MIB, "the least: free pieces come and go"


@NEEDS_KERNELS
async def test_a_sleeping_model_holds_neither_its_weights_nor_a_lease(saved: Path) -> None:
    async with AsyncLLM(str(saved), device="cpu", kv_memory={"min": "1MiB", "max": "2MiB"}) as llm:
        kept = llm._engine_thread.open().kept
        assert kept is not None
        await llm.generate(PROMPTS, GREEDY)
        (lease,) = leases()
        weights = llm.facts.weights_bytes
        assert lease.granted_bytes > weights
        await llm.sleep(1)
        wait_until(lambda: leases() == [], "the broker to see the memory returned")
        awake = resident_bytes()
        assert kept.asleep_bytes >= 0.95 * weights
        assert kept.weights is not None and cached_bytes(kept.weights) == kept.asleep_bytes
        await llm.sleep(2)
        assert cached_bytes(kept.weights) <= 0.05 * kept.asleep_bytes
        await llm.wake_up()
        wait_until(lambda: kept.uncounted_bytes == 0)
        (again,) = leases()
        assert again.granted_bytes > weights and resident_bytes() >= awake + 0.95 * kept.asleep_bytes
        await llm.generate(PROMPTS, GREEDY)


def test_two_engines_of_one_model_sleep_apart(saved: Path) -> None:
    """What one gives back is the other's still."""

    async def run() -> None:
        options: dict[str, Any] = {"device": "cpu", "kv_memory": MIB, "share": False}
        async with AsyncLLM(str(saved), **options) as one, AsyncLLM(str(saved), **options) as other:
            expected = [done.token_ids for done in await one.generate(PROMPTS, GREEDY)]
            for _ in range(3):
                await asyncio.gather(one.sleep(2), other.sleep(1))
                await other.wake_up()
                assert [done.token_ids for done in await other.generate(PROMPTS, GREEDY)] == expected
                await one.wake_up()
                assert [done.token_ids for done in await one.generate(PROMPTS, GREEDY)] == expected

    asyncio.run(run())


@pytest.mark.parametrize("host_kv_memory", [0, MIB])
async def test_all_kinds_of_requests_go_on_after_sleeps_that_suspend_them(tmp_path: Path, host_kv_memory: int) -> None:
    """Running, waiting, streamed, beams: what comes is that of an engine that never slept, and none of it twice."""
    params = [
        {"max_new_tokens": 60, "temperature": 0}, {"max_new_tokens": 60, "temperature": 1, "seed": 3, "logprobs": 2},
        {"max_new_tokens": 40, "n": 3, "seed": 5, "temperature": 1}, {"max_new_tokens": 24, "num_beams": 3, "temperature": 0},
        {"max_new_tokens": 50, "temperature": 0, "repetition_penalty": 1.3, "prompt_logprobs": 1},
    ]  # fmt: skip
    asked = [([*range(5, 40 + i)], SamplingParams(**one)) for i, one in enumerate(params * 2)]
    long = SamplingParams(max_new_tokens=200, temperature=0)
    tiny("llama").save_pretrained(tmp_path)
    options: dict[str, Any] = {"device": "cpu", "kv_memory": MIB, "share": False, "max_seqs": 6}
    async with AsyncLLM(str(tmp_path), **options) as awake:
        expected = [alike(await awake.generate(prompt, one)) for prompt, one in asked]
        (whole,) = await awake.generate([9, 8, 7], long)
    async with AsyncLLM(str(tmp_path), **options, host_kv_memory=host_kv_memory) as llm:
        stream, left = llm.stream([9, 8, 7], long), llm.stream([9, 8], long)
        chunks = [await anext(stream)]
        await anext(left)
        tasks = [asyncio.create_task(llm.generate(prompt, one)) for prompt, one in asked]
        for level in (1, 2, 1):
            for _ in range(8):
                chunks.append(await anext(stream))
            await llm.sleep(level, suspends=True)
            await left.aclose()
            await llm.wake_up()
            with llm._engine_thread.held_engine() as engine:
                engine.core.scheduler.check_invariants()
        assert [alike(await task) for task in tasks] == expected
        chunks += [chunk async for chunk in stream]
        assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
        recomputed = (await llm.stats())["recomputed_tokens"]
        assert is_idle(llm) and (recomputed < 200) == bool(host_kv_memory), recomputed
