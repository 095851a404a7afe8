"""The cells of a frame by loops over tables, references and pins: what frames and the page are compared with."""

from __future__ import annotations

from typing import Any

from pagetide.scheduler.scheduler import Scheduler


def seated(scheduler: Scheduler) -> dict[int, Any]:
    """The sequence of each row that has one."""
    return {**scheduler.state.by_row, **scheduler.state.finishing}


def naive_cells(scheduler: Scheduler) -> list[int]:
    """The cell of every block, by loops."""
    pool, tables = scheduler.cache.pool, scheduler.cache.tables
    held: dict[int, list[int]] = {}
    for row in seated(scheduler):
        for table in tables:
            for slot in range(int(table.starts[row]), int(table.lengths[row])):
                for blocks in table.blocks:
                    held.setdefault(int(blocks[row, slot]), []).append(row)
    pins, index = scheduler.cache.pins, scheduler.cache.index
    pinned = pins.references(index).tolist()
    cells = []
    for block in range(pool.num_blocks):
        extent = block // pool.blocks_per_extent
        if block == 0:
            cell = 5
        elif pool._extents._states[extent] == 0:
            cell = 0
        elif pool._references[block]:
            rows = held.get(block, [])
            assert len(rows) + pinned.count(block) == pool._references[block]
            cell = 3
            if rows:
                first = min(rows, key=lambda row: seated(scheduler)[row].key)
                cell = 16 + first + (0x8000 if len(rows) > 1 else 0)
        elif pool._pins[block]:
            cell = 4
        elif pool._findable[block]:
            cell = 3
        else:
            cell = 2 if pool._extents._states[extent] == 2 else 1
        cells.append(cell)
    return cells
