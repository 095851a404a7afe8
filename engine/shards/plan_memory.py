"""Plans through memory that the driver shares with its shards: written once, read by all.

The memory is a file without a name, which goes with the last process that has it open. Plans alternate between two halves: the
driver writes a plan only after the result of the plan before the last one, so no shard reads any more what it overwrites.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...scheduler.plan import Plan
from ..collectives.memory_file import create_memory
from .processors import SerializedProcessor

_FIRST_BYTES = 1 << 20
_PROCESSOR = "logits processor"


class PlanPlace(NamedTuple):
    """Where a plan lies."""

    offset: int
    length: int


class PlanWriter:
    """The driver's side. Not thread-safe."""

    def __init__(self) -> None:
        self.fd = create_memory("pagetide-plans", _FIRST_BYTES)
        self._half = _FIRST_BYTES // 2
        self._memory = mmap.mmap(self.fd, _FIRST_BYTES)
        self._turn = 0

    def write(self, plan: Plan) -> tuple[PlanPlace, dict[int, bytes]]:
        """Write `plan`. Returns its place, and the logits processors in it, by number: only the shard that samples needs
        them.
        """
        buffer, processors = io.BytesIO(), dict[int, bytes]()
        _PlanPickler(buffer, processors).dump(plan)
        data = buffer.getbuffer()
        if len(data) > self._half:
            self._grow(len(data))
        self._turn = 1 - self._turn
        offset = self._turn * self._half
        self._memory[offset : offset + len(data)] = data
        return PlanPlace(offset, len(data)), processors

    def close(self) -> None:
        """Free the memory. Idempotent."""
        if self.fd >= 0:
            self._memory.close()
            os.close(self.fd)
            self.fd = -1

    def _grow(self, least: int) -> None:
        """Double the halves up to `least` bytes. What lies in the first one stays where it is; the second one begins later."""
        while self._half < least:
            self._half *= 2
        self._turn = 0  # the next plan goes behind everything that a shard may still read
        os.ftruncate(self.fd, 2 * self._half)
        self._memory.close()
        self._memory = mmap.mmap(self.fd, 2 * self._half)


class PlanReader:
    """A shard's side."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)

    def read(self, place: PlanPlace, processors: Mapping[int, Any] | None) -> Plan:
        """The plan at `place`, with `processors` by number; None: without logits processors."""
        end = place.offset + place.length
        if end > len(self._memory):
            self._memory.close()
            self._memory = mmap.mmap(self._fd, os.fstat(self._fd).st_size, prot=mmap.PROT_READ)
        plan: Plan = _PlanUnpickler(io.BytesIO(self._memory[place.offset : end]), processors).load()
        return plan


class _PlanPickler(pickle.Pickler):
    """Leaves logits processors out: `SerializedProcessor` objects, which the intake has made of them."""

    def __init__(self, file: io.BytesIO, processors: dict[int, bytes]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._processors = processors

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, SerializedProcessor):
            return None
        self._processors[id(obj)] = obj.data
        return _PROCESSOR, id(obj), obj.__qualname__


class _PlanUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, processors: Mapping[int, Any] | None) -> None:
        super().__init__(file)
        self._processors = processors

    def persistent_load(self, pid: Any) -> Any:
        _, number, name = pid
        if self._processors is None:
            return None
        return SerializedProcessor(self._processors[number], name)
