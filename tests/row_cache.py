"""A cache manager with a host tier, driven without a scheduler: rows begin with what they find, compute the rest, and end."""

from __future__ import annotations

import numpy as np

from pagetide.allocator.blocks import BlockAllocator
from pagetide.cache.eviction import Lru
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import Chain, PrefixHasher
from pagetide.cache.row_tables import RowTables

BLOCK_SIZE = 4
A, B, C, D = (list(range(start, start + 17)) for start in (100, 200, 300, 400))  # 4 full blocks and a token each


class RowCache:
    """A manager of `usable` blocks and `host_slots`."""

    def __init__(self, usable: int, host_slots: int, blocks_per_extent: int | None = None, **more) -> None:
        pool = BlockAllocator(usable + 1, blocks_per_extent=blocks_per_extent)
        more = {"eviction": Lru, "host_slots": host_slots} | more
        self.manager = CacheManager(RowTables(pool, BLOCK_SIZE, 4, 256), PrefixHasher(BLOCK_SIZE, b"seed"), **more)

    def chain(self, tokens: list[int]) -> Chain:
        return self.manager.chain(np.array(tokens, np.int32), None)

    def begin(self, row: int, tokens: list[int], name: str = "") -> int:
        """Returns the tokens that need not be computed."""
        extension = self.manager.admit(row, len(tokens), self.manager.lookup(self.chain(tokens), len(tokens) - 1), name)
        assert extension is not None
        self.manager.check_invariants()
        return extension.num_computed

    def end(self, row: int, tokens: list[int], name: str | None = None) -> None:
        """All of it is computed; with a `name` it will be back, and its tail is kept."""
        chain = self.chain(tokens)
        self.manager.commit(row, chain, len(tokens))
        if name is not None:
            self.manager.keep_for(name, row, chain, len(tokens))
        self.manager.release(np.array([row]))
        self.manager.check_invariants()

    def run(self, tokens: list[int]) -> int:
        found = self.begin(0, tokens)
        self.end(0, tokens)
        return found
