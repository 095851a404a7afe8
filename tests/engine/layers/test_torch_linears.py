"""Torch's kernels for quantized weights, by its operators for CPUs: layouts, scales and zeros of every form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from pagetide.engine.layers import torch_bytes, torch_linears
from pagetide.engine.layers.quantization import QuantizedWeight
from pagetide.engine.layers.torch_linears import TorchLinear, TorchWeight, difference, obstacle

CPU, BF16 = torch.device("cpu"), torch.bfloat16
N, K = 64, 512


@pytest.fixture(autouse=True)
def _tries_anew() -> None:
    torch_linears._fault.cache_clear()


def drawn(kind: str) -> QuantizedWeight:
    """A weight [64, 512] as a published format has it."""
    generator = torch.Generator().manual_seed(len(kind))
    ints = torch.randint(-8, 8, (N, K), generator=generator, dtype=torch.int8)

    def some(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator) + 0.1

    match kind:
        case "Q4_K":
            scales = torch.randint(0, 256, (K // 256 * 12, N), generator=generator, dtype=torch.uint8)
            return QuantizedWeight("int4", ints, scales, group=32, factors=some(K // 256 * 2, N).half() / 64)
        case "Q4_1":
            return QuantizedWeight("int4", ints, some(K // 32, N).half(), group=32, factors=some(K // 32, N).half())
        case "fp8":
            values = torch.randn((N, K), generator=generator).to(torch.float8_e4m3fn).view(torch.int8)
            return QuantizedWeight("fp8", values, some(N).bfloat16())
        case "by channel":
            return QuantizedWeight("int4", ints, some(N))
    group = int(kind)
    points = torch.randint(-8, 8, (-(-K // group), N), generator=generator, dtype=torch.int8)
    order = torch.randperm(K, generator=generator).int() if group == 64 else None
    return QuantizedWeight("int4", ints, some(len(points), N).half(), group=group, zeros=points, order=order)


@pytest.mark.parametrize("kind", ["32", "64", "128", "384", "by channel", "Q4_K", "Q4_1", "fp8"])
def test_products_are_those_of_the_dequantized_weight(kind: str) -> None:
    weight = drawn(kind)
    pieces = [(0, weight.outputs(0, 32)), (32, weight.outputs(32, N))]
    made = TorchWeight.of(weight.form, (N, K), weight.group, pieces, CPU)
    assert obstacle(weight.form, N, K, weight.group, BF16, CPU) is None
    assert difference(made, weight) is None
    assert made.num_bytes == torch_bytes(weight.form, N, K, weight.group) + (4 * K if kind == "64" else 0)
    layer = TorchLinear(made, torch.arange(N).bfloat16())
    x = torch.eye(K, dtype=BF16)[None]  # a product is a column of the weight, and its errors do not add up
    plain = weight.dequantized().T
    bound = 2**-7 if weight.form == "int4" else 2**-8  # rows of one element are exact in fp8
    floor = 16 * weight.affine()[0].abs().max() * 2**-8 if weight.form == "int4" else 0.0
    out = (layer(x) - layer.bias).float()[0]
    assert ((out - plain).abs() <= bound * (plain.abs() + N) + floor).all()


def test_a_wrong_scale_shows() -> None:
    for kind in ("128", "fp8"):
        weight = drawn(kind)
        made = TorchWeight.of(weight.form, (N, K), weight.group, [(0, weight)], CPU)
        assert "differs from the dequantized product by" in difference(made, replace(weight, scales=weight.scales * 1.2))


def test_why_weights_are_not_multiplied_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for form, n, k, group, dtype, reason in (
        ("int8", N, K, 0, BF16, "torch multiplies no int8 weights"),
        ("fp4", N, K, 32, BF16, "torch multiplies no fp4 weights"),
        ("int4", N, K, 32, torch.float16, "torch's kernels multiply rows of bfloat16, not float16"),
        ("int4", N, K, 16, BF16, "torch's kernel for int4 takes no 64 by 512 weights in groups of 16"),
        ("int4", N, 200, 0, BF16, "takes no 64 by 200 weights in groups of 200"),
        ("int4", 40, K, 32, BF16, "takes no 40 by 512"),
        ("fp8", N, K, 128, BF16, "torch's kernel for fp8 takes no 64 by 512 weights in groups of 128"),
    ):
        assert reason in str(obstacle(form, n, k, group, dtype, CPU))
    assert obstacle("int4", N, K, 32, BF16, CPU) is None
    assert not torch_linears.has_kernels(CPU)


@pytest.fixture
def kept_faults() -> Iterator[None]:
    """What kernels are found to do is kept for a process: it is not what others find."""
    torch_linears._fault.cache_clear()
    yield
    torch_linears._fault.cache_clear()


@pytest.mark.usefixtures("kept_faults")
def test_kernels_that_fail_or_differ_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that is too old, or with a torch that has another layout."""
    right = torch_linears._converted
    monkeypatch.setattr(torch_linears, "_converted", lambda codes: right(codes.roll(1, 1)))
    assert "torch's kernel for int4 differs from the dequantized product by" in str(obstacle("int4", N, K, 128, BF16, CPU))

    def fails(codes: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel\nimage")

    monkeypatch.setattr(torch_linears, "_converted", fails)
    said = obstacle("int4", N, K, 64, BF16, CPU)
    assert said == "torch's kernel for int4 fails on cpu: RuntimeError: no kernel image"
    assert obstacle("fp8", N, K, 0, BF16, CPU) is None


def test_pairs_of_codes_for_cuda() -> None:
    """The first of two inputs in the high half of a byte, and as many inputs together as divide a row."""
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert torch_linears._pairs(codes).tolist() == [[0x12, 0xF0]]
    asked = []

    class Device:
        type = "cuda"

    class Codes:
        device, shape = Device(), (N, 96 // 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.aten, "_convert_weight_to_int4pack", lambda codes, tiles: asked.append(tiles))
        torch_linears._converted(Codes())
    assert asked == [2]
