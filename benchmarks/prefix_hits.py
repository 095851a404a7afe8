"""Hit ratios of the eviction policies over public traces and synthetic loads, one request at a time, prefill only.

python -m benchmarks.prefix_hits [--data DIR] [--requests N] [--json FILE] [--seed 0]

DIR holds the traces and their `reference_public.json`, which has the hit ratios of a paged pool under least recently used
and of the exact optimum. Without it: loads made from a seed (`made_loads` says how). For these, and for the first N requests
of a trace, both are computed here. A hit ratio is hit tokens of all prompt tokens; "gap" is the share of the way from least
recently used to the optimum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.arguments import add_data, parser_of, whole
from benchmarks.figures import Figure, report
from benchmarks.load import Trace, agentic, mooncake
from pagetide.allocator.blocks import BlockAllocator
from pagetide.cache.eviction import Lru, PolicyFactory
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.cache.prefix_tree import Nodes
from pagetide.cache.reuse_density import ReuseDensity
from pagetide.cache.row_tables import RowTables

TRACES = {"mooncake_conversation_0-20min": (mooncake, 512), "agentic_sessions": (agentic, 64)}
GOALS = {("mooncake_conversation_0-20min", 5_000), ("agentic_sessions", 5_000)}  # where a quarter of the gap is due


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One request: the ids of its full blocks, where an equal id is an equal prefix, and its tokens."""

    blocks: Nodes
    tokens: int


class OneAtATime:
    """A real `CacheManager` that serves one request at a time. A block of the trace is a block of one token: its id."""

    def __init__(self, make: PolicyFactory, num_blocks: int, longest: int) -> None:
        self._num_blocks = num_blocks
        tables = RowTables(BlockAllocator(1 + num_blocks), 1, 1, 1 + longest)
        self._cache = CacheManager(tables, PrefixHasher(1, b"prefix hits"), eviction=make)
        self.refused = 0

    def serve(self, blocks: Nodes, tail: bool) -> int:
        """Compute a prompt. Returns how many of its leading blocks were found.

        All of them may be: that one token is computed at least is left out, as in the reference.
        """
        cache, n = self._cache, len(blocks)
        if n + tail > self._num_blocks:
            self.refused += 1
            return 0
        chain = cache.chain(blocks.astype(np.int32), None)
        hit = cache.lookup(chain, n)
        extension = cache.admit(0, n + tail, hit)
        assert extension is not None, "what is not held must be evictable"
        cache.commit(0, chain, n)
        cache.release(np.array([0]))
        return hit.num_tokens


POLICIES: dict[str, PolicyFactory] = {"lru": Lru, "reuse-density": ReuseDensity}


def replay(prompts: list[Prompt], block_size: int, num_blocks: int, make: PolicyFactory) -> tuple[float, int]:
    """The hit ratio of all `prompts` from an empty pool, and how many of them were refused."""
    pool = OneAtATime(make, num_blocks, max(len(prompt.blocks) for prompt in prompts))
    hit = sum(pool.serve(prompt.blocks, prompt.tokens % block_size > 0) for prompt in prompts)
    return hit * block_size / sum(prompt.tokens for prompt in prompts), pool.refused


def optimum(prompts: list[Prompt], block_size: int, num_blocks: int) -> float:
    """The best hit ratio of any policy: evict what is used again last (Belady), of a chain the deepest."""
    never = len(prompts)
    num_ids = 1 + max(int(prompt.blocks.max(initial=0)) for prompt in prompts)
    next_use = np.full(num_ids, never)
    following = []
    for i in range(never - 1, -1, -1):
        following.append(next_use[prompts[i].blocks])
        next_use[prompts[i].blocks] = i
    resident = np.zeros(len(next_use), np.bool_)
    depth = np.zeros(len(next_use), np.int64)
    hit = 0
    for prompt, then in zip(prompts, reversed(following), strict=True):
        missing = np.flatnonzero(~resident[prompt.blocks])
        hit += int(missing[0]) if len(missing) else len(prompt.blocks)
        resident[prompt.blocks] = True
        next_use[prompt.blocks] = then
        depth[prompt.blocks] = np.arange(len(prompt.blocks))
        ids = np.flatnonzero(resident)
        if len(ids) > num_blocks:
            order = np.lexsort((-depth[ids], -next_use[ids]))
            resident[ids[order[: len(ids) - num_blocks]]] = False
    return hit * block_size / sum(prompt.tokens for prompt in prompts)


