"""Checkpoints in published quantized formats compute what their formats stand for, packed and not."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from engines import prompts
from families import VOCAB, tiny
from safetensors.torch import load_file, save_file
from stored_checkpoints import (
    AWQ,
    FORMATS,
    FP8,
    check_logits,
    check_tokens,
    gpt_oss,
    of_compressed,
    of_gptq,
    opened,
    oracle,
    small,
)

from benchmarks import stored_weights as made
from pagetide import LLM, SamplingParams, native
from pagetide.engine.errors import CheckpointError, ConfigError, UnsupportedModel
from pagetide.engine.layers.linears import NativeLinear
from pagetide.engine.layers.packed_experts import PackedExperts
from pagetide.engine.layers.torch_linears import TorchLinear
from pagetide.engine.loading import stored_model, tensor_files
from pagetide.engine.loading.loader import load_model
from pagetide.engine.loading.mapped_files import MappedFiles
from pagetide.engine.loading.meta_models import outlined
from pagetide.engine.loading.models import ModelSpec

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(native.instructions() is None, reason="without native kernels nothing stays packed")
MIB = 1 << 20
QWEN_MOE = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "moe_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
    "norm_topk_prob": True,
}  # fmt: skip


@pytest.fixture
def counted_reads(monkeypatch) -> dict[str, int]:
    """How often each tensor of a file was taken."""
    counts: dict[str, int] = {}
    original = tensor_files.TensorFiles.__getitem__

    def counting(self, name):
        counts[name] = counts.get(name, 0) + 1
        return original(self, name)

    monkeypatch.setattr(tensor_files.TensorFiles, "__getitem__", counting)
    return counts


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_read_as_what_it_stands_for(name: str, tmp_path: Path) -> None:
    _, config, packer = FORMATS[name]
    plain_folder = made.checkpoint(small(name), tmp_path / "packed", config, packer)
    check_logits(tmp_path / "packed", plain_folder)


# --- mixtures of experts ---


def packed_experts(folder: Path) -> int:
    """How many experts modules of the loaded model are packed."""
    model = load_model(opened(folder), CPU, torch.float32, pack=True)
    return sum(isinstance(one, PackedExperts) for one in model.modules())


@needs_native
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_that_are_stored_one_by_one(family: str, tmp_path: Path) -> None:
    """transformers joins them as it reads; the latent projection of the last family keeps plain weights."""
    more = {"qwen3_moe": QWEN_MOE, "deepseek_v3": {"v_head_dim": 12}}.get(family, {})
    model = tiny(family, **more)
    plain_folder = made.checkpoint(model, tmp_path / "packed", of_gptq(desc_act=True), made.gptq(4, 8, False))
    check_logits(tmp_path / "packed", plain_folder)
    assert packed_experts(tmp_path / "packed") == {"mixtral": 3, "qwen3_moe": 2, "deepseek_v3": 2}[family]


def test_plain_weights_are_decoded_when_they_are_needed(tmp_path: Path, monkeypatch) -> None:
    """Threads that read ahead would hold all experts beside those that are joined."""
    made.checkpoint(tiny("mixtral"), tmp_path / "packed", of_gptq(), made.gptq(4, 8, False))
    threads, original = set(), stored_model._Later.__getitem__

    def noting(self, key):
        threads.add(threading.current_thread())
        return original(self, key)

    monkeypatch.setattr(stored_model._Later, "__getitem__", noting)
    before = dict(os.environ)
    load_model(opened(tmp_path / "packed"), CPU, torch.float32, pack=False)
    assert threads == {threading.current_thread()} and dict(os.environ) == before


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    check_logits(tmp_path / "packed", gpt_oss(tmp_path / "packed"))
    assert packed_experts(tmp_path / "packed") == (4 if native.instructions() else 0)


# --- what is beside quantized layers ---


def test_mixtures(tmp_path: Path) -> None:
    """Other bits by module, fp8 beside int4, layers left as they are, a quantized head; in several files."""
    int4, int8 = made.compressed(4, 16, True), made.compressed(8, 16, False)
    fp8 = made.float_quantized(1, 0)

    def packer(name: str) -> made.Packer | None:
        return None if "layers.1." in name else int8 if "down_proj" in name else fp8 if "o_proj" in name else int4

    config = of_compressed(group=16)
    groups = config["config_groups"]
    eight = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "group", "group_size": 16}
    small = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    groups["group_1"] = {"targets": [r"re:.*layers\.\d+\.mlp\.down_proj$"], "weights": eight}
    groups["group_2"] = {"targets": [f"model.layers.{i}.self_attn.o_proj" for i in range(3)], "weights": small}
    plain_folder = made.checkpoint(tiny("qwen2"), tmp_path / "packed", config, packer, by_name=True, shards=3)
    check_logits(tmp_path / "packed", plain_folder)


def test_gptq_of_other_bits_by_module(tmp_path: Path) -> None:
    """gptqmodel's `dynamic` rules: the shapes tell as much."""
    eight, four = made.gptq(8, 8, True), made.gptq(4, 16, True)
    config = of_gptq(dynamic={"+:.*down.*": {"bits": 8, "group_size": 8}, "-:.*layers.0.*": {}})
    model = tiny("llama")
    plain_folder = made.checkpoint(
        model,
        tmp_path / "packed",
        config,
        lambda name: None if "layers.0" in name else eight if "down" in name else four,
        by_name=True,
    )
    check_logits(tmp_path / "packed", plain_folder)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings(tied: bool, tmp_path: Path) -> None:
    """Tied ones stay; a head of its own may be quantized, and so may the embedding."""
    model = tiny("llama", tie_word_embeddings=tied)
    folder = tmp_path / "packed"
    packer = made.compressed(8, 16, True)
    plain_folder = made.checkpoint(model, folder, of_compressed(bits=8, group=16), packer)
    if not tied:
        stored, values = load_file(folder / "model.safetensors"), load_file(plain_folder / "model.safetensors")
        for name in ("model.embed_tokens", "lm_head"):
            parts, values[f"{name}.weight"] = packer(stored.pop(f"{name}.weight"), torch.Generator())
            stored |= {f"{name}.{suffix}": part for suffix, part in parts.items()}
        content = json.loads((folder / "config.json").read_text())["quantization_config"]
        content["config_groups"]["group_0"]["targets"] = ["Linear", "Embedding"]
        made.write(folder, stored, content)
        save_file(values, plain_folder / "model.safetensors", {"format": "pt"})
    check_logits(folder, plain_folder)


