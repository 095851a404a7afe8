"""Access to the CUDA driver: every call goes through `CudaDriver.call`, which returns integers or raises DriverError.

Calls have their C names and take plain integers, in C's order without the output parameters: outputs are returned as a
tuple. Where C takes a struct that says "memory of this device", the device's number stands in its place:

    call("cuMemCreate", size, device, 0) -> (handle,)
    call("cuMemcpyBatchAsync", targets, sources, sizes, count, stream) -> ()

`targets`, `sources` and `sizes` are addresses of `count` 64-bit numbers each, read during the call. All copies have the
same attributes: sources are read in stream order, and overlap with compute is preferred.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ..common.error_text import install_command
from .errors import DriverError, DriverUnavailable

# CUresult codes
OUT_OF_MEMORY = 2
NOT_FOUND = 500
NOT_READY = 600

_USES_HOST_POINTERS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_SUPPORTS_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_BATCH_VERSION = 12080  # the CUDA version of the call's signature; every later driver has it too
_RECOMMENDED = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED


class CudaDriver(Protocol):
    """The driver interface, which tests replace. `CudaBindings` is the real implementation."""

    def call(self, name: str, *args: int) -> tuple[int, ...]:
        """Make one driver call and return its results. Thread-safe. Raises DriverError unless the result is CUDA_SUCCESS."""
        ...

    def pause(self, seconds: float) -> None:
        """Wait before a call is made again."""
        ...


class CudaBindings:
    """This machine's driver, through NVIDIA's package cuda-bindings. Calls release the GIL.

    Raises DriverUnavailable if the package, the driver or a device is missing.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise DriverUnavailable(
                "an elastic pool on a CUDA device needs the package cuda-bindings, which is not installed: "
                f"{install_command('cuda')}"
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
        self._batch: _MemcpyBatch | None = None
        try:
            self.call("cuInit", 0)
        except (RuntimeError, DriverError) as error:  # RuntimeError: libcuda is missing
            raise DriverUnavailable(f"this machine has no usable NVIDIA driver or device: {error}") from error

    def pause(self, seconds: float) -> None:
        """Wait before a call is made again."""
        time.sleep(seconds)

    def call(self, name: str, *args: int) -> tuple[int, ...]:
        """See `CudaDriver`."""
        if name == "cuMemcpyBatchAsync":
            self._batch = self._batch or _MemcpyBatch(self._cuda)
            return self._batch(*args)
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


class _MemcpyBatch:
    """cuMemcpyBatchAsync as in CUDA 12.8, called by its address. Raises DriverError, also if the driver lacks it.

    CUDA 13 dropped an argument. The bindings take only lists of objects, which take longer to build than the copies,
    and older bindings lack the call.
    """

    def __init__(self, cuda: Any) -> None:
        code, address, *_ = cuda.cuGetProcAddress(b"cuMemcpyBatchAsync", _BATCH_VERSION, 0)
        if code != cuda.CUresult.CUDA_SUCCESS:
            raise DriverError("cuGetProcAddress", int(code), code.name)
        if not address or not hasattr(cuda, "CUmemcpyAttributes"):
            raise DriverError("cuMemcpyBatchAsync", NOT_FOUND, "CUDA_ERROR_NOT_FOUND: it came with CUDA 12.8")
        pointer, number = ctypes.c_void_p, ctypes.c_size_t
        prototype = ctypes.CFUNCTYPE(  # releases the GIL
            ctypes.c_int, pointer, pointer, pointer, number, pointer, pointer, number, pointer, pointer
        )
        self._cuda = cuda
        self._function = prototype(int(address))
        self._attributes = cuda.CUmemcpyAttributes()
        self._attributes.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._attributes.flags = int(cuda.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)

    def __call__(self, targets: int, sources: int, sizes: int, count: int, stream: int) -> tuple[()]:
        # index of the first copy of the attributes; index of the failed copy
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = self._function(
            targets, sources, sizes, count, int(self._attributes.getPtr()), ctypes.addressof(first), 1,
            ctypes.addressof(failed), stream,
        )  # fmt: skip
        if code:
            raise DriverError("cuMemcpyBatchAsync", code, self._cuda.CUresult(code).name)
        return ()


class CudaDevice:
    """One CUDA device and its primary context, which torch uses too; retained until `close`.

    `index` counts as torch does, among the devices in CUDA_VISIBLE_DEVICES. Raises ValueError if there is no such
    device, DriverUnavailable if it cannot map memory by extents, DriverError.
    """

    def __init__(self, driver: CudaDriver, index: int) -> None:
        self.driver = driver
        self.index = index
        self.number = device_number(driver, index)
        (self._context,) = driver.call("cuDevicePrimaryCtxRetain", self.number)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's context current in this thread; on exit restore the previous one, even of another device."""
        self.driver.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent")

    def free_bytes(self) -> int:
        """Free bytes by cuMemGetInfo. Raises DriverError."""
        with self.current():
            return self.driver.call("cuMemGetInfo")[0]

    def close(self) -> None:
        """Release the context: the driver destroys it with its last user."""
        self.driver.call("cuDevicePrimaryCtxRelease", self.number)


def device_number(driver: CudaDriver, index: int) -> int:
    """The driver's number of a device that can map memory. Raises ValueError, DriverUnavailable, DriverError."""
    (count,) = driver.call("cuDeviceGetCount")
    if not 0 <= index < count:
        raise ValueError(f"there is no CUDA device {index}: this process sees {count}, counted from 0")
    (number,) = driver.call("cuDeviceGet", index)
    (supported,) = driver.call("cuDeviceGetAttribute", _SUPPORTS_VIRTUAL_MEMORY, number)
    if not supported:
        raise DriverUnavailable(f"cuda:{index} cannot map memory by extents: it lacks virtual memory management")
    return number


def recommended_granule(driver: CudaDriver, number: int) -> int:
    """The recommended mapping granularity in bytes, by cuMemGetAllocationGranularity: 2 MiB on every chip so far."""
    return driver.call("cuMemGetAllocationGranularity", number, _RECOMMENDED)[0]


def uses_host_pointers(driver: CudaDriver, index: int) -> bool:
    """Whether kernels can access locked host memory at the host's addresses. `index` counts as torch does.

    Raises DriverError.
    """
    (number,) = driver.call("cuDeviceGet", index)
    return bool(driver.call("cuDeviceGetAttribute", _USES_HOST_POINTERS, number)[0])
