"""Hit ratios of the eviction policies over public traces and synthetic loads, one request at a time, prefill only.

python -m benchmarks.prefix_hits [--data DIR] [--policy lru,reuse-density] [--requests N] [--json FILE] [--seed 0]

DIR holds the traces and their `reference_public.json`, which has the hit ratios of a paged pool under least recently used
and of the exact optimum. Without it: loads made from a seed (`made_loads` says how). For these, and for the first N requests
of a trace, both are computed here. A hit ratio is hit tokens of all prompt tokens; "gap" is the share of the way from least
recently used to the optimum.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.arguments import add_data, whole
from benchmarks.figures import Figure, report
from pagetide.cache.eviction import Keys, Lru, PolicyFactory, Ranks
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.cache.prefix_tree import Nodes, PrefixTree
from pagetide.cache.reuse_density import ReuseDensity

TRACES = {
    "mooncake_conversation_0-20min": ("mooncake_conversation_0-20min.jsonl", 512),
    "agentic_sessions": ("agentic_sessions.jsonl", 64),
}
GOALS = {("mooncake_conversation_0-20min", 5_000), ("agentic_sessions", 5_000)}  # where a quarter of the gap is due


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One request: the ids of its full blocks, where an equal id is an equal prefix, and its tokens."""

    blocks: Nodes
    tokens: int


@dataclass(frozen=True, slots=True)
class HitOutcome:
    """What a replay came to."""

    hit_ratio: float
    refused: int
    evictions: int


class OneAtATime:
    """A real `CacheManager` that serves one request at a time. A block of the trace is a block of one token: its id."""

    def __init__(self, make: PolicyFactory, num_blocks: int, longest: int) -> None:
        self._num_blocks = num_blocks
        self._cache = CacheManager(
            1 + num_blocks, 1, 1, 1 + longest, hasher=PrefixHasher(1, b"prefix hits"), eviction=make
        )
        self.refused = self.evictions = 0

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
        before = cache.index.num_nodes
        extension = cache.admit(0, n + tail, hit)
        assert extension is not None, "what is not held must be evictable"
        self.evictions += before - cache.index.num_nodes
        cache.commit(0, chain, n)
        cache.release(np.array([0]))
        return hit.num_tokens


class ByScore:
    """Policies that are simple to say and slow: all evictable nodes are sorted each time, descendants first."""

    def __init__(self, tree: PrefixTree) -> None:
        capacity = tree.capacity
        self._tree = tree
        self._evictable = np.zeros(capacity, np.bool_)
        self._used_at = np.zeros(capacity, np.int64)
        self._hits = np.zeros(capacity, np.int64)
        self._score = np.zeros(capacity)
        self._now = 0

    def scores(self, nodes: Nodes) -> Ranks:
        raise NotImplementedError

    def evicting(self, nodes: Nodes) -> None:
        """`nodes` go."""

    def add(self, nodes: Nodes, keys: Keys) -> None:
        self._hits[nodes] = 0

    def hit(self, nodes: Nodes) -> None:
        self._hits[nodes] += 1

    def mark_evictable(self, nodes: Nodes) -> None:
        self._now += 1
        self._used_at[nodes] = self._now
        self._evictable[nodes] = True
        self._score[nodes] = self.scores(nodes)

    def mark_used(self, nodes: Nodes) -> None:
        self._evictable[nodes] = False

    def victims(self, n: int) -> Nodes:
        nodes = np.flatnonzero(self._evictable)
        # A prompt that uses a node uses its ancestors too: scores that grow with hits and time never fall towards the root.
        return nodes[np.lexsort((-self._tree.depths[nodes], self._used_at[nodes], self._score[nodes]))][:n]

    def remove(self, nodes: Nodes) -> None:
        self.evicting(nodes)
        self._evictable[nodes] = False

    def ranks(self, nodes: Nodes) -> Ranks:
        return self._score[nodes]


class TwoSegments(ByScore):
    """Segmented LRU without a bound: what was never hit goes first."""

    def scores(self, nodes: Nodes) -> Ranks:
        return np.minimum(self._hits[nodes], 1).astype(np.float64)


class LeastFrequent(ByScore):
    """LFU: fewest hits since the block came."""

    def scores(self, nodes: Nodes) -> Ranks:
        return self._hits[nodes].astype(np.float64)


class AgedFrequency(ByScore):
    """LFU with dynamic ageing (GreedyDual-Size-Frequency of equal sizes): hits count from what was evicted last."""

    _floor = 0.0

    def scores(self, nodes: Nodes) -> Ranks:
        return self._floor + 1.0 + self._hits[nodes]

    def evicting(self, nodes: Nodes) -> None:
        self._floor = max(self._floor, float(self._score[nodes].max(initial=0.0)))


POLICIES: dict[str, PolicyFactory] = {
    "lru": Lru,
    "reuse-density": ReuseDensity,
    "two-segments": TwoSegments,
    "lfu": LeastFrequent,
    "lfu-aged": AgedFrequency,
}


def replay(prompts: list[Prompt], block_size: int, num_blocks: int, make: PolicyFactory) -> HitOutcome:
    """Serve all of `prompts` from an empty pool."""
    pool = OneAtATime(make, num_blocks, max(len(prompt.blocks) for prompt in prompts))
    hit = sum(pool.serve(prompt.blocks, prompt.tokens % block_size > 0) for prompt in prompts)
    return HitOutcome(hit * block_size / sum(prompt.tokens for prompt in prompts), pool.refused, pool.evictions)


