"""Policy for the host tier: which blocks are worth a copy to it, by the probability that they are used again.

A copy out pays if p x the seconds to compute the block exceeds the seconds of the copy out plus p x those of the copy
in, where p is the probability that the block is used again. So it pays from a least probability on (scheduler/cost.py).
For a block, p is

    1          while a preempted sequence that computed it waits
    learned    otherwise, separately for blocks that a request has found before and for those that none has

p is learned from blocks in the host tier. `won` counts blocks that returned. When n slots are taken, the fraction n /
all slots of each block in the tier is `lost`. The prior for a block used u times is u / (u + 1) (the rule of
succession). The evidence weighs at most as much as the last thousand blocks. Blocks found before are never estimated
less likely than others, as a request for a block also needs the blocks before it.

Where copies do not pay, nothing would be learned any more. So the blocks of every 17th released row are demoted anyway,
unless the least probability is 1 or more.

Marks are kept per place (block or slot), and move with the contents. For places that are not findable they are undefined.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .block_table import Int32

SAMPLED_ROWS = 17  # every 17th row; a prime, to sample every phase of a periodic load
RECENT_BLOCKS = 1024  # upper bound of the weight of what was learned

# Uses of a block that no request has found, and of one that some has
_USES = np.array([1.0, 2.0])

Mask = npt.NDArray[np.bool_]


class HostOffloadPolicy:
    """Marks of `num_blocks` blocks and of the slots up to `num_slots`, and the statistics learned from them.

    The methods report what happens to findable blocks.
    """

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self._first_slot = num_blocks
        # Number of waiting preempted sequences that need it.
        self._wanted = np.zeros(num_blocks + num_slots + 1, np.int32)
        self._found = np.zeros(num_blocks + num_slots + 1, np.bool_)  # found by a request before
        self._sampled = np.zeros(num_blocks, np.bool_)
        self._tried = np.zeros(num_slots + 1, np.bool_)  # slots that count for the statistics
        self._num_tried = np.zeros(2)  # number of these, by whether it was found before
        self._won = np.zeros(2)
        self._lost = np.zeros(2)
        self._num_rows = 0

    @property
    def chances(self) -> tuple[float, float]:
        """The probabilities that a block is used again: if no request has found it before, and if one has."""
        new, found = (self._won + _USES) / (self._won + self._lost + _USES + 1)
        return float(new), float(max(new, found))

    def worth(self, blocks: Int32, least_chance: float | npt.NDArray[np.float64]) -> Mask:
        """Which of `blocks` are worth demoting, or what belongs to them, each from its `least_chance` on."""
        new, found = self.chances
        chances = np.where(self._found[blocks], found, new)
        chances[(self._wanted[blocks] > 0) | self._sampled[blocks]] = 1.0
        worth: Mask = chances > least_chance
        return worth

    # -- blocks that can be found ------------------------------------------------------------------------------------

    def registered(self, blocks: Int32, slots: Int32) -> None:
        """`blocks` are findable from now on. The first of them, recomputed, lay in `slots` until now."""
        self._wanted[blocks] = 0
        self._found[blocks] = self._sampled[blocks] = False
        if len(slots):
            self.returned(slots, blocks[: len(slots)])

    def moved(self, sources: Int32, targets: Int32) -> None:
        """The contents of blocks `sources` are in `targets` now."""
        self._take_marks(sources, targets)
        self._sampled[targets] = self._sampled[sources]

    def found(self, blocks: Int32) -> None:
        """A request found `blocks`."""
        self._found[blocks] = True

    def sample(self, num_rows: int) -> range:
        """The indices, among `num_rows` rows released now, that are part of the sample: pass their blocks to `left`."""
        first = -(self._num_rows + 1) % SAMPLED_ROWS
        self._num_rows += num_rows
        return range(first, num_rows, SAMPLED_ROWS)

    def left(self, blocks: Int32) -> None:
        """Mark `blocks`, all of a sampled row's chain, so that no sampled block is a descendant of one that is not."""
        self._sampled[blocks] = True

    def wanted(self, blocks: Int32, slots: Int32, by: int) -> None:
        """`by` more sequences wait for the contents of `blocks` and `slots`; fewer if negative."""
        for places in (blocks, slots + self._first_slot):
            self._wanted[places] = np.maximum(self._wanted[places] + by, 0)

    # -- the host tier -----------------------------------------------------------------------------------------------

    def taking(self, num: int, num_slots: int) -> None:
        """`num` of the tier's `num_slots` slots are about to be taken, free or after eviction of their contents."""
        self._lost += self._num_tried * min(1.0, num / num_slots)
        self._fade()

    def demoted(self, blocks: Int32, slots: Int32) -> None:
        """The contents of `blocks` are in `slots` now."""
        self._take_marks(blocks, slots + self._first_slot)
        self._tried[slots] = self._wanted[blocks] == 0
        self._num_tried += self._by_kind(slots)

    def returned(self, slots: Int32, blocks: Int32) -> None:
        """The contents of `slots` are in `blocks` now, because a request needed them."""
        self._won += self._by_kind(slots)
        self._fade()
        self._take_marks(slots + self._first_slot, blocks)
        self._sampled[blocks] = False
        self.forgotten(slots)

    def forgotten(self, slots: Int32) -> None:
        """The contents of `slots` are not findable any more."""
        self._num_tried -= self._by_kind(slots)
        self._tried[slots] = False
        self._wanted[slots + self._first_slot] = 0

    def check_invariants(self, findable: Int32, used_slots: Int32, hits: list[tuple[Int32, Int32]]) -> None:
        """Check the marks of the findable blocks and slots. `hits` are the blocks and slots that each waiting sequence finds.

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
        assert (self._wanted[places] <= most[places]).all(), "a row that does not wait wants blocks"

    def _by_kind(self, slots: Int32) -> npt.NDArray[np.int64]:
        """How many of `slots` count for the statistics, by whether they were found before."""
        kinds = self._found[slots[self._tried[slots]] + self._first_slot]
        return np.bincount(kinds, minlength=2)

    def _take_marks(self, sources: Int32, targets: Int32) -> None:
        self._wanted[targets] = self._wanted[sources]
        self._found[targets] = self._found[sources]

    def _fade(self) -> None:
        scale = np.minimum(1.0, RECENT_BLOCKS / np.maximum(self._won + self._lost, 1.0))
        self._won *= scale
        self._lost *= scale
