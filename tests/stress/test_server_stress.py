"""Load on a real server: clients that leave, read slowly or send half a body beside others, and bursts beyond the queue.

PAGETIDE_STRESS_S is the length of the load in seconds (default 120).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from servers import ServerProcess, wait_until_idle

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx2")
pytestmark = pytest.mark.stress

SECONDS = float(os.environ.get("PAGETIDE_STRESS_S", "120"))
CLIENTS = 200
BOUND_MIB = 16.0  # by which resident memory may rise over the last half, in server and engine each
ENGINE = ["--device", "cpu", "--dtype", "float32", "--kv-memory", "24MiB", "--no-share", "--max-seqs", "32"]
FAR_S = 300.0


def request(body: bytes, length: int | None = None) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def ask(seed: int, **fields: Any) -> bytes:
    return json.dumps({"prompt": f"{seed}. The sea", "max_tokens": 24, "seed": seed, "ignore_eos": True} | fields).encode()


async def one(port: int, kind: str, seed: int, slow_until: float) -> str:
    """One connection. Returns how it ended: the kind, or what was wrong."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = ask(seed, stream=True)
        if kind == "half":
            writer.write(request(body[:20], len(body)))
            await writer.drain()
            await asyncio.sleep(random.Random(seed).random())
            return kind
        writer.write(request(body))
        if kind == "leaves":
            await reader.readuntil(b"data: ")
            return kind
        if kind == "slow":
            while time.monotonic() < slow_until and await reader.read(1):
                await asyncio.sleep(1.0)
            return kind
        found = await asyncio.wait_for(reader.read(), FAR_S)
        whole = found.startswith(b"HTTP/1.1 200") and b'"finish_reason":"length"' in found and b"data: [DONE]" in found
        return kind if whole and b'"error"' not in found else f"wrong: {found[:300]!r}"
    finally:
        writer.close()


async def load(port: int, seconds: float, pids: list[int]) -> tuple[Counter[str], list[list[float]]]:
    """200 clients for `seconds`. Returns how their requests ended, and samples of resident memory by process, in MiB."""
    ends: Counter[str] = Counter()
    until = time.monotonic() + seconds

    async def client(number: int) -> None:
        rng = random.Random(number)
        kind = "slow" if number < CLIENTS // 20 else ""
        while time.monotonic() < until:
            this = kind or rng.choice(["leaves", "reads", "reads"] if rng.random() < 0.9 else ["half"])
            ends[await one(port, this, rng.randrange(2**31), until)] += 1

    memory: list[list[float]] = []

    async def watch() -> None:
        while time.monotonic() < until:
            memory.append([psutil.Process(pid).memory_info().rss / 2**20 for pid in pids])
            await asyncio.sleep(seconds / 120)

    await asyncio.gather(watch(), *(client(number) for number in range(CLIENTS)))
    return ends, memory


def processes(server: ServerProcess) -> list[int]:
    """The server and its engine."""
    pid = server.process.pid
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True).stdout.split()
    return [pid, *map(int, found)]


def test_200_clients_of_which_many_misbehave(tmp_path: Path) -> None:
    with ServerProcess(["demo", *ENGINE, "--no-access-log"], tmp_path / "log", OMP_NUM_THREADS="1") as server:
        port, pids = int(server.url.rpartition(":")[2]), processes(server)
        ends, memory = asyncio.run(load(port, SECONDS, pids))
        wait_until_idle(server.url, {}, FAR_S)
        assert processes(server) == pids and "Traceback" not in server.said
    half = memory[len(memory) // 2 :]
    quarter = max(len(half) // 2, 1)
    rises = [
        max(row[i] for row in half[quarter:]) - max(row[i] for row in half[:quarter]) if len(half) > quarter else 0.0
        for i in range(len(pids))
    ]
    print(f"{dict(ends)}; resident MiB at the end {memory[-1]}, rise over the last half {rises}")
    assert set(ends) <= {"reads", "leaves", "slow", "half"}, ends
    assert ends["reads"] and ends["leaves"] and all(rise < BOUND_MIB for rise in rises), rises


def test_a_burst_of_1000_requests_beyond_the_queue(tmp_path: Path) -> None:
    arguments = ["demo", *ENGINE, "--no-access-log", "--max-queue", "16"]

    async def burst(port: int) -> list[bytes]:
        async def blocked(seed: int) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request(ask(seed, max_tokens=300)))
            found = await asyncio.wait_for(reader.read(), FAR_S)
            writer.close()
            return found

        return await asyncio.gather(*(blocked(seed) for seed in range(48)))

    async def refused(port: int) -> tuple[list[bytes], list[bytes], float]:
        holding = asyncio.create_task(burst(port))
        while httpx.get(f"http://127.0.0.1:{port}/load").json()["server_load"] < 48:
            await asyncio.sleep(0.05)
        server = psutil.Process(pid)
        before = sum(server.cpu_times()[:2])
        answers: list[bytes] = []
        for _ in range(10):
            answers += await asyncio.gather(*(_exchange(port, ask(1)) for _ in range(100)))
        seconds = sum(server.cpu_times()[:2]) - before
        return await holding, answers, seconds

    with ServerProcess(arguments, tmp_path / "log", OMP_NUM_THREADS="1") as running:
        port, pid = int(running.url.rpartition(":")[2]), running.process.pid
        held, answers, seconds = asyncio.run(refused(port))
        wait_until_idle(running.url, {}, FAR_S)
    assert all(one.startswith(b"HTTP/1.1 200") and b'"completion_tokens":300' in one for one in held)
    print(f"server CPU for a refused request: {seconds:.3f} ms, while 48 others ran")  # of 1,000: s is ms
    assert len(answers) == 1000
    assert all(one.startswith(b"HTTP/1.1 429") and b"retry-after: " in one for one in answers), answers[0][:200]


async def _exchange(port: int, body: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(body))
    found = await reader.read()
    writer.close()
    return found
