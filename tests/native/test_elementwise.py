"""Norms, rotary embeddings and gates against float64, for each instruction set that this processor has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pagetide import native

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="the native kernels are not built")

TYPES = (torch.float32, torch.bfloat16, torch.float16)
ERRORS = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # relative, and of 1
HALVES, HALVES_OF_PAIRS, NEIGHBOURS = range(3)
GATES = {0: F.silu, 1: F.gelu, 2: lambda x: F.gelu(x, approximate="tanh")}
ops = torch.ops.pagetide


def assert_near(out, expected, dtype, factor=1.0):
    assert out.dtype == dtype and out.shape == expected.shape
    bound = factor * ERRORS[dtype] * (1 + expected.abs())
    assert ((out.double() - expected).abs() <= bound).all()


def drawn(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(values, left=3, right=5):
    """`values` as a view, with NaN around each row."""
    memory = torch.full((*values.shape[:-1], values.shape[-1] + left + right), float("nan"), dtype=values.dtype)
    view = memory[..., left : left + values.shape[-1]]
    view.copy_(values)
    return view


def rms_norm(x, weight, eps, offset=0.0):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rms_norm(dtype):
    for n in [1, 7, 16, 33, 64, 515]:
        for scale in [1e-3, 1.0, 100.0]:
            x, weight = poisoned((drawn(5, n, dtype=torch.float32) * scale).to(dtype)), drawn(n, dtype=dtype, seed=1)
            for offset, rounds_first in ((0.0, True), (0.0, False), (1.0, False)):
                out = ops.rms_norm(x, weight, 1e-5, offset, rounds_first)
                assert_near(out, rms_norm(x, weight, 1e-5, offset), dtype, 2)
            assert_near(ops.rms_norm(x, None, 1e-5, 0.0, False), rms_norm(x, torch.ones(n), 1e-5), dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rms_norm_rounds_as_transformers_does(dtype):
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x = drawn(64, 96, dtype=dtype)
    for kind, offset, rounds_first in ((LlamaRMSNorm, 0.0, True), (Gemma2RMSNorm, 1.0, False)):
        norm = kind(96, eps=1e-6).to(dtype).requires_grad_(False)
        norm.weight.copy_(drawn(96, dtype=dtype, seed=1))
        out = ops.rms_norm(x, norm.weight, 1e-6, offset, rounds_first)
        same = (out == norm(x)).double().mean()
        assert same > (0.5 if dtype == torch.float32 else 0.99), "sums of another order round otherwise now and then"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rms_norm_behind_a_sum(dtype):
    x, residual = poisoned(drawn(2, 3, 70, dtype=dtype)), drawn(2, 3, 70, dtype=dtype, seed=1)
    weight = drawn(70, dtype=dtype)
    total, out = ops.add_rms_norm(x, residual, weight, 1e-6, 0.0, True)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, ops.rms_norm(total, weight, 1e-6, 0.0, True))


def test_rms_norm_of_strided_rows():
    weight = drawn(32, dtype=torch.float32, seed=1)
    x = drawn(2, 6, 5, 96, dtype=torch.float32)
    for view in (
        x[..., 32:64],
        x.transpose(1, 2)[..., :32],
        x[:, ::2, 1:, 64:],
        x.transpose(2, 3)[..., :32, :].transpose(2, 3),
    ):
        out = ops.rms_norm(view, weight, 1e-6, 0.0, True)
        assert out.is_contiguous()
        assert_near(out, rms_norm(view, weight, 1e-6), torch.float32)


def rotated(x, cos, sin, rotation):
    """x [..., tokens, heads, dim] by cos and sin [..., tokens, dims that rotate], in float64."""
    x, cos, sin = x.double(), cos.double()[..., None, :], sin.double()[..., None, :]
    if rotation == HALVES_OF_PAIRS:
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    d = cos.shape[-1]
    turning, rest = x[..., :d], x[..., d:]
    if rotation == NEIGHBOURS:
        other = torch.stack([-turning[..., 1::2], turning[..., ::2]], -1).flatten(-2)
    else:
        other = torch.cat([-turning[..., d // 2 :], turning[..., : d // 2]], -1)
    return torch.cat([turning * cos + other * sin, rest], -1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rotate(dtype):
    for rotation in [HALVES, HALVES_OF_PAIRS, NEIGHBOURS]:
        for dim, turning in [(2, 2), (8, 8), (64, 64), (66, 66), (80, 20), (128, 128)]:
            width = turning // 2 if rotation == HALVES_OF_PAIRS else turning
            for batch, batch_of_cos, tokens in ((1, 1, 1), (2, 1, 5), (2, 2, 3)):
                both = poisoned(drawn(batch, tokens, 8 * dim, dtype=dtype)).unflatten(-1, (8, dim))
                q, k = both[:, :, :6], both[:, :, 6:]
                cos, sin = (poisoned(drawn(batch_of_cos, tokens, width, dtype=dtype, seed=s)) for s in (1, 2))
                expected = [rotated(x, cos, sin, rotation) for x in (q, k)]
                for out, right in zip(ops.rotate(q, k, cos, sin, 1, rotation), expected, strict=True):
                    assert out.is_contiguous()
                    assert_near(out, right, dtype, 2)
                for out, right in zip(
                    ops.rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2, rotation), expected, strict=True
                ):
                    assert_near(out, right.transpose(1, 2), dtype, 2)


def test_rotate_elements_with_gaps():
    q, k = drawn(1, 6, 5, 8, 2, dtype=torch.float32)[..., 0], drawn(1, 2, 8, 5, dtype=torch.float32).transpose(2, 3)
    cos, sin = (drawn(1, 5, 8, dtype=torch.float32, seed=s) for s in (1, 2))
    for out, x in zip(ops.rotate(q, k, cos, sin, 2, HALVES), (q, k), strict=True):
        assert_near(out, rotated(x.transpose(1, 2), cos, sin, HALVES).transpose(1, 2), torch.float32)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_gated(dtype):
    for gate in GATES:
        for n in [1, 15, 64, 515]:
            both = torch.full((4, 3, 2 * n + 9), float("nan"), dtype=dtype)
            gate_x, up = both[..., 2 : n + 2], both[..., n + 5 : 2 * n + 5]
            gate_x[:], up[:] = drawn(4, 3, n, dtype=dtype) * 4, drawn(4, 3, n, dtype=dtype, seed=1)
            expected = GATES[gate](gate_x.double()) * up.double()
            assert_near(ops.gated(both, n, 2, n + 5, gate), expected, dtype)


def test_gates_of_extreme_values():
    for gate in GATES:
        x = torch.tensor([-3e38, -200.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 200.0, float("inf"), float("nan")])
        both = torch.stack([x, torch.ones_like(x)], 1)
        out = ops.gated(both, 1, 0, 1, gate)[:, 0]
        assert torch.equal(out.isnan(), x.isnan())
        torch.testing.assert_close(out.double(), GATES[gate](x.double()), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_depends_on_it_alone(dtype):
    """Neither on other rows, nor on their number, nor on the number of threads."""
    x, weight = drawn(300, 4 * 96, dtype=dtype), drawn(384, dtype=dtype)
    cos = drawn(1, 300, 96, dtype=dtype)

    def results(rows):
        some = x[rows]
        heads = some.view(1, -1, 4, 96)
        q, k = ops.rotate(heads[:, :, :3], heads[:, :, 3:], cos[:, rows], cos[:, rows], 1, HALVES)
        return ops.rms_norm(some, weight, 1e-6, 0.0, True), ops.gated(some, 192, 192, 0, 0), q[0], k[0]

    before, whole = torch.get_num_threads(), results(slice(None))
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for rows in (slice(0, 1), slice(7, 8), slice(3, 20), slice(50, 300)):
                for some, all_rows in zip(results(rows), whole, strict=True):
                    assert torch.equal(some, all_rows[rows])
    finally:
        torch.set_num_threads(before)


def test_nothing_to_do():
    assert ops.rms_norm(torch.empty(0, 8), None, 1e-6, 0.0, True).shape == (0, 8)
    assert ops.gated(torch.empty(0, 8), 4, 0, 4, 0).shape == (0, 4)
    q, k, cos_and_sin = torch.empty(1, 0, 2, 8), torch.empty(1, 0, 1, 8), torch.empty(2, 1, 0, 8)
    assert ops.rotate(q, k, *cos_and_sin, 1, 0)[1].shape == k.shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.rms_norm(torch.randn(2, 8), torch.randn(7), 1e-6, 0.0, True), "weight must have 8"),
        (lambda: ops.rms_norm(torch.randn(2, 8), torch.randn(8).half(), 1e-6, 0.0, True), "another element type"),
        (lambda: ops.rms_norm(torch.randn(2, 8).double(), None, 1e-6, 0.0, True), "must be float32"),
        (lambda: ops.add_rms_norm(torch.randn(2, 8), torch.randn(8), None, 1e-6, 0.0, True), "residual must have 16"),
        (lambda: ops.add_rms_norm(torch.randn(2, 8), torch.randn(8, 2), None, 1e-6, 0.0, True), "differ in dimension 0"),
        (lambda: ops.gated(torch.randn(2, 8), 4, 0, 5, 0), "columns 5 to 9 of 8"),
        (lambda: ops.gated(torch.randn(2, 8), 4, 0, 4, 3), "unknown gate"),
        (lambda: ops.gated(torch.randn(8, 2).T, 4, 0, 4, 0), "contiguous"),
        (lambda: ops.rotate(*torch.randn(2, 1, 3, 2, 8), *torch.randn(2, 1, 4, 8), 1, 0), "cos must be"),
        (lambda: ops.rotate(*torch.randn(2, 1, 3, 2, 8), *torch.randn(2, 1, 3, 9), 1, 0), "even number"),
        (lambda: ops.rotate(*torch.randn(2, 1, 3, 2, 8), *torch.randn(2, 1, 3, 10), 1, 0), "at least 10"),
        (lambda: ops.rotate(*torch.randn(2, 1, 3, 2, 8), *torch.randn(2, 1, 3, 8).half(), 1, 0), "differ in type"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()
