"""What `make dist` refuses (.ci/distribution.py): wheels that differ, metadata that an index refuses, a false release."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import distribution  # .ci/distribution.py
import pytest

METADATA = "Metadata-Version: 2.4\nName: pagetide\nVersion: 0.1.0\nDescription-Content-Type: text/markdown\n\n{}"
PYPROJECT: dict[str, Any] = {"project": {"version": "0.1.0", "urls": {"Repository": "https://example.org/pagetide"}}}
CHANGELOG = "# Changelog\n\n## [0.1.0] - 2026-11-23\n"


def wheel(path: Path, **files: str) -> Path:
    """A zip file with these modules of pagetide."""
    with zipfile.ZipFile(path, "w") as opened:
        for name, text in files.items():
            opened.writestr(f"pagetide/{name}.py", text)
    return path


def test_links_are_no_files_of_a_wheel_and_what_they_lead_to_is() -> None:
    tracked = ["README.md", "src/pagetide", "pagetide/cli.py", "pagetide/cache", "cache/blocks.py", "tests/test_x.py"]
    assert distribution.expected_files(tracked) == {"pagetide/cli.py", "pagetide/cache/blocks.py"}


def test_wheels_have_to_agree_with_each_other_and_with_git(tmp_path: Path) -> None:
    one, other = wheel(tmp_path / "1", a="x"), wheel(tmp_path / "2", a="y", b="z")
    distribution.check_files(one, one, {"pagetide/a.py"})
    with pytest.raises(distribution.DistError, match=r"differ in: pagetide/a\.py, pagetide/b\.py"):
        distribution.check_files(one, other, {"pagetide/a.py"})
    with pytest.raises(distribution.DistError, match=r"lacks \['pagetide/b\.py'\].* has \['pagetide/a\.py'\]"):
        distribution.check_files(one, one, {"pagetide/b.py"})


def test_a_description_stands_on_its_own_and_metadata_are_valid() -> None:
    raw = METADATA.format("[a](https://example.org) [b](#part)")
    distribution.check_metadata(raw.encode(), "x")
    for refused, said in (
        (METADATA.format("[a](docs/run.md) ![c](docs/a.svg)"), r"relative links: docs/run\.md, docs/a\.svg"),
        (METADATA.format(""), "is empty"),
        (raw.replace("0.1.0", "1.x"), r"'1\.x' is invalid for 'version'"),
    ):
        with pytest.raises(distribution.DistError, match=said):
            distribution.check_metadata(refused.encode(), "x")


def test_the_description_of_the_package_has_no_relative_links() -> None:
    assert distribution.LINK.findall((distribution.ROOT / "docs" / "package.md").read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({}, []),
        ({"pyproject": {"project": {"version": "0.1.0"}}}, ["Repository"]),
        ({"readme": f"git clone {distribution.PLACEHOLDER}"}, [distribution.PLACEHOLDER]),
        ({"changelog": "## [0.1.0] - unreleased"}, ["CHANGELOG.md"]),
        ({"changelog": "## [0.0.9] - 2026-01-01", "status": " M a"}, ["CHANGELOG.md", "not committed"]),
    ],
)
def test_what_keeps_a_checkout_from_being_a_release(change: dict[str, Any], missing: list[str]) -> None:
    given = {"pyproject": PYPROJECT, "changelog": CHANGELOG, "readme": "# pagetide", "status": ""} | change
    found = distribution.missing_for_release(**given)
    assert len(found) == len(missing)
    assert all(word in sentence for word, sentence in zip(missing, found, strict=True))
