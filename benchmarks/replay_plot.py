"""Pictures of a replay: who ran and waited, what the pool held and what was found over time; and how its cost grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.replay_run import Outcome
from benchmarks.replay_scaling import Series

INK, BLUE, GREEN, ORANGE, GREY = "#3b4654", "#3f7cac", "#7fb7a6", "#e3a368", "#dfe4ea"
_WINDOWS = 60  # stretches of time over which hits are averaged


def pyplot() -> Any:
    """matplotlib's, drawing into files."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit('the picture needs matplotlib: pip install "pagetide[examples]"') from error
    matplotlib.use("Agg")
    matplotlib.rcParams |= {"font.family": "DejaVu Sans", "font.size": 9}
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw(outcomes: dict[str, Outcome], title: str, file: Path) -> None:
    """A column of three pictures for each outcome, under its name."""
    plot = pyplot()
    figure, grid = plot.subplots(
        3, len(outcomes), figsize=(6.2 * len(outcomes), 6.4), sharex="col", sharey="row", squeeze=False
    )
    for (name, outcome), (load, pool, hits) in zip(outcomes.items(), grid.T, strict=True):
        _draw_load(load, outcome)
        _draw_pool(pool, outcome)
        _draw_hits(hits, outcome)
        load.set_title(name, loc="left", color=INK)
        hits.set_xlabel("modelled seconds")
    for axes, label in zip(grid[:, 0], ("requests", "blocks", "prompt tokens found, %"), strict=True):
        axes.set_ylabel(label)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=10)
    _save(plot, figure, grid.ravel(), file)


def _draw_load(axes: Any, outcome: Outcome) -> None:
    times = [sample.at_s for sample in outcome.samples]
    axes.plot(times, [sample.waiting for sample in outcome.samples], color=ORANGE, linewidth=0.9, label="waiting")
    axes.plot(times, [sample.running for sample in outcome.samples], color=BLUE, linewidth=0.9, label="running")
    axes.legend(frameon=False, loc="upper left", ncols=2)


def _draw_pool(axes: Any, outcome: Outcome) -> None:
    samples = outcome.samples
    bands = np.array([[s.live, s.cached, max(0, s.usable - s.live - s.cached)] for s in samples]).T
    labels = ("live", "cached", "free")
    axes.stackplot(
        [s.at_s for s in samples], bands, colors=(BLUE, GREEN, GREY), step="post", linewidth=0, labels=labels
    )
    axes.legend(loc="lower right", ncols=3, fontsize=8)


def _draw_hits(axes: Any, outcome: Outcome) -> None:
    times = np.array([sample.at_s for sample in outcome.samples])
    seen = np.array([[sample.lookup_tokens, sample.hit_tokens] for sample in outcome.samples], np.float64).T
    edges = np.linspace(0, times[-1], _WINDOWS + 1)
    lookups, hits = (np.diff(np.interp(edges, times, total)) for total in seen)
    rates = np.divide(100 * hits, lookups, out=np.full(_WINDOWS, np.nan), where=lookups > 0)
    axes.stairs(rates, edges, color=GREEN, label=f"in {edges[1]:.0f} s")
    axes.plot(times, 100 * seen[1] / np.maximum(seen[0], 1), color=INK, linewidth=1, label="since the start")
    axes.set_ylim(0, 100)
    axes.legend(frameon=False, loc="upper left", ncols=2)


def draw_scaling(series: list[Series], file: Path) -> None:
    """A picture for each thing that grows, both axes logarithmic."""
    plot = pyplot()
    grown = list(dict.fromkeys(one.grows for one in series))
    figure, grid = plot.subplots(1, len(grown), figsize=(4.6 * len(grown), 3.8), squeeze=False)
    for grows, axes in zip(grown, grid[0], strict=True):
        for one, colour in zip([one for one in series if one.grows == grows], (BLUE, ORANGE, GREEN), strict=False):
            axes.plot(one.sizes, one.costs, "o-", color=colour, markersize=4, label=f"{one.cost}, {one.unit}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_minor_formatter("")
        axes.set_xlabel(grows)
        axes.legend(frameon=False, fontsize=8)
        axes.margins(y=0.4)
    _save(plot, figure, grid.ravel(), file)


def _save(plot: Any, figure: Any, every: Any, file: Path) -> None:
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130, facecolor="white")
    plot.close(figure)
