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


@pytest.mark.parametrize("part", PARTS)
def test_each_part_passes_where_it_works(part: str) -> None:
    assert tried(part) == (PASSED, None)


def test_the_parts_are_the_pool_what_auto_may_choose_graphs_and_swaps() -> None:
    assert PARTS == ("pool", "triton", "flash-attn", "flash-attn-3", "varlen", "graphs", "swaps")


@pytest.mark.parametrize("part", PARTS)
def test_what_breaks_the_device_later_is_this_parts_failure(part: str) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert tried(part, synchronize=raising(error)) == (FAILED, f"RuntimeError: {error}")


# ---- the pool


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


@pytest.mark.parametrize(
    ("arena", "reason"),
    [
        (Stale, "extents are not zeros when they are mapped"),
        (Mixed, "an extent changes when others are mapped"),
        (Leaking, "more memory is held than is mapped"),
    ],
)
def test_a_pool_that_gives_other_memory_fails(arena: type[HostArena], reason: str) -> None:
    assert tried(POOL, arena=arena) == (FAILED, reason)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (DriverUnavailable("no cuda-bindings"), ABSENT),
        (DriverError("cuMemMap", 999, "CUDA_ERROR_UNKNOWN"), FAILED),
        (DriverError("cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY"), UNTRIED),
        (OutOfDeviceMemory(1, 0), UNTRIED),
        (torch.OutOfMemoryError("CUDA out of memory"), UNTRIED),
        (ValueError("a surprise"), FAILED),
    ],
)
def test_lack_of_memory_is_no_fault_and_a_missing_package_none_either(error: Exception, state: str) -> None:
    found, reason = tried(POOL, arena=raising(error))
    assert found == state
    assert str(error) in str(reason)


def test_a_device_without_an_elastic_pool_has_its_swaps_checked_all_the_same() -> None:
    assert tried(SWAPS, arena=raising(DriverUnavailable("no cuda-bindings"))) == (PASSED, None)


# ---- attention


class Wrong(DenseKernel):
    def attend(self, call: AttentionCall) -> torch.Tensor:
        return super().attend(call) * 1.5


@pytest.mark.parametrize("part", ATTENTION)
def test_a_kernel_that_differs_from_torchs_fails(part: str) -> None:
    state, reason = tried(part, makers=dict.fromkeys(BACKENDS, Wrong))
    assert state == FAILED
    assert str(reason).startswith("its results differ from the torch kernel's by up to")


@pytest.mark.parametrize("part", ATTENTION)
def test_a_kernel_that_is_not_there_or_not_for_this_device_is_absent(part: str) -> None:
    assert tried(part, makers=dict.fromkeys(BACKENDS, raising(ImportError("no module")))) == (ABSENT, "no module")
    state, reason = tried(part, capability=(7, 5))
    assert state == ABSENT
    assert "compute capabilities" in str(reason)
    error = OSError("libcudart.so.12: cannot open shared object file")
    assert tried(part, makers=dict.fromkeys(BACKENDS, raising(error))) == (FAILED, f"OSError: {error}")


# ---- graphs


def nothing(work: Callable[[], None]) -> Callable[[], None]:
    """Records no work at all."""
    return lambda: None


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (nothing, "a captured step of 4 rows gives other results than the same step without"),
        (
            raising(RuntimeError("operation not permitted when stream is capturing")),
            "RuntimeError: operation not permitted",
        ),
    ],
)
def test_a_graph_that_gives_something_else_fails(record: Any, reason: str) -> None:
    state, found = tried(GRAPHS, record=lambda: record)
    assert state == FAILED
    assert str(found).startswith(reason)


def test_a_graph_that_keeps_the_lengths_of_its_capture_fails() -> None:
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


@pytest.mark.parametrize(
    ("makers", "reason"),
    [
        (dict.fromkeys(BACKENDS, TorchKernel), "attention by torch cannot be captured"),
        (dict.fromkeys(BACKENDS, raising(ImportError("no triton"))), "no triton"),
        ({}, "attention by triton failed here"),
    ],
)
def test_without_a_kernel_that_can_be_captured_there_are_no_graphs(makers: Any, reason: str) -> None:
    assert tried(GRAPHS, makers=makers) == (ABSENT, reason)


# ---- swaps


def test_a_swap_that_brings_other_bytes_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_from = Storage.copy_from

    def torn(self: Storage, other: Storage, sources: np.ndarray, targets: np.ndarray) -> None:
        copy_from(self, other, sources, targets)
        if len(targets):
            self.blocks[int(targets[-1]), 3] += 1

    monkeypatch.setattr(Storage, "copy_from", torn)
    assert tried(SWAPS) == (FAILED, "blocks come back from host memory with other bytes")


def test_a_host_without_memory_for_it_tells_nothing_of_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostPool, "measure", lambda *arguments: None)
    state, reason = tried(SWAPS)
    assert state == UNTRIED
    assert "no memory" in str(reason)


def test_nothing_stays_held_whatever_a_check_finds() -> None:
    made: list[HostArena] = []

    def arena(num_extents: int, extent_bytes: int) -> Arena:
        made.append(Mixed(num_extents, extent_bytes))
        return made[-1]

    tried(POOL, arena=arena)
    tried(SWAPS, arena=arena)
    assert [one.mapped_bytes for one in made] == [0, 0]
