"""`pagetide doctor`: on this machine, on devices that are not there, and on machines made of files: each problem is told with
what to do, and nothing else is.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from monitors import MonitorProcess

from pagetide import __version__, doctor, machine_report, native
from pagetide.cli import main
from pagetide.engine.layers import quantized_linears
from pagetide.engine.loading.models import user_file
from pagetide.engine.memory.decode_rate import rates_file
from pagetide.engine.self_check.report import ABSENT, FAILED, PARTS, PASSED, CheckReport, PartOutcome
from pagetide.machine_report import EXTRAS, Problem
from pagetide.monitor.errors import SourceUnavailable
from pagetide.monitor.runtime_dir import RuntimeDir

ROOT = Path(__file__).resolve().parents[2]
PRODUCT_MS, PRODUCT_RATES = cache(quantized_linears.product_ms), cache(quantized_linears.product_rates)
GPUS = [{"device": f"cuda:{i}", "name": "NVIDIA H200", "capability": "9.0", "total_bytes": 139 << 30} for i in range(2)]


@pytest.fixture(autouse=True)
def rates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are timed once for all tests."""
    monkeypatch.setattr(quantized_linears, "product_ms", PRODUCT_MS)
    monkeypatch.setattr(quantized_linears, "product_rates", PRODUCT_RATES)


class Checks:
    """Self-checks that give these outcomes, and what was asked of them."""

    def __init__(self, *outcomes: PartOutcome) -> None:
        self.asked: list[tuple[int, bool, bool]] = []
        self._outcomes = outcomes

    def __call__(self, index: int, *, again: bool, tries: bool) -> CheckReport:
        self.asked.append((index, again, tries))
        return CheckReport(f"cuda:{index}", {}, self._outcomes, True, "/cache/x.json")


