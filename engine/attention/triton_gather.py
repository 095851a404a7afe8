"""Copies of whole blocks between two strided pools, in one launch for any number of blocks.

For swaps of blocks too small for a copy engine, which needs a command per copy. One pool may be pinned host memory: the device
accesses it over the link, at the host's own addresses.
"""

from __future__ import annotations

import torch

from .triton_base import on_device, tl, triton

TILE_WORDS = 2048  # of 8 bytes, per program iteration
NUM_PROGRAMS = 64  # saturates a host link and leaves the rest of the card free

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}  # by bytes, widest first


def copy_blocks(
    source: torch.Tensor, target: torch.Tensor, ids: torch.Tensor, num_bytes: int, *, num_programs: int = NUM_PROGRAMS
) -> None:
    """`target[ids[1, i], :num_bytes] = source[ids[0, i], :num_bytes]`, in the order of the device's current stream.

    Args:
        source: uint8 [num_blocks, bytes], with contiguous bytes in strided rows. On the device, or in host memory that is
            locked (cudaHostRegister) at the copied blocks, for a device that can use host pointers.
        target: The same of another pool.
        ids: int64 [2, n], contiguous, on the device, in range, with unique targets. They are not checked.

    Raises ValueError if the shapes or types do not fit.
    """
    _check(source, target, ids, num_bytes)
    count = ids.shape[1]
    if not count or not num_bytes:
        return
    places = (source.data_ptr(), target.data_ptr(), source.stride(0), target.stride(0), num_bytes)
    width = next(width for width in _WORDS if not any(place % width for place in places))
    num_words = num_bytes // width
    tiles = triton.cdiv(num_words, TILE_WORDS)
    with on_device(ids):
        _copy_words[(min(num_programs, count * tiles),)](
            *places[:4], ids, num_words, count, tiles, count * tiles, WORD=_WORDS[width], TILE=TILE_WORDS, num_warps=8
        )


def _check(source: torch.Tensor, target: torch.Tensor, ids: torch.Tensor, num_bytes: int) -> None:
    for rows in (source, target):
        if rows.ndim != 2 or rows.dtype != torch.uint8:
            raise ValueError(f"blocks are bytes, uint8 [num_blocks, bytes], got {rows.dtype} {tuple(rows.shape)}")
        if rows.stride(1) != 1:
            raise ValueError("the bytes of a block must be neighbours")
        if not 0 <= num_bytes <= rows.shape[1]:
            raise ValueError(f"{num_bytes:,} bytes of a block cannot be copied: it has {rows.shape[1]:,}")
    if ids.dtype != torch.int64 or ids.ndim != 2 or len(ids) != 2 or not ids.is_contiguous():
        raise ValueError(f"ids must be int64 [2, n] in one piece, got {ids.dtype} {tuple(ids.shape)}")


@triton.jit(do_not_specialize=["count", "tiles", "turns"])
def _copy_words(
    source: tl.tensor, target: tl.tensor, source_stride: tl.tensor, target_stride: tl.tensor,  # addresses, and bytes
    ids: tl.tensor, num_words: tl.tensor, count: tl.tensor, tiles: tl.tensor, turns: tl.tensor,
    WORD: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """One program copies every `num_programs`-th tile of words. The pools are addresses, because Triton refuses a pointer to a
    first host block without memory.
    """
    for turn in range(tl.program_id(0), turns, tl.num_programs(0)):
        index = turn // tiles
        words = (turn % tiles) * TILE + tl.arange(0, TILE)
        mask = words < num_words
        theirs = source + tl.load(ids + index) * source_stride
        ours = target + tl.load(ids + count + index) * target_stride
        read = theirs.to(tl.pointer_type(WORD), bitcast=True) + words
        write = ours.to(tl.pointer_type(WORD), bitcast=True) + words
        tl.store(write, tl.load(read, mask=mask), mask=mask)