def optimum(prompts: list[Prompt], block_size: int, num_blocks: int) -> float:
    """The best hit ratio of any policy: evict what is used again last (Belady), of a chain the deepest."""
    never = len(prompts)
    next_use = np.full(num_ids(prompts), never)
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


def num_ids(prompts: list[Prompt]) -> int:
    """One more than the highest id."""
    return 1 + max(int(prompt.blocks.max(initial=0)) for prompt in prompts)


def load(path: Path, block_size: int) -> list[Prompt]:
    """The prompts of a trace: `hash_ids`, one per block begun, or `hash_runs` of full blocks."""
    prompts = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if "hash_ids" in entry:
            ids = np.array(entry["hash_ids"], np.int64)
        else:
            ids = np.concatenate([np.arange(first, first + count) for first, count in [[0, 0], *entry["hash_runs"]]])
        tokens = int(entry["input_length"])
        prompts.append(Prompt(ids[: tokens // block_size], tokens))
    return prompts


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


def compare(
    name: str, prompts: list[Prompt], block_size: int, pools: dict[int, tuple[float, float, int]], policies: list[str]
) -> list[Figure]:
    """Print a line for each pool size and give the figures. `pools`: blocks -> hit ratios of LRU and optimum, refused."""
    print(f"\n{name}: hit ratio in % (points above paged LRU, share of the gap)")
    print(f"  {'blocks':>8} {'paged lru':>10} {'optimum':>8}  " + "  ".join(f"{policy:>22}" for policy in policies))
    figures = []
    for num_blocks, (lru, best, refused) in pools.items():
        cells = []
        for policy in policies:
            start = time.perf_counter()
            outcome = replay(prompts, block_size, num_blocks, POLICIES[policy])
            seconds = time.perf_counter() - start
            points = 100 * (outcome.hit_ratio - lru)
            gap = f"{100 * (outcome.hit_ratio - lru) / (best - lru):4.0f}%" if best - lru > 1e-3 else "    -"
            cells.append(f"{100 * outcome.hit_ratio:7.2f} ({points:+6.2f}, {gap})")
            label = f"{name} {num_blocks} {policy}"
            if policy == "reuse-density":
                due = -0.5 if not refused else None  # where requests were refused, not comparable
                figures.append(Figure(f"{label}, above LRU", points, "points", due, "higher"))
                if (name, num_blocks) in GOALS and best - lru > 1e-3:
                    share = 100 * (outcome.hit_ratio - lru) / (best - lru)
                    figures.append(Figure(f"{label}, of the gap", share, "%", 25.0, "higher"))
            else:
                due = 0.0 if policy == "lru" else None  # the reference has six decimals, hence the rounding
                figures.append(Figure(f"{label}, above LRU", round(points, 3) + 0.0, "points", due, "higher"))
            figures.append(Figure(f"{label}, replay", seconds, "s"))
        note = f"   paged lru refused {refused}" if refused else ""
        print(
            f"  {num_blocks:>8} {100 * lru:>10.2f} {100 * best:>8.2f}  " + "  ".join(f"{c:>22}" for c in cells) + note
        )
    return figures


def computed(prompts: list[Prompt], block_size: int, sizes: Sequence[int]) -> dict[int, tuple[float, float, int]]:
    """By pool size, what `compare` compares with: hit ratios of LRU and of the optimum, and the requests refused."""
    pools = {}
    for size in sizes:
        lru = replay(prompts, block_size, size, Lru)
        pools[size] = (lru.hit_ratio, optimum(prompts, block_size, size), lru.refused)
    return pools


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data(parser, "the public traces and reference_public.json", "loads made from the seed")
    parser.add_argument("--policy", default="lru,reuse-density", help=f"of {', '.join(POLICIES)}; or all")
    parser.add_argument("--requests", type=whole, metavar="N", help="the first N of each load only")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--seed", type=int, default=0, help="of the made loads")
    args = parser.parse_args(argv)
    policies = list(POLICIES) if args.policy == "all" else args.policy.split(",")
    unknown = [policy for policy in policies if policy not in POLICIES]
    if unknown:
        parser.error(f"there is no policy {', '.join(unknown)}; there are {', '.join(POLICIES)}")
    figures: list[Figure] = []
    if args.data is not None:
        if missing := [
            file
            for file in ("reference_public.json", *(f for f, _ in TRACES.values()))
            if not (args.data / file).is_file()
        ]:
            parser.error(f"{args.data} has no {', '.join(missing)}; with --data none the loads are made")
        reference = json.loads((args.data / "reference_public.json").read_text())["traces"]
        for name, (file, block_size) in TRACES.items():
            known = {int(size): pool for size, pool in reference[name]["cache"]["full"].items() if size != "inf"}
            pools = {
                size: (
                    pool["paged_lru"]["token_hit_ratio"],
                    pool["min"]["token_hit_ratio"],
                    pool["paged_lru"]["refused"],
                )
                for size, pool in known.items()
            }
            prompts = load(args.data / file, block_size)[: args.requests]
            pools = pools if args.requests is None else computed(prompts, block_size, tuple(pools))
            figures += compare(name, prompts, block_size, pools, policies)
    else:
        for name, prompts in made_loads(args.seed).items():
            some = prompts[: args.requests]
            figures += compare(name, some, 16, computed(some, 16, (500, 1_000, 2_000, 5_000)), policies)
    report("Prefix hits", figures, args.seed, args.json)


if __name__ == "__main__":
    main()
