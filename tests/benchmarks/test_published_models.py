"""The data of published checkpoints is complete, and docs/models.md has a row for each."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
MODELS = yaml.safe_load((ROOT / "benchmarks" / "published_models.yaml").read_text("utf-8"))
NAMES = [one["id"] for one in MODELS]
# The most downloaded.
EXPECTED = {
    "Qwen/Qwen3-VL-2B-Instruct",
    "Qwen/Qwen3.6-35B-A3B",
    "Qwen/Qwen3.6-27B",
    "google/gemma-4-26B-A4B-it",
    "google/gemma-4-31B-it",
}


def test_each_has_a_class_a_type_a_configuration_and_a_source() -> None:
    assert len(NAMES) == len(set(NAMES)) >= 60
    assert set(NAMES) >= EXPECTED
    for one in MODELS:
        assert one.keys() <= {"id", "class", "type", "source", "config", "file"}
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", one["id"])
        assert re.fullmatch(r"\w+", one["class"]) and re.fullmatch(r"\w+", one["type"])
        assert re.match(r"[\w.-]+/[\w.-]+: [\w./-]+", one["source"]), one["id"]
        assert isinstance(one["config"], dict)


def test_the_document_has_a_row_for_each() -> None:
    text = (ROOT / "docs" / "models.md").read_text("utf-8")
    rows = re.findall(r"^\| `([^`]+/[^`]+)` \| `(\w+)` \| (\S.*) \|$", text, re.MULTILINE)
    assert [row[:2] for row in rows] == [(one["id"], one["class"]) for one in MODELS]
    served = sum(answer.startswith("**served, equal**") for *_, answer in rows)
    assert f"\n{served} of {len(rows)} are served and equal to transformers.\n" in text
