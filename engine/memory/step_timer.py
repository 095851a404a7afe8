"""How long steps take, and how many bytes one step may copy or map so that it stays short."""

from __future__ import annotations

import math
import statistics
from collections import deque

from ...common.units import GIB, MIB
from ...scheduler.outcome import Stats

# Initial slices while requests run, which `Slice` adapts: to map, or to move, in a step, and to unmap, where no blocks have to
# move
SLICE_BYTES = 16 * MIB
UNMAP_SLICE_BYTES = 4 * GIB
_ALONE_S = 0.05  # without a step for this long, no caller is waiting for one


class Slice:
    """Bytes that one step may copy, map or unmap while requests run: as many as take as long as a step without them.

    The size is learned from steps that had at least half a slice to do, and from the time that they took besides computing:
    a burst of prompts makes steps long too.
    """

    SHARE = 1.0  # of the time of a plain step

    def __init__(self, least_bytes: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._least_bytes = least_bytes

    def record(self, num_bytes: int, work_s: float, plain_s: float) -> None:
        """Record that `num_bytes` of work made a step `work_s` longer; one without takes `plain_s`."""
        if num_bytes < self.num_bytes // 2:
            return
        aim = num_bytes * self.SHARE * plain_s / max(work_s, plain_s / 8, 1e-6)  # eight times as many at most
        self.num_bytes = int(max(self._least_bytes, num_bytes / 2, aim))


class StepTimer:
    """Measures the steps of one engine: learns the slices, and knows whether callers are waiting for steps.

    Args:
        extent_bytes: The smallest slice to map.
        block_bytes: The smallest slice to copy.
        now: Seconds, monotonic, like every later time.
    """

    def __init__(self, extent_bytes: int, block_bytes: int, now: float) -> None:
        self.mapping = Slice(extent_bytes, SLICE_BYTES)
        self.unmapping = Slice(extent_bytes, UNMAP_SLICE_BYTES)
        self.copying = Slice(block_bytes, SLICE_BYTES)
        self.alone = True  # no steps ran recently before the one that is being prepared
        self.used_at = now  # the last time that a request was here
        self._block_bytes = block_bytes
        self._in_use = False  # a request is here in the step that is being prepared
        self._began_at = self._ended_at = -math.inf  # of the last step
        # Of the last steps that only computed: seconds, and those besides computing
        self._plain: deque[tuple[float, float]] = deque(maxlen=16)
        self._seen = 0, 0, 0.0  # the scheduler's counters after the last step: tokens, moved blocks, computing seconds

    def begin(self, now: float, *, in_use: bool) -> None:
        """Record that a step is being prepared, with requests if `in_use`."""
        self.alone = now - self._ended_at >= _ALONE_S
        self._began_at, self._in_use = now, in_use

    def end(self, now: float, stats: Stats, *, waited_for: bool, mapped_bytes: int) -> None:
        """Record that a step is done. One that no caller has `waited_for` does not count as a recent step.

        Args:
            stats: The scheduler's counters.
            mapped_bytes: The change of the pool's size in this step.
        """
        step_s = now - max(self._began_at, self._ended_at)  # a step launched ahead has no `begin`
        if waited_for:
            self._ended_at = now
        if self._in_use:
            self.used_at = now
        tokens, moved_blocks, seconds = self._seen
        self._seen = stats.computed_tokens, stats.moved_blocks, stats.computing_s
        moved_bytes = (stats.moved_blocks - moved_blocks) * self._block_bytes
        computing_s = stats.computing_s - seconds
        other_s = max(0.0, step_s - computing_s)
        if self.alone or stats.computed_tokens == tokens:
            return
        if not moved_bytes and not mapped_bytes:
            self._plain.append((step_s, other_s))
            return
        plain_s, plain_other_s = computing_s, 0.0  # while the time of a plain step is not known
        if self._plain:
            plain_s, plain_other_s = (statistics.median(times) for times in zip(*self._plain, strict=True))
        if plain_s > 0 and moved_bytes:
            self.copying.record(moved_bytes, other_s - plain_other_s, plain_s)
        elif plain_s > 0 and mapped_bytes > 0:
            self.mapping.record(mapped_bytes, other_s - plain_other_s, plain_s)
        elif plain_s > 0:
            self.unmapping.record(-mapped_bytes, other_s - plain_other_s, plain_s)
