"""Converts a Llama, Qwen2, Qwen3 or Qwen3.5 model in transformers' format for llama.cpp. Runs in llama.cpp's environment.

    python -m benchmarks.peers.convert_llama_cpp MODEL TYPE...

Writes MODEL/float32.gguf and MODEL/bfloat16.gguf, with a vocabulary in which each byte of a text is a token. Vectors stay in
float32. And MODEL/int8.gguf and MODEL/int4.gguf: Q8_0 and Q4_K_M, made by llama.cpp's own quantizer from the one in bfloat16.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
QUANTIZED = {"int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tensors(file: Path) -> Iterator[tuple[str, Any]]:
    """Names and float32 arrays of a safetensors file in float32 or bfloat16."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            data = content[8 + size + begin : 8 + size + end]
            if entry["dtype"] == "BF16":
                array = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                array = np.frombuffer(data, {"F32": np.float32}[entry["dtype"]])
            yield name, array.reshape(entry["shape"])


def renamed(name: str) -> str:
    """llama.cpp's name of a tensor."""
    module, kind = name.rsplit(".", 1)
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.{kind}"
    _, _, layer, inner = name.split(".", 3)
    return f"blk.{layer}.{NAMES[inner] if inner in NAMES else NAMES[inner.rsplit('.', 1)[0]] + '.' + kind}"


def interleaved(array: Any, heads: int) -> Any:
    """Rows of q or k in the order of llama.cpp's rotary embedding for Llama: pairs beside each other."""
    rows = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return rows.swapaxes(1, 2).reshape(array.shape)


def of_qwen3_5(name: str, array: Any) -> tuple[str, Any]:
    """llama.cpp's name of a tensor of Qwen3.5 with as many heads of keys as of values, and what it computes with."""
    if name.endswith(".A_log"):
        array = -np.exp(array)
    elif name.endswith("norm.weight") and "linear_attn" not in name:
        array = array + 1
    return renamed(name).replace("ffn_norm", "post_attention_norm"), array.squeeze()


def add_vocabulary(writer: Any, size: int) -> None:
    """Tokens of single bytes behind three special ones, and others that no text has: nothing is put before a text."""
    kinds = gguf.TokenType
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256]
    rest = size - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, *(f"<unused {number}>" for number in range(rest))])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([int(kind) for kind in [*types, *[kinds.UNUSED] * rest]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)


def write(folder: Path, dtype: str) -> None:
    """Write one file."""
    config = json.loads((folder / "config.json").read_text())
    kind = {"qwen3_5_text": "qwen35"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(str(folder / f"{dtype}.gguf"), kind)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(int(head_size * config["rope_parameters"].get("partial_rotary_factor", 1)))
    if kind == "qwen35":
        heads_of_states, size = config["linear_num_value_heads"], config["linear_value_head_dim"]
        writer.add_rope_dimension_sections([11, 11, 10, 0])  # for images; a text has the same positions in all
        writer.add_full_attention_interval(4)
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(size)
        writer.add_ssm_group_count(heads_of_states)
        writer.add_ssm_time_step_rank(heads_of_states)
        writer.add_ssm_inner_size(heads_of_states * size)
    writer.add_vocab_size(config["vocab_size"])
    add_vocabulary(writer, config["vocab_size"])
    for name, array in tensors(folder / "model.safetensors"):
        name, array = of_qwen3_5(name, array) if kind == "qwen35" else (renamed(name), array)
        if kind == "llama" and ".attn_q." in name:
            array = interleaved(array, heads)
        if kind == "llama" and ".attn_k." in name:
            array = interleaved(array, kv_heads)
        to = gguf.GGMLQuantizationType.BF16 if dtype == "bfloat16" and array.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(folder: Path, dtype: str) -> None:
    """Write one quantized file."""
    source = folder / "bfloat16.gguf"
    if not source.exists():
        write(folder, "bfloat16")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = QUANTIZED[dtype]
    if status := llama_cpp.llama_model_quantize(str(source).encode(), str(folder / f"{dtype}.gguf").encode(), params):
        raise RuntimeError(f"llama.cpp's quantizer gave {status}")


if __name__ == "__main__":
    model = Path(sys.argv[1])
    for each in sys.argv[2:]:
        if not (model / f"{each}.gguf").exists():
            (quantize if each in QUANTIZED else write)(model, each)
