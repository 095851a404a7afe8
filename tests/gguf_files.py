"""GGUF files of tiny models, written by the published layout without the reader's code: `write_model(tiny("qwen3"), file)`.

Rows, norms and experts are changed as llama.cpp's converter does it. Blocks are made and decoded weight by weight, as in
ggml's reference (ggml-quants.c).
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pagetide.engine import demo_model

TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2), "Q4_0": (2, 32, 18), "Q5_0": (6, 32, 22), "Q8_0": (8, 32, 34),
    "Q4_1": (3, 32, 20), "Q5_1": (7, 32, 24),
    "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "MXFP4": (39, 32, 17),
}  # fmt: skip
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen2_moe": "qwen2moe", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "gpt_oss": "gpt-oss",
}  # fmt: skip
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps", "mlp.experts.down_proj": "ffn_down_exps",
}  # fmt: skip
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
KindOf = Callable[[str, tuple[int, ...]], str]


# --- blocks ---


def _halves(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float16)[..., None].view(np.uint8)


def quantize(weight: np.ndarray, kind: str) -> np.ndarray:
    """uint8 [..., bytes of a row]: float32 [..., k] in blocks, not by the best scales."""
    _, block, num_bytes = TYPES[kind]
    if kind == "F32":
        return np.ascontiguousarray(weight, np.float32).view(np.uint8)
    if kind in ("F16", "BF16"):
        dtype = torch.float16 if kind == "F16" else torch.bfloat16
        return torch.from_numpy(np.ascontiguousarray(weight)).to(dtype).view(torch.uint8).numpy()
    x = np.ascontiguousarray(weight, np.float32).reshape(-1, block)
    out = np.zeros((len(x), num_bytes), np.uint8)
    most = np.abs(x).max(1, keepdims=True) + 1e-9
    if kind in ("Q4_0", "Q5_0", "Q8_0"):
        top = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 127}[kind]
        d = (most / top).astype(np.float16)
        q = np.clip(np.round(x / d.astype(np.float32)), -top, top - (kind != "Q8_0")).astype(np.int32)
        out[:, :2] = d.view(np.uint8)
        if kind == "Q8_0":
            out[:, 2:] = q.astype(np.int8).view(np.uint8)
        else:
            q += top
            for j in range(16):
                out[:, num_bytes - 16 + j] = (q[:, j] & 15) | (q[:, j + 16] & 15) << 4
            if kind == "Q5_0":
                for j in range(32):
                    out[:, 2 + j // 8] |= ((q[:, j] >> 4) << j % 8).astype(np.uint8)
    elif kind in ("Q4_1", "Q5_1"):
        top, least = {"Q4_1": 15, "Q5_1": 31}[kind], x.min(1, keepdims=True).astype(np.float16)
        d = ((x.max(1, keepdims=True) - least) / top + 1e-9).astype(np.float16)
        q = np.clip(np.round((x - least) / np.where(d == 0, 1, d).astype(np.float32)), 0, top).astype(np.int32)
        out[:, :2], out[:, 2:4] = d.view(np.uint8), least.view(np.uint8)
        for j in range(16):
            out[:, num_bytes - 16 + j] = (q[:, j] & 15) | (q[:, j + 16] & 15) << 4
        for j in range(32 if kind == "Q5_1" else 0):
            out[:, 4 + j // 8] |= ((q[:, j] >> 4) << j % 8).astype(np.uint8)
    elif kind == "MXFP4":
        exponent = np.floor(np.log2(most[:, 0])).astype(np.int32) - 2
        q = np.abs((x / np.exp2(exponent)[:, None])[..., None] - _E2M1).argmin(-1)
        out[:, 0] = exponent + 127
        for j in range(16):
            out[:, 1 + j] = q[:, j] | q[:, j + 16] << 4
    elif kind == "Q6_K":
        groups = x.reshape(-1, 16, 16)
        scales = np.abs(groups).max(2) / 31 * np.where(np.arange(16) % 3, 1, -1)
        d = (np.abs(scales).max(1) / 127 + 1e-9).astype(np.float16)
        codes = np.round(scales / d[:, None].astype(np.float32)).astype(np.int8)
        step = (codes * d[:, None].astype(np.float32))[..., None]
        q = np.clip(np.round(groups / np.where(step == 0, 1, step)), -32, 31).astype(np.int32).reshape(-1, 256) + 32
        for half in range(2):
            for i in range(32):
                one, two, three, four = (q[:, 128 * half + i + 32 * j] for j in range(4))
                out[:, 64 * half + i] = (one & 15) | (three & 15) << 4
                out[:, 64 * half + i + 32] = (two & 15) | (four & 15) << 4
                out[:, 128 + 32 * half + i] = (one >> 4) | (two >> 4) << 2 | (three >> 4) << 4 | (four >> 4) << 6
        out[:, 192:208], out[:, 208:] = codes.view(np.uint8), d[:, None].view(np.uint8)
    else:
        _k_blocks(x, out, 15 if kind == "Q4_K" else 31)
    return out.reshape(*weight.shape[:-1], -1)


def _k_blocks(x: np.ndarray, out: np.ndarray, top: int) -> None:
    groups = x.reshape(-1, 8, 32)
    least = np.maximum(-groups.min(2), 0)
    scale = (groups.max(2) + least) / top + 1e-9
    d, dmin = ((one.max(1) / 63).astype(np.float16) for one in (scale, least))
    codes = np.clip(np.round(scale / d[:, None].astype(np.float32)), 1, 63).astype(np.uint8)
    minimums = np.clip(np.round(least / np.maximum(dmin[:, None].astype(np.float32), 1e-9)), 0, 63).astype(np.uint8)
    step = (codes * d[:, None].astype(np.float32))[..., None]
    shifted = groups + (minimums * dmin[:, None].astype(np.float32))[..., None]
    q = np.clip(np.round(shifted / step), 0, top).astype(np.int32)
    out[:, :2], out[:, 2:4] = d[:, None].view(np.uint8), dmin[:, None].view(np.uint8)
    for j in range(4):
        out[:, 4 + j] = codes[:, j] | codes[:, j + 4] >> 4 << 6
        out[:, 8 + j] = minimums[:, j] | minimums[:, j + 4] >> 4 << 6
        out[:, 12 + j] = (codes[:, j + 4] & 15) | (minimums[:, j + 4] & 15) << 4
        for i in range(32):
            out[:, out.shape[1] - 128 + 32 * j + i] = (q[:, 2 * j, i] & 15) | (q[:, 2 * j + 1, i] & 15) << 4
    if top == 31:
        for j in range(8):
            out[:, 16:48] |= (q[:, j] >> 4 << j).astype(np.uint8)


def dequantize(data: np.ndarray, kind: str) -> np.ndarray:
    """float32 [..., k] of uint8 [..., bytes of a row], weight by weight."""
    _, block, num_bytes = TYPES[kind]
    if block == 1:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return torch.from_numpy(np.ascontiguousarray(data)).view(dtype).float().numpy()
    blocks = np.ascontiguousarray(data).reshape(-1, num_bytes)
    y = np.zeros((len(blocks), block), np.float32)

    def half(at: int) -> np.ndarray:
        return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)[:, 0].astype(np.float32)

    b = blocks.astype(np.int32)
    for i in range(block):
        match kind:
            case "Q8_0":
                y[:, i] = half(0) * blocks[:, 2 + i].view(np.int8)
            case "Q4_0" | "MXFP4" | "Q5_0":
                q = b[:, num_bytes - 16 + i % 16] >> 4 * (i // 16) & 15
                if kind == "Q4_0":
                    y[:, i] = half(0) * (q - 8)
                elif kind == "Q5_0":
                    y[:, i] = half(0) * ((q | (b[:, 2 + i // 8] >> i % 8 & 1) << 4) - 16)
                else:
                    y[:, i] = _E2M1[q] * np.exp2(b[:, 0] - 127.0)
            case "Q4_1" | "Q5_1":
                q = b[:, num_bytes - 16 + i % 16] >> 4 * (i // 16) & 15
                q |= (b[:, 4 + i // 8] >> i % 8 & 1) << 4 if kind == "Q5_1" else 0
                y[:, i] = half(0) * q + half(2)
            case "Q6_K":
                part, at = divmod(i % 128, 32)
                low = b[:, 64 * (i // 128) + at + 32 * (part % 2)] >> 4 * (part // 2) & 15
                high = b[:, 128 + 32 * (i // 128) + at] >> 2 * part & 3
                y[:, i] = half(208) * blocks[:, 192 + i // 16].view(np.int8) * ((low | high << 4) - 32)
            case _:
                j = i // 32
                if j < 4:
                    scale, minimum = b[:, 4 + j] & 63, b[:, 8 + j] & 63
                else:
                    scale = (b[:, 8 + j] & 15) | b[:, j] >> 6 << 4
                    minimum = b[:, 8 + j] >> 4 | b[:, 4 + j] >> 6 << 4
                q = b[:, num_bytes - 128 + 32 * (j // 2) + i % 32] >> 4 * (j % 2) & 15
                if kind == "Q5_K":
                    q |= (b[:, 16 + i % 32] >> j & 1) << 4
                y[:, i] = half(0) * scale * q - half(2) * minimum
    return y.reshape(*data.shape[:-1], -1)


# --- files ---


def write(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, np.ndarray]], alignment: int = 32) -> Path:
    """A file with `tensors`: name, then kind, and uint8 [..., bytes of a row]."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))

    def text(one: str) -> bytes:
        return struct.pack("<Q", len(one.encode())) + one.encode()

    def value(one: Any) -> bytes:
        match one:
            case bool():
                return struct.pack("<I?", 7, one)
            case int():
                return struct.pack("<Ii", 5, one) if one < 0 else struct.pack("<II", 4, one)
            case float():
                return struct.pack("<If", 6, one)
            case str():
                return struct.pack("<I", 8) + text(one)
        kinds = [value(each) for each in one] or [struct.pack("<I", 4)]
        return (
            struct.pack("<I", 9) + kinds[0][:4] + struct.pack("<Q", len(one)) + b"".join(each[4:] for each in kinds[: len(one)])
        )

    for key, one in metadata.items():
        out += text(key) + value(one)
    offset, body = 0, bytearray()
    for name, (kind, data) in tensors.items():
        number, block, num_bytes = TYPES[kind]
        sizes = (*data.shape[:-1], data.shape[-1] // num_bytes * block)[::-1]
        out += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, number, offset)
        body += data.tobytes() + b"\0" * (-data.nbytes % alignment)
        offset = len(body)
    file.write_bytes(bytes(out) + b"\0" * (-len(out) % alignment) + bytes(body))
    return file