def test_layers_of_odd_sizes(tmp_path: Path) -> None:
    """36 inputs are four words and a half; groups of 12 are no power of 2, and are held as groups of 4 by nothing."""
    model = tiny("llama", hidden_size=36, intermediate_size=52, num_attention_heads=6, num_key_value_heads=2)
    plain_folder = made.checkpoint(model, tmp_path / "a", of_compressed(symmetric=False), made.compressed(4, 0, False))
    check_logits(tmp_path / "a", plain_folder)
    plain_folder = made.checkpoint(model, tmp_path / "b", of_compressed(group=12), made.compressed(4, 12, True))
    check_logits(tmp_path / "b", plain_folder)


def test_quantize_config_in_a_file_of_its_own(tmp_path: Path) -> None:
    plain_folder = made.checkpoint(tiny("llama"), tmp_path / "packed", of_gptq(), made.gptq(4, 16, True))
    file = tmp_path / "packed" / "config.json"
    content = json.loads(file.read_text())
    config = content.pop("quantization_config")
    file.write_text(json.dumps(content))
    (tmp_path / "packed" / "quantize_config.json").write_text(
        json.dumps({key: config[key] for key in ("bits", "group_size", "sym")})
    )
    check_logits(tmp_path / "packed", plain_folder)


# --- reading ---


