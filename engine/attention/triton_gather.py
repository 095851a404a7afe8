"""Copies of whole blocks between a strided arena and a packed buffer, in one launch however many blocks they are.

For swaps below the size where a copy engine, which takes a command a copy, is slow. The packed side may be pinned host memory:
the device reads and writes it over the link.
"""

from __future__ import annotations

import torch

from .triton_base import on_device, tl, triton

TILE_WORDS = 2048  # of 8 bytes: a turn of a program
NUM_PROGRAMS = 64  # what fills a link to the host, and leaves the rest of the card to others

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # widest first


def gather_blocks(
    rows: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, *, num_programs: int = NUM_PROGRAMS
) -> None:
    """`out[i] = rows[ids[i], :out.shape[1]]`.

    Args:
        rows: Integers [num_blocks, items], the items of a row neighbours, the rows strided.
        ids: int64 [n], on the device, in range; they are not checked.
        out: [n, up to as many items], of the same type.
        num_programs: Programs that share the copy.

    Raises ValueError where the shapes or types do not fit. Runs in the order of the device's current stream.
    """
    _check(rows, ids, out)
    _copy(rows, ids, out, num_programs, to_rows=False)


def scatter_blocks(
    packed: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, *, num_programs: int = NUM_PROGRAMS
) -> None:
    """`rows[ids[i], :packed.shape[1]] = packed[i]`: what `gather_blocks` took out. No id may come twice. See there."""
    _check(rows, ids, packed)
    _copy(rows, ids, packed, num_programs, to_rows=True)


def _check(rows: torch.Tensor, ids: torch.Tensor, packed: torch.Tensor) -> None:
    if rows.ndim != 2 or ids.ndim != 1 or packed.ndim != 2:
        raise ValueError(
            f"blocks are rows [num_blocks, items], ids [n] and a buffer [n, items], got {tuple(rows.shape)},"
            f" {tuple(ids.shape)} and {tuple(packed.shape)}"
        )
    if rows.dtype != packed.dtype or rows.dtype not in _WORDS:
        raise ValueError(f"rows and buffer must both be of one of {_WORDS}, got {rows.dtype} and {packed.dtype}")
    if ids.dtype != torch.int64:
        raise ValueError(f"ids must be int64, got {ids.dtype}")
    if len(packed) != len(ids) or packed.shape[1] > rows.shape[1]:
        raise ValueError(
            f"{len(ids)} blocks of {rows.shape[1]:,} items do not fill a buffer of {len(packed)} x {packed.shape[1]:,}"
        )
    if rows.stride(1) != 1 or packed.stride(1) != 1:
        raise ValueError("the items of a row must be neighbours")


def _copy(rows: torch.Tensor, ids: torch.Tensor, packed: torch.Tensor, num_programs: int, *, to_rows: bool) -> None:
    rows = rows[:, : packed.shape[1]]
    if not packed.numel():
        return
    word = next(word for word in _WORDS if _divides(word, rows) and _divides(word, packed))
    rows, packed = rows.view(word), packed.view(word)
    num_words = packed.shape[1]
    tiles = triton.cdiv(num_words, TILE_WORDS)
    grid = min(num_programs, len(ids) * tiles)
    with on_device(rows):
        _copy_words[(grid,)](
            rows, ids, packed, rows.stride(0), packed.stride(0), num_words, tiles, len(ids) * tiles,
            TO_ROWS=to_rows, TILE=TILE_WORDS, num_warps=8,
        )  # fmt: skip


def _divides(word: torch.dtype, tensor: torch.Tensor) -> bool:
    """Whether every row of `tensor` is whole words that begin where words may. Its own items always are."""
    counts = (tensor.storage_offset(), tensor.stride(0), tensor.shape[1])
    return tensor.data_ptr() % word.itemsize == 0 and not any(n * tensor.itemsize % word.itemsize for n in counts)


@triton.jit(do_not_specialize=["tiles", "turns"])
def _copy_words(
    rows: tl.tensor, ids: tl.tensor, packed: tl.tensor, rows_row: tl.tensor, packed_row: tl.tensor,  # strides, by name
    num_words: tl.tensor, tiles: tl.tensor, turns: tl.tensor, TO_ROWS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """A program: every so-manieth tile of words."""
    for turn in range(tl.program_id(0), turns, tl.num_programs(0)):
        index = (turn // tiles).to(tl.int64)
        words = (turn % tiles) * TILE + tl.arange(0, TILE)
        mask = words < num_words
        ours = rows + tl.load(ids + index) * rows_row + words
        theirs = packed + index * packed_row + words
        if TO_ROWS:
            tl.store(ours, tl.load(theirs, mask=mask), mask=mask)
        else:
            tl.store(theirs, tl.load(ours, mask=mask), mask=mask)
