"""The host tier's memory by extents: taken as slots are written, its pages locked for a CUDA device, one extent ahead of need.

Taking an extent and locking its pages is slow (the kernel zeroes and pins page by page), and copies from and to memory that is
not locked hold up the caller. So with a device a thread prepares the next extent whenever the one that is ready gets into use.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor

from ...allocator.cuda_driver import CudaDevice
from ...allocator.errors import DriverError
from ...allocator.host_arena import HostArena

log = logging.getLogger(__name__)

_PORTABLE_AND_MAPPED = 3  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP: kernels reach it too


class HostExtents:
    """`arena`, whose first byte is at `address`. What is prepared is prepared in `thread`. Not thread-safe."""

    def __init__(self, arena: HostArena, address: int, thread: ThreadPoolExecutor) -> None:
        self._arena = arena
        self._address = address
        self._thread = thread
        self._device: CudaDevice | None = None
        self._locked: set[int] = set()
        self._ready: int | None = None  # an extent that nobody has used yet
        self._preparing: Future[None] | None = None  # the ready one

    @property
    def mapped(self) -> frozenset[int]:
        """Extents that have memory."""
        return self._arena.mapped_extents

    @property
    def mapped_bytes(self) -> int:
        """Host memory that is taken, what is ready included."""
        return self._arena.mapped_bytes

    @property
    def all_locked(self) -> bool:
        """Whether the pages of all memory in use are locked. Does not wait for what is being prepared."""
        return self._arena.mapped_extents - {self._ready} <= self._locked

    def lock_for(self, device: CudaDevice) -> None:
        """Lock the pages of what is taken from now on, by cuMemHostRegister, and keep an extent ready."""
        self._device = device

    def take(self, extents: Sequence[int]) -> None:
        """Have memory behind `extents`. Raises OutOfDeviceMemory, with nothing taken, where the host has not so much."""
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
        """Give up to so much back, an extent at least, the highest first. Nothing may be copied there any more."""
        self._settle()
        mapped = sorted(self._arena.mapped_extents)
        extents = mapped[-max(1, num_bytes // self._arena.extent_bytes) :]
        self._unlock(extents)
        self._arena.unmap(extents)
        if self._ready in extents:
            self._ready = None

    def close(self) -> None:
        """Give everything back. Nothing may be copied any more. Idempotent."""
        try:
            self._settle()
            self._unlock(sorted(self._locked))
        finally:
            self._arena.close()

    def _prepare(self) -> None:
        """Begin to take the lowest extent that has no memory: it is next, as fresh slots are given by number."""
        mapped = self._arena.mapped_extents
        self._ready = next((extent for extent in range(self._arena.num_extents) if extent not in mapped), None)
        if self._ready is not None:
            self._preparing = self._thread.submit(self._map, [self._ready])

    def _settle(self) -> None:
        """Wait until nothing is being prepared. What went wrong there, whoever needs the memory meets again, and is told."""
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
            log.warning("host memory for swaps is not pinned, copies to it take longer: %s", error)

    def _unlock(self, extents: list[int]) -> None:
        locked = self._locked.intersection(extents)
        if not locked:
            return
        assert self._device is not None
        with self._device.current():
            for extent in locked:
                self._device.driver.call("cuMemHostUnregister", self._address + extent * self._arena.extent_bytes)
                self._locked.remove(extent)
