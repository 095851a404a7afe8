"""The order of a plan's memory operations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from pagetide.cache.block_table import BlockBytes, BlockCopies
from pagetide.cache.host_tier import Swaps
from pagetide.engine.execution.memory_operations import MemoryExecutor, MemoryOperations
from pagetide.scheduler.plan import NO_RESIZE

NONE = np.empty(0, np.int32)


class FakeStorage:
    """Blocks of one number each."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = np.arange(num_blocks)

    def read(self, blocks: np.ndarray) -> np.ndarray:
        return self.blocks[blocks].copy()

    def put(self, blocks: np.ndarray, data: np.ndarray) -> None:
        self.blocks[blocks] = data

    def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        self.blocks[targets] = self.blocks[sources]


def test_bytes_that_come_back_and_those_that_are_read_pass_each_other() -> None:
    """A block that was to leave was needed again: what is read takes its place, or it takes that of what was read, once
    copies have read it.
    """
    to_3 = BlockCopies(np.array([1]), np.array([3]))
    for back, copies, expected in (
        ((1, 2), None, [0, 40, 1, 3, 4]),
        ((1, 2), to_3, [0, 40, 1, 40, 4]),
        ((4, 1), to_3, [0, 4, 2, 40, 4]),
    ):
        storage: Any = FakeStorage(5)
        swaps = Swaps(NONE, NONE, NONE, NONE, back=BlockCopies(np.array(back[:1]), np.array(back[1:])))
        reads = (BlockBytes(np.array([1]), np.array([40], np.uint8)),)
        plan: Any = SimpleNamespace(resize=NO_RESIZE, swaps=swaps, copies=copies, reads=reads)
        host: Any = object()
        MemoryExecutor(storage, host=host).begin(plan, MemoryOperations())
        assert storage.blocks.tolist() == expected
