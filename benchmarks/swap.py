"""Swaps between two host pools, block by block, compared with one large copy of the same bytes by one thread.

python -m benchmarks.swap [--json FILE] [--mib 128] [--for-the-record 512] [--kib 128 512 ...] [--repeats 15]
                          [--seed 0]

Blocks are those of Llama-like models: 64 KiB a layer. They lie in two host arenas twice as large as what travels; every page
of both has been touched, and the three kinds of copies take turns: the large one; all blocks of a shuffled table to shuffled
slots; and runs of 16 neighbours. A figure is the large copy's median time through the swap's.

The C library writes past the caches in single copies above a certain size (x86_non_temporal_threshold in the output of
`ld.so --list-tunables`; it follows from the last-level cache), and is then up to 1.8 times as fast as with anything smaller.
One large copy above that size says little about blocks: choose --mib below it. Another amount is measured for the record, with
blocks of 512 KiB.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.arguments import whole
from benchmarks.figures import Figure, report
from pagetide.allocator.host_arena import HostArena
from pagetide.cache.geometry import Geometry, LayerShape
from pagetide.cache.storage import BlockIds, Storage

RUN_BLOCKS = 16
TARGETS = {128: 0.7, 512: 0.85, 1024: 0.85, 2048: 0.85}  # of one large copy, by the KiB of a block


def pool_of(block_kib: int, num_blocks: int) -> Storage:
    """A host pool of at least `num_blocks` blocks besides the null block, all of it touched."""
    geometry = Geometry((LayerShape(8, 128, 128),) * (block_kib // 64), 16, "float16").with_extents(32 << 20)
    assert geometry.block_stride == geometry.payload_bytes == block_kib << 10
    arena = HostArena(geometry.extents_for_blocks(num_blocks + 1), geometry.extent_bytes)
    arena.map(range(arena.num_extents))
    pool = Storage(geometry, arena)
    pool.blocks.random_(256)
    return pool


def in_runs(num_blocks: int, rng: np.random.Generator) -> BlockIds:
    """Runs of 16 neighbours out of the blocks 1 .. 2 * num_blocks, in random places and order."""
    runs = rng.permutation(2 * num_blocks // RUN_BLOCKS)[: num_blocks // RUN_BLOCKS]
    blocks: BlockIds = (1 + runs[:, None] * RUN_BLOCKS + np.arange(RUN_BLOCKS)).ravel()
    return blocks


def swaps(block_kib: int, mib: int, repeats: int, seed: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of each copy, by kind, and the bytes of one. A swap is out and in by turns."""
    rng = np.random.default_rng(seed)
    num_blocks = (mib << 10) // block_kib // RUN_BLOCKS * RUN_BLOCKS
    num_bytes = num_blocks * block_kib << 10
    device, host = pool_of(block_kib, 2 * num_blocks), pool_of(block_kib, 2 * num_blocks)
    flat = {pool: pool.blocks.view(-1).numpy() for pool in (device, host)}
    seconds: dict[str, list[float]] = {"large": [], "random order": [], f"runs of {RUN_BLOCKS}": []}
    for repeat in range(repeats):
        source, target = (device, host) if repeat % 2 else (host, device)
        first, second = rng.integers(0, num_bytes, 2).tolist()
        start = time.perf_counter()
        flat[target][first : first + num_bytes] = flat[source][second : second + num_bytes]
        seconds["large"].append(time.perf_counter() - start)
        for kind in list(seconds)[1:]:
            if kind == "random order":
                sources, targets = (1 + rng.permutation(2 * num_blocks)[:num_blocks] for _ in range(2))
            else:
                sources, targets = in_runs(num_blocks, rng), in_runs(num_blocks, rng)
            start = time.perf_counter()
            target.copy_from(source, sources, targets)
            seconds[kind].append(time.perf_counter() - start)
            some = rng.integers(0, num_blocks, 8)
            assert (target.blocks[targets[some]] == source.blocks[sources[some]]).all(), "a block was not copied"
    return seconds, num_bytes


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--mib", type=whole, default=128, help="what one swap carries")
    parser.add_argument(
        "--for-the-record", type=whole, default=512, metavar="MIB", help="what another swap carries (%(default)s)"
    )
    parser.add_argument("--kib", type=int, nargs="+", choices=list(TARGETS), default=list(TARGETS), help="of a block")
    parser.add_argument("--repeats", type=whole, default=15)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    figures = []
    work = [(args.mib, block_kib, TARGETS[block_kib]) for block_kib in args.kib] + [(args.for_the_record, 512, None)]
    for mib, block_kib, _ in work:
        if mib << 10 < block_kib * RUN_BLOCKS:
            parser.error(
                f"{RUN_BLOCKS} blocks of {block_kib:,} KiB are a run, and more than {mib} MiB: take more of these"
            )
    for mib, block_kib, target in work:
        seconds, num_bytes = swaps(block_kib, mib, args.repeats, args.seed)
        large = statistics.median(seconds.pop("large"))
        figures.append(Figure(f"{mib} MiB, one large copy", num_bytes / large / 1e9, "GB/s", better="higher"))
        for kind, samples in seconds.items():
            name = f"{mib} MiB, blocks of {block_kib:,} KiB, {kind}"
            ratios = [large / s for s in samples]
            figures.append(Figure(name, statistics.median(ratios), "x", target, "higher", ratios))
    report("swap: blocks between two host pools, of one large copy", figures, args.seed, args.json)


if __name__ == "__main__":
    main()
