"""The comparison of model families: each outcome it can have, and that docs/models.md says of known families what is seen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import transformers
from families import FAMILIES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.model_families import EQUAL, NOT_TRIED, NOTES, REFUSED, SECTIONS, Outcome, document, main

DOCUMENT = (Path(__file__).resolve().parents[3] / "docs" / "models.md").read_text("utf-8")


def section(text: str, title: str) -> dict[str, str]:
    """The rows of a section's table by model type: the last cell, empty without a reason."""
    body = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| \S* \|(?: (.*?) \|)?$", body, re.MULTILINE)
    return dict(rows)


def test_families_are_compared_in_processes_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "a.json", tmp_path / "a.md"
    main(["--families", "llama", "rwkv", "blt", "--json", str(files[0]), "--document", str(files[1])])
    llama, rwkv, blt = (Outcome(**one) for one in json.loads(files[0].read_text("utf-8")))
    assert llama == Outcome("llama", "LlamaForCausalLM", EQUAL)
    assert (rwkv.status, rwkv.class_name) == (REFUSED, "RwkvForCausalLM")
    assert "has no" in rwkv.reason
    assert (blt.status, blt.class_name) == (NOT_TRIED, "")
    text = files[1].read_text("utf-8")
    for outcome in (llama, rwkv, blt):
        assert section(text, SECTIONS[outcome.status]) == {outcome.model_type: outcome.reason}
    assert capsys.readouterr().out.count("\n") == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_document_says_that_tested_families_are_equal(family: str) -> None:
    assert section(DOCUMENT, SECTIONS[EQUAL])[family] == NOTES.get(family, "")


def test_the_document_is_of_all_model_types() -> None:
    listed = [name for title in SECTIONS.values() for name in section(DOCUMENT, title)]
    refused = section(DOCUMENT, SECTIONS[REFUSED])
    assert refused["rwkv"] and refused["bloom"]
    assert f"each of the {len(listed)} causal language model types" in DOCUMENT
    if f"transformers {transformers.__version__}," in DOCUMENT:
        assert sorted(listed) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        assert document([]).splitlines()[8:] == DOCUMENT.partition("\n## ")[0].splitlines()[8:]
