"""The decisions of the set-up script (.ci/setup.py), and that constraints.txt belongs to pyproject.toml."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import source_rules
from checkout import files
from packaging.requirements import Requirement
from packaging.version import Version

import setup  # .ci/setup.py

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = setup.pins((ROOT / "constraints.txt").read_text())
SMALL = {"torch": "torch==2.13.0", "pyyaml": "PyYAML==6.0.3", "pytest": "pytest==9.2.0"}


def test_pins_are_read_by_normalised_name_without_comments() -> None:
    text = "# head\n\nPyYAML==6.0.3  # why\ntyping_extensions==4.16.0\n"
    assert setup.pins(text) == {"pyyaml": "PyYAML==6.0.3", "typing-extensions": "typing_extensions==4.16.0"}


def test_what_pip_is_held_to() -> None:
    there = {"torch": "2.11.0+cu130", "pyyaml": "6.0.1"}
    assert setup.limits(SMALL, {"pip": "23.0", "pyyaml": "5.0"}, "", keeps=False) == list(SMALL.values())
    assert setup.limits(SMALL, there, "torch==2.12.0", keeps=False) == ["torch==2.12.0", *list(SMALL.values())[1:]]
    assert setup.limits(SMALL, there, "", keeps=True) == ["torch==2.11.0+cu130", "pytest==9.2.0"]


def test_a_torch_that_is_there_is_recent_enough_by_number() -> None:
    versions = {"2.9.1": False, "2.10.0": True, "2.11.0+cu130": True, "2.10.0a0+git12": True, "3.0": True, "2": False}
    pyproject = {"project": {"dependencies": ["numpy>=1.26", "torch>=2.10"]}}
    assert {version: setup.recent_enough(version, pyproject) for version in versions} == versions


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A folder whose interpreter is this one, which has pip."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    return tmp_path


@pytest.mark.parametrize(
    ("stamp", "python_named", "torch", "has_driver", "reason"),
    [
        ({"base": sys.prefix}, True, "torch==2.12.0", True, None),
        ({"base": "/opt"}, False, "", False, None),
        ({"base": "/opt"}, True, "", False, "PYTHON names another interpreter than /opt"),
        ({}, True, "", False, None),
        ({"with_base": True}, False, "", False, None),
        ({"with_base": True}, False, "torch==2.12.0", False, "TORCH asks for a torch of its own"),
        ({"cpu_build": True}, False, "", False, None),
        ({"cpu_build": True}, False, "", True, "NVIDIA driver"),
        ({"cpu_build": True}, False, "torch==2.13.0", False, "TORCH asks for another"),
        ({"cpu_build": True}, False, "torch==2.13.0+cpu", False, None),
    ],
)
def test_when_an_environment_is_made_anew(
    venv: Path, stamp: dict[str, Any], python_named: bool, torch: str, has_driver: bool, reason: str | None
) -> None:
    found = setup.rebuild_reason(venv, stamp, python_named, torch, has_driver)
    assert found is None if reason is None else found is not None and reason in found


def test_an_environment_that_is_not_there_or_does_not_run_is_made(tmp_path: Path) -> None:
    assert setup.rebuild_reason(tmp_path / "gone", {}, False, "", False) == "there is none yet"
    assert setup.rebuild_reason(tmp_path, {}, False, "", False) == "the one there is broken"
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\necho 3.9\n")
    python.chmod(0o755)
    assert setup.rebuild_reason(tmp_path, {}, False, "", False) == "the one there is of Python 3.9"


def test_a_torn_stamp_is_none(tmp_path: Path) -> None:
    whole = json.dumps({"extras": ["test"], "torch": ""})
    for text, stamp in ((whole, json.loads(whole)), (whole[:9], {})):
        (tmp_path / "pagetide.json").write_text(text)
        assert setup.stamp_of(tmp_path) == stamp
    assert setup.stamp_of(tmp_path / "gone") == {}


def test_the_build_for_cpus_is_taken_where_the_user_chose_nothing(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = venv / "bin" / "python"
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("sys.platform", "linux")
    assert setup.cpu_torch_suits(python, ["test"], "", False)
    for chosen in ((["cuda"], "", False), (["test"], "torch==2.12.0", False), (["test"], "", True)):
        assert not setup.cpu_torch_suits(python, *chosen), chosen
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "http://127.0.0.1:1/simple")
    assert not setup.cpu_torch_suits(python, ["test"], "", False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert not setup.cpu_torch_suits(python, ["test"], "", False)


class Pip:
    """Records what `pip install` is called with; a call that names an address in `unreachable` fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, visible: dict[str, str], suits: bool = True) -> None:
        self.calls: list[list[str]] = []
        self.unreachable = ""
        monkeypatch.setattr(setup, "pip", self._call)
        monkeypatch.setattr(setup, "visible_to", lambda python: visible)
        monkeypatch.setattr(setup, "cpu_torch_suits", lambda *asked: suits)

    def _call(self, python: Path, *arguments: str | Path) -> None:
        self.calls.append([str(argument) for argument in arguments])
        if self.unreachable in self.calls[-1]:
            raise setup.SetupError("it cannot be reached")


