"""The layers of a model on a CPU: linear layers, packed or quantized, and native kernels in place of modules.

Here are the sizes of quantized weights, which need no torch.
"""

from typing import Literal

# The forms of quantized weights.
Quantization = Literal["int8", "int4"]
LEAST_QUANTIZED = 1 << 14  # smaller layers, such as routers, keep their type
GROUP = 64  # weights of an int4 scale; 32 is 12 % more bytes and a sixth less error


def weight_bytes(n: int, k: int, quantization: Quantization) -> int:
    """The most bytes that a weight [n, k] takes in the native layout, scales included."""
    columns, padded = -(-n // 32) * 32, -(-k // 64) * 64
    if quantization == "int8":
        return columns * (padded + 4) + 4 * n + 4 * k
    return columns * padded // 2 + 4 * n * -(-k // GROUP) + 4 * k
