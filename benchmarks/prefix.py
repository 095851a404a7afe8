"""The time to look up a prompt's prefix and to register computed blocks, with the default eviction policy. No model.

python -m benchmarks.prefix [--json FILE] [--repeats 20] [--blocks 1000000] [--seed 0]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from benchmarks.arguments import parser_of, whole
from benchmarks.figures import median_time, report
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.cache.prefix_index import PrefixIndex
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
    """The life of one prompt of 512 blocks: registered, found, parked, taken, parked again."""
    hasher = index.hasher
    places = samples.time("register", lambda: index.register(hasher.chain(tokens), blocks, 0))
    assert len(places.blocks) == BLOCKS
    hit = samples.time("hit", lambda: index.lookup(hasher.chain(tokens), TOKENS))
    assert hit.num_tokens == TOKENS
    other = tokens.copy()
    other[3] += 1
    assert samples.time("miss", lambda: index.lookup(hasher.chain(other), TOKENS)).num_tokens == 0
    index.mark_evictable(blocks)
    index.accept(hit)
    index.mark_used(hit.blocks)
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=whole, default=20)
    parser.add_argument("--blocks", type=whole, default=1_000_000, help="of the large index (%(default)s)")
    args = parser.parse_args(argv)
    large = large_pool(args.blocks, args.repeats, args.seed).seconds
    small = small_pool(args.repeats, args.seed).seconds
    figures = [
        median_time("lookup of 8,192 tokens, full hit, hashing included", small["hit"], "us", 200),
        median_time("lookup of 8,192 tokens, miss of the first block", small["miss"], "us", 10),
        median_time("hash and register 512 new blocks", small["register"], "us", 350),
        median_time("512 blocks chosen and evicted", small["evict"], "us"),
        median_time(f"full hit among {args.blocks:,} nodes, nothing in caches", large["hit"], "us"),
        median_time(f"hash and register 512 up to {args.blocks:,} nodes", large["register"], "us"),
    ]
    report("prefix index: hashes, lookups, registration", figures, args.seed, args.json)


if __name__ == "__main__":
    main()
