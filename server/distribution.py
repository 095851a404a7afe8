"""A histogram for Prometheus, as cheap as counting in a list."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.utils import floatToGoString


class Distribution:
    """Counts values by upper bounds, which are ascending.

    Attributes:
        counts: Values up to each bound and above the one before; the last entry has those above all bounds.
        total: Their sum.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value`, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """The number of values up to each bound, by the bound as Prometheus writes it; "+Inf" is the last."""
        return cumulated(self.bounds, self.counts)


def cumulated(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """See `Distribution.buckets`."""
    sums, found = 0, []
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        sums += count
        found.append((str(floatToGoString(bound)), float(sums)))  # type: ignore[no-untyped-call]
    return found


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    bounds, power = [], 1
    while power <= most:
        bounds += [digit * power for digit in (1, 2, 5) if digit * power <= most]
        power *= 10
    return tuple(bounds)
