"""What `pagetide serve` tells systemd (Type=notify), over a real socket."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
from servers import ServerProcess

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx2")

ENGINE = ["--device", "cpu", "--dtype", "float32", "--kv-memory", "4MiB", "--no-share"]


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_it_says_when_the_models_are_loaded_and_when_it_ends(tmp_path: Path, kind: str) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address if kind == "path" else "\0" + address)
        manager.settimeout(60)
        named = address if kind == "path" else "@" + address
        with ServerProcess(["demo", *ENGINE], tmp_path / "log", OMP_NUM_THREADS="1", NOTIFY_SOCKET=named) as server:
            assert manager.recv(100) == b"READY=1"
            assert httpx.get(f"{server.url}/ready").status_code == 200
            assert server.end(signal.SIGTERM) == 0
            assert manager.recv(100) == b"STOPPING=1"
            manager.setblocking(False)
            with pytest.raises(BlockingIOError):
                manager.recv(100)


def test_a_manager_that_is_gone_disturbs_nothing(tmp_path: Path) -> None:
    with ServerProcess(
        ["demo", *ENGINE], tmp_path / "log", OMP_NUM_THREADS="1", NOTIFY_SOCKET=str(tmp_path / "nobody")
    ) as server:
        assert server.end(signal.SIGTERM) == 0
