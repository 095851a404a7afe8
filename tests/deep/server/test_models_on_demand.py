"""`pagetide serve --models-dir` with real engines: three models, memory for two."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from checkout import ROOT
from monitors import MonitorProcess
from servers import ServerProcess, children

from pagetide import LLM, SamplingParams, reserve
from pagetide.allocator.broker_client import BrokerClient
from pagetide.cli import main
from pagetide.monitor.runtime_dir import RuntimeDir

ENGINE = ["--device", "cpu", "--dtype", "float32", "--kv-memory", "8MiB", "--no-share", "--max-seqs", "4"]
NAMES = ("blue", "fin", "sperm")
PROMPT = "The sea"


@pytest.fixture(scope="module")
def wanted() -> list[str]:
    """The outputs of a model alone, by seed."""
    with LLM("demo", device="cpu", dtype="float32", kv_memory="8MiB", share=False) as llm:
        params = [SamplingParams(max_new_tokens=16, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(6)]
        return [output.text for output in llm.generate([PROMPT] * 6, params, progress=False)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("on demand")
    for name in NAMES:
        shutil.copytree(ROOT / "engine" / "demo_model", folder / "models" / name)
    broken = folder / "models" / "broken"
    shutil.copytree(ROOT / "engine" / "demo_model", broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    # Weights take twice the bytes of their file in float32
    one = (ROOT / "engine" / "demo_model" / "model.safetensors").stat().st_size
    arguments = ["--models-dir", str(folder / "models"), *ENGINE, "--models-memory", str(int(4.5 * one)), "--pinned", "blue"]
    arguments += ["--min-resident-s", "0.2"]
    environ = {"OMP_NUM_THREADS": "1", "PAGETIDE_ADMIN_KEY": "sk-operator-1"}
    with ServerProcess(arguments, folder / "log", **environ) as server:
        yield server


def complete(server: ServerProcess, model: str, seed: int = 0) -> Any:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 16, "seed": seed, "temperature": 1.0, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)


def text(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def states(server: ServerProcess) -> dict[str, str]:
    return {one["id"]: one["state"] for one in httpx.get(f"{server.url}/v1/models").json()["data"]}


def counted(server: ServerProcess, name: str, **labels: str) -> float:
    text = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    found = re.findall(rf"^{name}{{{re.escape(text)}}} (\S+)$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)
    return float(found[0])


def test_fifty_first_requests_load_a_model_once(server: ServerProcess, wanted: list[str]) -> None:
    assert states(server) == dict.fromkeys((*NAMES, "broken"), "unloaded")
    assert httpx.get(f"{server.url}/health").status_code == httpx.get(f"{server.url}/ready").status_code == 200
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda number: text(complete(server, "blue", number % 6)), range(50)))
    assert answers == [wanted[number % 6] for number in range(50)]
    assert counted(server, "pagetide_model_loads_total", model_name="blue", operation="load") == 1 == len(children(server))


def test_models_take_turns_and_no_request_is_lost(server: ServerProcess, wanted: list[str]) -> None:
    def turn(number: int) -> None:
        name = NAMES[number % 3]
        assert text(complete(server, name, number % 6)) == wanted[number % 6]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(turn, range(30)))
    assert states(server)["blue"] == "ready"  # pinned
    assert counted(server, "pagetide_model_unloads_total", model_name="blue", reason="memory") == 0
    why = product(("fin", "sperm"), ("memory", "turn"))
    slept = sum(counted(server, "pagetide_model_unloads_total", model_name=name, reason=reason) for name, reason in why)
    assert slept >= 1 and sorted(states(server).values()).count("asleep") == 1


def test_a_model_that_cannot_be_loaded_is_an_error_to_its_requests_alone(server: ServerProcess, wanted: list[str]) -> None:
    answer = complete(server, "broken")
    assert answer.status_code == 503 and "broken cannot be loaded" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] and states(server)["broken"] == "failed"
    ready = httpx.get(f"{server.url}/ready")
    assert ready.status_code == 200 and list(ready.json()["failures"]) == ["broken"]
    assert text(complete(server, "blue")) == wanted[0]


def test_a_killed_engine_is_loaded_by_the_next_request(server: ServerProcess, wanted: list[str]) -> None:
    for pid in children(server):
        os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 60
    while "ready" in states(server).values() or "asleep" in states(server).values():
        assert time.monotonic() < until
        time.sleep(0.02)
    assert [text(complete(server, name, 1)) for name in NAMES] == [wanted[1]] * 3


def test_a_model_that_a_full_device_refuses_waits_for_a_busy_one_and_sleeps_on_meanwhile(
    tmp_path: Path, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has memory for one engine. What is refused is the real engine's lease, at its start and at its waking. An idle
    one makes way for a reservation.
    """
    file = tmp_path / "serve.yaml"
    file.write_text("models:\n- {model: demo, name: a, keep_alive: -1}\n- {model: demo, name: b, keep_alive: 1h}\n")
    arguments = ["--config", str(file), "--min-resident-s", "0", "--max-seqs", "4", "--dtype", "float32", "--device", "cpu"]
    arguments += ["--kv-memory", "min=512MiB,max=512MiB"]
    environ = {"OMP_NUM_THREADS": "1", "PAGETIDE_RUNTIME_DIR": str(tmp_path / "run")}
    with (
        MonitorProcess(tmp_path / "run", "--capacity", "1300MiB"),
        ServerProcess(arguments, tmp_path / "log", **environ) as server,
        ThreadPoolExecutor(4) as pool,
    ):

        def keep_busy(model: str) -> None:
            while not is_enough.is_set():
                text(complete(server, model))

        def other_while_busy(busy: str, other: str, tried: str, refused: str) -> None:
            is_enough.clear()
            working = [pool.submit(keep_busy, busy) for _ in range(3)]
            asked = pool.submit(complete, server, other, 2)
            for state in (tried, refused):
                until = time.monotonic() + 60
                while states(server)[other] != state:
                    assert time.monotonic() < until, state
            is_enough.set()
            assert text(asked.result()) == wanted[2]
            for one in working:
                one.result()
            # After a turn the busy one is back, by the requests that it had
            assert text(complete(server, other, 2)) == wanted[2]

        is_enough = threading.Event()
        assert text(complete(server, "a", 1)) == wanted[1]
        other_while_busy("a", "b", "loading", "unloaded")
        assert states(server) == {"a": "asleep", "b": "ready"}
        engines = children(server)
        other_while_busy("b", "a", "asleep", "asleep")
        assert states(server) == {"a": "ready", "b": "asleep"} and children(server) == engines
        assert "cannot wake up" not in (tmp_path / "log").read_text()
        for name in "ab":
            assert counted(server, "pagetide_model_loads_total", model_name=name, operation="load") == 1
        left = {one["model"]: one["unloaded_for"] for one in httpx.get(f"{server.url}/running").json()["running"]}
        assert left["b"]["taker"] == "a" and left["a"]["taker"] == "b" and left["b"]["num_bytes"] > 0

        monkeypatch.setenv("PAGETIDE_RUNTIME_DIR", environ["PAGETIDE_RUNTIME_DIR"])
        with reserve("900MiB", name="trainer", wait=60.0):
            assert states(server) == {"a": "asleep", "b": "asleep"}
            running = httpx.get(f"{server.url}/running").json()["running"]
            assert "the reservation trainer" in [one["unloaded_for"]["taker"] for one in running]
        assert text(complete(server, "a", 3)) == wanted[3]


