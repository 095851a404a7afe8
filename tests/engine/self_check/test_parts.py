"""The checks without a device: over host memory, kernels in plain torch, a tape in place of a graph; each fault is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dense_kernel import DenseKernel
from host_seams import seams
from tape import recorder

from pagetide.allocator.arena import Arena
from pagetide.allocator.errors import DriverError, DriverUnavailable, OutOfDeviceMemory
from pagetide.allocator.host_arena import HostArena
from pagetide.cache.storage import Storage
from pagetide.engine.attention.backends import BACKENDS
from pagetide.engine.attention.context import AttentionCall
from pagetide.engine.attention.torch_kernel import TorchKernel
from pagetide.engine.execution.host_pool import HostPool
from pagetide.engine.self_check.parts import check_part
from pagetide.engine.self_check.report import ABSENT, FAILED, GRAPHS, PARTS, PASSED, POOL, SWAPS, UNTRIED

ATTENTION = [part for part in PARTS if part in BACKENDS]


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of the kernels let Triton interpret, for the whole process."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def tried(part: str, **changed: Any) -> tuple[str, str | None]:
    outcome = check_part(part, seams(**changed), clock=lambda: 7.0)
    assert outcome.part == part and outcome.at == 7.0
    return outcome.state, outcome.reason


def raising(error: Exception) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        raise error

    return call


def test_each_part_passes_where_it_works_and_fails_where_it_breaks_the_device_later() -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    for part in PARTS:
        assert tried(part) == (PASSED, None), part
        assert tried(part, synchronize=raising(error)) == (FAILED, f"RuntimeError: {error}"), part


class Stale(HostArena):
    """Memory that comes with what was in it before."""

    def map(self, extents: Any) -> None:
        super().map(extents)
        view = torch.frombuffer(self.buffer, dtype=torch.uint8).view(self.num_extents, -1)
        for extent in extents:
            view[extent, -1] = 1


class Mixed(HostArena):
    """The extent that is mapped later changes one that was there."""

    def map(self, extents: Any) -> None:
        super().map(extents)
        if 1 in extents:
            torch.frombuffer(self.buffer, dtype=torch.uint8)[5] = 0


class Leaking(HostArena):
    """More is held than mapped, for good."""

    @property
    def held(self) -> Any:
        bounds = super().held
        return type(bounds)(bounds.lower_bytes, bounds.upper_bytes + self.extent_bytes)


def test_a_pool_that_gives_other_memory_fails() -> None:
    for arena, reason in (
        (Stale, "extents are not zeros when they are mapped"),
        (Mixed, "an extent changes when others are mapped"),
        (Leaking, "more memory is held than is mapped"),
    ):
        assert tried(POOL, arena=arena) == (FAILED, reason)


def test_lack_of_memory_is_no_fault_and_a_missing_package_none_either() -> None:
    for error, state in (
        (DriverUnavailable("no cuda-bindings"), ABSENT),
        (DriverError("cuMemMap", 999, "CUDA_ERROR_UNKNOWN"), FAILED),
        (DriverError("cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY"), UNTRIED),
        (OutOfDeviceMemory(1, 0), UNTRIED),
        (torch.OutOfMemoryError("CUDA out of memory"), UNTRIED),
        (ValueError("a surprise"), FAILED),
    ):
        found, reason = tried(POOL, arena=raising(error))
        assert found == state and str(error) in str(reason)
    assert tried(SWAPS, arena=raising(DriverUnavailable("no cuda-bindings"))) == (PASSED, None), "swaps need no pool"


class Wrong(DenseKernel):
    def attend(self, call: AttentionCall) -> torch.Tensor:
        return super().attend(call) * 1.5


@pytest.mark.parametrize("part", ATTENTION)
def test_a_kernel_that_is_wrong_not_there_or_not_for_this_device(part: str) -> None:
    def by(maker: Callable[..., Any]) -> tuple[str, str | None]:
        return tried(part, makers=dict.fromkeys(BACKENDS, maker))

    state, reason = by(Wrong)
    assert state == FAILED and str(reason).startswith("its results differ from the torch kernel's by up to")
    assert by(raising(ImportError("no module"))) == (ABSENT, "no module")
    error = OSError("libcudart.so.12: cannot open shared object file")
    assert by(raising(error)) == (FAILED, f"OSError: {error}")
    state, reason = tried(part, capability=(7, 5))
    assert state == ABSENT and "compute capabilities" in str(reason)


def test_a_graph_that_gives_something_else_fails() -> None:
    other = "a captured step of 4 rows gives other results than the same step without"
    assert tried(GRAPHS, record=lambda: lambda work: lambda: None) == (FAILED, other), "no work at all is recorded"
    error = RuntimeError("operation not permitted when stream is capturing")
    state, reason = tried(GRAPHS, record=lambda: raising(error))
    assert state == FAILED and str(reason).startswith("RuntimeError: operation not permitted")
    for makers, why in (
        (dict.fromkeys(BACKENDS, TorchKernel), "attention by torch cannot be captured"),
        (dict.fromkeys(BACKENDS, raising(ImportError("no triton"))), "no triton"),
        ({}, "attention by triton failed here"),
    ):
        assert tried(GRAPHS, makers=makers) == (ABSENT, why)

    capturing: list[bool] = []

    class KeepsLengths(DenseKernel):
        """While it is captured it takes a copy of the lengths on the host, which is in no graph."""

        def attend(self, call: AttentionCall) -> torch.Tensor:
            if capturing:
                call = replace(call, step=replace(call.step, lens=torch.tensor(call.step.lens.numpy().copy())))
            return super().attend(call)

    def record(work: Callable[[], None]) -> Callable[[], None]:
        capturing.append(True)
        taken = recorder([])(work)
        capturing.clear()
        return taken

    found = tried(GRAPHS, record=lambda: record, makers=dict.fromkeys(BACKENDS, KeepsLengths))
    assert found == (FAILED, "a captured step of 4 rows does not see its new inputs")


def test_a_swap_that_brings_other_bytes_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_from = Storage.copy_from

    def torn(self: Storage, other: Storage, sources: np.ndarray, targets: np.ndarray) -> None:
        copy_from(self, other, sources, targets)
        if len(targets):
            self.blocks[int(targets[-1]), 3] += 1

    monkeypatch.setattr(Storage, "copy_from", torn)
    assert tried(SWAPS) == (FAILED, "blocks come back from host memory with other bytes")
    monkeypatch.setattr(HostPool, "measure", lambda *arguments: None)
    state, reason = tried(SWAPS)
    assert state == UNTRIED and "no memory" in str(reason), "a host without memory for it tells nothing"


def test_nothing_stays_held_whatever_a_check_finds() -> None:
    made: list[HostArena] = []

    def arena(num_extents: int, extent_bytes: int) -> Arena:
        made.append(Mixed(num_extents, extent_bytes))
        return made[-1]

    tried(POOL, arena=arena)
    tried(SWAPS, arena=arena)
    assert [one.mapped_bytes for one in made] == [0, 0]
