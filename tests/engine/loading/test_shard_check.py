"""The comparison of a divided model with an undivided run: what agrees, what is found, and that all shards hear of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import tiny
from shard_threads import ThreadGroup, run_in_threads
from sharded_engines import CPU, divided, saved

from pagetide import native
from pagetide.engine.collectives.group import CollectiveAborted
from pagetide.engine.config import resolve_model
from pagetide.engine.errors import UnsupportedModel
from pagetide.engine.layers.fusion import fuse
from pagetide.engine.layers.kernels import kernels_on
from pagetide.engine.layers.linears import rows_as_they_are
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.loader import load_model
from pagetide.engine.loading.shard_check import Reference, check_against, reference_logits

KERNELS = kernels_on(torch.device("cpu"))
ALL = 1 << 40  # bytes
needs_native = pytest.mark.skipif(native.instructions() is None, reason="without native kernels nothing is quantized")


def raised(reference: Reference, groups: list[ThreadGroup], shards: list) -> list[BaseException | None]:
    """What the check of each shard raises. An error of its own, as in an engine, aborts the collectives of the others."""

    def check(shard, group: ThreadGroup) -> BaseException | None:
        try:
            with rows_as_they_are():
                check_against(shard, None if group.rank else reference, "tiny", group)
        except UnsupportedModel as error:
            return error
        except BaseException as error:
            group.abort()
            return error
        return None

    return run_in_threads([lambda one=one: check(*one) for one in zip(shards, groups, strict=True)], groups)


def checked(checkpoint: Checkpoint, groups: list[ThreadGroup], shards: list, budget: int = ALL, dtype=torch.float32) -> int:
    """Check all shards. Returns the layers that were compared."""
    reference = reference_logits(checkpoint, CPU, dtype, budget)
    assert raised(reference, groups, shards) == [None] * len(shards)
    return reference.num_layers


def outcomes(checkpoint: Checkpoint, groups: list[ThreadGroup], shards: list, dtype=torch.float32) -> list[str]:
    """What each shard raises, as text."""
    return [str(error) for error in raised(reference_logits(checkpoint, CPU, dtype, ALL), groups, shards)]


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3"])
def test_a_divided_model_agrees_with_as_many_layers_as_fit(name: str, tmp_path: Path) -> None:
    model, checkpoint = saved(name, tmp_path)
    _, groups, shards = divided(checkpoint, 2)
    whole = model.config.num_hidden_layers
    assert checked(checkpoint, groups, shards) == whole
    layers = [sum(one.nbytes for one in layer.parameters()) for layer in model.model.layers]
    rest = sum(one.nbytes for one in model.parameters()) - sum(layers)
    assert checked(checkpoint, groups, shards, rest + layers[0] + layers[1] - 1) == 1
    assert checked(checkpoint, groups, shards, rest + layers[0] + layers[1]) == 2
    assert checked(checkpoint, groups, shards, 1) == 1, "at least one layer"
    for shard in shards:
        assert len(shard.model.layers) == shard.config.num_hidden_layers == whole, "all layers are back"


def test_layers_that_are_not_compared_are_not_read(tmp_path: Path) -> None:
    model, _ = saved("llama", tmp_path)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.fill_(torch.nan)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    checkpoint = Checkpoint.open(resolve_model(tmp_path))
    layers = [sum(one.nbytes for one in layer.parameters()) for layer in model.model.layers]
    rest = sum(one.nbytes for one in model.parameters()) - sum(layers)
    reference = reference_logits(checkpoint, CPU, torch.float32, rest + 2 * layers[0])
    assert reference.num_layers == 2 and reference.logits.isfinite().all() and reference.logits.shape == (12, 163)


@pytest.mark.parametrize("part", ["mlp.down_proj", "self_attn.o_proj"])
def test_a_lost_sum_is_found_and_all_shards_refuse(part: str, tmp_path: Path) -> None:
    _, checkpoint = saved("llama", tmp_path)
    _, groups, shards = divided(checkpoint, 2)
    for shard in shards:
        parent, _, child = part.partition(".")
        module = getattr(shard.model.layers[1], parent)
        setattr(module, child, getattr(module, child).layer)
    first, second = outcomes(checkpoint, groups, shards)
    said = "tiny (LlamaForCausalLM) cannot be divided over 2 shards: its logits differ from those of an undivided run by"
    assert first == second and said in first


def test_a_part_that_the_plan_leaves_out_is_found(tmp_path: Path) -> None:
    """Cohere's norm of queries has weights for each head, which its plan does not divide."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 64}
    tiny("cohere", **sizes, vocab_size=163, use_qk_norm=True, pad_token_id=0).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(resolve_model(tmp_path))
    _, groups, shards = divided(checkpoint, 2)
    for message in outcomes(checkpoint, groups, shards):
        assert "a forward pass of a shard fails (RuntimeError: The size of tensor" in message


def test_a_shard_that_stops_is_no_reason_to_call_the_model_unsupported(tmp_path: Path) -> None:
    _, checkpoint = saved("llama", tmp_path)
    _, groups, shards = divided(checkpoint, 2)

    def fail(*args, **kwargs) -> None:
        raise MemoryError

    shards[1].model.layers[0].forward = fail
    reference = reference_logits(checkpoint, CPU, torch.float32, ALL)
    errors = raised(reference, groups, shards)
    assert {type(error) for error in errors} == {MemoryError, CollectiveAborted}


@needs_native
@pytest.mark.parametrize(("dtype", "form"), [(torch.float32, "int4"), (torch.bfloat16, "int8")])
def test_quantized_models_agree_as_far_as_they_can(dtype, form, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _, checkpoint = saved("llama", tmp_path, hidden_size=256, intermediate_size=512)
    _, groups, shards = divided(checkpoint, 2, dtype, quantization=form, pack=True)
    run_in_threads([lambda shard=shard: fuse(shard, torch.arange(5), KERNELS) for shard in shards], groups)
    assert checked(checkpoint, groups, shards, dtype=dtype) == 3
    if form == "int8":
        for shard in shards:
            shard.model.layers[0].self_attn.o_proj = shard.model.layers[0].self_attn.o_proj.layer
        for message in outcomes(checkpoint, groups, shards, dtype):
            assert "differ from those of an undivided run" in message


@needs_native
def test_a_model_can_be_checked_before_it_is_quantized(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _, checkpoint = saved("llama", tmp_path, hidden_size=256, intermediate_size=512)
    division, groups, _ = divided(checkpoint, 2)
    reference = reference_logits(checkpoint, CPU, torch.bfloat16, ALL)  # which the checkpoint's float32 need not equal
    seen: list[type] = []

    def load(group: ThreadGroup) -> None:
        def check(model) -> None:
            seen.append(type(model.model.layers[0].mlp.down_proj.layer))
            check_against(model, None if group.rank else reference, "tiny", group)

        load_model(checkpoint, CPU, torch.bfloat16, quantization="int4", pack=True, division=division, group=group, check=check)

    run_in_threads([lambda group=group: load(group) for group in groups], groups)
    assert seen == [torch.nn.Linear] * 2