def test_nothing_is_read_twice_and_the_plan_agrees(tmp_path: Path, counted_reads: dict[str, int], caplog) -> None:
    caplog.set_level(logging.WARNING)
    made.checkpoint(
        tiny("qwen3", hidden_size=256, intermediate_size=512), tmp_path / "packed", of_gptq(group=32), made.gptq(4, 32, False)
    )
    checkpoint = opened(tmp_path / "packed")
    assert not counted_reads, "headers alone"
    for pack in (True, False):
        counted_reads.clear()
        caplog.clear()
        model = load_model(checkpoint, CPU, torch.float32, pack=pack)
        stored = {one.name for one in checkpoint.weights.tensors()}
        assert counted_reads == dict.fromkeys(stored, 1)
        packed = [one.packed for one in model.modules() if isinstance(one, NativeLinear)]
        held = sum(one.num_bytes for one in packed) + sum(p.nbytes for p in model.parameters() if p.device.type == "cpu")
        sizes = stored_model.stored_sizes(checkpoint, CPU, torch.float32)
        if pack and native.instructions() is not None:
            assert held <= sizes.weights_bytes <= 1.04 * held  # orders of inputs are counted that are none
            assert sizes.plain_bytes == 0 and not caplog.records
            mapped = MappedFiles(checkpoint.weights.paths)
            kept = [part for one in packed for part in (one.packed, one.scales, one.zeros) if part is not None]
            assert not any(mapped.holds(part) for part in (*kept, *model.parameters()) if part.device.type == "cpu")
        else:
            assert "21 of 21 weights in gptq form become float32" in caplog.text


SQUARE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8}
TORCHS = {
    "AWQ": (AWQ | {"group_size": 32}, made.awq(32), SQUARE),
    "GPTQ out of order": (of_gptq(group=64), made.gptq(4, 64, False, act_order=True), SQUARE),
    "fp8 by channel": (of_compressed("float", 8), made.float_quantized(1, 0, dtype=torch.bfloat16), SQUARE),
}


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize("name", TORCHS)
def test_torchs_kernels(name: str, differs: bool, tmp_path: Path, monkeypatch, caplog) -> None:
    """As on CUDA, by torch's operators for CPUs: linear layers stay packed, and become plain where a product differs."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(stored_model, "packs_stored", lambda device: False)
    monkeypatch.setattr(stored_model, "multiplies_by_torch", lambda device: True)
    if differs:
        monkeypatch.setattr(stored_model, "difference", lambda made, weight: "it differs")
    config, packer, sizes = TORCHS[name]
    plain_folder = made.checkpoint(tiny("llama", attention_bias=True, **sizes), tmp_path / "packed", config, packer)
    checkpoint = opened(tmp_path / "packed")
    stored_model.stored_sizes.cache_clear()
    planned = stored_model.stored_sizes(checkpoint, CPU, torch.bfloat16)
    model = load_model(checkpoint, CPU, torch.bfloat16, pack=True)
    layers = [one for one in model.modules() if isinstance(one, TorchLinear)]
    assert planned.plain_bytes == 0 and len(layers) == (0 if differs else len(checkpoint.stored))
    if not differs:
        assert (
            sum(one.packed.num_bytes for one in layers)
            <= sum(planned.packed_bytes.values())
            < sum(one.weight.numel() * 2 for one in layers)
        )
    ids = torch.tensor(prompts([40], VOCAB))
    with torch.inference_mode():
        right, out = oracle(plain_folder)(ids).logits, model(ids).logits
    assert (out - right).norm() <= (0.15 if "fp8" in name and not differs else 0.06) * right.norm()
    assert caplog.text.count("becomes torch.bfloat16, as others of its sizes: it differs") == differs * len(
        {one.shape for one in checkpoint.stored.values()}
    )


def test_engines_over_torchs_kernels(tmp_path: Path, monkeypatch, caplog) -> None:
    """What they do not multiply becomes plain, with the reason in the log."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(stored_model, "packs_stored", lambda device: False)
    monkeypatch.setattr(stored_model, "multiplies_by_torch", lambda device: True)
    model = tiny("llama", tie_word_embeddings=True, **SQUARE)
    made.checkpoint(model, tmp_path / "packed", AWQ | {"group_size": 32}, made.awq(32))
    stored_model.stored_sizes.cache_clear()
    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    for dtype, kinds in (("bfloat16", {"int4"}), ("float32", set())):
        with LLM(tmp_path / "packed", device="cpu", dtype=dtype, kv_memory=1 << 20) as llm:
            assert len(llm.generate([[5, 9, 3]], greedy)[0].outputs[0].token_ids) == 4
            assert set(llm._manager.engine.plan.packed_bytes) == kinds
    assert "torch's kernels multiply rows of bfloat16, not float32" in caplog.text


