"""The estimate of decoding on a CPU: what a token reads of a model, and which measurements count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import VOCAB, tiny
from stored_checkpoints import AWQ, opened

from benchmarks import stored_weights as made
from pagetide import native
from pagetide.engine.config import EngineConfig
from pagetide.engine.layers import weight_bytes
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.models import ModelSpec
from pagetide.engine.memory.decode_rate import DecodeRate, decode_rate, rates_file, record
from pagetide.engine.memory.planning import plan_memory

RATES = {"float32": 1e9, "bfloat16": 2e9, "int8": 1e9, "int4": 5e8}
needs_native = pytest.mark.skipif(native.instructions() is None, reason="without native kernels nothing is measured")


def saved(folder: Path, family: str = "llama", **over) -> Checkpoint:
    tiny(family, **over).save_pretrained(folder)
    return Checkpoint.open(ModelSpec(folder.name, folder, "a test"))


def elements(checkpoint: Checkpoint, *without: str) -> int:
    return sum(one.num_elements for one in checkpoint.tensors if not any(part in one.name for part in without))


@needs_native
def test_what_a_token_reads(tmp_path: Path) -> None:
    """All weights but an embedding that is not the output head; of experts, those that it is routed to."""
    record(RATES, file := tmp_path / "rates.json")
    untied, tied = saved(tmp_path / "untied"), saved(tmp_path / "tied", tie_word_embeddings=True)
    moe = saved(tmp_path / "moe", "mixtral", num_local_experts=4, num_experts_per_tok=1)
    for one, read in ((untied, elements(untied, "embed_tokens")), (tied, elements(tied))):
        found = decode_rate(one, torch.float32, file=file)
        assert found is not None and (found.bytes_per_token, found.seconds) == (4 * read, pytest.approx(4 * read / 1e9))
    routed = elements(moe, "embed_tokens") - elements(moe, "embed_tokens", ".experts.") * 1
    found = decode_rate(moe, torch.bfloat16, file=file)
    assert found is not None
    assert found.bytes_per_token == 2 * (elements(moe, "embed_tokens", ".experts.") + routed // 4)
    assert found.seconds == pytest.approx(found.bytes_per_token / 2e9)


@needs_native
def test_forms_have_rates_of_their_own(tmp_path: Path) -> None:
    record(RATES, file := tmp_path / "rates.json")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "tie_word_embeddings": True}
    made.checkpoint(tiny("llama", **sizes), tmp_path / "packed", AWQ | {"group_size": 32}, made.awq(32))
    checkpoint = opened(tmp_path / "packed")
    packed = sum(one.packed_bytes for one in checkpoint.stored.values())
    plain = 2 * sum(one.num_elements for one in checkpoint.tensors if one.name not in checkpoint.stored)
    found = decode_rate(checkpoint, torch.bfloat16, file=file)
    assert found is not None and found.seconds == pytest.approx(packed / 5e8 + plain / 2e9)
    whole = saved(tmp_path / "whole", **sizes)
    eight, four = (decode_rate(whole, torch.bfloat16, bits, file=file) for bits in ("int8", "int4"))
    assert eight is not None and eight.bytes_per_token < 0.6 * 2 * elements(whole)
    head = weight_bytes(VOCAB, 256, "int8")  # of eight bits in both forms
    assert four is not None and head < four.bytes_per_token < head + 0.6 * (eight.bytes_per_token - head)


@needs_native
def test_measurements_of_other_kernels_or_forms_do_not_count(tmp_path: Path) -> None:
    checkpoint, file = saved(tmp_path / "model"), tmp_path / "kept" / "rates.json"
    assert decode_rate(checkpoint, torch.float32, file=file) is None
    record(RATES, file)
    assert decode_rate(checkpoint, torch.float32, file=file) is not None
    assert decode_rate(checkpoint, torch.float16, file=file) is None
    right = json.loads(file.read_text())
    for wrong in ({"threads": right["threads"] + 1}, {"instructions": "other"}, {"bytes_per_s": {"float32": 0}}, {"at": None}):
        file.write_text(json.dumps(right | wrong))
        assert (decode_rate(checkpoint, torch.float32, file=file) is None) == ("at" not in wrong)
    file.write_text("[]")
    assert decode_rate(checkpoint, torch.float32, file=file) is None
    record(RATES, Path("relative"))
    assert not Path("relative").exists()


def test_the_plan_shows_it_where_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint = saved(tmp_path / "model")
    config = EngineConfig.resolve(checkpoint.spec, device="cpu")

    def planned():
        return plan_memory(config, checkpoint, torch.device("cpu"), torch.float32, free=lambda _: 1 << 30)

    assert planned().to_dict()["decode_estimate"] is None and "decode" not in planned().describe()
    record(RATES)
    assert rates_file().parent == tmp_path / "cache" / "pagetide"
    if native.instructions() is not None:
        assert "estimate: at most " in planned().describe()
        assert planned().to_dict()["decode_estimate"]["bytes_per_token"] == 4 * elements(checkpoint, "embed_tokens")


def test_its_text() -> None:
    said = DecodeRate(4 << 30, 0.08, "2026-11-28").describe()
    assert said == (
        "estimate: at most 12.5 tokens/s of one sequence; each reads 4.00 GiB of weights, at the rates that pagetide doctor "
        "measured on 2026-11-28"
    )
