"""The trend of a device's used memory: its smoothed growth in bytes per second.

A least-squares line is fitted to the past, in which a sample of age a has weight exp(-a / time constant). Each sample
stands for the time since the one before it, and the first for all time before. So the result does not depend on how
often or how regularly memory is sampled.

The slope is scaled by how well the line fits (r²): fully for linear growth, not at all for r² of 0.1 or less. So noise
around a level, and waves of up to two time constants, count as no growth. A single step of b bytes counts for at most
0.23 b per time constant, and for nothing after six of them. A staircase counts as its average slope, once its steps
come faster than the time constant.

Smoothing the derivative would be simpler, but shows a step at once and in full, and noise with both signs.
"""

from __future__ import annotations

import math

# r² without significance: noise sampled 250 times per time constant has a tenth of it
_BY_CHANCE = 0.1


class Trend:
    """The trend of one device. Mutable; used by one thread at a time.

    Gives values once it covers one `time_constant_ns`, which should be at least ten sampling intervals. Restarts after
    a longer silence, as the time between is unknown. Raises ValueError for a time constant below 1.
    """

    __slots__ = ("_at_ns", "_began_ns", "_covariance", "_lead", "_lead_s", "_tau_ns", "_time_variance", "_used", "_variance")

    def __init__(self, time_constant_ns: int = 5_000_000_000) -> None:
        if time_constant_ns < 1:
            raise ValueError(f"the time constant of a trend must be at least 1 ns, got {time_constant_ns}")
        self._tau_ns = time_constant_ns
        self.reset()

    def reset(self) -> None:
        """Forget the past: the device's total has changed, or the device was exchanged."""
        self._began_ns: int | None = None
        self._at_ns = 0
        self._used = 0
        # Of the weighted past, relative to the last sample, so that long uptimes and large levels cost no precision:
        self._lead_s = 0.0  # last time - mean time
        self._lead = 0.0  # last used - mean used, bytes
        self._time_variance = 0.0  # s²
        self._variance = 0.0  # bytes²
        self._covariance = 0.0  # bytes · s

    def update(self, at_ns: int, used_bytes: int | None) -> float | None:
        """Add a sample. Returns the growth in bytes per second; None while there are too few samples.

        Negative while memory becomes free, 0.0 without a trend. `used_bytes` None (no answer) restarts the trend, as
        does a time before the last one.
        """
        if used_bytes is None:
            self.reset()
            return None
        if self._began_ns is None or not 0 <= at_ns - self._at_ns <= self._tau_ns:
            self.reset()
            self._began_ns, self._at_ns, self._used = at_ns, at_ns, used_bytes
            return None
        elapsed_ns = at_ns - self._at_ns
        weight = -math.expm1(-elapsed_ns / self._tau_ns)  # all weights always add up to 1
        rest = 1 - weight
        seconds = self._lead_s + elapsed_ns / 1e9  # from the mean so far to this sample
        growth = self._lead + (used_bytes - self._used)
        self._at_ns, self._used = at_ns, used_bytes
        self._lead_s, self._lead = rest * seconds, rest * growth
        self._time_variance = rest * (self._time_variance + weight * seconds * seconds)
        self._variance = rest * (self._variance + weight * growth * growth)
        self._covariance = rest * (self._covariance + weight * seconds * growth)
        return self._trusted_slope() if at_ns - self._began_ns >= self._tau_ns else None

    def _trusted_slope(self) -> float:
        if self._variance == 0:  # never moved, or so long ago that it is forgotten
            return 0.0
        slope = self._covariance / self._time_variance
        explained = min(1.0, slope * (self._covariance / self._variance))  # r²
        return slope * (explained - _BY_CHANCE) / (1 - _BY_CHANCE) if explained > _BY_CHANCE else 0.0
