"""Models cut into shards, computed in threads: the logits of the whole, whatever is packed, merged or quantized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import tiny
from gguf_files import write_model
from safetensors.torch import save_file
from shard_threads import run_in_threads
from sharded_engines import CPU, DIVIDED, divided, geometry_of, saved
from stored_checkpoints import AWQ, FP8, of_compressed, of_gptq, opened, oracle
from torch import nn

from benchmarks import stored_weights as made
from pagetide import native
from pagetide.engine.collectives.sharded_modules import GatheredHead, gather_on_first
from pagetide.engine.config import resolve_model
from pagetide.engine.errors import UnsupportedModel
from pagetide.engine.layers.fusion import fuse
from pagetide.engine.layers.kernels import kernels_on
from pagetide.engine.layers.linears import NativeLinear
from pagetide.engine.layers.packed_experts import PackedExperts
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.division import Cut, Division
from pagetide.engine.loading.loader import load_model
from pagetide.engine.loading.mapped_files import MappedFiles
from pagetide.engine.loading.packed_model import loading_bytes
from pagetide.engine.loading.stored_model import stored_sizes
from pagetide.engine.loading.weight_cache import WeightCache

KERNELS = kernels_on(torch.device("cpu"))
TOKENS = torch.tensor([[5, 1, 77, 34, 120, 5, 9, 64, 3, 118, 40, 41, 2]])
needs_native = pytest.mark.skipif(native.instructions() is None, reason="without native kernels nothing is fused")


def stored(model, folder: Path) -> Checkpoint:
    model.save_pretrained(folder)
    return Checkpoint.open(resolve_model(folder))


def logits_of(model, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=tokens, use_cache=False).logits[0]


def logits_of_all(shards: list, groups: list, tokens: torch.Tensor = TOKENS) -> list[torch.Tensor]:
    return run_in_threads([lambda shard=shard: logits_of(shard, tokens) for shard in shards], groups)


def assert_alike(shards: list, groups: list, right: torch.Tensor) -> None:
    for found in logits_of_all(shards, groups):
        assert torch.allclose(found, right, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "size"), [(name, 2 + 2 * (i % 2)) for i, name in enumerate(DIVIDED)])
def test_shards_compute_what_the_whole_model_does(name: str, size: int, tmp_path: Path) -> None:
    model, checkpoint = saved(name, tmp_path)
    right = logits_of(model)
    division, groups, shards = divided(checkpoint, size)
    assert_alike(shards, groups, right)
    held = [sum({id(one): one.nbytes for one in shard.parameters()}.values()) for shard in shards]
    assert max(held) <= division.weights_bytes(torch.float32), "biases of sums are on the first shard alone"
    cut = sum(one.nbytes for one in model.parameters()) - division.replicated_bytes(torch.float32)
    assert max(held) <= 1.1 * cut / size + division.replicated_bytes(torch.float32) + 4096 * size


@needs_native
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "deepseek_v3"])
def test_packed_and_fused_shards_keep_their_sums(name: str, tmp_path: Path) -> None:
    model, checkpoint = saved(name, tmp_path)
    whole = load_model(checkpoint, CPU, torch.float32, pack=True)
    counts, right = fuse(whole, TOKENS[0, :5], KERNELS).counts, logits_of(model)
    _, groups, shards = divided(checkpoint, 2, pack=True)
    fused = run_in_threads([lambda shard=shard: fuse(shard, TOKENS[0, :5], KERNELS).counts for shard in shards], groups)
    assert fused == [counts, counts], "what is replaced in the whole model is replaced in each shard"
    assert name == "qwen3_moe" or counts["mlps"] > 0
    assert_alike(shards, groups, right)


@needs_native
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantized_shards_are_as_near_as_the_quantized_whole(form, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
    model, checkpoint = saved("llama", tmp_path, **sizes)
    right = logits_of(model)
    whole = load_model(checkpoint, CPU, torch.float32, quantization=form, pack=True)
    error = float((logits_of(whole) - right).norm() / right.norm())
    for _ in range(2):  # the second time from the cache
        _, groups, shards = divided(checkpoint, 2, quantization=form, pack=True)
        found = logits_of_all(shards, groups)
        assert torch.equal(found[0], found[1])
        assert 0 < float((found[0] - right).norm() / right.norm()) < 1.5 * error + 1e-3


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 112, "vocab_size": 128}
QUANTIZED = {
    "llama": (AWQ, made.awq(16)),
    "qwen2": (FP8, made.float_quantized(32, 16, "weight_scale_inv")),
    "mixtral": (of_gptq(), made.gptq(4, 16, False)),
}


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("family", QUANTIZED)
def test_quantized_checkpoints_are_divided_at_groups(family: str, pack: bool, tmp_path: Path) -> None:
    """112 inputs of seven groups: one shard has three of them, and the other one four."""
    plain_folder = made.checkpoint(tiny(family, **HEADS), tmp_path / "packed", *QUANTIZED[family])
    checkpoint, right = opened(tmp_path / "packed"), logits_of(oracle(plain_folder))
    division, groups, shards = divided(checkpoint, 2, pack=pack)
    assert_alike(shards, groups, right)
    down = next(cut for name, cut in division.cuts.items() if "down_proj" in name)
    assert [down.width(rank) for rank in range(2)] == [48, 64]
    sizes = [stored_sizes(checkpoint, CPU, torch.float32, of) for of in (None, division)]
    assert sizes[1].weights_bytes < 0.7 * sizes[0].weights_bytes
    if pack and native.instructions() is not None:
        linears = [one.packed for one in shards[1].modules() if isinstance(one, NativeLinear)]
        assert {one.type for one in linears} > {torch.float32} and sizes[1].plain_bytes == 0
        experts = [one for part in shards[1].modules() if isinstance(part, PackedExperts) for one in part._last]
        assert {one.k for one in experts} == ({64} if family == "mixtral" else set())
        held = sum(one.num_bytes for one in linears) + sum(p.nbytes for p in shards[1].parameters() if not p.is_meta)
        assert family == "mixtral" or held <= sizes[1].weights_bytes


WIDE = {"hidden_size": 512, "intermediate_size": 768, "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 128}


def mixture(name: str, shape: tuple[int, ...]) -> str:
    """Query and key, whose rows are reordered head by head, are plain in one layer and in blocks in the other."""
    if name.startswith(("blk.0.attn_q", "blk.1.attn_k")):
        return "F16"
    turns = {
        "attn_q": "Q5_K",
        "attn_k": "Q8_0",
        "attn_v": "Q6_K",
        "ffn_gate": "Q4_1",
        "ffn_down": "Q4_K",
        "attn_output": "Q5_K",
    }
    return turns.get(name.split(".")[-2], "Q6_K")


@pytest.mark.parametrize("pack", [True, False])
def test_gguf_files_are_divided_at_super_groups(pack: bool, tmp_path: Path) -> None:
    """768 inputs of three super groups: one shard has one of them, and the other one two."""
    plain_folder = write_model(tiny("llama", **WIDE), tmp_path / "m.gguf", mixture)
    checkpoint, right = opened(tmp_path / "m.gguf"), logits_of(oracle(plain_folder))
    division, groups, shards = divided(checkpoint, 2, pack=pack)
    assert_alike(shards, groups, right)
    down = next(cut for name, cut in division.cuts.items() if "down_proj" in name)
    assert [down.width(rank) for rank in range(2)] == [256, 512]
    if pack and native.instructions() is not None:
        layers = [one.packed for one in shards[1].modules() if isinstance(one, NativeLinear)]
        held = sum(one.num_bytes for one in layers)
        held += sum(p.nbytes for p in shards[1].parameters() if not p.is_meta and p.stride() != (0, 0))
        held += shards[1].get_input_embeddings().layer._packed.num_bytes
        assert held <= stored_sizes(checkpoint, CPU, torch.float32, division).weights_bytes


def test_quantized_weights_that_cannot_be_cut_are_refused(tmp_path: Path) -> None:
    def refusal(folder: str) -> str:
        with pytest.raises(UnsupportedModel) as caught:
            divided(opened(tmp_path / folder), 2, pack=True)
        return str(caught.value)

    model = tiny("llama", **HEADS)
    made.checkpoint(model, tmp_path / "groups", of_compressed(group=48), made.compressed(4, 48, True))
    assert "down_proj.weight cannot, since inputs 0 to 56 are not whole groups of 48; take another number" in refusal("groups")
    made.checkpoint(model, tmp_path / "ordered", of_gptq(desc_act=True), made.gptq(4, 16, False, act_order=True))
    assert "its inputs are grouped out of order (act-order); serve the model on one device" in refusal("ordered")


def test_only_the_first_shard_gathers_once_a_model_is_checked(tmp_path: Path) -> None:
    model, checkpoint = saved("gemma2", tmp_path)
    right = logits_of(model)
    _, groups, shards = divided(checkpoint, 2)
    for shard in shards:
        gather_on_first(shard)
        assert isinstance(shard.lm_head, GatheredHead)
    first, second = logits_of_all(shards, groups)
    assert torch.allclose(first, right, rtol=0, atol=1e-4) and second.shape == (13, 163 - 81)
    assert [group.counts()["gather"].calls for group in groups] == [1, 1]


def test_parts_are_equal_and_begin_where_kernels_ask_for() -> None:
    assert Cut.even(0, 163, 2).ranges == (((0, 81),), ((81, 163),))
    assert Cut.even(0, 64, 4, parts=2).ranges[1] == ((8, 16), (40, 48))
    assert Cut.even(0, 72, 2).ranges == (((0, 32),), ((32, 72),))
    assert Cut.even(0, 640, 2, unit=128).ranges == (((0, 256),), ((256, 640),))
    assert Cut.even(0, 72, 2, unit=128).ranges == Cut.even(0, 72, 2).ranges
    assert Cut.exact(0, 72, 2).ranges == (((0, 36),), ((36, 72),))
    for length, size, parts in ((163, 4, 1), (64, 3, 2), (9, 8, 1), (4096, 7, 2)):
        cut = Cut.even(1, length, size, parts)
        whole = torch.arange(length)[None]
        pieces = sorted(x for rank in range(size) for x in cut.of(whole, rank)[0].tolist())
        assert pieces == list(range(length))
        assert [cut.shape(whole.shape, rank)[1] for rank in range(size)] == [cut.width(rank) for rank in range(size)]


HRM = {
    "vocab_size": 163, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8,
    "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "over", "size", "message"),
    [
        ("gpt2", {}, 2, "no tensor-parallel plan"),
        ("gpt_oss", {}, 2, "divides none of its layers, only sets of whole experts, and these are not divided here"),
        ("llama", {}, 4, "6 query heads and 2 heads of K and V.*tensor_parallel_size could be 2, 6"),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "3 heads of K and V.*could be 3, 6"),
        ("llama", {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5}, 2, "could be 5"),
        ("hrm_text", HRM, 2, "transformers makes .* of other tensors.*serve it on one device"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_could(family, over, size, message, tmp_path: Path) -> None:
    checkpoint = stored(tiny(family, **over), tmp_path)
    with pytest.raises(UnsupportedModel, match=f"cannot be divided over {size} shards: .*{message}"):
        divided(checkpoint, size)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    model = tiny("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    checkpoint = Checkpoint.open(resolve_model(tmp_path))
    with pytest.raises(UnsupportedModel, match=r"pickled.*save_pretrained"):
        Division.of(checkpoint, 2, geometry_of(checkpoint).layers)


def test_attention_that_the_plan_leaves_whole_is_said_and_counted(tmp_path: Path) -> None:
    _, checkpoint = saved("deepseek_v3", tmp_path)
    whole = geometry_of(checkpoint)
    division = Division.of(checkpoint, 2, whole.layers)
    assert division.whole_layers == (0, 1, 2)
    assert "attention or states of 3 layers are not divided: every shard holds and computes all of them" in division.describe()
    assert division.geometry(whole) == whole, "latents are replicated"
    attention = sum(n for name, (n, _, _) in division.parameters.items() if "self_attn" in name)
    assert division.replicated_bytes(torch.float32) >= 4 * attention


def test_heads_of_k_and_v_are_divided_or_on_several_shards(tmp_path: Path) -> None:
    for kv_heads, size, local, owners in ((4, 2, 2, [0, 2]), (2, 4, 1, [0, 0, 1, 1]), (1, 4, 1, [0] * 4)):
        _, checkpoint = saved("llama", tmp_path / str(kv_heads), num_key_value_heads=kv_heads)
        whole = geometry_of(checkpoint)
        division = Division.of(checkpoint, size, whole.layers)
        assert {layer.num_kv_heads for layer in division.geometry(whole).layers} == {local}
        cut = division.cuts["model.layers.0.self_attn.k_proj.weight"]
        assert [ranges[0][0] // 8 for ranges in cut.ranges] == owners
        assert division.geometry(whole).kv_bytes_per_token * kv_heads == whole.kv_bytes_per_token * local


def test_latent_attention_is_divided_by_heads_where_the_plan_says_so(tmp_path: Path) -> None:
    model = tiny("deepseek_v2", num_attention_heads=8, num_key_value_heads=8)
    checkpoint = stored(model, tmp_path)
    division, groups, shards = divided(checkpoint, 4)
    assert division.whole_layers == () and division.kv_heads == (1, 1, 1), "the latent is on every shard"
    assert shards[3].model.layers[0].self_attn.kv_b_proj.weight.shape == (2 * (12 + 10), 16)
    assert_alike(shards, groups, logits_of(model))


@pytest.mark.parametrize("family", ["gpt_neox", "granitemoe", "llama4_text", "aria_text"])
def test_tensors_with_other_names_or_transposed_experts_are_divided(family: str, tmp_path: Path) -> None:
    """All but llama4_text store other names; the experts of llama4_text and aria_text have their outputs last."""
    sizes = {"vocab_size": 163, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2}
    more = {
        "gpt_neox": {},
        "granitemoe": {"num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
        "llama4_text": {"num_key_value_heads": 4, "head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 40},
        "aria_text": {"num_key_value_heads": 4, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    }[family]
    model = tiny(family, **{**sizes, **more, "num_attention_heads": 8, "pad_token_id": 0})
    checkpoint = stored(model, tmp_path)
    division, groups, shards = divided(checkpoint, 2)
    assert bool(division.stored) == (family != "llama4_text")
    assert any("experts" in name for name in division.reduced) == (family != "gpt_neox")
    assert_alike(shards, groups, logits_of(model))


def test_a_tied_head_that_is_stored_too_and_names_without_a_prefix_are_read(tmp_path: Path) -> None:
    model, _ = saved("qwen2", tmp_path / "as it is")
    tensors = {name.removeprefix("model."): one.clone() for name, one in model.state_dict().items()}
    assert "lm_head.weight" in tensors and "embed_tokens.weight" in tensors
    model.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint.open(resolve_model(tmp_path))
    _, groups, shards = divided(checkpoint, 4)
    for shard in shards:
        assert shard.lm_head.layer.weight is shard.model.embed_tokens.layer.weight, "tied embeddings stay one tensor"
        assert isinstance(shard.model.embed_tokens.layer, nn.Embedding)
    assert_alike(shards, groups, logits_of(model))


def test_the_row_for_padding_is_on_one_shard(tmp_path: Path) -> None:
    """Some models set it to zero as they are read."""
    model = tiny("phi3", num_attention_heads=8, num_key_value_heads=4, hidden_size=64, pad_token_id=100)
    _, _, shards = divided(stored(model, tmp_path), 2)
    assert [shard.model.embed_tokens.layer.padding_idx for shard in shards] == [None, 100 - 80]


def test_parts_stay_mapped_until_they_are_packed(tmp_path: Path) -> None:
    _, checkpoint = saved("llama", tmp_path)
    _, _, (first, second) = divided(checkpoint, 2)
    mapped = MappedFiles(checkpoint.weights.paths)
    for shard in (first, second):
        layer = shard.model.layers[0]
        assert mapped.holds(layer.self_attn.q_proj.weight) and mapped.holds(layer.mlp.down_proj.layer.weight)
    _, _, packed = divided(checkpoint, 2, pack=True)
    assert not any(mapped.holds(one) for shard in packed for one in shard.parameters() if not one.is_meta)


@needs_native
def test_a_long_chunk_meets_once_even_where_only_one_shard_is_fused(tmp_path: Path) -> None:
    """Parts of unequal widths may fuse on one shard and not on another: both have the same collectives."""
    model = tiny("llama", num_attention_heads=8, num_key_value_heads=4, hidden_size=64, max_position_embeddings=2048)
    checkpoint = stored(model, tmp_path)
    _, groups, shards = divided(checkpoint, 2, pack=True)
    fused = run_in_threads([lambda shard=shard: fuse(shard, TOKENS[0, :5], KERNELS) for shard in shards], groups)
    assert fused[0].counts["mlps"] == 3
    fused[1].undo()
    tokens = torch.randint(0, 160, (1, 1100), generator=torch.Generator().manual_seed(0))

    before = groups[0].counts()["all_reduce"].calls
    for found in logits_of_all(shards, groups, tokens):
        assert torch.allclose(found, logits_of(model, tokens), rtol=0, atol=1e-3)
    assert groups[0].counts()["all_reduce"].calls - before == 1 + 2 * 3


@needs_native
def test_a_cache_that_one_shard_has_lost_no_shard_uses(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _, checkpoint = saved("llama", tmp_path, hidden_size=256, intermediate_size=512)
    _, groups, shards = divided(checkpoint, 2, quantization="int8", pack=True)
    right = logits_of_all(shards, groups)[0]
    cache = WeightCache()
    (cache.folder / f"{cache.key(checkpoint, 'int8', torch.float32, groups[1])}.weights").unlink()
    _, groups, shards = divided(checkpoint, 2, quantization="int8", pack=True)
    assert all(group.counts()["all_reduce"].calls for group in groups), "both calibrate"
    assert torch.equal(logits_of_all(shards, groups)[0], right)
    _, groups, _ = divided(checkpoint, 2, quantization="int8", pack=True)
    assert not any("all_reduce" in group.counts() for group in groups), "both read"


@needs_native
def test_each_shard_keeps_its_own_packed_weights(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PAGETIDE_CACHE_SIZE", "1GiB")
    _, checkpoint = saved("llama", tmp_path, hidden_size=256, intermediate_size=512)
    _, groups, shards = divided(checkpoint, 2, pack=True)
    right = logits_of_all(shards, groups)[0]
    assert len(WeightCache().files()) == 2
    monkeypatch.setattr(NativeLinear, "of", None)
    _, groups, shards = divided(checkpoint, 2, pack=True)
    assert torch.equal(logits_of_all(shards, groups)[0], right)


def test_bytes_to_load_are_those_of_the_largest_part(tmp_path: Path) -> None:
    _, checkpoint = saved("llama", tmp_path)
    division, _, _ = divided(checkpoint, 2)
    parts = {one.name: division.largest_part(one) for one in checkpoint.tensors}
    assert parts["lm_head.weight"].shape == (163 - 81, 64)
    assert parts["model.layers.0.self_attn.k_proj.weight"].num_bytes == 4 * 16 * 64
    assert parts["model.norm.weight"] in checkpoint.tensors
    assert loading_bytes([*parts.values()], torch.bfloat16) <= loading_bytes(checkpoint.tensors, torch.bfloat16)
