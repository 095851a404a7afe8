"""The map of the pool: holders against an oracle from the tables, and the layout of the tiles."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import World

from pagetide.demo.block_map import (
    CACHED,
    FREE,
    UNMAPPED,
    BlockHolders,
    MapShape,
    map_lines,
    sample_blocks,
    tile_holders,
)
from pagetide.monitor.view.symbols import ASCII, UNICODE


def oracle(world: World, numbers: dict[str, int]) -> list[int]:
    """The holder of each block but the null block, one by one."""
    pool, rows = world.cache.pool, world.scheduler.rows.request_ids
    found = []
    for block in range(1, pool.num_blocks):
        in_rows = [
            row
            for row in range(len(rows))
            if rows[row] is not None and any(block in table.of(row) for table in world.cache.tables)
        ]
        if in_rows:
            found.append(min(numbers[rows[row]] for row in in_rows))
        elif block // pool.blocks_per_extent not in pool.mapped_extents.tolist():
            found.append(UNMAPPED)
        else:
            found.append(CACHED if block in pool.cached_blocks.tolist() else FREE)
    return found


@pytest.mark.parametrize("per", [None, 3])
def test_each_block_shows_its_holder(per: int | None) -> None:
    """Requests with a common prefix share blocks; in the elastic pool, four of six extents have memory."""
    world = World(
        17, block_size=4, max_seqs=4, max_step_tokens=12, blocks_per_extent=per, num_mapped=None if per is None else 4,
        caching=True,
    )  # fmt: skip
    common = world.prompt(8)
    numbers = {}
    for number, length in enumerate((3, 9, 5, 1, 12)):
        numbers[f"r{number}"] = number
        world.add(f"r{number}", np.concatenate([common, world.prompt(length)]), max_new=6)
    seen = set()
    while world.scheduler.has_work:
        world.finish(world.due())
        sample = sample_blocks(world.scheduler, numbers)
        expected = oracle(world, numbers)
        assert sample.holders.tolist() == expected
        assert sample.num_held == sum(holder >= 0 for holder in expected) == world.cache.pool.counts().live
        assert sample.num_mapped == len(expected) - expected.count(UNMAPPED)
        assert sample.num_blocks == 17
        seen |= set(expected)
    assert {0, 1, 2, 3, 4, FREE, CACHED} <= seen and (UNMAPPED in seen) == (per is not None)


def test_tiles_are_as_large_as_fits() -> None:
    for num_blocks in (1, 7, 64, 223, 456, 2000):
        for width in (1, 10, 58, 78, 198):
            for height in (1, 4, 8, 20):
                shape = MapShape.of(num_blocks, width, height)
                assert shape.columns * shape.width <= width
                lines = -(-num_blocks // (shape.columns * shape.blocks_per_tile)) * shape.height
                assert lines <= height
                larger = [
                    (w, h)
                    for w in range(1, min(6, width) + 1)
                    for h in range(1, 4)
                    if w * h > shape.width * shape.height and -(-num_blocks // (width // w)) * h <= height
                ]
                assert not larger
                assert shape.blocks_per_tile == 1 or num_blocks > width * height


def test_a_tile_of_several_blocks_shows_the_most_frequent_holder() -> None:
    holders = np.array([0, 1, 1, FREE, FREE, 2, UNMAPPED, UNMAPPED], np.int16)
    assert tile_holders(holders, 1) == holders.tolist()
    assert tile_holders(holders, 3) == [1, FREE, UNMAPPED]
    assert tile_holders(holders, 8) == [1]


@pytest.mark.parametrize(("symbols", "free"), [(UNICODE, "·"), (ASCII, "-")])
def test_the_map_is_readable_without_colours(symbols: object, free: str) -> None:
    holders = np.array([0, 0, 25, 26, 51, 52, FREE, CACHED, UNMAPPED], np.int16)
    lines = map_lines(BlockHolders(holders), 9, 1, symbols)  # type: ignore[arg-type]
    assert ["".join(segment.text for segment in line) for line in lines] == [f"AAZazA{free}+_"]


def test_the_styles_tell_neighbours_apart() -> None:
    (line,) = map_lines(BlockHolders(np.arange(12, dtype=np.int16)), 12, 1, UNICODE)
    assert len({str(segment.style) for segment in line}) == 12
