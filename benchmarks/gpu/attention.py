"""Paged attention alone: decode by every installed kernel and by tilings of the Triton kernel, and prompt chunks.

K and V lie as in the engine: one layer's piece of a block after the other, blocks of all layers strided, in random order. A
measurement goes through all layers, one after the other, so that nothing of it is left in a cache. Every tiling is checked
against the torch kernel before it is timed.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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
from .report import Item, Note, Unmeasured, bounded, unmeasured

BLOCK_SIZE, LARGE_BLOCK_SIZE = 16, 256
# (keys, rows, warps, stages), the likeliest first: a part that runs out of time leaves the last ones out
DECODE_TILINGS = [
    (64, 16, 4, 3), (128, 16, 4, 3), (128, 16, 8, 3), (64, 16, 4, 4), (32, 16, 4, 4), (128, 16, 4, 2), (64, 16, 2, 3),
    (64, 16, 8, 3), (32, 16, 2, 4), (64, 16, 4, 2),
]  # fmt: skip
PREFILL_TILINGS = [
    (64, 128, 8, 3), (64, 128, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 4, 2), (32, 128, 8, 3),
    (128, 128, 8, 3), (64, 256, 8, 2),
]  # fmt: skip
MORE_PROGRAMS = (2, 4)  # as if the device had so many times its multiprocessors: more splits of a row
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # of the largest value


@dataclass(frozen=True, eq=False)
class AttentionStep:
    """One step's attention over all layers."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    step: StepContext
    scaling: float

    def call(self, layer: int) -> AttentionCall:
        """One layer's call."""
        return AttentionCall(self.query, self.key, self.value, self.step.layers[layer], self.step, self.scaling)

    def run(self, kernel: AttentionKernel, layer: int) -> torch.Tensor:
        """One layer's."""
        return kernel.attend(self.call(layer))

    def through_layers(self, kernel: AttentionKernel) -> Callable[[], torch.Tensor]:
        """The next layer's, at each call."""
        layers = itertools.cycle(range(len(self.step.layers)))
        return lambda: self.run(kernel, next(layers))


def measure(bench: Bench) -> Iterator[Item]:
    """Decode, `rows` sequences of `attention_context` tokens: GB/s of K and V, and shares of the memory bandwidth."""
    with torch.inference_mode():
        best: dict[str, Figure] = {}
        yield from _large_pages(bench, best)
        bench.clean()
        yield from _decode(bench, best)
    bench.clean()


def measure_prefill(bench: Bench) -> Iterator[Item]:
    """A chunk of `prompt` tokens that begins a sequence: TFLOP/s of the products that causality leaves."""
    with torch.inference_mode():
        yield from _prefill(bench)
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


