"""Tests a kernel before use: its results against the torch kernel's, and its time, over a small pool of its own.

The pool has the arena's layout: K and V, and their scales if they are quantized, are strided views between foreign bytes.
Everything without a token is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from ...cache.geometry import ALIGNMENT
from .backends import AttentionSpec
from .context import AttentionCall, AttentionKernel, LayerCache, StepContext, lengths_on
from .quantized_kv import store
from .torch_kernel import TorchKernel

POOL_BYTES = 128 << 20  # pool for timing kernels: more than a device's caches hold
DECODES = 64
CONTEXT = 1024  # tokens, if the pool holds them
CHUNK = 512  # tokens
REPEATS = 5
AROUND = 4 * ALIGNMENT  # foreign bytes before and after what a block holds of a layer
TOLERANCES = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}  # two roundings of values around 1
# Small, so that a few tokens show whether they are applied, whatever the model's values.
WINDOW, SOFTCAP = 5, 2.0
_NAN = 0xFF  # repeated, a NaN of each floating type

Chunks = Sequence[tuple[int, int]]  # of each sequence: (tokens of the batch, all its tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """A call over a small pool of its own. The batch's own K and V are not written yet."""

    pool: torch.Tensor  # uint8 [num_blocks, bytes]
    call: AttentionCall  # with a query strided as in models


