"""Host memory by extents, pinned for a CUDA device: the host tier's, one extent ahead of need, and the copy of weights.

Allocating and pinning an extent is slow, and copies with unpinned memory block the caller. With a device, a thread
therefore prepares the next extent whenever the ready one comes into use.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor

from .cuda_driver import CudaDevice
from .errors import DriverError
from .host_arena import HostArena

log = logging.getLogger(__name__)

_PORTABLE_AND_MAPPED = 3  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP: kernels access it too


class HostExtents:
    """The extents of `arena`, which begins at `address`. `thread` prepares them. Not thread-safe."""

    def __init__(self, arena: HostArena, address: int, thread: ThreadPoolExecutor) -> None:
        self._arena = arena
        self._address = address
        self._thread = thread
        self._device: CudaDevice | None = None
        self._locked: set[int] = set()
        self._ready: int | None = None  # a prepared extent, not used yet
        self._preparing: Future[None] | None = None  # preparation of the ready extent

    @property
    def mapped(self) -> frozenset[int]:
        """Extents that have memory."""
        return self._arena.mapped_extents

    @property
    def mapped_bytes(self) -> int:
        """Host memory allocated, including the ready extent."""
        return self._arena.mapped_bytes

    @property
    def all_locked(self) -> bool:
        """Whether all memory in use is pinned. Does not wait for an extent in preparation."""
        return self._arena.mapped_extents - {self._ready} <= self._locked

    def lock_for(self, device: CudaDevice) -> None:
        """Pin extents taken from now on, by cuMemHostRegister, and keep one extent ready."""
        self._device = device

    def take(self, extents: Sequence[int]) -> None:
        """Give memory to `extents`. Raises OutOfDeviceMemory, with nothing taken, if the host has too little."""
        missing = set(extents) - (self._arena.mapped_extents - {self._ready})
        if not missing:
            return
        self._settle()
        missing -= self._arena.mapped_extents
        if missing:
            self._map(sorted(missing))
        if self._device is not None and (self._ready is None or self._ready in extents):
            self._prepare()

    def give_back(self, num_bytes: int) -> None:
        """Free up to `num_bytes`, at least one extent, the highest first. No copy may use them any more."""
        self._settle()
        mapped = sorted(self._arena.mapped_extents)
        extents = mapped[-max(1, num_bytes // self._arena.extent_bytes) :]
        self._unlock(extents)
        self._arena.unmap(extents)
        if self._ready in extents:
            self._ready = None

    def close(self) -> None:
        """Free everything. No copy may be running. Idempotent."""
        try:
            self._settle()
            self._unlock(sorted(self._locked))
        finally:
            self._arena.close()

    def _prepare(self) -> None:
        """Begin to allocate the lowest unmapped extent, which is needed next: fresh slots are assigned in ascending order."""
        mapped = self._arena.mapped_extents
        self._ready = next((extent for extent in range(self._arena.num_extents) if extent not in mapped), None)
        if self._ready is not None:
            self._preparing = self._thread.submit(self._map, [self._ready])

    def _settle(self) -> None:
        """Wait for a preparation to end. An error is only logged: the next `take` that needs the memory raises it again."""
        if self._preparing is None:
            return
        futures.wait([self._preparing])
        error, self._preparing = self._preparing.exception(), None
        if error is not None:
            log.info("no memory is taken ahead for the host tier: %s", error)
            self._ready = None

    def _map(self, extents: list[int]) -> None:
        self._arena.map(extents)
        if self._device is None:
            return
        try:
            with self._device.current():
                for extent in extents:
                    where = self._address + extent * self._arena.extent_bytes
                    self._device.driver.call("cuMemHostRegister", where, self._arena.extent_bytes, _PORTABLE_AND_MAPPED)
                    self._locked.add(extent)
        except DriverError as error:
            log.warning("host memory for copies is not pinned, so that they take longer: %s", error)

    def _unlock(self, extents: list[int]) -> None:
        locked = self._locked.intersection(extents)
        if not locked:
            return
        assert self._device is not None
        with self._device.current():
            for extent in locked:
                self._device.driver.call("cuMemHostUnregister", self._address + extent * self._arena.extent_bytes)
                self._locked.remove(extent)
