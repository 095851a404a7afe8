"""The tide: two engines and an external process share one device's memory; plots what each held over time.

    python examples/tide.py --seconds 60 --output docs/images/tide

The device is a test device of host memory. Each engine serves the bundled model in a process with one core, fed by a bursty
trace (the second ahead of the first, so that their bursts alternate). The external process takes and returns memory and does
not know of the engines. Afterwards an engine with room for all serves the same requests again, and the
outputs are compared. Writes PREFIX.png and PREFIX.svg and prints a table. The plot needs the extra "examples".

Without the folder of traces (azure2023_code_0-20min.csv) a synthetic trace as bursty is used: see `synthetic`.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pagetide.common.units import MIB
from pagetide.demo.shared import Arrival, DeviceSample, Visitor, shared_device

ROOT = Path(__file__).resolve().parents[1]
TRACE = "azure2023_code_0-20min.csv"
TRACE_S = 1200.0
SHIFT = 0.15  # of the trace, by which the second engine is ahead: its bursts come in the gaps of the first
PER_SECOND = 2.5  # requests of each engine, on average: the trace is thinned to that
CONTEXT_DIVISOR, MOST_PROMPT, LEAST_PROMPT = 5, 880, 16  # tokens; the model's context is 1,024
LEAST_OUTPUT, MOST_OUTPUT = 8, 96

NAMES = ("engine A", "engine B")
KV_MIN, KV_MAX = 16 * MIB, 512 * MIB
SETTLE_S = 2.5  # until the broker has forgotten how the processes grew at their start
HEADROOM = 48 * MIB
GROWTH = 512 * MIB  # what leases and external process contend for, above the engines' minimums
# Of the external process: from, until (shares of the time), share of GROWTH.
STAYS = ((0.15, 0.34, 0.6), (0.60, 0.82, 0.8))
PIECE, PIECE_S = 40 * MIB, 0.25  # of the external process, less than the headroom; and the time between two


@dataclass(slots=True)
class Tide:
    """All that was seen. Filled by `run`."""

    seconds: float
    capacity: int
    headroom: int
    samples: list[DeviceSample] = field(default_factory=list)
    engines: list[dict[str, Any]] = field(default_factory=list)  # what each engine told at its end
    pieces: int = 0  # that the external process took
    refused: int = 0  # that did not fit


def main(argv: Sequence[str] | None = None) -> int:
    """Run, draw, print. Returns 0 when every request was served and unchanged."""
    parser = argparse.ArgumentParser(description="Two engines and an external process share one device's memory.")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder with the trace")
    parser.add_argument("--seconds", type=float, default=60.0, help="that the trace is compressed to (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and sampling (default 0)")
    parser.add_argument("--output", type=Path, default=Path("tide"), metavar="PREFIX", help="of PREFIX.png, PREFIX.svg")
    args = parser.parse_args(argv)
    if not args.seconds >= 1:
        parser.error(f"--seconds must be at least 1, got {args.seconds:g}")
    _pyplot()  # before a minute's work, not after it
    traces, source = load(args.data, args.seconds)
    print(f"{sum(map(len, traces))} requests in {args.seconds:g} s, from {source}; starting two engines ...", flush=True)
    tide = asyncio.run(run(traces, args.seconds, args.seed))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    draw(tide, args.output)
    return report(tide)


# ---- the load -----------------------------------------------------------------------------------


def load(folder: Path, seconds: float) -> tuple[list[list[Arrival]], str]:
    """The arrivals of both engines, and where they come from."""
    file = folder / TRACE
    if not file.is_file():
        return [synthetic(seconds, ahead) for ahead in (0.0, SHIFT)], "a synthetic trace"
    rows = []
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            rows.append((at, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
    first = rows[0][0]
    turns = [((at - first) / TRACE_S, prompt, output) for at, prompt, output in rows]
    return [_compressed(turns, seconds, ahead) for ahead in (0.0, SHIFT)], TRACE


def synthetic(seconds: float, ahead: float) -> list[Arrival]:
    """As bursty: per turn 4 bursts, each a tenth of it, in which all of 3,600 requests come, prompts log-normal around
    1,400 tokens (sigma 1.1), outputs around 13 (sigma 0.9); thinned and scaled like the real one.
    """
    rng = random.Random(1)
    turns = []
    for _ in range(3600):
        burst, within = rng.choice((0.15, 0.45, 0.70, 0.90)), rng.betavariate(1, 3) / 10
        turns.append((burst + within, int(rng.lognormvariate(7.24, 1.1)), int(rng.lognormvariate(2.56, 0.9))))
    return _compressed(sorted(turns), seconds, ahead)


def _compressed(turns: list[tuple[float, int, int]], seconds: float, ahead: float) -> list[Arrival]:
    """(share of the trace's time, tokens in, tokens out) thinned to PER_SECOND, in `seconds`, scaled to the model."""
    step = max(1, round(len(turns) / (PER_SECOND * seconds)))
    arrivals = [
        Arrival(
            (at - ahead) % 1.0 * seconds,
            min(MOST_PROMPT, max(LEAST_PROMPT, prompt // CONTEXT_DIVISOR)),
            min(MOST_OUTPUT, max(LEAST_OUTPUT, output)),
        )
        for at, prompt, output in turns[::step]
    ]
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


# ---- the run ------------------------------------------------------------------------------------


async def run(traces: Sequence[Sequence[Arrival]], seconds: float, seed: int) -> Tide:
    """Both engines and the external process on one device, until the last request is done."""
    async with shared_device(KV_MIN, KV_MAX, GROWTH, HEADROOM) as shared:
        tide = Tide(seconds, shared.device.capacity_bytes, HEADROOM)
        requests = await shared.requests(traces, seed)
        await asyncio.sleep(SETTLE_S)
        visitor = Visitor(shared.device, shared.external, PIECE, PIECE_S)

        async def look() -> None:
            for engine in shared.engines:
                await engine.look()
            sample = shared.sample()
            share = sample.at_s / seconds
            wanted = max((much for begin, end, much in STAYS if begin <= share < end), default=0.0)
            visitor.advance(sample.at_s, int(GROWTH * wanted))
            tide.samples.append(sample)

        runs = await shared.serve(requests, seconds, look)
        print("comparing with the same requests and room for all ...", flush=True)
        for one, own in zip(runs, requests, strict=True):
            one.with_room = await shared.roomy.serve([replace(request, at_s=0.0) for request in own])
        tide.engines = [one.to_dict() for one in runs]
        tide.pieces, tide.refused = visitor.pieces, visitor.refused
    return tide


# ---- what came of it ------------------------------------------------------------------------------


def report(tide: Tide) -> int:
    """Print the table. Returns 0 when every request was served and unchanged, and all memory was where it belongs."""
    rows: list[tuple[str, list[str]]] = [("", list(NAMES))]
    for name, value in (
        ("requests", lambda told: f"{told['requests']:,}"),
        ("failed", lambda told: f"{told['failed']:,}"),
        ("outputs as without pressure", lambda told: f"{told['equal']:,}"),
        ("tokens generated", lambda told: f"{told['tokens']:,}"),
        ("tokens per second", lambda told: f"{told['tokens'] / told['seconds']:,.1f}"),
        ("seconds to the first token, median", lambda told: f"{_middle(told['first_token_s']):.2f}"),
        ("preemptions", lambda told: f"{told['preemptions']:,}"),
        ("recalls", lambda told: f"{told['memory']['recalls']:,}"),
        ("given back", lambda told: f"{told['memory']['given_back_bytes'] / MIB:,.0f} MiB"),
        ("grown", lambda told: f"{told['memory']['grown_bytes'] / MIB:,.0f} MiB"),
    ):
        rows.append((name, [value(told) for told in tide.engines]))
    print()
    for title, cells in rows:
        print(f"  {title:<36}" + "".join(f"{cell:>14}" for cell in cells))
    most = max(sample.held_bytes for sample in tide.samples)
    print(f"\n  the external process took {tide.pieces} pieces of at most {PIECE // MIB} MiB; {tide.refused} did not fit")
    print(f"  held at most {most / MIB:,.0f} of {tide.capacity / MIB:,.0f} MiB")
    whole = all(told["failed"] == 0 and told["equal"] == told["requests"] for told in tide.engines)
    return 0 if whole and not tide.refused and most <= tide.capacity else 1


def _middle(values: Sequence[float]) -> float:
    return values[len(values) // 2]


def _pyplot() -> Any:
    """matplotlib's, drawing into files."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit('the picture needs matplotlib: pip install -e ".[examples]"') from error
    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "tide", "font.family": "DejaVu Sans", "font.size": 9}
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw(tide: Tide, prefix: Path) -> None:
    """PREFIX.png and PREFIX.svg: the bytes that each held, one above the other, over time."""
    pyplot = _pyplot()
    samples = tide.samples[:: max(1, len(tide.samples) // MOST_POINTS)]
    times = [sample.at_s for sample in samples]
    measured = [sum(sample.other) / MIB for sample in samples]
    other = [min(both) for both in zip(_calm(measured), measured, strict=True)]  # no sum is above what was held
    kv = [[sample.kv[number] / MIB for sample in samples] for number in range(len(NAMES))]
    external = [sample.external / MIB for sample in samples]
    top = tide.capacity / MIB
    figure, (sea, beach) = pyplot.subplots(
        2, 1, figsize=(9.2, 6.4), sharex=True, height_ratios=(1, 0.13), gridspec_kw={"hspace": 0.06}
    )
    bands = [other, *kv, external]
    areas = sea.stackplot(times, *bands, colors=COLOURS, step="post", linewidth=0)
    for area in areas[1:]:
        area.set_edgecolor("white")
        area.set_linewidth(0.6)
    sea.axhline(top, color=INK, linewidth=1)
    sea.axhline((tide.capacity - tide.headroom) / MIB, color=INK, linewidth=0.8, linestyle=(0, (1, 3)))
    sea.set_ylim(0, top * 1.01)
    sea.set_xlim(0, max(times))
    for name, edge, below in (("capacity", top, 6), ("headroom: never leased", top - tide.headroom / MIB, -3)):
        sea.text(max(times) * 0.995, edge - abs(below), name, ha="right", va="top", color=INK, fontsize=8)
    _label(sea, times, bands)
    _mark_recalls(sea, tide, times, bands)
    _draw_arrivals(beach, tide)
    sea.set_ylabel("MiB held")
    sea.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    sea.set_title("Two engines and an external process on one device", loc="left", fontsize=12, color=INK, pad=10)
    for axes in (sea, beach):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0, colors=INK)
    sea.tick_params(labelbottom=False)
    for kind in ("png", "svg"):
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(f"{prefix}.{kind}", dpi=170, bbox_inches="tight", facecolor="white", metadata=metadata)
    pyplot.close(figure)


MOST_POINTS = 600
INK = "#3b4654"
COLOURS = ("#dfe4ea", "#3f7cac", "#7fb7a6", "#e3a368")  # programs, engine A, engine B, the external process
DARK = ("#6b7683", "#ffffff", "#12362e", "#5a3410")  # words on them


def _label(sea: Any, times: list[float], bands: list[list[float]]) -> None:
    """Each band's name where the band is thickest."""
    names = ("programs and weights of both engines", "KV of engine A", "KV of engine B", "external process")
    for number, name in enumerate(names):
        upper = [sum(sums) for sums in zip(*bands[: number + 1], strict=True)]
        lower = [top - band for top, band in zip(upper, bands[number], strict=True)]
        if number == 0:
            sea.text(times[-1] / 2, min(upper) / 2, name, ha="center", va="center", color=DARK[0], fontsize=9)
            continue
        reach = max(1, len(times) * len(name) // 200)  # half of what the words take
        places = range(reach, len(times) - reach)
        room = {i: (max(lower[i - reach : i + reach]), min(upper[i - reach : i + reach])) for i in places}
        place = max(places, key=lambda i, room=room: room[i][1] - room[i][0])
        under, over = room[place]
        if over - under > 12:
            sea.text(times[place], (under + over) / 2, name, ha="center", va="center", color=DARK[number], fontsize=9)


def _calm(values: list[float]) -> list[float]:
    """The median of each value and its neighbours: a process and its pool are not measured at the same instant."""
    return [sorted(values[max(0, i - 4) : i + 5])[len(values[max(0, i - 4) : i + 5]) // 2] for i in range(len(values))]


def _mark_recalls(sea: Any, tide: Tide, times: list[float], bands: list[list[float]]) -> None:
    """A triangle at the upper edge of the engine's band where it was recalled."""
    import bisect

    for number, told in enumerate(tide.engines):
        points = []
        for at_s, _ in told["recalls"]:
            place = min(len(times) - 1, bisect.bisect(times, at_s - 0.1))
            points.append((at_s, sum(band[place] for band in bands[: number + 2])))
        if points:
            sea.scatter(
                *zip(*points, strict=True), marker="v", s=26, color=INK, edgecolor="white", linewidth=0.6, zorder=3,
                label="recall" if number == 0 else None,
            )  # fmt: skip
    if any(told["recalls"] for told in tide.engines):
        sea.scatter([], [], marker="v", s=26, color=INK, edgecolor="white", linewidth=0.6, label="memory recalled")
        handles, labels = sea.get_legend_handles_labels()
        sea.legend(
            handles[-1:], labels[-1:], loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8,
            labelcolor=INK, handletextpad=0.1,
        )  # fmt: skip


def _draw_arrivals(beach: Any, tide: Tide) -> None:
    """A stroke for each request."""
    for number, told in enumerate(tide.engines):
        beach.vlines(told["arrivals"], 0.56 - 0.5 * number, 0.96 - 0.5 * number, color=COLOURS[1 + number], linewidth=0.7)
    beach.set_ylim(0, 1)
    beach.set_yticks([0.76, 0.26], ["requests to A", "to B"])
    beach.set_xlabel("seconds", color=INK)


if __name__ == "__main__":
    sys.exit(main())