def test_keep_alive_and_the_commands_of_operators(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = {"model": "fin", "prompt": "x", "stream": False, "keep_alive": 0, "options": {"num_predict": 2}}
    assert httpx.post(f"{server.url}/api/generate", json=ask, timeout=300).status_code == 200
    until = time.monotonic() + 60
    while states(server)["fin"] != "unloaded":
        assert time.monotonic() < until
        time.sleep(0.02)
    assert main(["stop", "blue", "--url", server.url]) == 2
    assert "API key" in capsys.readouterr().err and states(server)["blue"] == "ready"
    monkeypatch.setenv("PAGETIDE_ADMIN_KEY", "sk-operator-1")
    for command, state in (
        (["sleep", "blue", "--level", "2"], "asleep"), (["wake", "blue"], "ready"), (["stop", "blue"], "unloaded"),
        (["load", "blue"], "ready"),
    ):  # fmt: skip
        assert main([*command, "--url", server.url]) == 0
        assert states(server)["blue"] == state
    assert main(["ps", "--json", "--url", server.url]) == 0
    (blue,) = [one for one in json.loads(capsys.readouterr().out) if one["model"] == "blue"]
    assert (blue["state"], blue["pinned"], blue["expires_in_s"], blue["weights_bytes"] > 0) == ("ready", True, None, True)
    assert main(["ps", "--url", server.url]) == 0
    assert re.search(r"^MODEL +STATE .*\nblue +ready ", capsys.readouterr().out, re.MULTILINE)


def test_idle_weights_make_way_for_the_kv_of_a_busy_model(
    tmp_path: Path, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has memory for three engines and little more. Two of them are idle; one of these is to stay for good."""
    file = tmp_path / "serve.yaml"
    ways = {"busy": "1h", "idle": "1h", "kept": "-1"}
    entries = (f"- {{model: demo, name: {name}, keep_alive: {way}}}\n" for name, way in ways.items())
    file.write_text("".join(["models:\n", *entries]))
    arguments = ["--config", str(file), "--min-resident-s", "0", "--max-seqs", "64", "--dtype", "float32", "--device", "cpu"]
    arguments += ["--kv-memory", "min=2MiB,max=256MiB"]
    environ = {"OMP_NUM_THREADS": "1", "PAGETIDE_RUNTIME_DIR": str(tmp_path / "run")}
    monkeypatch.setenv("PAGETIDE_RUNTIME_DIR", environ["PAGETIDE_RUNTIME_DIR"])
    with (
        MonitorProcess(tmp_path / "run", "--capacity", "3GiB"),
        ServerProcess(arguments, tmp_path / "log", **environ) as server,
        ThreadPoolExecutor(64) as pool,
    ):
        client = BrokerClient(RuntimeDir(tmp_path / "run").socket)
        for name in ("idle", "kept", "busy"):
            assert text(complete(server, name)) == wanted[0]
        needed = sum(max(lease.min_bytes, lease.held_bytes) for lease in client.leases())
        left = (3 << 30) * (1 - 1 / 16 - 1 / 50) - needed - (16 << 20)
        with reserve(int(left), name="others", wait=60.0):
            assert set(states(server).values()) == {"ready"}
            ask = {"prompt": PROMPT, "max_tokens": 400, "temperature": 1.0, "ignore_eos": True}

            def long(seed: int) -> str:
                return text(httpx.post(f"{server.url}/v1/completions", json=ask | {"model": "busy", "seed": seed}, timeout=300))

            asked = [pool.submit(long, number % 2) for number in range(64)]
            until = time.monotonic() + 300
            while states(server)["idle"] != "asleep":
                assert time.monotonic() < until, client.leases()
                time.sleep(0.02)
            outputs = {one.result() for one in asked}
            assert len(outputs) == 2, "two seeds, whatever memory they had"
            assert (states(server)["busy"], states(server)["kept"]) == ("ready", "ready")
            running = {one["model"]: one["unloaded_for"] for one in httpx.get(f"{server.url}/running").json()["running"]}
            assert running["idle"]["taker"] == "busy" and running["kept"] is None and running["idle"]["value"] > 0
            assert text(complete(server, "idle", 1)) == wanted[1]
        (told,) = [one for one in httpx.get(f"{server.url}/page/explain?model=busy").json() if one["what"] == "unload"]
        assert (told["victim"], told["taker"]) == ("idle", "busy")
