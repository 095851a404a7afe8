"""A step's chunks, in the plan's order, as one batch: its host-side description, the arrays to upload, the attention inputs.

The device keeps, per row, the block tables and the newest sampled token. A decode therefore uploads only its row, length and
token, and a table only its changes. A sampled token can be the next step's input before it reaches the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...cache.block_table import Index, Int32
from ...cache.geometry import Geometry
from ...cache.layer_groups import LayerGroup
from ...cache.storage import LayerCache
from ...scheduler.plan import Plan
from ..attention.context import AttentionKernel, StepContext
from .transfers import Array

ON_ITS_WAY = -1  # placeholder for a sampled token that is not on the host yet


@dataclass(frozen=True, slots=True, eq=False)
class InputBatch:
    """n chunks of T tokens, packed without padding, plus padding chunks of one token at the end if requested.

    `DeviceRows.context` takes the uploaded `arrays`: ids int64 [T], ON_ITS_WAY for the row's newest token; owners int64 [T],
    the chunk of each token; positions int64 [T]; rows int64 [n]; lengths including the cached tokens, int32 [n]; chunk starts
    in the batch and the end of the last chunk, int32 [n + 1].
    """

    arrays: tuple[Array, ...]
    q_starts: Index  # [n]
    q_lens: Index  # [n]
    kv_lens: Index  # [n]

    @property
    def awaits_tokens(self) -> bool:
        """Whether an id is ON_ITS_WAY."""
        return bool(len(self.arrays[0])) and bool(self.arrays[0].min() == ON_ITS_WAY)

    @property
    def num_decodes(self) -> int:
        """The number of chunks of one token, which come first."""
        return len(self.q_lens) if len(self.arrays[0]) == len(self.q_lens) else int(np.count_nonzero(self.q_lens == 1))


def pack(tokens: Int32, rows: Index, starts: Index, lengths: Index, padded: int = 0) -> InputBatch:
    """Pack tokens `starts[i] .. starts[i] + lengths[i]` of each `rows[i]` into a batch. `tokens[row]` are a row's tokens.

    `padded`, for batches of decodes only, is the number of chunks to pad to. Padding chunks have a KV length of 0 and no row.
    """
    num_tokens = int(lengths.sum())
    if num_tokens == len(rows):  # decodes
        bounds = np.arange(len(rows) + 1)
        owners, positions, own_rows = bounds[:-1], starts, rows
    else:
        bounds = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=bounds[1:])
        owners = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(num_tokens) + (starts - bounds[:-1])[owners]
        own_rows = rows[owners]
    ids = tokens.take(own_rows * tokens.shape[1] + positions).astype(np.int64)
    kv_lens = starts + lengths
    if missing := max(0, padded - len(rows)):
        fill = np.zeros(missing, np.int64)
        ids, positions, kv_lens = (np.append(of, fill) for of in (ids, positions, kv_lens))
        rows, lengths = np.append(rows, fill + len(tokens)), np.append(lengths, fill + 1)
        owners, bounds = np.arange(padded), np.append(bounds, num_tokens + 1 + np.arange(missing))
    arrays = (ids, owners, positions, rows, kv_lens.astype(np.int32), bounds.astype(np.int32))
    return InputBatch(arrays, bounds[:-1], lengths, kv_lens)


class DeviceRows:
    """The device's state per row: block tables, each int64 [num_rows + 1, columns], and the newest sampled token, int64
    [num_rows + 1]. The last row is for padding: its table holds only the null block.

    On a CPU the tables are read and changed through numpy, whose operations on small arrays take half the time of torch's. The
    blocks of states are on the host in any case, since layers with states look for them from there.
    """

    def __init__(self, num_rows: int, max_tokens: int, geometry: Geometry, device: torch.device) -> None:
        self._block_size = geometry.block_size
        shape = (num_rows + 1, geometry.columns_for_tokens(max_tokens))
        self._group_of = tuple(group for group in geometry.kv_groups for _ in range(group.num_tables))
        with torch.inference_mode(False):
            self.tables = tuple(torch.zeros(shape, dtype=torch.int64, device=device) for _ in self._group_of)
            # The blocks with each row's states, [num_rows + 1, state_blocks], on the host.
            states = torch.zeros((num_rows + 1, geometry.state_blocks), dtype=torch.int64)
            self.states = states if geometry.state_bytes else None
            self.newest = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
            self._column_starts = torch.arange(shape[1], device=device) * self._block_size  # first positions
        self._windows = {group for group in self._group_of if group.window is not None}
        self._is_host = device.type == "cpu"
        self._on_host = tuple(table.numpy() for table in self.tables) if self._is_host else ()

    @property
    def num_columns(self) -> int:
        """Blocks of the longest possible table."""
        return len(self._column_starts)

    def changes(self, plan: Plan) -> list[Array]:
        """The arrays that `follow` needs on the device for the plan's new table entries; on a CPU none."""
        return (
            []
            if self._is_host
            else [
                np.stack((update.rows, update.columns, update.blocks)).astype(np.int64, copy=False)
                for update in plan.tables[: len(self.tables)]
                if len(update.rows)
            ]
        )

    def follow(self, plan: Plan, changes: Sequence[torch.Tensor]) -> None:
        """Apply the plan's new table entries."""
        if not plan.tables:
            return
        of_kv = plan.tables[: len(self.tables)]
        if self.states is not None:
            (of_states,) = plan.tables[len(self.tables) :]
            self.states.numpy()[of_states.rows, of_states.columns] = of_states.blocks
        if self._is_host:
            for on_host, update in zip(self._on_host, of_kv, strict=True):
                on_host[update.rows, update.columns] = update.blocks
            return
        changed = [table for table, update in zip(self.tables, of_kv, strict=True) if len(update.rows)]
        for table, change in zip(changed, changes, strict=True):
            rows, columns, blocks = change.unbind(0)
            table.index_put_((rows, columns), blocks)

    def context(
        self,
        batch: InputBatch,
        there: Sequence[torch.Tensor],
        width: int,
        layers: Sequence[LayerCache],
        kernel: AttentionKernel,
        beat: Callable[[], None],
        bounded: bool = False,
    ) -> tuple[StepContext, torch.Tensor, torch.Tensor]:
        """The attention context, input ids [T] and positions [T] of a batch, from its uploaded arrays `there`.

        It can be captured. `width` is at least the columns of the longest chunk's table; `bounded` says that the batch's
        lengths are upper bounds.
        """
        ids, owners, positions, rows, lens, bounds = there
        if self._is_host and not bounded:
            tables, write_blocks, write_offsets = self._places_on_host(batch, width)
        else:
            used = self._used_on_device(lens, lens - bounds.diff(), width)
            tables = tuple(
                table[:, :width].index_select(0, rows) * used[group]
                for table, group in zip(self.tables, self._group_of, strict=True)
            )
            write_blocks = tuple(table[owners, positions // self._block_size] for table in tables)
            write_offsets = positions % self._block_size
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
            write_blocks=write_blocks,
            write_offsets=write_offsets,
            block_size=self._block_size,
            bounded=bounded,
            beat=beat,
        )
        if bounded or batch.awaits_tokens:
            ids = torch.where(ids == ON_ITS_WAY, self.newest[rows][owners], ids)
        return step, ids, positions

    def _used_on_device(self, lens: torch.Tensor, starts: torch.Tensor, width: int) -> dict[LayerGroup, torch.Tensor]:
        """Which table entries of each group chunks with these lengths and first tokens read: [n, width]. Others are stale."""
        column_starts = self._column_starts[:width]
        written = column_starts < lens[:, None]
        return {
            group: written & (column_starts >= self._first_used(group, starts)[:, None]) if group.window else written
            for group in set(self._group_of)
        }

    def _first_used(self, group: LayerGroup, starts: Any) -> Any:
        """The first token of the first block that chunks from each of `starts` on read."""
        first = group.first_read(starts)
        return first - first % self._block_size

    def _places_on_host(
        self, batch: InputBatch, width: int
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], torch.Tensor]:
        """`tables`, `write_blocks` and `write_offsets` of the context of a batch."""
        _, owners, positions, rows, _, _ = batch.arrays
        columns = positions // self._block_size
        offsets = positions - columns * self._block_size
        column_starts = np.arange(0, width * self._block_size, self._block_size)
        written = column_starts < batch.kv_lens[:, None]  # other entries are stale
        used = {None: written} | {
            group: written & (column_starts >= self._first_used(group, batch.kv_lens - batch.q_lens)[:, None])
            for group in self._windows
        }
        tables = tuple(
            on_host[rows, :width] * used[group if group.window else None]
            for on_host, group in zip(self._on_host, self._group_of, strict=True)
        )
        blocks = tuple(torch.from_numpy(table[owners, columns]) for table in tables)
        return tuple(map(torch.from_numpy, tables)), blocks, torch.from_numpy(offsets)
