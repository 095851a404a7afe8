"""Traces replayed: the real scheduler and cache manager, a modelled clock instead of a model, a co-tenant's schedule.

python -m benchmarks.replay [--data FOLDER] [--trace mooncake] [--block 512] [--gpu h200] [--gpus 2]
                            [--tenant 0:0,300:0.4,600:0.1] [--slo 5,0.1] [--json FILE] [--plot FILE.png]
python -m benchmarks.replay --scaling [--json FILE] [--plot FILE.png]

Without --tenant there are two replays: one alone, one with a co-tenant that has 40 % of the pool from 300 s to 600 s and
10 % after that. Without the folder of traces the load is synthetic. All seconds but "taken" are the modelled clock's.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure, report
from benchmarks.replay_clock import GPUS, MODELS, Roofline
from benchmarks.replay_plot import draw, draw_scaling, pyplot
from benchmarks.replay_run import NOBODY, Outcome, Seconds, Settings, Tenant, replay, settings_for
from benchmarks.replay_scaling import measure
from benchmarks.replay_traces import BLOCK_SIZES, FILES, Trace, synthetic

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
DEFAULT_TENANT = "0:0,300:0.4,600:0.1"
TARGET_S = 10.0  # for the whole Mooncake cut in blocks of 512, on one core


@dataclass(frozen=True, slots=True)
class Slo:
    """A request is good with its first token within `ttft_s`, and the others every `tpot_s` on average."""

    ttft_s: float
    tpot_s: float

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From "5,0.1". Raises ArgumentTypeError, with a sentence."""
        try:
            ttft_s, tpot_s = (float(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"an SLO is SECONDS_TO_FIRST_TOKEN,SECONDS_A_TOKEN, got {text!r}"
            ) from None
        return cls(ttft_s, tpot_s)


def main() -> None:
    args = parse()
    roofline = Roofline(GPUS[args.gpu], MODELS[args.model], args.gpus, args.reached, args.overhead_ms / 1e3)
    if args.plot:
        pyplot()  # before the work, not after it
    print(f"modelled: {roofline}")
    if args.scaling:
        series = measure(roofline, lambda words: print(words, file=sys.stderr))
        report("replay: how its cost grows", [f for one in series for f in one.figures()], 0, args.json)
        if args.plot:
            draw_scaling(series, args.plot)
        return
    trace = load(args).taken(args.requests, args.speed)
    settings = adjusted(settings_for(trace, roofline, args.block or BLOCK_SIZES[args.trace]), args)
    describe(trace, settings, args.slo)
    outcomes = {}
    for name, tenant in tenants(args.tenant).items():
        outcomes[name] = replay(trace, replace(settings, tenant=tenant))
    target = TARGET_S if args.trace == "mooncake" and settings.block_size == 512 and args.requests is None else None
    figures = [f for name, outcome in outcomes.items() for f in figures_of(name, outcome, args.slo, target)]
    most = 100 * trace.findable_tokens(settings.block_size) / sum(turn.prompt_tokens for turn in trace.turns)
    figures.append(Figure("prompt tokens found in an endless pool, at most", most, "%"))
    report(f"replay: {len(trace.turns):,} requests", figures, 0, args.json)
    if any(outcome.counters.swapped_bytes is None for outcome in outcomes.values()):
        print("  swapped bytes: no host tier")
    if args.plot:
        draw(outcomes, f"{trace.source.split(':')[0]} on {roofline.gpus} x {roofline.gpu.name}", args.plot)


def parse() -> argparse.Namespace:
    """The command line; leaves with a sentence where it makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="of traces (default: ../shared/data)")
    parser.add_argument(
        "--trace", choices=(*FILES, "synthetic"), help="default: mooncake; synthetic where there are none"
    )
    parser.add_argument("--requests", type=int, metavar="N", help="the first N only")
    parser.add_argument("--speed", type=float, default=1.0, help="of arrivals, against the source")
    parser.add_argument("--block", type=int, metavar="TOKENS", help="default: as the trace's ids, or 16")
    parser.add_argument("--blocks", type=int, metavar="N", help="of the pool; default: what the GPU has room for")
    parser.add_argument("--gpu", choices=GPUS, default="h200")
    parser.add_argument(
        "--gpus", type=int, default=2, metavar="N", help="as one of N times the peaks and memory (default 2)"
    )
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--reached", type=float, default=1.0, metavar="SHARE", help="of the peaks (default 1)")
    parser.add_argument("--overhead-ms", type=float, default=1.0, metavar="MS", help="of each step (default 1)")
    parser.add_argument("--max-seqs", type=int, default=256, metavar="N", help="default 256")
    parser.add_argument("--max-step-tokens", type=int, default=8_192, metavar="N", help="default 8,192")
    parser.add_argument("--ask", type=int, metavar="N", help="max_new_tokens of all; default: the longest output's")
    parser.add_argument("--no-cache", action="store_true", help="find no prefixes")
    parser.add_argument("--tenant", type=schedule, metavar="S:SHARE,...", help=f"default: none, and {DEFAULT_TENANT}")
    parser.add_argument(
        "--slo", type=Slo.parse, default=Slo(5.0, 0.1), metavar="TTFT,TPOT", help="seconds (default 5,0.1)"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    parser.add_argument("--scaling", action="store_true", help="measure how the cost of a replay grows instead")
    args = parser.parse_args()
    for name in ("requests", "speed", "block", "blocks", "gpus", "reached", "ask"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser.error(f"--{name} must be above 0, got {value:g}")
    if args.trace is None:
        args.trace = "synthetic" if args.data is None and not DATA.is_dir() else "mooncake"
    args.data = args.data or DATA
    if args.trace != "synthetic" and not args.data.is_dir():
        parser.error(f"there is no folder {args.data}: name one with traces by --data, or take --trace synthetic")
    return args


def schedule(text: str) -> Tenant:
    """A co-tenant's. Raises ArgumentTypeError, with a sentence."""
    try:
        return Tenant.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def load(args: argparse.Namespace) -> Trace:
    """The trace that was asked for."""
    return synthetic() if args.trace == "synthetic" else FILES[args.trace](args.data)


def adjusted(settings: Settings, args: argparse.Namespace) -> Settings:
    """With what was given on the command line."""
    ask = args.ask or settings.ask_tokens
    longest = max(settings.limits.max_model_len, settings.limits.max_model_len - settings.ask_tokens + ask)
    limits = replace(
        settings.limits, max_seqs=args.max_seqs, max_step_tokens=args.max_step_tokens, max_model_len=longest
    )
    blocks = args.blocks or settings.num_blocks
    return replace(settings, limits=limits, ask_tokens=ask, num_blocks=blocks, caching=not args.no_cache)


def tenants(given: Tenant | None) -> dict[str, Tenant]:
    """By name, the schedules to replay with."""
    return {"alone": NOBODY, "co-tenant": Tenant.parse(DEFAULT_TENANT)} if given is None else {"co-tenant": given}


def describe(trace: Trace, settings: Settings, slo: Slo) -> None:
    """What all figures rest on."""
    limits = settings.limits
    print(f"load: {trace.source}; {len(trace.turns):,} requests in {trace.turns[-1].at_s:,.0f} s")
    print(f"tokens: as in the source, {trace.id_tokens} for each id")
    print(
        f"pool: {settings.num_blocks:,} blocks of {settings.block_size} tokens, prefixes "
        f"{'cached' if settings.caching else 'not cached'}; {limits.max_seqs:,} seats, "
        f"{limits.max_step_tokens:,} tokens a step; max_new_tokens of every request: {settings.ask_tokens:,}, or its "
        "output's length where that is more"
    )
    print(f"SLO: first token within {slo.ttft_s:g} s, others every {slo.tpot_s:g} s on average")


def figures_of(name: str, outcome: Outcome, slo: Slo, target_s: float | None) -> list[Figure]:
    """All of a replay's numbers, under its name."""
    counters, requests = outcome.counters, len(outcome.ttft_s)
    good = outcome.goodput(slo.ttft_s, slo.tpot_s)
    figures = [
        Figure("taken, of one core", outcome.cpu_s, "s", target_s),
        Figure("taken, by the wall clock", outcome.wall_s, "s"),
        Figure("modelled time", outcome.modelled_s, "s"),
        Figure("modelled time in steps", outcome.busy_s, "s"),
        Figure("steps", counters.steps, "steps"),
        Figure("prompt tokens found", 100 * counters.hit_tokens / max(1, counters.lookup_tokens), "%"),
        Figure("tokens computed", counters.computed_tokens, "tokens"),
        Figure("tokens computed twice", counters.recomputed_tokens, "tokens"),
        Figure("preemptions", counters.preemptions, "times"),
        Figure("extents given back", counters.given_back_extents, "extents"),
        Figure("blocks moved", counters.moved_blocks, "blocks"),
        *percentiles("time to first token", outcome.ttft_s),
        *percentiles("time between tokens", outcome.gaps_s),
        Figure("requests within the SLO", 100 * good, "%"),
        Figure("goodput", good * requests / outcome.modelled_s, "req/s"),
        Figure("requests too long for the pool", outcome.refused, "requests"),
        Figure("requests never served", outcome.unserved, "requests"),
        Figure("outputs cut short by the pool", outcome.cut_short, "requests"),
    ]
    if counters.swapped_bytes is not None:
        figures.append(Figure("swapped", counters.swapped_bytes / 1e9, "GB"))
    return [replace(figure, name=f"{name}: {figure.name}") for figure in figures]


def percentiles(name: str, seconds: Seconds) -> list[Figure]:
    """Of those that there are."""
    known = seconds[~np.isnan(seconds)]
    if not len(known):
        return []
    values = np.percentile(known, (50, 95, 99)).tolist()
    return [
        Figure(f"{name}, {which}", 1e3 * value, "ms")
        for which, value in zip(("p50", "p95", "p99"), values, strict=True)
    ]


if __name__ == "__main__":
    main()
