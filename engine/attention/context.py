"""The attention metadata of a step: each chunk's tokens, where their K and V are written, and the cached blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ...cache.storage import LayerCache as LayerCache  # kernels import it from here
from .backends import AttentionSpec

Lengths = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """One packed batch of n chunks and T tokens. Immutable; valid for one forward pass.

    Chunk i holds tokens `q_starts[i] .. q_starts[i] + q_lens[i]` of the batch: token j is at position
    `kv_lens[i] - q_lens[i] + j` of its sequence. The first `num_decodes` chunks have one token each. Host arrays are
    for planning; tensors are on the device. In a step captured in a CUDA graph, the host's `kv_lens` are upper bounds,
    and a chunk with length 0 on the device is padding. On a CPU, tokens after the last chunk are padding: their K and V
    go to the null block.
    """

    layers: Sequence[LayerCache]
    kernel: AttentionKernel
    q_starts: Lengths  # [n], host
    q_lens: Lengths  # [n], host
    kv_lens: Lengths  # [n], host
    num_decodes: int
    lens: torch.Tensor  # int32 [n], `kv_lens` on the device
    # int32 [n + 1], `q_starts` on the device, and the end of the last chunk
    bounds: torch.Tensor
    # Each int64 [n, W] block ids, W covers the longest; what is not read is block 0
    tables: tuple[torch.Tensor, ...]
    write_blocks: tuple[torch.Tensor, ...]  # per table: int64 [T], the block each token's K and V go to
    write_offsets: torch.Tensor  # int64 [T], the token's place within that block
    block_size: int
    bounded: bool = False  # `kv_lens` are upper bounds
    beat: Callable[[], None] = lambda: None  # called at each layer: see `common/heartbeat.py`
    states: Any = None  # of layers with states: a StepStates of states.py, which imports this module
    _in_chunks: dict[int, StepContext] = field(default_factory=dict)

    def in_chunks(self, size: int) -> StepContext:
        """The same tokens for layers in which a token reads those since the last multiple of `size`, a multiple of blocks.

        They are chunks of sequences that begin at such a multiple: tables begin there, and lengths count from there. A chunk
        that crosses one is several. Made once; writes are those of this step.
        """
        if size not in self._in_chunks:
            self._in_chunks[size] = self._made_in_chunks(size)
        return self._in_chunks[size]

    def _made_in_chunks(self, size: int) -> StepContext:
        starts = self.kv_lens - self.q_lens
        if self.bounded:  # decodes, of which only the device knows the lengths
            owners = np.arange(len(starts))
            parts: dict[str, Any] = {"kv_lens": np.minimum(self.kv_lens, size)}
            lens = torch.where(self.lens > 0, (self.lens - 1) % size + 1, 0)
            first_columns = ((self.lens - lens) // self.block_size).long()
        else:
            numbers = np.maximum((self.kv_lens - 1) // size - starts // size, 0) + 1  # parts of each chunk
            owners = np.repeat(np.arange(len(starts)), numbers)
            places = np.arange(len(owners)) - (np.cumsum(numbers) - numbers)[owners]
            origins = (starts[owners] // size + places) * size
            begins = np.maximum(starts[owners], origins)
            ends = np.minimum(self.kv_lens[owners], origins + size)
            kv_lens, q_lens = (ends - origins).astype(np.int32), (ends - begins).astype(np.int32)
            q_starts = self.q_starts[owners] + (begins - starts[owners])
            parts = {"q_starts": q_starts, "q_lens": q_lens, "kv_lens": kv_lens}
            there = torch.from_numpy(np.concatenate((kv_lens, q_starts, origins // self.block_size)).astype(np.int32))
            lens, bounds, first_columns = there.to(self.lens.device).split(len(owners))
            parts["bounds"] = torch.cat((bounds, self.bounds[-1:]))
        width = min(self.tables[0].shape[1], -(-size // self.block_size))
        columns = first_columns.long()[:, None] + torch.arange(width, device=lens.device)
        read = torch.arange(width, device=lens.device) * self.block_size < lens[:, None]
        columns = torch.where(read, columns, 0)
        at = torch.from_numpy(owners).to(lens.device)
        tables = tuple(table[at].gather(1, columns) * read for table in self.tables)
        return replace(self, **parts, lens=lens.int(), tables=tables, _in_chunks={})


def lengths_on(device: torch.device | str, q_lens: Lengths, kv_lens: Lengths) -> dict[str, Any]:
    """`lens` and `bounds` of a step with consecutive chunks."""
    both = np.concatenate((kv_lens, [0], np.cumsum(q_lens))).astype(np.int32)
    there = torch.from_numpy(both).to(device)
    return {"lens": there[: len(kv_lens)], "bounds": there[len(kv_lens) :]}


@dataclass(slots=True, eq=False)
class AttentionCall:
    """One layer's attention in one step: the batch's tokens, the layer's cache, and how scores become weights.

    Not to be changed. It is not frozen because one is made per layer and step, and a frozen one takes several times as long.
    Raises ValueError for a window below one token.
    """

    query: torch.Tensor  # [T, num_heads, head_dim]
    key: torch.Tensor  # [T, num_kv_heads, head_dim], the batch's own
    value: torch.Tensor  # [T, num_kv_heads, v_head_dim]
    cache: LayerCache
    step: StepContext
    scaling: float  # of the products of query and key
    window: int | None = None  # keys visible to a query, including its own
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: torch.Tensor | None = None  # [num_heads], the logit of one more key per head, without a value

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"a sliding window must be at least 1 token, got {self.window}")

    @property
    def dense_query(self) -> torch.Tensor:
        """`query` with a last stride of 1, copied if it has another."""
        return self.query if self.query.stride(-1) == 1 else self.query.contiguous()

    @property
    def left(self) -> int | None:
        """Visible keys before a query's own, as libraries count a window."""
        return None if self.window is None else self.window - 1

    @property
    def spec(self) -> AttentionSpec:
        """What the call needs of a backend."""
        (num_heads, head_dim), (num_kv_heads, v_head_dim) = self.query.shape[1:], self.cache.value.shape[2:]
        has_sinks = self.sinks is not None
        return AttentionSpec(num_heads, num_kv_heads, head_dim, v_head_dim, self.window, self.softcap, has_sinks)


