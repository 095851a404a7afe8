"""The modelled time of a step: the roofline of a named GPU and model.

    step = max(FLOPs / peak, bytes / bandwidth) + overhead

FLOPs: two for each multiplied weight and token, the output layer's for sampled positions alone, and attention, 4 for each
query channel and position attended. Bytes: all multiplied weights once a step, the K and V of what each chunk attends once,
those of what it computes written. No step overlaps another; the scheduler's own time is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagetide.scheduler.plan import Plan


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peaks as in the data sheet, dense."""

    flops: float  # per second, in the model's type
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder's shape; 2 bytes a number."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False  # whether the output layer is the embedding

    @property
    def weights_bytes(self) -> int:
        """All weights."""
        return 2 * (self.layer_weights + self.head_weights * (1 if self.tied else 2))

    @property
    def layer_weights(self) -> int:
        """Weights of all layers: each is multiplied once for each token."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def head_weights(self) -> int:
        """Weights of the output layer."""
        return self.hidden * self.vocab

    @property
    def kv_bytes(self) -> int:
        """K and V of one token."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


H100 = Gpu(989e12, 3.35e12)
H200 = Gpu(989e12, 4.8e12)
RTX_4090 = Gpu(165e12, 1.008e12)
LLAMA_1B = Model(16, 2048, 8192, 32, 8, 64, 128256, tied=True)  # Llama-3.2-1B
LLAMA_8B = Model(32, 4096, 14336, 32, 8, 128, 128256)  # Llama-3.1-8B
QWEN3_4B = Model(36, 2560, 9728, 32, 8, 128, 151936, tied=True)
QWEN3_14B = Model(40, 5120, 17408, 40, 8, 128, 151936)
GEMMA_4B = Model(34, 2560, 10240, 8, 4, 256, 262208)  # Gemma-3-4B


@dataclass(frozen=True, slots=True)
class Roofline:
    """A GPU with a model on it. `reached` is the share of both peaks that kernels get to."""

    gpu: Gpu
    model: Model
    reached: float = 1.0
    overhead_s: float = 1e-3

    def step_s(self, tokens: int, samples: int, attended: int, before: int) -> float:
        """`attended`: positions that the step's tokens attend, `before`: tokens of which it reads K and V."""
        model = self.model
        flops = 2 * (model.layer_weights * tokens + model.head_weights * samples)
        flops += 4 * model.layers * model.heads * model.head_dim * attended
        moved = 2 * (model.layer_weights + model.head_weights) + model.kv_bytes * (before + 2 * tokens)
        flops_s, moved_s = flops / (self.gpu.flops * self.reached), moved / (self.gpu.bytes_per_s * self.reached)
        return max(flops_s, moved_s) + self.overhead_s

    def plan_s(self, plan: Plan) -> float:
        """Seconds that the plan takes, but for copies to and from the host."""
        if not len(plan.rows):
            return self.overhead_s
        attended = int(plan.starts @ plan.lengths) + (int(plan.lengths @ plan.lengths) + plan.num_tokens) // 2
        return self.step_s(plan.num_tokens, int(np.count_nonzero(plan.samples)), attended, int(plan.starts.sum()))
