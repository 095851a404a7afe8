"""Products with quantized weights by torch's kernels, against bfloat16 products of the same layer: one row, and many.

Each is checked on the device before it is timed, as at a load. The layer is the model's from hidden to intermediate size.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.figures import Figure
from pagetide.engine.layers import WeightForm, torch_bytes
from pagetide.engine.layers.quantization import QuantizedWeight
from pagetide.engine.layers.torch_linears import TorchWeight, difference, obstacle

from .bench import Bench
from .parts import Item, Unmeasured

_GROUPS: tuple[tuple[WeightForm, int], ...] = (("int4", 32), ("int4", 128), ("fp8", 0))
_MANY_ROWS = 512
_WEIGHTS_BYTES = 256 << 20  # that take turns: more than a device's caches hold


def measure(bench: Bench) -> Iterator[Item]:
    """Milliseconds of products, and their bytes."""
    n, k, device = bench.scale.intermediate, bench.scale.hidden, bench.clock.device
    counts = {rows: torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (1, bench.scale.rows, _MANY_ROWS)}
    with torch.inference_mode():
        plain = [torch.randn(n, k, device=device, dtype=torch.bfloat16) for _ in range(_copies(bench, 2 * n * k))]
        for rows, x in counts.items():
            yield _milliseconds(bench, f"bfloat16, {rows} rows", partial(_plain_product, x, itertools.cycle(plain)))
        del plain
        bench.clean()
        for form, group in _GROUPS:
            yield from _quantized(bench, form, min(group, k), counts)
            bench.clean()


def _copies(bench: Bench, size: int) -> int:
    return max(1, -(-_WEIGHTS_BYTES // size)) if bench.clock.cuda else 1


def _quantized(bench: Bench, form: WeightForm, group: int, counts: dict[int, torch.Tensor]) -> Iterator[Item]:
    n, k, device = bench.scale.intermediate, bench.scale.hidden, bench.clock.device
    name = form if not group else f"{form} in groups of {group}"
    if (why := obstacle(form, n, k, group, torch.bfloat16, device)) is not None:
        yield Unmeasured(name, why)
        return
    weight = _drawn(form, n, k, group)
    made = TorchWeight.of(form, (n, k), group, [(0, weight)], device)
    if (why := difference(made, weight)) is not None:
        yield Unmeasured(name, why)
        return
    assert made.num_bytes == torch_bytes(form, n, k, group), "the plan counts other bytes"
    yield Figure(f"{name}, bytes of a bfloat16 weight", made.num_bytes / (2 * n * k), "x", better="lower")
    copies = [TorchWeight.of(form, (n, k), group, [(0, weight)], device) for _ in range(_copies(bench, made.num_bytes))]
    for rows, x in counts.items():
        yield _milliseconds(bench, f"{name}, {rows} rows", partial(_product, x, itertools.cycle(copies)))


def _plain_product(x: torch.Tensor, weights: Iterator[torch.Tensor]) -> torch.Tensor:
    return x @ next(weights).T


def _product(x: torch.Tensor, weights: Iterator[TorchWeight]) -> torch.Tensor:
    return next(weights).product(x, None)


def _drawn(form: WeightForm, n: int, k: int, group: int) -> QuantizedWeight:
    drawn = torch.Generator().manual_seed(n + k)
    if form == "fp8":
        values = torch.randn((n, k), generator=drawn).to(torch.float8_e4m3fn).view(torch.int8)
        return QuantizedWeight(form, values, torch.rand(n, generator=drawn) + 0.5)
    values = torch.randint(-8, 8, (n, k), generator=drawn, dtype=torch.int8)
    zeros = torch.randint(-8, 8, (k // group, n), generator=drawn, dtype=torch.int8)
    return QuantizedWeight(form, values, torch.rand((k // group, n), generator=drawn) + 0.5, group=group, zeros=zeros)


def _milliseconds(bench: Bench, name: str, run: Callable[[], object]) -> Figure:
    taken = [1000 * s for s in bench.clock.seconds(run, bench.scale.repeats)]
    return Figure(f"product, {name}", statistics.median(taken), "ms", better="lower", samples=taken)
