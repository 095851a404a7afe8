"""A CUDA driver without a device: addresses, handles and memory kept by the book, faults on order.

It answers the calls of `pagetide.allocator.cuda_driver.CudaDriver`. What the real driver would refuse, it refuses with the
same code, and writes it down in `violations`: code under test shall never do it, not even where it survives. Memory is
full of GARBAGE until something is written; what was written to a handle stays in it, as on the device. Host memory is real:
what is locked may be copied, within what was locked at a time. What is queued on a stream happens when the stream, or an event
behind it, is waited for: a kernel of another stream is anything that is done here without the driver.

`HostedCudaDriver` has addresses that tensors of the host can have: what is not mapped ends the process when it is touched.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from pagetide.allocator.errors import DriverError

GARBAGE = 0xDB
CODES = {"INVALID_VALUE": 1, "OUT_OF_MEMORY": 2, "INVALID_CONTEXT": 201, "NOT_FOUND": 500, "NOT_READY": 600}
INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, NOT_FOUND, NOT_READY = CODES.values()
NAMES = {code: f"CUDA_ERROR_{name}" for name, code in CODES.items()}
GRANULE = 4096
DEVICES = 2
_CONTEXT = 0xC0DE00  # + device


@dataclass
class Handle:
    """Physical memory: there until it is released and mapped nowhere."""

    memory: bytearray | mmap.mmap


@dataclass
class Mapping:
    handle: int
    size: int
    accessible: bool = False


@dataclass
class Fault:
    """Calls `first` to `last`, counted from 0 (of `name` alone, if given), fail with `code` and do nothing.

    But for cuCtxPopCurrent: what it answers is the error of something before, and it pops.
    """

    first: int
    last: int
    code: int
    name: str | None = None


@dataclass
class FakeCudaDriver:
    """Thread-safe. `total_bytes` of memory on each of two devices, of which `foreign_bytes` are someone else's."""

    total_bytes: int = 1 << 30
    foreign_bytes: int = 0
    supported: bool = True  # virtual memory management
    host_pointers: bool = True  # kernels reach locked host memory at the host's addresses
    faults: list[Fault] = field(default_factory=list)
    before: Callable[[str], None] = lambda name: None  # runs before each call, outside the lock: may wait
    pause: Callable[[float], None] = lambda seconds: None
    calls: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._numbers = iter(range(1, 1 << 30))
        self._counts: Counter[str] = Counter()
        self._retained: Counter[int] = Counter()
        self._stacks: dict[int, list[int]] = {}
        self._ranges: dict[int, int] = {}
        self._handles: dict[int, Handle] = {}
        self._mappings: dict[int, Mapping] = {}
        self._streams: dict[int, list[Callable[[], None]]] = {}
        self._events: dict[int, tuple[int, Callable[[], None]] | None] = {}  # where each was recorded, and its mark there
        self.locked: dict[int, int] = {}  # bytes by the first address

    def call(self, name: str, *args: int) -> tuple[int, ...]:
        self.before(name)
        with self._lock:
            index, of_name = len(self.calls), self._counts[name]
            self.calls.append(name)
            self._counts[name] += 1
            for fault in self.faults:
                if fault.name in (None, name) and fault.first <= (of_name if fault.name else index) <= fault.last:
                    if name == "cuStreamSynchronize":
                        self._streams[args[0]].clear()  # work that failed does not run any more
                    if name == "cuCtxPopCurrent":
                        self._cuCtxPopCurrent()  # it tells of what failed before, and pops all the same
                    raise DriverError(name, fault.code, NAMES[fault.code])
            return getattr(self, f"_{name}")(*args) or ()

    @property
    def taken_bytes(self) -> int:
        """Physical memory that exists."""
        return sum(len(handle.memory) for handle in self._handles.values())

    @property
    def mapped_addresses(self) -> set[int]:
        return set(self._mappings)

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.foreign_bytes - self.taken_bytes

    def leaks(self) -> list[str]:
        """What is still held. Nothing, at the end of a test."""
        held = {
            "address ranges": self._ranges,
            "handles": self._handles,
            "mappings": self._mappings,
            "streams": self._streams,
            "events": self._events,
            "locked host memory": self.locked,
            "contexts": {key: count for key, count in self._retained.items() if count},
            "contexts current": {thread: stack for thread, stack in self._stacks.items() if stack},
        }
        return [f"{what}: {things}" for what, things in held.items() if things]

    def read(self, address: int, length: int) -> bytes:
        """What a kernel on another stream would read there, within one mapping."""
        with self._lock:
            memory, start = self._accessible(address, length)
            return bytes(memory[start : start + length])

    def write(self, address: int, data: bytes) -> None:
        """What a kernel on another stream would do."""
        with self._lock:
            memory, start = self._accessible(address, len(data))
            memory[start : start + len(data)] = data

    def _cuDeviceGetCount(self) -> tuple[int]:
        return (DEVICES,)

    def _cuDeviceGet(self, index: int) -> tuple[int]:
        self._expect(0 <= index < DEVICES, f"device {index}")
        return (index,)

    def _cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int]:
        self._expect(attribute in (91, 102), f"attribute {attribute}")
        return (int(self.supported if attribute == 102 else self.host_pointers),)

    def _cuMemGetAllocationGranularity(self, device: int, option: int) -> tuple[int]:
        self._expect(option in (0, 1), f"granularity option {option}")
        return (GRANULE,)

    def _cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int]:
        self._retained[device] += 1
        return (_CONTEXT + device,)

    def _cuDevicePrimaryCtxRelease(self, device: int) -> None:
        self._expect(self._retained[device] > 0, "release of a context that nobody holds")
        self._retained[device] -= 1

    def _cuCtxPushCurrent(self, context: int) -> None:
        self._expect(self._retained[context - _CONTEXT] > 0, "push of a context that nobody holds")
        self._stack().append(context)

    def _cuCtxPopCurrent(self) -> tuple[int]:
        self._in_context()
        return (self._stack().pop(),)

    def _cuCtxSynchronize(self) -> None:
        self._in_context()
        for stream in self._streams:
            self._cuStreamSynchronize(stream)

    def _cuMemGetInfo(self) -> tuple[int, int]:
        self._in_context()
        return (self.free_bytes, self.total_bytes)

    def _cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[int]:
        self._in_context()
        self._expect(size > 0 and size % GRANULE == 0 and alignment == address == flags == 0, "an odd reservation")
        base = self._addresses(size)
        self._ranges[base] = size
        return (base,)

    def _cuMemAddressFree(self, address: int, size: int) -> None:
        self._in_context()
        self._expect(self._ranges.get(address) == size, "free of addresses that are not a range")
        self._expect(not self._inside(address, size), "free of addresses that are mapped")
        del self._ranges[address]
        self._forget(address, size)

    def _cuMemCreate(self, size: int, device: int, flags: int) -> tuple[int]:
        self._in_context()
        self._expect(size > 0 and size % GRANULE == 0 and flags == 0, f"a handle of {size} bytes")
        if size > self.free_bytes:
            raise DriverError("cuMemCreate", OUT_OF_MEMORY, NAMES[OUT_OF_MEMORY])
        handle = next(self._numbers)
        self._handles[handle] = Handle(self._memory(size))
        return (handle,)

    def _cuMemRelease(self, handle: int) -> None:
        self._in_context()
        self._expect(handle in self._handles, "release of a handle that does not exist")
        self._expect(all(m.handle != handle for m in self._mappings.values()), "release of a handle that is mapped")
        del self._handles[handle]

    def _cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        self._in_context()
        self._expect(handle in self._handles, "map of a handle that does not exist")
        self._expect(size == len(self._handles[handle].memory) and offset == flags == 0, "map of a part of a handle")
        self._expect(all(m.handle != handle for m in self._mappings.values()), "map of a handle that is mapped")
        inside = any(base <= address and address + size <= base + length for base, length in self._ranges.items())
        self._expect(inside, "map outside of reserved addresses")
        self._expect(not self._inside(address, size), "map of addresses that are mapped")
        self._mappings[address] = Mapping(handle, size)

    def _cuMemSetAccess(self, address: int, size: int, device: int) -> None:
        self._in_context()
        covered = self._inside(address, size)
        self._expect(sum(m.size for m in covered) == size, "access to a range that is not all mapped")
        for start, mapping in self._mappings.items():
            if mapping in covered and not mapping.accessible:
                self._show(start, self._handles[mapping.handle].memory)
                mapping.accessible = True

    def _cuMemUnmap(self, address: int, size: int) -> None:
        self._in_context()
        mapping = self._mappings.get(address)
        self._expect(mapping is not None and mapping.size == size, "unmap of addresses that are not a mapping")
        self._expect(not any(self._streams.values()), "unmap under work that is queued")
        del self._mappings[address]
        self._hide(address, size)

    def _cuStreamCreate(self, flags: int) -> tuple[int]:
        self._in_context()
        self._expect(flags == 1, "a stream that waits for others")
        stream = next(self._numbers)
        self._streams[stream] = []
        return (stream,)

    def _cuStreamDestroy(self, stream: int) -> None:
        self._in_context()
        self._expect(stream in self._streams, "destruction of a stream that does not exist")
        self._expect(not self._streams[stream], "destruction of a stream with work queued")
        del self._streams[stream]

    def _cuMemsetD32Async(self, address: int, value: int, count: int, stream: int) -> None:
        self._in_context()
        memory, start = self._accessible(address, 4 * count)

        def run() -> None:
            memory[start : start + 4 * count] = value.to_bytes(4, "little") * count

        self._streams[stream].append(run)

    def _cuStreamSynchronize(self, stream: int) -> None:
        self._in_context()
        while self._streams[stream]:
            self._streams[stream].pop(0)()

    def _cuMemHostRegister(self, address: int, size: int, flags: int) -> None:
        self._in_context()
        self._expect(size > 0 and flags == 3, "locked memory that is neither portable nor mapped")
        apart = all(address + size <= start or start + other <= address for start, other in self.locked.items())
        self._expect(apart, "locked memory is locked again")
        ctypes.string_at(address, size)  # a range that may not be read ends the process
        self.locked[address] = size

    def _cuMemHostUnregister(self, address: int) -> None:
        self._in_context()
        self._expect(address in self.locked, "unlocking of what is not locked")
        del self.locked[address]

    def _cuMemcpyBatchAsync(self, targets: int, sources: int, sizes: int, count: int, stream: int) -> None:
        self._expect(count > 0 and stream in self._streams, "a batch of nothing, or in no stream of its own")
        columns = [(ctypes.c_uint64 * count).from_address(numbers)[:] for numbers in (targets, sources, sizes)]
        copies = list(zip(*columns, strict=True))
        for target, source, size in copies:
            for address in (target, source):
                inside = any(a <= address and address + size <= a + length for a, length in self.locked.items())
                self._expect(size > 0 and inside, f"a copy of {size} bytes at {address:#x}, not within what was locked")

        def run() -> None:
            for copy in copies:
                ctypes.memmove(*copy)

        self._streams[stream].append(run)

    def _cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> None:
        self._in_context()
        self._expect(size > 0 and stream in self._streams, "a copy of nothing, or in no stream of its own")
        locked = any(a <= source and source + size <= a + length for a, length in self.locked.items())
        apart = all(source + size <= a or a + length <= source for a, length in self.locked.items())
        self._expect(locked or apart, f"a copy of {size} bytes from {source:#x}, of which a part is locked")
        places = list(self._pieces(target, size))

        def run() -> None:
            done = 0
            for memory, start, length in places:
                memory[start : start + length] = ctypes.string_at(source + done, length)
                done += length

        self._streams[stream].append(run)
        if not locked:  # the driver reads what may move at once
            self._cuStreamSynchronize(stream)

    def _cuEventCreate(self, flags: int) -> tuple[int]:
        self._in_context()
        self._expect(flags == 2, "an event that takes times")
        event = next(self._numbers)
        self._events[event] = None
        return (event,)

    def _cuEventRecord(self, event: int, stream: int) -> None:
        self._in_context()
        self._expect(event in self._events and stream in self._streams, "an event that does not exist, or in no stream")

        def mark() -> None:
            return None

        self._streams[stream].append(mark)
        self._events[event] = stream, mark

    def _cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        """Of a stream of others: their work is done as it is queued, so all before the event is done now."""
        self._in_context()
        self._expect(event in self._events and flags == 0, "a wait for an event that does not exist")
        recorded = self._events[event]
        if recorded is not None and recorded[1] in (queue := self._streams[recorded[0]]):
            while (first := queue.pop(0)) is not recorded[1]:
                first()

    def _cuEventDestroy(self, event: int) -> None:
        self._in_context()
        self._expect(event in self._events, "destruction of an event that does not exist")
        del self._events[event]

    def _addresses(self, size: int) -> int:
        return next(self._numbers) << 44

    def _forget(self, address: int, size: int) -> None:
        """These addresses are used no more."""

    def _memory(self, size: int) -> bytearray | mmap.mmap:
        return bytearray([GARBAGE]) * size

    def _show(self, address: int, memory: bytearray | mmap.mmap) -> None:
        """Memory may be touched there from now on."""

    def _hide(self, address: int, size: int) -> None:
        """Nothing may be touched there from now on."""

    def _pieces(self, address: int, size: int) -> Iterator[tuple[bytearray | mmap.mmap, int, int]]:
        """Memory, first byte and bytes behind addresses that may lie in several mappings."""
        while size:
            inside = self._inside(address, 1)
            self._expect(bool(inside) and inside[0].accessible, f"a copy to {address:#x}, which it may not touch")
            start = next(start for start, mapping in self._mappings.items() if mapping is inside[0])
            length = min(size, start + inside[0].size - address)
            yield self._handles[inside[0].handle].memory, address - start, length
            address, size = address + length, size - length

    def _stack(self) -> list[int]:
        return self._stacks.setdefault(threading.get_ident(), [])

    def _in_context(self) -> None:
        self._expect(bool(self._stack()), "a call without a context", INVALID_CONTEXT)

    def _inside(self, address: int, size: int) -> list[Mapping]:
        return [m for start, m in self._mappings.items() if start < address + size and address < start + m.size]

    def _accessible(self, address: int, length: int) -> tuple[bytearray | mmap.mmap, int]:
        for start, mapping in self._mappings.items():
            if start <= address and address + length <= start + mapping.size and mapping.accessible:
                return self._handles[mapping.handle].memory, address - start
        self._expect(False, f"a kernel touches {length} bytes at {address:#x} that it may not")
        raise AssertionError

    def _expect(self, condition: bool, violation: str, code: int = INVALID_VALUE) -> None:
        if not condition:
            self.violations.append(f"call {len(self.calls) - 1}, {self.calls[-1]}: {violation}")
            raise DriverError(self.calls[-1], code, NAMES[code])


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_FIXED, _HIDDEN = 0x10, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # without reserving memory


