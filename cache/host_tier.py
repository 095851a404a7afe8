"""The slots of the host tier: free slots, the tails of waiting sequences, and the copies that the next plan must do.

A slot is a place in host memory for the bytes of one block. The copies of a plan are done in this order:

    out    block -> slot     the block is reused in the very same plan
    back   block -> block    a block that was to leave, and was needed again before it had
    in     slot -> block     the slot is free for the plans after this one

Copies that a plan's own chunks depend on are done before the chunks. The others run concurrently with them: copies in,
and copies out of blocks that their new owner uses from the next plan on.

A slot that a plan reads is written by a later plan at the earliest. Of two copies to a slot only the last is pending.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..allocator.blocks import BlockIds
from .block_table import BlockCopies, Int32

_NONE: Int32 = np.empty(0, np.int32)
_NONE.flags.writeable = False


@dataclass(frozen=True, slots=True, eq=False)
class Swaps:
    """Whole blocks that a step copies out, back and in, in this order, each kind as if at once.

    The first `num_before` copies out, and those back, must be done before the step's chunks, the others by the step's end.
    """

    out_blocks: Int32
    out_slots: Int32
    in_slots: Int32
    in_blocks: Int32
    back: BlockCopies | None = None
    num_before: int = 0

    @property
    def any_beside(self) -> bool:
        """Whether some copies may run concurrently with the chunks."""
        return len(self.out_slots) > self.num_before or len(self.in_slots) > 0


@dataclass(frozen=True, slots=True, eq=False)
class HostTail:
    """`slots` hold the last, partly filled block of the first `num_tokens` tokens of a sequence, one per table, and then the
    blocks of the state behind these tokens, if layers have some.
    """

    slots: Int32
    num_tokens: int


class HostTier:
    """The slots `1 .. capacity`; slot 0 is never used. `Swapping` mutates the tier.

    `num_slots` of them are in service: not those for which there is no memory. `tails` are those of waiting sequences,
    by name. While the tier is `resting` no block is demoted.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"a host tier has 0 slots or more, got {capacity}")
        self.least_chance = 0.0
        self.promotes = True
        self.resting = False
        self.tails: dict[str, HostTail] = {}
        self.capacity = capacity  # includes retired slots
        self.num_owed = 0  # copies since the start, including cancelled ones
        self._leaving = np.zeros(capacity + 1, np.int32)  # the block that will be copied to each slot; 0: none
        # Of pending copies out: whether no chunk of the next plan touches the block.
        self._beside = np.zeros(capacity + 1, np.bool_)
        self._any_leaving = False
        self._ins: list[tuple[Int32, Int32]] = []
        # Copies in that leave their slots in use, and those of these slots that were freed since.
        self._reads: list[tuple[Int32, Int32]] = []
        self._is_read = np.zeros(capacity + 1, np.bool_)
        self._freed: list[Int32] = []
        self._back: list[tuple[Int32, Int32]] = []
        self._put: list[Int32] = []
        self._withheld: list[weakref.ref[npt.NDArray[np.uint8]]] = []
        self._give_all()

    def _give_all(self) -> None:
        """Make all slots available, free and never used."""
        self.num_slots = self.num_free = self.capacity
        self._free = np.arange(self.capacity, 0, -1, dtype=np.int32)  # a stack: the first `num_free`
        self._highest = 0  # highest slot ever used

    @property
    def num_used(self) -> int:
        """Slots that hold something or are about to."""
        return self.num_slots - self.num_free

    @property
    def num_withheld(self) -> int:
        """Slots for which the host has no memory yet, as bytes of sequences that were suspended lie there."""
        return sum(len(store) for one in self._withheld if (store := one()) is not None)

    @property
    def num_available(self) -> int:
        """Free slots that may be taken."""
        return max(0, self.num_free - self.num_withheld)

    @property
    def demotes(self) -> bool:
        """Whether there are slots, and demoting a block that is certain to be used again is worth it now."""
        return self.least_chance < 1 and self.num_slots > 0 and not self.resting

    @property
    def copy_share(self) -> float:
        """The time to copy a block one way, of the time to compute its tokens."""
        return self.least_chance / (1 + self.least_chance)

    def withhold(self, stores: Iterable[npt.NDArray[np.uint8]]) -> None:
        """Let as many slots stay free as `stores` [n, payload_bytes] have blocks, for as long as each is referred to."""
        self._withheld = [weakref.ref(store) for store in stores]

    def take(self, n: int) -> Int32:
        """Take `n` slots, which must be free; slots used before come first."""
        if n > self.num_free:
            raise ValueError(f"{n} slots are asked for, {self.num_free} are free")
        slots = self._free[self.num_free - n : self.num_free][::-1].copy()
        self.num_free -= n
        self._highest = max(self._highest, int(slots.max(initial=0)))
        return slots

    def free(self, slots: Int32) -> None:
        """Free `slots`, once the next plan has read those that it is to; pending copies to them are cancelled."""
        self._leaving[slots] = 0
        if self._reads:
            is_read = self._is_read[slots]
            self._freed.append(slots[is_read])
            slots = slots[~is_read]
        self._free[self.num_free : self.num_free + len(slots)] = slots
        self.num_free += len(slots)

    def retire(self, slots: Int32) -> None:
        """Remove the free `slots`, for which there is no memory, and all slots never used so far."""
        free = self._free[: self.num_free]
        kept = free[(free <= self._highest) & ~np.isin(free, slots)]
        self.num_slots -= self.num_free - len(kept)
        self.num_free = len(kept)
        self._free[: len(kept)] = kept

    def rest(self) -> None:
        """Stop the use of the tier, which must be empty, until `resting` is reset.

        All slots are available again, including retired ones: there may be memory for them by then.
        """
        if self.num_used or self._ins or self._reads:
            raise ValueError(f"{self.num_used} slots are in use: a tier rests only when it is empty")
        self._give_all()
        self.resting = True

    def queue_swap_out(self, blocks: Int32, slots: Int32, beside: bool = False) -> None:
        """Let the next plan copy `blocks` to `slots`. `blocks` say where the bytes are now.

        `beside`: concurrently with the plan's chunks, none of which touches these blocks.
        """
        self._leaving[slots] = blocks
        self._beside[slots] = beside
        self._any_leaving = True
        self.num_owed += len(slots)

    def queue_swap_in(self, slots: Int32, blocks: Int32, keeps: bool = False) -> None:
        """Let the next plan copy `slots` to `blocks`. The slots are free once a plan contains the copy, unless they `keeps`
        their contents.
        """
        self.num_owed += len(slots)
        leaving = self._leaving[slots]
        early = leaving != 0
        if early.any():
            self._back.append((leaving[early], blocks[early]))
            if not keeps:
                self.free(slots[early])  # nothing was written there yet
            slots, blocks = slots[~early], blocks[~early]
        if keeps:
            self._is_read[slots] = True
        (self._reads if keeps else self._ins).append((slots, blocks))

    def note_put(self, blocks: BlockIds) -> None:
        """The next plan puts bytes from elsewhere into `blocks`, behind its copies out that are done before its chunks."""
        self._put.append(blocks)

    def are_put(self, blocks: BlockIds) -> npt.NDArray[np.bool_]:
        """Into which of `blocks` the next plan puts bytes from elsewhere: it cannot copy these out."""
        are_put: npt.NDArray[np.bool_] = np.isin(blocks, np.concatenate([_NONE, *self._put]))
        return are_put

    def owed(self, blocks: BlockIds) -> Int32:
        """Slots to which the next plan copies one of `blocks`."""
        return np.flatnonzero(np.isin(self._leaving, blocks) & (self._leaving != 0)).astype(np.int32)

    def leaving(self, slots: Int32) -> Int32:
        """The block that the next plan copies to each of `slots`; 0: the slot has its bytes."""
        return self._leaving[slots]

    def is_arriving(self, blocks: BlockIds) -> bool:
        """Whether the next plan copies to one of `blocks`."""
        return any(bool(np.isin(blocks, targets).any()) for _, targets in (*self._ins, *self._reads, *self._back))

    def take_swaps(self, alone: bool = True) -> Swaps | None:
        """The copies of the plan that is being made, or None.

        Unless `alone`, the plan moves blocks or extents as well; then all copies out are done before its chunks. So they are if
        it puts bytes into blocks, which may be those that are copied out.
        """
        put, self._put = self._put, []
        if not (self._any_leaving or self._ins or self._reads):
            return None
        out_slots = np.flatnonzero(self._leaving).astype(np.int32)
        beside = self._beside[out_slots] & (alone and not self._back and not put)
        out_slots = np.concatenate((out_slots[~beside], out_slots[beside]))
        out_blocks = self._leaving[out_slots]
        self._leaving[out_slots] = 0
        freed, (in_slots, in_blocks) = [slots for slots, _ in self._ins] + self._freed, _joined(self._ins + self._reads)
        back = BlockCopies(*_joined(self._back)) if self._back else None
        self._is_read[in_slots] = False
        self._ins, self._reads, self._freed, self._back, self._any_leaving = [], [], [], [], False
        for slots in freed:
            self.free(slots)
        if not (len(out_slots) or len(in_slots) or back):
            return None  # all copies were cancelled
        return Swaps(out_blocks, out_slots, in_slots, in_blocks, back, int(np.count_nonzero(~beside)))

    def check_invariants(self, findable: Int32) -> None:
        """Check that every slot is exactly one of free, findable, a tail or about to be read. Raises AssertionError."""
        free = self._free[: self.num_free].tolist()
        read = [slot for slots in (*[slots for slots, _ in self._ins], *self._freed) for slot in slots.tolist()]
        held = [*findable.tolist(), *(slot for tail in self.tails.values() for slot in tail.slots.tolist()), *read]
        assert len({*free, *held}) == len(free) + len(held) == self.num_slots, "a slot is lost, or twice in use"
        assert not self._leaving[free].any(), "a copy to a free slot is queued"
        assert not self._leaving[read].any(), "a slot is to be read and written"


def _joined(pairs: list[tuple[Int32, Int32]]) -> tuple[Int32, Int32]:
    if not pairs:
        return _NONE, _NONE
    return np.concatenate([first for first, _ in pairs]), np.concatenate([second for _, second in pairs])
