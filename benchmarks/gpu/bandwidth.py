"""The device's limits, to which other figures are compared: memory bandwidth, host link, matrix products, launches."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from benchmarks.figures import Figure

from .bench import Bench
from .report import Item

MEMORY = "memory bandwidth"
TO_HOST, FROM_HOST = "device to pinned host memory, one large copy", "pinned host memory to device, one large copy"
PRODUCT = "matrix product"
LAUNCHES = 1000


def measure(bench: Bench) -> Iterator[Item]:
    """Bandwidths in GB/s (10^9), the product in TFLOP/s, launches in µs."""
    yield from _memory(bench)
    bench.clean()
    yield from _link(bench)
    yield from _product(bench)
    bench.clean()
    yield from _launches(bench)


def _memory(bench: Bench) -> Iterator[Item]:
    num_bytes, clock = bench.scale.copy_bytes, bench.clock
    source, target = (clock.buffer(num_bytes).view(torch.float32) for _ in range(2))
    copies = clock.seconds(lambda: target.copy_(source), bench.scale.repeats)
    copied = rate("... copy, bytes read and written", 2 * num_bytes, copies)
    rows = source.view(-1, 8192)  # one sum for each row
    reads = [rate("... read, torch's sum", num_bytes, clock.seconds(lambda: rows.sum(1), bench.scale.repeats))]
    if clock.cuda:
        reads.append(
            rate("... read, torch's maximum", num_bytes, clock.seconds(lambda: rows.amax(1), bench.scale.repeats))
        )
    best = max([copied, *reads], key=lambda figure: figure.value)
    yield Figure(MEMORY, best.value, "GB/s", better="higher", samples=best.samples)
    yield copied
    yield from reads


def _link(bench: Bench) -> Iterator[Item]:
    num_bytes, clock = bench.scale.pinned_bytes, bench.clock
    host, device = clock.host_buffer(num_bytes), clock.buffer(num_bytes)
    repeats = max(3, bench.scale.repeats // 2)
    yield rate(TO_HOST, num_bytes, clock.seconds(lambda: host.copy_(device, non_blocking=True), repeats))
    yield rate(FROM_HOST, num_bytes, clock.seconds(lambda: device.copy_(host, non_blocking=True), repeats))


def _product(bench: Bench) -> Iterator[Item]:
    size, clock = bench.scale.gemm, bench.clock
    a, b = (torch.randn(size, size, device=clock.device, dtype=getattr(torch, bench.scale.dtype)) for _ in range(2))
    rates = [2 * size**3 / s / 1e12 for s in clock.seconds(lambda: a @ b, bench.scale.repeats)]
    yield Figure(PRODUCT, statistics.median(rates), "TFLOP/s", better="higher", samples=rates)


def _launches(bench: Bench) -> Iterator[Item]:
    """A launch of a small kernel: by torch, one after the other, and within a CUDA graph."""
    clock = bench.clock
    small = torch.zeros(256, device=clock.device)

    def many() -> None:
        for _ in range(LAUNCHES):
            small.add_(1)

    many()
    each = [s / LAUNCHES * 1e6 for s in clock.host_seconds(many, 5)]
    yield Figure("a small kernel, launched by torch", statistics.median(each), "µs", samples=each)
    if clock.cuda:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            many()
        graph.replay()
        each = [s / LAUNCHES * 1e6 for s in clock.host_seconds(graph.replay, 5)]
        yield Figure("a small kernel, within a CUDA graph", statistics.median(each), "µs", samples=each)


def rate(name: str, num_bytes: int, seconds: list[float]) -> Figure:
    """The median of the rates at which so many bytes went each time."""
    rates = [num_bytes / s / 1e9 for s in seconds]
    return Figure(name, statistics.median(rates), "GB/s", better="higher", samples=rates)
