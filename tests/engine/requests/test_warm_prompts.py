"""Pinned prefixes and prompts to warm up, in real engines: what is computed, kept, counted and refused."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from async_rig import until
from families import VOCAB, tiny

from pagetide import LLM, AsyncLLM, RequestRejected, SamplingParams
from pagetide.engine.errors import ConfigError
from pagetide.engine.requests import warm_prompts
from pagetide.scheduler.cost import SwapCost
from pagetide.scheduler.scheduler import Scheduler

PREFIX = [3 + (7 * i * i + i // 9) % (VOCAB - 3) for i in range(70)]
OPTIONS: dict[str, Any] = {"device": "cpu", "share": False, "kv_memory": "512KiB", "max_model_len": 256}


def cached(outputs: list[Any]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


def counted(stats: dict[str, Any]) -> tuple[int, ...]:
    return tuple(stats["prefix_cache"][name] for name in ("pins", "pinned_blocks", "lost_pins"))


def test_a_pinned_prefix_is_found_by_its_salt_until_it_is_unpinned() -> None:
    one_token = SamplingParams(max_new_tokens=1, temperature=0)
    with LLM(tiny("llama"), **OPTIONS) as llm:
        plain = llm.generate([PREFIX + [5] * 9], SamplingParams(max_new_tokens=7, temperature=0))[0].token_ids
        llm.reset_prefix_cache()
        pinned = llm.pin_prefix(PREFIX, cache_salt="ann")
        assert (pinned.num_tokens, counted(llm.stats())) == (64, (1, 4, 0))
        llm.generate([[i + 3, *[9] * 250] for i in range(10)], one_token)
        again = llm.generate([PREFIX + [5] * 9], SamplingParams(max_new_tokens=7, temperature=0), cache_salt="ann")
        assert (cached(again), again[0].token_ids) == ([64], plain)
        for number in range(4):
            llm.pin_prefix([number + 3] * 240)
        expected = "takes 15 more blocks, and 3 may be pinned: of 83 blocks 64 are pinned, and one request of 256 tokens"
        with pytest.raises(RequestRejected, match=expected):
            llm.pin_prefix([12] * 240)
        assert llm.unpin_prefix(pinned)
        assert not llm.unpin_prefix(pinned)
        with pytest.raises(RequestRejected, match="full blocks of 16 tokens, and the prefix has 3"):
            llm.pin_prefix([5, 6, 7])
        with pytest.raises(RequestRejected, match="the prompt has 256 tokens"):
            llm.pin_prefix([5] * 256)
        pins = counted(llm.stats())[0]
        llm.reset_prefix_cache()
        assert counted(llm.stats()) == (0, 0, pins)


def test_tasks_pin_and_a_cancelled_one_pins_nothing() -> None:
    async def main() -> None:
        async with AsyncLLM(tiny("llama"), **OPTIONS) as llm:
            for steps in range(6):
                task = asyncio.create_task(llm.pin_prefix(PREFIX))
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await llm.generate([[5] * 9], SamplingParams(max_new_tokens=1))
                assert counted(await llm.stats()) == (0, 0, 0)
            pinned = await llm.pin_prefix(PREFIX)
            assert counted(await llm.stats()) == (1, 4, 0)
            assert await llm.unpin_prefix(pinned)

    asyncio.run(main())


def test_prompts_are_computed_before_suspended_requests_go_on_and_their_pins_are_held(tmp_path: Path) -> None:
    """A row for the prompts would be free only after the end of a request that runs on and on."""
    file = tmp_path / "warm.jsonl"
    file.write_text(json.dumps({"prompt_token_ids": PREFIX, "pin": True}))
    tiny("llama").save_pretrained(tmp_path / "model")

    async def main() -> None:
        async with AsyncLLM(str(tmp_path / "model"), **{**OPTIONS, "max_seqs": 1}, warm_prompts=file) as llm:
            stream = llm.stream([[5, 6]], SamplingParams(max_new_tokens=200, ignore_eos=True, temperature=0))
            told = list((await anext(stream)).token_ids)
            await llm.pause()
            pinning = asyncio.create_task(llm.pin_prefix([7] * 40))
            await until(lambda: (engine := llm._manager.engine) is not None and engine.core.scheduler.num_waiting)
            await llm.sleep(suspends=True)
            await llm.wake_up()
            assert counted(await llm.stats())[:2] == (2, 4), "one holds none yet"
            llm.resume()
            told += [token async for chunk in stream for token in chunk.token_ids]
            pinned = await pinning
            assert pinned.num_tokens == 32 and await llm.unpin_prefix(pinned)
            assert len(told) == 200

    asyncio.run(main())


def test_a_prompt_that_finds_no_memory_keeps_no_engine_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_prompts, "MEMORY_WAIT_S", 0.0)
    monkeypatch.setattr(Scheduler, "starving", True)
    file = tmp_path / "warm.jsonl"
    file.write_text("\n".join(json.dumps({"prompt_token_ids": PREFIX, "pin": pin}) for pin in (True, False)))
    with LLM(tiny("llama"), **OPTIONS, warm_prompts=file, max_step_tokens=16) as llm:
        assert counted(llm.stats()) == (0, 0, 0)
    told = [record.getMessage() for record in caplog.records if "warm_prompts:" in record.getMessage()]
    assert [text.split(": ", 2)[2] for text in told] == ["its blocks have found no memory for 0 s"] * 2


def test_warm_prompts_are_computed_or_read_before_the_engine_is_ready(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SwapCost, "tokens_per_s", 0.1)
    tiny("llama").save_pretrained(tmp_path / "model")
    other = [one + 1 for one in PREFIX[:40]]
    entries = [
        PREFIX, "a text", {"prompt_token_ids": other, "cache_salt": "ann", "pin": True}, {"messages": [{"role": "user"}]},
        {"prompt_token_ids": PREFIX, "pin": "yes"}, {"tokens": [1]}, [5] * 256,
    ]  # fmt: skip
    file = tmp_path / "warm.jsonl"
    file.write_text("\n".join([*map(json.dumps, entries), "{", "[" * 100_000, ""]))
    options = {**OPTIONS, "warm_prompts": file, "disk_kv_memory": "1MiB", "disk_kv_path": tmp_path / "kv"}
    with caplog.at_level(logging.INFO), LLM(str(tmp_path / "model"), **options) as llm:
        assert counted(llm.stats()) == (1, 2, 0)
        assert cached(llm.generate([PREFIX])) == [64]
        assert cached(llm.generate([other])) == [0]
        assert cached(llm.generate([other], cache_salt="ann")) == [32]
    told = [record.getMessage() for record in caplog.records if "warm_prompts:" in record.getMessage()]
    assert [text.split(" of ")[0] for text in told[:-1]] == [f"warm_prompts: line {line}" for line in (2, 4, 5, 6, 7, 8, 9)]
    assert told[-1].startswith("warm_prompts: 2 of 9 prompts, 1 of them pinned, in ")
    with LLM(str(tmp_path / "model"), **options) as llm:
        assert (counted(llm.stats()), llm.stats()["disk_tier"]["hit_tokens"]) == ((1, 2, 0), 64 + 32)
    with pytest.raises(ConfigError, match="is no file: name one with a prompt in JSON on each line"):
        LLM(str(tmp_path / "model"), **OPTIONS, warm_prompts=tmp_path / "none")
    with pytest.raises(ConfigError, match="warm_prompts are kept by the prefix cache: leave prefix_caching on"):
        LLM(str(tmp_path / "model"), **OPTIONS, warm_prompts=file, prefix_caching=False)
