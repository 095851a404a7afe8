"""Measures what a process holds besides KV, and frees what its libraries only keep for later."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from ...common.units import MIB

log = logging.getLogger(__name__)

_TRIM_S = 2.0  # minimum interval of emptying caches while the process exceeds its grant
_TIDY_S = 0.5  # minimum interval of tidying the heap while there is work,
_TIDY_BYTES = 4 * MIB  # and the growth of the process that triggers it


class BaseMemory:
    """Bytes that the process holds for one engine besides KV: weights, libraries, workspaces.

    Args:
        weights_bytes: Of these the weights.
        reserve_bytes: Additional workspaces of a step.
        trim: Empties caches of libraries and of the attention kernel.
        tidy: Returns free heap memory, which varying temporaries fragment, to the system if the device is the host;
        else None.
    """

    def __init__(
        self,
        measure: Callable[[], int],
        *,
        weights_bytes: int,
        reserve_bytes: int,
        trim: Callable[[], None],
        tidy: Callable[[], None] | None = None,
    ) -> None:
        self.weights_bytes = weights_bytes
        self._measured_bytes = measure()
        self.planned_bytes = self._measured_bytes + reserve_bytes
        self.most_bytes: float = math.inf  # the process may hold more, which is not the engine's
        self.num_bytes = self.planned_bytes  # by the last `update`: from `planned_bytes` to `most_bytes`
        self._measure = measure
        self._trim = trim
        self._tidy = tidy
        self._failed = False  # the last measurement failed
        self._least_bytes: float = math.inf  # smallest measurement since the last trim or tidy
        self._trimmed_at = self._tidied_at = -math.inf

    def update(self, now: float, *, has_work: bool, room_bytes: float) -> None:
        """Measure. If the heap has grown, tidy it; if more is held than was planned and than `room_bytes`, empty caches."""
        measured = self._measure_or_last()
        if self._tidy is not None and self._has_grown(measured) and (not has_work or now >= self._tidied_at + _TIDY_S):
            self._tidied_at = now
            _try(self._tidy)
            self._least_bytes = measured = self._measure_or_last()
        self._least_bytes = min(self._least_bytes, measured)
        self._count(measured)
        if self.num_bytes > max(room_bytes, self.planned_bytes) and now >= self._trimmed_at + _TRIM_S:
            self._trimmed_at = now
            self.trim()
            self._least_bytes = measured = self._measure_or_last()
            self._count(measured)

    def trim(self) -> None:
        """Empty the caches of libraries. The next `update` counts the effect."""
        _try(self._trim)

    def measure_untidy(self) -> bool:
        """Measure; return whether the heap has grown enough to be tidied."""
        return self._tidy is not None and self._has_grown(self._measure_or_last())

    def _has_grown(self, measured_bytes: int) -> bool:
        return measured_bytes > self._least_bytes + _TIDY_BYTES

    def _count(self, measured_bytes: int) -> None:
        self.num_bytes = int(min(max(self.planned_bytes, measured_bytes), self.most_bytes))

    def _measure_or_last(self) -> int:
        """Measure. If that fails, as without a free file descriptor, return the last measurement."""
        try:
            self._measured_bytes, self._failed = self._measure(), False
        except Exception:
            if not self._failed:
                log.warning("the memory of this process cannot be measured", exc_info=True)
            self._failed = True
        return self._measured_bytes


def _try(free: Callable[[], None]) -> None:
    """Call `free`; log an exception instead of raising it."""
    try:
        free()
    except Exception:
        log.warning("memory that libraries keep could not be freed", exc_info=True)
