"""Which blocks are worth a copy to the host tier: those that are likely enough to be wanted again.

A copy out pays where the chance that the block is wanted again x the seconds to compute it exceeds those of the copy out and,
again by that chance, of the copy in. So it pays from a least chance on (scheduler/cost.py). A block's own chance is

    1          while a preempted sequence waits that has computed it
    learned    else, apart for blocks that a request has found before and for those that none has

It is learned from blocks in the host tier. `won` are those that came back. When n of the tier's slots are taken, a part of
each block that lies there is `lost`: n / all slots. So one that lies there while the whole tier is taken once is lost. Before
anything is known a block used u times is used again with probability u / (u + 1) (the rule of succession); what is known
counts as no more than the last thousand blocks. What was found before is never less likely than what was not: whoever wants a
block wants those before it.

Where copies do not pay nothing would be learned any more, so what every 17th row leaves behind is demoted all the same.

Marks are kept by place, block or slot, and move with what lies there. They mean nothing for what cannot be found.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .block_table import Int32

SAMPLED_ROWS = 17  # one of so many; a prime, so that a load with a rhythm is met at every beat
RECENT_BLOCKS = 1024  # that what was learned weighs at most

_USES = np.array([1.0, 2.0])  # of a block that nobody has found, and that somebody has
UNLEARNED = (1 / 2, 2 / 3)  # the chances before anything is known

Mask = npt.NDArray[np.bool_]


class HostOffloadPolicy:
    """Marks of `num_blocks` blocks and of the slots up to `num_slots`, and what was learned from them.

    It is told what happens to findable blocks. A call is a few array operations over those it names.
    """

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self._first_slot = num_blocks
        self._wanted = np.zeros(num_blocks + num_slots + 1, np.int32)  # preempted sequences that wait for it
        self._found = np.zeros(num_blocks + num_slots + 1, np.bool_)  # by a request, before
        self._sampled = np.zeros(num_blocks, np.bool_)
        self._tried = np.zeros(num_slots + 1, np.bool_)  # slots of which something is learned
        self._num_tried = np.zeros(2)  # of these, by whether it was found before
        self._won = np.zeros(2)
        self._lost = np.zeros(2)
        self._num_rows = 0

    @property
    def chances(self) -> tuple[float, float]:
        """That a block is wanted again which no request has found, and one which some has."""
        new, found = (self._won + _USES) / (self._won + self._lost + _USES + 1)
        return float(new), float(max(new, found))

    def worth(self, blocks: Int32, least_chance: float) -> Mask:
        """Which of `blocks` are worth demoting. Read-only."""
        if least_chance >= 1:
            return np.zeros(len(blocks), np.bool_)
        new, found = self.chances
        if new > least_chance:
            return np.ones(len(blocks), np.bool_)
        worth: Mask = (self._wanted[blocks] > 0) | self._sampled[blocks]
        return worth | self._found[blocks] if found > least_chance else worth

    # -- blocks that can be found ------------------------------------------------------------------------------------

    def registered(self, blocks: Int32, slots: Int32) -> None:
        """`blocks` can be found from now on; the first of them were computed again, and lay in `slots` until now."""
        self._wanted[blocks] = 0
        self._found[blocks] = self._sampled[blocks] = False
        self.returned(slots, blocks[: len(slots)])

    def moved(self, sources: Int32, targets: Int32) -> None:
        """What lay in the blocks `sources` lies in `targets`."""
        self._take_marks(sources, targets)
        self._sampled[targets] = self._sampled[sources]

    def found(self, blocks: Int32) -> None:
        """A request found `blocks`."""
        self._found[blocks] = True

    def sample(self, num_rows: int) -> range:
        """Which of so many rows that are given up now are a sample: `left` is to have their blocks."""
        first = -(self._num_rows + 1) % SAMPLED_ROWS
        self._num_rows += num_rows
        return range(first, num_rows, SAMPLED_ROWS)

    def left(self, blocks: Int32) -> None:
        """A row of the sample had `blocks`: all of its chain, so that nothing of a sample stands behind what is none."""
        self._sampled[blocks] = True

    def wanted(self, blocks: Int32, slots: Int32, by: int) -> None:
        """`by` more sequences wait that have computed what lies in `blocks` and `slots`; fewer, where it is negative."""
        for places in (blocks, slots + self._first_slot):
            self._wanted[places] = np.maximum(self._wanted[places] + by, 0)

    # -- the host tier -----------------------------------------------------------------------------------------------

    def taking(self, num: int, num_slots: int) -> None:
        """`num` of the tier's `num_slots` slots are about to be taken: free ones, and what others lie in."""
        self._lost += self._num_tried * min(1.0, num / num_slots)
        self._fade()

    def demoted(self, blocks: Int32, slots: Int32) -> None:
        """What lay in `blocks` lies in `slots`."""
        self._take_marks(blocks, slots + self._first_slot)
        self._tried[slots] = self._wanted[blocks] == 0
        self._num_tried += self._by_kind(slots)

    def returned(self, slots: Int32, blocks: Int32) -> None:
        """What lay in `slots` lies in `blocks`, as somebody wanted it."""
        self._won += self._by_kind(slots)
        self._fade()
        self._take_marks(slots + self._first_slot, blocks)
        self._sampled[blocks] = False
        self.forgotten(slots)

    def forgotten(self, slots: Int32) -> None:
        """In `slots` nothing can be found any more."""
        self._num_tried -= self._by_kind(slots)
        self._tried[slots] = False
        self._wanted[slots + self._first_slot] = 0

    def check_invariants(self, findable: Int32, used_slots: Int32, hits: list[tuple[Int32, Int32]]) -> None:
        """Of what is findable, in blocks and slots; `hits` are the blocks and slots that each who waits finds.

        Raises AssertionError.
        """
        tried = np.flatnonzero(self._tried).astype(np.int32)
        assert np.isin(tried, used_slots).all(), "something is learned from a slot where nothing lies"
        assert (self._num_tried == self._by_kind(tried)).all(), "slots that are tried are miscounted"
        most = np.zeros_like(self._wanted)
        for blocks, slots in hits:
            most[blocks] += 1
            most[slots + self._first_slot] += 1
        places = np.concatenate((findable, used_slots + self._first_slot))
        assert (self._wanted[places] <= most[places]).all(), "something is wanted by one who does not wait"

    def _by_kind(self, slots: Int32) -> npt.NDArray[np.int64]:
        """How many of `slots` are tried, by whether they were found before."""
        kinds = self._found[slots[self._tried[slots]] + self._first_slot]
        return np.bincount(kinds, minlength=2)

    def _take_marks(self, sources: Int32, targets: Int32) -> None:
        self._wanted[targets] = self._wanted[sources]
        self._found[targets] = self._found[sources]

    def _fade(self) -> None:
        scale = np.minimum(1.0, RECENT_BLOCKS / np.maximum(self._won + self._lost, 1.0))
        self._won *= scale
        self._lost *= scale
