"""How long steps take, and how many bytes one step may copy or map so that it stays short."""

from __future__ import annotations

import math
import statistics
from collections import deque

from ...common.units import MIB

# Initial slice to map, or to move, in a step while requests run; `Slice` adapts it
SLICE_BYTES = 16 * MIB
_ALONE_S = 0.05  # without a step for this long, no caller is waiting for one


class Slice:
    """Bytes that one step may copy, or map, while requests run: as many as take as long as a step without them.

    The size is learned from steps that had at least half a slice to do.
    """

    SHARE = 1.0  # of the time of a plain step

    def __init__(self, least_bytes: int) -> None:
        self.num_bytes = SLICE_BYTES
        self._least_bytes = least_bytes

    def record(self, num_bytes: int, step_s: float, plain_s: float) -> None:
        """Record that a step with `num_bytes` of work took `step_s`; one without takes `plain_s`."""
        if num_bytes < self.num_bytes // 2:
            return
        aim = num_bytes * self.SHARE * plain_s / max(step_s - plain_s, plain_s / 8, 1e-6)
        self.num_bytes = int(max(self._least_bytes, num_bytes / 2, min(aim, num_bytes * 2)))


class StepTimer:
    """Measures the steps of one engine: learns the slices, and knows whether callers are waiting for steps.

    Args:
        extent_bytes: The smallest slice to map.
        block_bytes: The smallest slice to copy.
        now: Seconds, monotonic, like every later time.
    """

    def __init__(self, extent_bytes: int, block_bytes: int, now: float) -> None:
        self.mapping = Slice(extent_bytes)
        self.copying = Slice(block_bytes)
        self.alone = True  # no steps ran recently before the one that is being prepared
        self.used_at = now  # the last time that a request was here
        self._block_bytes = block_bytes
        self._in_use = False  # a request is here in the step that is being prepared
        self._began_at = self._ended_at = -math.inf  # of the last step
        self._plain_s: deque[float] = deque(maxlen=16)  # durations of the last steps without copies or maps
        self._moved_blocks = 0  # the scheduler's counter after the last step

    def begin(self, now: float, *, in_use: bool) -> None:
        """Record that a step is being prepared, with requests if `in_use`."""
        self.alone = now - self._ended_at >= _ALONE_S
        self._began_at, self._in_use = now, in_use

    def end(self, now: float, *, waited_for: bool, moved_blocks: int, mapped_bytes: int) -> None:
        """Record that a step is done. One that no caller has `waited_for` does not count as a recent step.

        Args:
            moved_blocks: The scheduler's counter of blocks copied for a resize.
            mapped_bytes: The change of the pool's size in this step.
        """
        step_s = now - max(self._began_at, self._ended_at)  # a step launched ahead has no `begin`
        if waited_for:
            self._ended_at = now
        if self._in_use:
            self.used_at = now
        moved = moved_blocks - self._moved_blocks
        self._moved_blocks = moved_blocks
        if not self.alone:
            self._learn(step_s, moved * self._block_bytes, mapped_bytes)

    def _learn(self, step_s: float, moved_bytes: int, mapped_bytes: int) -> None:
        """Learn the sizes of the next slices from the time that the step's copies and maps took."""
        if not mapped_bytes and not moved_bytes:
            self._plain_s.append(step_s)
        elif self._plain_s:  # else the time of a plain step is not known yet
            plain_s = statistics.median(self._plain_s)
            if moved_bytes:
                self.copying.record(moved_bytes, step_s, plain_s)
            elif mapped_bytes > 0:
                self.mapping.record(mapped_bytes, step_s, plain_s)
