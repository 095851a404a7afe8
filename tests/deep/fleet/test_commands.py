"""`pagetide run --fleet` and `pagetide serve --fleet` on Ray: one fleet of two workers serves both."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fleet_fixtures import LINES, ON_FLEETS, SETTINGS, one_line
from nearly import nearly

from tests.fleets import FleetProcess
from tests.ports import free_ports
from tests.servers import START_S, ServerProcess


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    pytest.importorskip("ray")
    engine = {"kv_memory": "32MiB", "max_seqs": 4, "device": "cpu", "share": False}
    with FleetProcess(tmp_path_factory.mktemp("fleet"), workers=2, front_ends=0, threads=1, engine=engine) as fleet:
        yield fleet


def test_a_run_on_ray(running: FleetProcess, batch: Any, tmp_path: Path) -> None:
    here = batch(LINES, "engine.jsonl", "--model", "demo", "--device", "cpu", "--no-share")
    target = tmp_path / "fleet.jsonl"
    done = running.command(
        "run", "--fleet", "local", "--fleet-name", running.name, "--input", str(tmp_path / "in.jsonl"),
        "--output", str(target), *SETTINGS,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert list(map(json.loads, target.read_bytes().splitlines())) == nearly(here.records)
    refused = running.command("serve", "--fleet", "local", "--fleet-name", running.name, "--dtype", "float32")
    assert refused.returncode == 2 and "own engine settings: leave out dtype" in refused.stderr


def test_a_server_on_ray_outlives_a_queue_that_hangs(running: FleetProcess) -> None:
    line = ["--fleet", "local", "--fleet-name", running.name, "--served-model-name", "whale"]
    state = running.environ["XDG_STATE_HOME"]
    with ServerProcess(line, running.folder / "serve.log", XDG_STATE_HOME=state) as server:
        body = {"model": "whale", "prompt": "Call me", "max_tokens": 5, "temperature": 0}
        answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=START_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "whale" and answer.json()["usage"]["completion_tokens"] == 5
        (queue,) = running.actors("QueueActor")
        queue.suspend()  # its watchdog kills it, and Ray starts it again
        while (answer := httpx2.post(f"{server.url}/v1/completions", json=body, timeout=START_S)).status_code == 503:
            pass
        assert answer.status_code == 200 and not queue.is_running()
        assert server.end(signal.SIGTERM) == 0, server.said


# -- fleets that are not there -----------------------------------------------------------------------------------------


def test_a_fleet_that_is_not_there(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for arguments in ON_FLEETS:
        said = one_line(command(*arguments, "nowhere"))
        assert said.startswith("no fleet named 'nowhere' was started on this machine (")
        assert "start it with `pagetide fleet start`" in said
    address = f"127.0.0.1:{free_ports()}"
    said = one_line(command("fleet", "status", "--address", address))
    assert said.startswith(f"the Ray cluster {address} cannot be reached: Connection refused.")


def test_an_address_that_another_program_has_now_is_no_fleet(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "pagetide" / "stale"
    folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as other:
        (folder / "address").write_text(f"127.0.0.1:{other.getsockname()[1]}")
        assert "is no longer running" in one_line(command("fleet", "status", "--name", "stale"))
