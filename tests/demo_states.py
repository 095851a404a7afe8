"""States of the demo's pages, as runs have them, made up."""

from __future__ import annotations

import numpy as np

from pagetide.common.units import MIB
from pagetide.demo.block_map import CACHED, FREE, UNMAPPED, BlockHolders
from pagetide.demo.page import Counts, DemoState, Holding, Pane

PROSE = "The river had risen in the night, and nobody could say how far the fields lay under water by now. " * 12


def demo_state(num_blocks: int = 223, num_panes: int = 2) -> DemoState:
    """In the middle of a recall."""
    holders = np.array([(i // 9) % 14 for i in range(num_blocks)], np.int16)
    holders[holders == 12] = FREE
    holders[holders == 13] = CACHED
    holders[num_blocks // 2 :] = UNMAPPED
    return DemoState(
        title=f"24 prompts, one KV pool of {num_blocks} blocks for a need of 456",
        now="RECALL: half of the pool, 11.62 MiB, must go back to the system.",
        alarm=True,
        intro="What will be seen. " * 20,
        engines=(Counts(8, 4, 5, 1, 24, steps=1234, tokens_per_s=1523.4),),
        pool=BlockHolders(holders),
        history=tuple((100 + i % 20, 3 * i % 90) for i in range(300)),
        panes=tuple(Pane(i, f"running, {i} tokens", PROSE, PROSE.upper()) for i in range(num_panes)),
    )


def shared_state(num_columns: int = 90) -> DemoState:
    """Engine A yields to B and to the external process."""
    holdings = tuple(
        Holding(2 * MIB, (max(8, 60 - i) * MIB, min(60, 8 + i) * MIB), 3 * (i % 60) * MIB, (i % 9 == 3, i % 6 == 3))
        for i in range(num_columns)
    )
    return DemoState(
        title="two engines and an external process on one device",
        now="RECALL: engine A must give memory back.",
        alarm=True,
        intro="What will be seen. " * 20,
        capacity_bytes=1359 * MIB,
        contended_bytes=321 * MIB,
        engines=(Counts(10, 12, 13, 15, 16, recalls=14), Counts(total=16)),
        holdings=holdings,
    )
