"""The report of a replay: its figures, a table with a column for each replay, and JSON with the raw data."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure, machine, versions
from benchmarks.replay_run import ReplayOutcome
from benchmarks.replay_stub import Seconds


@dataclass(frozen=True, slots=True)
class Slo:
    """A request is good with its first token within `ttft_s`, and the others every `tpot_s` on average."""

    ttft_s: float
    tpot_s: float

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From "5,0.1". Raises ValueError, with a sentence."""
        try:
            ttft_s, tpot_s = (float(part) for part in text.split(","))
        except ValueError:
            raise ValueError(f"an SLO is SECONDS_TO_FIRST_TOKEN,SECONDS_A_TOKEN, got {text!r}") from None
        if not (ttft_s > 0 and tpot_s > 0):
            raise ValueError(f"both times of an SLO are above 0 s, got {text!r}")
        return cls(ttft_s, tpot_s)


def figures_of(outcome: ReplayOutcome, slo: Slo, target_s: float | None) -> list[Figure]:
    """All of a replay's numbers, the same ones for every replay."""
    counters, requests = outcome.counters, len(outcome.ttft_s)
    good = outcome.goodput(slo.ttft_s, slo.tpot_s)
    return [
        Figure("taken, of one core", outcome.cpu_s, "s", target_s),
        Figure("taken, by the wall clock", outcome.wall_s, "s"),
        Figure("modelled time", outcome.modelled_s, "s"),
        Figure("modelled time in steps", outcome.busy_s, "s"),
        Figure("modelled time of host copies", outcome.copy_s, "s"),
        Figure("steps", counters.steps, "steps"),
        Figure("prompt tokens found", 100 * counters.hit_tokens / max(1, counters.lookup_tokens), "%"),
        Figure("tokens computed", counters.computed_tokens, "tokens"),
        Figure("tokens computed twice", counters.recomputed_tokens, "tokens"),
        Figure("swapped out", counters.demoted_bytes / 1e9, "GB"),
        Figure("swapped in", counters.promoted_bytes / 1e9, "GB"),
        Figure("preemptions", counters.preemptions, "times"),
        Figure("extents given back", counters.given_back_extents, "extents"),
        Figure("blocks moved", counters.moved_blocks, "blocks"),
        *percentiles("time to first token", outcome.ttft_s),
        *percentiles("time between tokens", outcome.gaps_s),
        Figure("requests within the SLO", 100 * good, "%", better="higher"),
        Figure("goodput", good * requests / outcome.modelled_s, "req/s", better="higher"),
        Figure("requests too long for the pool", outcome.refused, "requests"),
        Figure("requests never served", outcome.unserved, "requests"),
        Figure("outputs cut short by the pool", outcome.cut_short, "requests"),
    ]


def percentiles(name: str, seconds: Seconds) -> list[Figure]:
    """Of those that there are; none where there are none."""
    known = seconds[~np.isnan(seconds)]
    if not len(known):
        return []
    values = np.percentile(known, (50, 95, 99)).tolist()
    return [
        Figure(f"{name}, {which}", 1e3 * value, "ms")
        for which, value in zip(("p50", "p95", "p99"), values, strict=True)
    ]


def print_table(title: str, columns: Mapping[str, list[Figure]]) -> None:
    """A row for each figure, a column for each replay."""
    rows = {figure.name: figure for figures in columns.values() for figure in figures}
    values = {name: {figure.name: figure for figure in figures} for name, figures in columns.items()}
    width, wide = max(map(len, rows)), max(12, *map(len, columns))
    print(f"\n{title}\n  {'':<{width}}  {'  '.join(f'{name:>{wide}}' for name in columns)}")
    for name, figure in rows.items():
        cells = [f"{_number(values[column].get(name)):>{wide}}" for column in columns]
        bound = "" if figure.target is None else f"   bound {figure.target:g}: {_verdict(values, name)}"
        print(f"  {name:<{width}}  {'  '.join(cells)} {figure.unit}{bound}")


def _number(figure: Figure | None) -> str:
    if figure is None:
        return "none"
    return f"{figure.value:,.0f}" if isinstance(figure.value, int) else f"{figure.value:,.2f}"


def _verdict(values: Mapping[str, Mapping[str, Figure]], name: str) -> str:
    missed = [column for column, figures in values.items() if name in figures and figures[name].meets is False]
    return f"MISSED by {', '.join(missed)}" if missed else "met"


def named(columns: Mapping[str, list[Figure]]) -> list[Figure]:
    """The figures of all replays, each with its replay's name before its own."""
    return [
        replace(figure, name=f"{column}: {figure.name}") for column, figures in columns.items() for figure in figures
    ]


def write(file: Path, figures: list[Figure], parameters: dict[str, Any]) -> None:
    """As figures.report writes it, with the parameters beside the figures."""
    content = {
        "figures": [asdict(figure) | {"meets": figure.meets} for figure in figures],
        "parameters": parameters,
        "machine": machine(),
        "versions": versions(),
        "seed": 0,
    }
    file.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written to {file}", file=sys.stderr)
