"""The layers of a model on a CPU: linear layers, packed or quantized, and native kernels in place of modules."""

from typing import Literal

# The forms of quantized weights.
Quantization = Literal["int8", "int4"]
