"""Writes the tables of docs/migrating.md from configs/migrating.yaml, and that of requests' fields, each between its marks.

    python .ci/migrating.py

tests/structure/test_migrating.py fails while the document is out of date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pagetide.server.fields import ANSWERS, AS_HERE, IGNORED

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "migrating.md"
TABLES = ROOT / "configs" / "migrating.yaml"
END = "<!-- end of the table -->"


def begin(name: str) -> str:
    """The mark before the table `name`."""
    source = "server/fields.py" if name == "fields" else "configs/migrating.yaml"
    return f"<!-- table {name}: written by .ci/migrating.py from {source} -->"


def markdown(table: Mapping[str, Any]) -> str:
    """A table as Markdown."""
    columns = table["columns"]
    lines = [columns, ["---"] * len(columns)]
    for row in table["rows"]:
        theirs = row.get("theirs") or ", ".join(f"`{name}`" for name in row["names"])
        lines.append([theirs, row.get("here", ""), row.get("note", "")][: len(columns)])
    cells = ([str(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |".replace("  ", " ") for line in cells)


def updated(text: str, tables: Mapping[str, Mapping[str, Any]]) -> str:
    """`text` with every table between its marks. Raises ValueError if a mark is missing."""
    for name, table in tables.items():
        before, mark, rest = text.partition(begin(name))
        _, end, after = rest.partition(END)
        if not mark or not end:
            raise ValueError(f"{DOCUMENT} has no place for the table {name}: add {begin(name)} and {END}")
        text = f"{before}{mark}\n\n{markdown(table)}\n\n{end}{after}"
    return text


def read() -> dict[str, Any]:
    """The tables by their names."""
    tables: dict[str, Any] = yaml.safe_load(TABLES.read_text(encoding="utf-8"))
    return tables


def fields() -> dict[str, Any]:
    """The table of requests' fields that `pagetide.server.fields` has: names with the same reason share a row."""
    neutral = {name: f"`{json.dumps(value)}`" for name, value in AS_HERE.items() if value is not None}
    texts = {name: f"ignored: {why}" for name, why in IGNORED.items()} | ANSWERS
    rows: dict[str, list[str]] = {}
    for name, text in texts.items():
        rows.setdefault(text, []).append(f"`{name}`" + (f" ({neutral[name]} is accepted)" if name in neutral else ""))
    others = (f"`{name}`" + (f" ({neutral[name]})" if name in neutral else "") for name in AS_HERE if name not in ANSWERS)
    rows["not served: accepted with the value in brackets, or null"] = list(others)
    table = [{"theirs": ", ".join(names), "here": text} for text, names in rows.items()]
    return {"fields": {"columns": ["field of a request", "here"], "rows": table}}


def main() -> None:
    """Write the tables."""
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8"), read() | fields()), encoding="utf-8")


if __name__ == "__main__":
    main()
