"""Replays traces with the real scheduler and cache manager, a modelled clock instead of a model, and external memory demand.

python -m benchmarks.replay [--data DIR] [--trace mooncake] [--block 512] [--gpu h200] [--gpus 2]
                            [--tenant 0:0,300:0.4,600:0.1] [--host-gb 512] [--slo 5,0.1]
                            [--json FILE] [--plot PREFIX]
python -m benchmarks.replay --scaling [--up-to N] [--json FILE] [--plot PREFIX]

Without --tenant there are replays alone and with a co-tenant that has 40 % of the pool from 300 s to 600 s and 10 % after
that; without --host-gb the last of them is repeated with a host tier. Without the folder of traces the load is synthetic.
All seconds but "taken" are the modelled clock's. "Computed twice" are tokens that preempted requests had and lost.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.arguments import above_0, add_data, from_0, whole
from benchmarks.figures import Figure, report
from benchmarks.replay_clock import GPUS, MODELS, Roofline
from benchmarks.replay_plot import draw, draw_scaling, pyplot
from benchmarks.replay_report import Slo, figures_of, named, print_table, write
from benchmarks.replay_run import UNSHARED, PoolShare, ReplaySettings, replay, settings_for
from benchmarks.replay_scaling import LOADS, measure
from benchmarks.replay_traces import BLOCK_SIZES, FILES, BadTrace, Trace, synthetic

DEFAULT_TENANT = "0:0,300:0.4,600:0.1"
DEFAULT_HOST_GB = 256.0  # a GPU's share: machines of 8 such GPUs have 2 TB
TARGET_S = 10.0  # for the whole Mooncake cut in blocks of 512, on one core
LEAST_BLOCKS = 2  # the null block, and one


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    roofline = Roofline(GPUS[args.gpu], MODELS[args.model], args.gpus, args.reached, args.overhead_ms / 1e3)
    if args.plot:
        pyplot()  # before the work, not after it
    if args.scaling:
        scaling(args, roofline)
        return
    try:
        trace = load(args).taken(args.requests, args.speed)
    except BadTrace as error:
        raise SystemExit(f"replay: {error}") from None
    settings = adjusted(settings_for(trace, roofline, args.block or BLOCK_SIZES[args.trace]), args)
    runs = runs_of(settings, args)
    describe(trace, runs, args.slo)
    outcomes = {name: replay(trace, run) for name, run in runs.items()}
    target = TARGET_S if args.trace == "mooncake" and settings.block_size == 512 and args.requests is None else None
    columns = {name: figures_of(outcome, args.slo, target) for name, outcome in outcomes.items()}
    print_table(f"replay: {len(trace.turns):,} requests", columns)
    most = 100 * trace.findable_tokens(settings.block_size) / sum(turn.prompt_tokens for turn in trace.turns)
    print(f"  an endless pool would find {most:.2f} % of the prompt tokens at most")
    if args.json:
        figures = [*named(columns), Figure("prompt tokens found in an endless pool, at most", most, "%")]
        write(args.json, figures, parameters(args, trace, runs))
    if args.plot:
        draw(outcomes, title_of(trace, settings), args.plot)


def scaling(args: argparse.Namespace, roofline: Roofline) -> None:
    """How the cost of a replay grows, instead of a replay."""
    print(f"modelled: {roofline}")
    for grows, what in LOADS.items():
        print(f"{grows}: {what}")
    series = measure(roofline, lambda words: print(words, file=sys.stderr), args.up_to)
    figures = [figure for one in series for figure in one.figures()]
    report("replay: how its cost grows, in processor time", figures, 0, None)
    if args.json:
        write(args.json, figures, {"modelled_clock": roofline.parameters(), "loads": LOADS})
    if args.plot:
        draw_scaling(series, args.plot)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; leaves with a sentence where it makes no sense."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_data(parser, "the traces", "the synthetic one")
    parser.add_argument(
        "--trace", choices=(*FILES, "synthetic"), help="default: mooncake; synthetic where there are none"
    )
    parser.add_argument("--requests", type=whole, metavar="N", help="the first N only")
    parser.add_argument("--speed", type=above_0, default=1.0, metavar="TIMES", help="of arrivals, against the source")
    parser.add_argument("--block", type=whole, metavar="TOKENS", help="default: as the trace's ids, or 16")
    parser.add_argument("--blocks", type=whole, metavar="N", help="of the pool; default: what the GPU has room for")
    parser.add_argument("--gpu", choices=GPUS, default="h200")
    parser.add_argument(
        "--gpus", type=whole, default=2, metavar="N", help="as one of N times the peaks and memory (default 2)"
    )
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--reached", type=share, default=1.0, metavar="SHARE", help="of the peaks (default 1)")
    parser.add_argument("--overhead-ms", type=from_0, default=1.0, metavar="MS", help="of each step (default 1)")
    parser.add_argument("--max-seqs", type=whole, default=256, metavar="N", help="default 256")
    parser.add_argument("--max-step-tokens", type=whole, default=8_192, metavar="N", help="default 8,192")
    parser.add_argument("--ask", type=whole, metavar="N", help="max_new_tokens of all; default: the longest output's")
    parser.add_argument("--no-cache", action="store_true", help="find no prefixes; there is no host tier then")
    parser.add_argument(
        "--tenant", type=said(PoolShare.parse), metavar="S:SHARE,...", help=f"default: none, and {DEFAULT_TENANT}"
    )
    parser.add_argument(
        "--host-gb", type=from_0, metavar="GB",
        help=f"of a host tier in every replay, 0 for none; default: a last replay has {DEFAULT_HOST_GB:g} GB for each GPU",
    )  # fmt: skip
    parser.add_argument(
        "--slo", type=said(Slo.parse), default=Slo(5.0, 0.1), metavar="TTFT,TPOT", help="seconds (default 5,0.1)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="PREFIX", help="of PREFIX.png and PREFIX.svg")
    parser.add_argument("--scaling", action="store_true", help="measure how the cost of a replay grows instead")
    parser.add_argument("--up-to", type=whole, metavar="N", help="in --scaling the sizes up to N")
    args = parser.parse_args(argv)
    for file in (args.json, args.plot):
        if file is not None and (why := unwritable(file)):
            parser.error(f"nothing can be written to {file} ({why}): name a file in a folder that is yours")
    if args.no_cache and args.host_gb:
        parser.error("a host tier keeps what the prefix cache finds again: take either --host-gb or --no-cache")
    if args.trace is None:
        args.trace = "synthetic" if args.data is None else "mooncake"
    if args.trace != "synthetic" and args.data is None:
        parser.error(f"the trace {args.trace} is in no folder: name one by --data, or take --trace synthetic")
    return args


def said(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap `read` for argparse: the message of its ValueError is shown to the user."""

    def reader(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return reader


def share(text: str) -> float:
    """A share, above 0 and up to 1."""
    if (number := above_0(text)) > 1:
        raise argparse.ArgumentTypeError(f"a share is above 0 and at most 1, got {text!r}")
    return number


def unwritable(file: Path) -> str | None:
    """Why `file` cannot be written, or None if it can. Creates its folder."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror
    if file.is_dir():
        return "it is a folder"
    return None if os.access(file.parent, os.W_OK) else "the folder is not yours"


def load(args: argparse.Namespace) -> Trace:
    """The trace that was asked for."""
    return synthetic() if args.trace == "synthetic" else FILES[args.trace](args.data)


def adjusted(settings: ReplaySettings, args: argparse.Namespace) -> ReplaySettings:
    """With what was given on the command line. Leaves with a sentence where no pool is left."""
    ask = args.ask or settings.ask_tokens
    longest = max(settings.limits.max_model_len, settings.limits.max_model_len - settings.ask_tokens + ask)
    limits = replace(
        settings.limits, max_seqs=args.max_seqs, max_step_tokens=args.max_step_tokens, max_model_len=longest
    )
    blocks = args.blocks or settings.num_blocks
    if blocks < LEAST_BLOCKS:
        raise SystemExit(
            f"replay: a pool of {blocks} blocks of {settings.block_size:,} tokens is too small, {LEAST_BLOCKS} are the least: "
            "take smaller blocks, more GPUs, or more --blocks"
        )
    return replace(settings, limits=limits, ask_tokens=ask, num_blocks=blocks, caching=not args.no_cache)


def runs_of(settings: ReplaySettings, args: argparse.Namespace) -> dict[str, ReplaySettings]:
    """By name, what to replay with."""
    tenants = {"co-tenant": args.tenant}
    if args.tenant is None:
        tenants = {"alone": UNSHARED, "co-tenant": PoolShare.parse(DEFAULT_TENANT)}
    runs = {name: replace(settings, tenant=tenant) for name, tenant in tenants.items()}
    host_gb = DEFAULT_HOST_GB * args.gpus if args.host_gb is None else args.host_gb
    slots = int(host_gb * 1e9 // settings.block_bytes) if settings.caching else 0
    with_tier = {f"{name}, host tier": replace(run, host_slots=slots) for name, run in runs.items()}
    if not slots:
        return runs
    last = f"{list(runs)[-1]}, host tier"
    return runs | {last: with_tier[last]} if args.host_gb is None else with_tier


def describe(trace: Trace, runs: dict[str, ReplaySettings], slo: Slo) -> None:
    """What all figures rest on."""
    settings = list(runs.values())[-1]
    limits, block_bytes, roofline = settings.limits, settings.block_bytes, settings.roofline
    print(f"modelled: {roofline}")
    print(f"load: {trace.source}; {len(trace.turns):,} requests in {trace.turns[-1].at_s:,.0f} s")
    print(f"tokens: as in the source, {trace.id_tokens} for each id")
    print(
        f"pool: {settings.pool_blocks:,} blocks of {settings.block_size} tokens ({block_bytes / 2**20:g} MiB each, "
        f"{settings.pool_blocks * block_bytes / 1e9:.1f} GB) in extents of {settings.blocks_per_extent}, prefixes "
        f"{'cached' if settings.caching else 'not cached'}; {limits.max_seqs:,} sequences, {limits.max_step_tokens:,} tokens a "
        f"step; max_new_tokens of every request: {settings.ask_tokens:,}, or its output's length where that is more"
    )
    if settings.host_slots:
        print(
            f"host tier: {settings.host_slots * block_bytes / 1e9:.1f} GB ({settings.host_slots:,} blocks), where a replay's "
            f"name says so; copies at {roofline.host_bytes_per_s / 1e9:g} GB/s beside computing, but for those that a step's "
            "own chunks depend on"
        )
    for name, run in runs.items():
        if run.tenant is not UNSHARED:
            print(f"{name}: {run.tenant}")
    print(f"SLO: first token within {slo.ttft_s:g} s, others every {slo.tpot_s:g} s on average")


def parameters(args: argparse.Namespace, trace: Trace, runs: dict[str, ReplaySettings]) -> dict[str, Any]:
    """What all figures rest on, for programs."""
    return {
        "load": {
            "source": trace.source,
            "requests": len(trace.turns),
            "span_s": trace.turns[-1].at_s,
            "speed": args.speed,
            "tokens_per_id": trace.id_tokens,
        },
        "modelled_clock": next(iter(runs.values())).roofline.parameters(),
        "slo": {"ttft_s": args.slo.ttft_s, "tpot_s": args.slo.tpot_s},
        "replays": {name: run.parameters() for name, run in runs.items()},
    }


def title_of(trace: Trace, settings: ReplaySettings) -> str:
    """Of the picture: what was replayed, on what."""
    roofline = settings.roofline
    return (
        f"{len(trace.turns):,} requests of {trace.source.split(':')[0].split(' ')[0]} on a modelled clock: "
        f"{roofline.gpus} x {roofline.gpu.name}, {roofline.model.name}, blocks of {settings.block_size} tokens"
    )


if __name__ == "__main__":
    main()
