"""Writes tiny checkpoints in published quantized formats, by packers written from the formats' definitions, bit by bit.

Each packer rounds a weight to numbers of its own, and returns its tensors with what they stand for in float32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

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


def float_quantized(
    rows: int, group: int, suffix: str = "weight_scale", dtype: torch.dtype = torch.float32, exponents: bool = False
) -> Packer:
    """fp8 with a scale for each block of `rows` by `group`; 0 of both: for all of the weight. `exponents`: powers of 2."""

    def packer(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        n, k = weight.shape
        high, wide = rows or n, group or k
        scales = torch.zeros(-(-n // high), -(-k // wide), dtype=dtype)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = weight[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
                scales[i, j] = (block.abs().max() / 448).log2().ceil().exp2() if exponents else block.abs().max() / 448
        spread = scales.float().repeat_interleave(high, 0)[:n].repeat_interleave(wide, 1)[:, :k]
        small = (weight / spread).to(torch.float8_e4m3fn)
        stored = scales.to(torch.float8_e8m0fnu) if exponents else scales
        if exponents and suffix == "weight_scale":  # compressed-tensors has them as bytes
            stored = stored.view(torch.uint8)
        return {"weight": small, suffix: stored if rows else stored.reshape(1)}, small.float() * spread

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


def mxfp4_packed() -> Packer:
    """compressed-tensors, mxfp4-pack-quantized."""

    def packer(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        blocks, scales, values = mxfp4(weight)
        return {"weight_packed": blocks.flatten(1), "weight_scale": scales}, values

    return packer


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
        whole = leaf == "weight" and tensor.ndim == 2 and len(tensor) % 8 == 0 and not ("embed" in name or "norm" in name)
        if not whole or chosen is None:
            stored[name] = tensor
            continue
        made, values[name] = chosen(tensor.float(), generator)
        stored |= {f"{base}.{suffix}": part for suffix, part in made.items()}
    write(folder, stored, config, shards)
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    return plain


def experts_checkpoint(model: Any, folder: Path) -> Path:
    """As `checkpoint`, with experts in MXFP4, as gpt-oss has them: [experts, inputs, outputs] in the model."""
    plain = folder.parent / f"{folder.name}-plain"
    model.save_pretrained(folder)
    model.save_pretrained(plain)
    stored, values = {}, load_file(folder / "model.safetensors")
    for name, tensor in list(values.items()):
        if tensor.ndim != 3:
            stored[name] = tensor
            continue
        parts = [mxfp4(expert.T.float()) for expert in tensor]
        stored[f"{name}_blocks"], stored[f"{name}_scales"], value = (torch.stack(part) for part in zip(*parts, strict=True))
        values[name] = value.transpose(1, 2).contiguous()
    write(folder, stored, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    return plain


def packer_of(config: Mapping[str, Any]) -> Packer | None:
    """The packer for a published `quantization_config`; None if there is none."""
    group = int(config.get("group_size") or 0)
    block = config.get("weight_block_size")
    match config.get("quant_method"):
        case "gptq":
            return gptq(int(config["bits"]), group, bool(config.get("sym", True)))
        case "awq":
            return awq(group)
        case "fp8":
            return float_quantized(0, 0) if block is None else float_quantized(*block, "weight_scale_inv")
        case "compressed-tensors" if config["format"] == "pack-quantized":
            (weights,) = (one["weights"] for one in config["config_groups"].values())
            return compressed(weights["num_bits"], weights["group_size"], weights["symmetric"])
    return None


def stays(base: str, config: Mapping[str, Any]) -> bool:
    """Whether a published `quantization_config` leaves this linear layer as it is, as compressed-tensors names such."""
    named = config.get("ignore", ("lm_head",))
    return any(re.match(one[3:], base) if one.startswith("re:") else base.endswith(one) for one in named)


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
