"""The decisions of the set-up script (.ci/setup.py), and that constraints.txt belongs to pyproject.toml."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import setup  # .ci/setup.py

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


SMALL: dict[str, Any] = {
    "build-system": {"requires": ["setuptools>=77"]},
    "project": {
        "name": "pagetide",
        "dependencies": ["torch>=2.10", "PyYAML>=6.0"],
        "optional-dependencies": {
            "test": ["pytest>=8"],
            "dev": ["pagetide[test]", "ruff", "pagetide[dev]"],
            "flash": ["flash-attn"],
        },
    },
    "tool": {"setuptools": {"packages": ["pagetide"]}, "ruff": {"line-length": 120}},
}
PINS = {"torch": "torch==2.13.0", "pyyaml": "PyYAML==6.0.3", "pytest": "pytest==9.2.0"}


def test_requirements_are_those_of_building_running_and_the_extras() -> None:
    base = ["setuptools>=77", "torch>=2.10", "PyYAML>=6.0"]
    assert setup.requirements(SMALL, []) == base
    assert setup.requirements(SMALL, ["test"]) == [*base, "pytest>=8"]


def test_an_extra_that_names_the_project_stands_for_its_extras_even_in_a_circle() -> None:
    assert setup.implied(SMALL, ["dev"]) == {"dev", "test"}
    assert set(setup.requirements(SMALL, ["dev"])) - set(setup.requirements(SMALL, [])) == {"ruff", "pytest>=8"}


def test_pins_are_read_without_comments() -> None:
    text = "# head\n\nPyYAML==6.0.3  # why\ntyping_extensions==4.16.0\n"
    assert setup.pins(text) == {"pyyaml": "PyYAML==6.0.3", "typing-extensions": "typing_extensions==4.16.0"}


def test_an_environment_of_its_own_is_held_to_every_pin() -> None:
    visible = {"pip": "23.0", "pyyaml": "5.0"}
    assert setup.constraints(PINS, visible, "", reuses_base=False) == list(PINS.values())


def test_a_chosen_torch_replaces_the_pin() -> None:
    limits = setup.constraints(PINS, {}, "torch==2.12.0", reuses_base=False)
    assert limits == ["PyYAML==6.0.3", "pytest==9.2.0"]


def test_beside_a_torch_that_is_there_pins_hold_only_for_what_is_missing() -> None:
    visible = {"torch": "2.11.0+cu130", "pyyaml": "6.0.1"}
    limits = setup.constraints(PINS, visible, "", reuses_base=True)
    assert limits == ["torch==2.11.0+cu130", "pytest==9.2.0"]


@pytest.mark.parametrize(
    ("visible", "torch", "reuses_base", "missing"),
    [
        ({}, "", False, {"torch": "torch==2.13.0", "pyyaml": "PyYAML==6.0.3"}),
        ({"torch": "2.13.0+cpu", "pyyaml": "6.0.3"}, "", False, {}),
        ({"torch": "2.12.0", "pyyaml": "6.0.3"}, "", False, {"torch": "torch==2.13.0"}),
        ({"torch": "2.13.0", "pyyaml": "6.0.3"}, "torch==2.12.0", False, {"torch": "torch==2.12.0"}),
        ({"torch": "2.11.0+cu130", "pyyaml": "6.0.1"}, "", True, {}),
        ({"torch": "2.11.0+cu130"}, "", True, {"pyyaml": "PyYAML==6.0.3"}),
    ],
)
def test_what_will_be_fetched(visible: dict[str, str], torch: str, reuses_base: bool, missing: dict[str, str]) -> None:
    wanted = SMALL["project"]["dependencies"]
    assert setup.to_install(wanted, PINS, visible, torch, reuses_base) == missing


def test_the_fingerprint_follows_what_is_installed_and_not_how_it_is_linted() -> None:
    first = setup.fingerprint(SMALL, "a==1", "script")
    linted = {**SMALL, "tool": {**SMALL["tool"], "ruff": {"line-length": 99}}}
    more = {**SMALL, "tool": {**SMALL["tool"], "setuptools": {"packages": ["pagetide", "pagetide.engine"]}}}
    assert setup.fingerprint(linted, "a==1", "script") == first
    others = {
        setup.fingerprint(*case) for case in [(more, "a==1", "script"), (SMALL, "a==2", "script"), (SMALL, "", "")]
    }
    assert len(others | {first}) == 4


@pytest.mark.parametrize(
    ("version", "enough"),
    [("2.9.1", False), ("2.10.0", True), ("2.11.0+cu130", True), ("2.10.0a0+git12", True), ("3.0", True), ("2", False)],
)
def test_a_torch_that_is_there_is_recent_enough_by_number(version: str, enough: bool) -> None:
    assert (setup.release(version) >= setup.least_release("torch>=2.10")) is enough


STAMP = setup.Stamp("f", "3.11", "/usr", ("test",), "", reuses_base=False, complete=True)
WANTED = replace(STAMP, complete=False)


@pytest.mark.parametrize(
    ("stamp", "wanted", "runs_as", "python_named", "reason"),
    [
        (STAMP, WANTED, "3.11", False, None),
        (STAMP, replace(WANTED, fingerprint="g", extras=("dev",), torch="torch==2.12.0"), "3.11", False, None),
        (STAMP, replace(WANTED, base="/opt"), "3.11", False, None),
        (STAMP, replace(WANTED, base="/opt"), "3.11", True, "PYTHON names another"),
        (STAMP, WANTED, None, False, "broken"),
        (STAMP, WANTED, "3.12", False, "is now 3.12"),
        (replace(STAMP, complete=False), WANTED, "3.11", False, "interrupted"),
        (None, WANTED, "3.12", False, None),
        (None, WANTED, None, False, "broken"),
        (None, WANTED, "3.9", False, "of Python 3.9"),
        (replace(STAMP, reuses_base=True), WANTED, "3.11", False, None),
        (replace(STAMP, reuses_base=True), replace(WANTED, torch="torch==2.12.0"), "3.11", False, "of its own"),
    ],
)
def test_when_an_environment_is_made_anew(
    stamp: Any, wanted: Any, runs_as: str | None, python_named: bool, reason: str | None
) -> None:
    said = setup.rebuild_reason(stamp, wanted, runs_as, True, python_named, has_driver=False)
    assert said is None if reason is None else reason in said


def test_without_an_environment_one_is_made() -> None:
    assert setup.rebuild_reason(None, WANTED, None, False, False, False) == "there is none yet"


@pytest.mark.parametrize(
    ("stamp", "torch", "has_driver", "reason"),
    [
        (STAMP, "", True, None),  # somebody's own choice, of a build for CPUs even
        (replace(STAMP, cpu_build=True), "", False, None),
        (replace(STAMP, cpu_build=True), "", True, "NVIDIA driver now"),
        (replace(STAMP, cpu_build=True), "torch==2.13.0", False, "TORCH asks for another"),
        (replace(STAMP, cpu_build=True), "torch==2.13.0+cpu", False, None),
    ],
)
def test_a_build_for_cpus_that_nobody_asked_for_gives_way(
    stamp: Any, torch: str, has_driver: bool, reason: str | None
) -> None:
    wanted = replace(WANTED, torch=torch, cpu_build=stamp.cpu_build)
    said = setup.rebuild_reason(stamp, wanted, "3.11", True, False, has_driver)
    assert said is None if reason is None else reason in said


def test_a_stamp_comes_back_as_it_was_written_and_a_torn_one_is_none(tmp_path: Path) -> None:
    environment = setup.Environment(tmp_path)
    assert environment.stamp() is None
    environment.set_stamp(STAMP)
    assert environment.stamp() == STAMP
    (tmp_path / "pagetide.json").write_text(
        json.dumps({**asdict(STAMP), "cpu_build": None}).replace('"cpu_build": null, ', "")
    )
    assert environment.stamp() == STAMP  # of a set-up that knew no builds for CPUs
    (tmp_path / "pagetide.json").write_text('{"fingerprint": "f", "pyth')
    assert environment.stamp() is None


def test_an_environment_without_an_interpreter_does_not_run(tmp_path: Path) -> None:
    assert setup.Environment(tmp_path / "gone").runs_as() is None


# ---- constraints.txt ----------------------------------------------------------------------------


def test_every_requirement_has_a_pin_that_satisfies_it() -> None:
    pinned = setup.pins(CONSTRAINTS)
    for requirement in map(Requirement, setup.requirements(PYPROJECT, ["test", "dev", "dist"])):
        pin = pinned[setup.normalised(requirement.name)]
        assert requirement.specifier.contains(Version(pin.partition("==")[2]), prereleases=True), pin


def test_every_pin_is_one_exact_public_version() -> None:
    for pin in setup.pins(CONSTRAINTS).values():
        name, _, version = pin.partition("==")
        assert name
        assert Version(version).local is None, f"{pin}: a local build is found on one index only"