def run(checks: Checks, device: str | None = None, tries: bool = False, refresh: bool = False, as_json: bool = False) -> int:
    return doctor.main(device, tries, refresh, as_json, devices=lambda: GPUS, check=checks)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_on_a_machine_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"pagetide {__version__}" in text
    assert f"torch {torch.__version__}" in text
    assert "torch sees no CUDA device" in text
    multiplied = native.instructions() is not None
    assert "gptq, awq" in text and ("multiplied as they are" in text) == ("one row times 2048 by 2048" in text) == multiplied
    assert main(["doctor", "--run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["devices"] == [] and told["torch"]["attention"]["torch"] == {"loads": True, "error": None}
    assert [problem for problem in told["problems"] if problem["fails"]] == []
    times = told["torch"]["quantized"]["product_ms"]
    assert [*times] == (["float32", "bfloat16", "int8", "int4", "fp8", "fp4"] if multiplied else []) and all(
        ms > 0 for ms in times.values()
    )
    rates = told["torch"]["quantized"]["bytes_per_s"]
    assert rates.keys() == times.keys() and rates_file().exists() >= multiplied
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
        PartOutcome("graphs", FAILED, "its process was killed by SIGSEGV", 1.5, 1e9),
    )
    assert run(checks, "cuda:0") == 1
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("self-check of cuda:0: failed, kept in /cache/x.json")
    rows = {line.split()[0]: line for line in lines[start + 1 : lines.index("", start)] if not line.startswith("    ")}
    assert list(rows) == list(PARTS)
    assert "passed     0.25 s  2001-09-0" in rows["pool"]
    assert rows["triton"].endswith("no module named triton")
    assert rows["swaps"].split(maxsplit=1)[1] == "not tried yet"
    assert rows["graphs"].endswith("its process was killed by SIGSEGV")
    assert any(line.strip() == "without it decode steps are launched kernel by kernel" for line in lines)
    assert run(checks, as_json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert [one["self_check"]["parts"]["graphs"]["state"] for one in told["devices"]] == [FAILED, FAILED]


@pytest.mark.parametrize("device", ["cpu", "cuda:2", "cuda:", "gpu"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    said = f"--device {device}: only CUDA devices are checked, and torch sees cuda:0, cuda:1"
    with pytest.raises(ValueError, match=said):
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
    assert set(EXTRAS) == set(there) - {"examples", "test", "test-all", "dev", "dist", "docs"}


def asked(part: Any, *given: Any, **named: Any) -> tuple[Any, list[Problem]]:
    """What a part of the report says, and the problems that it finds."""
    problems: list[Problem] = []
    return part(problems, *given, **named), problems


def told(problems: list[Problem]) -> list[tuple[str, bool]]:
    return [(f"{problem.part}: {problem.what}", problem.fails) for problem in problems]


def refuse_nvml() -> int:
    raise SourceUnavailable("Driver/library version mismatch")


def test_a_driver(tmp_path: Path) -> None:
    gpu, places = tmp_path / "bus" / "0000:01:00.0", {"devices": tmp_path / "dev", "bus": tmp_path / "bus"}
    gpu.mkdir(parents=True)
    (gpu / "class").write_text("0x030200\n")
    (tmp_path / "dev").mkdir()
    for vendor, version, count, figures, problem, fix in [
        ("0x8086", None, None, (0, None, None), None, ""),
        ("0x10de", None, None, (1, None, None), ("1 NVIDIA GPU(s) on the PCI bus, and no driver is loaded", False), ""),
        ("0x10de", "580.82.07", lambda: 2, (1, "580.82.07", 2), None, ""),
        ("0x10de", "580.82.07", refuse_nvml, (1, "580.82.07", None),
         ("NVML does not work: Driver/library version mismatch", True), "nvidia-smi"),
    ]:  # fmt: skip
        (gpu / "vendor").write_text(vendor + "\n")
        found, problems = asked(machine_report.driver, version=lambda told=version: told, count=count, **places)
        assert (found["gpus_on_bus"], found["version"], found["nvml_devices"]) == figures
        assert told(problems) == ([] if problem is None else [(f"driver: {problem[0]}", problem[1])])
        assert all(fix in one.fix for one in problems)


def test_device_files_that_may_not_be_opened_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-caps").mkdir()
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "nvidia0")
    places = {"devices": tmp_path, "bus": tmp_path / "bus"}
    found, problems = asked(machine_report.driver, version=lambda: "580.82.07", count=lambda: 1, **places)
    assert found["not_permitted"] == [str(tmp_path / "nvidia0")]
    assert told(problems) == [(f"driver: this user may not open {tmp_path}/nvidia0", True)]


@pytest.mark.parametrize(("free_mib", "told"), [(511, ["511 MiB are free"]), (512, [])])
def test_little_free_memory_is_a_note(free_mib: int, told: list[str], tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("")
    (tmp_path / "meminfo").write_text(f"MemTotal:       8388608 kB\nMemAvailable:    {free_mib << 10} kB\n")
    found, problems = asked(machine_report.memory, tmp_path, tmp_path / "cgroups")
    assert (found["total_bytes"], found["free_bytes"]) == (8 << 30, free_mib << 20)
    assert [problem.what for problem in problems] == told and not any(problem.fails for problem in problems)


def test_too_few_open_files() -> None:
    endless = (resource.RLIM_INFINITY,) * 2
    for given, fix in (((1024, 4096), None), (endless, None), ((64, 4096), "ulimit -n"), ((64, 64), "hard limit")):
        found, problems = asked(machine_report.limits, lambda number, given=given: given)
        assert found["open_files"]["soft"] == (None if given == endless else given[0])
        assert len(problems) == (fix is not None)
        assert fix is None or (fix in problems[0].fix and problems[0].fails)


def test_threads_that_do_not_suit_the_cores(tmp_path: Path) -> None:
    cpu_max = tmp_path / "cpu.max"
    for variable, quota, problem in [
        (None, "max 100000", None),
        ("4", "max 100000", None),
        ("4,2", None, None),
        (None, "150000 100000", "the cgroup gives 1.5 of 8 cores, and torch starts a thread on each"),
        ("2", "150000 100000", None),
        ("16", "max 100000", "OMP_NUM_THREADS=16, and this process may use 8 cores"),
        ("all", None, "OMP_NUM_THREADS=all, and this process may use 8 cores"),
    ]:
        cpu_max.unlink(missing_ok=True) if quota is None else cpu_max.write_text(quota + "\n")
        environ = {} if variable is None else {"OMP_NUM_THREADS": variable}
        _, problems = asked(machine_report.threads, environ=environ, cores=8, cpu_max=cpu_max)
        assert told(problems) == ([] if problem is None else [(f"threads: {problem}", False)])


def test_a_broken_models_file_is_told_and_stops_neither_the_version_nor_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PAGETIDE_CONFIG", str(tmp_path / "gone.yaml"))
    user_file().parent.mkdir()
    user_file().write_text("mine: /models/mine\n")
    found, problems = asked(machine_report.models_files)
    assert [(file["role"], file["names"]) for file in found] == [
        ("built-in", ["demo"]),
        ("user", ["mine"]),
        ("PAGETIDE_CONFIG", []),
    ]
    assert [(problem.what.partition(";")[0], problem.fails) for problem in problems] == [
        (f"there is no models file {tmp_path / 'gone.yaml'}", True),
        (f"not usable: model 'mine' ({user_file()}:1): there is no folder /models/mine", False),
    ]
    user_file().write_text("mine: [\n")
    assert main(["models"]) == 2
    assert capsys.readouterr().err.startswith(f"pagetide: {user_file()}:2: not valid YAML")
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert main(["doctor"]) == 1
    assert f"problem: models: {user_file()}:2: not valid YAML" in capsys.readouterr().out


def test_names_whose_models_are_not_here_are_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with what to do; an entry that another one replaces is none."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    file = tmp_path / "named.yaml"
    monkeypatch.setenv("PAGETIDE_CONFIG", str(file))
    user_file().parent.mkdir()
    user_file().write_text("a: /replaced\n")
    demo = Path(machine_report.__file__).parent / "engine" / "demo_model"
    file.write_text(f"a: nosuch/model\nb: /nosuch\nc: {demo}\n")
    _, problems = asked(machine_report.models_files)
    assert told(problems) == [
        (f"models: not usable: model 'a' ({file}:1): there is no folder {tmp_path}/nosuch/model, and nosuch/model is not "
         "in the local hub cache either", False),
        (f"models: not usable: model 'b' ({file}:2): there is no folder /nosuch", False),
    ]  # fmt: skip
    fetch, correct = (problem.fix for problem in problems)
    assert fetch and fetch.startswith("correct the path; if it is a model of the Hugging Face hub, fetch it ")
    assert correct == f"correct the entry in {file}, or take it out"


@pytest.fixture
def directory(tmp_path: Path) -> RuntimeDir:
    tmp_path.chmod(0o700)
    return RuntimeDir(tmp_path)


def report_of(own: RuntimeDir, directories: Sequence[RuntimeDir] | None = None) -> tuple[dict[str, Any], list[Problem]]:
    return asked(machine_report.monitor, directories or [own], own)


def test_a_directory_without_a_monitor_has_no_problem_and_nothing_is_left_in_it(directory: RuntimeDir) -> None:
    found, problems = report_of(directory, [RuntimeDir(directory.path / "none"), directory])
    assert (found["pid"], found["runtime_dir"], problems) == (None, str(directory.path), [])
    assert [one["exists"] for one in found["directories"]] == [False, True]
    assert found["directories"][1]["mode"] == "drwx------"
    assert report_of(RuntimeDir(directory.path / "a" / "b"))[1] == []
    assert list(directory.path.iterdir()) == []


def test_a_running_monitor_and_its_broker_answer(directory: RuntimeDir) -> None:
    with MonitorProcess(directory.path) as process:
        found, problems = report_of(directory)
    assert (found["pid"], found["leases"], problems) == (process.pid, 0, [])
    assert found["source"] == "host" and found["socket"] == str(directory.socket)


def test_the_machines_directory_of_a_group_that_the_user_is_not_in(directory: RuntimeDir, monkeypatch: Any) -> None:
    machines = RuntimeDir(directory.path / "machine")
    machines.path.mkdir(mode=0o750)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != machines.path)
    found, (problem,) = report_of(directory, [machines, directory])
    group = found["directories"][0]["group"]
    assert f"{machines.path} belongs to the group {group}" in problem.what
    assert problem.fix.startswith(f"usermod --append --groups {group} ")


def test_a_directory_that_takes_no_files_or_cannot_be_made(directory: RuntimeDir, monkeypatch: Any) -> None:
    def refuse(**_: Any) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    said = f"monitor: nothing can be made in the runtime directory {directory.path}: Read-only file system"
    assert told(report_of(directory)[1]) == [(said, True)]
    own = RuntimeDir(directory.path / "a" / "b")
    what = report_of(own)[1][0].what
    assert f"{own.path} is not there" in what
    assert what.endswith(f"cannot make it in {directory.path}: Read-only file system")


def test_a_variable_that_names_no_usable_directory(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    relative, absolute = "PAGETIDE_RUNTIME_DIR must be an absolute path, got 'run'", Path.cwd() / "run"
    for named, what, fix in (
        ("/proc/nope", "the runtime directory /proc/nope is not there, and ", "name another directory"),
        ("run", relative, f"set it to {absolute}, or unset"),
    ):
        monkeypatch.setenv("PAGETIDE_RUNTIME_DIR", named)
        assert main(["doctor", "--json"]) == 1
        report = json.loads(capsys.readouterr().out)
        (problem,) = (one for one in report["problems"] if one["fails"])
        assert problem["part"] == "monitor" and problem["what"].startswith(what) and problem["fix"].startswith(fix)
        assert (report["monitor"]["runtime_dir"], report["monitor"]["pid"]) == (named, None)
        assert main(["doctor"]) == 1
        assert "no problems" not in capsys.readouterr().out


def test_a_record_of_no_monitor_and_a_directory_that_others_may_write_to(directory: RuntimeDir) -> None:
    directory.record.write_bytes(b"something else")
    directory.record.chmod(stat.S_IRUSR | stat.S_IWUSR)
    found, (problem,) = report_of(directory)
    assert found["pid"] is None and problem.part == "monitor" and str(directory.record) in problem.what
    directory.record.unlink()
    directory.path.chmod(0o777)
    (problem,) = report_of(directory)[1]
    assert (problem.part, problem.fails) == ("monitor", True)
    assert problem.fix.startswith(f"chmod go-w {directory.path}")
