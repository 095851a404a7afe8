"""Which group the shards of a model form: NCCL on CUDA devices of their own, else shared memory, else gloo."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import native
from .group import ShardGroup
from .shared_memory_group import SharedMemoryGroup, create_memory

KINDS = ("auto", "nccl", "shared-memory", "gloo")


def create_store() -> int:
    """The descriptor of the file in which torch's process groups meet."""
    return create_memory("pagetide-store", 0)


def open_group(
    rank: int, size: int, *, device: torch.device, devices: Sequence[str], memory_fd: int, store_fd: int, kind: str = "auto"
) -> ShardGroup:
    """Join the group of `devices` as `rank`. All shards must come, with the same descriptors, which they have inherited.

    Raises ValueError if `kind` is unknown, or cannot be had on these devices.
    """
    if kind not in KINDS:
        raise ValueError(f"there are no collectives {kind!r}; choose one of {', '.join(KINDS)}")
    distinct = device.type == "cuda" and len(set(devices)) == size
    natively = device.type == "cpu" and native.instructions() is not None  # loads the operators
    if kind == "auto":
        kind = "nccl" if distinct else "shared-memory" if natively else "gloo"
    if kind == "shared-memory":
        if not natively:
            where = "the native kernels are not there" if device.type == "cpu" else f"the shard is on {device}"
            raise ValueError(f"collectives in shared memory are for CPUs with native kernels, but {where}; choose 'gloo'")
        return SharedMemoryGroup(rank, size, memory_fd)
    if kind == "nccl" and not distinct:
        raise ValueError(
            f"NCCL needs a CUDA device for each of {size} shards, got {', '.join(devices)}; choose 'auto' or 'gloo'"
        )
    from .torch_group import GlooGroup, NcclGroup  # imports torch.distributed

    store = f"/proc/self/fd/{store_fd}"
    if kind == "nccl":
        return NcclGroup(rank, size, store)
    return GlooGroup(rank, size, store)
