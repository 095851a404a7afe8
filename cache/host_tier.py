"""The host tier's slots: which are free, which hold the end of a sequence that waits, and which copies the next plan owes.

A slot is a place in host memory for the bytes of one block. What is findable in it the prefix index knows; here is who may
have one, and when. The copies of a plan are done in this order:

    out    block -> slot     the block is reused in the very same plan
    back   block -> block    what was to leave, and was wanted again before it had
    in     slot -> block     the slot is free for the plans after this one

Those that a plan's own chunks depend on are done before them, the others beside them: copies in, and those out of blocks whose
new owner is seated and computes from the next plan on. Nobody else's chunk reads or writes these blocks.

A slot therefore takes bytes in one plan at the earliest after the plan that reads it for somebody: no copy out can destroy
what a copy in of the same plan still reads. Only the last one of two copies to a slot is owed. Pure logic, no memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..allocator.blocks import BlockIds
from .block_table import BlockCopies, Int32

_NONE: Int32 = np.empty(0, np.int32)
_NONE.flags.writeable = False


@dataclass(frozen=True, slots=True, eq=False)
class Swaps:
    """Whole blocks that a step copies out, back and in, in this order, each kind as if at once. Plain data.

    The first `num_before` of those out, and those back, are to be done before the step's chunks, the others when it is over.
    """

    out_blocks: Int32
    out_slots: Int32
    in_slots: Int32
    in_blocks: Int32
    back: BlockCopies | None = None
    num_before: int = 0

    @property
    def any_beside(self) -> bool:
        """Whether there are copies that may be done beside the chunks."""
        return len(self.out_slots) > self.num_before or len(self.in_slots) > 0


@dataclass(frozen=True, slots=True)
class HostTail:
    """What lies in `slot`: the last, partly filled block of the first `num_tokens` tokens of a sequence."""

    slot: int
    num_tokens: int


class HostTier:
    """The slots `1 .. num_slots`; 0 is nobody's, as the null block. `Swapping` mutates it.

    Whoever knows what copies take sets the chance of being wanted again from which bringing a block here is worth it at
    present, `least_chance` (1 or more: never), and whether bringing it back is, `promotes`. `tails` are those of sequences that
    wait, by the sequence's name. While it is `resting` nothing comes here.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a host tier needs at least 1 slot, got {num_slots}")
        self.least_chance = 0.0
        self.promotes = True
        self.resting = False
        self.tails: dict[str, HostTail] = {}
        self._num_given = num_slots  # those included that were retired
        self.num_owed = 0  # copies since the start, those that were called off included
        self._leaving = np.zeros(num_slots + 1, np.int32)  # the block whose bytes a slot is owed; 0: none
        self._beside = np.zeros(
            num_slots + 1, np.bool_
        )  # of what leaves: whether no chunk of the next plan touches the block
        self._any_leaving = False
        self._ins: list[tuple[Int32, Int32]] = []
        self._back: list[tuple[Int32, Int32]] = []
        self._give_all()

    def _give_all(self) -> None:
        """All slots are there, free, and nobody ever had one."""
        self.num_slots = self.num_free = self._num_given
        self._free = np.arange(self._num_given, 0, -1, dtype=np.int32)  # a stack: the first `num_free`
        self._highest = 0  # slot that anybody had

    @property
    def num_used(self) -> int:
        """Slots that hold something, or are about to."""
        return self.num_slots - self.num_free

    @property
    def demotes(self) -> bool:
        """Whether what is wanted again for certain is worth bringing here now."""
        return self.least_chance < 1 and not self.resting

    def take(self, n: int) -> Int32:
        """`n` slots, which must be free; those that somebody had before first."""
        if n > self.num_free:
            raise ValueError(f"{n} slots are asked for, {self.num_free} are free")
        slots = self._free[self.num_free - n : self.num_free][::-1].copy()
        self.num_free -= n
        self._highest = max(self._highest, int(slots.max(initial=0)))
        return slots

    def free(self, slots: Int32) -> None:
        """Nobody needs what lies in `slots`, or was to come there."""
        self._leaving[slots] = 0
        self._free[self.num_free : self.num_free + len(slots)] = slots
        self.num_free += len(slots)

    def retire(self, slots: Int32) -> None:
        """There is no memory for `slots`, which are free: neither for them nor for those that nobody had yet."""
        free = self._free[: self.num_free]
        kept = free[(free <= self._highest) & ~np.isin(free, slots)]
        self.num_slots -= self.num_free - len(kept)
        self.num_free = len(kept)
        self._free[: len(kept)] = kept

    def rest(self) -> None:
        """Nothing lies here, and nothing comes until `resting` is undone. Then slots are given as at the start, those that were
        retired included: there may be memory for them again.
        """
        if self.num_used or self._ins:
            raise ValueError(f"{self.num_used} slots are in use: a tier rests only when it is empty")
        self._give_all()
        self.resting = True

    def queue_swap_out(self, blocks: Int32, slots: Int32, beside: bool = False) -> None:
        """The next plan copies `blocks`, where the bytes are now, to `slots`; `beside` its chunks, if none of them touches
        these blocks.
        """
        self._leaving[slots] = blocks
        self._beside[slots] = beside
        self._any_leaving = True
        self.num_owed += len(slots)

    def queue_swap_in(self, slots: Int32, blocks: Int32) -> None:
        """The next plan copies `slots` to `blocks`. They are free once a plan has taken that over."""
        self.num_owed += len(slots)
        leaving = self._leaving[slots]
        early = leaving != 0
        if early.any():
            self._back.append((leaving[early], blocks[early]))
            self.free(slots[early])  # nothing was written there yet
            slots, blocks = slots[~early], blocks[~early]
        self._ins.append((slots, blocks))

    def owed(self, blocks: BlockIds) -> Int32:
        """Slots to which the next plan copies one of `blocks`. Read-only."""
        return np.flatnonzero(np.isin(self._leaving, blocks) & (self._leaving != 0)).astype(np.int32)

    def is_arriving(self, blocks: BlockIds) -> bool:
        """Whether the next plan copies to one of `blocks`. Read-only."""
        return any(bool(np.isin(blocks, targets).any()) for _, targets in (*self._ins, *self._back))

    def take_swaps(self, alone: bool = True) -> Swaps | None:
        """What the plan that is being made copies; None where nothing. Plans are executed in the order they are made.

        Unless `alone`, the plan moves blocks or extents as well: then all that leaves does so before its chunks.
        """
        if not (self._any_leaving or self._ins):
            return None
        out_slots = np.flatnonzero(self._leaving).astype(np.int32)
        beside = self._beside[out_slots] & (alone and not self._back)
        out_slots = np.concatenate((out_slots[~beside], out_slots[beside]))
        out_blocks = self._leaving[out_slots]
        self._leaving[out_slots] = 0
        in_slots, in_blocks = _joined(self._ins)
        back = BlockCopies(*_joined(self._back)) if self._back else None
        self._ins, self._back, self._any_leaving = [], [], False
        self.free(in_slots)
        if not (len(out_slots) or len(in_slots) or back):
            return None  # all was called off
        return Swaps(out_blocks, out_slots, in_slots, in_blocks, back, int(np.count_nonzero(~beside)))

    def check_invariants(self, findable: Int32) -> None:
        """Every slot is free, findable, a tail or about to be read, and only one of these. Raises AssertionError."""
        free = self._free[: self.num_free].tolist()
        read = [slot for slots, _ in self._ins for slot in slots.tolist()]
        held = [*findable.tolist(), *(tail.slot for tail in self.tails.values()), *read]
        assert len({*free, *held}) == len(free) + len(held) == self.num_slots, "a slot is lost, or twice in use"
        assert not self._leaving[free].any(), "a copy to a slot that nobody needs is owed"
        assert not self._leaving[read].any(), "a slot is to be read and written"


def _joined(pairs: list[tuple[Int32, Int32]]) -> tuple[Int32, Int32]:
    if not pairs:
        return _NONE, _NONE
    return np.concatenate([first for first, _ in pairs]), np.concatenate([second for _, second in pairs])
