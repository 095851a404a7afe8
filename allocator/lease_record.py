"""The record of a lease: shared memory with bounds on an engine's memory that hold at every instant, without messages.

The broker creates the record in anonymous memory of sealed size, and passes the engine a descriptor with the answer to
`register`. The engine writes bounds around every map and unmap.

    before a map of n bytes    lower = held        upper = held + n
    after it                   lower = held + n    upper = held + n
    before an unmap            lower = held - n    upper = held
    after it                   lower = held - n    upper = held - n

The broker needs the bounds at a past instant: when the driver was asked how much memory is free. Any number of maps may
have begun and ended since. So the record stores not the two bounds but how far each has risen and fallen in all: four
sums that never decrease. With the sums read before the measurement (b) and after it (a), at every instant in between

    upper <= upper_rises(a) - upper_falls(b)        lower >= lower_rises(b) - lower_falls(a)

in whatever order the sums are read. This needs no lock. Each sum is 8 aligned bytes, stored by one instruction.

    0        8             16            24            32
    | upper_rises | upper_falls | lower_rises | lower_falls |       little or big endian: both ends are on one machine
"""

from __future__ import annotations

import mmap
import os
import sys
from typing import NamedTuple

from ..common.on_error import OnError

RECORD_BYTES = 4096
_WORDS = 4


class Sums(NamedTuple):
    """Total rises and falls of the bounds since the record was made, in bytes."""

    upper_rises: int = 0
    upper_falls: int = 0
    lower_rises: int = 0
    lower_falls: int = 0

    @property
    def upper_bytes(self) -> int:
        """The current upper bound, approximate because the sums are read one after another."""
        return max(0, self.upper_rises - self.upper_falls)


class HeldBounds(NamedTuple):
    """At least `lower_bytes` and at most `upper_bytes` are held."""

    lower_bytes: int
    upper_bytes: int


def bounds_between(before: Sums, after: Sums) -> HeldBounds:
    """Bounds that held at every instant between two readings of the sums; 0 <= lower <= upper."""
    upper = max(0, after.upper_rises - before.upper_falls)
    lower = max(0, before.lower_rises - after.lower_falls)
    return HeldBounds(min(lower, upper), upper)


class RecordOwner:
    """The broker's end: creates the record and reads it."""

    def __init__(self, held_bytes: int = 0) -> None:
        """Create a record with `held_bytes` held. Raises OSError if no memory or descriptor is left."""
        if sys.platform != "linux":
            raise OSError("leases need Linux: memory without a name, passed over a socket")
        import fcntl

        self._fd: int | None = os.memfd_create("pagetide-lease", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with OnError(lambda: os.close(self.take_fd())):
            os.ftruncate(self._fd, RECORD_BYTES)
            # If the engine could shrink the file, the broker would end by SIGBUS.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._words = memoryview(mmap.mmap(self._fd, RECORD_BYTES)).cast("Q")
        self._words[0] = self._words[2] = held_bytes

    def read(self) -> Sums:
        """The current sums."""
        return Sums(*self._words[:_WORDS])

    def take_fd(self) -> int:
        """The descriptor for the engine; only once. The caller closes it."""
        assert self._fd is not None, "taken already"
        fd, self._fd = self._fd, None
        return fd


class LeaseRecordWriter:
    """The engine's end. Not thread-safe; `Lease` has a lock."""

    def __init__(self, fd: int) -> None:
        """Take ownership of `fd` and close it. Raises OSError or ValueError if it is not a record.

        Memory that could shrink later is rejected: this process would end by SIGBUS at the next write.
        """
        import fcntl

        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("its memory can be cut short, so it is not used")
            self._words = memoryview(mmap.mmap(fd, RECORD_BYTES)).cast("Q")
        finally:
            os.close(fd)
        sums = Sums(*self._words[:_WORDS])
        self._upper = sums.upper_rises - sums.upper_falls
        self._lower = sums.lower_rises - sums.lower_falls

    def set(self, lower_bytes: int, upper_bytes: int) -> None:
        """Set both bounds. Call it before a change that widens them, after one that narrows them."""
        if upper_bytes > self._upper:
            self._words[0] += upper_bytes - self._upper
        elif upper_bytes < self._upper:
            self._words[1] += self._upper - upper_bytes
        if lower_bytes > self._lower:
            self._words[2] += lower_bytes - self._lower
        elif lower_bytes < self._lower:
            self._words[3] += self._lower - lower_bytes
        self._lower, self._upper = lower_bytes, upper_bytes
