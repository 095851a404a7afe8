"""The recall of half of a well-filled pool, bit by bit, as `vram-monitor recall` does it, until the pool may grow again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..common.units import format_bytes

if TYPE_CHECKING:
    from ..pressure import PrivateDevice

FILLED = 0.7  # share of the pool's blocks in use when half of them is recalled
MOST_RECALLS = 5  # until a part of the memory is back
PARTS = 4  # in which the half is recalled, so that the map is seen to drain
PART_S = 0.4


@dataclass(frozen=True, slots=True)
class RecallResult:
    """Bytes of the pool before and after the recall, given back to the system in the run, and grown after the recall."""

    recalls: int
    before_bytes: int
    after_bytes: int
    given_back_bytes: int
    grown_bytes: int

    @property
    def share(self) -> float:
        """The share of the pool that was taken."""
        return 1 - self.after_bytes / self.before_bytes if self.before_bytes else 0.0


class PoolRecall:
    """The course of a recall beside a run. `advance` it between steps; it never waits."""

    def __init__(self, device: PrivateDevice, most_blocks: int) -> None:
        self.now = ""  # what happens, for the display
        self.is_taking = False  # whether the pool is being kept small
        self.is_over = False
        self._device, self._most_blocks = device, most_blocks
        self._largest = self._smallest = self._grown_before = 0
        self._stats: dict[str, Any] = {}
        self._course = self._run()

    def advance(self, stats: dict[str, Any]) -> None:
        """Go on as far as possible, by the engine's statistics of now."""
        self._stats = stats
        self._smallest = min(self._smallest, self._memory["kv_bytes"])
        self.now = next(self._course, "")
        self.is_over = not self.now
        self.is_taking = self.is_taking and not self.is_over

    def result(self, stats: dict[str, Any]) -> RecallResult:
        """What happened, by the statistics at the end."""
        memory = stats["memory"]
        grown = memory["grown_bytes"] - self._grown_before
        return RecallResult(memory["recalls"], self._largest, self._smallest, memory["given_back_bytes"], grown)

    @property
    def _memory(self) -> dict[str, Any]:
        memory: dict[str, Any] = self._stats["memory"]
        return memory

    def _run(self) -> Iterator[str]:
        from ..allocator.errors import LeaseRefused
        from ..allocator.lease_policy import Rules

        while not self._is_filled():
            yield "The pool fills: each request gets blocks as it grows."
        self._grown_before = self._memory["grown_bytes"]
        self.is_taking = True
        try:
            for part in range(1, PARTS + 1):
                yield from self._take_down_to(self._largest - self._largest * part // (2 * PARTS))
        except LeaseRefused:  # the lease is at its minimum
            pass
        until = time.monotonic() + Rules.of(self._device.capacity_bytes).cooldown_s
        while time.monotonic() < until:
            yield "Half of the pool is taken: some requests lose their blocks and wait."

    def _take_down_to(self, target_bytes: int) -> Iterator[str]:
        """Recall until the pool has `target_bytes`, for at least PART_S. Raises LeaseRefused at the lease's minimum."""
        until = time.monotonic() + PART_S
        now = f"RECALL: half of the pool, {format_bytes(self._largest // 2)}, must go back to the system."
        for _ in range(MOST_RECALLS):  # the first recall is answered with memory that libraries cache
            if (over_bytes := self._memory["kv_bytes"] - target_bytes) <= 0:
                break
            self._device.client.recall(self._memory["lease"]["name"], over_bytes)
            yield now
            while any(lease.state != "ok" for lease in self._device.leases()):
                yield now
        while time.monotonic() < until:
            yield now

    def _is_filled(self) -> bool:
        """Whether more blocks are in use than will be left, or no request remains that could use more."""
        self._largest = self._smallest = max(self._largest, self._memory["kv_bytes"])
        live = self._stats["blocks"]["live"]
        return bool(live > FILLED * self._most_blocks or not (self._stats["running"] or self._stats["waiting"]))
