"""Weights on a CUDA device in an arena of their own, so that their memory can be given back, and had again, in its place.

    of      a copy in pinned host memory, once; extents are mapped and filled from it by layers; tensors become views of them
    drop    all extents are unmapped; on level 2 the host's copy goes to an unnamed file
    fill    all extents are mapped, or none; the copies of all layers are queued, and each layer waits for its own

Tensors keep their addresses: see docs/decisions/0075-weights-that-sleep.md.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...allocator.cuda_arena import CudaArena
from ...allocator.cuda_driver import CudaBindings, CudaDevice
from ...allocator.errors import DriverError, OutOfDeviceMemory
from ...allocator.host_arena import HostArena
from ...allocator.host_extents import HostExtents
from ...cache.storage import as_bytes
from ...common.on_error import OnError
from ...common.units import MIB
from ..process.memory_usage import trim
from .mapped_weights import Level, own_weights, weights_of, write_at
from .shard_check import layers_of
from .weight_cache import WeightCache

log = logging.getLogger(__name__)

_ALIGNMENT = 512  # of a tensor's memory, as torch's own
_LARGEST_EXTENT_BYTES = 128 * MIB
_LEAST_EXTENTS = 32
_READ_BYTES = 64 * MIB  # at once
_STREAM_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_EVENT_WITHOUT_TIME = 2  # CU_EVENT_DISABLE_TIMING

# By the address of their storage: the tensors over it, with the place in it at which each begins, in elements
Tensors = dict[int, list[tuple[torch.Tensor, int]]]


class Closable(Protocol):
    """Something that is held until `close`."""

    def close(self) -> None: ...


Acquire = Callable[[int], Closable | None]  # for so many bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """Weights that are copied together, and the module that waits for them: a layer; the model, for those outside of layers."""

    module: nn.Module
    begin: int  # bytes in the arena
    end: int
    places: dict[int, tuple[int, int]]  # of storages, by their first addresses: bytes from the arena's begin, and bytes


class ArenaWeights:
    """The weights of a model on a CUDA device, in an arena. Make it with `of`. For one thread at a time.

    The model may be called, on the device's current stream, unless `drop` was called last.
    """

    def __init__(self, arena: CudaArena, host: HostCopy, stages: list[_Stage], device: torch.device) -> None:
        self.num_bytes = arena.num_extents * arena.extent_bytes
        self._arena, self._host, self._stages, self._device = arena, host, stages, device
        self._base = 0  # address of the arena, from the first mapping on
        self._hooks: list[RemovableHandle] = []
        weakref.finalize(self, host.close).atexit = False  # the driver unlocks memory when the process ends

    @classmethod
    def of(cls, model: nn.Module, device: torch.device, lease: Acquire = lambda size: None) -> ArenaWeights:
        """Let the weights of `model` on `device`, which nothing may use or write meanwhile, lie in an arena.

        `lease`: See `HostCopy`. Raises OutOfDeviceMemory, also of host memory, DriverUnavailable, DriverError, and what `lease`
        raises; the model is as it was.
        """
        driver, index = CudaBindings(), device.index or 0
        stages, granule = _stages(model, device), CudaArena.granule_bytes(index, driver)
        total = max(1, stages[-1].end)
        extent_bytes = max(1, min(_LARGEST_EXTENT_BYTES, total // _LEAST_EXTENTS) // granule) * granule
        host = HostCopy(-(-total // extent_bytes) * extent_bytes, CudaDevice(driver, index), lease)
        with OnError(host.close):
            host.take()
            host.refuse_unpinned()
            tensors = _tensors_over(model, {address for stage in stages for address in stage.places}, device)
            for stage in stages:
                for address, (place, size) in stage.places.items():
                    host.bytes[place : place + size].copy_(_storage_bytes(tensors[address][0][0]))
            host.is_filled = True
            trim(device)  # what torch keeps for later is no room for an arena
            arena = CudaArena(len(host.bytes) // extent_bytes, extent_bytes, index, driver=driver)
            weights = cls(arena, host, stages, device)
            with OnError(partial(weights._move_back, tensors)):
                weights._move(tensors)
        return weights

    @property
    def uncounted_bytes(self) -> int:
        """Bytes of the device that the arena holds, which torch does not count."""
        return self._arena.held.upper_bytes

    def drop(self, level: Level) -> None:
        """Give the device's memory back; on level 2 that of the host's copy too, which is written to an unnamed file first.

        No kernel may use the weights until `fill`. Idempotent. Raises OSError if the file cannot be made, and DriverError.
        """
        self.stop()
        if level == 2:
            self._host.leave()
        self._unmap()

    def fill(self) -> None:
        """Map all extents, and queue the copies of all layers on a stream of their own. Each layer waits for its own on the
        device when it is called first, and the model for what lies outside of layers.

        Raises OutOfDeviceMemory, also of host memory, DriverError, OSError, and what `lease` raises, with nothing mapped.
        """
        self.stop()
        reads = not self._host.is_filled
        with OnError(partial(self._empty, reads)):
            self._host.take()
            self._arena.map(sorted(frozenset(range(self._arena.num_extents)) - self._arena.mapped_extents))
            for number, stage in enumerate(self._stages):
                if reads:
                    self._host.read(stage.begin, stage.end)
                self._host.queue(stage.begin, stage.end, self._base + stage.begin)
                self._wait_at(stage.module, self._host.mark(number))
            self._host.is_filled = True

    def wait(self) -> None:
        """Wait for the copies of `fill`. Raises DriverError."""
        self._host.wait()

    def stop(self) -> None:
        """Wait for the copies of `fill`, and let no layer wait any more. Idempotent."""
        try:
            self._host.wait()
        except DriverError as error:  # whoever computes with the weights gets the device's error, too
            log.warning("weights were not all copied to %s: %s", self._device, error)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _wait_at(self, module: nn.Module, event: int) -> None:
        def wait(*_: Any) -> None:
            self._host.order(_current_stream(self._device), event)
            hook.remove()  # not if it raised: the layer must not compute with what is not there

        hook = module.register_forward_pre_hook(wait)
        self._hooks.append(hook)

    def _unmap(self) -> None:
        self._host.finish()  # what an engine that has ended left queued
        self._arena.unmap(sorted(self._arena.mapped_extents))
        self._arena.trim()  # what a mapping that failed could not undo

    def _empty(self, host_too: bool) -> None:
        """Undo a `fill` that failed, of which the caller gets the error."""
        self.stop()
        for undo in (self._unmap, *([self._host.give_back] if host_too else ())):
            try:
                undo()
            except DriverError as error:  # the next `drop` tries again
                log.warning("memory of weights on %s was not given back: %s", self._device, error)

    def _move(self, tensors: Tensors) -> None:
        """Map and fill the arena, and let `tensors` be views of it, layer by layer: their own memory is free then."""
        for stage in [one for one in self._stages if one.places]:
            first, end = stage.begin // self._arena.extent_bytes, -(-stage.end // self._arena.extent_bytes)
            self._arena.map(sorted(frozenset(range(first, end)) - self._arena.mapped_extents))
            memory = as_bytes(self._arena.buffer, self._device)
            self._base = memory.data_ptr()
            self._host.queue(stage.begin, stage.end, self._base + stage.begin)
            self._host.wait()
            for address, (place, _) in stage.places.items():
                _rebind(tensors[address], memory, place)
            trim(self._device)

    def _move_back(self, tensors: Tensors) -> None:
        """Undo a `_move` that failed: tensors have their own memory again, for which there is room once the arena has none."""
        try:
            self._host.wait()  # it may be what failed
            self._arena.close()
        except DriverError as error:
            log.warning("memory of weights on %s is not given back before the model is: %s", self._device, error)
        for stage in self._stages:
            for address, (place, size) in stage.places.items():
                if tensors[address][0][0].untyped_storage().data_ptr() == self._base:
                    _rebind(tensors[address], self._host.bytes[place : place + size].to(self._device, copy=True), 0)


class HostCopy:
    """The bytes of the weights on the host, in pinned memory or in an unnamed file, and the stream that takes them to `device`,
    which this closes. `lease` is called before the memory is taken; what it returns is closed after it was given back.
    """

    def __init__(self, num_bytes: int, device: CudaDevice, lease: Acquire) -> None:
        self._device = device
        self._lease = lease
        self._leased: Closable | None = None
        self._events: list[int] = []
        self._file: BinaryIO | None = None
        self._closed = False
        self.is_filled = False  # whether all bytes are in memory
        with ExitStack() as undo:
            undo.callback(device.close)
            arena = HostArena(1, num_bytes)
            self._memory = arena.buffer
            self.bytes = as_bytes(self._memory, torch.device("cpu"))  # uint8 [num_bytes]; memory only while `is_here`
            self._extents = HostExtents(arena, self.bytes.data_ptr(), ThreadPoolExecutor(1))  # one extent needs no thread
            self._extents.lock_for(device)
            with device.current():
                (self._stream,) = device.driver.call("cuStreamCreate", _STREAM_NON_BLOCKING)
                undo.callback(self._call, "cuStreamDestroy", self._stream)
            undo.pop_all()

    @property
    def is_here(self) -> bool:
        """Whether the bytes have memory."""
        return bool(self._extents.mapped)

    def take(self) -> None:
        """Have memory, pinned if the driver can. Idempotent. Raises OutOfDeviceMemory, and what `lease` raises."""
        if not self.is_here:
            self._leased = self._lease(len(self.bytes))
            with OnError(self._end_lease):
                self._extents.take([0])

    def refuse_unpinned(self) -> None:
        """Raise OutOfDeviceMemory unless the memory is pinned."""
        if not self._extents.all_locked:
            raise OutOfDeviceMemory(len(self.bytes), 0, "host memory that the driver pins")

    def give_back(self) -> None:
        """Have no memory any more. Raises DriverError."""
        if self.is_here:
            self._extents.give_back(len(self.bytes))
            self._end_lease()

    def leave(self) -> None:
        """Have the bytes in a file alone. Raises OSError, with the bytes in memory as before, and DriverError."""
        if not self.is_here:
            return
        if self._file is None:
            file = WeightCache().unnamed_file(len(self.bytes))
            with OnError(file.close):
                write_at(file, self._memory, 0)
                os.fsync(file.fileno())  # a disk that is full may say so only now
            self._file = file
        self.is_filled = False
        self.give_back()
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, begin: int, end: int) -> None:
        """Read bytes that were left in the file. Raises OSError."""
        assert self._file is not None
        while begin < end:
            size = os.preadv(self._file.fileno(), [self._memory[begin : min(end, begin + _READ_BYTES)]], begin)
            if not size:
                raise OSError(errno.EIO, "the file of weights that sleep ends before they do")
            begin += size

    def queue(self, begin: int, end: int, address: int) -> None:
        """Queue the copy of bytes to an address of the device. Raises DriverError."""
        if begin < end:
            self._call("cuMemcpyHtoDAsync", address, self.bytes.data_ptr() + begin, end - begin, self._stream)

    def mark(self, number: int) -> int:
        """The event of this number, behind all copies so far; numbers count from 0. Raises DriverError."""
        with self._device.current():
            if number == len(self._events):
                self._events += self._device.driver.call("cuEventCreate", _EVENT_WITHOUT_TIME)
            self._device.driver.call("cuEventRecord", self._events[number], self._stream)
        return self._events[number]

    def order(self, stream: int, event: int) -> None:
        """Let what is queued on a stream from here on wait for an event of `mark`. Raises DriverError."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def wait(self) -> None:
        """Wait for all copies. Idempotent. Raises DriverError."""
        if not self._closed:
            self._call("cuStreamSynchronize", self._stream)

    def finish(self) -> None:
        """Wait for all work of the device. Raises DriverError."""
        self._call("cuCtxSynchronize")

    def close(self) -> None:
        """Free the memory. Idempotent. Raises DriverError after all was tried."""
        if self._closed:
            return
        with ExitStack() as last:
            last.callback(self._device.close)
            last.callback(self._call, "cuStreamDestroy", self._stream)
            for event in self._events:
                last.callback(self._call, "cuEventDestroy", event)
            last.callback(self._end_lease)
            last.callback(self._extents.close)
            if self._file is not None:
                last.callback(self._file.close)
            last.callback(self.wait)
        self._closed = True

    def _end_lease(self) -> None:
        leased, self._leased = self._leased, None
        if leased is not None:
            leased.close()

    def _call(self, name: str, *arguments: int) -> tuple[int, ...]:
        with self._device.current():
            return self._device.driver.call(name, *arguments)


