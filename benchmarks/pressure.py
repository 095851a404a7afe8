"""The cost of a pool that is too small: tokens computed twice and extra steps, with output lengths unknown in advance.

python -m benchmarks.pressure [--json FILE] [--seeds 10] [--requests 400]

The real scheduler and cache manager; a stub stands for the model and samples a stop token where a request's true end is.
All 400 requests are there at the start, as in the measurement of vLLM that the targets come from; every one of them
allows 1,024 new tokens. Of the 3,840 blocks one is the null block. Prefixes are cached, as they were there; no two prompts
begin alike. Each seed is run twice: without a host tier, and with one that holds everything.

Modelled time is that of Llama-3.1-8B in bfloat16 on an H200, by the roofline of modelled_clock.py, and of swaps at 50 GB/s.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.arguments import parser_of, whole
from benchmarks.figures import Figure, median, report
from benchmarks.modelled_clock import H200, LLAMA_8B, Roofline
from pagetide.allocator.blocks import BlockAllocator
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.cache.row_tables import RowTables
from pagetide.scheduler.cost import SwapCost
from pagetide.scheduler.plan import Plan, Result
from pagetide.scheduler.request import Request, Sampling
from pagetide.scheduler.scheduler import Scheduler
from pagetide.scheduler.state import Limits

Lengths = npt.NDArray[np.int64]

NUM_REQUESTS = 400
NUM_BLOCKS = 3_840
BLOCK_SIZE = 16
MAX_NEW_TOKENS = 1_024
PROMPT_TOKENS = (256, 768)
LIMITS = Limits(max_seqs=256, max_step_tokens=8_192, max_model_len=PROMPT_TOKENS[1] + MAX_NEW_TOKENS)
HOST_SLOTS = 30_000
HOST_BYTES_PER_S = 50e9
ROOFLINE = Roofline(H200, LLAMA_8B, reached=0.5)
BLOCK_BYTES = BLOCK_SIZE * ROOFLINE.model.kv_bytes
TOKEN, STOP = 3, 2
VOCAB = 32_000


@dataclass(frozen=True, slots=True)
class Load:
    """Requests by number: tokens of the prompt, and tokens the model gives until its stop token, that one included."""

    prompts: Lengths
    outputs: Lengths

    @property
    def needed_tokens(self) -> int:
        """Tokens that are computed when none is computed twice: the stop token never is."""
        return int((self.prompts + self.outputs - 1).sum())


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What a run took."""

    steps: int
    recomputed_percent: float
    preemptions: int
    seconds: float  # modelled
    demoted_gb: float  # copied out, and of it back
    promoted_gb: float


def draw(count: int, seed: int) -> Load:
    """The load of a seed."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(PROMPT_TOKENS[0], PROMPT_TOKENS[1] + 1, count)
    return Load(prompts, rng.integers(256, 769, count))


class PressureStub:
    """Stands in for the model. Only this stub knows each request's true end; the scheduler does not."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.computed_tokens = 0
        self.seconds = 0.0
        self._last = np.zeros(LIMITS.num_rows, np.int64)  # by row: tokens computed when the stop token is sampled

    def execute(self, plan: Plan) -> Result:
        for row, new in plan.admitted.items():
            number = int(new.request_id)
            self._last[row] = self.load.prompts[number] + self.load.outputs[number] - 1
        self.computed_tokens += plan.num_tokens
        sampled = plan.rows[plan.samples]
        computed = (plan.starts + plan.lengths)[plan.samples]
        tokens = np.where(computed == self._last[sampled], STOP, TOKEN).astype(np.int32)
        swapped = before = 0
        if plan.swaps is not None:
            swapped, before = len(plan.swaps.out_slots) + len(plan.swaps.in_slots), plan.swaps.num_before
        swap_s, compute_s = swapped * BLOCK_BYTES / HOST_BYTES_PER_S, ROOFLINE.plan_s(plan)
        before_s = before * BLOCK_BYTES / HOST_BYTES_PER_S
        self.seconds += before_s + max(swap_s - before_s, compute_s)
        counts = plan.samples.astype(np.int32)
        return Result(plan.step_id, counts, tokens, swapped=swapped, swap_s=swap_s, compute_s=compute_s)