CPU_TORCH = ["--index-url", setup.CPU_INDEX, "--no-deps", "--timeout=5", "--retries=0", PINNED["torch"]]


def project_of(venv: Path, *more: str) -> list[str]:
    return ["-c", f"{venv}/constraints.txt", "--no-build-isolation", "-e", ".[dev,test]", *more]


@pytest.mark.parametrize("reached", [True, False])
def test_torch_alone_comes_from_the_index_of_builds_for_cpus(
    venv: Path, monkeypatch: pytest.MonkeyPatch, reached: bool
) -> None:
    """Where that index cannot be reached, torch comes with the rest, from the user's index."""
    pip = Pip(monkeypatch, {})
    pip.unreachable = "" if reached else setup.CPU_INDEX
    assert setup.install(venv, ["dev", "test"], "", False, False) is reached
    setuptools = ["--quiet", "-c", f"{venv}/constraints.txt", "setuptools"]
    assert pip.calls == [CPU_TORCH, setuptools, project_of(venv)]
    assert pins_in(venv) == PINNED


def pins_in(venv: Path) -> dict[str, str]:
    return setup.pins((venv / "constraints.txt").read_text())


def test_a_torch_that_was_chosen_or_is_there_comes_from_no_other_index(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch, {}, suits=False)
    assert setup.install(venv, ["dev", "test"], "torch==2.12.0", False, False) is False
    assert pip.calls[1:] == [project_of(venv, "torch==2.12.0")] and "setuptools" in pip.calls[0]
    assert pins_in(venv) == {**PINNED, "torch": "torch==2.12.0"}
    pip = Pip(monkeypatch, {"torch": "2.11.0+cu130", "numpy": "1.26"})
    assert setup.install(venv, ["dev", "test"], "", True, False) is False
    assert pip.calls[1:] == [["--quiet", *project_of(venv)]] and "setuptools" in pip.calls[0]
    kept = {name: line for name, line in PINNED.items() if name != "numpy"}
    assert pins_in(venv) == {**kept, "torch": "torch==2.11.0+cu130"}


