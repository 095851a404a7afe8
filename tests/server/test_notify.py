"""What signals do, and what systemd is told (Type=notify), over a real socket."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from pagetide.server import run as run_module
from pagetide.server.run import _Drainer, notify


@pytest.mark.parametrize("mark", ["", "@"], ids=["path", "abstract"])
def test_a_manager_gets_the_state_and_one_that_is_gone_disturbs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    notify("READY=1")
    address = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", mark + address)
    notify("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address if mark else address)
        manager.settimeout(60)
        notify("STOPPING=1")
        assert manager.recv(100) == b"STOPPING=1"


@pytest.mark.parametrize("presses", [1, 2])
async def test_ctrl_c_says_what_it_waits_for_and_kills_engines_in_the_end_and_at_once_the_second_time(
    presses: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_module, "INTERRUPT_END_S", 0.0 if presses == 1 else 1e6)
    server, killed = MagicMock(), asyncio.Event()
    server.models.stop, server.models.kill = killed.wait, lambda: asyncio.sleep(0, killed.set())
    server.admission.num_requests = 3
    drainer = _Drainer(server, MagicMock(), 0.0)
    for _ in range(presses):
        drainer.signalled(signal.SIGINT)
    await drainer.end_engines()
    assert killed.is_set() and "waiting for 3 requests, 0 s at most, and then for the engines" in capsys.readouterr().err
