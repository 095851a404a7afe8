"""A group of processes on the CPU, in memory that they share, by native operators (`native/csrc/collective_ops.cpp`).

One barrier a collective: two slots of each shard are used by turns. The same sums on all shards, in the order of ranks.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import tempfile
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from .group import CollectiveAborted, CollectiveCount

MOST_SHARDS = 63
_LINE = 64
_HEADER_BYTES = (MOST_SHARDS + 1) * _LINE
_SLOT_BYTES = 2 << 20
_GENERATION = 1 << 40  # numbers of collectives in one, as in collective_ops.cpp
_SPIN_US, _SPIN_US_CROWDED = 200, 5  # before a wait sleeps; with fewer cores than shards the others need this one


def create_memory(name: str, num_bytes: int) -> int:
    """The descriptor of a new file of zeros without a name; `name` is only a label.

    Child processes share it by the descriptor. It is gone with the last process that has it open.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp()
        os.unlink(path)
    if fd <= 2:  # a program without its standard streams: in a child these numbers are others
        low, fd = fd, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
        os.close(low)
    os.ftruncate(fd, num_bytes)
    return fd


def create_group_memory(size: int) -> int:
    """The descriptor of the memory of `size` shards. Pages that are never used take no memory."""
    return create_memory("pagetide-collectives", _bytes_for(size))


class SharedMemoryGroup:
    """See `ShardGroup`. `fd`: of `create_group_memory`, inherited."""

    captures = False
    name = "shared memory"

    def __init__(self, rank: int, size: int, fd: int) -> None:
        if not 1 <= size <= MOST_SHARDS:
            raise ValueError(f"a group has 1 to {MOST_SHARDS} shards, got {size}")
        self.rank = rank
        self.size = size
        self._memory = torch.frombuffer(mmap.mmap(fd, _bytes_for(size)), dtype=torch.uint8)  # keeps the mapping
        self._number = 1  # of the last collective
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._spin_us = _SPIN_US if size <= cores else _SPIN_US_CROWDED
        self._counts: dict[str, CollectiveCount] = {}
        self._sum = torch.ops.pagetide.shards_sum.default
        self._gather = torch.ops.pagetide.shards_gather.default
        self._stop = torch.ops.pagetide.shards_stop.default
        self._nothing = torch.empty(0, dtype=torch.uint8)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `ShardGroup`."""
        began = self._begin("all_reduce")
        x = x.contiguous()
        most = _SLOT_BYTES // x.itemsize
        if x.numel() <= most:
            self._sum_piece(x)
        else:
            for piece in x.view(-1).split(most):
                self._sum_piece(piece)
        self._count("all_reduce", x.nbytes, began)
        return x

    def gather(self, x: Tensor, widths: Sequence[int], *, everywhere: bool = False) -> Tensor:
        """See `ShardGroup`."""
        began = self._begin("gather")
        wanted, most = everywhere or self.rank == 0, max(widths)
        rows = x.reshape(math.prod(x.shape[:-1]), widths[self.rank])
        padded = rows if widths[self.rank] == most else torch.nn.functional.pad(rows, (0, most - widths[self.rank]))
        out = x.new_empty((len(rows), sum(widths))) if wanted else x
        at_once = max(1, _SLOT_BYTES // max(1, most * x.itemsize))
        if most * x.itemsize > _SLOT_BYTES:
            parts = self._all(padded.contiguous().view(torch.uint8).view(-1), wanted)
            parts = [part.view(x.dtype).view(len(rows), most) for part in parts]
            out = torch.cat([p[:, :w] for p, w in zip(parts, widths, strict=True)], -1) if wanted else x
        else:
            for first in range(0, max(1, len(rows)), at_once):  # the shards meet for no rows too
                piece = padded[first : first + at_once].contiguous()
                found = self._meet(piece.view(torch.uint8).view(-1), wanted)
                end = 0
                for rank, width in enumerate(widths if wanted and piece.numel() else ()):
                    begin, end = end, end + width
                    out[first : first + at_once, begin:end] = found[rank].view(x.dtype).view(len(piece), most)[:, :width]
        self._count("gather", x.nbytes, began)
        return out.view(*x.shape[:-1], sum(widths)) if wanted else x

    def broadcast(self, x: Tensor) -> Tensor:
        """See `ShardGroup`."""
        began = self._begin("broadcast")
        x = x.contiguous()
        parts = self._all(x.view(-1).view(torch.uint8) if x.numel() else self._nothing, True)
        self._count("broadcast", x.nbytes, began)
        return parts[0].view(x.dtype).view(x.shape) if x.numel() else x

    def exchange(self, data: bytes) -> list[bytes]:
        """See `ShardGroup`."""
        began = self._begin("exchange")
        own = torch.tensor([len(data)], dtype=torch.int64)
        lengths = [int(part.view(torch.int64)) for part in self._all(own.view(torch.uint8), True)]
        mine = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = self._all(mine, True)
        self._count("exchange", len(data), began)
        return [bytes(part[:length].numpy()) for part, length in zip(parts, lengths, strict=True)]

    def abort(self) -> None:
        """See `ShardGroup`."""
        if self._memory is not self._nothing:
            self._stop(self._memory, self._number // _GENERATION + 1)

    def reset(self) -> None:
        """See `ShardGroup`."""
        self._number = (self._number // _GENERATION + 1) * _GENERATION
        self._meet(self._nothing, False)

    def counts(self) -> dict[str, CollectiveCount]:
        """See `ShardGroup`."""
        return self._counts

    def close(self) -> None:
        """See `ShardGroup`. The memory goes with the last tensor over it."""
        self._memory = self._nothing

    def _sum_piece(self, x: Tensor) -> None:
        self._number += 1
        if not self._sum(x, self._memory, self.rank, self.size, _SLOT_BYTES, self._number, self._spin_us):
            raise CollectiveAborted("another shard has stopped computing this step")

    def _meet(self, x: Tensor, wanted: bool) -> Tensor:
        """uint8 [size, bytes of x]: the x of all shards, of equal length; empty unless `wanted`."""
        self._number += 1
        out = torch.empty((self.size, x.numel()), dtype=torch.uint8) if wanted else self._nothing
        memory = self._memory, self.rank, self.size, _SLOT_BYTES, self._number, self._spin_us
        if not self._gather(x, out, *memory):
            raise CollectiveAborted("another shard has stopped computing this step")
        return out

    def _all(self, x: Tensor, wanted: bool) -> list[Tensor]:
        """The x uint8 of each shard, of equal length, in as many pieces as it takes; none unless `wanted`."""
        pieces = [self._meet(piece, wanted) for piece in (x.split(_SLOT_BYTES) if x.numel() else [x])]
        if not wanted:
            return []
        if len(pieces) == 1:
            return list(pieces[0])
        return [torch.cat([piece[rank] for piece in pieces]) for rank in range(self.size)]

    def _begin(self, kind: str) -> float:
        self._counts.setdefault(kind, CollectiveCount()).calls += 1
        return time.perf_counter()

    def _count(self, kind: str, num_bytes: int, began: float) -> None:
        count = self._counts[kind]
        count.num_bytes += num_bytes
        count.seconds += time.perf_counter() - began


def _bytes_for(size: int) -> int:
    return _HEADER_BYTES + 2 * size * _SLOT_BYTES
