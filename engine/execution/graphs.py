"""CUDA graphs of decode steps: the model's forward pass over a batch of decodes, captured once for each of a few sizes.

A captured step reads its rows, lengths and tokens where the host puts them, and K and V at the arena's addresses, which never
move: so it serves whatever rows decode, whatever extents came or went since. Steps of other sizes are padded to the next one.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from math import nan
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows; padding costs little: weights are read in any case
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}  # of the largest logit
_WARM_UPS = 2
_ASKS = (
    "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim", "unique_consecutive",
    "bincount",
)  # fmt: skip
_MASKED = ("index", "index_put", "index_put_", "_index_put_impl_")
_COPIES = ("_to_copy", "copy_", "lift_fresh")

_failed: list[Any] = []  # captures: torch's allocator of pinned memory may still look at them

Work = Callable[[], None]
Record = Callable[[Work], Work]  # does some work, in a way that what is returned can do again


def sizes_for(seats: int) -> tuple[int, ...]:
    """The sizes that so many rows can need; where there are more than the largest, some steps have none."""
    below = tuple(size for size in SIZES if size < seats)
    return below + SIZES[len(below) : len(below) + 1]


class CannotBeCaptured(RuntimeError):
    """Some work asks the device for a value, or brings one from the host."""


class CaptureCheck(TorchDispatchMode):
    """Raises CannotBeCaptured for operations that no CUDA graph can hold.

    A capture that fails leaves torch's allocator in a state in which it cannot be trimmed any more: so it is found out before.
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
    """Decode steps of some sizes, recorded. Not thread-safe.

    Args:
        forward: The logits [size, vocab] of a batch of so many rows, whose inputs lie at addresses that never move. Reads
            nothing of the host.
        record: How work is recorded. Raises what the device or the model has against it.
    """

    def __init__(self, forward: Callable[[int], torch.Tensor], record: Record) -> None:
        self._forward = forward
        self._record = record
        self._replays: dict[int, Work] = {}
        self._trusted: set[int] = set()
        self._logits: torch.Tensor | None = None

    def add(self, size: int) -> None:
        """Record steps of `size` rows, out of the inputs that are in place. The largest first: the others share its memory.

        Raises CannotBeCaptured for a model that asks the device, and what `record` raises.
        """
        if self._logits is None:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                CaptureCheck(),
            ):  # in inference mode it would see no details
                self._logits = torch.empty_like(self._forward(size))
        logits = self._logits[:size]
        self._replays[size] = self._record(lambda: _fill(logits, self._forward(size)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that are recorded, in order."""
        return tuple(sorted(self._replays))

    def size_for(self, num_rows: int) -> int | None:
        """The size that a batch of so many rows is to be padded to; None where there is none."""
        return min((size for size in self._replays if size >= num_rows), default=None)

    def logits(self, size: int, num_rows: int) -> torch.Tensor:
        """[num_rows, vocab] of the batch of `size` whose inputs are in place. They stand until the next call.

        What a size gives first is held against the same work unrecorded; where they differ nothing recorded is used again.
        """
        assert self._logits is not None
        found = self._logits[:num_rows]
        if size in self._trusted:
            self._replays[size]()
            return found
        right = self._forward(size)[:num_rows].clone()
        found.fill_(nan)  # else what lay there, of another size or freed memory, could pass for what the graph gave
        self._replays[size]()
        if near(found, right):
            self._trusted.add(size)
            return found
        log.warning(
            "a decode step of %d rows gives other logits from a CUDA graph than without: no graphs are used from here on; "
            "cuda_graphs=False says so from the start", size,
        )  # fmt: skip
        self._replays.clear()
        return right


def _is_mask(part: object) -> bool:
    return isinstance(part, torch.Tensor) and part.dtype == torch.bool


def _waits_in_groups(x: torch.Tensor) -> bool:
    """Whether torch's matrix product of groups, of experts say, reads their sizes on the host: it does but for one kernel."""
    if not x.is_cuda:
        return False
    return x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device)[0] not in (9, 10)


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def near(found: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether logits are the same but for rounding; what is no finite number must be the same."""
    tolerance = _TOLERANCES[right.dtype]
    found, right = found.float(), right.float()
    finite = right.isfinite()
    near = (found - right).abs() <= tolerance * torch.where(finite, right.abs(), 0).amax()
    return bool(torch.where(finite, near, found.isfinite() == finite).all())


class CudaRecorder:
    """Records by capture into CUDA graphs, which share their memory: what one left is gone when another one runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # libraries keep a workspace for each they have seen
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):  # kernels are compiled and libraries set up outside of a capture
                    work()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            collects = gc.isenabled()
            gc.collect()
            gc.disable()  # what is collected in a capture may call the driver
            try:
                # Other threads, of the pool's extents say, may call what this one must not.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    work()
            except BaseException:
                _failed.append(graph)
                self._clean_up(current)
                raise
            finally:
                if collects:
                    gc.enable()
        return graph.replay

    def _clean_up(self, current: torch.cuda.Stream) -> None:
        """After a capture that failed, of which torch leaves the stream current and its allocator waiting for the end."""
        torch.cuda.set_stream(current)
        with suppress(Exception):  # it has ended already
            torch._C._cuda_endAllocateToPool(current.device_index, self._pool)
            torch._C._cuda_releasePool(current.device_index, self._pool)
