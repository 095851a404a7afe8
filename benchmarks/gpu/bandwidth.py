"""The device's limits, to which other figures are compared: memory bandwidth and host link."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from benchmarks.figures import Figure

from .bench import Bench
from .parts import Item

MEMORY = "memory bandwidth"
TO_HOST, FROM_HOST = "device to pinned host memory, one large copy", "pinned host memory to device, one large copy"


def measure(bench: Bench) -> Iterator[Item]:
    """Bandwidths in GB/s (10^9)."""
    yield from _memory(bench)
    bench.clean()
    yield from _link(bench)


def _memory(bench: Bench) -> Iterator[Item]:
    num_bytes, clock = bench.scale.copy_bytes, bench.clock
    source, target = (clock.buffer(num_bytes).view(torch.float32) for _ in range(2))
    copies = clock.seconds(lambda: target.copy_(source), bench.scale.repeats)
    copied = rate("... copy, bytes read and written", 2 * num_bytes, copies)
    rows = source.view(-1, 8192)  # one sum for each row
    reads = [rate("... read, torch's sum", num_bytes, clock.seconds(lambda: rows.sum(1), bench.scale.repeats))]
    if clock.cuda:
        reads.append(rate("... read, torch's maximum", num_bytes, clock.seconds(lambda: rows.amax(1), bench.scale.repeats)))
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


def rate(name: str, num_bytes: int, seconds: list[float]) -> Figure:
    """The median of the rates at which so many bytes went each time."""
    rates = [num_bytes / s / 1e9 for s in seconds]
    return Figure(name, statistics.median(rates), "GB/s", better="higher", samples=rates)
