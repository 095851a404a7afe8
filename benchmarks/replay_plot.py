"""Plots of a replay: running and waiting requests, pool contents and prefix hits over time, and scaling."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.replay_run import ReplayOutcome
from benchmarks.replay_scaling import Series

INK, BLUE, GREEN, ORANGE, GREY, DIM = "#3b4654", "#3f7cac", "#7fb7a6", "#e3a368", "#dfe4ea", "#a9b2bd"
_WINDOWS = 60  # stretches of time over which hits are averaged


def pyplot() -> Any:
    """matplotlib's, drawing into files."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit('the picture needs matplotlib: pip install "pagetide[examples]"') from error
    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "replay", "font.family": "DejaVu Sans", "font.size": 9}
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw(outcomes: dict[str, ReplayOutcome], title: str, prefix: Path) -> None:
    """A column of three pictures for each outcome, under its name."""
    plot = pyplot()
    figure, grid = plot.subplots(
        3, len(outcomes), figsize=(4.6 * len(outcomes), 6.4), sharex="col", sharey="row", squeeze=False
    )
    for (name, outcome), (load, pool, hits) in zip(outcomes.items(), grid.T, strict=True):
        _draw_load(load, outcome)
        _draw_pool(pool, outcome)
        _draw_hits(hits, outcome)
        load.set_title(name, loc="left", color=INK)
        every_s = np.median(np.diff([sample.at_s for sample in outcome.samples])) if len(outcome.samples) > 1 else 0
        hits.set_xlabel(f"modelled seconds, a sample every {every_s:.1f}")
    for axes, label in zip(grid[:, 0], ("requests", "blocks", "prompt tokens found, %"), strict=True):
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)  # of the whole row, once all of it is drawn
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=10)
    _save(plot, figure, grid.ravel(), prefix)


def _draw_load(axes: Any, outcome: ReplayOutcome) -> None:
    times = [sample.at_s for sample in outcome.samples]
    axes.plot(times, [sample.waiting for sample in outcome.samples], color=ORANGE, linewidth=0.9, label="waiting")
    axes.plot(times, [sample.running for sample in outcome.samples], color=BLUE, linewidth=0.9, label="running")
    _legend(axes, 2)


def _draw_pool(axes: Any, outcome: ReplayOutcome) -> None:
    samples = outcome.samples
    bands = np.array([[s.live, s.cached, max(0, s.usable - s.live - s.cached)] for s in samples]).T
    labels = ("live", "cached", "free")
    axes.stackplot([s.at_s for s in samples], bands, colors=(BLUE, GREEN, GREY), linewidth=0, labels=labels)
    _legend(axes, 3)


def _draw_hits(axes: Any, outcome: ReplayOutcome) -> None:
    times = np.array([sample.at_s for sample in outcome.samples])
    seen = np.array([[sample.lookup_tokens, sample.hit_tokens] for sample in outcome.samples], np.float64).T
    edges = np.linspace(0, times[-1], _WINDOWS + 1)
    lookups, hits = (np.diff(np.interp(edges, times, total)) for total in seen)
    rates = np.divide(100 * hits, lookups, out=np.full(_WINDOWS, np.nan), where=lookups > 0)
    axes.stairs(rates, edges, color=GREEN, label=f"in {edges[1]:.0f} s")
    axes.plot(times, 100 * seen[1] / np.maximum(seen[0], 1), color=INK, linewidth=1, label="since the start")
    _legend(axes, 2)


def _legend(axes: Any, columns: int) -> None:
    """Above the picture, so that it hides nothing."""
    axes.legend(
        frameon=False, loc="lower right", bbox_to_anchor=(1, 0.98), borderaxespad=0.0, ncols=columns, fontsize=8,
        columnspacing=1.2,
    )  # fmt: skip


def draw_scaling(series: list[Series], prefix: Path) -> None:
    """A picture for each thing that grows, all axes logarithmic and the same scale of costs in all of them."""
    plot = pyplot()
    grown = list(dict.fromkeys(one.grows for one in series))
    figure, grid = plot.subplots(1, len(grown), figsize=(4.6 * len(grown), 5.0), sharey=True, squeeze=False)
    for grows, axes in zip(grown, grid[0], strict=True):
        some = [one for one in series if one.grows == grows]
        for one, colour in zip(some, (BLUE, ORANGE, GREEN), strict=False):
            says = f"{one.cost}: {_time(one.costs[0])} to {_time(one.costs[-1])}"
            axes.plot(one.sizes, one.costs, "o-", color=colour, markersize=4, label=says)
        sizes = np.array(some[0].sizes, np.float64)
        start = 0.5 * min(one.costs[0] for one in some)
        axes.plot(
            sizes,
            start * sizes / sizes[0],
            "--",
            color=DIM,
            linewidth=1,
            zorder=0,
            label="ten times as many, ten times the cost",
        )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(some[0].sizes, [_short(size) for size in some[0].sizes])
        axes.minorticks_off()
        axes.set_xlabel(grows)
        axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(-0.02, 1.0), borderaxespad=0.2)
    grid[0][0].set_ylabel("processor time of one core, µs")
    figure.suptitle(
        "What a replay costs as the load, the batch and the pool grow: scheduler, cache manager and stub, no model", x=0.01,
        ha="left", color=INK, fontsize=10,
    )  # fmt: skip
    _save(plot, figure, grid.ravel(), prefix)


def _short(size: int) -> str:
    return f"{size // 1_000_000} M" if size >= 1_000_000 else f"{size:,}"


def _time(microseconds: float) -> str:
    return f"{microseconds:.3g} µs" if microseconds < 1e3 else f"{microseconds / 1e3:.3g} ms"


def _save(plot: Any, figure: Any, every: Any, prefix: Path) -> None:
    """PREFIX.png and PREFIX.svg; a prefix that ends in one of these is taken without it."""
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
    figure.tight_layout()
    if prefix.suffix in (".png", ".svg"):
        prefix = prefix.with_suffix("")
    png, svg = (prefix.with_name(f"{prefix.name}.{kind}") for kind in ("png", "svg"))
    figure.savefig(png, dpi=100, facecolor="white")
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", facecolor="white", metadata={"Date": None})
    svg.write_text(re.sub(r' d="[^"]+"', _rounded, drawn.getvalue()))
    print(f"written to {png} and {svg}", file=sys.stderr)
    plot.close(figure)


def _rounded(path: re.Match[str]) -> str:
    """The same path in hundredths of a point: half the bytes."""
    return re.sub(r"(\.\d\d)\d+", r"\1", path.group())
