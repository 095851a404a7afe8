"""Weights on the host that lie in mapped files, so that their memory can be given back, and had again, in their place.

Tensors keep their addresses: whole pages of them are replaced by pages of a file with the same content, mapped privately
(docs/decisions/0075-weights-that-sleep.md). A tensor that a file of the checkpoint or of the cache holds stays in that one;
all others go into one file of this process alone, in the order of the layers.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

import torch
from torch import nn

from ...common.units import MIB
from ..layers.linears import PackedWeight
from ..layers.torch_linears import TorchWeight
from .mapped_files import LIBC, file_ranges, same_content, span_of
from .weight_cache import WeightCache

Level = Literal[1, 2]

LEAST_BYTES = 16 * mmap.PAGESIZE  # of a tensor that sleeps
MOST_EXTENTS = 16_384  # each is up to two mappings more, of 65,530 that a process may have
_WRITE_BYTES = 64 * MIB  # at once
_HUGE_BYTES = 2 * MIB  # of a huge page
_PIECE_BYTES = 4 * MIB  # populated between two looks at whether to stop
_MADV_COLD, _MADV_POPULATE_READ = 20, 22  # of Linux 5.4 and 5.14
_MAP_FIXED = 0x10


@dataclass(frozen=True, slots=True)
class Extent:
    """Whole pages of memory: the address and bytes of them, and where in which file their content lies."""

    begin: int
    num_bytes: int
    file: BinaryIO
    offset: int


class MappedWeights:
    """The extents of a model's weights, in the order of its layers. Make it with `of`.

    For one thread at a time, but `uncounted_bytes`. The tensors may be read at any time, which reads the file where need be.
    """

    def __init__(self, extents: list[Extent], tensors: list[torch.Tensor], own: BinaryIO | None) -> None:
        self.num_bytes = sum(one.num_bytes for one in extents)
        self.extents = extents
        self._tensors = tensors  # so that no other memory comes to lie at these addresses
        self._own = own  # file
        self.uncounted_bytes = 0  # that `fill` has not mapped yet, and the resident set does not count
        self._stops = threading.Event()
        self._filling: threading.Thread | None = None

    @classmethod
    def of(cls, model: nn.Module, cache: WeightCache) -> MappedWeights:
        """Let the weights of `model`, which nothing may write meanwhile, lie in files: those that they are mapped from already,
        and an unnamed one of `cache` for all others.

        Raises OSError if the file cannot be made; the model is as it was.
        """
        tensors = [one for one in weights_of(model) if one.device.type == "cpu"]
        spans = _spans(tensors)
        mapped = _mapped(spans)
        moved = [span for span in spans if span not in mapped]
        with ExitStack() as undo:
            own = undo.enter_context(cache.unnamed_file(sum(end - begin for begin, end in moved))) if moved else None
            there = dict(mapped) if own is None else mapped | _written(moved, own)
            undo.pop_all()
        _restored_when_free(tensors, moved)
        for span in moved:
            _replace(there[span])
        return cls([there[span] for span in spans], tensors, own)

    def drop(self, level: Level) -> None:
        """Give the memory back: on level 1 to the page cache, as what the system takes first; on level 2 to the system.

        Pages that another process has mapped stay in memory.
        """
        self.stop()
        for one in self.extents:
            _advise(one, _MADV_COLD)
            _advise(one, mmap.MADV_DONTNEED)
        if level == 2:
            for file in {one.file for one in self.extents} - {self._own}:
                os.fsync(file.fileno())  # what was just written, such as downloaded, would stay
            for one in self.extents:
                whole = one.file is self._own  # huge pages reach over the ends of extents
                offset, size = (0, 0) if whole else (one.offset, one.num_bytes)
                os.posix_fadvise(one.file.fileno(), offset, size, os.POSIX_FADV_DONTNEED)

    def fill(self) -> None:
        """Begin to map all pages in the order of the layers, on a thread of its own, which reads what the page cache lacks."""
        self.stop()
        self.uncounted_bytes = self.num_bytes
        self._stops.clear()
        filling = threading.Thread(target=self._fill, name="pagetide-wake", daemon=True)
        filling.start()
        self._filling = filling

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for `fill`."""
        if self._filling is not None:
            self._filling.join(timeout_s)

    def stop(self) -> None:
        """End `fill`. Idempotent."""
        self._stops.set()
        self.wait()
        self._filling, self.uncounted_bytes = None, 0

    def _fill(self) -> None:
        """A page that cannot be mapped now is read when it is used."""
        for one in self.extents:
            for at in range(0, one.num_bytes, _PIECE_BYTES):
                if self._stops.is_set():
                    return
                size = min(_PIECE_BYTES, one.num_bytes - at)
                _populate(one.begin + at, size)
                self.uncounted_bytes -= size


