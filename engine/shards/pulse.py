"""The signs of life of the shards, in memory shared with the driver: a count that goes on, and bytes that they hold."""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from ..collectives.memory_file import create_memory

BEAT_S = 0.25
KINDS = ("all_reduce", "gather", "broadcast")
_LINE = 128  # bytes of a shard: lines of the cache
_FORMAT = struct.Struct(f"<QQQ{3 * len(KINDS)}Q")
NO_COLLECTIVES = (0,) * (3 * len(KINDS))


class Sign(NamedTuple):
    """What a shard has written last."""

    beats: int
    base_bytes: int  # held on its device besides K and V
    host_bytes: int  # held by its part of the host tier
    collectives: tuple[int, ...] = NO_COLLECTIVES  # calls, bytes and nanoseconds of each of KINDS

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `LLM.stats`."""
        calls, sizes, times = self.collectives[::3], self.collectives[1::3], self.collectives[2::3]
        return {
            "base_bytes": self.base_bytes,
            "host_tier_bytes": self.host_bytes,
            "collectives": {
                kind: {"calls": calls[i], "bytes": sizes[i], "seconds": times[i] / 1e9} for i, kind in enumerate(KINDS)
            },
        }


class Pulse:
    """The signs of all shards of a team. Each shard writes its own."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, os.fstat(fd).st_size)

    @classmethod
    def create(cls, size: int) -> Pulse:
        """The pulse of `size` shards."""
        return cls(create_memory("pagetide-pulse", max(mmap.PAGESIZE, size * _LINE)))

    def write(self, rank: int, sign: Sign) -> None:
        """Write a sign."""
        _FORMAT.pack_into(self._memory, rank * _LINE, *sign[:3], *sign.collectives)

    def read(self, rank: int) -> Sign:
        """The last sign of a shard."""
        beats, base, host, *collectives = _FORMAT.unpack_from(self._memory, rank * _LINE)
        return Sign(beats, base, host, tuple(collectives))

    def close(self) -> None:
        """Unmap and close. Idempotent."""
        if self.fd >= 0:
            self._memory.close()
            os.close(self.fd)
            self.fd = -1


class Heartbeat(threading.Thread):
    """A shard's thread that writes its sign four times a second, and ends the process if its driver is gone.

    Args:
        measure: base_bytes, host_bytes and the collectives so far.
    """

    def __init__(self, pulse: Pulse, rank: int, driver_pid: int, end: Callable[[], None]) -> None:
        super().__init__(name="pagetide-heartbeat", daemon=True)
        self.measure: Callable[[], tuple[int, int, tuple[int, ...]]] = lambda: (0, 0, NO_COLLECTIVES)
        self._pulse = pulse
        self._rank = rank
        self._driver_pid = driver_pid
        self._end = end
        self._pause = threading.Event()

    def run(self) -> None:
        """See `threading.Thread`."""
        beats = 0
        while os.getppid() == self._driver_pid:
            beats += 1
            try:
                held = self.measure()
            except Exception:  # without a free descriptor, for example: the last measurement stays
                held = self._pulse.read(self._rank)[1:]
            self._pulse.write(self._rank, Sign(beats, *held))
            self._pause.wait(BEAT_S)
        self._end()
