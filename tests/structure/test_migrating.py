"""docs/migrating.md has the tables of configs/migrating.yaml."""

from __future__ import annotations

import migrating
import pytest

TEXT = migrating.DOCUMENT.read_text(encoding="utf-8")


def test_the_document_is_up_to_date() -> None:
    assert migrating.updated(TEXT, migrating.read() | migrating.fields()) == TEXT, "run: python .ci/migrating.py"


def test_a_changed_row_changes_the_document() -> None:
    tables = migrating.read()
    tables["llm"]["rows"][0]["note"] = "a | b"
    assert "| `gpu_memory_utilization` | `kv_memory` | a \\| b |" in migrating.updated(TEXT, tables)
    with pytest.raises(ValueError, match="no place for the table llm"):
        migrating.updated(TEXT.replace(migrating.begin("llm"), ""), migrating.read())


def test_rows_have_known_fields() -> None:
    for table in migrating.read().values():
        assert table.keys() == {"for", "columns", "rows"}
        for row in table["rows"]:
            assert row.keys() <= {"names", "kind", "theirs", "here", "note", "answer"}
            assert "names" in row or row["kind"] == "other"
            assert "here" in row or "note" in row
