"""Writes tiny checkpoints in published quantized formats, by packers written from the formats' definitions, bit by bit.

Each packer rounds a weight to numbers of its own, and returns its tensors with what they stand for in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import plain, prompts
from families import VOCAB, tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pagetide import LLM, SamplingParams
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.loading.loader import load_model
from pagetide.engine.loading.models import ModelSpec

Tensors = dict[str, torch.Tensor]
Packer = Callable[[torch.Tensor, torch.Generator], tuple[Tensors, torch.Tensor]]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def words(numbers: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32: numbers along `axis` in words, the first in the lowest bits, or the one that `order` names."""
    numbers, per = np.moveaxis(numbers.astype(np.uint64), axis, -1), 32 // bits
    padded = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % per)])
    out = np.zeros((*padded.shape[:-1], padded.shape[-1] // per), np.uint64)
    for place in range(per):
        out |= padded[..., (order or range(per))[place] :: per] << np.uint64(place * bits)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(out.astype(np.uint32).view(np.int32), -1, axis)))


def rounded(
    weight: torch.Tensor, bits: int, index: torch.Tensor, symmetric: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """(numbers from 0 [n, k], scales [n, groups], zero points [n, groups], their values), by the group of each column."""
    groups, most = int(index.max()) + 1, (1 << bits) - 1
    scales, zeros = torch.zeros(len(weight), groups, dtype=dtype), torch.full((len(weight), groups), (most + 1) // 2)
    for group in range(groups):
        part = weight[:, index == group]
        if symmetric:
            scales[:, group] = (2 * part.abs().amax(1) / most).to(dtype)
        else:
            scales[:, group] = ((part.amax(1).clamp(min=0) - part.amin(1).clamp(max=0)) / most).to(dtype)
            zeros[:, group] = (-part.amin(1).clamp(max=0) / scales[:, group].float()).round().clamp(0, most).int()
    spread, of_zeros = scales.float()[:, index], zeros[:, index]
    numbers = ((weight / spread).round() + of_zeros).clamp(0, most).int()
    return numbers, scales, zeros, (numbers - of_zeros).float() * spread


def columns(k: int, group: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """The group of each column: in order, or drawn."""
    index = torch.arange(k) // (group or k)
    return index if generator is None else index[torch.randperm(k, generator=generator)]


def compressed(
    bits: int, group: int, symmetric: bool, *, act_order: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Packer:
    """compressed-tensors, pack-quantized."""

    def packer(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        index = columns(weight.shape[1], group, generator if act_order else None)
        numbers, scales, zeros, values = rounded(weight, bits, index, symmetric, dtype)
        made = {
            "weight_packed": words(numbers.numpy(), bits, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        made |= {} if symmetric else {"weight_zero_point": words(zeros.numpy(), bits, 0)}
        return made | ({"weight_g_idx": index.int()} if act_order else {}), values

    return packer


def int_quantized(symmetric: bool = True) -> Packer:
    """compressed-tensors, int-quantized by channel."""

    def packer(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        numbers, scales, zeros, values = rounded(weight, 8, columns(weight.shape[1], 0), symmetric, torch.float32)
        made = {"weight": (numbers - 128).to(torch.int8), "weight_scale": scales}
        return made | ({} if symmetric else {"weight_zero_point": (zeros - 128).to(torch.int8)}), values

    return packer


def float_quantized(rows: int, group: int, suffix: str = "weight_scale", dtype: torch.dtype = torch.float32) -> Packer:
    """fp8 with a scale for each block of `rows` by `group`; 0 of both: for all of the weight."""

    def packer(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        n, k = weight.shape
        high, wide = rows or n, group or k
        scales = torch.zeros(-(-n // high), -(-k // wide), dtype=dtype)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = weight[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
                scales[i, j] = block.abs().max() / 448
        spread = scales.float().repeat_interleave(high, 0)[:n].repeat_interleave(wide, 1)[:, :k]
        small = (weight / spread).to(torch.float8_e4m3fn)
        return {"weight": small, suffix: scales if rows else scales.reshape(1)}, small.float() * spread

    return packer


def gptq(bits: int, group: int, symmetric: bool, *, act_order: bool = False, less: int = 1) -> Packer:
    """GPTQ: inputs in the rows; zero points are stored less 1 in the first version of the format."""

    def packer(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        index = columns(weight.shape[1], group, generator if act_order else None)
        numbers, scales, zeros, values = rounded(weight, bits, index, symmetric, torch.float16)
        stored = (zeros.T.numpy() - less) % (1 << bits)
        made = {
            "qweight": words(numbers.T.numpy(), bits, 0),
            "qzeros": words(stored, bits, 1),
            "scales": scales.T.contiguous(),
            "g_idx": index.int(),
        }
        return made, values

    return packer


def awq(group: int) -> Packer:
    """AWQ: inputs in the rows; eight outputs of a word stand as 0, 2, 4, 6, 1, 3, 5, 7."""

    def packer(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        numbers, scales, zeros, values = rounded(weight, 4, columns(weight.shape[1], group), False, torch.float16)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        made = {
            "qweight": words(numbers.T.numpy(), 4, 1, order),
            "qzeros": words(zeros.T.numpy(), 4, 1, order),
            "scales": scales.T.contiguous(),
        }
        return made, values

    return packer


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(blocks [n, k / 32, 16], scales [n, k / 32], their values [n, k])."""
    groups = weight.unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
    sizes = torch.tensor(E2M1)
    scaled = groups / 2.0 ** exponents[..., None]
    codes = (scaled.abs()[..., None] - sizes).abs().argmin(-1)
    values = sizes[codes] * scaled.sign() * 2.0 ** exponents[..., None]
    codes = codes + 8 * (scaled < 0)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return blocks, (exponents + 127).to(torch.uint8), values.flatten(1)


def checkpoint(
    model: Any,
    folder: Path,
    config: dict[str, Any],
    packer: Packer | Callable[[str], Packer | None],
    *,
    by_name: bool = False,
    shards: int = 1,
) -> Path:
    """Write `model` with packed linear layers into `folder`, and with what these stand for into the folder that is returned.

    Args:
        config: The `quantization_config`.
        packer: Of all linear layers but the output head; `by_name`: a function of a layer's name, None: it stays.
    """
    plain = folder.parent / f"{folder.name}-plain"
    model.save_pretrained(folder)
    model.save_pretrained(plain)
    generator, stored, values = torch.Generator().manual_seed(5), {}, load_file(folder / "model.safetensors")
    for name, tensor in list(values.items()):
        base, _, leaf = name.rpartition(".")
        chosen: Any = packer(base) if by_name else None if base.endswith("lm_head") else packer  # type: ignore[call-arg,arg-type]
        whole = (
            leaf == "weight"
            and tensor.ndim == 2
            and len(tensor) % 8 == 0
            and not any(part in name for part in ("embed", "norm"))
        )
        if not whole or chosen is None:
            stored[name] = tensor
            continue
        made, values[name] = chosen(tensor, generator)
        stored |= {f"{base}.{suffix}": part for suffix, part in made.items()}
    write(folder, stored, config, shards)
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    return plain


def write(folder: Path, tensors: Tensors, config: dict[str, Any] | None, shards: int = 1) -> None:
    """Write tensors, in `shards` files, and `quantization_config`."""
    file = folder / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | ({} if config is None else {"quantization_config": config})))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"model-{1 + i * shards // len(names):05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for part in {*places.values()}:
        save_file({name: tensors[name] for name in names if places[name] == part}, folder / part, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def of_compressed(kind: str = "int", bits: int = 4, group: int = 0, symmetric: bool = True, **more) -> dict:
    weights = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": "group" if group else "channel"}
    weights |= {"group_size": group or None, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


def of_gptq(bits: int = 4, group: int = 16, **more) -> dict:
    return {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": False, "sym": True, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 16]}

FORMATS = {
    "int4 in groups": ("llama", of_compressed(group=16), compressed(4, 16, True)),
    "int4 by channel with zero points": ("qwen2", of_compressed(symmetric=False), compressed(4, 0, False)),
    "int4 in groups with zero points": ("llama", of_compressed(group=24, symmetric=False), compressed(4, 24, False)),
    "int4 in groups out of order": (
        "llama", of_compressed(group=16, actorder="group"), compressed(4, 16, True, act_order=True),
    ),
    "int8 in groups": ("llama", of_compressed(bits=8, group=16), compressed(8, 16, True, dtype=torch.float16)),
    "int8 in groups with zero points": ("llama", of_compressed(bits=8, group=8, symmetric=False), compressed(8, 8, False)),
    "int8 in bytes": ("llama", of_compressed(bits=8), int_quantized()),
    "int8 in bytes with zero points": ("llama", of_compressed(bits=8, symmetric=False), int_quantized(False)),
    "fp8 by tensor": ("qwen3", of_compressed("float", 8, strategy="tensor"), float_quantized(0, 0)),
    "fp8 by channel": ("llama", of_compressed("float", 8), float_quantized(1, 0, dtype=torch.bfloat16)),
    "fp8 in blocks": ("llama", FP8, float_quantized(32, 16, "weight_scale_inv")),
    "fp8 without blocks": ("llama", {"quant_method": "fp8"}, float_quantized(0, 0)),
    "GPTQ": ("qwen3", of_gptq(), gptq(4, 16, True)),
    "GPTQ by channel": ("llama", of_gptq(group=0), gptq(4, 0, True)),
    "GPTQ of 8 bits": ("llama", of_gptq(8), gptq(8, 16, False)),
    "GPTQ with zero points": ("llama", of_gptq(checkpoint_format="gptq"), gptq(4, 16, False)),
    "GPTQ of the second version": ("llama", of_gptq(checkpoint_format="gptq_v2"), gptq(4, 16, False, less=0)),
    "GPTQ out of order": ("llama", of_gptq(desc_act=True), gptq(4, 16, False, act_order=True)),
    "AWQ": ("qwen3", AWQ, awq(16)),
}  # fmt: skip


def gpt_oss(folder: Path) -> Path:
    """As its checkpoints are: experts in MXFP4, everything else in floating point. Returns the plain folder."""
    model = tiny("gpt_oss", hidden_size=64)
    plain_folder = folder.parent / "plain"
    model.save_pretrained(folder)
    model.save_pretrained(plain_folder)
    stored, values = {}, load_file(folder / "model.safetensors")
    for name, tensor in list(values.items()):
        if tensor.ndim != 3:
            stored[name] = tensor
            continue
        parts = [mxfp4(expert.T) for expert in tensor]
        stored[f"{name}_blocks"], stored[f"{name}_scales"], value = (torch.stack(part) for part in zip(*parts, strict=True))
        values[name] = value.transpose(1, 2).contiguous()
    write(folder, stored, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    save_file(values, plain_folder / "model.safetensors", {"format": "pt"})
    return plain_folder


def oracle(folder: Path) -> Any:
    """transformers' model of a plain folder."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def opened(folder: Path) -> Checkpoint:
    """The checkpoint of a folder."""
    return Checkpoint.open(ModelSpec(folder.name, folder, "a test"))


def check_logits(folder: Path, plain_folder: Path) -> None:
    """The logits of the folder's model, packed and not, are those of transformers over plain weights."""
    ids = torch.tensor(prompts([40], VOCAB))
    with torch.inference_mode():
        right = oracle(plain_folder)(ids).logits
        for pack in (True, False):
            out = load_model(opened(folder), torch.device("cpu"), torch.float32, pack=pack)(ids).logits
            assert (out - right).norm() <= (1e-5 if pack else 1e-7) * right.norm(), pack


def check_tokens(folder: Path, plain_folder: Path) -> None:
    """The tokens of the folder's engine are those of transformers over plain weights."""
    inputs = prompts([3, 17, 40], VOCAB)
    expected = plain(oracle(plain_folder), inputs, 8)
    with LLM(folder, device="cpu", dtype="float32", kv_memory=1 << 20) as llm:
        outputs = llm.generate(inputs, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert [one.outputs[0].token_ids for one in outputs] == expected
