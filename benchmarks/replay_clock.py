"""The modelled time of a step: the roofline of a named GPU and model.

    computing = max(FLOPs / peak, bytes / bandwidth) + overhead + what moving blocks and mapping memory take
    copying   = bytes to and from the host / the link's bandwidth

FLOPs: two for each multiplied weight and token, the output layer's for sampled positions alone, and attention, 4 for each
query channel and position attended. Bytes: all multiplied weights once a step, the K and V of what each chunk attends once,
those of what it computes written. No step overlaps another; the scheduler's own time is not in it. Copies that a step's own
chunks depend on come before its computing; the others run beside it, and the longer of the two counts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pagetide.cache.block_table import Index
from pagetide.scheduler.plan import NO_ROWS, Plan

MEMORY_USED = 0.9  # of the GPU's: weights and the pool


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peaks as in the data sheet, dense. Extent costs are those published for 112 MiB on an H100.

    The link to the host is taken at about four fifths of what its generation of PCIe has on paper in one direction (64 GB/s
    with 16 lanes of the fifth), for copies out and in together.
    """

    name: str
    flops: float  # per second, in the model's type
    bytes_per_s: float
    memory_bytes: float
    host_bytes_per_s: float
    map_s: float = 140e-6  # an extent: create, map, set access
    unmap_s: float = 127e-6  # an extent: unmap, release


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder's shape; 2 bytes a number."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

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
    def weight_bytes(self) -> int:
        """Of all weights, the embeddings included."""
        return 2 * (self.layer_weights + 2 * self.head_weights)

    @property
    def kv_bytes(self) -> int:
        """K and V of one token."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


GPUS = {
    "h200": Gpu("NVIDIA H200 SXM", 989e12, 4.8e12, 141e9, 50e9),
    "h100": Gpu("NVIDIA H100 SXM", 989e12, 3.35e12, 80e9, 50e9),
    "a100": Gpu("NVIDIA A100 SXM 80 GB", 312e12, 2.039e12, 80e9, 25e9),
}
MODELS = {
    "llama-3.1-8b": Model("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256),
    "qwen3-4b": Model("Qwen3-4B", 36, 2560, 9728, 32, 8, 128, 151936),
    "gemma-3-4b": Model("Gemma-3-4B", 34, 2560, 10240, 8, 4, 256, 262208),
}


@dataclass(frozen=True, slots=True)
class Roofline:
    """`gpus` of a kind as one, with a model on them. `reached` is the share of both peaks that kernels get to.

    Several are as one of so many times the peaks and the memory: what they tell each other costs nothing.
    """

    gpu: Gpu
    model: Model
    gpus: int = 1
    reached: float = 1.0
    overhead_s: float = 1e-3

    def block_bytes(self, block_size: int) -> int:
        """Of K and V of a block of so many tokens."""
        return block_size * self.model.kv_bytes

    @property
    def host_bytes_per_s(self) -> float:
        """Of copies to and from the host, of all GPUs together."""
        return self.gpus * self.gpu.host_bytes_per_s

    def blocks_that_fit(self, block_size: int) -> int:
        """Blocks of a pool in MEMORY_USED of the memory, less the weights; below 1 where these do not fit."""
        memory_bytes = MEMORY_USED * self.gpus * self.gpu.memory_bytes
        return int((memory_bytes - self.model.weight_bytes) // self.block_bytes(block_size))

    def parameters(self) -> dict[str, Any]:
        """All that its seconds depend on."""
        model = self.model
        return {
            "gpu": asdict(self.gpu),
            "gpus": self.gpus,
            "model": asdict(model)
            | {
                "dtype": "bfloat16",
                "multiplied_weights": model.layer_weights + model.head_weights,
                "weight_bytes": model.weight_bytes,
                "kv_bytes_per_token": model.kv_bytes,
            },
            "share_of_peaks_reached": self.reached,
            "overhead_s_per_step": self.overhead_s,
            "share_of_memory_used": MEMORY_USED,
            "computing_s": "max(FLOPs / (peak x reached), bytes / (bandwidth x reached)) + overhead + moves + maps",
            "copying_s": "bytes to and from the host / (gpus x host bandwidth); added, or beside computing, as the plan says",
        }

    def __str__(self) -> str:
        gpu, model = self.gpu, self.model
        return (
            f"{self.gpus} x {gpu.name} ({gpu.flops / 1e12:,.0f} TFLOP/s, {gpu.bytes_per_s / 1e12:g} TB/s and "
            f"{gpu.memory_bytes / 1e9:g} GB each, {self.reached:.0%} of the peaks reached), {model.name} in bfloat16 "
            f"({model.layers} layers, hidden {model.hidden:,}, FFN {model.ffn:,}, {model.heads} heads over "
            f"{model.kv_heads} KV heads of {model.head_dim}, vocabulary {model.vocab:,}: {model.weight_bytes / 1e9:.1f} GB of "
            f"weights, {model.kv_bytes / 1024:g} KiB of K and V a token); "
            f"step = max(FLOPs / peak, bytes / bandwidth) + {self.overhead_s * 1e3:g} ms"
        )


class ReplayClock:
    """Seconds of plans over blocks of `block_size` tokens, which come in the order of their steps.

    A block that is moved or copied has `block_bytes` (None: K and V of all layers). Attention is that of full layers: windows
    read less.
    """

    def __init__(self, roofline: Roofline, block_size: int, block_bytes: int | None = None) -> None:
        gpu, model = roofline.gpu, roofline.model
        self._gpu = gpu
        self._overhead_s = roofline.overhead_s
        self._flops = gpu.flops * roofline.reached * roofline.gpus
        self._bytes_per_s = gpu.bytes_per_s * roofline.reached * roofline.gpus
        self._host_bytes_per_s = roofline.host_bytes_per_s
        self._token_flops, self._sample_flops = 2 * model.layer_weights, 2 * model.head_weights
        self._attended_flops = 4 * model.layers * model.heads * model.head_dim
        self._read_bytes = 2 * (model.layer_weights + model.head_weights)
        self._kv_bytes = model.kv_bytes
        self._block_bytes = block_bytes or roofline.block_bytes(block_size)
        self._decoding: Index = NO_ROWS  # the rows of the last plan, if each computed and sampled one token
        self._before = 0  # tokens computed before that plan, of all its rows

    def step_s(self, plan: Plan) -> float:
        """Seconds that the plan takes, less what `copy_s` says."""
        seconds, chunks = self._overhead_s, len(plan.rows)
        if chunks:
            if plan.rows is self._decoding:  # the very same array, as plans' are never written again: each has one more
                before = self._before = self._before + chunks
                tokens = samples = chunks
                attended = before + chunks
            else:
                before = int(plan.starts.sum())
                tokens, samples = plan.num_tokens, int(np.count_nonzero(plan.samples))
                attended = int(plan.starts @ plan.lengths) + (int(plan.lengths @ plan.lengths) + tokens) // 2
                self._decoding = plan.rows if tokens == samples == chunks else NO_ROWS
                self._before = before
            flops = self._token_flops * tokens + self._sample_flops * samples + self._attended_flops * attended
            moved = self._read_bytes + self._kv_bytes * (before + 2 * tokens)
            seconds += max(flops / self._flops, moved / self._bytes_per_s)
        if plan.resize:
            seconds += len(plan.resize.map) * self._gpu.map_s + len(plan.resize.unmap) * self._gpu.unmap_s
        if plan.copies is not None:
            seconds += self._moving_s(len(plan.copies.sources))
        return seconds

    def copy_s(self, plan: Plan) -> tuple[float, float]:
        """Seconds that the plan's copies to and from the host take by themselves: before its chunks, and beside them."""
        swaps = plan.swaps
        if swaps is None:
            return 0.0, 0.0
        each_s = self._block_bytes / self._host_bytes_per_s
        before_s = swaps.num_before * each_s
        if swaps.back is not None:
            before_s += self._moving_s(len(swaps.back.sources))
        return before_s, (len(swaps.out_slots) - swaps.num_before + len(swaps.in_slots)) * each_s

    def _moving_s(self, num_blocks: int) -> float:
        """Of copies within the GPU: read and written."""
        return num_blocks * 2 * self._block_bytes / self._bytes_per_s
