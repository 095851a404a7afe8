"""The layers of a model on a CPU: linear layers, packed or quantized, and native kernels in place of modules.

Here are the sizes of quantized weights, which need no torch.
"""

from typing import Literal

# The forms of weights that are quantized here, and all that the kernels multiply: fp8 is e4m3, and fp4 is e2m1.
Quantization = Literal["int8", "int4"]
WeightForm = Literal["int8", "int4", "fp8", "fp4"]
LEAST_QUANTIZED = 1 << 14  # smaller layers, such as routers, keep their type
_TORCH_GROUPS = (256, 128, 64, 32)
_TORCH_UNIT = 16  # of outputs and inputs, of which torch's kernels take multiples
GROUP = 64  # weights of an int4 scale; 32 is 6 % more bytes and a sixth less error


def weight_bytes(n: int, k: int, quantization: Quantization) -> int:
    """The most bytes that a weight [n, k] takes in the native layout, scales included."""
    group, scale_bytes = (GROUP, 2) if quantization == "int4" else (0, 4)
    return packed_bytes(n, k, quantization, group, scale_bytes) + 4 * k


def packed_bytes(n: int, k: int, form: WeightForm, group: int, scale_bytes: int) -> int:
    """The most bytes of a weight [n, k] in the native layout, with a scale (and a zero point) of `scale_bytes` for each `group`
    of an output's weights, or for all of them if it is 0.
    """
    columns, padded = -(-n // 32) * 32, -(-k // 64) * 64
    row_bytes = padded + 4 if form in ("int8", "fp8") else padded // 2
    return columns * row_bytes + n * scale_bytes * (-(-k // group) if group else 1)


def torch_group(k: int, group: int) -> int | None:
    """The size of groups by which torch's int4 kernel holds weights with a scale for each `group` of `k` inputs; None: none."""
    return next((size for size in _TORCH_GROUPS if (group or k) % size == 0 and k % size == 0), None)


def torch_bytes(form: WeightForm, n: int, k: int, group: int) -> int | None:
    """Bytes of a weight [n, k] with its scales, as torch's kernels take it on CUDA; None: they take none of this size."""
    if n % _TORCH_UNIT or k % _TORCH_UNIT:
        return None
    if form == "fp8":
        return None if group else n * k + 4 * n
    size = torch_group(k, group) if form == "int4" else None
    return None if size is None else n * k // 2 + 4 * n * (k // size)
