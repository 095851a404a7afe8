"""The load of `benchmarks.goodput`: two streams of requests, from a bursty trace or a synthetic one."""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

TRACE = "azure2023_code_0-20min.csv"
TRACE_S = 1200.0
SHIFT = 0.125  # of the trace, by which the second stream is ahead: its bursts mostly come in the gaps of the first
PROMPT_DIVISOR, LEAST_PROMPT, MOST_PROMPT = 5, 16, 800  # tokens; the demo model's context is 1,024
OUTPUT_FACTOR, LEAST_OUTPUT, MOST_OUTPUT = 4, 16, 192
SYNTHETIC_REQUESTS = 3600
SYNTHETIC = (
    f"a synthetic trace: {SYNTHETIC_REQUESTS:,} requests in four bursts, each a tenth of the time, prompts log-normal around "
    "1,400 tokens (sigma 1.1), outputs around 13 (sigma 0.9)"
)

Turn = tuple[float, int, int]  # (share of the trace's time, prompt tokens, output tokens)


@dataclass(frozen=True, slots=True)
class LoadArrival:
    """One request: when it comes, and its lengths in tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def load(
    folder: Path | None, seconds: float, per_second: float
) -> tuple[tuple[list[LoadArrival], list[LoadArrival]], str]:
    """The arrivals at both engines in `seconds`, `per_second` at each on average; and where they come from.

    Without a folder the trace is synthetic. Raises ValueError where the folder has no such trace.
    """
    turns, source = (_synthetic(), SYNTHETIC) if folder is None else (_read(folder / TRACE), TRACE)
    step = len(turns) / (per_second * seconds)
    thinned = [turns[int(i * step)] for i in range(int(len(turns) / step))] if step > 1 else turns
    return (_compressed(thinned, seconds, 0.0), _compressed(thinned, seconds, SHIFT)), source


def _read(file: Path) -> list[Turn]:
    if not file.is_file():
        raise ValueError(f"{file.parent} has no {file.name}")
    with file.open(newline="") as lines:
        rows = [
            (
                datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(),
                int(row["ContextTokens"]),
                int(row["GeneratedTokens"]),
            )
            for row in csv.DictReader(lines)
        ]
    return [((at - rows[0][0]) / TRACE_S, prompt, output) for at, prompt, output in rows]


def _synthetic() -> list[Turn]:
    """See SYNTHETIC."""
    rng = random.Random(1)
    turns = []
    for _ in range(SYNTHETIC_REQUESTS):
        burst, within = rng.choice((0.15, 0.45, 0.70, 0.90)), rng.betavariate(1, 3) / 10
        turns.append((burst + within, int(rng.lognormvariate(7.24, 1.1)), int(rng.lognormvariate(2.56, 0.9))))
    return sorted(turns)


def _compressed(turns: list[Turn], seconds: float, ahead: float) -> list[LoadArrival]:
    """In `seconds`, with lengths that suit the demo model."""
    arrivals = [
        LoadArrival(
            (at - ahead) % 1.0 * seconds,
            min(MOST_PROMPT, max(LEAST_PROMPT, prompt // PROMPT_DIVISOR)),
            min(MOST_OUTPUT, max(LEAST_OUTPUT, output * OUTPUT_FACTOR)),
        )
        for at, prompt, output in turns
    ]
    return sorted(arrivals, key=lambda arrival: arrival.at_s)
