"""A program: compiles the Triton kernels for sm_90, which needs no device, and prints what became of each as a line of JSON.

python triton_compile.py all | some
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagetide.engine.attention import triton_decode, triton_gather, triton_prefill, triton_write
from pagetide.engine.attention.triton_base import DECODE_TILINGS, PREFILL_TILINGS, padded, split_heads, tiling
from pagetide.engine.layers import triton_kernels

TARGET = GPUTarget("cuda", 90, 32)
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
FLOATS = ("inner", "outer", "eps", "offset")
ADDRESSES = ("source", "target")
ANY_NUMBER = (
    "table_row",
    "num_splits",
    "reach",
    "count",
    "tiles",
    "turns",
    "num_heads",
    "inner_size",
    "tokens",
    "q_programs",
    "gate_at",
    "up_at",
)  # others are multiples of 16
STRIDES = ("block", "token", "head")

Kernel = tuple[str, Any, dict[str, str], dict[str, Any], int, int]  # name, function, pointers, constants, warps, stages


def absent(*views: str) -> dict[str, None]:
    """The arguments of views that a cache does not have."""
    return dict.fromkeys(views) | {f"{view}_{stride}": None for view in views for stride in STRIDES}


def scales(stored: str | None) -> dict[str, int | None]:
    """The scales' constant arguments."""
    return absent("key_scales", "value_scales") if stored is None else {"key_scales_head": 1, "value_scales_head": 1}


def attention(kind: str, dtype: str, dim: int, **over: Any) -> Kernel:
    """Decode or prefill with the tiles of their tables. `stored`: elements with scales; `further`: V is in K."""
    name = " ".join((kind, dtype, str(dim), *(f"{key}={value}" for key, value in over.items())))
    group, stored, further = over.pop("group", 4), over.pop("stored", None), over.pop("further", None)
    options = {"BLOCK_SIZE": 16, "SOFTCAP": False, "sinks": None, **over}
    table = DECODE_TILINGS if kind == "decode" else PREFILL_TILINGS
    tiles = tiling(table, 4 if dtype == "fp32" else 1 if stored else 2, dim)
    pointers = dict.fromkeys(("out", "query"), dtype) | dict.fromkeys(("key", "value"), stored or dtype)
    pointers |= {"table": "i64", "lens": "i32", "sums": "fp32", "key_scales": "fp16", "value_scales": "fp16"}
    dims = {"GROUP": group, "DIM": dim, "DIM_PAD": padded(dim), "V_DIM": dim, "V_DIM_PAD": padded(dim)}
    dims |= {"FURTHER": further or 0, "FURTHER_PAD": padded(further or 0)}
    constants = {**dims, "KEYS": tiles.keys, **options}
    constants |= scales(stored)
    if further is not None and stored is None:
        constants |= absent("value")
    if kind == "decode":
        heads, constants["PROGRAMS"] = split_heads(group, dim)
        constants["GROUP_PAD"], warps = padded(heads), triton_decode.num_warps(tiles, heads)
        return name, triton_decode._decode, pointers | {"partials": "fp32"}, constants, warps, tiles.stages
    heads, constants["PROGRAMS"] = split_heads(group, dim, tiles.rows)
    constants |= {"HEADS": heads, "ROWS": max(tiles.rows, padded(heads))}
    return name, triton_prefill._prefill, pointers | {"tiles": "i32"}, constants, tiles.warps, tiles.stages


def write(stored: str | None = None) -> Kernel:
    """Writes K and V of 8 heads."""
    pointers = dict.fromkeys(("key", "value"), "bf16") | dict.fromkeys(("key_cache", "value_cache"), stored or "bf16")
    pointers |= {"blocks": "i64", "offsets": "i64", "key_scales": "fp16", "value_scales": "fp16"}
    constants = {"HEADS": 8, "DIM": 128, "DIM_PAD": 128, "V_DIM": 128, "V_DIM_PAD": 128}
    constants |= scales(stored)
    return f"write {stored}" if stored else "write", triton_write._write, pointers, constants, 4, 3


