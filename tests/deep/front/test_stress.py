"""`pagetide stress` as a process, and with planted faults."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagetide import stress
from pagetide.demo.engines import DemoEngine


def test_it_passes_with_kills_and_draws(tmp_path: Path) -> None:
    command = ["stress", "--seconds", "12", "--seed", "3", "--kills", "--json", "--image", str(tmp_path / "a.svg")]
    done = subprocess.run([sys.executable, "-P", "-m", "pagetide", *command], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["passed"] and not told["faults"]
    assert told["kills"] >= 1 and told["recall_s"] and told["pieces"] and told["requests"] > 12
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


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
