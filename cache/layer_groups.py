"""Groups of layers: what part of a sequence their attention still reads, and the block tables that hold their K and V.

    full        a token reads all tokens up to its own
    window      the last `window` tokens, its own included
    chunked     those since the last multiple of `window`
    state       the state behind the token before: what recurrent and convolution layers keep instead of K and V

All blocks of a pool have one size, so that any block can serve any group and no memory is split between groups. A
group with more layers than a block holds therefore has several tables, with entries that come and go together:

    34 layers, 29 of them with a window, 5 to a block:   1 table of the full layers, 6 tables of the others

A state lies in as many blocks as it has bytes for, whatever the length of the sequence.

docs/decisions/0053-groups-of-layers.md and 0060-states.md give the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

_MOST_TABLES = 16
_COST_OF_TABLE = 0.02  # a table costs bookkeeping: worth as much as so much more memory

_Positions = TypeVar("_Positions", int, npt.NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers that read the same part of a sequence: the last `window` tokens (None: all), or, if `chunked`, those since
    the last multiple of `window`. Raises ValueError.

    With `is_state`, the layers that have a state behind each token, of which the next token reads the newest: a sequence has
    one, in `num_tables` blocks.
    """

    num_tables: int = 1
    window: int | None = None
    chunked: bool = False
    is_state: bool = False

    def __post_init__(self) -> None:
        if self.num_tables < 1 or (self.window is not None and self.window < 1) or (self.chunked and not self.window):
            raise ValueError(f"a group has tables, and a window of at least 1 token or none: {self}")

    def first_read(self, positions: _Positions) -> _Positions:
        """The first token that the tokens from each of `positions` on read."""
        if self.window is None:
            return positions * 0
        if self.chunked:
            return positions - positions % self.window
        first = positions - (self.window - 1)
        return first * (first > 0)

    def most_columns(self, block_size: int) -> int | None:
        """The most blocks of a table that a token reads, its own block included; None for a group without a window."""
        if self.window is None:
            return None
        if self.is_state:
            return 1
        return -(-self.window // block_size) if self.chunked else -(-(self.window - 1) // block_size) + 1


def state_group(num_blocks: int) -> LayerGroup:
    """The group of layers with states, of which those of a sequence take `num_blocks` blocks: a token reads the state behind
    the one before it.
    """
    return LayerGroup(num_blocks, window=2, is_state=True)


def blocks_to_hold(groups: Sequence[LayerGroup], columns: int, block_size: int) -> int:
    """Blocks in all tables together that a sequence of `columns` blocks of tokens holds after its last one is computed."""
    return sum(group.num_tables * min(columns, group.most_columns(block_size) or columns) for group in groups)


def most_columns_in(groups: Sequence[LayerGroup], num_blocks: int, block_size: int, most: int) -> int:
    """The longest sequence, in blocks of tokens and up to `most`, that `num_blocks` hold."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if blocks_to_hold(groups, middle, block_size) <= num_blocks else (low, middle - 1)
    return low


def split_into_tables(sizes: Sequence[Sequence[int]]) -> list[list[int]]:
    """For the layers of each group, of which `sizes` gives the bytes per token, the number of the group's table each is in.

    Every table gets consecutive layers. Blocks are as large as the largest table, so they are chosen to waste little: of the
    sizes at which some group fills its tables, the one with the least memory in all tables together, where each table counts as
    _COST_OF_TABLE of it. A single group has one table.
    """
    if len(sizes) == 1:
        return [[0] * len(sizes[0])]
    total = sum(map(sum, sizes))
    candidates = {_least_size(group, parts) for group in sizes for parts in range(1, min(len(group), _MOST_TABLES) + 1)}
    best: tuple[float, list[list[int]]] | None = None
    for size in sorted(candidates, reverse=True):
        if size < max(map(max, sizes)):
            continue
        tables = [_filled(group, size) for group in sizes]
        number = sum(of_group[-1] + 1 for of_group in tables)
        cost = number * size / total + number * _COST_OF_TABLE
        if best is None or cost < best[0]:
            best = cost, tables
    assert best is not None, "a block that holds the largest group is a candidate"
    return best[1]


def _least_size(sizes: Sequence[int], parts: int) -> int:
    """The smallest block that holds `sizes`, in their order, in `parts` tables."""
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _filled(sizes, middle)[-1] < parts else (middle + 1, high)
    return low


def _filled(sizes: Sequence[int], block: int) -> list[int]:
    """The table of each layer, if every table takes what fits into a block."""
    tables, table, used = [], 0, 0
    for size in sizes:
        if used + size > block:
            table, used = table + 1, 0
        used += size
        tables.append(table)
    return tables