def build(host_slots: int) -> Scheduler:
    """A scheduler over the pool."""
    tables = RowTables(BlockAllocator(NUM_BLOCKS), BLOCK_SIZE, LIMITS.num_rows, LIMITS.max_model_len)
    cache = CacheManager(tables, PrefixHasher(BLOCK_SIZE, b"pressure"), host_slots=host_slots)
    return Scheduler(cache, LIMITS, SwapCost(BLOCK_BYTES, BLOCK_SIZE, bytes_per_s=HOST_BYTES_PER_S))


def run(scheduler: Scheduler, load: Load) -> RunOutcome:
    """Serve all of `load`."""
    stub, ends, rng = PressureStub(load), [], np.random.default_rng(0)
    for number, prompt in enumerate(load.prompts.tolist()):
        sampling = Sampling(MAX_NEW_TOKENS, stop_token_ids=(STOP,))
        tokens = rng.integers(TOKEN, VOCAB, prompt, dtype=np.int32)  # no two begin alike
        scheduler.add(Request(str(number), tokens, sampling, arrival=float(number)))
    steps = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        emissions = scheduler.apply(plan, stub.execute(plan))
        ends += emissions.finished
        steps += 1
    assert all(len(end.token_ids) == load.outputs[int(end.request_id)] for end in ends), "an output has another length"
    assert len(ends) == len(load.prompts), "a request was lost"
    scheduler.check_invariants()
    return RunOutcome(
        steps=steps,
        recomputed_percent=100 * (stub.computed_tokens / load.needed_tokens - 1),
        preemptions=sum(end.num_preemptions for end in ends),
        seconds=stub.seconds,
        demoted_gb=scheduler.stats.demoted_blocks * BLOCK_BYTES / 1e9,
        promoted_gb=scheduler.stats.promoted_blocks * BLOCK_BYTES / 1e9,
    )


def figures(outcomes: list[RunOutcome], where: str, targets: dict[str, float]) -> list[Figure]:
    """Median and worst of every number of the outcomes."""
    table = []
    for name, field, unit in (
        ("tokens computed twice", "recomputed_percent", "%"),
        ("steps", "steps", "steps"),
        ("preemptions", "preemptions", "times"),
        ("modelled time", "seconds", "s"),
        ("copied to the host tier", "demoted_gb", "GB"),
        ("copied back", "promoted_gb", "GB"),
    ):
        samples = [round(float(getattr(outcome, field)), 3) for outcome in outcomes]
        bound = targets.get(field)
        table.append(Figure(f"{where}: {name}, median", statistics.median(samples), unit, bound, samples=samples))
        table.append(Figure(f"{where}: {name}, worst", max(samples), unit, bound))
    return table


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=whole, default=10)
    parser.add_argument(
        "--requests", type=whole, default=NUM_REQUESTS, help="of a seed (default %(default)s, for which targets are)"
    )
    args = parser.parse_args(argv)
    outcomes: dict[str, list[RunOutcome]] = {"no host tier": [], "host tier": []}
    for seed in range(args.seeds):
        for some, slots in zip(outcomes.values(), (0, HOST_SLOTS), strict=True):
            some.append(run(build(slots), draw(args.requests, seed)))
    targeted = args.requests == NUM_REQUESTS
    table = figures(outcomes["no host tier"], "no host tier", {"recomputed_percent": 3.0, "steps": 3_120.0} if targeted else {})
    table += figures(outcomes["host tier"], "host tier", {"recomputed_percent": 0.0})
    longer = [  # percent
        round(100 * (with_tier.seconds / without.seconds - 1), 3)
        for without, with_tier in zip(outcomes["no host tier"], outcomes["host tier"], strict=True)
    ]
    what = "modelled time, host tier against none"
    table.append(median(f"{what}, median", longer, "%", 0.0))
    table.append(Figure(f"{what}, worst", max(longer), "%"))
    title = f"pressure: {args.requests} requests, {NUM_BLOCKS:,} blocks, seeds 0 to {args.seeds - 1}"
    report(title, table, 0, args.json)


if __name__ == "__main__":
    main()
