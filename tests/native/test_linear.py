"""Products with packed weights against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton_checks import sparse

from pagetide import native
from pagetide.engine.layers.linears import TYPES as TYPE_NUMBERS
from pagetide.engine.layers.quantization import QuantizedWeight, quantized_rows
from pagetide.engine.layers.quantized_linears import pack

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="the native kernels are not built")

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ERRORS = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of the largest output
SHAPES = ((1, 1, 1), (1, 64, 64), (3, 70, 33), (13, 31, 257), (50, 129, 300), (97, 200, 515), (200, 65, 1024), (5, 40, 2048))
INT8, INT4 = 3, 4


def product(x, packed, kind, n, bias=None, scales=None, group=0, in_scales=None, rows_in_int8=False):
    return torch.ops.pagetide.linear(x, packed, kind, n, bias, scales, group, in_scales, rows_in_int8)


def assert_near(out, expected, dtype, factor=1.0):
    assert out.dtype == dtype and out.shape == expected.shape
    assert (out.double() - expected).abs().max() <= factor * ERRORS[dtype] * expected.abs().max()


def drawn(dtype, rows, n, k):
    generator = torch.Generator().manual_seed(rows * 10_007 + n * 101 + k)
    x = torch.randn(rows, k, generator=generator).to(dtype)
    return x, torch.randn(n, k, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype), generator


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_weights_of_the_same_type(dtype):
    for rows, n, k in SHAPES:
        x, weight, bias, _ = drawn(dtype, rows, n, k)
        packed = torch.ops.pagetide.pack_weight(weight, TYPES[dtype])
        expected = x.double() @ weight.double().T
        assert_near(product(x, packed, TYPES[dtype], n), expected, dtype)
        assert_near(product(x, packed, TYPES[dtype], n, bias), expected + bias.double(), dtype)
        for row in {0, n // 2, n - 1}:
            assert torch.equal(torch.ops.pagetide.unpack_row(packed, TYPES[dtype], n, k, row), weight[row].float())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_weights_are_converted_as_torch_converts_them(dtype):
    """Bit by bit, subnormal numbers, infinities and overflow too."""
    for stored in TYPES:
        for n, k in [(1, 1), (33, 70), (64, 256), (100, 513)]:
            weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k)).to(stored)
            special = torch.tensor([1e-40, -3e-39, 6e-8, 7e4, -1e5, 3.4e38, torch.inf, -torch.inf, 0.0, -0.0])
            weight.view(-1)[: len(special)] = special[: weight.numel()].to(stored)
            packed = torch.ops.pagetide.pack_weight(weight, TYPES[dtype])
            assert torch.equal(packed, torch.ops.pagetide.pack_weight(weight.to(dtype), TYPES[dtype]))
            ids = torch.tensor([n - 1, 0, n // 2, n - 1])
            rows = torch.ops.pagetide.embed(packed, TYPES[dtype], n, k, ids, TYPES[dtype])
            assert rows.dtype == dtype and torch.equal(rows.view(torch.uint8), weight.to(dtype)[ids].view(torch.uint8))


def test_rows_outside_of_a_packed_weight_are_refused():
    packed = torch.ops.pagetide.pack_weight(torch.randn(40, 8), 0)
    assert torch.ops.pagetide.embed(packed, 0, 40, 8, torch.zeros(0, dtype=torch.int64), 0).shape == (0, 8)
    for row in (-1, 40):
        with pytest.raises(RuntimeError, match=f"index {row} is out of range: 40 rows"):
            torch.ops.pagetide.embed(packed, 0, 40, 8, torch.tensor([0, row]), 0)
    with pytest.raises(RuntimeError, match="rows of floats have the type of the weight"):
        torch.ops.pagetide.embed(packed, 0, 40, 8, torch.tensor([0]), 1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_int8_weights(dtype):
    for rows, n, k in SHAPES:
        x, _, bias, generator = drawn(dtype, rows, n, k)
        weight = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8)
        scales, factors = torch.rand(n, generator=generator), torch.rand(k, generator=generator) + 0.5
        packed = torch.ops.pagetide.pack_weight(weight, INT8)
        expected = x.double() @ (weight.double() * scales.double()[:, None]).T + bias.double()
        assert_near(product(x, packed, INT8, n, bias, scales), expected, dtype)
        scaled = (x.double() * factors.double()).to(dtype if dtype == torch.bfloat16 else torch.float32).double()
        expected = scaled @ (weight.double() * scales.double()[:, None]).T
        assert_near(product(x, packed, INT8, n, None, scales, 0, factors), expected, dtype)
        assert torch.equal(torch.ops.pagetide.unpack_row(packed, INT8, n, k, n - 1), weight[-1].float())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_in_int8(dtype):
    """A row is rounded to 255 steps of its largest value, and the product of the integers is exact."""
    for rows, n, k in SHAPES:
        x, _, _, generator = drawn(dtype, rows, n, k)
        weight = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8)
        scales = torch.rand(n, generator=generator) * 0.01
        steps = x.double().abs().amax(1, keepdim=True) / 127
        rounded = (x.double() / steps).round() * steps
        out = product(x, torch.ops.pagetide.pack_weight(weight, INT8), INT8, n, None, scales, 0, None, True)
        ties = 1 if dtype == torch.float32 else 2  # a value may be halfway between two steps
        assert_near(out, rounded @ (weight.double() * scales.double()[:, None]).T, dtype, 10 * ties)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_int4_weights(dtype):
    for group in [8, 32, 256]:
        for rows, n, k in SHAPES:
            x, _, bias, generator = drawn(dtype, rows, n, k)
            weight = torch.randint(-8, 8, (n, k), generator=generator, dtype=torch.int8)
            scales = torch.rand(-(-k // group), n, generator=generator)
            whole = weight.double() * scales.double().repeat_interleave(group, 0)[:k].T
            packed = torch.ops.pagetide.pack_weight(weight, INT4)
            out = product(x, packed, INT4, n, bias, scales, group)
            assert_near(out, x.double() @ whole.T + bias.double(), dtype)
            assert torch.equal(torch.ops.pagetide.unpack_row(packed, INT4, n, k, n - 1), weight[-1].float())


FORMS = [
    ("int8", 0, torch.float32, True), ("int8", 32, torch.float16, False), ("int8", 128, torch.bfloat16, True),
    ("int4", 0, torch.bfloat16, True), ("int4", 32, torch.float16, True), ("int4", 128, torch.float16, False),
    ("fp8", 0, torch.float32, False), ("fp8", 128, torch.float32, False), ("fp8", 16, torch.bfloat16, False),
    ("fp4", 32, torch.uint8, False), ("fp4", 16, torch.float32, False), ("fp4", 0, torch.float16, False),
]  # fmt: skip


def check_rounded_groups(weight, x):
    """Each group of a row is rounded by itself, whatever other rows there are, if the form suits."""
    packed = pack(weight).for_inputs(torch.bfloat16)
    assert packed.rows_in_int8 == (weight.form != "fp8" and weight.group >= 16)
    if packed.rows_in_int8:
        out, inputs = packed.product(x, None), x if weight.order is None else x[:, weight.order]
        right = quantized_rows(inputs.float(), weight.group).double() @ replace(weight, order=None).dequantized().double().T
        assert_near(out, right, x.dtype, 1000 if x.dtype == torch.float32 else 4)  # a value may lie between two steps
        assert torch.equal(out[-1:], packed.product(x[-1:], None))
        if x.dtype == torch.float32:
            factors, in_order = torch.linspace(0.5, 2, x.shape[1]), replace(packed, order=None)
            scaled = replace(in_order, in_scales=factors).product(inputs, None)
            assert torch.equal(scaled, in_order.product(inputs * factors, None))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_published_forms(dtype):
    """Values of every form with scales of every type, in groups and not, with zero points and an order of inputs."""
    for form, group, of_scales, with_zeros in FORMS:
        for rows, n, k in SHAPES:
            x, _, _, generator = drawn(dtype, rows, n, k)
            low, high = (-8, 8) if form in ("int4", "fp4") else (-127, 127)  # -1 is a NaN of fp8
            values = torch.randint(low, high, (n, k), generator=generator, dtype=torch.int8)
            values = torch.where(values & 127 == 127, 0, values) if form == "fp8" else values
            sizes = (-(-k // group), n) if group else (n,)
            scales = torch.rand(sizes, generator=generator) + 0.1
            if of_scales == torch.uint8:
                scales = torch.randint(120, 135, sizes, generator=generator)
            zeros = torch.randint(low, high, sizes, generator=generator, dtype=torch.int8) if with_zeros else None
            order = torch.randperm(k, generator=generator, dtype=torch.int32) if n % 2 else None
            weight = QuantizedWeight(form, values, scales.to(of_scales), None, group, zeros, order)
            out = pack(weight).product(x, None)
            assert_near(out, x.double() @ weight.dequantized().double().T, dtype)
            assert torch.equal(out[-1:], pack(weight).product(x[-1:], None))
            check_rounded_groups(weight, x)
            if order is None:
                rows_of_it = pack(weight).rows(torch.tensor([n - 1, 0]), dtype)
                assert rows_of_it.dtype == dtype
                assert torch.allclose(rows_of_it.double(), weight.dequantized()[[n - 1, 0]].double(), rtol=ERRORS[dtype])


def with_factors(form, scaling, n, k, generator):
    """A weight whose scales are integers times factors, as in the K-quants of GGUF, or have minimums, as in Q4_1."""
    low, high = {"int4": (-8, 8), "int8": (-32, 32) if scaling == "int8" else (0, 32)}[form]
    values = torch.randint(low, high, (n, k), generator=generator, dtype=torch.int8)
    supers, group = -(-k // 256), 16 if scaling == "int8" else 32
    rows = {"six bits": 2 * supers, "int8": supers, "minimums": k // 32}[scaling]
    factors = (torch.rand((rows, n), generator=generator) + 0.1).half() / 64
    if scaling == "six bits":
        scales = torch.randint(0, 256, (12 * supers, n), generator=generator, dtype=torch.uint8)
    elif scaling == "int8":
        scales = torch.randint(-128, 128, (-(-k // group), n), generator=generator, dtype=torch.int8)
    else:
        scales, factors = (torch.rand((rows, n), generator=generator) - 0.5).half(), factors * 64 - 0.6
    return QuantizedWeight(form, values, scales, group=group, factors=factors)


SCALINGS = [("int4", "six bits"), ("int8", "six bits"), ("int8", "int8"), ("int4", "minimums"), ("int8", "minimums")]
FURTHER_SIZES = {"six bits": (40, 33, 2048), "int8": (5, 40, 300), "minimums": (5, 40, 352)}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("form", "scaling"), SCALINGS)
def test_scales_with_factors(form, scaling, dtype):
    for rows, n, k in ((1, 1, 256), (3, 70, 512), (13, 31, 1280), (97, 200, 256), FURTHER_SIZES[scaling]):
        x, _, bias, generator = drawn(dtype, rows, n, k)
        weight = with_factors(form, scaling, n, k, generator)
        whole, packed = weight.dequantized(), pack(weight)
        out = packed.product(x, bias)
        assert_near(out, x.double() @ whole.double().T + bias.double(), dtype, 2)
        assert torch.equal(out[-1:], packed.product(x[-1:], bias))
        check_rounded_groups(weight, x)
        ids = torch.tensor([[n - 1, 0], [n // 2, 0]])
        assert torch.allclose(packed.rows(ids, dtype).double(), whole[ids].double(), rtol=ERRORS[dtype], atol=1e-6)


def test_scales_with_factors_of_other_sizes_are_refused():
    generator = torch.Generator().manual_seed(1)
    six, eight, half = (with_factors("int8", scaling, 8, 512, generator) for scaling in ("six bits", "int8", "minimums"))
    for weight, message in (
        (replace(six, factors=six.factors[:-1]), "factors must have 32 elements"),
        (replace(six, scales=six.scales[:-1]), "scales must have 192 elements"),
        (replace(six, group=16), "scales with minimums are of groups of 32"),
        (replace(six, factors=six.factors.float()), "factors has another element type"),
        (replace(half, factors=half.factors[:-1]), "factors must have 128 elements"),
        (replace(half, zeros=torch.zeros_like(half.scales).char()), "in rows of multiples of 32, without zeros"),
        (replace(eight, factors=None), "scales of integers have factors"),
        (replace(eight, scales=eight.scales.float()), "scales of integers have factors"),
        (replace(eight, group=0, scales=eight.scales[:1]), "scales with factors are of groups"),
    ):
        for use in (lambda one: one.product(torch.ones(1, 512), None), lambda one: one.rows(torch.tensor([0]), torch.float32)):
            with pytest.raises(RuntimeError, match=message):
                use(pack(weight))


def test_every_code_of_small_floats_is_exact():
    codes = torch.arange(256, dtype=torch.uint8)
    fp8 = codes[codes & 127 != 127]
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for form, values, right in (
        ("fp8", fp8.view(torch.int8), fp8.view(torch.float8_e4m3fn).float()),
        ("fp4", torch.arange(-8, 8, dtype=torch.int8), torch.cat([sizes, -sizes])),
    ):  # fmt: skip
        weight = pack(QuantizedWeight(form, values[:, None].contiguous(), torch.ones(len(values))))
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(weight.product(torch.ones(1, 1, dtype=dtype), None)[0].float(), right)
        read = [torch.ops.pagetide.unpack_row(weight.packed, TYPE_NUMBERS[form], len(values), 1, i) for i in range(len(values))]
        assert torch.equal(torch.cat(read), right)


def test_exponents_of_scales_are_exact():
    scales = torch.arange(255, dtype=torch.uint8)
    weight = pack(QuantizedWeight("fp4", torch.full((255, 1), -6, dtype=torch.int8), scales))  # of 1.0
    assert torch.equal(weight.product(torch.ones(1, 1), None)[0], 2.0 ** (torch.arange(255.0) - 127))


def test_the_sums_of_a_row_depend_on_it_alone():
    """Neither on other rows, nor on their number, nor on the number of threads."""
    for kind in range(5):
        dtype = {0: torch.float32, 1: torch.bfloat16, 2: torch.float16}.get(kind, torch.bfloat16)
        n, k = 130, 700
        x, weight, _, generator = drawn(dtype, 300, n, k)
        scales = None
        if kind >= INT8:
            weight = torch.randint(-8, 8, (n, k), generator=generator, dtype=torch.int8)
            scales = torch.rand((-(-k // 64), n) if kind == INT4 else n, generator=generator)
        packed = torch.ops.pagetide.pack_weight(weight, kind)
        before = torch.get_num_threads()
        for rows_in_int8 in (False, True) if kind >= INT8 else (False,):
            group = 64 if kind == INT4 else 0
            whole = product(x, packed, kind, n, None, scales, group, None, rows_in_int8)
            try:
                for threads in (1, 2, 5):
                    torch.set_num_threads(threads)
                    for first, last in ((0, 1), (7, 8), (3, 20), (100, 199)):
                        some = product(x[first:last], packed, kind, n, None, scales, group, None, rows_in_int8)
                        assert torch.equal(some, whole[first:last])
            finally:
                torch.set_num_threads(before)


def test_strided_rows_and_poisoned_neighbours():
    memory = torch.full((9, 100), float("nan"))
    x = memory[1:8, 10:74]
    x.copy_(torch.randn(7, 64))
    weight = torch.randn(20, 64)
    out = product(x, torch.ops.pagetide.pack_weight(weight, 0), 0, 20)
    assert_near(out, x.double() @ weight.double().T, torch.float32)


@pytest.mark.parametrize("kind", [1, INT8])
def test_weights_beyond_two_to_the_31_elements(kind):
    """All are zeros but those of the last 32 outputs."""
    n, k = 65_600, 32_768
    x, weight, _, generator = drawn(torch.bfloat16, 2, 32, k)
    scales = None
    if kind == INT8:
        weight = torch.randint(-127, 128, (32, k), generator=generator, dtype=torch.int8)
        scales = torch.rand(n, generator=generator)
    last = torch.ops.pagetide.pack_weight(weight, kind)
    packed = sparse((last.numel() // 32 * n,), torch.uint8)
    packed[-last.numel() :] = last
    out = product(x, packed, kind, n, None, scales)
    assert not out[:, :-32].any()
    expected = product(x, last, kind, 32, None, None if scales is None else scales[-32:].clone())
    assert torch.equal(out[:, -32:], expected) and expected.any()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_beyond_two_to_the_31_elements(dtype):
    stride, k = 1 << 30, 64
    x = sparse((3 * stride + k,), dtype).as_strided((4, k), (stride, 1))
    near, weight, bias, _ = drawn(dtype, 4, 40, k)
    x.copy_(near)
    packed = torch.ops.pagetide.pack_weight(weight, TYPES[dtype])
    assert torch.equal(product(x, packed, TYPES[dtype], 40, bias), product(near, packed, TYPES[dtype], 40, bias))


def test_a_nan_stays_in_its_row():
    x = torch.randn(20, 64)
    x[3, 5], x[4, 0] = float("nan"), float("inf")
    weight = torch.randint(-127, 128, (40, 64), dtype=torch.int8)
    for rows_in_int8 in (False, True):
        packed = torch.ops.pagetide.pack_weight(weight, INT8)
        out = product(x, packed, INT8, 40, None, torch.rand(40), 0, None, rows_in_int8)
        bad = ~out.isfinite().all(1)
        assert bad.nonzero().flatten().tolist() == [3, 4]


@pytest.mark.parametrize(("kind", "group"), [(INT8, 0), (INT8, 16), (INT4, 32)])
def test_rows_of_tiny_values_are_finite(kind, group):
    """127 over their largest value is not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((4, 64), generator=generator) * torch.tensor([[1e-37], [1e-39], [1e-44], [1.0]])
    weight = torch.randint(-8, 8, (40, 64), generator=generator, dtype=torch.int8)
    packed = torch.ops.pagetide.pack_weight(weight, kind)
    scales = torch.ones((64 // group, 40) if group else 40)
    out = product(x, packed, kind, 40, None, scales, group, None, True)
    assert (out[:3].abs() < 1e-33).all()
    assert torch.equal(out[3:], product(x[3:], packed, kind, 40, None, scales, group, None, True))


def test_sizes_that_overflow_are_refused():
    """The bytes of such a weight, modulo 2^64, are those of an empty one."""
    empty = torch.empty(0, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="a weight of"):
        torch.ops.pagetide.unpack_row(empty, 0, 2**62, 4, 0)
    with pytest.raises(RuntimeError, match="a weight of"):
        torch.ops.pagetide.embed(empty, 0, 2**62, 4, torch.tensor([5]), 0)
    with pytest.raises(RuntimeError, match="a weight of -5 by -7"):
        torch.ops.pagetide.most_scratch_bytes(0, -5, -7)


def test_numbers_of_threads_that_are_none_are_refused():
    for count in [-1, 2**31, 2**32]:
        before = torch.ops.pagetide.num_threads()
        with pytest.raises(RuntimeError, match=f"or 0 for torch's number, got {count}"):
            torch.ops.pagetide.set_threads(count)
        assert torch.ops.pagetide.num_threads() == before


def test_nothing_to_do():
    packed = torch.ops.pagetide.pack_weight(torch.randn(8, 16), 0)
    assert product(torch.empty(0, 16), packed, 0, 8).shape == (0, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(16)}, "two dimensions"), ({"x": torch.randn(2, 17)}, "packed must have"),
        ({"x": torch.randn(2, 16, dtype=torch.float64)}, "must be float32"),
        ({"x": torch.randn(2, 16, dtype=torch.bfloat16)}, "differ in type"), ({"n": 400}, "packed must have"),
        ({"n": -1}, "a weight of -1 by 16"), ({"n": 2**62}, "a weight of 4611686018427387904 by 16"),
        ({"x": torch.randn(2, 0), "features": 0}, "no features"), ({"kind": 9}, "unknown type"),
        ({"bias": torch.randn(9)}, "bias must have 8 elements"), ({"scales": torch.randn(8)}, "scales"),
        ({"in_scales": torch.randn(8)}, "in_scales must have 16"), ({"rows_in_int8": True}, "rows are quantised"),
        ({"group": 64}, "group must be"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(change, message):
    change = dict(change)
    packed = torch.ops.pagetide.pack_weight(torch.randn(8, change.pop("features", 16)), 0)
    arguments = {"x": torch.randn(2, 16), "packed": packed, "kind": 0, "n": 8}
    with pytest.raises(RuntimeError, match=message):
        product(**{**arguments, **change})
