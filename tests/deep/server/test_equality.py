"""Streams and whole answers have the tokens of `LLM`, whatever else happens: recalls, models that come, clients that leave."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from servers import ServerProcess

from pagetide import LLM, SamplingParams
from pagetide.pressure import ExternalProcess, PrivateDevice

MIB = 1 << 20
ENVIRON = {"PAGETIDE_ADMIN_KEY": "sk-operator-1", "OMP_NUM_THREADS": "1"}
ENGINE = ["--device", "cpu", "--dtype", "float32"]
FAR_S = 120.0
PROMPTS = [f"{number}. It was a dark and stormy night at sea, and the whale" for number in range(64)]
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """The tokens of each prompt, with its number as the seed."""
    same = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}
    params = [SamplingParams(seed=number, **same) for number in range(len(PROMPTS))]
    with LLM("demo", device="cpu", dtype="float32", kv_memory="64MiB", max_seqs=64, share=False) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, params, progress=False)]


def ask(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": "demo", "prompt": PROMPTS[number], "seed": number, "temperature": 1.0, "max_tokens": NEW_TOKENS,
        "ignore_eos": True, "return_token_ids": True,
    } | fields  # fmt: skip


def whole(server: ServerProcess, number: int, model: str = "demo") -> list[int]:
    answer = httpx.post(f"{server.url}/v1/completions", json=ask(number, model=model), timeout=FAR_S)
    return list(answer.json()["choices"][0]["token_ids"])


def streamed(server: ServerProcess, number: int, begun: threading.Semaphore) -> list[int]:
    tokens: list[int] = []
    for event in server.events("/v1/completions", json=ask(number, stream=True)):
        if not tokens:
            begun.release()
        tokens += event["choices"][0]["token_ids"]
    return tokens


def metrics(server: ServerProcess, model: str = "demo") -> dict[str, float]:
    """The samples of a model on /metrics, with the state of blocks and the kind of memory instead of other labels."""
    samples = {}
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if line and not line.startswith("#") and f'model_name="{model}"' in line:
            name, value = line.rsplit(" ", 1)
            part = re.search(r'(?:state|kind)="([^"]*)"', name)
            samples[name.partition("{")[0] + (f":{part[1]}" if part else "")] = float(value)
    return samples


def test_a_recall_of_half_of_the_pool_under_64_streams(tmp_path: Path, wanted: list[list[int]]) -> None:
    begun = threading.Semaphore(0)
    with PrivateDevice(3072 * MIB, 64 * MIB) as device:
        arguments = ["demo", *ENGINE, "--kv-memory", "min=4MiB,max=32MiB", "--max-seqs", "64"]
        with ServerProcess(arguments, tmp_path / "log", **ENVIRON, **device.environ) as server:
            with ThreadPoolExecutor(64) as pool:
                streams = [pool.submit(streamed, server, number, begun) for number in range(64)]
                for _ in range(16):
                    begun.acquire(timeout=FAR_S)
                (lease,) = device.leases()
                kv = metrics(server)["pagetide_memory_bytes:kv"]
                device.client.recall(str(lease.pid), int(kv) // 2)
                assert [one.result(FAR_S) for one in streams] == wanted
            samples = metrics(server)
            assert samples["pagetide_recalls_total"] >= 1 and samples["pagetide_kv_blocks:live"] == 0
            assert samples["pagetide_given_back_bytes_total"] >= kv // 2


def test_a_busy_model_takes_the_memory_of_an_idle_one(tmp_path: Path, wanted: list[list[int]]) -> None:
    capacity, headroom = 2048 * MIB, 64 * MIB
    free = 8 * MIB + capacity // 50  # of which grants above the minimums leave 2 % of the device
    arguments = ["--model", "demo", "--model", "demo", "--served-model-name", "idle", "--served-model-name", "busy"]
    arguments += [*ENGINE, "--kv-memory", "min=2MiB,max=192MiB", "--max-seqs", "96", "--idle-s", "3600"]
    # 124 MiB of KV with their output
    large = [[100 + (number * 7 + i * i) % 500 for i in range(480)] for number in range(32)]

    def burst(model: str) -> list[list[int]]:
        body = ask(0, model=model, prompt=large, max_tokens=16)
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=FAR_S)
        return [choice["token_ids"] for choice in answer.json()["choices"]]

    with ExternalProcess() as external, PrivateDevice(capacity, headroom, external) as device:
        log = tmp_path / "log"
        with ServerProcess(arguments, log, **ENVIRON, **device.environ) as server, ThreadPoolExecutor(65) as pool:
            at_start = metrics(server, "busy")["pagetide_lease_bytes:granted"]
            tokens = burst("idle")
            before = metrics(server, "idle")
            unused, leases = device.free_bytes(), device.leases()
            # libraries, which each lease counts
            shared = sum(lease.held_bytes for lease in leases) - (capacity - unused)
            external.hold(capacity - headroom - free - sum(lease.granted_bytes for lease in leases) + shared)
            until = time.monotonic() + FAR_S
            while device.free_bytes() > unused - external.held_bytes // 2:  # until the monitor has seen it
                assert time.monotonic() < until
            assert before["pagetide_recalls_total"] == 0 == metrics(server, "idle")["pagetide_recalls_total"]
            while not metrics(server, "idle")["pagetide_recalls_total"]:
                assert time.monotonic() < until
                more = pool.submit(burst, "busy")
                assert list(pool.map(lambda number: whole(server, number, "busy"), range(64))) == wanted
                assert more.result() == tokens
            idle, busy = metrics(server, "idle"), metrics(server, "busy")
            assert busy["pagetide_lease_bytes:granted"] > at_start
            assert idle["pagetide_lease_bytes:granted"] < before["pagetide_lease_bytes:granted"]
            assert idle["pagetide_memory_bytes:kv"] < before["pagetide_memory_bytes:kv"]
            assert burst("idle") == tokens  # it goes on with what it has, or gets some back
