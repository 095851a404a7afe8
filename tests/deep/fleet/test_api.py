"""`Fleet` gives what an `AsyncLLM` gives, with all kinds of parameters; each worker has an engine of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from output_cuts import CASES, Cutter, check_cut_after_every_record

from pagetide import AsyncLLM, Fleet, SamplingParams
from pagetide.scheduler.cost import SwapCost
from tests.fleet_calls import PARAMETERS, check_a_death, check_chunks, check_outputs, talking_engines
from tests.fleet_rig import FleetRig, IdleRig


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[AsyncLLM]]:
    """The oracle, and two engines for workers."""
    with talking_engines(tmp_path_factory.mktemp("models"), 3) as each:
        yield each


@pytest.fixture
def rig(engines: list[AsyncLLM], tmp_path: Path) -> FleetRig:
    return IdleRig(tmp_path, "talk", first=engines[1], second=engines[2])


@pytest.fixture
def fleet(rig: FleetRig) -> Fleet:
    return rig.fleet()


@pytest.mark.parametrize("name", PARAMETERS)
async def test_outputs_are_those_of_an_engine(name: str, fleet: Fleet, engines: list[AsyncLLM]) -> None:
    await check_outputs(fleet, engines[0], PARAMETERS[name])


@pytest.mark.parametrize("name", ["greedy", "n", "beams", "logprobs", "stop strings"])
async def test_chunks_add_up_to_the_output(name: str, fleet: Fleet, engines: list[AsyncLLM]) -> None:
    for interval in (1, 5):
        await check_chunks(fleet, engines[0], PARAMETERS[name], interval)


@pytest.mark.parametrize("name", ["sampled", "n", "best_of", "logprobs", "beams"])
async def test_requests_go_on_when_a_worker_dies(name: str, rig: FleetRig, fleet: Fleet, engines: list[AsyncLLM]) -> None:
    await check_a_death(rig, fleet, engines[0], name, 24 if name == "beams" else 60)


@pytest.mark.parametrize("case", CASES)
async def test_a_request_that_is_cut_after_every_record_goes_on_with_the_same_output(cutter: Cutter, case: str) -> None:
    await check_cut_after_every_record(cutter, case)


async def test_workers_pin_the_prompts_of_their_settings_and_their_next_engine_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SwapCost, "tokens_per_s", 0.1)
    prefix = [3 + (7 * i * i + i // 9) % 500 for i in range(70)]
    file, sampling = tmp_path / "warm.jsonl", SamplingParams(max_new_tokens=5, temperature=0)
    file.write_text(json.dumps({"prompt_token_ids": prefix, "pin": True}))
    options: dict[str, Any] = {"device": "cpu", "kv_memory": "4MiB", "max_model_len": 300, "kv_events": True, "share": False}
    options |= {"warm_prompts": file, "disk_kv_memory": "64MiB", "disk_kv_path": tmp_path / "kv"}
    options |= {"prefix_hash_secret": b"s" * 16}
    told = []
    for read in (0, 64):
        llm = await asyncio.to_thread(lambda: AsyncLLM("demo", **options))
        rig = IdleRig(tmp_path / f"queue {read}", "demo", only=llm)
        async with rig, rig.fleet() as fleet:
            assert (await llm.stats())["disk_tier"]["hit_tokens"] == read
            await fleet.generate([[number + 3, *[9] * 280] for number in range(12)], sampling)
            (output,) = await fleet.generate([[*prefix, 5, 6]], sampling)
            stats = (await llm.stats())["prefix_cache"]
            assert (stats["pins"], stats["pinned_blocks"], stats["lost_pins"]) == (1, 4, 0)
            assert (output.num_cached_tokens, output.num_disk_tokens) == (64, 0)
            told.append(output.token_ids)
        await llm.stop()
    assert told[0] == told[1]