def test_pip_leaves_the_kernels_to_what_shows_its_progress(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environs: list[dict[str, str]] = []
    done = subprocess.CompletedProcess((), 0)
    monkeypatch.setattr(subprocess, "run", lambda command, **more: environs.append(more["env"]) or done)
    setup.pip(venv / "bin" / "python", "-e", ".")
    assert [environ["PAGETIDE_NATIVE"] for environ in environs] == ["0"]


def test_a_failed_install_is_told(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Pip(monkeypatch, {}).unreachable = "setuptools"
    with pytest.raises(setup.SetupError, match="cannot be reached"):
        setup.install(venv, ["test"], "", False, False)


def test_an_empty_environment_replaces_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, link, commands = tmp_path / "target", tmp_path / "link", []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        commands.append(command[1:])
        assert not os.path.lexists(command[-1])
        (Path(command[-1]) / "lib" / "python3" / "site-packages").mkdir(parents=True)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(setup.subprocess, "run", run)
    monkeypatch.setattr(sys, "prefix", "/opt/env")
    monkeypatch.setattr(sys, "path", [*sys.path, "/opt/env/lib/site-packages", "/usr/lib/site-packages", "/opt/env"])
    target.mkdir()
    (target / "old").touch()
    link.symlink_to(target)
    setup.create(link, with_base=False)
    assert commands.pop() == ["-m", "venv", str(link)]
    assert (target / "old").exists() and not link.is_symlink(), "what a link names is the user's"
    setup.create(target, with_base=True)
    assert commands.pop() == ["-m", "venv", "--system-site-packages", str(target)]
    assert not (target / "old").exists()
    (added,) = target.rglob("*.pth")
    assert added.read_text() == "import site; site.addsitedir('/opt/env/lib/site-packages')\n"


def test_an_interpreter_that_cannot_make_environments_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(setup.SetupError, match="has no ensurepip"):
        setup.create(tmp_path, False)
    assert (tmp_path / "old").exists()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `set_up` makes and installs; it finds no torch but what is installed, which is a build for CPUs."""
    done: list[tuple[Any, ...]] = []

    def create(venv: Path, with_base: bool) -> None:
        venv.mkdir(exist_ok=True)
        done.append(("create", with_base))

    def install(venv: Path, extras: list[str], torch: str, keeps: bool, has_driver: bool) -> bool:
        assert not (venv / "pagetide.json").exists(), "one that is not complete has no stamp"
        done.append(("install", extras, torch, keeps))
        return not torch

    monkeypatch.setattr(setup, "create", create)
    monkeypatch.setattr(setup, "install", install)
    monkeypatch.setattr(setup, "rebuild_reason", lambda venv, *_: None if venv.is_dir() else "there is none yet")
    monkeypatch.setattr(setup, "output_of", lambda python, *_: None if python == sys.executable else "2.13.0")
    return done


def test_an_environment_is_made_once_and_completed_where_more_is_asked(tmp_path: Path, steps: list[Any]) -> None:
    venv = tmp_path / "venv"
    setup.set_up(venv, ["test"], "", False, False)
    assert steps == [("create", False), ("install", ["test"], "", False)]
    assert setup.stamp_of(venv)["cpu_build"] is True
    setup.set_up(venv, ["test"], "", False, False)
    assert len(steps) == 2
    setup.set_up(venv, ["dev"], "torch==2.12.0", False, False)
    assert steps[2:] == [("install", ["dev", "test"], "torch==2.12.0", False)]
    setup.set_up(venv, ["test"], "", False, False)
    assert len(steps) == 3, "choices hold"


def test_a_torch_of_the_interpreter_is_used(tmp_path: Path, steps: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "output_of", lambda *_: "2.11.0+cu130")
    setup.set_up(tmp_path / "first", [], "", False, False)
    assert steps == [("create", True), ("install", [], "", True)]
    steps.clear()
    setup.set_up(tmp_path / "second", [], "torch==2.12.0", False, False)
    assert steps == [("create", False), ("install", [], "torch==2.12.0", False)]


def test_the_torch_of_an_environment_that_was_made_by_other_means_stays_unless_another_is_chosen(
    tmp_path: Path, steps: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "visible_to", lambda python: {"torch": "2.11.0+cu130"})
    for torch in ("", "torch==2.12.0"):
        venv = tmp_path / f"venv{torch}"
        venv.mkdir()
        setup.set_up(venv, [], torch, False, False)
    assert steps == [("install", [], "", True), ("install", [], "torch==2.12.0", False)]


def test_an_environment_whose_torch_cannot_be_imported_is_not_complete(
    tmp_path: Path, steps: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "output_of", lambda *_: None)
    with pytest.raises(setup.SetupError, match="cannot be imported"):
        setup.set_up(tmp_path / "venv", [], "", False, False)
    assert setup.stamp_of(tmp_path / "venv") == {}


def test_every_requirement_has_one_exact_public_version_that_satisfies_it() -> None:
    project = PYPROJECT["project"]
    extras = ("constrained", "server", "ray", "shards", "triton", "examples", "test", "test-all", "dev", "dist")
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    for requirement in map(Requirement, lines):
        if requirement.name != "pagetide":
            pin = Requirement(PINNED[setup.normalised(requirement.name)])
            (exact,) = pin.specifier
            assert exact.operator == "==" and Version(exact.version).local is None, f"{pin}: found on one index only"
            assert requirement.specifier.contains(exact.version, prereleases=True), pin


# Of libraries whose versions transformers and FastAPI bound, and of modules that have another name than their distribution.
BROUGHT = {"huggingface-hub", "safetensors", "tokenizers", "pydantic", "starlette"}
NAMES = {"yaml": "pyyaml", "zmq": "pyzmq", "pynvml": "nvidia-ml-py", "cuda": "cuda-bindings", "PIL": "pillow"}


def test_what_is_imported_is_declared() -> None:
    optional = [line for lines in PYPROJECT["project"]["optional-dependencies"].values() for line in lines]
    lines = [*PYPROJECT["build-system"]["requires"], *PYPROJECT["project"]["dependencies"], *optional]
    known = {setup.normalised(Requirement(line).name) for line in lines} | BROUGHT | sys.stdlib_module_names
    known |= {setup.normalised(path.stem) for folder in ("tests", ".ci") for path in (ROOT / folder).glob("*.py")}

    def is_known(name: str) -> bool:
        return name in ("tests", "benchmarks", "pagetide", *known) or setup.normalised(NAMES.get(name, name)) in known

    missing = set()
    for path in (path for path in files() if path.suffix == ".py" and "peers" not in path.parts):
        if all(map(is_known, re.findall(r"^\s*(?:from|import)\s+(\w+)", path.read_text("utf-8"), re.MULTILINE))):
            continue  # parsing all files takes ten seconds
        for one in source_rules.imports(source_rules.tree_of(path), "pagetide"):
            name = one.target.partition(".")[0]
            if not one.relative and not is_known(name):
                missing.add((name, path.name))
    assert missing == set()
