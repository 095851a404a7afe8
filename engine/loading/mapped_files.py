"""Pages of weight files that this process has mapped, and their return to the system once a tensor is used no more.

Tensors of a safetensors or PyTorch file are views of one private mapping of it, which stays until the last of them is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch

_MAPS = Path("/proc/self/maps")


class MappedFiles:
    """The mappings of some files in this process, as they are now. None where the system does not tell (not Linux)."""

    def __init__(self, paths: Iterable[Path]) -> None:
        names = {os.path.realpath(path) for path in paths}
        self._ranges: list[tuple[int, int]] = []  # ascending
        if names and _MAPS.exists():
            self._ranges = [(begin, end) for begin, end, _, _, path in file_ranges() if path in names]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's elements lie in a mapping."""
        begin, end = span_of(tensor)
        at = bisect_right(self._ranges, (begin, end)) - 1
        # A tensor may begin where a mapping does.
        return any(first <= begin and end <= last for first, last in self._ranges[max(0, at) : at + 2])

    def give_back(self, tensor: torch.Tensor) -> None:
        """Drop the pages that lie within a mapped tensor, which must not have been written. Reading it reads the file again."""
        if self.holds(tensor):
            drop_pages(*span_of(tensor))

    def besides(self, tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
        """The addresses (begin, end) in the tensors' mappings at which none of them lies."""
        used, found = sorted({span_of(one) for one in tensors if not one.is_meta and self.holds(one)}), []
        for begin, end in self._ranges:
            inside = [span for span in used if begin <= span[0] and span[1] <= end]
            for first, last in [*inside, (end, end)] if inside else ():
                found.append((begin, first))
                begin = last
        return found


LIBC = ctypes.CDLL(None, use_errno=True)


def file_ranges() -> Iterator[tuple[int, int, int, int, str]]:
    """Private mappings of files in this process: addresses, offset, inode and path. Raises OSError where it is not Linux."""
    for line in _MAPS.read_text().splitlines():
        addresses, permissions, offset, _, inode, *path = line.split(maxsplit=5)
        if path and path[0].startswith("/") and permissions.endswith("p"):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            yield begin, end, int(offset, 16), int(inode), path[0]


def drop_pages(begin: int, end: int) -> None:
    """Drop the pages of a mapped file that lie within these addresses, which must not have been written."""
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:  # a refusal only leaves the pages where they are
        LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and behind its last one."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def same_content(file: BinaryIO, offset: int, memory: memoryview) -> bool:
    """Whether a file has the bytes `memory` at `offset`, a multiple of the page size."""
    if os.fstat(file.fileno()).st_size < offset + len(memory):
        return False
    # Private and writable, as torch wants it: the file stays as it is
    with mmap.mmap(file.fileno(), len(memory), offset=offset, flags=mmap.MAP_PRIVATE) as mapped:
        theirs = torch.frombuffer(mapped, dtype=torch.uint8)
        same = torch.equal(torch.frombuffer(memory, dtype=torch.uint8), theirs)
        del theirs  # a mapping that is in use is not closed
        return same
