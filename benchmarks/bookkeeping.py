"""The time of a step besides the model: scheduler, block bookkeeping and output lists. No model, no torch.

python -m benchmarks.bookkeeping [--json FILE] [--steps 1000] [--sequences 256 4096] [--repeats 50] [--seed 0]
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.arguments import parser_of, whole
from benchmarks.figures import Figure, median_time, report
from pagetide.allocator.blocks import BlockAllocator
from pagetide.cache.layer_groups import LayerGroup
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.cache.row_tables import RowTables
from pagetide.cache.state_tables import tables_for
from pagetide.scheduler.plan import Plan, Result
from pagetide.scheduler.request import Request, Sampling
from pagetide.scheduler.scheduler import Scheduler
from pagetide.scheduler.state import Limits

BLOCK_SIZE = 16
STOP_IDS = (0, 2)
VOCAB = 32_000
NUM_EXTENTS = 32  # of an elastic pool
TARGETS = {256: (70, 90), 4096: (450, 700)}  # us of a step of so many sequences: in a fixed pool, in an elastic one
GROUPS = (LayerGroup(), LayerGroup(1, window=256))  # half of the sequences pass the window
GROUPS_TARGETS = {256: 80, 4096: 500}  # us, in a fixed pool


def answer(plan: Plan, rng: np.random.Generator) -> Result:
    """What a runner would send back: a random token, never a stop id, for each chunk that samples."""
    counts = plan.samples.astype(np.int32)
    return Result(plan.step_id, counts, rng.integers(3, VOCAB, int(counts.sum()), dtype=np.int32))


def decode_steps(
    num_seqs: int, steps: int, seed: int, elastic: bool = False, ahead: bool = False,
    groups: tuple[LayerGroup, ...] = (LayerGroup(),),
) -> list[float]:  # fmt: skip
    """Seconds of each of `steps` consecutive steps in which `num_seqs` sequences each gain a token.

    The pool is fixed; or `elastic`, with extents that could be mapped and unmapped, and with cached prefixes. With `ahead`,
    each step is planned before the previous step's result is available, as in asynchronous scheduling.
    """
    rng = np.random.default_rng(seed)
    most = 400 + steps + 16
    num_blocks = 1 + sum(group.num_tables for group in groups) * num_seqs * (-(-most // BLOCK_SIZE) + 1)
    per = -(-num_blocks // NUM_EXTENTS) if elastic else None
    pool = BlockAllocator(num_blocks if per is None else per * -(-num_blocks // per), blocks_per_extent=per)
    tables = tables_for(groups, pool, BLOCK_SIZE, num_seqs, most)
    cache = CacheManager(tables, PrefixHasher(BLOCK_SIZE) if elastic else None)
    scheduler = Scheduler(cache, Limits(num_seqs, max(num_seqs * 400, 8192), most, forecast=False))
    told: dict[str, list[int]] = {f"r{i}": [] for i in range(num_seqs)}
    for name in told:
        prompt = rng.integers(3, VOCAB, int(rng.integers(20, 400)), dtype=np.int32)  # staggers the block borders
        scheduler.add(Request(name, prompt, Sampling(steps + 8, stop_token_ids=STOP_IDS)))
    samples: list[float] = []
    due: dict[str, list[int]] = {name: [] for name in told}
    behind: Plan | None = None
    while scheduler.num_waiting or len(samples) < steps:
        counted = not scheduler.num_waiting and bool(samples or scheduler.stats.steps > 1)
        start = time.perf_counter()
        plan = scheduler.schedule(0.0) if behind is None else behind
        behind = scheduler.schedule_ahead() if ahead else None
        planned = time.perf_counter()
        result = answer(plan, rng)
        applying = time.perf_counter()
        emissions = scheduler.apply(plan, result)
        ended = time.perf_counter()
        if counted:
            samples.append(planned - start + ended - applying)
        names = [scheduler.rows.request_ids[row] for row in plan.rows[plan.samples]]
        for name, token in zip(names, result.tokens.tolist(), strict=True):
            due[name].append(token)
        for name, token in zip(emissions.request_ids, emissions.tokens, strict=True):
            told[name].append(token)
        assert not (ahead and counted and behind is None), "a step was not planned ahead"
    assert scheduler.num_running == num_seqs, "a sequence ended early"
    assert told == due, "what was told differs from what was sampled"
    scheduler.check_invariants()
    return samples


def admission(tokens: int, repeats: int) -> list[float]:
    """Seconds from a Python list of `tokens` ids to the plan that computes its first tokens, as the engine does it."""
    ids = np.random.default_rng(0).integers(3, VOCAB, tokens).tolist()
    cache = CacheManager(RowTables(BlockAllocator(2 * tokens // BLOCK_SIZE), BLOCK_SIZE, 4, tokens + 100))
    scheduler = Scheduler(cache, Limits(4, 2048, tokens + 100))
    samples = []
    for i in range(repeats):
        start = time.perf_counter()
        prompt = np.asarray(ids)
        assert prompt.min() >= 0
        assert prompt.max() < VOCAB
        scheduler.add(Request(f"r{i}", prompt.astype(np.int32), Sampling(50)))
        plan = scheduler.schedule(0.0)
        samples.append(time.perf_counter() - start)
        assert plan.num_tokens == 2048
        scheduler.abort(f"r{i}")
        scheduler.apply(plan, answer(plan, np.random.default_rng(0)))
    return samples[1:]  # the first one touches fresh memory


def repeated(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls."""
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return samples


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=whole, default=1000)
    parser.add_argument("--sequences", type=whole, nargs="+", default=list(TARGETS), help="that decode")
    parser.add_argument("--repeats", type=whole, default=50, help="of the slower single operations (%(default)s)")
    args = parser.parse_args(argv)
    repeats = args.repeats
    figures = []
    for num_seqs in args.sequences:
        target, elastic_target = TARGETS.get(num_seqs, (None, None))
        for elastic, bound in ((False, target), (True, elastic_target)):
            gc.collect()
            samples = decode_steps(num_seqs, args.steps, args.seed, elastic)
            kind = f", {NUM_EXTENTS} extents, caching" * elastic
            median = median_time(f"decode step, {num_seqs:,} running sequences{kind}, median", samples, "us", bound)
            p99 = float(np.percentile(samples, 99)) * 1e6
            figures += [median, Figure(f"decode step, {num_seqs:,}{kind}, p99 / median", p99 / median.value, "x", 3.0)]
        samples = decode_steps(num_seqs, args.steps, args.seed, groups=GROUPS)
        bound = GROUPS_TARGETS.get(num_seqs)
        figures.append(median_time(f"decode step, {num_seqs:,}, two groups, median", samples, "us", bound))
        samples = decode_steps(num_seqs, args.steps, args.seed, ahead=True)
        figures.append(median_time(f"decode step, {num_seqs:,}, planned ahead, median", samples, "us", None))
    pool = BlockAllocator(100_001)
    figures += [
        median_time("admission of a prompt of 100,000 tokens", admission(100_000, 1 + repeats), "ms", 6),
        median_time("allocate + free 512 blocks", repeated(lambda: pool.release(pool.allocate(512)), 40 * repeats), "us", 40),
        median_time("build a pool of 1,000,000 blocks", repeated(lambda: BlockAllocator(1_000_000), repeats), "ms", 20),
    ]
    report("bookkeeping: scheduler, blocks, output lists", figures, args.seed, args.json)


if __name__ == "__main__":
    main()
