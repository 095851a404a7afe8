"""The shards of a model in the threads of one process: real groups, in memory that they share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pagetide import native
from pagetide.engine.collectives.factory import create_store, open_group
from pagetide.engine.collectives.group import CollectiveAborted, ShardGroup
from pagetide.engine.collectives.shared_memory_group import create_group_memory


class ThreadGroup:
    """A group whose sums and columns are operators of torch: a tape, which stands in for CUDA graphs, does them again."""

    captures = True

    def __init__(self, group: ShardGroup) -> None:
        self._group, self._key = group, len(_groups)
        _groups.append(group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        all_reduce(x, self._key)
        return x

    def gather(self, x: Tensor, widths: Sequence[int], *, everywhere: bool = False) -> Tensor:
        joined = gather(x.contiguous(), list(widths), self._key)
        return joined if everywhere or not self._group.rank else x


_groups: list[ShardGroup] = []  # by key


@torch.library.custom_op("shard_threads::all_reduce", mutates_args=("x",))
def all_reduce(x: Tensor, key: int) -> None:
    _groups[key].all_reduce(x)


@torch.library.custom_op("shard_threads::gather", mutates_args=())
def gather(x: Tensor, widths: list[int], key: int) -> Tensor:
    return _groups[key].gather(x, widths, everywhere=True)


def thread_groups(size: int) -> list[ThreadGroup]:
    """The groups of `size` shards, each for a thread of its own. Skips the test where there are none: gloo's are processes."""
    if native.instructions() is None:
        pytest.skip("without native kernels shards are processes, which tests/engine/shards/test_processes.py has")
    memory_fd, store_fd = create_group_memory(size), create_store()
    how = {"devices": ["cpu"] * size, "memory_fd": memory_fd, "store_fd": store_fd}

    def join(rank: int) -> ThreadGroup:
        return ThreadGroup(open_group(rank, size, device=torch.device("cpu"), **how))

    groups = run_in_threads([lambda rank=rank: join(rank) for rank in range(size)])
    os.close(memory_fd)  # each has mapped it; gloo goes on reading the store
    return groups


def run_in_threads(functions: Sequence[Callable[[], Any]], groups: Sequence[ThreadGroup] = ()) -> list[Any]:
    """Call each function in a thread of its own. Returns the results; raises the first exception, after all have ended.

    With `groups`, an exception aborts their collectives, so that no thread waits for the one that raised.
    """
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = functions[i]()
        except BaseException as error:
            errors.append(error)
            for group in groups:
                group.abort()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, CollectiveAborted)), errors[0])
    return results