def _map(address: int, size: int, protection: int, flags: int, file: int) -> int:
    found = _LIBC.mmap(address, size, protection, flags, file, 0)
    assert found is not None and (not address or found == address), os.strerror(ctypes.get_errno())
    return int(found)


class _Shared(mmap.mmap):
    """A file in memory, mapped once for the driver itself."""

    file: BinaryIO

    @classmethod
    def of(cls, size: int) -> _Shared:
        file = os.fdopen(os.memfd_create("handle"), "r+b")
        file.truncate(size)
        memory = cls(file.fileno(), size)
        memory.file = file
        return memory


class HostedCudaDriver(FakeCudaDriver):
    """A driver with real addresses: handles are files in memory, which are mapped where the device's memory would be."""

    def _addresses(self, size: int) -> int:
        return _map(0, size, 0, _HIDDEN, -1)

    def _forget(self, address: int, size: int) -> None:
        _LIBC.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))

    def _memory(self, size: int) -> mmap.mmap:
        memory = _Shared.of(size)
        memory[:] = bytes([GARBAGE]) * size
        return memory

    def _show(self, address: int, memory: bytearray | mmap.mmap) -> None:
        assert isinstance(memory, _Shared)
        file = memory.file.fileno()
        _map(address, len(memory), mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, file)

    def _hide(self, address: int, size: int) -> None:
        _map(address, size, 0, _HIDDEN | _FIXED, -1)
