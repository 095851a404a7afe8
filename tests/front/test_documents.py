"""The code in README.md and docs/migrating.md runs as it stands, and the commands there are commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagetide.cli import _parser
from pagetide.engine.loading.models import BUILT_IN_FILE
from pagetide.monitor import watch

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
PACKAGE = (ROOT / "docs" / "package.md").read_text("utf-8")
MIGRATING = (ROOT / "docs" / "migrating.md").read_text("utf-8")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEMO = BUILT_IN_FILE.parent.parent / "engine" / "demo_model"


def blocks(document: str, language: str) -> dict[str, str]:
    """The blocks of a language, by the line that their fence stands in."""
    return {
        f"line {document.count(chr(10), 0, match.start()) + 1}": match[2]
        for match in BLOCK.finditer(document)
        if match[1] == language
    }


@pytest.fixture(scope="module", autouse=True)
def _one_monitor() -> Iterator[None]:
    with watch(timeout_s=60):
        yield


@pytest.fixture
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's models file, with the bundled model where it says its path; and nothing is written into the checkout."""
    (text,) = blocks(README, "yaml").values()
    models = yaml.safe_load(text)
    models["talk"]["path"] = str(DEMO)
    (tmp_path / "models.yaml").write_text(yaml.safe_dump(models), "utf-8")
    monkeypatch.setenv("PAGETIDE_CONFIG", str(tmp_path / "models.yaml"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_models")
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(text, id=name)
        for name, text in [*blocks(README, "python").items(), *blocks(PACKAGE, "python").items()]
    ],
)
def test_readme_and_package_description(block: str) -> None:
    if "json_schema" in block:
        pytest.importorskip("llguidance")
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


def test_migrating(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    ours = [text for text in blocks(MIGRATING, "python").values() if text.startswith("# pagetide\n")]
    theirs = [
        text for text in blocks(MIGRATING, "python").values() if text.startswith(("# transformers\n", "# vLLM\n"))
    ]
    for block in ours:
        exec(compile(block, "docs/migrating.md", "exec"), names)
    assert (len(ours), len(theirs)) == (6, 4)
    assert capsys.readouterr().out.count("\n") > 8


def test_commands() -> None:
    lines = [line for text in blocks(README, "").values() for line in text.splitlines() if line.startswith("pagetide ")]
    for line in lines:
        _parser().parse_args(shlex.split(line, comments=True)[1:])
    assert len(lines) >= 8
