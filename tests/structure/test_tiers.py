"""The runs of the tests: which files need torch, and what counts against the budget of the quick tier (.ci/tiers.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cpu_meter  # .ci/cpu_meter.py
import pytest
import tiers  # .ci/tiers.py
import torch_free
from checkout import ROOT

NEEDS_TORCH = {
    "import torch": True,
    "import numpy as np, torch": True,
    "def test():\n    from transformers import AutoConfig": True,
    "from pagetide import LLM": True,
    "from pagetide.engine.llm import LLM": True,
    "from pagetide.cache import manager, storage": True,
    "from pagetide.cache.storage import Storage": True,
    "from engines import TinyEngine": True,
    "from pagetide.cache.manager import CacheManager": False,
    "from pagetide.fleet import routing": False,
    "from fakes import World": False,
    "# import torch\nTEXT = 'import torch'": False,
}


def test_which_files_need_torch(tmp_path: Path) -> None:
    found = {}
    for number, text in enumerate(NEEDS_TORCH):
        file = tmp_path / f"test_{number}.py"
        file.write_text(text + "\n")
        found[text] = torch_free.needs_torch(file)
    assert found == NEEDS_TORCH


def test_a_file_runs_where_torch_is_if_its_conftest_needs_it(tmp_path: Path) -> None:
    """Else it would be collected nowhere: without torch its folder is left out, and with torch the file."""
    file = tmp_path / "test_plain.py"
    file.write_text("import numpy\n")
    assert not torch_free.runs_with_torch(file)
    (tmp_path / "conftest.py").write_text("import torch\n")
    assert torch_free.runs_with_torch(file) and not torch_free.needs_torch(file)


def test_a_process_for_tests_without_torch_refuses_it() -> None:
    code = "import torch_free; torch_free.refuse_torch(); import torch"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tests", capture_output=True, text=True, check=False)
    assert run.returncode == 1 and "torch is imported in a process for tests that need none" in run.stderr


def test_the_tiers_are_apart_by_path() -> None:
    assert {"--ignore=tests/deep", "--ignore=tests/gpu", "--ignore=tests/stress"} <= set(tiers.QUICK)
    assert sum(tiers.BUDGET_S.values()) == 480
    folders = {folder for row in tiers.BUDGET_S for folder in row.split(", ")}
    tested = {path.parts[len(ROOT.parts) + 1] for path in (ROOT / "tests").rglob("*/test_*.py")}
    assert tested - {"deep", "gpu", "stress"} <= folders, "every folder of quick tests has a share"


def test_seconds_are_shared_out_by_folder_and_the_rest_is_start_up() -> None:
    tests = [("tests/cache/a.py::b", 1.0), ("tests/native/a.py::b", 2.0), ("tests/engine/x/a.py::b", 4.0)]
    found = tiers.shares(tests, cpu_s=10.0)
    wanted = {"cache, allocator, common, native, structure": 3.0, "engine": 4.0, "start-up": 3.0}
    assert {row: seconds for row, seconds in found.items() if seconds} == wanted


@pytest.mark.parametrize(("cpu_s", "within"), [(959.0, True), (961.0, False)])
def test_the_budget_is_in_seconds_of_the_reference_machine(
    cpu_s: float, within: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine that takes twice as long for the same loop may take twice as long for the tests."""
    monkeypatch.setattr(tiers, "METER", tmp_path)
    loops = [cpu_meter.REFERENCE_LOOP_S, 3 * cpu_meter.REFERENCE_LOOP_S]
    entries = [{"test": "", "cpu_s": 5.0, "wall_s": 0.0}, {"test": "tests/cache/a.py::b", "cpu_s": 20.0, "wall_s": 30.0}]
    lines = [json.dumps(entry) for entry in (*entries, *({"loop_s": seconds} for seconds in loops))]
    (tmp_path / "1.jsonl").write_text("\n".join(lines))
    assert tiers.report(tiers.Spent(cpu_s=cpu_s + sum(loops), wall_s=100.0)) is within
    said = capsys.readouterr().out
    assert "10.0  tests/cache/a.py::b" in said and ("ABOVE THE BUDGET" in said) is not within


def test_properties_run_in_the_deep_tier_too() -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--collect-only", "--tier=deep", "tests/allocator/test_wire.py"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0 and "::test_frames_may_come_in_any_pieces" in found.stdout
    assert "::test_there_is_a_recorded_frame" not in found.stdout, "what is no property runs in the quick tier alone"


@pytest.mark.parametrize(
    ("quick", "others", "status"),
    [((0, True), 0, 0), ((1, True), 0, 1), ((0, False), 0, 1), ((0, True), 1, 1), ((0, True), tiers.NO_TESTS, 1)],
)
def test_all_tests_fail_if_one_run_does_or_the_budget_is_spent(
    quick: tuple[int, bool], others: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "ROOT", tmp_path)
    # The deep tier, and the runs with other instructions: two, or one where the processor has no more than AVX2.
    for number, runs in ((0, 3), (1, 3), (2, 3), (0, 2), (1, 2)):
        monkeypatch.setattr(tiers, "has_avx512", lambda runs=runs: runs == 3)
        statuses = iter([others if number == at else 0 for at in range(runs)])
        monkeypatch.setattr(tiers, "quick", lambda arguments: quick)
        monkeypatch.setattr(tiers, "run", lambda *arguments, statuses=statuses: next(statuses))
        assert tiers.everything() == status
        assert next(statuses, None) is None


def test_the_processor_is_known_by_its_flags(tmp_path: Path) -> None:
    (tmp_path / "wide").write_text("flags\t\t: avx2 avx512f avx512bw\n")
    (tmp_path / "common").write_text("flags\t\t: avx2 fma\n")
    assert [tiers.has_avx512(tmp_path / name) for name in ("wide", "common", "unknown")] == [True, False, True]


def test_what_failed_is_run_once_more_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that fails every time stays a failure; one that fails the first time does not."""
    monkeypatch.setattr(tiers, "ROOT", tmp_path)
    monkeypatch.setattr(tiers, "JOBS", ["-p", "no:xdist"])
    monkeypatch.setattr(tiers, "METER", tmp_path / "meter")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / ".ci"))
    once = "import pathlib\ndef test_it():\n    file = pathlib.Path('was-here')\n    was = file.exists()\n    file.touch()\n"
    (tmp_path / "test_once.py").write_text(once + "    assert was\n")
    assert tiers.run(["test_once.py"], tiers.Spent()) == 0 and not tiers.failed()
    (tmp_path / "test_always.py").write_text("def test_it():\n    assert False\n")
    assert tiers.run(["."], tiers.Spent()) == tiers.FAILED and tiers.failed() == ["test_always.py::test_it"]
