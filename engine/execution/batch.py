"""A step's chunks as one batch: what the host knows of it, what goes to the device, and what attention is told there.

The device keeps, per row, the block tables and the newest token that was sampled. So a step sends of a decode its row, its
length and its token, and of a table only what changed; and a token that no host has seen yet can be the next step's input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...cache.block_table import Index, Int32
from ...cache.geometry import Geometry
from ...cache.storage import LayerCache
from ...scheduler.plan import Plan
from ..attention.context import AttentionKernel, StepContext
from .transfers import Array

ON_ITS_WAY = -1  # in place of a token that was sampled and is not on the host yet


@dataclass(frozen=True, slots=True, eq=False)
class InputBatch:
    """n chunks of T tokens, packed without padding; behind them, if it was asked for, chunks of one token that are nobody's.

    `arrays` go to the device, where `DeviceRows.context` takes them: ids int64 [T], ON_ITS_WAY where the row's newest one
    stands; owners int64 [T], the chunk of each token; positions int64 [T]; rows int64 [n]; lengths with what came before
    int32 [n]; where each chunk begins in the batch, and where the last one ends, int32 [n + 1].
    """

    arrays: tuple[Array, ...]
    q_starts: Index  # [n]
    q_lens: Index  # [n]
    kv_lens: Index  # [n]

    @property
    def num_decodes(self) -> int:
        """Chunks of one token, which come first."""
        return int(np.count_nonzero(self.q_lens == 1))


def pack(tokens: Int32, rows: Index, starts: Index, lengths: Index, padded: int = 0) -> InputBatch:
    """The batch of tokens `starts[i] .. starts[i] + lengths[i]` of `rows[i]`, whose tokens are `tokens[row]`.

    With `padded`, which only a batch of decodes may ask for, so many chunks: those too many have length 0, and no row.
    """
    missing = max(0, padded - len(rows))
    q_lens = np.append(lengths, np.ones(missing, np.int64))
    ends = np.cumsum(q_lens)
    q_starts, kv_lens = ends - q_lens, np.append(starts + lengths, np.zeros(missing, np.int64))
    rows = np.append(rows, np.full(missing, len(tokens)))
    owners = np.repeat(np.arange(len(rows)), q_lens)
    positions = np.arange(len(owners)) + (np.maximum(kv_lens - q_lens, 0) - q_starts)[owners]
    ids = tokens[np.minimum(rows, len(tokens) - 1)[owners], positions].astype(np.int64)
    ids[len(ids) - missing :] = 0
    bounds = np.append(0, ends).astype(np.int32)
    return InputBatch((ids, owners, positions, rows, kv_lens.astype(np.int32), bounds), q_starts, q_lens, kv_lens)


class DeviceRows:
    """What the device keeps of each row: block tables per group, int64 [num_rows + 1, slots], and the newest sampled token,
    int64 [num_rows + 1]. The last row is nobody's: its table has the null block alone, and padding reads it.
    """

    def __init__(self, num_rows: int, max_tokens: int, geometry: Geometry, device: torch.device) -> None:
        self._block_size = geometry.block_size
        shape = (num_rows + 1, geometry.blocks_for_tokens(max_tokens))
        num_groups = 1 + max(layer.group for layer in geometry.layers)
        with torch.inference_mode(False):
            self.tables = tuple(torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(num_groups))
            self.newest = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)

    @property
    def num_slots(self) -> int:
        """Blocks of the longest table there can be."""
        return self.tables[0].shape[1]

    def changes(self, plan: Plan) -> list[Array]:
        """What `follow` needs on the device of a plan's new table entries."""
        return [
            np.stack((update.rows, update.slots, update.blocks)).astype(np.int64, copy=False)
            for update in plan.tables
            if len(update.rows)
        ]

    def follow(self, plan: Plan, changes: Sequence[torch.Tensor]) -> None:
        """Take in the plan's new table entries."""
        changed = [table for table, update in zip(self.tables, plan.tables, strict=False) if len(update.rows)]
        for table, change in zip(changed, changes, strict=True):
            rows, slots, blocks = change.unbind(0)
            table.index_put_((rows, slots), blocks)

    def context(
        self,
        batch: InputBatch,
        there: Sequence[torch.Tensor],
        width: int,
        layers: Sequence[LayerCache],
        kernel: AttentionKernel,
        bounded: bool = False,
    ) -> tuple[StepContext, torch.Tensor, torch.Tensor]:
        """What attention is told, input ids [T] and positions [T], out of a batch whose arrays are `there`.

        Waits for nothing, and reads nothing of the host: so it can be captured. `width` is the slots of the longest chunk's
        table, or more; `bounded` tells that the batch's lengths are bounds.
        """
        ids, owners, positions, rows, lens, bounds = there
        slots = torch.arange(width, device=lens.device) * self._block_size < lens[:, None]  # others are stale
        tables = tuple(table[:, :width].index_select(0, rows) * slots for table in self.tables)
        step = StepContext(
            layers=layers,
            kernel=kernel,
            q_starts=batch.q_starts,
            q_lens=batch.q_lens,
            kv_lens=batch.kv_lens,
            num_decodes=batch.num_decodes,
            lens=lens,
            bounds=bounds,
            tables=tables,
            write_blocks=tuple(table[owners, positions // self._block_size] for table in tables),
            write_offsets=positions % self._block_size,
            block_size=self._block_size,
            bounded=bounded,
        )
        ids = torch.where(ids == ON_ITS_WAY, self.newest[rows][owners], ids)
        return step, ids, positions
