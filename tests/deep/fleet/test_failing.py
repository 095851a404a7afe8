"""A request under which the workers of a real fleet die, and one that its client left."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from state_families import save_with_words

from tests.fleets import READY_S, FleetProcess

ENGINE = {"kv_memory": "32MiB", "max_seqs": 16, "device": "cpu", "share": False}
LONG = {"model": "demo", "prompt": "The whale", "max_tokens": 1000, "ignore_eos": True}


def kill_once_running(fleet: FleetProcess, role: str) -> None:
    """Kill the processes of a role once a worker has a request."""
    deadline = time.monotonic() + READY_S
    while not re.search(r"^pagetide_fleet_worker_requests\{.*} 1", metrics(fleet), re.MULTILINE):
        assert time.monotonic() < deadline, fleet.logs()
        time.sleep(0.05)
    for process in fleet.actors(role):
        process.kill()
        process.wait()


def metrics(fleet: FleetProcess) -> str:
    return str(httpx2.get(f"{fleet.urls[0]}/metrics", timeout=READY_S).text)


def test_a_request_ends_after_three_workers_died_under_it_and_another_when_it_is_cancelled(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with FleetProcess(tmp_path, workers=1, threads=1, engine=ENGINE) as fleet, ThreadPoolExecutor() as threads:
        url = f"{fleet.urls[0]}/v1/completions"
        search = {**LONG, "n": 16, "use_beam_search": True}  # nothing is recorded before its end
        answer = threads.submit(httpx2.post, url, json=search, timeout=READY_S)
        for role in ("WorkerActor", "WorkerActor", "QueueActor", "WorkerActor"):
            kill_once_running(fleet, role)
        told = answer.result()
        died = "; ".join(["worker-0 has died"] * 3)
        assert told.status_code == 500 and told.json()["error"]["message"].endswith(f"no other request on it: {died}")
        key, body = {"Idempotency-Key": "k"}, {**LONG, "stream": True}
        with httpx2.stream("POST", url, json=body, headers=key, timeout=READY_S) as stream:
            first = next(line for line in stream.iter_lines() if not line.startswith(":") and line)  # comments while it waits
            response_id = re.match(r"id: (cmpl-[0-9a-f]{24})", first)
        cancelled = httpx2.delete(url, headers=key, timeout=READY_S).json()
        assert response_id and (cancelled["id"], cancelled["cancelled"]) == (response_id[1], 1)
        again = httpx2.post(url, json=body, headers=key, timeout=READY_S)
        assert "cancelled by its client" in again.text
        assert fleet.fleet("cancel", "--older-than", "0") == "0 requests cancelled\n"
        assert fleet.command("fleet", "cancel", response_id[1], "--key", "bob", "--name", fleet.name).returncode == 2


def test_a_request_of_a_model_with_states_goes_on_in_another_worker(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    save_with_words(tmp_path / "model", "qwen3_5_text")
    model = {"model": str(tmp_path / "model"), "workers": 1, "threads": 1, "engine": ENGINE}
    with FleetProcess(tmp_path, **model) as fleet, ThreadPoolExecutor() as threads:
        url = f"{fleet.urls[0]}/v1"
        (name,) = [one["id"] for one in httpx2.get(f"{url}/models", timeout=READY_S).json()["data"]]
        body = {"model": name, "prompt": "The whale", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "n": 2}

        def ask() -> list[str]:
            return [one["text"] for one in httpx2.post(f"{url}/completions", json=body, timeout=READY_S).json()["choices"]]

        expected = ask()
        answer = threads.submit(ask)
        kill_once_running(fleet, "WorkerActor")
        assert answer.result() == expected
