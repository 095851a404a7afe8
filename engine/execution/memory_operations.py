"""What a plan does to the pool's memory before and beside its chunks: extents come and go, blocks are copied and swapped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ...allocator.arena import Arena
from ...allocator.errors import BlockMisuse
from ...cache.block_table import BlockCopies, Index, Int32
from ...cache.host_tier import Swaps
from ...cache.storage import Storage
from ...scheduler.plan import NO_EXTENTS, NO_TOKENS, Plan
from .host_pool import Copies, HostPool, Swapped

log = logging.getLogger(__name__)

_TRIES = 2  # of a copy: it is the same however often it is done, as nothing changes its sources before it is over


class Swap:
    """Copies to and from the host tier, which go on beside the caller. Copies that raise are begun again, once.

    `begin` begins them, to `slots` and to `blocks`.
    """

    def __init__(self, begin: Callable[[], Copies], slots: Int32, blocks: Int32) -> None:
        self.slots = slots
        self.blocks = blocks
        self._begin = begin
        self._copies: Copies | None = None  # None: they could not be begun, or have raised
        self._left = _TRIES
        self._ensure(lambda copies: None)

    def fence(self) -> None:
        """What is queued on the device's current stream from here on runs behind the copies, unless they have failed."""
        self._ensure(lambda copies: copies.fence())

    def wait(self) -> Swapped | None:
        """What became of the copies, once they are over; None where they have failed."""
        found: list[Swapped] = []
        self._ensure(lambda copies: found.append(copies.wait()))
        return found[0] if found else None

    def _ensure(self, use: Callable[[Copies], None]) -> None:
        while self._copies is not None or self._left:
            try:
                if self._copies is None:
                    self._left -= 1
                    self._copies = self._begin()
                return use(self._copies)
            except BlockMisuse:
                raise
            except Exception:
                self._copies = None
                log.exception("%d blocks could not be swapped", len(self.slots) + len(self.blocks))


@dataclass(slots=True)
class MemoryOperations:
    """What became of a plan's part about memory, as far as it is known. Mutated until `done`."""

    mapped: Index = field(default_factory=lambda: NO_EXTENTS)
    unmapped: Index = field(default_factory=lambda: NO_EXTENTS)
    refused: str | None = None
    swaps: list[Swap] = field(default_factory=list)  # under way
    failed_blocks: list[Int32] = field(default_factory=list)  # targets of copies that have failed
    failed_slots: list[Int32] = field(default_factory=list)

    def fence(self) -> None:
        """Put the swaps before whatever is queued on the device from here on."""
        for swap in self.swaps:
            swap.fence()

    def done(self) -> list[Swapped]:
        """What became of the swaps. All of them are waited for, an interrupt notwithstanding."""
        swapped: list[Swapped] = []
        interrupt: BaseException | None = None
        for swap in self.swaps:
            try:
                found = swap.wait()
            except BaseException as error:
                interrupt = error
                found = None
            if found is None:
                self.failed_blocks.append(swap.blocks)
                self.failed_slots.append(swap.slots)
            else:
                swapped.append(found)
        if interrupt is not None:
            raise interrupt
        return swapped


class MemoryExecutor:
    """Carries out what plans say about memory: extents mapped, blocks swapped out and copied, extents unmapped, in that order.

    Without `arena`, what `storage` was built over, no plan may resize the pool; without `host` none may swap.
    """

    def __init__(self, storage: Storage, arena: Arena | None, host: HostPool | None) -> None:
        self._storage = storage
        self._arena = arena
        self._host = host

    def begin(self, plan: Plan, moves: MemoryOperations) -> None:
        """Do what the plan's chunks depend on; begin the swaps that go beside them. What is done stands in `moves`, also where
        this raises.

        The device is idle while extents change: under a kernel that runs, a mapping that comes or goes may be a fault.
        """
        resize, arena, swaps = plan.resize, self._arena, plan.swaps
        if resize and arena is None:
            raise BlockMisuse("a runner without an arena cannot resize the pool")
        if swaps is not None and self._host is None:
            raise BlockMisuse("a runner without a host tier cannot swap")
        if arena is not None and len(resize.map):
            self._wait_for_device()
            moves.refused = _refusal(arena.map, resize.map)
            moves.mapped = NO_EXTENTS if moves.refused else resize.map
        if swaps is not None:
            self._swap_before(swaps, moves)
        if plan.copies is not None:
            self._copy(plan.copies, moves)
        if arena is not None and len(resize.unmap):
            self._wait_for_device()  # the copies read there
            moves.refused = _refusal(arena.unmap, resize.unmap) or moves.refused
            moves.unmapped = resize.unmap[~np.isin(resize.unmap, list(arena.mapped_extents))]
        if swaps is not None and swaps.any_beside:
            self._swap(swaps, slice(swaps.num_before, None), moves, swaps.in_slots, swaps.in_blocks)

    def _swap_before(self, swaps: Swaps, moves: MemoryOperations) -> None:
        """Copy out what has to leave first, and what is wanted again already to its new place."""
        if swaps.num_before:
            self._swap(swaps, slice(swaps.num_before), moves)
            moves.swaps[-1].fence()
        if swaps.back is not None:
            self._copy(swaps.back, moves)

    def _swap(
        self,
        swaps: Swaps,
        out: slice,
        moves: MemoryOperations,
        in_slots: Int32 = NO_TOKENS,
        in_blocks: Int32 = NO_TOKENS,
    ) -> None:
        assert self._host is not None
        blocks, slots = swaps.out_blocks[out], swaps.out_slots[out]
        begin = partial(self._host.begin, self._storage, blocks, slots, in_slots, in_blocks)
        moves.swaps.append(Swap(begin, slots, in_blocks))

    def _copy(self, copies: BlockCopies, moves: MemoryOperations) -> None:
        for _ in range(_TRIES):
            try:
                return self._storage.copy(copies.sources, copies.targets)
            except BlockMisuse:
                raise
            except Exception:
                log.exception("%d blocks could not be copied", len(copies.sources))
        moves.failed_blocks.append(copies.targets)

    def _wait_for_device(self) -> None:
        """Until all is done that may touch the arena: what is queued on the current stream, swaps behind their fence. A CPU has
        done it.

        Not for the device as a whole: others may be at work there, and a capture that another engine makes would break.
        """
        if self._storage.device.type == "cuda":
            torch.cuda.current_stream(self._storage.device).synchronize()


def joined(ids: Sequence[Int32]) -> Int32:
    """All of `ids` in one array."""
    return np.concatenate([NO_TOKENS, *ids])


def _refusal(change: Callable[[Sequence[int]], None], extents: Index) -> str | None:
    """Let the arena map or unmap `extents`. Returns what the device said against it; None when it was done.

    Raises BlockMisuse: then the scheduler's books differ from what is mapped, and no step can be right.
    """
    try:
        change(extents.tolist())
    except BlockMisuse:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        log.warning("the device refused to %s %d extents: %s", change.__name__, len(extents), told)
        return told
    return None
