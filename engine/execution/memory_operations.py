"""A plan's memory operations: mapping, unmapping, block copies and swaps, before or concurrent with its chunks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ...allocator.arena import Arena
from ...allocator.errors import BlockMisuse
from ...cache.block_table import BlockBytes, BlockCopies, Index, Int32, joined
from ...cache.host_tier import Swaps
from ...cache.storage import Storage
from ...scheduler.plan import NO_EXTENTS, NO_TOKENS, Plan
from ..errors import Attempt
from .host_pool import Copies, HostPool, Swapped

log = logging.getLogger(__name__)

# Of a copy: it can be repeated, as its sources do not change before it is over
_TRIES = 2


class Swap:
    """Copies to and from the host tier, concurrent with the caller. Copies that raise are begun again, once.

    `begin` begins the copies, to `slots` and to `blocks`.
    """

    def __init__(self, begin: Callable[[], Copies], slots: Int32, blocks: Int32) -> None:
        self.slots = slots
        self.blocks = blocks
        self._begin = begin
        self._copies: Copies | None = None  # None: they could not begin, or have raised
        self._left = _TRIES
        self._ensure(lambda copies: None)

    def fence(self) -> None:
        """Order work queued on the device's current stream from here on after the copies, unless they have failed."""
        self._ensure(lambda copies: copies.fence())

    def wait(self) -> Swapped | None:
        """The result of the copies, once they are over; None if they failed."""
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
    """The results of a plan's memory operations so far. Mutated until `done`."""

    mapped: Index = field(default_factory=lambda: NO_EXTENTS)
    unmapped: Index = field(default_factory=lambda: NO_EXTENTS)
    refused: str | None = None
    swaps: list[Swap] = field(default_factory=list)  # in progress
    failed_blocks: list[Int32] = field(default_factory=list)  # targets of failed copies
    failed_slots: list[Int32] = field(default_factory=list)

    def fence(self) -> None:
        """Order device work queued from here on after the swaps."""
        for swap in self.swaps:
            swap.fence()

    def done(self) -> list[Swapped]:
        """Wait for all swaps and return their results. Raises only after all of them."""
        swapped: list[Swapped] = []
        raised: BaseException | None = None
        for swap in self.swaps:
            found: Swapped | None = None
            with Attempt() as attempt:
                found = swap.wait()
            raised = attempt.error or raised
            if found is None:
                self.failed_blocks.append(swap.blocks)
                self.failed_slots.append(swap.slots)
            else:
                swapped.append(found)
        if raised is not None:
            raise raised
        return swapped


class MemoryExecutor:
    """Executes the memory operations of plans, in this order: map extents, swap out blocks, put in what was read from disk,
    copy blocks, unmap extents.

    Args:
        arena: The arena that `storage` was built over. Without it no plan may resize the pool.
        host: Without it no plan may swap.
    """

    def __init__(self, storage: Storage, arena: Arena | None = None, host: HostPool | None = None) -> None:
        self.storage = storage
        self.arena = arena
        self.host = host

    def begin(self, plan: Plan, moves: MemoryOperations) -> None:
        """Do what the plan's chunks depend on, and begin the concurrent swaps. `moves` has the completed operations even if
        this raises.

        The device is idle while extents change: a mapping that changes under a running kernel may fault.
        """
        resize, arena, swaps = plan.resize, self.arena, plan.swaps
        if resize and arena is None:
            raise BlockMisuse("a runner without an arena cannot resize the pool")
        if swaps is not None and self.host is None:
            raise BlockMisuse("a runner without a host tier cannot swap")
        if arena is not None and len(resize.map):
            self._wait_for_device()
            moves.refused = _refusal(arena.map, resize.map)
            moves.mapped = NO_EXTENTS if moves.refused else resize.map
        if swaps is not None and swaps.num_before:
            self._swap(swaps, slice(swaps.num_before), moves)
            moves.swaps[-1].fence()
        back, held = None if swaps is None else swaps.back, None
        if plan.reads and back is not None:  # reads and copies may go where these bytes are, or read where they go
            held = self._hold(back, moves)
            back = None
        for read in plan.reads:
            self._put(read, plan.copies, moves)
        if (together := joined([one for one in (back, plan.copies) if one is not None])) is not None:
            self._copy(together, moves)
        if held is not None:
            self._put(held, None, moves)
        if arena is not None and len(resize.unmap):
            self._wait_for_device()  # the copies read from these extents
            moves.refused = _refusal(arena.unmap, resize.unmap) or moves.refused
            moves.unmapped = resize.unmap[~np.isin(resize.unmap, list(arena.mapped_extents))]
        if swaps is not None and swaps.any_beside:
            self._swap(swaps, slice(swaps.num_before, None), moves, swaps.in_slots, swaps.in_blocks)

    def _swap(
        self, swaps: Swaps, out: slice, moves: MemoryOperations, in_slots: Int32 = NO_TOKENS, in_blocks: Int32 = NO_TOKENS
    ) -> None:
        assert self.host is not None
        blocks, slots = swaps.out_blocks[out], swaps.out_slots[out]
        begin = partial(self.host.begin, self.storage, blocks, slots, in_slots, in_blocks)
        moves.swaps.append(Swap(begin, slots, in_blocks))

    def _hold(self, copies: BlockCopies, moves: MemoryOperations) -> BlockBytes | None:
        """The bytes of the sources, for the targets; None if they cannot be read."""
        try:
            return BlockBytes(copies.targets, self.storage.read(copies.sources))
        except BlockMisuse:
            raise
        except Exception:
            log.exception("%d blocks could not be copied", len(copies.sources))
            moves.failed_blocks.append(copies.targets)
            return None

    def _put(self, read: BlockBytes, copies: BlockCopies | None, moves: MemoryOperations) -> None:
        try:
            self.storage.put(read.blocks, read.data)
        except BlockMisuse:
            raise
        except Exception:
            log.exception("%d blocks could not be written", len(read.blocks))
            moves.failed_blocks.append(read.blocks)
            if copies is not None:
                moves.failed_blocks.append(copies.targets[np.isin(copies.sources, read.blocks)])

    def _copy(self, copies: BlockCopies, moves: MemoryOperations) -> None:
        for _ in range(_TRIES):
            try:
                return self.storage.copy(copies.sources, copies.targets)
            except BlockMisuse:
                raise
            except Exception:
                log.exception("%d blocks could not be copied", len(copies.sources))
        moves.failed_blocks.append(copies.targets)

    def _wait_for_device(self) -> None:
        """Wait for all work that may touch the arena: the current stream, which includes fenced swaps. A CPU has none.

        It does not synchronize the whole device: other streams may be busy, and another engine's graph capture would break.
        """
        if self.storage.device.type == "cuda":
            torch.cuda.current_stream(self.storage.device).synchronize()


def concatenated(ids: Sequence[Int32]) -> Int32:
    """All of `ids` in one array."""
    return np.concatenate([NO_TOKENS, *ids]) if ids else NO_TOKENS


def _refusal(change: Callable[[Sequence[int]], None], extents: Index) -> str | None:
    """Let the arena map or unmap `extents`. Returns the device's error as text; None on success.

    Raises BlockMisuse: the scheduler's accounts differ from what is mapped, so no step can be right.
    """
    try:
        change(extents.tolist())
    except BlockMisuse:
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        log.warning("the device refused to %s %d extents: %s", change.__name__, len(extents), message)
        return message
    return None
