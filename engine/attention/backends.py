"""The requirements of each attention backend, as data, and why a model cannot use one, as text; memory of latent attention.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...common.error_text import install_command
from ...common.units import MIB

_HALF = ("float16", "bfloat16")
_ANY_MAJOR = tuple(range(8, 13))  # Ampere to Blackwell
_FLOAT8 = "float8_e4m3fn"
# Latent attention (`latent`) expands K and V of a chunk of so many tokens: that takes as many products as the absorbed form has
# more for about 170.
EXPANDED_FROM = 256
EXPANDED_BYTES = 32 << 20  # of K and V at a time
# Sequences of which a layer's states are copied at a time, where no kernel computes over them (`states`).
MOST_COPIED_STATES = 32
_STATE_COPIES = 2  # before and behind a token
_EXPANDED_COPIES = 4  # products by head, these joined, K, and what a kernel gathers and pads
# Attention of a model's own (`gathered`) makes scores of all heads for so many tokens at a time.
PIECE_BYTES = 256 << 20
_SCORE_BYTES = 16  # of a score: before and behind a mask and the softmax, in float32 and in the model's type
_GATHERED_COPIES = 4
_FLOAT8_CAPABILITY = (8, 9)  # the first that converts float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Needs:
    """What a backend supports, and the memory it uses."""

    install: str | None = None  # how to install it; None: part of pagetide
    dtypes: tuple[str, ...] = ("float32", *_HALF)  # of the model
    majors: tuple[int, ...] | None = None  # compute capability; None: it runs on a CPU too; none: only there
    block_multiple: int = 1  # tokens
    max_head_dim: int | None = None
    max_v_head_dim: int | None = None  # where V's limit is lower
    head_dim_multiple: int = 1
    head_dims: tuple[int, ...] | None = None  # None: all within the two limits above
    equal_dims: bool = False  # K and V have the same head dim
    softcap: bool = True
    sinks: bool = True
    scaled: tuple[str, ...] = ()  # types of K and V with scales
    buffer_bytes: int = 0  # device memory besides the usual workspaces, kept or per call
    compiles: bool = False  # compiles for long on first use: only used on request


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer's attention needs of a backend."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


# From the sources of each: flash-attn 2.8.3 (csrc/flash_attn/flash_api.cpp), flash-attn 3 (hopper/flash_api.cpp),
# flash-attn-4 (flash_attn/cute/interface.py), flashinfer-python (flashinfer/prefill.py), torch 2.13 (torch/nn/attention).
# All support sliding windows. Head dims must be multiples of 8 because of 16-byte copies: blocks begin at multiples of 64.
BACKENDS: dict[str, Needs] = {
    "torch": Needs(scaled=("int8", _FLOAT8)),
    "native": Needs(
        "install g++ or clang, then repeat the installation of pagetide", scaled=("int8",), majors=(), max_head_dim=576
    ),
    "triton": Needs(
        install_command("triton"), scaled=("int8", _FLOAT8), majors=_ANY_MAJOR, max_head_dim=576, max_v_head_dim=512,
        buffer_bytes=32 * MIB,
    ),
    "flash-attn": Needs(
        install_command("flash"), _HALF, (8, 9, 10, 12), block_multiple=256, max_head_dim=256, head_dim_multiple=8,
        equal_dims=True, sinks=False, buffer_bytes=32 * MIB,
    ),
    "flash-attn-3": Needs(
        "build it from the folder hopper of github.com/Dao-AILab/flash-attention", _HALF, (9,), max_head_dim=256,
        head_dim_multiple=8, equal_dims=True, sinks=False, buffer_bytes=32 * MIB,
    ),
    # On SM 8.0 and 12.0 it takes no block tables. On SM 10.0, heads of 256 take no per-sequence lengths.
    "flash-attn-4": Needs(
        "pip install flash-attn-4", _HALF, (9, 10, 11), max_head_dim=128, head_dim_multiple=8, equal_dims=True,
        buffer_bytes=32 * MIB, compiles=True,
    ),
    "flashinfer": Needs(
        install_command("flashinfer"), _HALF, (8, 9, 10, 12), head_dims=(64, 128, 256), equal_dims=True, sinks=False,
        buffer_bytes=192 * MIB, compiles=True,
    ),
    "varlen": Needs(
        "call torch.nn.attention.activate_flash_attention_impl('FA3') first, with torch >= 2.13 and flash-attn 3", _HALF,
        (9, 10), max_head_dim=256, head_dim_multiple=8, equal_dims=True, softcap=False, sinks=False, buffer_bytes=32 * MIB,
    ),
}  # fmt: skip
AUTO = "auto"
NAMES = (AUTO, *BACKENDS)


def block_multiple(name: str) -> int:
    """The number that block sizes must be a multiple of. "auto" accepts any block size."""
    return 1 if name == AUTO else BACKENDS[name].block_multiple


def buffer_bytes(name: str) -> int:
    """Device memory that the backend uses. For "auto", the most that any of its candidates uses."""
    if name != AUTO:
        return BACKENDS[name].buffer_bytes
    return max(needs.buffer_bytes for needs in BACKENDS.values() if not needs.compiles)


def expansion_bytes(text_config: Any, num_tokens: int, itemsize: int) -> int:
    """The most bytes that expanded K and V of a chunk take, while it attends to a sequence of `num_tokens`."""
    rope_dim = text_config.qk_rope_head_dim
    by_head = num_tokens * (text_config.qk_nope_head_dim + rope_dim + text_config.v_head_dim) * itemsize
    held = min(max(EXPANDED_BYTES, by_head), by_head * text_config.num_attention_heads)
    return int(_EXPANDED_COPIES * held + num_tokens * (text_config.kv_lora_rank + rope_dim) * itemsize)


def states_bytes(layers: Iterable[int], num_rows: int, num_tokens: int, token_bytes: int) -> int:
    """What a step of at most so many sequences and tokens takes for `layers` with so many bytes of states each: copies of
    states for one layer, and of all layers the outputs of tokens that have changed states, until the step is done.
    """
    sizes = list(layers)
    copied = _STATE_COPIES * min(num_rows, MOST_COPIED_STATES) * max(sizes, default=0)
    return copied + len(sizes) * num_tokens * token_bytes


def gathering_bytes(text_config: Any, num_tokens: int, itemsize: int) -> int:
    """The most bytes that attention of a model's own takes in one of its layers, for a sequence of `num_tokens`.

    K and V as they are gathered and as the model repeats or expands them for all heads, two copies of each, and PIECE_BYTES of
    scores.
    """
    return _GATHERED_COPIES * num_tokens * _kv_items(text_config) * itemsize + PIECE_BYTES


def tokens_in_a_piece(text_config: Any, num_tokens: int) -> int:
    """How many tokens of a chunk such attention computes at a time, behind `num_tokens`, so that scores take PIECE_BYTES."""
    heads = int(text_config.num_attention_heads) + int(getattr(text_config, "index_n_heads", 0) or 0)
    return max(1, PIECE_BYTES // (_SCORE_BYTES * heads * max(1, num_tokens)))


def _kv_items(text_config: Any) -> int:
    """Elements of K and V of one token in a layer, for every query head."""
    heads = int(text_config.num_attention_heads)
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    rope_dim, plain_dim = (getattr(text_config, f"qk_{name}_head_dim", None) or 0 for name in ("rope", "nope"))
    value_dim = getattr(text_config, "v_head_dim", None) or head_dim
    return heads * (max(rope_dim + plain_dim, head_dim) + value_dim)


def unmet(
    name: str,
    *,
    device: str,
    capability: tuple[int, int] | None,
    dtype: str,
    kv_dtype: str,
    block_size: int,
    specs: Iterable[AttentionSpec],
) -> str | None:
    """Why backend `name` cannot serve layers with these specs, as a clause; None if it can, installed or not.

    Args:
        device: As torch names it.
        capability: Its compute capability; None if it is not a CUDA device.
        dtype: Of the model.
        kv_dtype: Of K and V in the cache; another than `dtype` comes with scales.
    """
    needs = BACKENDS[name]
    if needs.majors is not None:
        if (capability is None) != (not needs.majors):
            return f"it needs a {'CUDA device' if needs.majors else 'CPU'}, and the engine runs on {device}"
        if capability is not None and capability[0] not in needs.majors:
            known = ", ".join(f"{major}.x" for major in needs.majors)
            return f"it runs on compute capabilities {known}, and {device} has {capability[0]}.{capability[1]}"
    if dtype not in needs.dtypes:
        return f"it takes {' and '.join(needs.dtypes)}, and the model runs in {dtype}"
    if kv_dtype != dtype and kv_dtype not in needs.scaled:
        return f"it takes no K and V in {kv_dtype} with scales"
    if kv_dtype == _FLOAT8 and capability is not None and needs.majors and capability < _FLOAT8_CAPABILITY:
        least, there = (".".join(map(str, version)) for version in (_FLOAT8_CAPABILITY, capability))
        return f"it takes K and V in {kv_dtype} from compute capability {least} on, and {device} has {there}"
    if block_size % needs.block_multiple:
        return f"it takes blocks of multiples of {needs.block_multiple} tokens, and they have {block_size}"
    return next((why for spec in specs if (why := _unmet_by(needs, spec)) is not None), None)


def _unmet_by(needs: Needs, spec: AttentionSpec) -> str | None:
    dims = (spec.head_dim, spec.v_head_dim)
    if needs.equal_dims and spec.head_dim != spec.v_head_dim:
        return f"it takes K and V of one head dim, and a layer has {dims[0]} and {dims[1]}"
    if needs.max_head_dim is not None and max(dims) > needs.max_head_dim:
        return f"it takes head dims up to {needs.max_head_dim}, and a layer has {max(dims)}"
    if needs.max_v_head_dim is not None and spec.v_head_dim > needs.max_v_head_dim:
        return f"it takes V of head dims up to {needs.max_v_head_dim}, and a layer has {spec.v_head_dim}"
    if any(dim % needs.head_dim_multiple for dim in dims):
        return f"it takes head dims that are multiples of {needs.head_dim_multiple}, and a layer has {spec.head_dim}"
    if needs.head_dims is not None and spec.head_dim not in needs.head_dims:
        known = ", ".join(map(str, needs.head_dims))
        return f"it takes head dims of {known}, and a layer has {spec.head_dim}"
    if spec.softcap is not None and not needs.softcap:
        return f"it knows no softcap, and a layer caps its scores at {spec.softcap:g}"
    if spec.sinks and not needs.sinks:
        return "it knows no attention sinks, and a layer has them"
    return None