def build(
    spec: AttentionSpec,
    chunks: Chunks,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> Scratch:
    """Build a call; chunks of one token come first. Earlier tokens' K and V are random, the rest of the pool is NaN.

    Args:
        kv_dtype: Of K and V with scales; None: they are stored in `dtype`.
    """
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def at(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    q_lens, kv_lens = (np.array(lengths, np.int32) for lengths in zip(*chunks, strict=True))
    counts = -(-kv_lens // block_size)
    ids = np.random.default_rng(0).permutation(np.arange(1, counts.sum() + 1))
    tables = np.zeros((len(chunks), counts.max()), np.int64)
    tables[np.arange(tables.shape[1]) < counts[:, None]] = ids
    pool, cache = _pool(spec, len(ids) + 1, block_size, kv_dtype or dtype, kv_dtype is not None, device)
    rows, places = np.repeat(np.arange(len(chunks)), kv_lens), np.concatenate([np.arange(n) for n in kv_lens])
    blocks, offsets = tables[rows, places // block_size], places % block_size
    own = places >= (kv_lens - q_lens)[rows]
    for view, scales in ((cache.key, cache.key_scale), (cache.value, cache.value_scale)):
        store(drawn(int((~own).sum()), *view.shape[2:]), view, scales, (at(blocks[~own]), at(offsets[~own])))
    num_tokens = int(q_lens.sum())
    step = StepContext(
        layers=(),
        kernel=TorchKernel(),
        q_starts=(np.cumsum(q_lens) - q_lens).astype(np.int32),
        q_lens=q_lens,
        kv_lens=kv_lens,
        num_decodes=int((q_lens == 1).sum()),
        **lengths_on(device, q_lens, kv_lens),
        tables=(at(tables),),
        write_blocks=(at(blocks[own]),),
        write_offsets=at(offsets[own]),
        block_size=block_size,
    )
    call = AttentionCall(
        drawn(spec.num_heads, num_tokens, spec.head_dim).transpose(0, 1),
        drawn(num_tokens, spec.num_kv_heads, spec.head_dim),
        drawn(num_tokens, spec.num_kv_heads, spec.v_head_dim),
        cache,
        step,
        spec.head_dim**-0.5,
        spec.window,
        spec.softcap,
        drawn(spec.num_heads) if spec.sinks else None,
    )
    return Scratch(pool, call)


def _pool(
    spec: AttentionSpec, num_blocks: int, block_size: int, dtype: torch.dtype, has_scales: bool, device: torch.device
) -> tuple[torch.Tensor, LayerCache]:
    """A pool of one layer full of NaN, and the layer's views of it."""
    rows = (block_size, spec.num_kv_heads)
    pieces: list[tuple[tuple[int, ...], torch.dtype]] = [((*rows, spec.head_dim), dtype), ((*rows, spec.v_head_dim), dtype)]
    pieces += [(rows, torch.float16)] * (2 * has_scales)
    sizes = [-(-math.prod(shape) * of.itemsize // ALIGNMENT) * ALIGNMENT for shape, of in pieces]
    pool = torch.full((num_blocks, 2 * AROUND + sum(sizes)), _NAN, dtype=torch.uint8, device=device)
    places = pool[:, AROUND:-AROUND].split(sizes, dim=1)
    views = [
        place.view(of)[:, : math.prod(shape)].unflatten(1, shape) for place, (shape, of) in zip(places, pieces, strict=True)
    ]
    key, value, *scales = views
    return pool, LayerCache(key, value, 0, False, False, None, *scales)


def fault(
    kernel: AttentionKernel,
    specs: Sequence[AttentionSpec],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> str | None:
    """How the kernel's writes or results differ from the torch kernel's, as a clause; None if they agree.

    The specs' windows and softcaps are replaced by small ones that few tokens show. Raises what the kernel raises.
    """
    b = block_size
    chunks = [(1, 1), (1, b), (1, b + 1), (1, 3 * b + 3), (5, 5), (19, b + 30)]
    small = {
        replace(
            spec,
            window=None if spec.window is None else min(spec.window, WINDOW),
            softcap=None if spec.softcap is None else SOFTCAP,
        )
        for spec in specs
    }
    for spec in sorted(small, key=repr):
        scratch = build(spec, chunks, block_size, dtype, device, kv_dtype)
        right = build(spec, chunks, block_size, dtype, device, kv_dtype)
        reference = TorchKernel()
        reference.write(right.call)
        expected = reference.attend(right.call)
        kernel.write(scratch.call)
        if not torch.equal(scratch.pool, right.pool):
            return "it writes other bytes than it should"
        got = kernel.attend(scratch.call)
        if not torch.equal(scratch.pool, right.pool):
            return "attention changes the pool"
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return f"it answers {got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
        error = float((got.float() - expected.float()).abs().nan_to_num(nan=torch.inf).max())
        if not error <= TOLERANCES[dtype]:
            return f"its results differ from the torch kernel's by up to {error:.2g} ({spec})"
    return None


def seconds(
    kernels: Sequence[AttentionKernel],
    spec: AttentionSpec,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    measure: Callable[[Callable[[], object]], float],
    kv_dtype: torch.dtype | None = None,
) -> list[float | Exception]:
    """Each kernel's seconds for a layer with decodes of `DECODES` rows and one chunk of `CHUNK` tokens, or its exception.

    Args:
        measure: Times a call in seconds.
    """
    context = longest_context(spec, block_size, kv_dtype or dtype)
    timed = [build(spec, [(1, context)] * DECODES, block_size, dtype, device, kv_dtype).call]
    chunk = min(CHUNK, context)
    if chunk > 1:
        timed.append(build(spec, [(chunk, context)], block_size, dtype, device, kv_dtype).call)
    for call in timed:
        call.step.kernel.write(call)
    taken: list[float | Exception] = []
    for kernel in kernels:
        try:
            taken.append(sum(measure(partial(kernel.attend, call)) for call in timed))
        except Exception as error:  # a library may raise anything
            taken.append(error)
        kernel.release_buffers()
    return taken


def longest_context(spec: AttentionSpec, block_size: int, dtype: torch.dtype) -> int:
    """Tokens of each timed decode: CONTEXT, or what POOL_BYTES hold."""
    token_bytes = spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) * dtype.itemsize
    most = POOL_BYTES // (DECODES * token_bytes) // block_size * block_size
    return max(block_size, min(CONTEXT, most))


def cuda_seconds(call: Callable[[], object]) -> float:
    """The median of several calls, by events of the current stream. Two warm-up calls, which compile, do not count."""
    for _ in range(2):
        call()
    taken = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1000)
    return sorted(taken)[REPEATS // 2]
