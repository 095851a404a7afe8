"""Which group is opened, memory without a name, the group of one, and the double in threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pagetide import native
from pagetide.engine.collectives import shared_memory_group, torch_group
from pagetide.engine.collectives.factory import KINDS, create_store, open_group
from pagetide.engine.collectives.shared_memory_group import MOST_SHARDS, SharedMemoryGroup, create_group_memory

needs_kernels = pytest.mark.skipif(native.instructions() is None, reason="there are no native kernels")


@pytest.fixture
def descriptors() -> Iterator[dict[str, int]]:
    """Of the memory and the store of a group of one."""
    fds = {"memory_fd": create_group_memory(1), "store_fd": create_store()}
    yield fds
    for fd in fds.values():
        os.close(fd)


def opened(device: str, devices: list[str], fds: dict[str, int], kind: str = "auto") -> Any:
    return open_group(0, len(devices), device=torch.device(device), devices=devices, kind=kind, **fds)


@needs_kernels
def test_shards_on_cpus_meet_in_shared_memory(descriptors: dict[str, int]) -> None:
    assert opened("cpu", ["cpu"], descriptors).name == "shared memory"


def test_without_native_kernels_by_gloo(descriptors: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "instructions", lambda: None)
    assert opened("cpu", ["cpu"], descriptors).name == "gloo, in host memory"
    with pytest.raises(ValueError, match="native kernels are not there; choose 'gloo'"):
        opened("cpu", ["cpu"], descriptors, "shared-memory")


def test_cuda_devices_of_their_own_by_nccl_and_shared_ones_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_group, "NcclGroup", lambda *_: "nccl")
    monkeypatch.setattr(torch_group, "GlooGroup", lambda *_: "gloo")
    fds = {"memory_fd": -1, "store_fd": -1}
    assert opened("cuda:0", ["cuda:0", "cuda:1"], fds) == "nccl"
    assert opened("cuda:0", ["cuda:0", "cuda:0"], fds) == "gloo"
    assert opened("cuda:0", ["cuda:0", "cuda:1"], fds, "gloo") == "gloo"


def test_what_cannot_be_had_is_an_error() -> None:
    fds = {"memory_fd": -1, "store_fd": -1}
    with pytest.raises(ValueError, match=f"no collectives 'mpi'; choose one of {', '.join(KINDS)}"):
        opened("cpu", ["cpu"], fds, "mpi")
    with pytest.raises(ValueError, match="a CUDA device for each of 2 shards, got cuda:0, cuda:0"):
        opened("cuda:0", ["cuda:0", "cuda:0"], fds, "nccl")
    with pytest.raises(ValueError, match="the shard is on cuda:0"):
        opened("cuda:0", ["cuda:0"], fds, "shared-memory")
    with pytest.raises(ValueError, match=f"1 to {MOST_SHARDS} shards, got {MOST_SHARDS + 1}"):
        SharedMemoryGroup(0, MOST_SHARDS + 1, -1)


@needs_kernels
def test_a_closed_group(descriptors: dict[str, int]) -> None:
    group = opened("cpu", ["cpu"], descriptors)
    assert group.all_reduce(torch.ones(3)).tolist() == [1.0] * 3
    group.close()
    group.close()
    group.abort()
    with pytest.raises(RuntimeError, match="memory must have"):
        group.all_reduce(torch.ones(3))


def test_memory_without_memfd(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(shared_memory_group.tempfile, "tempdir", str(tmp_path))
    fd = shared_memory_group.create_memory("label", 100)
    assert os.fstat(fd).st_size == 100 and not os.get_inheritable(fd) and not list(tmp_path.iterdir())
    os.close(fd)
