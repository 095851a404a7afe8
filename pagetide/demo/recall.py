"""The recall of half of a well-filled pool, bit by bit, as `vram-monitor recall` does it, until the pool may grow again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..common.units import format_bytes
from .engines import SAMPLE_S, DemoEngine

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
    """The course of a recall. `run` it beside the requests, while `engine.look` is called."""

    def __init__(self, engine: DemoEngine, device: PrivateDevice, most_blocks: int) -> None:
        self.now = "The pool fills: each request gets blocks as it grows."  # what happens, for the display
        self.is_taking = False  # whether the pool is being kept small
        self._engine, self._device, self._most_blocks = engine, device, most_blocks
        self._largest = self._smallest = self._grown_before = 0

    def result(self) -> RecallResult:
        """What happened, by the engine's newest statistics."""
        memory = self._memory
        grown = memory["grown_bytes"] - self._grown_before
        return RecallResult(memory["recalls"], self._largest, self._smallest, memory["given_back_bytes"], grown)

    async def run(self) -> None:
        """Wait until the pool is filled, take half of it, and wait until the broker lets it grow again."""
        from ..allocator.errors import LeaseRefused
        from ..allocator.lease_policy import Rules

        while not self._is_filled():
            await asyncio.sleep(SAMPLE_S)
        self._grown_before = self._memory["grown_bytes"]
        self.is_taking = True
        self.now = f"RECALL: half of the pool, {format_bytes(self._largest // 2)}, must go back to the system."
        try:
            for part in range(1, PARTS + 1):
                await self._take_down_to(self._largest - self._largest * part // (2 * PARTS))
        except LeaseRefused:  # the lease is at its minimum
            pass
        self.now = "Half of the pool is taken: some requests lose their blocks and wait."
        until = time.monotonic() + Rules.of(self._device.capacity_bytes).cooldown_s
        while time.monotonic() < until:
            await self._look()
        self.is_taking = False
        self.now = "The memory comes back: the pool grows as requests need it."

    async def _take_down_to(self, target_bytes: int) -> None:
        """Recall until the pool has `target_bytes`, for at least PART_S. Raises LeaseRefused at the lease's minimum."""
        until = time.monotonic() + PART_S
        for _ in range(MOST_RECALLS):  # the first recall is answered with memory that libraries cache
            if (over_bytes := self._memory["kv_bytes"] - target_bytes) <= 0:
                break
            self._device.client.recall(self._memory["lease"]["name"], over_bytes)
            await self._look()
            while any(lease.state != "ok" for lease in self._device.leases()):
                await self._look()
        while time.monotonic() < until:
            await self._look()

    async def _look(self) -> None:
        await asyncio.sleep(SAMPLE_S)
        self._smallest = min(self._smallest, self._memory["kv_bytes"])

    @property
    def _memory(self) -> dict[str, Any]:
        memory: dict[str, Any] = self._engine.stats["memory"]
        return memory

    def _is_filled(self) -> bool:
        """Whether more blocks are in use than will be left, or no request remains that could use more."""
        if not self._engine.stats:
            return False
        self._largest = self._smallest = max(self._largest, self._memory["kv_bytes"])
        live = self._engine.stats["blocks"]["live"]
        return bool(live > FILLED * self._most_blocks or all(one.finish_reason for one in self._engine.outputs))
