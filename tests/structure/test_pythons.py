"""`make test-pythons` (.ci/pythons.py): which interpreters it takes, and what its plugin skips: what needs torch alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pythons  # .ci/pythons.py
from checkout import ROOT


def interpreter(path: Path, version: str) -> Path:
    """A program that answers as an interpreter of this version does; without a version it fails, as pyenv's placeholders do."""
    path.write_text(f"#!/bin/sh\n{f'echo {version}' if version else 'exit 127'}\n")
    path.chmod(0o755)
    return path


def test_the_first_interpreter_of_each_further_version_is_taken(tmp_path: Path) -> None:
    versions = ["", "3.13", "3.10", "3.12", "3.13", "3.11", "3.14"]
    there = [interpreter(tmp_path / str(i), version) for i, version in enumerate(versions)]
    found = pythons.installed([tmp_path / "gone", *there], own="3.11")
    assert found == {"3.12": there[3], "3.13": there[1]}
    assert list(found) == ["3.12", "3.13"]
    assert pythons.installed(there, own="3.13").keys() == {"3.11", "3.12"}


def test_this_interpreter_answers() -> None:
    assert pythons.version_of(Path(sys.executable)) == f"{sys.version_info.major}.{sys.version_info.minor}"


def test_the_versions_are_those_that_the_project_names() -> None:
    classifiers = (ROOT / "pyproject.toml").read_text()
    assert all(f'Python :: {version}"' in classifiers for version in pythons.VERSIONS)


def test_what_needs_torch_is_skipped_and_the_rest_runs(tmp_path: Path) -> None:
    (tmp_path / "test_whole.py").write_text("import torch\n\ndef test_never():\n    assert False\n")
    (tmp_path / "test_parts.py").write_text(
        "def test_skipped():\n    from torch import nn\n\ndef test_passed():\n    pass\n\n"
        "def test_failed():\n    import no_such_module\n"
    )
    # A torch that is not there, for an interpreter that has one.
    (tmp_path / "hide.py").write_text(
        "import sys\nclass Hide:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n            from without_torch import Skips\n            return Skips().find_spec(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}:{tmp_path}"}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-rs", "-p", "hide", "-p", "without_torch",
               "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)]  # fmt: skip
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "1 failed, 1 passed, 2 skipped" in run.stdout and "No module named 'no_such_module'" in run.stdout
    assert run.stdout.count("needs torch") >= 1
