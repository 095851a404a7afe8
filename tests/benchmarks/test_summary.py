"""The figures in the tables of the README and of docs/performance.md are those of benchmarks/summary.json.

`python tests/benchmarks/test_summary.py` lists the figures of the documents, in the form of the summary, for whoever adds one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PERFORMANCE = "docs/performance.md"
KEYS = ["name", "value", "unit", "machine", "command", "date"]
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
UNITS = "%|x|µs|ms|s|GB|MB|kB|MiB|bytes|points|tokens/s|M|steps"
QUANTITY = re.compile(rf"({NUMBER.pattern})(?: ({UNITS})(?![\w/]))?")
BOUND = re.compile(r"\([\d.]+(?:: missed)?\)")  # stands behind a ratio to a peer
# Columns that hold no measured figure, and the section that is about the tests.
NOT_MEASURED = {"", "bound", "target", "machine", "command", "holds now", "effect"}
TESTS = "Tests"


def tables(document: str) -> Iterator[tuple[str, list[list[str]]]]:
    """The tables of a document, each with the heading before it."""
    heading, table = "", list[list[str]]()
    for line in [*(ROOT / document).read_text("utf-8").splitlines(), ""]:
        if line.startswith("|"):
            table.append([cell.strip() for cell in line.strip("|").split("|")])
        elif table:
            yield heading, table
            table = []
        if line.startswith("#"):
            heading = line.strip("# ")


def quoted(document: str) -> dict[str, list[tuple[float, str]]]:
    """The quantities of a document's tables, by heading, row and column."""
    found: dict[str, list[tuple[float, str]]] = {}
    for heading, (columns, _, *rows) in tables(document):
        if heading == TESTS or (document != PERFORMANCE and "benchmarks." not in rows[0][-1]):
            continue
        title = ""
        for row in rows:
            title = title if row[0] in ("", "...") else row[0]
            for column, cell in zip(columns[1:], row[1:], strict=True):
                quantities = [(number(value), unit) for value, unit in QUANTITY.findall(measured(column, cell))]
                if quantities and column not in NOT_MEASURED:
                    name = f"{document}: {heading}: {title}: {column}"
                    found.setdefault(name, []).extend(quantities)
    return found


def measured(column: str, cell: str) -> str:
    return BOUND.sub("", cell) if "/ " in column and "/ bare" not in column else cell


def number(text: str) -> float:
    return float(text.replace(",", ""))


def summary() -> list[dict[str, object]]:
    content: list[dict[str, object]] = json.loads((ROOT / "benchmarks" / "summary.json").read_text("utf-8"))
    return content


def summarized(document: str) -> dict[str, list[tuple[float, str]]]:
    """The quantities of the summary for a document, by name."""
    found: dict[str, list[tuple[float, str]]] = {}
    for figure in summary():
        name, value = str(figure["name"]), figure["value"]
        if name.startswith(f"{document}: "):
            assert isinstance(value, int | float), figure
            found.setdefault(name, []).append((value, str(figure["unit"])))
    return found


@pytest.mark.parametrize("document", ["README.md", PERFORMANCE])
def test_every_figure_is_in_the_summary(document: str) -> None:
    """With its unit where the document has it beside the number; elsewhere the unit stands at the row or the column."""
    figures, known = quoted(document), summarized(document)
    assert figures.keys() == known.keys()
    for name, quantities in figures.items():
        assert [value for value, _ in quantities] == [value for value, _ in known[name]], name
        for (_, unit), (_, known_unit) in zip(quantities, known[name], strict=True):
            assert unit in ("", known_unit), name


def test_the_translation_has_the_same_figures() -> None:
    def numbers(document: str) -> list[list[str]]:
        measured = (rows for _, rows in tables(document) if "benchmarks." in rows[2][-1])
        return [NUMBER.findall(" ".join(row[1:])) for rows in measured for row in rows[2:]]

    assert numbers("README.md") == numbers("README.zh-CN.md") and len(numbers("README.md")) == 10


def test_the_summary_is_flat_and_complete() -> None:
    for figure in summary():
        assert list(figure) == KEYS, figure
        assert figure["name"] and figure["machine"] and figure["command"], figure
        assert figure["date"] is None or re.fullmatch(r"20\d\d-\d\d-\d\d", str(figure["date"])), figure


def test_commands_are_there() -> None:
    """Each `benchmarks.NAME` in the documents, and in the summary, is a program of the checkout."""
    files = [ROOT / name for name in ("README.md", "README.zh-CN.md", "Makefile", "benchmarks/summary.json")]
    for path in (*files, *(ROOT / "docs").glob("*.md")):
        for name in re.findall(r"\bbenchmarks\.([a-z_]+(?:\.[a-z_]+)?)", path.read_text("utf-8")):
            module = ROOT / "benchmarks" / name.replace(".", "/")
            assert module.is_dir() or module.with_suffix(".py").is_file(), f"{path.name} names benchmarks.{name}"


if __name__ == "__main__":
    for document in ("README.md", PERFORMANCE):
        for name, quantities in quoted(document).items():
            for value, unit in quantities:
                print(json.dumps(dict.fromkeys(KEYS) | {"name": name, "value": value, "unit": unit}, ensure_ascii=False))
