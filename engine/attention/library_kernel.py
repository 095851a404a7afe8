"""Shared parts of the library backends: step metadata in their form, made once per step, and writing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch

from .context import AttentionCall, Lengths, StepContext
from .torch_kernel import TorchKernel


@dataclass(frozen=True, slots=True, eq=False)
class SequenceGroup:
    """The decodes of a step, or its longer chunks: n sequences with consecutive tokens in the batch.

    Tensors are int32, contiguous and on the device. `tables` are by number, as in the step, and made on first use.
    """

    step: StepContext
    rows: slice  # of the step's chunks
    tokens: slice  # of the batch
    q_lens: Lengths  # [n], host
    kv_lens: Lengths  # [n], host
    lens: torch.Tensor  # [n], tokens of each sequence
    q_starts: torch.Tensor  # [n + 1], starts of the sequences among the part's tokens
    kv_starts: torch.Tensor  # [n + 1], sums of `lens`
    tables: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def max_q(self) -> int:
        """The most tokens of a sequence in the batch."""
        return int(self.q_lens.max())

    @property
    def max_kv(self) -> int:
        """The most tokens of a sequence."""
        return int(self.kv_lens.max())

    def table(self, number: int) -> torch.Tensor:
        """int32 [n, W]: block ids."""
        if number not in self.tables:
            self.tables[number] = self.step.tables[number][self.rows].to(torch.int32)
        return self.tables[number]


class LibraryKernel(ABC):
    """An `AttentionKernel` by a library's functions.

    On the device it keeps only the last step's metadata, unless a subclass says otherwise.
    """

    name: ClassVar[str]
    captures: ClassVar[bool] = False

    def __init__(self, library: Any) -> None:
        self._library = library
        self._parts: tuple[StepContext, list[SequenceGroup]] | None = None

    @staticmethod
    @abstractmethod
    def load() -> Any:
        """The library's module. Raises ImportError if it is not installed or lacks a function."""

    @abstractmethod
    def attend_part(self, call: AttentionCall, part: SequenceGroup, query: torch.Tensor) -> torch.Tensor:
        """[tokens of the part, num_heads, v_head_dim]. `query` holds only the part's tokens, with a last stride of 1."""

    def release_buffers(self) -> None:
        """Drop the last step's metadata."""
        self._parts = None

    def write(self, call: AttentionCall) -> None:
        """See `AttentionKernel.write`: by Triton if it is installed."""
        write = _triton_write() if call.key.is_cuda else None
        (_PLAIN.write if write is None else write)(call)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `AttentionKernel.attend`. Reads K and V only from the arena."""
        if self._parts is None or self._parts[0] is not call.step:
            self._parts = (call.step, _parts(call.step))
        query = call.dense_query
        outs = [self.attend_part(call, part, query[part.tokens]) for part in self._parts[1]]
        num_padding = len(query) - sum(len(out) for out in outs)
        if num_padding:
            outs.append(query.new_zeros(num_padding, query.shape[1], call.cache.value.shape[-1]))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


_PLAIN = TorchKernel()


@lru_cache(maxsize=1)
def _triton_write() -> Callable[[AttentionCall], None] | None:
    try:
        from .triton_write import write
    except ImportError:
        return None
    return write


def _parts(step: StepContext) -> list[SequenceGroup]:
    """The step's decodes and its other chunks, if any, built on the device."""
    ends = np.cumsum(step.q_lens)
    if not np.array_equal(step.q_starts, ends - step.q_lens):
        raise ValueError("the tokens of a batch must lie behind each other, in the order of its chunks")
    parts = []
    for low, high in ((0, step.num_decodes), (step.num_decodes, len(ends))):
        if low == high:
            continue
        lens, bounds = step.lens[low:high].clone(), step.bounds[low : high + 1]  # libraries need it aligned
        kv_starts = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
        tokens = slice(int(step.q_starts[low]), int(ends[high - 1]))
        q_lens, kv_lens = step.q_lens[low:high], step.kv_lens[low:high]
        parts.append(SequenceGroup(step, slice(low, high), tokens, q_lens, kv_lens, lens, bounds - bounds[:1], kv_starts))
    return parts
