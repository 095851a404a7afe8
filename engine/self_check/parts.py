"""The tests: each uses a part of the engine on a device as the engine does, on a few megabytes, and compares the results.

They access the device only through `Seams`. Without a device, the same tests run over host memory, with a kernel in plain torch
and a recording instead of a graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from ...allocator.arena import Arena
from ...allocator.cuda_arena import CudaArena
from ...allocator.cuda_driver import OUT_OF_MEMORY
from ...allocator.errors import DriverError, DriverUnavailable, OutOfDeviceMemory
from ...cache.geometry import Geometry, LayerShape
from ...cache.storage import Storage, TensorArena
from ..attention import trial
from ..attention.backends import BACKENDS, AttentionSpec, block_multiple
from ..attention.choose import MAKERS, KernelAbsent, Make, Site, fault, usable_kernel
from ..attention.context import AttentionCall, AttentionKernel
from ..execution.graphs import CudaRecorder, DecodeGraphs, Record, near
from ..execution.host_pool import NONE, HostPool
from .report import ABSENT, FAILED, GRAPHS, PASSED, POOL, SWAPS, UNTRIED, PartOutcome

_DTYPE = torch.bfloat16
_BLOCK_SIZE = 16
_EXTENTS = 4
_GRANULE_BYTES = 2 << 20  # if the driver cannot be queried
_ROWS = (4, 1)  # rows of the captured steps


class _Faulty(Exception):
    """The part gave a wrong result."""


@dataclass(frozen=True, slots=True)
class Seams:
    """The interface between the tests and a device.

    Args:
        granule_bytes: The arena's minimum mapping size.
        arena: Makes an arena from a number of extents and bytes per extent. Raises DriverUnavailable without device support.
        synchronize: Waits for all queued work, and raises its errors.
    """

    device: torch.device
    capability: tuple[int, int]
    granule_bytes: int
    arena: Callable[[int, int], Arena]
    record: Callable[[], Record]
    makers: Mapping[str, Make]
    synchronize: Callable[[], None]

    def site(self, backend: str) -> Site:
        """Where the backend's kernel is tested."""
        return Site(self.device, _DTYPE, -(-_BLOCK_SIZE // block_multiple(backend)) * block_multiple(backend), self.capability)


def cuda_seams(index: int, failed: Collection[str] = ()) -> Seams:
    """The `Seams` of CUDA device `index`, as torch counts. Parts that `failed` are not used to test others."""
    device = torch.device("cuda", index)
    try:
        granule_bytes = CudaArena.granule_bytes(index)
    except (DriverUnavailable, DriverError):  # the pool test reports it
        granule_bytes = _GRANULE_BYTES

    def arena(num_extents: int, extent_bytes: int) -> Arena:
        if POOL in failed:
            raise DriverUnavailable("mapping extents failed here")
        return CudaArena(num_extents, extent_bytes, index, ready_limit_bytes=extent_bytes)

    return Seams(
        device,
        torch.cuda.get_device_capability(device),
        granule_bytes,
        arena,
        partial(CudaRecorder, device),
        {backend: make for backend, make in MAKERS.items() if backend not in failed},
        partial(torch.cuda.synchronize, device),
    )


def check_part(part: str, seams: Seams, clock: Callable[[], float] = time.time) -> PartOutcome:
    """Test one of `report.PARTS`."""
    began = time.perf_counter()
    state, reason = _tried(part, seams)
    return PartOutcome(part, state, reason, round(time.perf_counter() - began, 3), clock())


def _tried(part: str, seams: Seams) -> tuple[str, str | None]:
    check = {POOL: _pool, GRAPHS: _graphs, SWAPS: _swaps}.get(part) or partial(_attention, part)
    try:
        check(seams)
        seams.synchronize()
    except KernelAbsent as error:
        return ABSENT, str(error)
    except _Faulty as error:
        return FAILED, str(error)
    except Exception as error:  # a driver, compiler or library may raise anything
        return UNTRIED if _lacks_memory(error) else FAILED, f"{type(error).__name__}: {error}"
    return PASSED, None


def _lacks_memory(error: Exception) -> bool:
    if isinstance(error, DriverError):
        return error.code == OUT_OF_MEMORY
    return isinstance(error, torch.OutOfMemoryError | OutOfDeviceMemory | MemoryError)


# ---- the pool -----------------------------------------------------------------------------------


def _geometry(seams: Seams) -> Geometry:
    """Blocks of 8 KiB in extents of one granule."""
    return Geometry((LayerShape(2, 64, 64),), _BLOCK_SIZE, "bfloat16", seams.granule_bytes).with_extents(seams.granule_bytes)


def _pool(seams: Seams) -> None:
    """Mapped extents are zero, keep their content while others are mapped and unmapped, and are freed."""
    geometry = _geometry(seams)
    try:
        arena = seams.arena(_EXTENTS, geometry.extent_bytes)
    except DriverUnavailable as error:
        raise KernelAbsent(str(error)) from error
    try:
        arena.map([0, 2])
        blocks = Storage(geometry, arena, seams.device).blocks.view(_EXTENTS, -1)  # [extents, bytes]
        _expect(not blocks[[0, 2]].any(), "extents are not zeros when they are mapped")
        blocks[0], blocks[2] = 0x5A, 0xA5
        seams.synchronize()  # map and unmap require this fence
        arena.unmap([2])
        arena.prepare(1)
        arena.map([1, 2])
        _expect(not blocks[1:3].any(), "extents are not zeros when they are mapped again")
        _expect(bool((blocks[0] == 0x5A).all()), "an extent changes when others are mapped")
        blocks[1], blocks[2] = blocks[0], blocks[0] + 1
        _expect(
            int(blocks[:3].sum(dtype=torch.int64)) == geometry.extent_bytes * (3 * 0x5A + 1),
            "an extent holds other bytes than it was given",
        )
        del blocks
        seams.synchronize()
        arena.trim()
        _expect(arena.held.upper_bytes == arena.mapped_bytes, "more memory is held than is mapped")
        failures = arena.drain_failures()
        if failures:
            raise failures[0]
    finally:
        seams.synchronize()
        arena.close()
    _expect(arena.held.upper_bytes == 0, "memory stays held after the end")


def _expect(holds: object, otherwise: str) -> None:
    if not holds:
        raise _Faulty(otherwise)


# ---- attention ----------------------------------------------------------------------------------


def _specs(backend: str) -> list[AttentionSpec]:
    """Specs that the backend supports: grouped heads, and all its other features."""
    needs = BACKENDS[backend]
    plain = AttentionSpec(8, 2, 128, 128)
    full = AttentionSpec(4, 4, 64, 64, trial.WINDOW, trial.SOFTCAP if needs.softcap else None, needs.sinks)
    return [plain, full]


def _kernel(backend: str, seams: Seams) -> AttentionKernel:
    if backend not in seams.makers:
        raise KernelAbsent(f"attention by {backend} failed here")
    return usable_kernel(backend, seams.site(backend), _specs(backend), seams.makers)


def _attention(backend: str, seams: Seams) -> None:
    """A kernel writes and computes the same as the torch kernel."""
    kernel = _kernel(backend, seams)
    with torch.inference_mode():
        why = fault(kernel, seams.site(backend), _specs(backend))
    _expect(why is None, why or "")


# ---- graphs -------------------------------------------------------------------------------------


def _graphs(seams: Seams) -> None:
    """A captured step gives the same results as the uncaptured one, for inputs and lengths that changed since."""
    kernel = _kernel("triton", seams)
    if not kernel.captures:
        raise KernelAbsent(f"attention by {kernel.name} cannot be captured")
    spec, device = _specs("triton")[0], seams.device
    calls = {
        rows: _decodes(trial.build(spec, [(1, 40 + 7 * i) for i in range(rows)], _BLOCK_SIZE, _DTYPE, device).call, kernel)
        for rows in _ROWS
    }
    weight = torch.full((spec.num_heads * spec.v_head_dim, 32), 0.05, dtype=_DTYPE, device=device)

    def forward(rows: int) -> torch.Tensor:  # [rows, 32]
        kernel.write(calls[rows])
        return kernel.attend(calls[rows]).flatten(1) @ weight

    with torch.inference_mode():
        graphs = DecodeGraphs(forward, seams.record())
        for rows in _ROWS:
            graphs.add(rows)
        for rows in _ROWS:
            graphs.logits(rows, rows)
            _expect(graphs.sizes, f"a captured step of {rows} rows gives other results than the same step without")
            call = calls[rows]
            for tensor in (call.query, call.key, call.value):
                tensor.copy_(torch.flip(tensor, (0, 1)).mul(0.5))
            call.step.lens.sub_(2)
            right = forward(rows).clone()
            _expect(near(graphs.logits(rows, rows), right), f"a captured step of {rows} rows does not see its new inputs")
        seams.synchronize()


def _decodes(call: AttentionCall, kernel: AttentionKernel) -> AttentionCall:
    """A call as it is captured: its step's lengths on the host are upper bounds."""
    bound = call.step.tables[0].shape[1] * _BLOCK_SIZE
    step = replace(call.step, kernel=kernel, bounded=True, kv_lens=np.full_like(call.step.kv_lens, bound))
    return replace(call, step=step)


# ---- swaps --------------------------------------------------------------------------------------


def _swaps(seams: Seams) -> None:
    """Blocks return unchanged from host memory, by the fastest method."""
    geometry = _geometry(seams)
    try:
        arena: Arena = seams.arena(_EXTENTS, geometry.extent_bytes)
        arena.map(range(_EXTENTS))
    except DriverUnavailable:
        arena = TensorArena(_EXTENTS, geometry.extent_bytes, seams.device)
    pool = HostPool(geometry, _EXTENTS * geometry.extent_bytes)
    try:
        _swap_out_and_in(Storage(geometry, arena, seams.device), pool)
    finally:
        seams.synchronize()
        pool.close()
        arena.close()


def _swap_out_and_in(storage: Storage, pool: HostPool) -> None:
    payload, num = storage.geometry.payload_bytes, min(storage.num_blocks - 1, pool.num_slots)
    if pool.measure(storage, num) is None:
        raise MemoryError("the host has no memory for the swaps of a self-check")
    rng = np.random.default_rng(0)
    blocks = np.arange(1, num + 1, dtype=np.int32)
    slots = rng.permutation(blocks).astype(np.int32)
    content = torch.from_numpy(rng.integers(0, 256, (num, payload), dtype=np.uint8))
    ours = storage.blocks[1 : num + 1, :payload]
    ours.copy_(content)
    lost = pool.begin(storage, blocks, slots, NONE, NONE).wait().lost_slots
    if len(lost):
        raise MemoryError(f"the host has no memory for {len(lost)} blocks")
    ours.zero_()
    copies = pool.begin(storage, NONE, NONE, slots, blocks)
    copies.fence()
    back = ours.cpu()
    copies.wait()
    _expect(torch.equal(back, content), "blocks come back from host memory with other bytes")