def load(trace: Trace, block_size: int) -> list[Prompt]:
    """The prompts of a trace with ids that stand for blocks."""
    return [Prompt(turn.ids[: turn.prompt_tokens // block_size], turn.prompt_tokens) for turn in trace.turns]


def made_loads(seed: int) -> dict[str, list[Prompt]]:
    """Loads of 16-token blocks.

    conversations: 400 users in a closed loop, each behind one of 20 system prompts of 16 blocks (Zipf, exponent 1); a
    conversation has a geometric number of turns (mean 4), each adds 4 + an exponential number (mean 12) of blocks;
    between turns an exponential time. loop: 64 chains of 40 blocks in turn. scan: nothing ever comes again, behind one
    shared system prompt. shift: conversations in which turns come 8 times as fast in the second half. system prompts:
    200 heads of 30 blocks by Zipf, each with 10 blocks of its own.
    """
    rng = np.random.default_rng(seed)
    loads = {
        "conversations": conversations(rng, lambda i: 1.0),
        "shift": conversations(rng, lambda i: 1.0 if i < 3_000 else 0.125),
        "loop": [40 * (i % 64) + np.arange(40) for i in range(3_000)],
        "scan": [np.concatenate((np.arange(16), 16 + 24 * i + np.arange(24))) for i in range(3_000)],
    }
    weights = 1 / np.arange(1, 201)
    heads = rng.choice(200, 4_000, p=weights / weights.sum())
    loads["system prompts"] = [
        np.concatenate((30 * head + np.arange(30), 6_000 + 10 * i + np.arange(10))) for i, head in enumerate(heads)
    ]
    return {name: [Prompt(chain, 16 * len(chain) + 7) for chain in chains] for name, chains in loads.items()}


def conversations(rng: np.random.Generator, pause: Callable[[int], float]) -> list[Nodes]:
    """6,000 prompts; request i's answer is followed by an exponential pause of mean `pause(i)`."""
    weights = 1 / np.arange(1, 21)
    next_id = 20 * 16
    due = rng.exponential(1.0, 400)
    chains: list[Nodes] = [np.empty(0, np.int64)] * 400
    prompts = []
    for i in range(6_000):
        user = int(due.argmin())
        if not len(chains[user]) or rng.random() < 0.25:
            chains[user] = 16 * rng.choice(20, p=weights / weights.sum()) + np.arange(16)
        new = 4 + int(rng.exponential(12.0))
        chains[user] = np.concatenate((chains[user], np.arange(next_id, next_id + new)))
        next_id += new
        prompts.append(chains[user])
        due[user] += rng.exponential(pause(i))
    return prompts


Pools = dict[int, tuple[float, float, int]]  # by size in blocks: hit ratios of LRU and of the optimum, requests refused


def compare(name: str, prompts: list[Prompt], block_size: int, pools: Pools) -> list[Figure]:
    """The figures of both policies."""
    figures = []
    for num_blocks, (lru, best, refused) in pools.items():
        figures.append(Figure(f"{name} {num_blocks}, paged LRU", 100 * lru, "%"))
        figures.append(Figure(f"{name} {num_blocks}, optimum above LRU", 100 * (best - lru), "points"))
        for policy, make in POLICIES.items():
            label = f"{name} {num_blocks} {policy}"
            points = 100 * (replay(prompts, block_size, num_blocks, make)[0] - lru)
            due: float | None = 0.0
            if policy == "reuse-density":
                due = -0.5 if not refused else None  # where requests were refused, not comparable
            # The reference has six decimals, hence the rounding.
            figures.append(Figure(f"{label}, above LRU", round(points, 3) + 0.0, "points", due, "higher"))
            if policy == "reuse-density" and best - lru > 1e-3:
                goal = 25.0 if (name, num_blocks) in GOALS else None
                figures.append(Figure(f"{label}, of the gap", points / (best - lru), "%", goal, "higher"))
    return figures


def computed(prompts: list[Prompt], block_size: int, sizes: Sequence[int]) -> Pools:
    """What `compare` compares with."""
    runs = {size: replay(prompts, block_size, size, Lru) for size in sizes}
    return {size: (ratio, optimum(prompts, block_size, size), refused) for size, (ratio, refused) in runs.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add_data(parser, "the public traces and reference_public.json", "loads made from the seed")
    parser.add_argument("--requests", type=whole, metavar="N", help="the first N of each load only")
    args = parser.parse_args(argv)
    figures: list[Figure] = []
    if args.data is not None:
        files = ("reference_public.json", *(f"{name}.jsonl" for name in TRACES))
        if missing := [file for file in files if not (args.data / file).is_file()]:
            parser.error(f"{args.data} has no {', '.join(missing)}; with --data none the loads are made")
        reference = json.loads((args.data / "reference_public.json").read_text())["traces"]
        for name, (read, block_size) in TRACES.items():
            known = {int(size): pool for size, pool in reference[name]["cache"]["full"].items() if size != "inf"}
            pools = {
                size: (*(pool[kind]["token_hit_ratio"] for kind in ("paged_lru", "min")), pool["paged_lru"]["refused"])
                for size, pool in known.items()
            }
            prompts = load(read(args.data), block_size)[: args.requests]
            pools = pools if args.requests is None else computed(prompts, block_size, tuple(pools))
            figures += compare(name, prompts, block_size, pools)
    else:
        for name, prompts in made_loads(args.seed).items():
            some = prompts[: args.requests]
            figures += compare(name, some, 16, computed(some, 16, (500, 1_000, 2_000, 5_000)))
    report("Prefix hits", figures, args.seed, args.json)


if __name__ == "__main__":
    main()
