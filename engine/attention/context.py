"""What attention is told about a step: which tokens are whose, where their K and V go, and where the earlier ones lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ...cache.storage import LayerCache as LayerCache  # what kernels are handed; they import it from here

Lengths = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """One packed batch of n chunks and T tokens. Immutable; valid for one forward pass.

    Chunk i holds tokens `q_starts[i] .. q_starts[i] + q_lens[i]` of the batch, the last ones of a sequence that has
    `kv_lens[i]` tokens with them: token j of the chunk stands at position `kv_lens[i] - q_lens[i] + j`. The first
    `num_decodes` chunks have one token each. Host arrays are for planning, tensors lie on the device. Of a step that is
    captured in a CUDA graph the host's `kv_lens` are bounds, and a chunk whose length on the device is 0 is padding. On a CPU
    some tokens behind the last chunk are padding: they belong to no chunk, and their K and V go to the null block.
    """

    layers: Sequence[LayerCache]
    kernel: AttentionKernel
    q_starts: Lengths  # [n], host
    q_lens: Lengths  # [n], host
    kv_lens: Lengths  # [n], host
    num_decodes: int
    lens: torch.Tensor  # int32 [n], `kv_lens` on the device
    bounds: torch.Tensor  # int32 [n + 1], `q_starts` on the device, and where the last chunk ends
    tables: tuple[torch.Tensor, ...]  # per group: int64 [n, W] block ids, W covers the longest; the rest is block 0
    write_blocks: tuple[torch.Tensor, ...]  # per group: int64 [T], the block each token's K and V go to
    write_offsets: torch.Tensor  # int64 [T], the token's place within that block
    block_size: int
    bounded: bool = False  # `kv_lens` are bounds


def lengths_on(device: torch.device | str, q_lens: Lengths, kv_lens: Lengths) -> dict[str, Any]:
    """`lens` and `bounds` of a step whose chunks lie behind each other."""
    both = np.concatenate((kv_lens, [0], np.cumsum(q_lens))).astype(np.int32)
    there = torch.from_numpy(both).to(device)
    return {"lens": there[: len(kv_lens)], "bounds": there[len(kv_lens) :]}


class AttentionKernel(Protocol):
    """One way to attend through block tables. An instance belongs to one runner and may keep buffers between calls.

    One that `captures` can be captured in a CUDA graph with a step of decodes: what it launches then depends on the number of
    rows and on bounds of their lengths; the lengths themselves it reads on the device.
    """

    name: str
    captures: bool

    def write(
        self,
        key: torch.Tensor,  # [T, num_kv_heads, head_dim], the batch's own
        value: torch.Tensor,  # [T, num_kv_heads, v_head_dim]
        cache: LayerCache,  # not aliased
        step: StepContext,
    ) -> None:
        """Write the batch's K and V to the step's `write_blocks` and `write_offsets`, and nowhere else.

        What goes to block 0 is padding: it may be left out.
        """
        ...

    def attend(
        self,
        query: torch.Tensor,  # [T, num_heads, head_dim]
        key: torch.Tensor,  # [T, num_kv_heads, head_dim], the batch's own, already written to the arena
        value: torch.Tensor,  # [T, num_kv_heads, v_head_dim]
        cache: LayerCache,
        step: StepContext,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,  # [num_heads]
    ) -> torch.Tensor:  # [T, num_heads, v_head_dim]
        """Attend causally within each sequence: query at position p sees k with p - window < k <= p. Read-only.

        Tokens behind the last chunk get zeros.
        """
        ...

    def release_buffers(self) -> None:
        """Give back what is kept between calls; the next one makes it anew."""
        ...


_step: ContextVar[StepContext | None] = ContextVar("pagetide_step", default=None)


@contextmanager
def running(step: StepContext) -> Iterator[None]:
    """Make `step` findable for the model families that swallow keyword arguments."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def current(keywords: dict[str, Any]) -> StepContext:
    """The step of this forward pass. Raises RuntimeError outside of one."""
    step = keywords.get("step") or _step.get()
    if step is None:
        raise RuntimeError(
            "pagetide attention was called outside of a pagetide step: use LLM(...), not the model itself"
        )
    return step
