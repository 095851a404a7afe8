"""README, its translation and the package's description say what docs/capabilities.yaml says, and each row has its evidence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT, loaded

SCRIPT = ROOT / ".ci" / "capabilities.py"
ROWS = loaded(SCRIPT).read()
TESTS = "import pytest\ndef test_runs(): pass\ndef test_itself(): pytest.skip('')\n@pytest.mark.skip\ndef test_marked(): pass"
# By its number, how the lines begin that count of a section: the status, pagetide's row of the comparison, the limitations.
README = {1: "| ", 4: "| pagetide", 7: "- "}
LINES = {"README.md": README, "README.zh-CN.md": README, "docs/package.md": {1: "- "}}


def plain(text: str) -> str:
    return " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)|[*`|]", r"\1", text).split())


@pytest.mark.parametrize("document", LINES)
def test_a_document_says_what_is_possible_and_nothing_else(document: str) -> None:
    text = (ROOT / document).read_text("utf-8")
    said = {row["said"][document]: row["state"] for row in ROWS if document in row["said"]}
    for phrase, state in said.items():
        assert phrase in plain(text), phrase
        assert (re.search("not run|未运行", phrase) is not None) == (state == "not run"), phrase
    sections = re.split(r"^## .*$", text, flags=re.MULTILINE)
    found = [line for i, begin in LINES[document].items() for line in sections[i].splitlines() if line.startswith(begin)]
    assert len(found) >= 7
    phrases = re.compile("|".join(map(re.escape, sorted(said, key=len, reverse=True))))
    for line in found:
        rest = phrases.sub("", plain(line).removeprefix("pagetide 0.1.0"))
        assert re.search(r"\w", rest) is None, f"no row says {rest!r} of {line!r}"


def test_rows_without_evidence_fail(tmp_path: Path) -> None:
    planted = {
        "tests/test_a.py::test_runs": None,
        "a figure": None,
        "tests/test_a.py::test_marked": "it has the mark skip",
        "tests/test_a.py::test_itself": "it may skip itself",
        "tests/test_a.py::test_gone": "pytest does not collect it",
        "another figure": "benchmarks/summary.json has no such figure",
    }
    row = {"capability": "a", "state": "works", "evidence": [*planted], "said": {}}
    rows = [row, row | {"capability": "a GPU", "evidence": ["a figure"]}, row | {"evidence": []}]
    for name, content in {"docs/capabilities.yaml": rows, "benchmarks/summary.json": [{"name": "a figure"}]}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps(content))  # which is YAML too
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(TESTS)
    done = subprocess.run([sys.executable, "-P", SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    *found, last = [line.removeprefix("docs/capabilities.yaml: ") for line in done.stderr.splitlines()]
    wanted = [f"a: {name}: {why}" for name, why in planted.items() if why]
    assert (done.returncode, found) == (
        1,
        [*wanted, "a GPU: rows about a GPU or several machines, and no others, are 'not run'"],
    )
    assert last.startswith("a: a row has capability, state, evidence, said")