def _current_stream(device: torch.device) -> int:
    """The driver's handle of torch's current stream."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def _stages(model: nn.Module, device: torch.device) -> list[_Stage]:
    """The storages of all weights on `device`: first those outside of layers, then each layer's that no other has."""
    layers = list(layers_of(model))
    inside = {module for layer in layers for module in layer.modules()}
    outside = (own for module in model.modules() if module not in inside for own in own_weights(module))
    stages, placed, end = list[_Stage](), set[int](), 0
    for module, tensors in ((model, outside), *((layer, weights_of(layer)) for layer in layers)):
        begin, places = end, dict[int, tuple[int, int]]()
        for tensor in tensors:
            storage = None if tensor.device != device else tensor.untyped_storage()
            if storage is not None and storage.nbytes() and storage.data_ptr() not in placed:
                placed.add(storage.data_ptr())
                places[storage.data_ptr()] = end, storage.nbytes()
                end += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        stages.append(_Stage(module, begin, end, places))
    return stages


def _tensors_over(model: nn.Module, addresses: Container[int], device: torch.device) -> Tensors:
    """All tensors of this process over the storages that begin at `addresses`: also those that no module has, such as the
    product of merged layers, and views that something keeps. The model's own are among them where the collector lists none,
    as after `gc.freeze`.
    """
    found: Tensors = defaultdict(list)
    known = {id(one): one for one in weights_of(model)}
    known |= {id(one): one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)}
    for one in known.values():
        if one.device == device and one.layout == torch.strided:
            address = one.untyped_storage().data_ptr()
            if address in addresses:
                found[address].append((one, int(one.storage_offset())))
    return found


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [bytes]: all of a tensor's storage."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _rebind(tensors: list[tuple[torch.Tensor, int]], memory: torch.Tensor, place: int) -> None:
    """Let `tensors` over a storage lie in `memory`, uint8, with that storage's first byte at `place`."""
    with torch.inference_mode(False):
        for tensor, begin in tensors:
            view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            offset = place // tensor.itemsize + begin
            tensor.data = view.set_(memory.untyped_storage(), offset, tensor.size(), tensor.stride())
