"""The comparison of model families: each outcome it can have, and that docs/models.md says of known families what is seen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import transformers
from families import FAMILIES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.model_families import EQUAL, NOT_TRIED, NOTES, REFUSED, SECTIONS, Outcome, answer, document, main
from benchmarks.published_models import PublishedModel, published_config, published_models, shrunk

DOCUMENT = (Path(__file__).resolve().parents[3] / "docs" / "models.md").read_text("utf-8")


def section(text: str, title: str) -> dict[str, str]:
    """The rows of a section's table by model type: the last cell, empty without a reason."""
    body = text.partition(f"### {title}\n")[2].partition("\n### ")[0]
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


def test_published_checkpoints_are_compared_from_a_folder(tmp_path: Path) -> None:
    """One whose scaled rotary embedding, windows and ties are kept; recurrent layers; quantized weights."""
    names = ["google/gemma-3-1b-it", "LiquidAI/LFM2-1.2B", "Qwen/Qwen2.5-7B-Instruct-AWQ", "nvidia/Gemma-4-31B-IT-NVFP4"]
    main(["--models", *names, "--json", str(tmp_path / "a.json"), "--document", str(tmp_path / "a.md")])
    gemma, lfm, awq, nvfp4 = (Outcome(**one) for one in json.loads((tmp_path / "a.json").read_text("utf-8")))
    assert gemma == Outcome("google/gemma-3-1b-it", "Gemma3ForCausalLM", EQUAL)
    assert (lfm.status, awq.status, nvfp4.status) == (EQUAL, EQUAL, REFUSED) and not awq.reason
    assert nvfp4.reason.startswith("is stored in modelopt form with quant_algo 'NVFP4'")
    assert nvfp4.reason.endswith(" In floating point: equal")
    text = (tmp_path / "a.md").read_text("utf-8")
    assert "\n3 of 4 are served and equal to transformers.\n" in text
    for outcome in (gemma, lfm, awq, nvfp4):
        assert f"\n{answer(outcome)}\n" in text


@pytest.mark.parametrize("model", published_models().values(), ids=lambda model: model.name)
def test_a_shrunk_configuration_keeps_the_shape(model: PublishedModel) -> None:
    whole = published_config(model), shrunk(published_config(model))
    big, small = (config.get_text_config().to_dict() for config in whole)
    for heads in ("num_key_value_heads", "num_kv_heads"):
        if big.get(heads):
            assert small["num_attention_heads"] * big[heads] == big["num_attention_heads"] * small[heads]
    kinds, kept = (list(config.get("layer_types") or ()) for config in (big, small))
    assert kept == kinds[: len(kept)] and set(kept) == set(kinds)
    assert whole[0].tie_word_embeddings == whole[1].tie_word_embeddings
    lists = ("short_factor", "long_factor", "mrope_section")
    ropes = [{k: v for k, v in (config.get("rope_parameters") or {}).items() if k not in lists} for config in (big, small)]
    assert ropes[0] == ropes[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_document_says_that_tested_families_are_equal(family: str) -> None:
    assert section(DOCUMENT, SECTIONS[EQUAL])[family] == NOTES.get(family, "")


def test_the_document_is_of_all_model_types() -> None:
    listed = [name for title in SECTIONS.values() for name in section(DOCUMENT, title)]
    refused = section(DOCUMENT, SECTIONS[REFUSED])
    assert refused["rwkv"] and refused["xlnet"]
    assert f"Each of the {len(listed)} causal language model types" in DOCUMENT
    if f"transformers {transformers.__version__} " in DOCUMENT:
        assert sorted(listed) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        assert document([]).partition("\n## ")[0].splitlines()[11:] == DOCUMENT.partition("\n## ")[0].splitlines()[11:]
