"""CUDA graphs of decode steps: the model's forward pass over a batch of decodes, captured once for each of a few sizes.

A captured step reads rows, lengths and tokens from the upload buffer, and K and V from the arena. Neither moves, so a
graph serves any rows, whatever extents are mapped. Other batch sizes are padded to the next captured one.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from math import nan
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...common.on_error import OnError

log = logging.getLogger(__name__)

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}  # relative to the largest logit
_WARM_UPS = 2
_ASKS = (
    "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim", "unique_consecutive",
    "bincount",
)  # fmt: skip
_MASKED = ("index", "index_put", "index_put_", "_index_put_impl_")
_COPIES = ("_to_copy", "copy_", "lift_fresh")

_failed: list[Any] = []  # failed captures: torch's pinned-memory allocator may still read them
_idle: dict[torch.device, list[Any]] = defaultdict(list)  # streams of recorders that are gone, for the next ones

Work = Callable[[], None]
Record = Callable[[Work], Work]  # runs the work and returns a callable that repeats it


class CannotBeCaptured(RuntimeError):
    """The work reads a value from the device, or copies between host and device."""


class CaptureCheck(TorchDispatchMode):
    """Raises CannotBeCaptured for operations that no CUDA graph can hold.

    Checking first is necessary: after a failed capture, torch's allocator can no longer be trimmed.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        waits = name in _ASKS or (name in _MASKED and any(_is_mask(part) for part in args[1]))
        if name == "repeat_interleave" and func._overloadname != "self_int":
            waits = (kwargs or {}).get("output_size") is None
        if waits or (name == "_grouped_mm" and _waits_in_groups(args[0])):
            raise CannotBeCaptured(f"{func} waits for a value on the device")
        out = func(*args, **(kwargs or {}))
        if name in _COPIES:
            devices = {part.device.type for part in (*args, out) if isinstance(part, torch.Tensor)}
            if len(devices) > 1:
                raise CannotBeCaptured(f"{func} copies between the host and the device")
        return out


class DecodeGraphs:
    """Captured decode steps of some sizes. Not thread-safe.

    Args:
        forward: The logits [size, vocab] of a batch of this size, with inputs at fixed addresses. Reads nothing from the host.
        record: Captures work. Raises the errors of the device or the model.
        agree: Whether all shards of the model say yes: they replay the same steps.
    """

    def __init__(
        self, forward: Callable[[int], torch.Tensor], record: Record, agree: Callable[[bool], bool] = lambda well: well
    ) -> None:
        self._forward = forward
        self._record = record
        self._agree = agree
        self._replays: dict[int, Work] = {}
        self._trusted: set[int] = set()
        self._logits: torch.Tensor | None = None

    def add(self, size: int) -> None:
        """Capture steps of `size` rows from the current inputs. Add the largest size first: the others share its memory.

        Raises CannotBeCaptured for a model that reads from the device, and what `record` raises.
        """
        if self._logits is None:
            # In inference mode the check does not see inner operations.
            with torch.inference_mode(False), torch.no_grad(), CaptureCheck():
                self._logits = torch.empty_like(self._forward(size))
        logits = self._logits[:size]
        self._replays[size] = self._record(lambda: _fill(logits, self._forward(size)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The captured sizes, ascending."""
        return tuple(sorted(self._replays))

    def size_for(self, num_rows: int) -> int | None:
        """The captured size to pad `num_rows` rows to; None if there is none."""
        return min((size for size in self._replays if size >= num_rows), default=None)

    def logits(self, size: int, num_rows: int) -> torch.Tensor:
        """[num_rows, vocab]: the logits of the batch of `size` now in place, valid until the next call.

        The first result of each size is compared with an uncaptured run. If they differ, all graphs are dropped.
        """
        assert self._logits is not None
        found = self._logits[:num_rows]
        if size in self._trusted:
            self._replays[size]()
            return found
        right = self._forward(size)[:num_rows].clone()
        found.fill_(nan)  # old memory could pass for the graph's result
        self._replays[size]()
        if self._agree(near(found, right)):
            self._trusted.add(size)
            return found
        log.warning(
            "a decode step of %d rows gives other logits from a CUDA graph than without: no graphs are used from here on; "
            "cuda_graphs=False says so from the start",
            size,
        )
        self._replays.clear()
        return right


def _is_mask(part: object) -> bool:
    return isinstance(part, torch.Tensor) and part.dtype == torch.bool


def _waits_in_groups(x: torch.Tensor) -> bool:
    """Whether torch's grouped matrix product reads group sizes on the host. All its kernels but one do."""
    if not x.is_cuda:
        return False
    return x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device)[0] not in (9, 10)


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def near(found: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether logits are equal up to rounding. Finiteness must agree."""
    tolerance = _TOLERANCES[right.dtype]
    found, right = found.float(), right.float()
    finite = right.isfinite()
    near = (found - right).abs() <= tolerance * torch.where(finite, right.abs(), 0).amax()
    return bool(torch.where(finite, near, found.isfinite() == finite).all())


class CudaRecorder:
    """Captures CUDA graphs that share one memory pool: running a graph overwrites what another one left."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream, again for each engine that wakes up: libraries keep a workspace for each, for good
        self._stream = _idle[device].pop() if _idle[device] else torch.cuda.Stream(device)
        self._leaving = weakref.finalize(self, _idle[device].append, self._stream)
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):  # compile kernels and set up libraries outside the capture
                    work()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            collects = gc.isenabled()
            gc.collect()
            gc.disable()  # a collection within a capture may call the driver
            try:
                # Other threads, such as those of the pool's extents, may make calls that a capture forbids.
                capture = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
                with OnError(lambda: _failed.append(graph), lambda: self._clean_up(current)), capture:
                    work()
            finally:
                if collects:
                    gc.enable()
        return graph.replay

    def _clean_up(self, current: torch.cuda.Stream) -> None:
        """Clean up after a failed capture: torch leaves its stream current and its allocator waiting for the end."""
        self._leaving.detach()
        torch.cuda.set_stream(current)
        with suppress(Exception):  # it has already ended
            torch._C._cuda_endAllocateToPool(current.device_index, self._pool)
            torch._C._cuda_releasePool(current.device_index, self._pool)