@needs_native
def test_memory_of_packed_weights(tmp_path: Path) -> None:
    """At most 1.05 times the bytes in the files, as published: groups of 128, 16-bit scales, 8-bit ones for MXFP4."""
    for config, packer in (
        (of_gptq(group=128), made.gptq(4, 128, False)),
        (AWQ | {"group_size": 128}, made.awq(128)),
        (of_compressed(group=128), made.compressed(4, 128, True)),
        (FP8 | {"weight_block_size": [128, 128]}, made.float_quantized(128, 128, "weight_scale_inv")),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        made.checkpoint(
            tiny("llama", num_hidden_layers=1, hidden_size=768, intermediate_size=1024, head_dim=128), folder, config, packer
        )
        for one in opened(folder).stored.values():
            stored = sum(part.tensor.num_bytes for role, part in one.parts.items() if role != "g_idx")
            assert one.packed_bytes <= 1.05 * stored + 4 * one.k, (config["quant_method"], one.packed_bytes / stored)


@needs_native
def test_pieces_and_their_memory(tmp_path: Path, monkeypatch) -> None:
    """Weights are decoded in pieces of outputs."""
    plain_folder = made.checkpoint(
        tiny("llama"), tmp_path / "packed", of_gptq(desc_act=True), made.gptq(4, 16, False, act_order=True)
    )
    monkeypatch.setattr(stored_model, "_CHUNK_WEIGHTS", 1000)
    check_logits(tmp_path / "packed", plain_folder)
    plain_folder = made.checkpoint(tiny("llama"), tmp_path / "fp8", FP8, made.float_quantized(32, 16, "weight_scale_inv"))
    check_logits(tmp_path / "fp8", plain_folder)


def test_the_plan_names_the_format(tmp_path: Path) -> None:
    made.checkpoint(tiny("llama"), tmp_path / "packed", AWQ, made.awq(16))
    with LLM(tmp_path / "packed", device="cpu", kv_memory=MIB) as llm:
        plan = llm._manager.engine.plan
        assert plan.stored_as == "awq" and " in awq" in plan.describe()
        native_forms = set() if native.instructions() is None else {"int4"}
        assert (plan.dequantized_bytes == 0) == bool(native_forms) and {*plan.packed_bytes} == native_forms
        assert ("... packed" in plan.describe() and ", as int4" in plan.describe()) == bool(native_forms)
        assert sum(plan.packed_bytes.values()) < plan.weights_bytes
        assert plan.to_dict()["stored_as"] == "awq"
    for library in ("accelerate", "optimum", "gptqmodel", "kernels", "bitsandbytes", "compressed_tensors", "awq"):
        assert library not in sys.modules
    refused = "is quantized already" if native.instructions() is not None else "needs the native kernels"
    with pytest.raises(ConfigError, match=refused):
        LLM(tmp_path / "packed", device="cpu", quantization="int8", kv_memory=MIB)


def test_biases_that_the_model_has_no_place_for(tmp_path: Path, caplog) -> None:
    """Writers of GPTQ give zeros to layers without one."""
    folder = tmp_path / "packed"
    plain_folder = made.checkpoint(tiny("llama", num_hidden_layers=1), folder, of_gptq(), made.gptq(4, 16, True))

    def add(tensors: dict[str, torch.Tensor], value: float = 0.0) -> None:
        tensors |= {name.replace("qweight", "bias"): torch.full((one.shape[1],), value) for name, one in [*tensors.items()]
                    if name.endswith(".qweight")}  # fmt: skip

    file, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    add(tensors)
    save_file(tensors, file, {"format": "pt"})
    check_logits(folder, plain_folder)
    assert "no place" not in caplog.text
    assert "with its config.json has no place for biases" in broken(folder, lambda tensors: add(tensors, 0.5))


# --- files that are not whole ---


def broken(folder: Path, change) -> str:
    """What is said of the folder once `change` was made to its tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, folder / "changed", {"format": "pt"})
    (folder / "changed").replace(file)
    with pytest.raises((CheckpointError, UnsupportedModel)) as caught:
        load_model(opened(folder), CPU, torch.float32, pack=True)
    return str(caught.value)


Q = "model.layers.1.self_attn.q_proj"
GPTQ_FAULTS = {
    "qzeros is missing, which its gptq form needs": lambda t: t.pop(f"{Q}.qzeros"),
    "scales is missing": lambda t: t.pop(f"{Q}.scales"),
    "belongs to a quantized weight that is not there": lambda t: t.pop(f"{Q}.qweight"),
    "qweight is F32": lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].float()}),
    "qzeros is [2, 6], and [3, 6]": lambda t: t.update({f"{Q}.qzeros": t[f"{Q}.qzeros"][:2].clone()}),
    "g_idx is [47], and [48]": lambda t: t.update({f"{Q}.g_idx": t[f"{Q}.g_idx"][:-1].clone()}),
    "g_idx does not put 16 weights": lambda t: t[f"{Q}.g_idx"].fill_(7),
    "g_idx does not put": lambda t: t[f"{Q}.g_idx"].neg_(),
    "has scales that are not finite": lambda t: t[f"{Q}.scales"].fill_(torch.nan),
    "both in quantized form and not": lambda t: t.update({f"{Q}.weight": torch.ones(48, 48)}),
    "of 2 bits": lambda t: t.update({f"{Q}.qzeros": torch.zeros(3, 3, dtype=torch.int32)}),
    "do not fit its config.json": lambda t: t.update(
        {f"{Q}.{leaf}": t[f"model.layers.1.mlp.up_proj.{leaf}"].clone() for leaf in ("qweight", "qzeros", "scales")}
    ),
}  # fmt: skip


def test_gptq_tensors_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    made.checkpoint(tiny("llama", num_hidden_layers=2), tmp_path / "right", of_gptq(), made.gptq(4, 16, True))
    for i, (said, change) in enumerate(GPTQ_FAULTS.items()):
        shutil.copytree(tmp_path / "right", tmp_path / str(i))
        assert said in broken(tmp_path / str(i), change), said


def test_other_formats_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    def packed(name: str, config: dict, packer) -> Path:
        made.checkpoint(tiny("llama"), tmp_path / name, config, packer)
        return tmp_path / name

    config, packer = of_compressed(group=16), made.compressed(4, 16, True)
    for i, (said, change) in enumerate((
        ("weight_scale is missing", lambda t: t.pop(f"{Q}.weight_scale")),
        ("weight_packed is [48, 6], and [48, 1]", lambda t: t[f"{Q}.weight_shape"].copy_(torch.tensor([48, 8]))),
        ("weight_shape says -48 by 48", lambda t: t[f"{Q}.weight_shape"].neg_().add_(torch.tensor([0, 96]))),
        ("weight_scale is [3, 48], and [48, 3]", lambda t: t.update({f"{Q}.weight_scale": torch.ones(3, 48)})),
        ("belongs to a quantized weight", lambda t: t.pop(f"{Q}.weight_packed")),
    )):  # fmt: skip
        assert said in broken(packed(f"a{i}", config, packer), change), said
    nan = torch.tensor(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for i, (said, change) in enumerate((
        ("weight_scale is missing", lambda t: t.pop(f"{Q}.weight_scale_inv")),
        ("weight_scale_inv is [2, 2], and [2, 3]", lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(2, 2)})),
        ("not a number", lambda t: t[f"{Q}.weight"].view(torch.uint8)[3, 3].copy_(nan.view(torch.uint8))),
    )):  # fmt: skip
        assert said in broken(packed(f"b{i}", FP8, made.float_quantized(32, 16, "weight_scale_inv")), change), said
    for name in ("GPTQ out of order", "int4 in groups out of order"):
        _, config, packer = FORMATS[name]
        leaf = "g_idx" if "GPTQ" in name else "weight_g_idx"
        said = broken(packed(name, config, packer), lambda t, leaf=leaf: t.pop(f"{Q}.{leaf}"))
        assert f"{leaf} is missing, which its" in said
    gpt_oss(tmp_path / "c")
    name = "model.layers.0.mlp.experts.down_proj"
    assert "_scales is missing" in broken(tmp_path / "c", lambda t: t.pop(f"{name}_scales"))
    gpt_oss(tmp_path / "d")
    assert "scales that are not finite" in broken(tmp_path / "d", lambda t: t[f"{name}_scales"][1, 2, 0].fill_(255))
    for i, (said, change) in enumerate((
        ("scales that are not finite", lambda t: t[f"{Q}.weight_scale"][5, 1].fill_(255)),
        ("weight_scale is [96, 1], and [96, 3]", lambda t: t.update({f"{Q}.weight_scale": torch.ones(96, 1).byte()})),
        ("belongs to a quantized weight", lambda t: t.pop(f"{Q}.weight_packed")),
        ("form as NVFP4, which is not read", lambda t: t.update({f"{Q}.weight_global_scale": torch.ones(1)})),
    )):  # fmt: skip
        _, config, packer = FORMATS["MXFP4 in groups"]
        made.checkpoint(small("MXFP4 in groups", num_hidden_layers=2), tmp_path / f"e{i}", config, packer)
        assert said in broken(tmp_path / f"e{i}", change), said
    _, config, packer = FORMATS["fp8 in blocks with exponents"]
    made.checkpoint(tiny("llama"), tmp_path / "f", config, packer)
    powers = torch.full((2, 3), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert "scales that are not finite" in broken(tmp_path / "f", lambda t: t.update({f"{Q}.weight_scale_inv": powers}))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (of_compressed(bits=3, group=16), "of 3 bits, 'int'"),
        (of_compressed(group=16) | {"config_groups": {}}, "no config group of its quantization_config is of"),
        (of_compressed(group=16) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "with 'sparse-24-bitmask' sparsity"),
        (of_compressed(group=16) | {"transform_config": {"config_groups": {"R1": {}}}}, "with transforms of its inputs"),
        (of_compressed(strategy="group"), "quantization_config is not valid"),
        (of_compressed(group=16) | {"config_groups": {"group_0": {"targets": ["re:("]}}}, "quantization_config is not valid"),
        (of_gptq(checkpoint_format="marlin"), "in gptq form 'marlin', which is not read"),
        (AWQ | {"version": "gemv"}, "in awq form 'gemv', which is not read"),
    ],
)
def test_configurations_that_are_not_read(config: dict, said: str, tmp_path: Path) -> None:
    packer = {"compressed-tensors": made.compressed(4, 16, True), "gptq": made.gptq(4, 16, True), "awq": made.awq(16)}
    made.checkpoint(tiny("llama"), tmp_path / "packed", config, packer[config["quant_method"]])
    with pytest.raises((CheckpointError, UnsupportedModel), match=re.escape(said)):
        opened(tmp_path / "packed")


def test_a_file_that_is_cut_or_has_other_sizes_is_refused(tmp_path: Path) -> None:
    made.checkpoint(tiny("llama"), tmp_path / "packed", AWQ, made.awq(16))
    file = tmp_path / "packed" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match="its header promises"):
        opened(tmp_path / "packed")
    other = re.sub(rb'("dtype":"I32","shape":\[)48', rb"\g<1>49", content, count=1)
    assert other != content
    file.write_bytes(other)
    with pytest.raises(
        CheckpointError, match=r"is not a complete safetensors file \(.*qweight, I32 \[49, \d\], has 1,\d+ bytes"
    ):
        opened(tmp_path / "packed")


# --- engines ---


def test_tokens_of_engines(tmp_path: Path) -> None:
    """The rest of the formats, with engines: tests/deep."""
    check_tokens(tmp_path / "mxfp4", gpt_oss(tmp_path / "mxfp4"))
    plain_folder = made.checkpoint(tiny("qwen3"), tmp_path / "awq", AWQ, made.awq(16))
    check_tokens(tmp_path / "awq", plain_folder)


def test_a_configuration_alone_counts_as_plain_weights(tmp_path: Path) -> None:
    made.checkpoint(tiny("deepseek_v3", v_head_dim=12), tmp_path / "packed", of_gptq(), made.gptq(4, 8, True))
    bare = outlined(ModelSpec("packed", tmp_path / "packed", "a test"))
    assert not bare.quantized and bare.caches_latents
    assert bare.weights_bytes(torch.float32) == opened(tmp_path / "packed").weights_bytes(torch.float32)