def weights_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters and packed weights of all modules, in their order. Buffers may be written."""
    for module in model.modules():
        yield from own_weights(module)


def own_weights(module: nn.Module) -> Iterator[torch.Tensor]:
    """Those of a module without the modules within it."""
    yield from (one for one in module._parameters.values() if one is not None)
    for value in vars(module).values():
        for packed in _packed(value):
            yield from packed.tensors


def _packed(value: Any) -> Iterator[PackedWeight | TorchWeight]:
    if isinstance(value, PackedWeight | TorchWeight):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _packed(one)


def _spans(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """The addresses (begin, end) of whole pages within `tensors`, in their order, small ones left out."""
    order: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        order.setdefault(span_of(tensor), len(order))
    joined: list[tuple[int, int, int]] = []
    for (begin, end), place in sorted(order.items()):
        if joined and begin < joined[-1][1]:  # views of the same memory
            first, last, earlier = joined[-1]
            joined[-1] = (first, max(last, end), min(earlier, place))
        else:
            joined.append((begin, end, place))
    page = mmap.PAGESIZE
    whole = [(-(-begin // page) * page, end // page * page, place) for begin, end, place in joined]
    whole = [one for one in whole if one[1] - one[0] >= LEAST_BYTES]
    largest = sorted(whole, key=lambda one: one[0] - one[1])[:MOST_EXTENTS]
    return [(begin, end) for begin, end, _ in sorted(largest, key=lambda one: one[2])]


def _mapped(spans: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Extent]:
    """The extents of the spans that lie in private mappings of files which still have the same content."""
    found: dict[tuple[int, int], Extent] = {}
    files: dict[str, BinaryIO | None] = {}
    ranges = list(file_ranges())
    for begin, end in spans:
        for first, last, offset, inode, path in ranges:
            if first <= begin and end <= last:
                file = files[path] if path in files else files.setdefault(path, _opened(path, inode))
                extent = None if file is None else Extent(begin, end - begin, file, offset + begin - first)
                if extent is not None and same_content(extent.file, extent.offset, _memory(begin, end)):
                    found[begin, end] = extent
    return found


def _opened(path: str, inode: int) -> BinaryIO | None:
    """The file of a mapping; None if there is another one by now, or none."""
    try:
        file = open(path, "rb")  # noqa: SIM115  # kept by its extents
    except OSError:
        return None
    if os.fstat(file.fileno()).st_ino == inode:
        return file
    file.close()
    return None


def _written(spans: Iterable[tuple[int, int]], file: BinaryIO) -> dict[tuple[int, int], Extent]:
    """The extents of the spans in a new file, which gets their content. Raises OSError.

    Large ones lie in the file as they do in memory within huge pages, as which the system can map them then, in a tenth of the
    time.
    """
    found, offset = {}, 0
    for begin, end in spans:
        if end - begin >= _HUGE_BYTES:
            offset += (begin - offset) % _HUGE_BYTES
        found[begin, end] = extent = Extent(begin, end - begin, file, offset)
        offset = write_at(file, _memory(begin, end), offset)
        assert offset == extent.offset + extent.num_bytes
    os.fsync(file.fileno())  # a disk that is full may say so only now
    return found


def write_at(file: BinaryIO, memory: memoryview, offset: int) -> int:
    """Write `memory` to an unbuffered file. Returns the offset behind it. Raises OSError."""
    while memory:
        written = os.pwrite(file.fileno(), memory[:_WRITE_BYTES], offset)
        memory, offset = memory[written:], offset + written
    return offset


def _memory(begin: int, end: int) -> memoryview:
    """The bytes at these addresses, which stay in use."""
    return memoryview((ctypes.c_ubyte * (end - begin)).from_address(begin)).cast("B")


def _restored_when_free(tensors: Iterable[torch.Tensor], spans: Iterable[tuple[int, int]]) -> None:
    """Let the pages of `spans` be plain memory again once no tensor uses them any more, and before their allocator has them.

    The file would last as long as the process else; and some allocators, jemalloc among them, take pages that they have dropped
    for zeros.
    """
    ordered, reached = sorted(spans), 0
    storages = {one.data_ptr(): one for tensor in tensors if (one := tensor.untyped_storage()).nbytes()}
    for begin, storage in sorted(storages.items(), key=lambda item: item[0]):
        end = begin + storage.nbytes()
        inside = ordered[bisect_left(ordered, (max(begin, reached), 0)) : bisect_left(ordered, (end, 0))]
        reached = max(reached, end)
        if inside and inside[-1][1] <= end:
            weakref.finalize(storage, _restore, inside).atexit = False


def _restore(spans: list[tuple[int, int]]) -> None:
    for begin, end in spans:
        _map(begin, end - begin, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)


def _replace(extent: Extent) -> None:
    """Map the file over the memory of `extent`, which has the same content. Raises OSError."""
    if _map(extent.begin, extent.num_bytes, mmap.MAP_PRIVATE, extent.file.fileno(), extent.offset) != extent.begin:
        error = ctypes.get_errno()
        raise OSError(error, f"weights cannot be mapped: {os.strerror(error)}")
    if extent.num_bytes >= _HUGE_BYTES:
        _advise(extent, mmap.MADV_HUGEPAGE)


def _map(begin: int, num_bytes: int, flags: int, descriptor: int, offset: int) -> int | None:
    """Map over what is mapped there."""
    return _MMAP(begin, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, descriptor, offset)  # type: ignore[no-any-return]


def _advise(extent: Extent, advice: int) -> None:
    _madvise(extent.begin, extent.num_bytes, advice)


def _populate(begin: int, num_bytes: int) -> None:
    """Map pages. Kernels before 5.14 do it when the pages are read."""
    if _madvise(begin, num_bytes, _MADV_POPULATE_READ) == errno.EINVAL:
        torch.frombuffer(_memory(begin, begin + num_bytes), dtype=torch.uint8)[:: mmap.PAGESIZE].sum()


def _madvise(begin: int, num_bytes: int, advice: int) -> int:
    """A refusal, of which this is the error's number, changes nothing but the time of what follows."""
    refused = LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), advice)
    return ctypes.get_errno() if refused else 0


_MMAP = LIBC.mmap
_MMAP.restype = ctypes.c_void_p
_MMAP.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