class AttentionKernel(Protocol):
    """Attention through block tables. An instance belongs to one runner and may keep buffers between calls.

    A kernel with `captures` can be captured in a CUDA graph with a step of decodes: its launches depend only on the number of
    rows and on bounds of their lengths. It reads the lengths on the device.
    """

    name: str
    captures: bool

    def write(self, call: AttentionCall) -> None:
        """Write the batch's K and V to the step's `write_blocks` and `write_offsets`, and nowhere else.

        The layer's cache is not aliased. With `v_in_k`, V needs no write of its own. Tokens for block 0 are padding; writing
        them is optional.
        """
        ...

    def attend(self, call: AttentionCall) -> torch.Tensor:  # [T, num_heads, v_head_dim]
        """Attend causally within each sequence: query at position p sees k with p - window < k <= p. Read-only.

        The batch's K and V are already written. Those of the call may be read instead, unless the layer is aliased or
        has scales. Tokens after the last chunk get zeros.
        """
        ...

    def release_buffers(self) -> None:
        """Free what is kept between calls."""
        ...


_step: ContextVar[StepContext | None] = ContextVar("pagetide_step", default=None)


@contextmanager
def running(step: StepContext) -> Iterator[None]:
    """Make `step` the current step, for model families that drop keyword arguments."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def running_step() -> StepContext | None:
    """The current step; None outside of one."""
    return _step.get()


def current(keywords: dict[str, Any]) -> StepContext:
    """The step of this forward pass. Raises RuntimeError outside a step."""
    step = keywords.get("step") or _step.get()
    if step is None:
        raise RuntimeError("pagetide attention was called outside of a pagetide step: use LLM(...), not the model itself")
    return step
