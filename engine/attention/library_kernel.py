"""What the backends on attention libraries share: a step's metadata in their form, made once, and writing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch

from .context import LayerCache, Lengths, StepContext
from .torch_kernel import TorchKernel


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores are made of queries and keys."""

    scaling: float
    window: int | None  # keys that a query sees, its own among them
    softcap: float | None
    sinks: torch.Tensor | None  # [num_heads]

    @property
    def left(self) -> int | None:
        """Keys that a query sees before its own: how libraries count a window."""
        return None if self.window is None else self.window - 1


@dataclass(frozen=True, slots=True, eq=False)
class SequenceGroup:
    """The decodes of a step, or its longer chunks: n sequences whose tokens lie behind each other in the batch.

    Tensors are int32, contiguous and on the device; `tables` are per group, as the step's, and made when first asked for.
    """

    step: StepContext
    rows: slice  # of the step's chunks
    tokens: slice  # of the batch
    q_lens: Lengths  # [n], host
    kv_lens: Lengths  # [n], host
    lens: torch.Tensor  # [n], tokens of each sequence
    q_starts: torch.Tensor  # [n + 1], of each sequence's tokens among the part's
    kv_starts: torch.Tensor  # [n + 1], sums of `lens`
    tables: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def max_q(self) -> int:
        """Most tokens of a sequence in the batch."""
        return int(self.q_lens.max())

    @property
    def max_kv(self) -> int:
        """Most tokens of a sequence."""
        return int(self.kv_lens.max())

    def table(self, group: int) -> torch.Tensor:
        """int32 [n, W]: block ids."""
        if group not in self.tables:
            self.tables[group] = self.step.tables[group][self.rows].to(torch.int32)
        return self.tables[group]


class LibraryKernel(ABC):
    """`Kernel` by a library's functions. `library` is the module that has them: `load` imports it.

    Keeps nothing on the device but what belongs to the last step, unless a subclass says so.
    """

    name: ClassVar[str]
    captures: ClassVar[bool] = False

    def __init__(self, library: Any) -> None:
        self._library = library
        self._parts: tuple[StepContext, list[SequenceGroup]] | None = None

    @staticmethod
    @abstractmethod
    def load() -> Any:
        """The library's module. Raises ImportError where it is not installed, or lacks what is called."""

    @abstractmethod
    def attend_part(
        self, query: torch.Tensor, cache: LayerCache, part: SequenceGroup, scoring: Scoring
    ) -> torch.Tensor:
        """[tokens of the part, num_heads, v_head_dim]. `query` is the part's, with a last stride of 1."""

    def release_buffers(self) -> None:
        """Drop what was made for the last step."""
        self._parts = None

    def write(self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, step: StepContext) -> None:
        """See `Kernel.write`: by Triton where it is installed."""
        write = _triton_write() if key.is_cuda else None
        if write is None:
            _PLAIN.write(key, value, cache, step)
        else:
            write(key, value, cache.key, cache.value, step.write_blocks[cache.group], step.write_offsets)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        step: StepContext,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `Kernel.attend`. Raises ValueError for a window of less than one token. K and V are read from the arena alone."""
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"a sliding window must be at least 1 token, got {sliding_window}")
        if self._parts is None or self._parts[0] is not step:
            self._parts = (step, _parts(step))
        scoring = Scoring(scaling, sliding_window, softcap, sinks)
        query = query if query.stride(-1) == 1 else query.contiguous()
        outs = [self.attend_part(query[part.tokens], cache, part, scoring) for part in self._parts[1]]
        num_padding = len(query) - sum(len(out) for out in outs)
        if num_padding:
            outs.append(query.new_zeros(num_padding, query.shape[1], cache.value.shape[-1]))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


_PLAIN = TorchKernel()


@lru_cache(maxsize=1)
def _triton_write() -> Callable[..., None] | None:
    try:
        from .triton_write import write
    except ImportError:
        return None
    return write


def _parts(step: StepContext) -> list[SequenceGroup]:
    """The step's decodes and its other chunks, as far as there are any; made on the device of what is there."""
    ends = np.cumsum(step.q_lens)
    if not np.array_equal(step.q_starts, ends - step.q_lens):
        raise ValueError("the tokens of a batch must lie behind each other, in the order of its chunks")
    parts = []
    for low, high in ((0, step.num_decodes), (step.num_decodes, len(ends))):
        if low == high:
            continue
        lens, bounds = step.lens[low:high].clone(), step.bounds[low : high + 1]  # libraries want it aligned
        kv_starts = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
        tokens = slice(int(step.q_starts[low]), int(ends[high - 1]))
        q_lens, kv_lens = step.q_lens[low:high], step.kv_lens[low:high]
        parts.append(
            SequenceGroup(step, slice(low, high), tokens, q_lens, kv_lens, lens, bounds - bounds[:1], kv_starts)
        )
    return parts
