"""Routing of a fleet's requests by prefix and by memory, against other policies, in modelled time: no engine, no sleeping.

python -m benchmarks.fleet_routing [--data DIR] [--rounds 3] [--sensitivity] [--gpu h200] [--workers 8] [--requests N]
                                   [--json FILE] [--seed 0]

The policies of `fleet_queue` serve the same trace, at several speeds of arrival; `fleet_model` says how a worker is modelled.
Rounds differ in how ties are broken, figures are the rounds' medians. A hit ratio is cached tokens at a request's first
admission, of all prompt tokens. "The most hits" are those of the best of all policies, one of which is the oracle: it knows
all caches exactly and sends a prompt to the longest match (of at least a share of the prompt, else by load), whatever the
backlog. The longest match without such a share, `prefix`, is no bound: all prompts that begin alike go to one worker's cache.
For the record: the hits of one pool with the memory of all workers, one request at a time.

Recalls: every second worker loses 40 % of its lease, for good, at 40, 50 or 60 % of the arrivals, once the even and once the
odd workers. "Returned" are sequences that lost their blocks to this, of all six runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

import numpy as np

from benchmarks.arguments import above_0, add_data, whole
from benchmarks.figures import Figure, report
from benchmarks.fleet_model import ModelRequest, requests_of
from benchmarks.fleet_queue import HOLD_S, POLICIES, PULL_STEPS, FleetOutcome, FleetSettings, run_fleet
from benchmarks.prefix_hits import POLICIES as EVICTION
from benchmarks.prefix_hits import Prompt, replay
from benchmarks.replay_clock import GPUS, MODELS, Roofline
from benchmarks.replay_traces import BLOCK_SIZES, FILES, Trace, synthetic
from pagetide.fleet.routing import Weights

SPEEDS = {"mooncake": (1.0, 2.0, 3.0), "agentic": (4.0, 8.0, 16.0), "synthetic": (1.0, 2.0, 3.0)}
MIDDLE = 1  # of the speeds: the one with recalls, and with other weights
ONE_ROUND = {"round-robin", "random"}
RECALLED = ("ours", "prefix", "prefix-or-load", "least-loaded")
HITS_TARGET = 95.0  # % of the most hits
TTFT_TARGET = 1.05  # x the better of `prefix` and `least-loaded`
Outcomes = dict[str, list[FleetOutcome]]


@dataclass(frozen=True, slots=True)
class RoutingLoad:
    """A trace at one speed."""

    label: str
    settings: FleetSettings
    requests: list[ModelRequest]
    num_ids: int

    def run(self, policy: str, weights: Weights, seed: int) -> FleetOutcome:
        """Serve it, with memory as it is."""
        return run_fleet(replace(self.settings, seed=seed), policy, weights, self.requests, self.num_ids)

    def run_recalled(self, policy: str, weights: Weights, seed: int, share: float, first: int) -> FleetOutcome:
        """Serve it, with a recall from every second worker, from `first` on, at this share of the arrivals."""
        at_s = share * self.requests[-1].at_s
        settings = replace(self.settings, seed=seed, recall_at_s=at_s, recall_first=first)
        return run_fleet(settings, policy, weights, self.requests, self.num_ids)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    roofline = Roofline(GPUS[args.gpu], MODELS[args.model], 1, args.reached)
    print(f"{args.workers} workers, each {roofline}")
    print(
        f"reports take 50 ms; a worker asks for work below {PULL_STEPS} full step(s) of prompts; a request is held for "
        f"memory {HOLD_S:g} s at most"
    )
    figures: list[Figure] = []
    for name in ("synthetic",) if args.data is None else ("mooncake", "agentic"):
        trace = synthetic(seed=args.seed) if args.data is None else FILES[name](args.data)
        loads = loads_of(name, trace, roofline, args)
        weights = Weights.of(loads[0].settings.block_tokens)
        print(f"{name}: {trace.source}; leases of {loads[0].settings.limit_blocks:,} blocks; {weights}")
        for load in loads:
            figures += compared(load.label, serve(load, weights, args.rounds, args.seed))
        figures.append(one_pool(name, loads[MIDDLE]))
        figures += recalls(loads[MIDDLE], weights, args.seed)
        if args.sensitivity:
            figures += sensitivity(loads[MIDDLE], weights, args.seed)
    report("ModelFleet routing", figures, args.seed, args.json)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.fleet_routing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_data(parser, "the traces", "a synthetic load of many turns (replay_traces.SYNTHETIC)")
    parser.add_argument("--rounds", type=whole, default=3, metavar="N", help="of each policy and load (default 3)")
    parser.add_argument("--sensitivity", action="store_true", help="also with half and double of each weight")
    parser.add_argument("--requests", type=whole, metavar="N", help="the first N of each trace only")
    parser.add_argument("--workers", type=whole, default=8, metavar="N", help="default 8")
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="of each worker (default h200)")
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--reached", type=above_0, default=0.5, metavar="SHARE", help="of the peaks (default 0.5)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--seed", type=int, default=0, help="of ties, and of the synthetic load")
    return parser.parse_args(argv)


def loads_of(name: str, trace: Trace, roofline: Roofline, args: argparse.Namespace) -> list[RoutingLoad]:
    """The trace at each of its speeds."""
    block = BLOCK_SIZES[name]
    settings = FleetSettings(roofline, block, roofline.blocks_that_fit(block), args.workers)
    return [
        RoutingLoad(f"{name} x{speed:g}", settings, *requests_of(trace.taken(args.requests, speed), block))
        for speed in SPEEDS[name]
    ]


def serve(load: RoutingLoad, weights: Weights, rounds: int, seed: int) -> Outcomes:
    """All policies, turn by turn."""
    outcomes: Outcomes = {name: [] for name in POLICIES}
    for number in range(rounds):
        for name in POLICIES:
            if not number or name not in ONE_ROUND:
                outcomes[name].append(load.run(name, weights, seed + number))
    return outcomes


def hit_percent(runs: list[FleetOutcome]) -> float:
    return float(np.median([100 * run.hit_ratio for run in runs]))


def ttft_s(runs: list[FleetOutcome], percentile: float = 95.0) -> float:
    return float(np.median([np.percentile(run.ttft_s, percentile) for run in runs]))


def compared(label: str, outcomes: Outcomes) -> list[Figure]:
    """The figures of one load: ours against the others, then each policy."""
    hits = {name: hit_percent(runs) for name, runs in outcomes.items()}
    p95 = {name: ttft_s(runs) for name, runs in outcomes.items()}
    most = max(hits.values())
    others = min(p95[name] for name in POLICIES if name not in ("ours", "oracle"))
    figures = [
        Figure(f"{label}: hits, of the most", 100 * hits["ours"] / most if most else 100.0, "%", HITS_TARGET, "higher"),
        Figure(
            f"{label}: TTFT p95, of the better of prefix and least-loaded",
            p95["ours"] / min(p95["prefix"], p95["least-loaded"]),
            "x",
            TTFT_TARGET,
        ),
        Figure(f"{label}: TTFT p95, of the best other policy", p95["ours"] / others, "x"),
    ]
    for name, runs in outcomes.items():
        figures += [
            Figure(f"{label} {name}: hits", hits[name], "%", samples=[100 * run.hit_ratio for run in runs]),
            Figure(f"{label} {name}: TTFT p50", ttft_s(runs, 50), "s"),
            Figure(f"{label} {name}: TTFT p95", p95[name], "s", samples=[ttft_s([run]) for run in runs]),
            Figure(f"{label} {name}: TTFT p99", ttft_s(runs, 99), "s"),
            Figure(f"{label} {name}: busiest worker, of the mean", float(np.median([r.imbalance for r in runs])), "x"),
        ]
    return figures


def one_pool(name: str, load: RoutingLoad) -> Figure:
    """The hits of one pool with the memory of all workers, for the record."""
    settings = load.settings
    prompts = [Prompt(request.ids, request.prompt_tokens) for request in load.requests]
    blocks = settings.workers * settings.limit_blocks
    outcome = replay(prompts, settings.block_tokens, blocks, EVICTION["lru"])
    return Figure(f"{name}: hits of one pool, one request at a time", 100 * outcome.hit_ratio, "%")


def recalls(load: RoutingLoad, weights: Weights, seed: int) -> list[Figure]:
    """Sequences returned, and hits and TTFT, if half of the workers lose memory."""
    figures, returned = [], {}
    for name in RECALLED:
        runs = [load.run_recalled(name, weights, seed, share, first) for share in (0.4, 0.5, 0.6) for first in (0, 1)]
        each = [float(run.returned) for run in runs]
        returned[name] = sum(each)
        p95 = [ttft_s([run]) for run in runs]
        figures += [
            Figure(f"{load.label} recalls {name}: returned", sum(each), "sequences", samples=each),
            Figure(f"{load.label} recalls {name}: hits", hit_percent(runs), "%"),
            Figure(f"{load.label} recalls {name}: TTFT p95", float(np.median(p95)), "s", samples=p95),
        ]
    target = -1.0 if returned["prefix"] else 0.0
    more = Figure(
        f"{load.label} recalls: returned, more than prefix", returned["ours"] - returned["prefix"], "", target
    )
    return [more, *figures]


def sensitivity(load: RoutingLoad, weights: Weights, seed: int) -> list[Figure]:
    """Hits and TTFT with half and double of each weight."""
    figures = []
    base = load.run("ours", weights, seed)
    for field in fields(weights):
        for factor in (0.5, 2.0):
            changed = replace(weights, **{field.name: factor * asdict(weights)[field.name]})
            run = load.run("ours", changed, seed)
            label = f"{load.label} {field.name} x{factor:g}"
            figures += [
                Figure(f"{label}: hits, of the default's", 100 * run.hit_ratio / max(base.hit_ratio, 1e-9), "%"),
                Figure(f"{label}: TTFT p95, of the default's", ttft_s([run]) / ttft_s([base]), "x"),
            ]
    return figures


if __name__ == "__main__":
    main()
