"""The context of every part: sizes, the device, the random model, and results of earlier parts."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

_AHEAD_CYCLES = 20_000_000  # about 10 ms, in which the host puts a whole measurement in the queue


class DeviceClock:
    """Measures on `device`, "cuda" or "cpu"."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], repeats: int, warm: int = 2) -> list[float]:
        """Seconds that the device takes for each of `repeats` calls, the host's part of them hidden where it can be."""
        for _ in range(warm):
            run()
        self.synchronize()
        if not self.cuda:
            return [timed(run) for _ in range(repeats)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        torch.cuda._sleep(_AHEAD_CYCLES)
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        self.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] of host memory, pinned for CUDA, every page touched."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.cuda).fill_(1)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] on the device, random."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device).random_(256)

    def free_bytes(self) -> int:
        """Free bytes of the device, as its driver reports them; without CUDA, available host memory."""
        return int(torch.cuda.mem_get_info(self.device)[0] if self.cuda else psutil.virtual_memory().available)

    def release(self) -> None:
        """Give back what torch keeps for later."""
        if self.cuda:
            torch.cuda.empty_cache()


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call, by the host."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    dtype: str
    rows: int  # that decode together
    context: int  # of each of them, halfway
    new_tokens: int  # that they decode
    prompt: int  # tokens before a first token that is waited for
    attention_context: int  # of the rows of paged attention alone
    repeats: int
    copy_bytes: int  # of one large copy
    pinned_bytes: int  # of one large copy to or from the host, and of a swap
    kv_bytes: int  # of the pool in which the model decodes
    recall_bytes: int
    recall_rounds: int
    recall_context: int  # of the rows that fill what is recalled
    steps: int  # of a pool at rest, for its p99
    external_bytes: int
    capacity_bytes: int | None  # of a test device; None: the real one

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.item_bytes

    @property
    def item_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of the weights that a step reads: all but the embedding's, of which it reads a row for each token."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.item_bytes * (self.layers * layer + self.hidden + self.vocab * self.hidden)


REAL = Scale(
    hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256, dtype="bfloat16",
    rows=64, context=1024, new_tokens=128, prompt=4096, attention_context=4096, repeats=20, copy_bytes=4 * GIB,
    pinned_bytes=GIB, kv_bytes=16 * GIB, recall_bytes=GIB, recall_rounds=5, recall_context=1024, steps=300,
    external_bytes=60 * GIB, capacity_bytes=None,
)  # fmt: skip
TINY = Scale(
    hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=512, dtype="float32",
    rows=3, context=40, new_tokens=6, prompt=48, attention_context=48, repeats=2, copy_bytes=MIB,
    pinned_bytes=4 * MIB, kv_bytes=16 * MIB, recall_bytes=4 * MIB, recall_rounds=1, recall_context=512, steps=8,
    external_bytes=64 * MIB, capacity_bytes=16 * GIB,
)  # fmt: skip


@dataclass
class Bench:
    """One run. `ends_at` (time.monotonic) changes from part to part; `known` grows with what is measured, by name."""

    clock: DeviceClock
    scale: Scale
    folder: str  # for the model
    seed: int = 0
    memory_s: float = 40.0  # for which an external process takes and returns memory
    attention: str | None = None  # the engine's kernel, in place of the one it chooses
    overlap: bool | None = None  # whether it begins steps ahead; None: as it does by itself
    cuda_graphs: bool = True
    ends_at: float = float("inf")
    known: dict[str, float] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds of the part's time box."""
        return self.ends_at - time.monotonic()

    @cached_property
    def saved_model(self) -> str:
        """The folder of a random Llama that ends no text. Engines read it, and own what they read."""
        if not (Path(self.folder) / "config.json").exists():
            self._random_model().save_pretrained(self.folder)
            self.clean()
        return self.folder

    def model(self) -> Any:
        """That model on the device, as transformers loads it."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.saved_model, dtype=getattr(torch, self.scale.dtype))
        return model.to(self.clock.device).eval().requires_grad_(False)

    def _random_model(self) -> Any:
        from transformers import AutoModelForCausalLM, LlamaConfig

        scale = self.scale
        config = LlamaConfig(
            hidden_size=scale.hidden, intermediate_size=scale.intermediate, num_hidden_layers=scale.layers,
            num_attention_heads=scale.heads, num_key_value_heads=scale.kv_heads, head_dim=scale.head_dim,
            vocab_size=scale.vocab, max_position_embeddings=131072, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(self.seed)
        with torch.device(self.clock.device):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, scale.dtype))
        model.generation_config.pad_token_id = 0
        return model

    def prompts(self, count: int, length: int, seed: int = 0) -> list[list[int]]:
        """Random prompts; others for another `seed`."""
        rng = np.random.default_rng([self.seed, seed])
        return rng.integers(1, self.scale.vocab, (count, length)).tolist()

    def clean(self) -> None:
        """Let go of what a part left."""
        gc.collect()
        self.clock.release()
