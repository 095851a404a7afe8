"""Measures what a process holds besides KV, and frees what its libraries only keep for later."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from ...monitor.units import MIB

log = logging.getLogger(__name__)

_TRIM_S = 2.0  # minimum interval of emptying caches while the process exceeds its grant
_TIDY_S = 0.5  # minimum interval of tidying the heap while there is work,
_TIDY_BYTES = 4 * MIB  # and the growth of the process that triggers it


class BaseMemory:
    """Bytes that the process holds for one engine besides KV: weights, libraries, workspaces.

    `num_bytes`, the counted bytes, lie between two bounds: those planned after loading, and `most_bytes`.

    Args:
        measure: Measures what the process holds besides KV.
        reserve_bytes: Additional workspaces of a step.
        trim: Empties caches of libraries and of the attention kernel.
        tidy: Returns free heap memory to the system if the device is the host; else None. The heap keeps what steps have
            freed, and temporaries of varying sizes fragment it.
    """

    def __init__(
        self,
        measure: Callable[[], int],
        reserve_bytes: int,
        trim: Callable[[], None],
        tidy: Callable[[], None] | None = None,
    ) -> None:
        self.planned_bytes = measure() + reserve_bytes
        self.most_bytes: float = math.inf
        self.num_bytes = self.planned_bytes
        self._measure = measure
        self._trim = trim
        self._tidy = tidy
        self._measured_bytes = self.planned_bytes - reserve_bytes
        self._failed = False  # the last measurement failed
        self._least_bytes: float = math.inf  # smallest measurement since the heap was tidied or caches were emptied
        self._trimmed_at = self._tidied_at = -math.inf

    def update(self, now: float, *, has_work: bool, room_bytes: float) -> None:
        """Measure again. Tidies the heap if it has grown; empties caches if more than `room_bytes` and the plan are held."""
        self._measure_again()
        if self._has_grown and (not has_work or now >= self._tidied_at + _TIDY_S):
            assert self._tidy is not None
            self._tidied_at = now
            self._free(self._tidy)
        if self.num_bytes > max(room_bytes, self.planned_bytes) and now >= self._trimmed_at + _TRIM_S:
            self._trimmed_at = now
            self._free(self._trim)

    def trim(self) -> None:
        """Empty the caches of libraries. The next `update` measures the effect."""
        _try(self._trim)

    def is_untidy(self) -> bool:
        """Measure again; return whether the heap has grown so much that `update` would tidy it."""
        if self._tidy is None:
            return False
        self._read()
        return self._has_grown

    @property
    def _has_grown(self) -> bool:
        return self._tidy is not None and self._measured_bytes > self._least_bytes + _TIDY_BYTES
