"""A model over two CUDA devices with NCCL; where there is one device, two shards on it, by gloo."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from pagetide import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PROMPTS = ["the tide is", "a ship", "once upon a time there was a", "in the morning"] * 3
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=40)
PLACES = [["cuda:0", "cuda:1"]] if torch.cuda.device_count() > 1 else [["cuda:0", "cuda:0"]]
NAMES = ["nccl" if len(set(places)) > 1 else "gloo" for places in PLACES]


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.completions[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, progress=False)]


@pytest.mark.parametrize("devices", PLACES, ids=NAMES)
def test_two_shards_give_the_tokens_of_one_device(devices: list[str]) -> None:
    options = {"dtype": "float32", "kv_memory": {"min": "16MiB", "max": "64MiB"}}
    with LLM("demo", device="cuda:0", **options) as llm:
        right = tokens(llm)
    with LLM("demo", devices=devices, host_kv_memory="16MiB", **options) as llm:
        assert llm.stats()["shards"]["collectives"].startswith("nccl" if len(set(devices)) > 1 else "gloo")
        for _ in range(2):
            assert tokens(llm) == right


@pytest.mark.parametrize("devices", PLACES, ids=NAMES)
def test_a_killed_shard_ends_the_engine_and_frees_its_memory(devices: list[str]) -> None:
    with LLM("demo", devices=devices, kv_memory="32MiB") as llm:
        pids = [shard["pid"] for shard in llm.stats()["shards"]["each"]]
        timer = threading.Timer(0.3, lambda: os.kill(pids[1], signal.SIGKILL))
        timer.start()
        long = SamplingParams(temperature=0.0, max_new_tokens=900, ignore_eos=True)
        outputs = llm.generate(PROMPTS, long, progress=False)
        timer.join()
        assert {output.completions[0].finish_reason for output in outputs} == {"error"}
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
