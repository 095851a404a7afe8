"""An arena of CUDA memory: one reserved address range, mapped and unmapped by extents through the driver.

    reserve  cuMemAddressReserve                         addresses, no memory
    map      cuMemCreate, cuMemMap, cuMemSetAccess       one handle per extent, mapped as a whole, at offset 0
             cuMemsetD32Async, cuStreamSynchronize       zeros: the driver promises none, and a handle may be a used one
    unmap    cuMemUnmap, cuMemRelease                    releasing and creating may run in a thread (cuda_handles.py)
    last     cuMemAddressFree                            when the last view of the range is gone

The driver does not wait for running work: cuMemUnmap under a running kernel is a fault that ends the process, and
mapping under one faults on some chips. **Call `map`, `unmap` and `close` only at fences: no kernel that touches this
arena may be queued or running.** Nothing here waits for the device, except for the zeros of `map`, on the arena's own
stream. Extents of 32 to 128 MiB make the calls worthwhile: 2 MiB ones cost some thirty times as much per byte.
docs/decisions/0013-cuda-arena.md gives the reasons.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from functools import partial

from ..common.on_error import OnError
from .arena import ExtentSet, extents_to_map, extents_to_unmap, runs
from .cuda_driver import NOT_READY, OUT_OF_MEMORY, CudaBindings, CudaDevice, CudaDriver, device_number, recommended_granule
from .cuda_handles import HandlePool
from .errors import BlockMisuse, DriverError, OutOfDeviceMemory
from .lease_record import HeldBounds

_STREAM_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit synchronization with other streams
_ACCESS_ATTEMPTS = 9
_FIRST_PAUSE_S = 0.0005  # doubled each time: an eighth of a second in all


class CudaArena(ExtentSet):
    """`num_extents` extents of `extent_bytes` on a CUDA device, at fixed addresses; see `Arena`.

    `device_index` counts as torch does. `budget()` returns the bytes free to take, by default from cuMemGetInfo; `map`
    checks it first. A failed driver call raises DriverError: from `map` with nothing mapped; after one from `unmap` or
    `close`, `mapped_extents` and `held` say what is left. Thread-safe; calls run one at a time.

    With `ready_limit_bytes` up to that many bytes may be held without being mapped: `prepare` creates memory ahead, and
    `unmap` leaves releasing to a thread. A lease then counts `held`, and memory is back after `trim`. No thread runs
    before the first `prepare` or `unmap`.

    Raises ValueError for an unknown device and for sizes that are not whole numbers of granules, DriverUnavailable,
    OutOfDeviceMemory if no address range is left, DriverError.
    """

    def __init__(
        self,
        num_extents: int,
        extent_bytes: int,
        device_index: int = 0,
        *,
        driver: CudaDriver | None = None,
        budget: Callable[[], int] | None = None,
        ready_limit_bytes: int = 0,
    ) -> None:
        if num_extents < 1 or ready_limit_bytes < 0:
            raise ValueError(
                f"num_extents must be at least 1 and ready_limit_bytes at least 0, got {num_extents} and {ready_limit_bytes}"
            )
        driver = driver or CudaBindings()
        granule = self.granule_bytes(device_index, driver)
        if extent_bytes < 1 or extent_bytes % granule:
            raise ValueError(f"extent_bytes must be a multiple of the device's granule {granule}, got {extent_bytes}")
        super().__init__(num_extents, extent_bytes)
        self._lock = threading.Lock()
        self._range = _Range(driver, device_index, num_extents, extent_bytes, ready_limit_bytes // extent_bytes)
        self._budget = budget or self._range.device.free_bytes
        self._buffer: CudaBuffer | None = CudaBuffer(self._range.base, num_extents * extent_bytes)
        self._owner = weakref.ref(self._buffer)
        # Not at exit: tensors may still be in use then, and the driver reclaims everything when the process ends.
        weakref.finalize(self._buffer, self._range.free).atexit = False

    @staticmethod
    def granule_bytes(device_index: int = 0, driver: CudaDriver | None = None) -> int:
        """The recommended mapping granularity in bytes; extents are multiples of it. Raises the errors of the class."""
        driver = driver or CudaBindings()
        return recommended_granule(driver, device_number(driver, device_index))

    @property
    def held(self) -> HeldBounds:
        """Bounds on the device bytes held until the next call; see `Arena`."""
        least, most = self._range.pool.num_held
        return HeldBounds(least * self.extent_bytes, most * self.extent_bytes)

    @property
    def buffer(self) -> CudaBuffer:
        """The whole range; it and every tensor made from it by `torch.as_tensor(buffer, device="cuda:N")` own it.

        Raises BlockMisuse once closed, and unless extent 0 is mapped: torch queries the driver about the first address.
        """
        with self._lock:
            buffer = self._open()
            if 0 not in self._mapped:
                raise BlockMisuse("map extent 0 before the arena is viewed: no device is known for unmapped addresses")
            return buffer

    def map(self, extents: Sequence[int]) -> None:
        """Put zeros behind `extents`, all or none. Only at a fence.

        Raises OutOfDeviceMemory; DriverError; BlockMisuse if one is mapped.
        """
        with self._lock:
            owner = self._open()
            wanted = extents_to_map(extents, self.num_extents, self._mapped)
            if not wanted:
                return
            self._refuse_beyond_budget(len(wanted))
            try:
                with OnError(self._roll_back), self._range.busy():
                    self._range.keep_only(self._mapped)  # left over if an earlier roll-back failed
                    self._range.put_behind(sorted(wanted))
                    self._range.pool.start(owner)
            except DriverError as error:
                if error.code == OUT_OF_MEMORY:
                    raise self._refusal(len(wanted) * self.extent_bytes, self._budget()) from error
                raise
            self._mapped |= wanted

    def unmap(self, extents: Sequence[int]) -> None:
        """Unmap `extents`. Only at a fence. `held` says when the device has the memory back.

        That is now, except for up to `ready_limit_bytes`, which follow a little later; `trim` waits for them. Raises
        BlockMisuse if an extent is not mapped; DriverError after all were tried.
        """
        with self._lock:
            owner = self._open()
            unwanted = extents_to_unmap(extents, self.num_extents, self._mapped)
            if not unwanted:
                return
            with self._range.busy():
                try:
                    self._range.keep_only(self._mapped - unwanted)
                finally:
                    self._mapped = self._mapped.intersection(self._range.behind)
                    self._range.pool.shed()
                    self._range.pool.start(owner)

    def prepare(self, num_extents: int) -> None:
        """Create memory for the next `num_extents` extents in the background, up to the ready limit.

        It counts as held until it is mapped, or released by `trim` or `prepare(0)`. If the device has less, less is
        created, and `map` asks for the rest; `drain_failures` returns what the driver refused. Not during CUDA graph
        capture. Raises ValueError for a negative number; DriverError, with nothing requested.
        """
        if num_extents < 0:
            raise ValueError(f"num_extents must not be negative, got {num_extents}")
        with self._lock:
            owner, pool = self._open(), self._range.pool
            if not num_extents and pool.is_emptying:  # do not wait for its current driver call
                return
            with pool.first():
                wanted = min(num_extents, self.num_extents - len(self._mapped))
                if wanted > pool.num_ready:  # never take the last free byte, as in `map`
                    wanted = min(wanted, pool.num_ready + max(0, self._budget()) // self.extent_bytes)
                pool.want(wanted)
                pool.start(owner)

    def trim(self) -> None:
        """Release memory that is held but not mapped, and wait until the device has it back.

        Raises DriverError after all was tried; `held` says what the driver kept.
        """
        with self._lock:
            self._open()
            self._range.give_back(all_but=self._mapped)

    def drain_failures(self) -> list[DriverError]:
        """Failures of prepare, release and roll-backs that no call raised, oldest first, each returned once."""
        return self._range.pool.drain_failures()

    def close(self) -> None:
        """Unmap and release everything and refuse further calls. Idempotent.

        Only at a fence. Raises DriverError after all was tried; another call retries the rest.
        """
        with self._lock:
            # A strong reference: the range must not be freed during this call.
            owner, self._buffer = self._owner(), None
            if owner is None:
                return  # freed with its last view
            try:
                self._range.give_back(all_but=frozenset())
            finally:
                self._mapped = self._mapped.intersection(self._range.behind)

    def _roll_back(self) -> None:
        """Undo a failed `map`, and release all memory that is not mapped."""
        try:
            self._range.give_back(all_but=self._mapped)
        except DriverError as error:
            self._range.pool.note(error)  # the caller gets the error of the map

    def _refuse_beyond_budget(self, count: int) -> None:
        """Check the budget first: creating until the driver refuses would take the last byte from all processes for a while."""
        missing_bytes = (count - self._range.pool.num_ready) * self.extent_bytes
        if missing_bytes > 0 and missing_bytes > (free_bytes := self._budget()):
            raise self._refusal(missing_bytes, free_bytes)

    def _refusal(self, asked_bytes: int, free_bytes: int) -> OutOfDeviceMemory:
        return OutOfDeviceMemory(asked_bytes, free_bytes, f"memory on cuda:{self._range.device.index}")

    def _open(self) -> CudaBuffer:
        if self._buffer is None:
            raise BlockMisuse("the arena is closed")
        return self._buffer


class CudaBuffer:
    """Owns an arena's address range: any reference keeps the range."""

    __slots__ = ("__weakref__", "_address", "_num_bytes")

    def __init__(self, address: int, num_bytes: int) -> None:
        self._address = address
        self._num_bytes = num_bytes

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """The range as bytes: uint8 [num_bytes]. https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html"""
        data = (self._address, False)  # writable
        return {"version": 3, "typestr": "|u1", "shape": (self._num_bytes,), "strides": None, "data": data}


