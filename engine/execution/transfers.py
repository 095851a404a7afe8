"""Transfers of a step: one copy uploads all its inputs, and one copy downloads its results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
_Views = tuple[list[Array], torch.Tensor]  # of one place: of each host buffer, and of the device's

_ALIGNMENT = 16  # bytes: suits every item type, and vector loads
_NUM_STAGES = 3  # host buffers: two steps may be queued while the third is written
_MOST_VIEWS = 4096  # views kept; recurring step sizes need some dozens

_DTYPES = {
    np.dtype(ours): theirs
    for ours, theirs in (
        (np.int64, torch.int64),
        (np.int32, torch.int32),
        (np.float64, torch.float64),
        (np.float32, torch.float32),
        (np.bool_, torch.bool),
    )
}


class Upload:
    """A device buffer into which arrays are put one after the other. Not thread-safe.

    Arrays of the same shapes get the same addresses each time, and so do leading arrays, whatever follows them. A CUDA graph
    can therefore read them. The content is valid until the next `put`, in the order of the device's current stream. On CUDA the
    host side is pinned, and `put` waits only for the transfer of three puts before.

    Args:
        num_bytes: Trailing arrays that do not fit get memory of their own.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._on_host = device.type == "cpu"
        with torch.inference_mode(False):
            self._there = torch.zeros(_aligned(num_bytes), dtype=torch.uint8, device=device)
            stages = [
                self._there if self._on_host else torch.zeros(self._there.shape, dtype=torch.uint8, pin_memory=True)
                for _ in range(1 if self._on_host else _NUM_STAGES)
            ]
        self._stages = stages
        self._sent: list[torch.cuda.Event | None] = [None] * len(stages)
        self._turn = 0
        self._views: dict[tuple[int, tuple[int, ...], np.dtype[Any]], _Views] = {}

    def put(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """The arrays on the device, as views of its buffer."""
        places, end = _places(arrays)
        fitting, rest = arrays, arrays[:0]
        if end > len(self._there):
            count = sum(place + array.nbytes <= len(self._there) for place, array in zip(places, arrays, strict=True))
            fitting, rest = arrays[:count], arrays[count:]
            places, end = _places(fitting)
        if (sent := self._sent[self._turn]) is not None:
            sent.synchronize()
        there = []
        for place, array in zip(places, fitting, strict=True):
            on_stages, on_device = self._views_of(place, array)
            on_stages[self._turn][...] = array
            there.append(on_device)
        if not self._on_host:
            self._there[:end].copy_(self._stages[self._turn][:end], non_blocking=True)
            self._sent[self._turn] = sent = sent or torch.cuda.Event()
            sent.record(torch.cuda.current_stream(self._device))
            self._turn = (self._turn + 1) % _NUM_STAGES
        return there + self._apart(rest) if rest else there

    def like(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """The views that `put` returns for arrays of these shapes, whatever follows them. Uploads nothing.

        Raises ValueError if they do not fit the buffer.
        """
        places, end = _places(arrays)
        if end > len(self._there):
            raise ValueError(f"{end:,} bytes do not fit a buffer of {len(self._there):,}")
        return [self._views_of(*where)[1] for where in zip(places, arrays, strict=True)]

    def _views_of(self, place: int, array: Array) -> _Views:
        """The views for an array of this shape and type with bytes from `place` on."""
        key = (place, array.shape, array.dtype)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            on_stages = [_cut(stage, place, array).numpy() for stage in self._stages]
            views = self._views[key] = on_stages, _cut(self._there, place, array)
        return views

    def _apart(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        places, end = _places(arrays)
        stage = torch.empty(end, dtype=torch.uint8)
        for place, array in zip(places, arrays, strict=True):
            _cut(stage, place, array).numpy()[...] = array
        there = stage.to(self._device)
        return [_cut(there, *where) for where in zip(places, arrays, strict=True)]


class Download:
    """A small tensor being copied to the host, begun here without a wait, in the order of the device's current stream."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._here = tensor
        self._done: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._here.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(tensor.device))

    @property
    def is_done(self) -> bool:
        """Whether the values are on the host."""
        return self._done is None or bool(self._done.query())

    def wait(self) -> Array:
        """The values. Raises earlier errors of the device."""
        if self._done is not None:
            self._done.synchronize()
        values: Array = self._here.numpy()
        return values


class Stopwatch:
    """The time between two points in a device's work: construction and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = self._mark()
        self._ended: Any = None

    def stop(self) -> None:
        """Set the second point, after all queued work."""
        self._ended = self._mark()

    def seconds(self) -> float:
        """The time; 0 if it was not stopped. On CUDA this waits for the second point."""
        if self._ended is None:
            return 0.0
        if self._device.type != "cuda":
            return float(self._ended - self._began)
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1e3

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _places(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """The byte offsets of the arrays, and the end of the last one."""
    places, end = [], 0
    for array in arrays:
        places.append(end)
        end += _aligned(array.nbytes)
    return places, end


def _cut(there: torch.Tensor, place: int, array: Array) -> torch.Tensor:
    return there[place : place + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