def work_of(
    bench: Bench, storage: Storage, kernel: AttentionKernel, q_lens: list[int], kv_lens: list[int]
) -> AttentionStep:
    """A step of chunks over blocks in random order."""
    scale, device, size = bench.scale, bench.clock.device, storage.geometry.block_size
    dtype = getattr(torch, scale.dtype)
    rng = np.random.default_rng(bench.seed)
    counts = [-(-n // size) for n in kv_lens]
    ids = rng.permutation(np.arange(1, storage.num_blocks))[: sum(counts)]
    tables = np.zeros((len(kv_lens), max(counts)), np.int64)
    for row, (end, count) in enumerate(zip(np.cumsum(counts), counts, strict=True)):
        tables[row, :count] = ids[end - count : end]
    lengths = np.array(q_lens, np.int64)
    owners = np.repeat(np.arange(len(q_lens)), lengths)
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(len(owners)) - starts[owners] + (np.array(kv_lens) - lengths)[owners]
    step = StepContext(
        layers=tuple(storage.layer(i) for i in range(scale.layers)),
        kernel=kernel,
        q_starts=starts,
        q_lens=lengths,
        kv_lens=np.array(kv_lens, np.int64),
        num_decodes=sum(n == 1 for n in q_lens),
        **lengths_on(device, lengths, np.array(kv_lens, np.int64)),
        tables=(torch.from_numpy(tables).to(device),),
        write_blocks=(torch.from_numpy(tables[owners, positions // size]).to(device),),
        write_offsets=torch.from_numpy(positions % size).to(device),
        block_size=size,
    )
    query, key, value = (
        torch.randn(len(owners), heads, scale.head_dim, device=device, dtype=dtype)
        for heads in (scale.heads, scale.kv_heads, scale.kv_heads)
    )
    return AttentionStep(query, key, value, step, scale.head_dim**-0.5)


def made(name: str) -> AttentionKernel | str:
    """A backend's kernel, or why there is none."""
    try:
        return MAKERS[name]()
    except Exception as error:  # a broken installation may raise anything
        return f"{type(error).__name__}: {error}"


def triton_kernel(**options: Any) -> AttentionKernel | str:
    """A Triton kernel with other tiles, (keys, rows, warps, stages), than those of its tables; or why there is none."""
    try:
        kernels = importlib.import_module("pagetide.engine.attention.triton_kernel")
        tiling = importlib.import_module("pagetide.engine.attention.triton_base").Tiling
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    tiles = {name: tiling(*given) if isinstance(given, tuple) else given for name, given in options.items()}
    kernel: AttentionKernel = kernels.TritonKernel(**tiles)
    return kernel


def _decode(bench: Bench, best: dict[str, Figure]) -> Iterator[Item]:
    """The bound is that of the kernels as they are; what the tilings behind it give is there to choose better ones by."""
    scale = bench.scale
    context = scale.attention_context
    storage = storage_of(bench, scale.rows * context, BLOCK_SIZE)
    torch_kernel = TorchKernel()
    work = work_of(bench, storage, torch_kernel, [1] * scale.rows, [context] * scale.rows)
    expected = work.run(torch_kernel, 0)
    num_bytes = scale.rows * context * scale.kv_bytes_per_token // scale.layers
    title = f"decode attention, {scale.rows} x {context:,}"

    def figure(name: str, kernel: AttentionKernel) -> Item:
        return _noted(best, name, _timed(bench, f"{title}: {name}", kernel, work, expected, num_bytes / 1e9, "GB/s"))

    for name in (name for name, needs in BACKENDS.items() if needs.block_multiple <= BLOCK_SIZE):
        kernel = made(name)
        yield Unmeasured(f"{title}: {name}", kernel) if isinstance(kernel, str) else figure(name, kernel)
    bandwidth = bench.known.get(MEMORY)
    fastest = max(best.values(), key=lambda f: f.value, default=None)
    if bandwidth is None or fastest is None:
        yield unmeasured("attention", "no kernel could be timed, or the bandwidth is not known")
        return
    yield bounded("attention", fastest.value / bandwidth, [sample / bandwidth for sample in fastest.samples])
    torch_kernel.release_buffers()
    bench.clean()
    yield from _decode_tilings(bench, figure)
    ranked = sorted(best.items(), key=lambda item: -item[1].value)
    yield Note(
        f"{title}, fastest first", tuple(f"{f.value:8.1f} GB/s {f.value / bandwidth:6.3f}  {n}" for n, f in ranked)
    )


def _noted(best: dict[str, Figure], name: str, item: Item) -> Item:
    """The item, after it was put among the others where it is a figure."""
    if isinstance(item, Figure):
        best[name] = item
    return item


def _decode_tilings(bench: Bench, figure: Callable[[str, AttentionKernel], Item]) -> Iterator[Item]:
    cuda = bench.clock.cuda
    num_sms = torch.cuda.get_device_properties(bench.clock.device).multi_processor_count if cuda else 2
    for tiling in DECODE_TILINGS if cuda else DECODE_TILINGS[:1]:
        for times in (1, *MORE_PROGRAMS):
            name = f"triton, keys {tiling[0]}, warps {tiling[2]}, stages {tiling[3]}, {times} x the programs"
            if bench.left_s < 8:
                yield Unmeasured(name, "no time left")
                continue
            kernel = triton_kernel(decode=tiling, num_sms=times * num_sms)
            yield Unmeasured(name, kernel) if isinstance(kernel, str) else figure(name, kernel)


def _prefill(bench: Bench) -> Iterator[Item]:
    scale = bench.scale
    tokens = scale.prompt
    title = f"attention of a chunk of {tokens:,} tokens"
    storage = storage_of(bench, tokens, BLOCK_SIZE)
    torch_kernel = TorchKernel()
    work = work_of(bench, storage, torch_kernel, [tokens], [tokens])
    for layer in range(scale.layers):
        torch_kernel.write(work.call(layer))
    expected = work.run(torch_kernel, 0)
    tera = 4 * scale.heads * scale.head_dim * tokens * (tokens + 1) / 2 / 1e12
    for name in BACKENDS:
        kernel = made(name)
        if isinstance(kernel, str):
            yield Unmeasured(f"{title}: {name}", kernel)
        elif BACKENDS[name].block_multiple <= BLOCK_SIZE:
            yield _timed(bench, f"{title}: {name}", kernel, work, expected, tera, "TFLOP/s")
    for tiling in PREFILL_TILINGS if bench.clock.cuda else PREFILL_TILINGS[:1]:
        name = f"{title}: triton, keys {tiling[0]}, rows {tiling[1]}, warps {tiling[2]}, stages {tiling[3]}"
        kernel = triton_kernel(prefill=tiling)
        if isinstance(kernel, str) or bench.left_s < 8:
            yield Unmeasured(name, kernel if isinstance(kernel, str) else "no time left")
        else:
            yield _timed(bench, name, kernel, work, expected, tera, "TFLOP/s")


def _large_pages(bench: Bench, best: dict[str, Figure]) -> Iterator[Item]:
    """The kernels that want large pages, and the Triton kernel beside them."""
    scale = bench.scale
    context = scale.attention_context
    title = f"decode attention, {scale.rows} x {context:,}, pages of {LARGE_BLOCK_SIZE}"
    storage = storage_of(bench, scale.rows * (context + LARGE_BLOCK_SIZE), LARGE_BLOCK_SIZE)
    torch_kernel = TorchKernel()
    work = work_of(bench, storage, torch_kernel, [1] * scale.rows, [context] * scale.rows)
    expected = work.run(torch_kernel, 0)
    torch_kernel.release_buffers()
    num_bytes = scale.rows * context * scale.kv_bytes_per_token // scale.layers
    for name in ("triton", *(name for name, needs in BACKENDS.items() if needs.block_multiple > BLOCK_SIZE)):
        kernel = made(name)
        if isinstance(kernel, str):
            yield Unmeasured(f"{title}: {name}", kernel)
        else:
            item = _timed(bench, f"{title}: {name}", kernel, work, expected, num_bytes / 1e9, "GB/s")
            yield _noted(best, f"{name}, pages of {LARGE_BLOCK_SIZE}", item)


def _timed(
    bench: Bench, name: str, kernel: AttentionKernel, work: AttentionStep, expected: torch.Tensor, amount: float, unit: str
) -> Item:  # fmt: skip
    """`amount` a second; or why not: it fails, or gives something else than `expected`."""
    try:
        error = float((work.run(kernel, 0).float() - expected.float()).abs().max() / expected.float().abs().max())
        if not error <= TOLERANCE[expected.dtype]:
            return Unmeasured(name, f"wrong: off by {error:.1e} of the largest value")
        rates = [amount / s for s in bench.clock.seconds(work.through_layers(kernel), bench.scale.repeats)]
    except Exception as problem:
        if bench.clock.cuda:
            torch.cuda.synchronize()  # raises where the device is lost: then nothing more can be measured here
        return Unmeasured(name, f"{type(problem).__name__}: {problem}")
    return Figure(name, statistics.median(rates), unit, better="higher", samples=rates)