def some() -> Iterator[Kernel]:
    """One of each kernel: an 8 B Llama in bfloat16."""
    yield attention("decode", "bf16", 128)
    yield attention("decode", "bf16", 128, sums=None, partials=None)  # a batch that fills the device without splits
    yield attention("prefill", "bf16", 128)
    pointers = {"out": "bf16", "partials": "fp32", "sums": "fp32", "lens": "i32", "sinks": "bf16"}
    constants = {"V_DIM": 128, "V_DIM_PAD": 128, "KEYS": 64, "SPLITS": triton_decode.MERGED_AT_ONCE}
    yield "merge", triton_decode._merge, pointers, constants, 4, 3
    yield write()
    constants = {"WORD": triton.language.int64, "TILE": triton_gather.TILE_WORDS}
    yield "blocks", triton_gather._copy_words, {"ids": "i64"}, constants, 8, 3
    yield attention("decode", "bf16", 128, stored="i8")
    yield attention("prefill", "bf16", 128, stored="i8")
    yield write("i8")


def rows() -> Iterator[Kernel]:
    """Those in place of modules."""
    pointers = dict.fromkeys(("out", "x", "weight"), "bf16")
    yield "norm", triton_kernels._rms_norm, pointers, {"N": 4096, "WIDTH": 4096, "ROWS": 1, "ROUNDS": True}, 16, 3
    pointers = dict.fromkeys(("q_out", "q", "k_out", "k", "cos", "sin"), "bf16")
    for paired, neighbours in ((False, False), (True, False), (False, True)):
        constants = {"HEADS": 32, "ROTATED": 64, "HALF_PAD": 32, "Q_DIM": 128, "K_DIM": 128, "DIM_PAD": 128}
        constants |= {"PAIRED": paired, "NEIGHBOURS": neighbours}
        yield f"rotate {paired} {neighbours}", triton_kernels._rotate, pointers, constants, 4, 3
    for kind in range(3):
        yield f"gate {kind}", triton_kernels._gated, {"out": "bf16", "both": "bf16"}, {"KIND": kind, "TILE": 1024}, 4, 3


def all_() -> Iterator[Kernel]:
    yield from some()
    yield from rows()
    for kind in ("decode", "prefill"):
        for dtype in ("bf16", "fp16", "fp32"):
            for dim in (64, 96, 256, 512):
                yield attention(kind, dtype, dim)
        yield attention(kind, "bf16", 128, SOFTCAP=True, BLOCK_SIZE=24)
        yield attention(kind, "bf16", 128, sinks="bf16", BLOCK_SIZE=256)
        yield attention(kind, "bf16", 128, group=71)
        for stored in ("i8", "fp8e4nv"):
            for dtype, dim in (("bf16", 64), ("fp16", 128), ("bf16", 256), ("fp32", 128), ("bf16", 512)):
                yield attention(kind, dtype, dim, stored=stored)
        for group in (16, 128):  # latents of MLA
            for dtype, stored in (("bf16", None), ("bf16", "i8"), ("bf16", "fp8e4nv"), ("fp32", None), ("fp32", "i8")):
                yield attention(kind, dtype, 512, group=group, further=64, stored=stored)
    yield write("fp8e4nv")
    yield attention("decode", "bf16", 128, sums=None, partials=None)


def compiled(kernel: Kernel) -> dict[str, Any]:
    """The kernel's name, its shared memory, its 16-byte copies to there and its matrix products, and stack for spills."""
    name, function, pointers, constants, warps, stages = kernel
    if isinstance(constants.get("sinks"), str):
        pointers = {**pointers, "sinks": constants.pop("sinks")}
    signature, values, attributes = {}, {}, {}
    for index, argument in enumerate(function.arg_names):
        if argument in constants:
            signature[argument], values[(index,)] = "constexpr", constants[argument]
        elif argument in FLOATS:
            signature[argument] = "fp32"
        else:
            number = "i64" if argument in ADDRESSES else "i32"
            signature[argument] = f"*{pointers[argument]}" if argument in pointers else number
            if argument not in ANY_NUMBER and not argument.endswith("scales_token"):
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature=signature, constexprs=values, attrs=attributes)
    made = triton.compile(source, target=TARGET, options={"num_warps": warps, "num_stages": stages})
    ptx = made.asm["ptx"]
    return {
        "name": name,
        "shared_bytes": made.metadata.shared,
        "async_copies": len(re.findall(r"cp\.async\.c[ag]\.shared[^;]*, 0x10", ptx)),
        "products": len(re.findall(r"(mma\.sync|wgmma\.mma)", ptx)),
        "stack_bytes": stack_bytes(made.asm["cubin"]),
    }


def stack_bytes(cubin: bytes) -> int | None:
    """What the kernel spills, as far as the tool that comes with Triton is there to tell."""
    if not TOOL.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return int(re.findall(r"STACK:(\d+)", run.stdout)[0])


if __name__ == "__main__":
    for each in all_() if sys.argv[1] == "all" else some():
        print(json.dumps(compiled(each)), flush=True)
