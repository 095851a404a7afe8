"""The time to look up a prompt's prefix and to register computed blocks, with the default eviction policy. No model.

python -m benchmarks.prefix [--json FILE] [--repeats 20] [--blocks 1000000] [--seed 0]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from benchmarks.arguments import whole
from benchmarks.figures import Figure, report
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.cache.prefix_index import PrefixIndex
from pagetide.cache.prefix_tree import PrefixTree
from pagetide.cache.reuse_density import ReuseDensity

BLOCK_SIZE = 16
BLOCKS = 512
TOKENS = BLOCKS * BLOCK_SIZE
VOCAB = 32_000
Result = TypeVar("Result")
Int32 = npt.NDArray[np.int32]


@dataclass
class Samples:
    """Seconds of each operation, one entry a repeat."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def time(self, name: str, call: Callable[[], Result]) -> Result:
        start = time.perf_counter()
        result = call()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result


def one_prompt(index: PrefixIndex, tokens: Int32, blocks: Int32, samples: Samples) -> None:
    """The life of one prompt of 512 blocks: registered, looked up in several ways, parked, taken, evicted."""
    hasher = index.hasher
    places = samples.time("register", lambda: index.register(hasher.chain(tokens), blocks, 0))
    assert len(places.blocks) == BLOCKS
    chain = hasher.chain(np.append(tokens, np.int32(1)))
    hit = samples.time("hit", lambda: index.lookup(hasher.chain(tokens), TOKENS))
    assert hit.num_tokens == TOKENS
    other = tokens.copy()
    other[3] += 1
    hit = samples.time("miss", lambda: index.lookup(hasher.chain(other), TOKENS))
    assert hit.num_tokens == 0
    index.lookup(chain, TOKENS)
    hit = samples.time("again", lambda: index.lookup(chain, TOKENS))
    samples.time("park", lambda: index.mark_evictable(blocks))
    samples.time("take", lambda: (index.accept(hit), index.mark_used(hit.blocks)))
    index.mark_evictable(blocks)


def small_pool(repeats: int, seed: int) -> Samples:
    """A pool that holds 40 prompts, full at any time: each new prompt drives out the oldest."""
    rng, samples = np.random.default_rng(seed), Samples()
    num_blocks = 40 * BLOCKS + 1
    index = new_index(num_blocks)
    free = list(range(1, num_blocks))
    for number in range(40 + 10 * repeats):
        if len(free) < BLOCKS:
            free += samples.time("evict", lambda: index.evict(index.victims(BLOCKS))).blocks.tolist()
        blocks = np.array([free.pop(0) for _ in range(BLOCKS)], np.int32)
        one_prompt(index, rng.integers(3, VOCAB, TOKENS, dtype=np.int32), blocks, samples)
        if number == 0:
            samples.seconds.clear()  # the first one makes the hasher's keys
    index.check_invariants()
    return samples


def large_pool(num_blocks: int, repeats: int, seed: int) -> Samples:
    """A pool of about `num_blocks` blocks, full; prompts in random order, so that nothing is in the processor's cache."""
    rng, samples = np.random.default_rng(seed), Samples()
    num_prompts = -(-num_blocks // BLOCKS)
    index = new_index(num_prompts * BLOCKS + 1)
    tokens = rng.integers(3, VOCAB, (num_prompts, TOKENS), dtype=np.int32)
    blocks = rng.permutation(np.arange(1, num_prompts * BLOCKS + 1, dtype=np.int32)).reshape(num_prompts, BLOCKS)
    for prompt, table in zip(tokens, blocks, strict=True):
        samples.time("register", lambda: index.register(index.hasher.chain(prompt), table, 0))  # noqa: B023
    for number in rng.permutation(num_prompts)[: 10 * repeats]:
        prompt = tokens[number].copy()
        hit = samples.time("hit", lambda: index.lookup(index.hasher.chain(prompt), TOKENS))  # noqa: B023
        assert (hit.blocks == blocks[number]).all()
    return samples


def new_index(num_blocks: int) -> PrefixIndex:
    return PrefixIndex(PrefixHasher(BLOCK_SIZE), num_blocks, ReuseDensity)


def build(num_blocks: int, repeats: int) -> Samples:
    """An index of so many blocks, without its policy."""
    samples, hasher, policy = Samples(), PrefixHasher(BLOCK_SIZE), ReuseDensity(PrefixTree(num_blocks))
    for _ in range(repeats):
        gc.collect()
        samples.time("build", lambda: PrefixIndex(hasher, num_blocks, lambda tree: policy))
    return samples


def bytes_per_node(num_blocks: int) -> float:
    """Bytes that an index of so many blocks has reserved, a block; its policy and the hasher's keys are not counted."""
    hasher, policy = PrefixHasher(BLOCK_SIZE), ReuseDensity(PrefixTree(num_blocks))
    tracemalloc.start()
    index = PrefixIndex(hasher, num_blocks, lambda tree: policy)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / index.capacity


def long_sequence(tokens: int, repeats: int) -> Samples:
    """A sequence longer than any before it: its hashes, and the keys for them."""
    samples, ids = Samples(), np.random.default_rng(0).integers(3, VOCAB, tokens, dtype=np.int32)
    for _ in range(repeats):
        hasher = PrefixHasher(BLOCK_SIZE)
        samples.time("first", lambda: hasher.chain(ids).digests(tokens // BLOCK_SIZE))  # noqa: B023
        samples.time("later", lambda: hasher.chain(ids).digests(tokens // BLOCK_SIZE))  # noqa: B023
    return samples


def figure(name: str, seconds: list[float], unit: str, target: float | None = None) -> Figure:
    """The median of `seconds`, in `unit`."""
    scaled = [s * {"us": 1e6, "ms": 1e3}[unit] for s in seconds]
    return Figure(name, statistics.median(scaled), unit, target, samples=[round(s, 3) for s in scaled])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--repeats", type=whole, default=20)
    parser.add_argument(
        "--blocks", type=whole, default=1_000_000, help="of the large index (%(default)s, for which the target is)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    blocks = args.blocks
    small = small_pool(args.repeats, args.seed).seconds
    large = large_pool(blocks, args.repeats, args.seed).seconds
    long = long_sequence(131_072, args.repeats).seconds
    figures = [
        figure("lookup of 8,192 tokens, full hit, hashing included", small["hit"], "us", 200),
        figure("lookup of 8,192 tokens, miss of the first block", small["miss"], "us", 10),
        figure("hash and register 512 new blocks", small["register"], "us", 350),
        figure("lookup of 8,192 tokens, hashed before", small["again"], "us"),
        figure("a hit of 512 parked blocks taken", small["take"], "us"),
        figure("512 blocks parked", small["park"], "us"),
        figure("512 blocks chosen and evicted", small["evict"], "us"),
        figure(f"full hit among {blocks:,} nodes, nothing in caches", large["hit"], "us"),
        figure(f"hash and register 512 up to {blocks:,} nodes", large["register"], "us"),
        figure("hash 131,072 tokens, keys made for it", long["first"], "ms"),
        figure("hash 131,072 tokens", long["later"], "ms"),
        figure(f"build an index of {blocks:,} blocks", build(blocks, args.repeats).seconds["build"], "ms", 50),
        Figure("memory of the index, a block of 16 tokens", bytes_per_node(blocks), "bytes"),
    ]
    report("prefix index: hashes, lookups, registration", figures, args.seed, args.json)


if __name__ == "__main__":
    main()
