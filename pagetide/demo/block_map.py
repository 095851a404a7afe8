"""The map of a KV pool: which request holds each block, as coloured tiles with a letter for each request."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.segment import Segment
from rich.style import Style

from ..allocator.pool_view import BlockState
from ..frames.cells import FIRST_ROW, SHARED, apply_changes
from ..monitor.view.symbols import Symbols
from ..monitor.view.text import DIM, Line

FREE, CACHED, UNMAPPED = -1, -2, -3
LETTERS = string.ascii_uppercase + string.ascii_lowercase
_COLOURS = (75, 214, 114, 204, 179, 141, 80, 209, 150, 111, 220, 176)  # of 256, light, neighbours unlike
_STYLES = [Style(color="black", bgcolor=f"color({colour})") for colour in _COLOURS]
_CACHED_STYLE = Style(color="color(250)", bgcolor="color(239)")
_FREE_STYLE, _UNMAPPED_STYLE = Style(color="color(245)"), Style(color="color(238)")
_WIDEST, _TALLEST = 6, 3  # cells of a tile
_WIDE_LEGEND = 72


@dataclass(frozen=True, slots=True, eq=False)
class BlockHolders:
    """The holder of each block of a pool at one time: a request's number, or FREE, CACHED or UNMAPPED.

    Without the null block.
    """

    holders: npt.NDArray[np.int16]

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, mapped or not."""
        return len(self.holders)

    @property
    def num_mapped(self) -> int:
        """Blocks with memory."""
        return int(np.count_nonzero(self.holders != UNMAPPED))

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""
        return int(np.count_nonzero(self.holders >= 0))


def holders_of(frame: Mapping[str, Any]) -> BlockHolders:
    """The holders in a full frame with the requests' numbers as labels; of several the one served first."""
    cells = np.zeros(frame["pool"]["num_blocks"], np.uint16)
    apply_changes(frame["cells"], cells)
    labels = {row: int(label) for row, _, label, *_ in frame["rows"]}
    owners = np.full(FIRST_ROW + 1 + max(labels, default=0), FREE, np.int16)
    owners[BlockState.UNMAPPED], owners[BlockState.CACHED] = UNMAPPED, CACHED
    for row, number in labels.items():
        owners[FIRST_ROW + row] = number
    return BlockHolders(owners[cells & ~np.uint16(SHARED)][1:])


def letter_of(number: int) -> str:
    """The letter of request `number`; after 52 requests they repeat."""
    return LETTERS[number % len(LETTERS)]


def style_of(number: int) -> Style:
    """The colour of request `number`; after 12 requests they repeat."""
    return _STYLES[number % len(_STYLES)]


@dataclass(frozen=True, slots=True)
class MapShape:
    """The layout of a map: `columns` tiles a line, each `width` x `height` cells, for `blocks_per_tile` blocks each."""

    columns: int
    width: int
    height: int
    blocks_per_tile: int

    @classmethod
    def of(cls, num_blocks: int, width: int, height: int) -> MapShape:
        """The largest tiles with which `num_blocks` blocks fit into `width` x `height` cells.

        Tiles are preferably twice as wide as high, as cells are higher than wide. With more blocks than cells, a tile is a
        cell for several blocks. All lines but the last are equally long, and the last is as long as possible.
        """
        best: MapShape | None = None
        for tile_width in range(1, min(_WIDEST, width) + 1):
            for tile_height in range(1, _TALLEST + 1):
                lines = -(-num_blocks // (width // tile_width))
                one = cls(-(-num_blocks // lines), tile_width, tile_height, 1)
                if lines * tile_height <= height and (best is None or one._merit > best._merit):
                    best = one
        return best or cls(width, 1, 1, -(-num_blocks // (width * height)))

    @property
    def _merit(self) -> tuple[int, int]:
        return self.width * self.height, -abs(self.width - 2 * self.height)


def map_lines(sample: BlockHolders, width: int, height: int, symbols: Symbols) -> list[Line]:
    """The blocks of `sample` in order, in at most `width` x `height` cells."""
    if width < 1 or height < 1:
        return []
    shape = MapShape.of(sample.num_blocks, width, height)
    tiles = tile_holders(sample.holders, shape.blocks_per_tile)
    lines = []
    for first in range(0, len(tiles), shape.columns):
        line = [_tile(holder, shape.width, symbols) for holder in tiles[first : first + shape.columns]]
        lines += [line] * shape.height
    return lines


def tile_holders(holders: npt.NDArray[np.int16], blocks_per_tile: int) -> list[int]:
    """What each tile shows of its blocks: the most frequent holder, of equals the first in the tile."""
    if blocks_per_tile == 1:
        return [int(holder) for holder in holders]
    tiles = []
    for first in range(0, len(holders), blocks_per_tile):
        blocks = [int(holder) for holder in holders[first : first + blocks_per_tile]]
        tiles.append(max(blocks, key=blocks.count))
    return tiles


def _tile(holder: int, width: int, symbols: Symbols) -> Segment:
    text, style = _mark(holder, symbols)
    return Segment(text.center(width) if width > 2 else text.ljust(width), style)


def _mark(holder: int, symbols: Symbols) -> tuple[str, Style]:
    if holder >= 0:
        return letter_of(holder), style_of(holder)
    return {FREE: (symbols.dot, _FREE_STYLE), CACHED: ("+", _CACHED_STYLE), UNMAPPED: ("_", _UNMAPPED_STYLE)}[holder]


def legend(num_requests: int, width: int, symbols: Symbols) -> Line:
    """What the marks of the map mean, in few words where `width` is small."""
    last = letter_of(min(num_requests, len(LETTERS)) - 1)
    wide = width >= _WIDE_LEGEND
    line: Line = [Segment("A", style_of(0)), Segment(f"-{last} {'held by that request' if wide else 'requests'}", DIM)]
    names = ("free", "cached prefix", "without memory") if wide else ("free", "cached", "no memory")
    for holder, name in zip((FREE, CACHED, UNMAPPED), names, strict=True):
        line += [Segment("   " if wide else "  "), _tile(holder, 1, symbols), Segment(f" {name}", DIM)]
    return line
