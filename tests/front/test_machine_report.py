"""What `pagetide doctor` finds wrong, on machines made of files: each problem is told with what to do, and nothing else is."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
from monitors import MonitorProcess

from pagetide import machine_report
from pagetide.cli import main
from pagetide.engine.loading.models import user_file
from pagetide.machine_report import Problem
from pagetide.monitor.errors import SourceUnavailable
from pagetide.monitor.runtime_dir import RuntimeDir


def told(problems: list[Problem]) -> list[tuple[str, bool]]:
    return [(f"{problem.part}: {problem.what}", problem.fails) for problem in problems]


# -- driver


def gpu_on_bus(bus: Path, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    (bus / "0000:01:00.0").mkdir(parents=True)
    (bus / "0000:01:00.0" / "vendor").write_text(vendor + "\n")
    (bus / "0000:01:00.0" / "class").write_text(kind + "\n")


def driver(tmp_path: Path, version: str | None, count: Any = lambda: 1) -> tuple[dict[str, Any], list[Problem]]:
    problems: list[Problem] = []
    (tmp_path / "dev").mkdir(exist_ok=True)
    found = machine_report.driver(
        problems, version=lambda: version, devices=tmp_path / "dev", bus=tmp_path / "bus", count=count
    )
    return found, problems


def test_a_machine_without_a_gpu_has_no_problem(tmp_path: Path) -> None:
    gpu_on_bus(tmp_path / "bus", vendor="0x8086")
    found, problems = driver(tmp_path, None)
    assert (found["gpus_on_bus"], found["nvml_devices"], problems) == (0, None, [])


def test_a_gpu_without_a_driver_is_a_note(tmp_path: Path) -> None:
    gpu_on_bus(tmp_path / "bus")
    _, problems = driver(tmp_path, None)
    assert told(problems) == [("driver: 1 NVIDIA GPU(s) on the PCI bus, and no driver is loaded", False)]


def test_a_driver_that_works_has_its_devices_counted(tmp_path: Path) -> None:
    found, problems = driver(tmp_path, "580.82.07", lambda: 2)
    assert (found["version"], found["nvml_devices"], problems) == ("580.82.07", 2, [])


def test_a_driver_whose_library_fails_is_a_problem(tmp_path: Path) -> None:
    def refuse() -> int:
        raise SourceUnavailable("Driver/library version mismatch")

    _, problems = driver(tmp_path, "580.82.07", refuse)
    assert told(problems) == [("driver: NVML does not work: Driver/library version mismatch", True)]
    assert "nvidia-smi" in problems[0].fix


def test_device_files_that_may_not_be_opened_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev" / "nvidia-caps").mkdir(parents=True)
    (tmp_path / "dev" / "nvidia0").touch()
    (tmp_path / "dev" / "nvidiactl").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "nvidia0")
    found, problems = driver(tmp_path, "580.82.07")
    assert found["not_permitted"] == [str(tmp_path / "dev" / "nvidia0")]
    assert told(problems) == [(f"driver: this user may not open {tmp_path}/dev/nvidia0", True)]


# -- host


@pytest.mark.parametrize(("free_mib", "told"), [(511, ["511 MiB are free"]), (512, [])])
def test_little_free_memory_is_a_note(free_mib: int, told: list[str], tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("")
    (tmp_path / "meminfo").write_text(f"MemTotal:       8388608 kB\nMemAvailable:    {free_mib << 10} kB\n")
    problems: list[Problem] = []
    found = machine_report.memory(problems, tmp_path, tmp_path / "cgroups")
    assert (found["total_bytes"], found["free_bytes"]) == (8 << 30, free_mib << 20)
    assert [problem.what for problem in problems] == told and not any(problem.fails for problem in problems)


# -- limits and threads


@pytest.mark.parametrize(
    ("soft", "hard", "fix"),
    [(1024, 4096, None), (resource.RLIM_INFINITY,) * 2 + (None,), (64, 4096, "ulimit -n"), (64, 64, "hard limit")],
)
def test_too_few_open_files(soft: int, hard: int, fix: str | None) -> None:
    problems: list[Problem] = []
    found = machine_report.limits(problems, lambda number: (soft, hard))
    assert found["open_files"]["soft"] == (None if soft == resource.RLIM_INFINITY else soft)
    assert len(problems) == (fix is not None)
    assert fix is None or (fix in problems[0].fix and problems[0].fails)


@pytest.mark.parametrize(
    ("variable", "quota", "problem"),
    [
        (None, "max 100000", None),
        ("4", "max 100000", None),
        ("4,2", None, None),
        (None, "150000 100000", "the cgroup gives 1.5 of 8 cores, and torch starts a thread on each"),
        ("2", "150000 100000", None),
        ("16", "max 100000", "OMP_NUM_THREADS=16, and this process may use 8 cores"),
        ("all", None, "OMP_NUM_THREADS=all, and this process may use 8 cores"),
    ],
)
def test_threads_that_do_not_suit_the_cores(
    variable: str | None, quota: str | None, problem: str | None, tmp_path: Path
) -> None:
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    environ = {} if variable is None else {"OMP_NUM_THREADS": variable}
    problems: list[Problem] = []
    machine_report.threads(problems, environ=environ, cores=8, cpu_max=tmp_path / "cpu.max")
    assert told(problems) == ([] if problem is None else [(f"threads: {problem}", False)])


# -- models files


def test_a_broken_models_file_is_told_and_stops_neither_the_version_nor_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PAGETIDE_CONFIG", str(tmp_path / "gone.yaml"))
    user_file().parent.mkdir()
    user_file().write_text("mine: /models/mine\n")
    problems: list[Problem] = []
    found = machine_report.models_files(problems)
    assert [(file["role"], file["names"]) for file in found] == [
        ("built-in", ["demo"]), ("user", ["mine"]), ("PAGETIDE_CONFIG", []),
    ]  # fmt: skip
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
    problems: list[Problem] = []
    machine_report.models_files(problems)
    assert told(problems) == [
        (
            f"models: not usable: model 'a' ({file}:1): there is no folder {tmp_path}/nosuch/model, and nosuch/model is not "
            "in the local hub cache either",
            False,
        ),
        (f"models: not usable: model 'b' ({file}:2): there is no folder /nosuch", False),
    ]
    assert [problem.fix for problem in problems] == [
        "correct the path, or fetch it with: hf download nosuch/model",
        f"correct the entry in {file}, or take it out",
    ]


# -- monitor


@pytest.fixture
def directory(tmp_path: Path) -> RuntimeDir:
    tmp_path.chmod(0o700)
    return RuntimeDir(tmp_path)


def test_a_directory_without_a_monitor_has_no_problem(directory: RuntimeDir) -> None:
    problems: list[Problem] = []
    found = machine_report.monitor(problems, [RuntimeDir(directory.path / "none"), directory], directory)
    assert (found["pid"], found["runtime_dir"], problems) == (None, str(directory.path), [])
    assert [one["exists"] for one in found["directories"]] == [False, True]
    assert found["directories"][1]["mode"] == "drwx------"


def test_a_running_monitor_and_its_broker_answer(directory: RuntimeDir) -> None:
    problems: list[Problem] = []
    with MonitorProcess(directory.path) as process:
        found = machine_report.monitor(problems, [directory], directory)
    assert (found["pid"], found["leases"], problems) == (process.pid, 0, [])
    assert found["source"] == "host" and found["socket"] == str(directory.socket)


def test_a_directory_that_others_may_write_to(directory: RuntimeDir) -> None:
    directory.path.chmod(0o777)
    problems: list[Problem] = []
    machine_report.monitor(problems, [directory], directory)
    assert [(problem.part, problem.fails) for problem in problems] == [("monitor", True)]
    assert problems[0].fix.startswith(f"chmod go-w {directory.path}")


def test_the_machines_directory_of_a_group_that_the_user_is_not_in(
    directory: RuntimeDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = RuntimeDir(directory.path / "machine")
    machines.path.mkdir(mode=0o750)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != machines.path)
    problems: list[Problem] = []
    found = machine_report.monitor(problems, [machines, directory], directory)
    group = found["directories"][0]["group"]
    assert f"{machines.path} belongs to the group {group}" in problems[0].what and len(problems) == 1
    assert problems[0].fix.startswith(f"usermod --append --groups {group} ")


def refuse(**_: Any) -> str:
    raise OSError(errno.EROFS, "Read-only file system")


def test_a_directory_that_cannot_be_made(directory: RuntimeDir, monkeypatch: pytest.MonkeyPatch) -> None:
    own = RuntimeDir(directory.path / "a" / "b")
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    problems: list[Problem] = []
    machine_report.monitor(problems, [own], own)
    assert f"{own.path} is not there" in problems[0].what
    assert problems[0].what.endswith(f"cannot make it in {directory.path}: Read-only file system")


def test_a_directory_that_is_there_and_takes_no_files(directory: RuntimeDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    problems: list[Problem] = []
    machine_report.monitor(problems, [directory], directory)
    said = f"monitor: nothing can be made in the runtime directory {directory.path}: Read-only file system"
    assert told(problems) == [(said, True)]


def test_the_search_for_problems_leaves_nothing_behind(directory: RuntimeDir) -> None:
    problems: list[Problem] = []
    for own in (directory, RuntimeDir(directory.path / "a" / "b")):
        machine_report.monitor(problems, [own], own)
    assert problems == [] and list(directory.path.iterdir()) == []


@pytest.mark.parametrize(
    ("named", "what", "fix"),
    [
        ("/proc/nope", "the runtime directory /proc/nope is not there, and ", "name another directory"),
        (
            "run",
            "PAGETIDE_RUNTIME_DIR must be an absolute path, got 'run'",
            f"set it to {Path.cwd() / 'run'}, or unset",
        ),
    ],
)
def test_a_variable_that_names_no_usable_directory(
    named: str, what: str, fix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGETIDE_RUNTIME_DIR", named)
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    (problem,) = (one for one in report["problems"] if one["fails"])
    assert problem["part"] == "monitor" and problem["what"].startswith(what) and problem["fix"].startswith(fix)
    assert (report["monitor"]["runtime_dir"], report["monitor"]["pid"]) == (named, None)
    assert main(["doctor"]) == 1
    assert "no problems" not in capsys.readouterr().out


def test_a_record_of_no_monitor(directory: RuntimeDir) -> None:
    directory.record.write_bytes(b"something else")
    directory.record.chmod(stat.S_IRUSR | stat.S_IWUSR)
    problems: list[Problem] = []
    assert machine_report.monitor(problems, [directory], directory)["pid"] is None
    assert [problem.part for problem in problems] == ["monitor"] and str(directory.record) in problems[0].what
