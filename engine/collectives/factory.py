"""Which group the shards of a model form: NCCL on CUDA devices of their own, else shared memory, else gloo."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import native
from .group import ShardGroup
from .memory_file import create_memory
from .shared_memory_group import SharedMemoryGroup

KINDS = ("auto", "nccl", "shared-memory", "gloo")


def create_store() -> int:
    """The descriptor of the file in which torch's process groups meet."""
    return create_memory("pagetide-store", 0)


def open_group(
    rank: int, size: int, *, device: torch.device, devices: Sequence[str], memory_fd: int, store_fd: int, kind: str = "auto"
) -> ShardGroup:  # fmt: skip
    """Join the group of `devices` as `rank`. All shards must come, with the same descriptors, which they have inherited."""
    if kind == "auto":
        if device.type == "cuda":
            kind = "nccl" if len(set(devices)) == size else "gloo"
        else:
            kind = "gloo" if native.instructions() is None else "shared-memory"
    if kind == "shared-memory":
        return SharedMemoryGroup(rank, size, memory_fd)
    from .torch_group import GlooGroup, NcclGroup  # imports torch.distributed

    store = f"/proc/self/fd/{store_fd}"
    if kind == "nccl":
        return NcclGroup(rank, size, store, device)
    return GlooGroup(rank, size, store)
