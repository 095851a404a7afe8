"""An engine on a CPU that sleeps and wakes up many times: its bytes, its lease and its tokens."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from families import tiny
from monitors import wait_until

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
        assert await cycles(100 if quantization is None else 20) <= before + 4 * MIB


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
        assert kept.weights is not None and kept.weights.cached_bytes == kept.asleep_bytes
        await llm.sleep(2)
        assert kept.weights.cached_bytes <= 0.05 * kept.asleep_bytes
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
