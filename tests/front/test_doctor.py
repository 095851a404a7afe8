"""The command `pagetide doctor`: on this machine, and on devices that are not there."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from pagetide import __version__, doctor
from pagetide.cli import main
from pagetide.engine.self_check.report import ABSENT, FAILED, PARTS, PASSED, CheckReport, PartOutcome
from pagetide.machine_report import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
CARDS = [
    {"device": f"cuda:{i}", "name": "NVIDIA H200", "capability": "9.0", "total_bytes": 139 << 30} for i in range(2)
]


class Checks:
    """Self-checks that give these outcomes, and what was asked of them."""

    def __init__(self, *outcomes: PartOutcome) -> None:
        self.asked: list[tuple[int, bool, bool]] = []
        self._outcomes = outcomes

    def __call__(self, index: int, *, again: bool, tries: bool) -> CheckReport:
        self.asked.append((index, again, tries))
        return CheckReport(f"cuda:{index}", {}, self._outcomes, True, "/cache/x.json")


def run(
    checks: Checks, device: str | None = None, tries: bool = False, refresh: bool = False, as_json: bool = False
) -> int:
    return doctor.main(device, tries, refresh, as_json, devices=lambda: CARDS, check=checks)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_on_a_machine_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"pagetide {__version__}" in text
    assert f"torch {torch.__version__}" in text
    assert "torch sees no CUDA device" in text
    assert main(["doctor", "--run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["devices"] == [] and told["torch"]["attention"]["torch"] == {"loads": True, "error": None}
    assert [problem for problem in told["problems"] if problem["fails"]] == []
    assert told["versions"]["torch"] == torch.__version__
    assert told["host"]["total_bytes"] >= told["host"]["free_bytes"] > 0
    assert main(["doctor", "--device", "cuda:1"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_nothing_is_tried_unless_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    checks = Checks()
    assert [run(checks), run(checks, tries=True), run(checks, "cuda:1", refresh=True), run(checks, "cuda")] == [0] * 4
    both = [(0, False), (1, False)]
    assert checks.asked == [*((i, again, False) for i, again in both), *((i, again, True) for i, again in both),
                            (1, True, True), (0, False, False)]  # fmt: skip
    assert "self-check of cuda:0: not run yet; the first engine there does, or pagetide doctor --run" in (
        capsys.readouterr().out
    )


def test_each_part_is_told_with_what_comes_in_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    checks = Checks(
        PartOutcome("pool", PASSED, None, 0.25, 1e9),
        PartOutcome("triton", ABSENT, "no module named triton", 0.0, 1e9),
        PartOutcome("graphs", FAILED, "its process was ended by SIGSEGV", 1.5, 1e9),
    )
    assert run(checks, "cuda:0") == 1
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("self-check of cuda:0: failed, kept in /cache/x.json")
    rows = {line.split()[0]: line for line in lines[start + 1 : lines.index("", start)] if not line.startswith("    ")}
    assert list(rows) == list(PARTS)
    assert "passed     0.25 s  2001-09-0" in rows["pool"]
    assert rows["triton"].endswith("no module named triton")
    assert rows["swaps"].split(maxsplit=1)[1] == "not tried yet"
    assert rows["graphs"].endswith("its process was ended by SIGSEGV")
    assert any(line.strip() == "without it decode steps are launched kernel by kernel" for line in lines)
    assert run(checks, as_json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert [one["self_check"]["parts"]["graphs"]["state"] for one in told["devices"]] == [FAILED, FAILED]


@pytest.mark.parametrize("device", ["cpu", "cuda:2", "cuda:", "gpu"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(
        ValueError, match=f"--device {device}: only CUDA devices are checked, and torch sees cuda:0, cuda:1"
    ):
        run(Checks(), device)


def test_a_torch_that_breaks_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> list[dict[str, Any]]:
        raise OSError("libcudart.so.13: cannot open shared object file")

    assert doctor.main(None, True, False, False, devices=broken, check=Checks()) == 1
    assert "cannot be used: OSError: libcudart.so.13" in capsys.readouterr().out


def test_without_torch_the_rest_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["torch"] is None and told["devices"] == [] and told["host"]["free_bytes"] > 0
    assert [(problem["part"], problem["fails"]) for problem in told["problems"]] == [("torch", True)]
    assert main(["doctor"]) == 1
    assert "problem: torch: cannot be imported: " in capsys.readouterr().out


def test_the_extras_are_those_of_the_project() -> None:
    there = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(there) - {"examples", "test", "parallel", "dev", "dist", "docs"}
