"""`make test-pythons` (.ci/pythons.py): which interpreters it takes, and what its environments have."""

from __future__ import annotations

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
    assert pythons.version_of(Path(sys.executable)) == f"{sys.version_info.major}.{sys.version_info.minor}"


def test_the_versions_are_those_that_the_project_names() -> None:
    classifiers = (ROOT / "pyproject.toml").read_text()
    assert all(f'Python :: {version}"' in classifiers for version in pythons.VERSIONS)


def test_environments_have_what_the_quick_tests_need_but_torch() -> None:
    names = {pythons.name_of(line) for line in pythons.requirements()}
    assert {"pytest", "hypothesis", "numpy", "msgspec"} <= names
    assert names.isdisjoint({"torch", "transformers", "pagetide"})