class _Range:
    """An arena's driver resources: context, addresses, a stream, and the handles `behind` extents.

    It refers neither to the arena nor to the buffer, so that it can outlive both and end with the last view. Calls are
    made under the arena's lock, except `free`, which runs when no other user is left.
    """

    def __init__(self, driver: CudaDriver, device_index: int, num_extents: int, extent_bytes: int, ready_limit: int) -> None:
        # extent -> handle; more than the arena's mapped extents only after a DriverError
        self.behind: dict[int, int] = {}
        self._call = driver.call
        self._extent_bytes = extent_bytes
        self._pause = driver.pause
        length = num_extents * extent_bytes
        with ExitStack() as undo:
            self.device = CudaDevice(driver, device_index)
            undo.callback(self.device.close)
            with self.device.current():
                self.base = self._reserve(length)
                undo.callback(self._call_in_context, "cuMemAddressFree", self.base, length)
                (self._stream,) = self._call("cuStreamCreate", _STREAM_NON_BLOCKING)
                undo.callback(self._call_in_context, "cuStreamDestroy", self._stream)
            self.pool = HandlePool(self.device, extent_bytes, ready_limit)
            self._undo = undo.pop_all()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Make the device's context current, and hold off the pool's thread."""
        with self.pool.first(), self.device.current():
            yield

    def put_behind(self, extents: Sequence[int]) -> None:
        """Map zeroed memory behind `extents`, in ascending order. A failure may leave some mapped. Inside `busy`."""
        for extent in extents:
            handle = self.pool.take()
            with OnError(partial(self.pool.give, handle)):
                self._call("cuMemMap", self._address(extent), self._extent_bytes, 0, handle, 0)
            self.behind[extent] = handle
        for first, last in runs(extents):
            self._allow_access(self._address(first), (last - first) * self._extent_bytes)
        try:
            for extent in extents:
                self._call("cuMemsetD32Async", self._address(extent), 0, self._extent_bytes // 4, self._stream)
        finally:  # also after a failure: the others must finish before they lose their memory
            self._call("cuStreamSynchronize", self._stream)

    def keep_only(self, extents: AbstractSet[int]) -> None:
        """Unmap every other extent; their handles become ready. Inside `busy`. Raises DriverError after all were tried."""
        errors = []
        for extent in sorted(self.behind.keys() - extents):
            try:
                self._call("cuMemUnmap", self._address(extent), self._extent_bytes)
            except DriverError as error:
                errors.append(error)
            else:
                self.pool.give(self.behind.pop(extent))
        if errors:
            raise errors[0]

    def give_back(self, all_but: AbstractSet[int]) -> None:
        """Unmap every other extent and release all ready handles. Raises DriverError after all were tried."""
        self.pool.join()
        if self.pool.num_ready or self.behind.keys() - all_but:
            with self.busy():
                try:
                    self.keep_only(all_but)
                finally:
                    self.pool.release_all()

    def free(self) -> None:
        """Release everything. If the arena was not closed, first wait for work that may still run on the device."""
        with self._undo:  # runs the remaining steps after any failure
            try:
                if self.behind:
                    self._call_in_context("cuCtxSynchronize")
            finally:
                self.give_back(all_but=frozenset())

    def _allow_access(self, address: int, length: int) -> None:
        """Call cuMemSetAccess; retry after a pause while the driver returns NOT_READY. Raises DriverError."""
        for attempt in range(_ACCESS_ATTEMPTS):
            try:
                self._call("cuMemSetAccess", address, length, self.device.number)
                return
            except DriverError as error:
                if error.code != NOT_READY or attempt == _ACCESS_ATTEMPTS - 1:
                    raise
                self._pause(_FIRST_PAUSE_S * 2**attempt)

    def _reserve(self, length: int) -> int:
        try:
            return self._call("cuMemAddressReserve", length, 0, 0, 0)[0]
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            free_bytes, _ = self._call("cuMemGetInfo")
            raise OutOfDeviceMemory(length, free_bytes, f"addresses on cuda:{self.device.index}") from error

    def _call_in_context(self, name: str, *args: int) -> None:
        with self.device.current():
            self._call(name, *args)

    def _address(self, extent: int) -> int:
        return self.base + extent * self._extent_bytes