def metadata_of(config: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes of a configuration."""
    arch = ARCHITECTURES[config.model_type]
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim, "attention.value_length": head_dim, "rope.freq_base": float(rope["rope_theta"]),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }  # fmt: skip
    for key, names in {
        "expert_count": ("num_experts", "num_local_experts"), "expert_used_count": ("num_experts_per_tok",),
        "attention.sliding_window": ("sliding_window",), "expert_feed_forward_length": ("moe_intermediate_size",),
        "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
        "attn_logit_softcapping": ("attn_logit_softcapping",), "final_logit_softcapping": ("final_logit_softcapping",),
    }.items():  # fmt: skip
        one = next((value for name in names if (value := getattr(config, name, None)) is not None), None)
        if one is not None and arch != "llama":
            found[key] = one
    if rope["rope_type"] in ("yarn", "linear"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
        if "original_max_position_embeddings" in rope:
            found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if config.model_type == "gemma3_text":
        found["attention.sliding_window_pattern"] = config.layer_types.index("full_attention") + 1
    return {"general.architecture": arch, **{f"{arch}.{key}": one for key, one in found.items()}}


def _gguf_name(name: str) -> str:
    stem, _, leaf = name.rpartition(".")
    if leaf not in ("weight", "bias"):  # experts in one tensor, sinks
        stem, leaf = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{leaf}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.{leaf}"


def _renamed(name: str, family: str) -> str:
    """The name in the file, with Gemma's norms around the feed-forward layers."""
    if family in ("gemma2", "gemma3_text") and "_feedforward_layernorm" in name:
        return f"blk.{name.split('.')[2]}.{'ffn_norm' if 'pre_' in name else 'post_ffw_norm'}.weight"
    if "post_attention_layernorm" in name:
        more_norms = family in ("gemma2", "gemma3_text", "gpt_oss")
        return f"blk.{name.split('.')[2]}.{'post_attention_norm' if more_norms else 'ffn_norm'}.weight"
    return _gguf_name(name)


def write_model(model: Any, file: Path, kind_of: KindOf, more: Mapping[str, Any] | None = None) -> Path:
    """Write `model` as a GGUF file, and the model that it stands for into the folder that is returned.

    `kind_of`: the type of a tensor by its name in the file and its shape; vectors are F32 always. `more`: further metadata.
    """
    plain = file.with_name(f"{file.stem}-plain")
    model.save_pretrained(plain)
    config, family = model.config, model.config.model_type
    values, tensors = {}, dict[str, tuple[str, np.ndarray]]()
    experts: dict[str, dict[int, torch.Tensor]] = {}

    def add(name: str, weight: torch.Tensor) -> torch.Tensor:
        """Add a tensor [..., k] of the file; returns what it stands for."""
        whole = weight.ndim < 2 or "norm" in name or name.endswith(".bias") or "gate_inp" in name
        kind = "F32" if whole else kind_of(name, tuple(weight.shape))
        data = quantize(weight.float().numpy(), kind)
        value = torch.from_numpy(dequantize(data, kind))
        if family in ("llama", "mistral") and ("attn_q." in name or "attn_k." in name):
            heads = config.num_attention_heads if "attn_q." in name else config.num_key_value_heads
            data = (
                data.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(data.shape)
                if weight.ndim > 1
                else (data.view(np.float32).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1).copy().view(np.uint8))
            )
        tensors[name] = kind, data
        return value

    for name, tensor in load_file(plain / "model.safetensors").items():
        stem = name.rpartition(".")[0]
        if ".experts." in name and stem.rpartition(".")[2] in ("gate_proj", "up_proj", "down_proj"):
            before, _, rest = name.partition(".experts.")
            expert, _, rest = rest.partition(".")
            experts.setdefault(f"{before}.experts.{rest}", {})[int(expert)] = tensor
        elif family == "gpt_oss" and ".experts.gate_up_proj" in name:
            both = tensor.transpose(1, 2) if tensor.ndim == 3 else tensor  # outputs before inputs
            first = name.replace("gate_up_proj", "gate_proj")
            parts = [
                add(_renamed(first.replace("gate_proj", one), family), both[:, i::2].contiguous())
                for i, one in enumerate(("gate_proj", "up_proj"))
            ]
            value = torch.stack(parts, 2).flatten(1, 2)
            values[name] = value.transpose(1, 2).contiguous() if tensor.ndim == 3 else value
        elif family == "gpt_oss" and tensor.ndim == 3:
            values[name] = add(_renamed(name, family), tensor.transpose(1, 2).contiguous()).transpose(1, 2).contiguous()
        elif family.startswith("gemma") and name.endswith("norm.weight"):
            values[name] = add(_renamed(name, family), tensor + 1) - 1
        elif name.endswith("shared_expert_gate.weight"):
            values[name] = add(_renamed(name, family), tensor[0])[None]
        else:
            values[name] = add(_renamed(name, family), tensor)
    for name, of in experts.items():
        value = add(_renamed(name, family), torch.stack([of[i] for i in range(len(of))]))
        before, _, rest = name.partition(".experts.")
        values |= {f"{before}.experts.{i}.{rest}": one.clone() for i, one in enumerate(value)}
    save_file({name: one.contiguous() for name, one in values.items()}, plain / "model.safetensors", {"format": "pt"})
    write(file, {**metadata_of(config), **(more or {})}, tensors)
    return plain


def tokenizer_metadata(folder: Path, rule: str = "gpt-2") -> dict[str, Any]:
    """What the converter writes of the byte-level tokenizer in a folder."""
    content = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    ids = content["model"]["vocab"] | {one["content"]: one["id"] for one in content["added_tokens"]}
    kinds = {one["content"]: 3 if one["special"] else 4 for one in content["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": rule, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(one, 1) for one in tokens],
        "tokenizer.ggml.merges": [one if isinstance(one, str) else " ".join(one) for one in content["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": content["post_processor"] is not None,
    }  # fmt: skip
    for name in ("bos", "eos"):
        if settings.get(f"{name}_token") is not None:
            found[f"tokenizer.ggml.{name}_token_id"] = ids[settings[f"{name}_token"]]
    return found | ({"tokenizer.chat_template": settings["chat_template"]} if "chat_template" in settings else {})


def write_demo(file: Path, kind_of: KindOf, more: Mapping[str, Any] | None = None) -> Path:
    """The bundled model as a GGUF file with its tokenizer; returns the folder of the model that it stands for."""
    folder = Path(str(demo_model.__file__)).parent
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = write_model(model, file, kind_of, {**tokenizer_metadata(folder), **(more or {})})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, plain)
    return plain
