"""Callers on eight event loops, again and again, threads switched often; seeds are printed, so that one can be run again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from async_rig import Work, life, stopped_under_fire, switched_every, works
from families import tiny

from pagetide import LLM, AsyncLLM

pytestmark = pytest.mark.stress


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def catalogue(saved: Path) -> Iterator[list[Work]]:
    with LLM(saved, device="cpu", kv_memory="1MiB") as llm:
        yield works(60, llm.generate)


@pytest.mark.parametrize("host", [None, "2MiB"], ids=["", "a host tier"])
def test_ten_lives(saved: Path, catalogue: list[Work], host: str | None) -> None:
    """The engine goes on from each to the next one."""
    llm = AsyncLLM(
        saved, device="cpu", kv_memory=40 * 8192, max_seqs=12, max_waiting=20, max_chunk_tokens=24, host_kv_memory=host
    )
    for _ in range(10):
        seed = random.SystemRandom().randrange(2**32)
        print("seed", seed)
        with switched_every(random.Random(seed).choice([1e-5, 1e-4, 5e-3])):
            seen = life(llm, catalogue, seed)
        assert 40 < seen["left"] < 180
    asyncio.run(llm.stop())


@pytest.mark.parametrize("interval_s", [1e-5, 1e-4, 5e-3])
def test_ten_stops_under_fire(saved: Path, catalogue: list[Work], interval_s: float) -> None:
    for _ in range(10):
        llm = AsyncLLM(saved, device="cpu", kv_memory="1MiB", max_waiting=5)
        with switched_every(interval_s):
            stopped_under_fire(llm, catalogue)
