"""An arena of host memory: one reserved mapping, populated and returned by extents with madvise.

    reserve  mmap(PRIVATE | ANONYMOUS | NORESERVE)      addresses, no memory
    map      budget, then madvise(POPULATE_WRITE)       memory comes now, or the refusal does
    unmap    madvise(DONTNEED)                          memory goes back to the system; zeros come next time

The reasons, each measured:

- MAP_SHARED (which `mmap.mmap(-1, n)` uses) keeps the cgroup's charge and the old bytes after DONTNEED.
- Without POPULATE no memory is allocated yet, and a later write could get the process killed.
- Inside a cgroup even POPULATE invokes the OOM killer and does not return ENOMEM, hence the budget.
- `mmap.madvise` holds the GIL for 0.3 s per few GiB; a ctypes call does not.
- `mmap.close()` under a live tensor is a segmentation fault, so nothing here closes the mapping: it goes with its last
  view.

Huge pages reduce the time to unmap 1 GiB from 32-86 ms to 3-9 ms. They are requested only where a whole page lies
inside one extent: a page across two extents would come with the first and stay, charged, until both are gone.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..common.host_memory import free_host_bytes
from .arena import ExtentSet, extents_to_map, extents_to_unmap, runs
from .errors import BlockMisuse, OutOfDeviceMemory

_LINUX = sys.platform == "linux"
# Extents are 1/32 of a pool: 16 granules, so rounding to whole ones wastes little
_LARGE_POOL_GRANULES = 512
_MAX_ADVISED = 4096  # every island of huge pages splits the mapping; a process has 65,530 (vm.max_map_count)
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module yet
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # in the module since Python 3.13; the same on x86, Arm and RISC-V
_PROT_NONE = 0


def _huge_page_bytes(kernel: Path = Path("/sys/kernel/mm/transparent_hugepage")) -> int:
    """Bytes of a transparent huge page (2 MiB on x86; 512 MiB with pages of 64 KiB), 0 if there are none."""
    try:
        return int((kernel / "hpage_pmd_size").read_text())
    except OSError:
        return 0


_HUGE_PAGE = _huge_page_bytes()  # arenas that can use huge pages align their base to this


def preferred_granule(total_bytes: int) -> int:
    """The size that extents of a pool of `total_bytes` should be multiples of: a huge page in large pools, else a page.

    Both are powers of two.
    """
    return _HUGE_PAGE if _HUGE_PAGE and total_bytes >= _LARGE_POOL_GRANULES * _HUGE_PAGE else mmap.PAGESIZE


class HostArena(ExtentSet):
    """`num_extents` extents of `extent_bytes` host bytes at fixed addresses; see `Arena`.

    `budget()` returns the bytes free to take; `map` checks it first. With `debug` an unmapped extent is protected,
    before `map`, after `unmap` and after `close`: touching it ends the process with SIGSEGV. Without `debug` it reads
    as zeros, and writing silently takes memory. Thread-safe; calls run one at a time. Raises ValueError for sizes that
    are not a whole number of pages, OutOfDeviceMemory if no address range is left.
    """

    _populate_advice = _MADV_POPULATE_WRITE  # tests replace it with an advice that no kernel knows

    def __init__(
        self, num_extents: int, extent_bytes: int, *, budget: Callable[[], int] | None = None, debug: bool = False
    ) -> None:
        if num_extents < 1:
            raise ValueError(f"num_extents must be at least 1, got {num_extents}")
        if extent_bytes < 1 or extent_bytes % mmap.PAGESIZE:
            raise ValueError(f"extent_bytes must be a multiple of the page size {mmap.PAGESIZE}, got {extent_bytes}")
        super().__init__(num_extents, extent_bytes)
        self._budget = budget or free_host_bytes
        self._debug = debug and _LINUX
        self._lock = threading.Lock()
        length = num_extents * extent_bytes
        slack = _HUGE_PAGE if _HUGE_PAGE <= extent_bytes else 0
        reserved = _reserve(length + slack)
        base = _address(reserved)
        offset = -base % _HUGE_PAGE if slack else 0
        self._base = base + offset
        self._buffer: memoryview | None = memoryview(reserved)[offset : offset + length]
        self._advise_page_size()
        if self._debug:
            _mprotect(self._base, length, _PROT_NONE)

    @property
    def buffer(self) -> memoryview:
        """The whole range, writable. Raises BlockMisuse once closed."""
        return self._open()

    def map(self, extents: Sequence[int]) -> None:
        """Populate `extents` with zeros, all or none. Raises OutOfDeviceMemory; BlockMisuse if one is mapped."""
        with self._lock:
            self._open()
            wanted = extents_to_map(extents, self.num_extents, self._mapped)
            asked = len(wanted) * self.extent_bytes
            if asked and asked > (free := self._budget()):
                raise OutOfDeviceMemory(asked, free, "host memory")
            try:
                with ExitStack() as undo:
                    for run in runs(sorted(wanted)):
                        undo.callback(self._give_back, *self._range(run))
                        self._populate(*self._range(run))
                    undo.pop_all()
            except OSError as error:
                if error.errno == errno.ENOMEM:
                    raise OutOfDeviceMemory(asked, self._budget(), "host memory") from error
                raise
            self._mapped |= wanted

    def unmap(self, extents: Sequence[int]) -> None:
        """Return the memory of `extents` to the system. Raises BlockMisuse if one is not mapped."""
        with self._lock:
            self._open()
            done: list[int] = []
            try:
                for run in runs(sorted(extents_to_unmap(extents, self.num_extents, self._mapped))):
                    self._give_back(*self._range(run))
                    done.extend(range(*run))
            finally:
                self._mapped -= frozenset(done)

    def close(self) -> None:
        """Return all memory and refuse further calls. Idempotent."""
        with self._lock:
            if self._buffer is None:
                return
            for run in runs(sorted(self._mapped)):
                self._give_back(*self._range(run))
            self._mapped = frozenset()
            self._buffer = None

    def _populate(self, start: int, length: int) -> None:
        """Put zero pages behind the addresses. Raises OSError (ENOMEM if memory is short)."""
        if self._debug:
            _mprotect(start, length, mmap.PROT_READ | mmap.PROT_WRITE)
        if _LINUX:
            try:
                return _madvise(start, length, self._populate_advice)
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: a kernel before 5.14
                    raise
        ctypes.memset(start, 0, length)  # touches the pages without the GIL, and guarantees zeros on every system

    def _give_back(self, start: int, length: int) -> None:
        """Return the pages behind the addresses. On systems without a DONTNEED that frees, they stay."""
        if _LINUX:
            _madvise(start, length, mmap.MADV_DONTNEED)
            if self._debug:
                _mprotect(start, length, _PROT_NONE)

    def _advise_page_size(self) -> None:
        """Request huge pages where they fit inside an extent, and none elsewhere. A kernel may refuse the advice."""
        if not _HUGE_PAGE:
            return
        try:
            if self.extent_bytes % _HUGE_PAGE == 0:
                return _madvise(*self._range((0, self.num_extents)), mmap.MADV_HUGEPAGE)
            _madvise(*self._range((0, self.num_extents)), mmap.MADV_NOHUGEPAGE)
            if self.extent_bytes < _HUGE_PAGE or self.num_extents > _MAX_ADVISED:
                return
            for extent in range(self.num_extents):
                start, length = self._range((extent, extent + 1))
                inner = start + -start % _HUGE_PAGE
                inner_bytes = (start + length - inner) // _HUGE_PAGE * _HUGE_PAGE
                if inner_bytes > 0:
                    _madvise(inner, inner_bytes, mmap.MADV_HUGEPAGE)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EAGAIN):  # EINVAL: built without; EAGAIN: no resources
                raise

    def _range(self, run: tuple[int, int]) -> tuple[int, int]:
        """(address, bytes) of the extents `run[0]` up to, not including, `run[1]`."""
        return self._base + run[0] * self.extent_bytes, (run[1] - run[0]) * self.extent_bytes

    def _open(self) -> memoryview:
        if self._buffer is None:
            raise BlockMisuse("the arena is closed")
        return self._buffer


def _reserve(length: int) -> mmap.mmap:
    """Reserve `length` bytes of addresses. Raises OutOfDeviceMemory if there are none."""
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, length)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NORESERVE if _LINUX else 0)
        return mmap.mmap(-1, length, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise OutOfDeviceMemory(length, free_host_bytes(), "address space") from error


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _libc() -> Any:
    """The C library, called without the GIL; None where madvise is not used."""
    if not _LINUX:
        return None
    library = ctypes.CDLL(None, use_errno=True)
    for function in (library.madvise, library.mprotect):
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        function.restype = ctypes.c_int
    return library


_LIBC = _libc()


def _madvise(start: int, length: int, advice: int) -> None:
    _call(_LIBC.madvise, start, length, advice)


def _mprotect(start: int, length: int, protection: int) -> None:
    _call(_LIBC.mprotect, start, length, protection)


def _call(function: Any, start: int, length: int, argument: int) -> None:
    """Call, and retry if a signal interrupts. Raises OSError with the call's errno."""
    while function(start, length, argument):
        if (code := ctypes.get_errno()) != errno.EINTR:
            raise OSError(code, f"{function.__name__}({length:,} bytes, {argument}): {os.strerror(code)}")
