"""Paged decode attention alone, by every installed kernel.

K and V lie as in the engine: one layer's piece of a block after the other, blocks of all layers strided, in random order. A
measurement goes through all layers, one after the other, so that nothing of it is left in a cache. Every kernel is checked
against torch's before it is timed.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.figures import Figure
from pagetide.cache.geometry import Geometry, LayerShape
from pagetide.cache.storage import Storage, TensorArena
from pagetide.engine.attention.backends import BACKENDS
from pagetide.engine.attention.choose import MAKERS
from pagetide.engine.attention.context import AttentionCall, AttentionKernel, StepContext, lengths_on
from pagetide.engine.attention.torch_kernel import TorchKernel

from .bandwidth import MEMORY
from .bench import Bench
from .parts import Item, Unmeasured, bounded, unmeasured

BLOCK_SIZE, LARGE_BLOCK_SIZE = 16, 256
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # of the largest value


@dataclass(frozen=True, eq=False)
class AttentionStep:
    """One step's attention over all layers."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    step: StepContext
    scaling: float

    def run(self, kernel: AttentionKernel, layer: int) -> torch.Tensor:
        """One layer's."""
        cache = self.step.layers[layer]
        return kernel.attend(AttentionCall(self.query, self.key, self.value, cache, self.step, self.scaling))

    def through_layers(self, kernel: AttentionKernel) -> Callable[[], torch.Tensor]:
        """The next layer's, at each call."""
        layers = itertools.cycle(range(len(self.step.layers)))
        return lambda: self.run(kernel, next(layers))


def measure(bench: Bench) -> Iterator[Item]:
    """`rows` sequences of `attention_context` tokens: GB/s of K and V, and the fastest's share of the memory bandwidth."""
    best: list[Figure] = []
    large = [name for name, needs in BACKENDS.items() if needs.block_multiple > BLOCK_SIZE]
    small = [name for name, needs in BACKENDS.items() if needs.block_multiple <= BLOCK_SIZE]
    with torch.inference_mode():
        yield from _decode(bench, LARGE_BLOCK_SIZE, {name: made(name) for name in ("triton", *large)}, best)
        bench.clean()
        yield from _decode(bench, BLOCK_SIZE, {name: made(name) for name in small}, best)
        bandwidth = bench.known.get(MEMORY)
        fastest = max(best, key=lambda f: f.value, default=None)
        if bandwidth is None or fastest is None:
            yield unmeasured("attention", "no kernel could be timed, or the bandwidth is not known")
        else:
            yield bounded("attention", fastest.value / bandwidth, [sample / bandwidth for sample in fastest.samples])
    bench.clean()


def storage_of(bench: Bench, tokens: int, block_size: int) -> Storage:
    """A pool with random content and room for so many tokens."""
    scale = bench.scale
    shape = LayerShape(scale.kv_heads, scale.head_dim, scale.head_dim)
    geometry = Geometry((shape,) * scale.layers, block_size, scale.dtype).with_extents(32 << 20)
    num_extents = geometry.extents_for_blocks(1 + -(-tokens // block_size))
    storage = Storage(geometry, TensorArena(num_extents, geometry.extent_bytes, bench.clock.device), bench.clock.device)
    for layer in range(scale.layers):
        cache = storage.layer(layer)
        cache.key.normal_()
        cache.value.normal_()
    return storage


def work_of(bench: Bench, storage: Storage, kernel: AttentionKernel, kv_lens: list[int]) -> AttentionStep:
    """A decode step of a row for each length, over blocks in random order."""
    scale, device, size = bench.scale, bench.clock.device, storage.geometry.block_size
    rng = np.random.default_rng(bench.seed)
    counts = [-(-n // size) for n in kv_lens]
    ids = rng.permutation(np.arange(1, storage.num_blocks))[: sum(counts)]
    tables = np.zeros((len(kv_lens), max(counts)), np.int64)
    for row, (end, count) in enumerate(zip(np.cumsum(counts), counts, strict=True)):
        tables[row, :count] = ids[end - count : end]
    lengths = np.array(kv_lens, np.int64)
    rows, ones, positions = np.arange(len(lengths)), np.ones_like(lengths), lengths - 1
    step = StepContext(
        layers=tuple(storage.layer(i) for i in range(scale.layers)),
        kernel=kernel,
        q_starts=rows,
        q_lens=ones,
        kv_lens=lengths,
        num_decodes=len(lengths),
        **lengths_on(device, ones, lengths),
        tables=(torch.from_numpy(tables).to(device),),
        write_blocks=(torch.from_numpy(tables[rows, positions // size]).to(device),),
        write_offsets=torch.from_numpy(positions % size).to(device),
        block_size=size,
    )
    query, key, value = (
        torch.randn(len(rows), heads, scale.head_dim, device=device, dtype=getattr(torch, scale.dtype))
        for heads in (scale.heads, scale.kv_heads, scale.kv_heads)
    )
    return AttentionStep(query, key, value, step, scale.head_dim**-0.5)


def made(name: str) -> AttentionKernel | str:
    """A backend's kernel, or why there is none."""
    try:
        return MAKERS[name]()
    except Exception as error:  # a broken installation may raise anything
        return f"{type(error).__name__}: {error}"


def _decode(bench: Bench, block_size: int, kernels: dict[str, AttentionKernel | str], best: list[Figure]) -> Iterator[Item]:
    """Every kernel that there is, with blocks of so many tokens. Figures go into `best` too."""
    rows, context = bench.scale.rows, bench.scale.attention_context
    storage = storage_of(bench, rows * (context + block_size), block_size)
    torch_kernel = TorchKernel()
    work = work_of(bench, storage, torch_kernel, [context] * rows)
    expected = work.run(torch_kernel, 0)
    torch_kernel.release_buffers()
    giga = rows * context * bench.scale.kv_bytes_per_token // bench.scale.layers / 1e9
    title = f"decode attention, {rows} x {context:,}" + f", pages of {block_size}" * (block_size > BLOCK_SIZE)
    for name, kernel in kernels.items():
        item = _timed(bench, f"{title}: {name}", kernel, work, expected, giga)
        best += [item] if isinstance(item, Figure) else []
        yield item


def _timed(
    bench: Bench, name: str, kernel: AttentionKernel | str, work: AttentionStep, expected: torch.Tensor, giga: float
) -> Item:
    """GB/s, of `giga` GB a layer; or why not: there is no kernel, or it fails, or gives something else than `expected`."""
    if isinstance(kernel, str) or bench.left_s < 8:
        return Unmeasured(name, kernel if isinstance(kernel, str) else "no time left")
    try:
        error = float((work.run(kernel, 0).float() - expected.float()).abs().max() / expected.float().abs().max())
        if not error <= TOLERANCE[expected.dtype]:
            return Unmeasured(name, f"wrong: off by {error:.1e} of the largest value")
        rates = [giga / s for s in bench.clock.seconds(work.through_layers(kernel), bench.scale.repeats)]
    except Exception as problem:
        if bench.clock.cuda:
            torch.cuda.synchronize()  # raises where the device is lost: then nothing more can be measured here
        return Unmeasured(name, f"{type(problem).__name__}: {problem}")
    return Figure(name, statistics.median(rates), "GB/s", better="higher", samples=rates)
