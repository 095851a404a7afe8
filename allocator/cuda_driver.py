"""The door to the CUDA driver: every call of it goes through `Driver.call`, and answers numbers or raises DriverError.

Calls have their C names and plain integers as arguments, in C's order, without the places for results: those come back as
a tuple. Where C takes a struct that says "memory of this device", the device's number stands in its place:

    call("cuMemCreate", size, device, 0) -> (handle,)
    call("cuMemSetAccess", address, size, device) -> ()
    call("cuMemGetAllocationGranularity", device, option) -> (granule,)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from .errors import DriverError, DriverUnavailable

# of CUresult
OUT_OF_MEMORY = 2
NOT_READY = 600

_SUPPORTS_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_RECOMMENDED = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED


class Driver(Protocol):
    """The seam. `CudaBindings` is the real one."""

    def call(self, name: str, *args: int) -> tuple[int, ...]:
        """Make one call of the driver; its results. From any thread. Raises DriverError unless it answers CUDA_SUCCESS."""
        ...


class CudaBindings:
    """The driver of this machine, through NVIDIA's package cuda-bindings. Its calls let go of the interpreter's lock.

    Raises DriverUnavailable where the package, the driver or a device is missing.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise DriverUnavailable(
                "an elastic pool on a CUDA device needs the package cuda-bindings, which is not installed: "
                "pip install 'pagetide[cuda]'"
            ) from error
        self._cuda: Any = driver
        self._adapted: dict[str, Callable[..., tuple[Any, ...]]] = {
            "cuDeviceGetAttribute": lambda attribute, device: (driver.CUdevice_attribute(attribute), device),
            "cuMemCreate": lambda size, device, flags: (size, self._memory_of(device), flags),
            "cuMemGetAllocationGranularity": lambda device, option: (
                self._memory_of(device),
                driver.CUmemAllocationGranularity_flags(option),
            ),
            "cuMemSetAccess": lambda address, size, device: (address, size, [self._access_of(device)], 1),
        }
        try:
            self.call("cuInit", 0)
        except (RuntimeError, DriverError) as error:  # RuntimeError: there is no libcuda to load
            raise DriverUnavailable(f"this machine has no usable NVIDIA driver or device: {error}") from error

    def call(self, name: str, *args: int) -> tuple[int, ...]:
        """See `Driver`."""
        adapt = self._adapted.get(name)
        code, *results = getattr(self._cuda, name)(*(adapt(*args) if adapt else args))
        if code != self._cuda.CUresult.CUDA_SUCCESS:
            raise DriverError(name, int(code), code.name)
        return tuple(map(int, results))

    def _memory_of(self, device: int) -> Any:
        properties = self._cuda.CUmemAllocationProp()
        properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        return properties

    def _access_of(self, device: int) -> Any:
        access = self._cuda.CUmemAccessDesc()
        access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access


class Device:
    """One CUDA device and its primary context, the one torch uses too, which is kept until `close`.

    `index` counts as torch does, among the devices that CUDA_VISIBLE_DEVICES leaves. Raises ValueError where there is
    no such device, DriverUnavailable where it cannot map memory by extents, DriverError.
    """

    def __init__(self, driver: Driver, index: int) -> None:
        self.driver = driver
        self.index = index
        self.number = device_number(driver, index)
        (self._context,) = driver.call("cuDevicePrimaryCtxRetain", self.number)

    @contextmanager
    def current(self) -> Iterator[None]:
        """The device's context is this thread's current one inside; the one before, another device's too, after."""
        self.driver.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent")

    def free_bytes(self) -> int:
        """Bytes that nobody holds, by cuMemGetInfo. Raises DriverError."""
        with self.current():
            return self.driver.call("cuMemGetInfo")[0]

    def close(self) -> None:
        """Let go of the context: the driver ends it with its last user."""
        self.driver.call("cuDevicePrimaryCtxRelease", self.number)


def device_number(driver: Driver, index: int) -> int:
    """The driver's number of a device that can map memory. Raises ValueError, DriverUnavailable, DriverError."""
    (count,) = driver.call("cuDeviceGetCount")
    if not 0 <= index < count:
        raise ValueError(f"there is no CUDA device {index}: this process sees {count}, counted from 0")
    (number,) = driver.call("cuDeviceGet", index)
    (supported,) = driver.call("cuDeviceGetAttribute", _SUPPORTS_VIRTUAL_MEMORY, number)
    if not supported:
        raise DriverUnavailable(f"cuda:{index} cannot map memory by extents: it lacks virtual memory management")
    return number


def recommended_granule(driver: Driver, number: int) -> int:
    """What the device best maps multiples of, in bytes, by cuMemGetAllocationGranularity: 2 MiB on every chip so far."""
    return driver.call("cuMemGetAllocationGranularity", number, _RECOMMENDED)[0]
