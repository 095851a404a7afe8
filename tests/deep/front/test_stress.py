"""`pagetide stress` as a process, and with planted faults."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
from monitors import wait_until
from nvml_standin import COMPILER, GIB, Gpu, NvmlStandin

from pagetide import stress
from pagetide.allocator.lease import Lease
from pagetide.common.units import MIB
from pagetide.demo.engines import DemoEngine
from pagetide.demo.shared import DemoDevice
from pagetide.pressure import FOLDERS, Card, PrivateDevice


def test_it_passes_with_kills_and_draws(tmp_path: Path) -> None:
    command = ["stress", "--seconds", "12", "--seed", "3", "--kills", "--json", "--image", str(tmp_path / "a.svg")]
    done = subprocess.run([sys.executable, "-P", "-m", "pagetide", *command], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["passed"] and not told["faults"]
    assert told["kills"] >= 1 and told["recall_s"] and told["pieces"] and told["requests"] > 12
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


def test_without_a_card_it_says_so() -> None:
    command = [sys.executable, "-P", "-m", "pagetide", "stress", "--seconds", "5", "--device", "cuda:7"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=hidden)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "device 'cuda:7' is not available; " in done.stderr and "use device='cpu'" in done.stderr


@pytest.mark.skipif(COMPILER is None, reason="the stand-in for NVML needs a C compiler")
def test_a_private_device_on_a_card_watches_this_card_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is a stand-in: a lease on the card is granted beside what others hold of it."""
    with NvmlStandin(tmp_path) as nvml:
        nvml.devices = [Gpu("GPU-a", "00000000:3B:00.0", free_bytes=60 * GIB), Gpu("GPU-b", "00000000:1A:00.0")]
        for name, value in nvml.env().items():
            monkeypatch.setenv(name, value)
        external: Any = SimpleNamespace(card=Card("cuda:0", "GPU-a", "a card", 80 * GIB, "13.0"), pid=1, status=None)
        with PrivateDevice(80 * GIB, GIB, external) as device:
            assert device.free_bytes() == 60 * GIB
            lease = Lease.register(
                device.socket, name="engine A", device_uuid="GPU-a", min_bytes=4 * GIB, max_bytes=None, weight=1.0,
                priority=0, granule_bytes=MIB, held_bytes=0,
            )  # fmt: skip
            assert lease.wait_granted(4 * GIB, 30)
            nvml.update("0", free_bytes=50 * GIB)
            wait_until(lambda: device.free_bytes() == 50 * GIB, "the new measurement")
            engine: Any = SimpleNamespace(pid=os.getpid(), began=0.0)
            sample = DemoDevice(engine, [engine], external, device).sample()
            assert (sample.other, sample.kv, sample.external) == ((0,), (0,), 30 * GIB)
            lease.close()


def test_killed_it_leaves_nothing_after_the_next_start(tmp_path: Path) -> None:
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-P", "-m", "pagetide", "stress", "--seconds", "60", "--json"]
    killed = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
    wait_until(lambda: list(tmp_path.glob(f"{FOLDERS}*/run/broker.sock")), "its device", 120)
    others = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.wait()
    wait_until(lambda: not any(other.is_running() for other in others), "the end of its engines and its monitor", 120)
    assert list(tmp_path.glob(f"{FOLDERS}*"))
    with mock.patch.object(tempfile, "tempdir", str(tmp_path)), PrivateDevice(64 * MIB, MIB):
        assert len(list(tmp_path.glob(f"*{FOLDERS}*"))) == 1, "its own"
    assert not list(tmp_path.glob(f"*{FOLDERS}*"))


def test_a_wrong_token_and_a_lost_request_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted in the answers of one engine."""
    serve, served = DemoEngine.serve, 0

    async def planted(self: DemoEngine, requests: Any) -> Any:
        nonlocal served
        outputs = await serve(self, requests)
        served += self.name == "engine B"
        if self.name == "engine B" and served == 2:
            outputs[0].token_ids[-1] += 1
        if self.name == "engine B" and served == 3:
            outputs[0].finish_reason = ""
        return outputs

    monkeypatch.setattr(DemoEngine, "serve", planted)
    report = asyncio.run(stress.under_pressure(lambda state: None, seconds=5, seed=1))
    assert len(report.faults) == 2 and all(fault.startswith("engine B, request ") for fault in report.faults)
    assert any("undisturbed" in fault for fault in report.faults) and any("lost" in fault for fault in report.faults)
