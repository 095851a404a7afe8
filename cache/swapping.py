"""Eviction and demotion of blocks, promotion back to the device, and the state of waiting sequences.

Blocks that leave the pool are demoted to slots (host_tier.py) if that is worth it (host_offload.py) and slots are
available; older slots are evicted for them. The other blocks are evicted. A hit in a slot is promoted to a block of the
new row. The last, partly filled block of a preempted sequence is not findable; it is kept as its tail.
"""

from __future__ import annotations

import numpy as np

from ..allocator.blocks import BlockAllocator, BlockIds
from .block_table import Int32
from .host_offload import HostOffloadPolicy
from .host_tier import HostTail, HostTier
from .prefix_hash import Chain
from .prefix_index import PrefixHit, PrefixIndex

_NO_SLOTS: Int32 = np.empty(0, np.int32)
_NO_SLOTS.flags.writeable = False


class Swapping:
    """Reclaims blocks of `allocator` that `index` finds: evicts them or swaps them out to a host tier.

    The tier has `num_slots` slots, which may be 0. At most `max_cached_blocks` blocks without references stay cached
    (None: no limit). `bytes_at` is the manager's: where each block's bytes are until the next plan is done.

    Callers of the cache manager may read all attributes, and call `drop_for`, `rest`, `forget_slots` and `lost`.
    """

    def __init__(
        self, index: PrefixIndex, allocator: BlockAllocator, num_slots: int, bytes_at: Int32,
        max_cached_blocks: int | None = None,
    ) -> None:  # fmt: skip
        self.host = HostTier(num_slots)
        self.demotion = HostOffloadPolicy(allocator.num_blocks, num_slots)
        self.max_cached_blocks = max_cached_blocks
        self.evicted_blocks = 0  # since the start, to make room or to respect the bound
        self._index = index
        self._allocator = allocator
        self._bytes_at = bytes_at
        self._block_size = index.hasher.block_size
        self._waiting: dict[str, tuple[Chain, int]] = {}  # preempted sequences: chain, number of computed tokens

    # -- blocks that leave and return --------------------------------------------------------------------------------

    def reclaim(self, victims: BlockIds, hit: PrefixHit | None = None) -> None:
        """Demote those of `victims` that are worth it and find a slot; evict the others.

        `victims` are in the order of `PrefixIndex.victims`; if slots are short the last ones are demoted. `hit` is the
        prefix of a row that is being admitted: the contents of its slots stay there.
        """
        if not self.host.demotes:
            self.evicted_blocks += self._evict(victims)
            return
        worth = self.demotion.worth(victims, self.host.least_chance)
        if not worth.all():
            self.evicted_blocks += self._evict(victims[~worth])
            victims = victims[worth]
            victims = victims[self._index.findable(victims)]  # without descendants of an evicted block
        slots = self._take_slots(len(victims), _NO_SLOTS if hit is None else hit.slots)
        num_left = len(victims) - len(slots)
        self.evicted_blocks += self._evict(victims[:num_left])
        demoted = victims[num_left:]
        if len(demoted):
            self._index.demote(demoted, slots)
            self.demotion.demoted(demoted, slots)
            self._allocator.forget(demoted)
            self.host.queue_swap_out(self._bytes_at[demoted], slots, beside=hit is not None)

    def trim(self) -> None:
        """Demote or evict cached blocks beyond `max_cached_blocks`: the least valuable first, descendants before ancestors."""
        if self.max_cached_blocks is None:
            return
        # Victims in flight did not count as cached: count again.
        while (excess := self._allocator.counts().cached - self.max_cached_blocks) > 0:
            self.reclaim(self._index.victims(excess))

    def reclaim_trees(self, roots: BlockIds) -> None:
        """Demote or evict `roots`, findable and without references, with all their descendants."""
        self.reclaim(self._index.with_descendants(roots) if self.host.demotes else roots)

    def worth_promoting(self, hit: PrefixHit) -> PrefixHit:
        """`hit`, without its slots if promoting them is not worth it."""
        if self.host.promotes or not len(hit.slots):
            return hit
        n = len(hit.blocks)
        return PrefixHit(n * self._block_size, hit.blocks, _NO_SLOTS, hit.nodes[:n])

    def promote(self, slots: Int32, blocks: BlockIds) -> None:
        """Move the contents of `slots`, found after the blocks of a row, to the row's `blocks`."""
        self._index.promote(slots, blocks)
        self.demotion.returned(slots, blocks)
        self._allocator.publish(blocks)
        self.host.queue_swap_in(slots, blocks.copy())

    def registered(self, blocks: BlockIds, slots: Int32) -> None:
        """`blocks` are findable from now on. The first of them, recomputed, lay in `slots` until now, which are freed."""
        self.demotion.registered(blocks, slots)
        self.host.free(slots)

    # -- waiting sequences -------------------------------------------------------------------------------------------

    def keep_for(self, name: str, chain: Chain, num_tokens: int, tail: BlockIds) -> None:
        """Record that `name`, which computed the first `num_tokens` tokens of `chain`, waits for its blocks.

        `tail` is its last block, to keep if a slot is available; empty: no block is to be kept. Does nothing without slots.
        """
        if not self.host.capacity:
            return
        self._waiting[name] = chain, num_tokens
        self._want(chain, num_tokens, 1)
        slots = self._take_slots(len(tail))
        if len(slots):
            self.host.queue_swap_out(self._bytes_at[tail], slots, beside=False)
            self.host.tails[name] = HostTail(int(slots[0]), num_tokens)

    def stop_waiting(self, name: str) -> bool:
        """Record that `name` does not wait for its blocks any more. Returns whether it did."""
        if (waiting := self._waiting.pop(name, None)) is None:
            return False
        self._want(*waiting, -1)
        return True

    def admitted(self, name: str, hit: PrefixHit, blocks: BlockIds, returns: bool) -> int:
        """Account for the admission of `name` with the prefix `hit` into `blocks`; `returns`: it was preempted before.

        Its tail is swapped in if it follows the tokens found. Returns the number of tokens in the tail, or 0.
        """
        self.host.resting = False
        if hit.num_tokens and not returns:  # else no new request found it
            self.demotion.found(blocks[: len(hit.blocks) + len(hit.slots)])
        if (tail := self.host.tails.pop(name, None)) is None:
            return 0
        slot = np.array([tail.slot], np.int32)
        full, rest = divmod(tail.num_tokens, self._block_size)
        if not self.host.promotes or hit.num_tokens != full * self._block_size:
            self.host.free(slot)
            return 0
        self.host.queue_swap_in(slot, blocks[full : full + 1].copy())
        return rest

    def drop_for(self, name: str) -> None:
        """Forget what was kept for `name`, which will not return. Does nothing if nothing was kept."""
        self.stop_waiting(name)
        self._drop_tail(name)

    # -- the tier as a whole -----------------------------------------------------------------------------------------

    def reset(self, slots: Int32) -> None:
        """Forget all of the tier after a reset of the index: the contents of `slots`, waiting sequences and tails."""
        self._forget(slots)
        self._waiting.clear()
        self._drop_tails()

    def rest(self) -> None:
        """Empty the tier, so that it needs no memory. It stays unused until a row is admitted."""
        self._forget_slots(self._index.slots.used)
        self._drop_tails()
        self.host.rest()

    def forget(self, blocks: BlockIds) -> None:
        """Forget `blocks`, which no table contains, and their descendants, without demoting them."""
        self._evict(blocks[self._index.findable(blocks)])
        self.forget_slots(self.host.owed(blocks))

    def forget_slots(self, slots: Int32) -> None:
        """Forget the contents of `slots`, to which a copy has failed, and tails there."""
        for name in [name for name, tail in self.host.tails.items() if tail.slot in slots]:
            self._drop_tail(name)
        self._forget_slots(np.intersect1d(slots, self._index.slots.used))

    def lost(self, slots: Int32) -> None:
        """Forget the contents of `slots`, to which a plan was to copy, and retire them: there was no memory for them."""
        self.forget_slots(slots)
        self.host.retire(slots)

    def check_invariants(self, findable: BlockIds) -> None:
        """Check the tier; `findable` are the blocks that the index knows. Raises AssertionError."""
        if self.max_cached_blocks is not None:
            cached = self._allocator.counts().cached
            assert cached <= self.max_cached_blocks, f"{cached} blocks are cached, of {self.max_cached_blocks} at most"
        used_slots = self._index.slots.used
        self.host.check_invariants(used_slots)
        hits = [self._index.lookup(chain, num_tokens) for chain, num_tokens in self._waiting.values()]
        self.demotion.check_invariants(findable, used_slots, [(hit.blocks, hit.slots) for hit in hits])

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _take_slots(self, n: int, keep: Int32 = _NO_SLOTS) -> Int32:
        """Take up to `n` slots, evicting slots other than `keep` if needed; none if demoting is not worth it."""
        if not n or not self.host.demotes:
            return _NO_SLOTS
        self.demotion.taking(n, self.host.num_slots)
        lacking = n - self.host.num_free
        if lacking > 0:
            victims = self._index.host_victims(lacking + len(keep))
            victims = victims[~np.isin(victims, keep)][:lacking]
            if len(victims):
                self._forget_slots(victims)
        return self.host.take(min(n, self.host.num_free))

    def _evict(self, blocks: BlockIds) -> int:
        """Forget `blocks`, which have no references, and their descendants. Returns the number of blocks forgotten."""
        if not len(blocks):
            return 0
        places = self._index.evict(blocks)
        self._allocator.forget(places.blocks)
        self._forget(places.slots)
        return len(places.blocks)

    def _forget_slots(self, slots: Int32) -> None:
        """Forget the contents of `slots` and their descendants."""
        self._forget(self._index.evict_slots(slots).slots)

    def _forget(self, slots: Int32) -> None:
        """Free `slots`, which the index does not know any more."""
        if len(slots):
            self.demotion.forgotten(slots)
            self.host.free(slots)

    def _want(self, chain: Chain, num_tokens: int, by: int) -> None:
        """Count `by` more sequences that wait for the first `num_tokens` tokens of `chain`."""
        hit = self._index.lookup(chain, num_tokens)
        self.demotion.wanted(hit.blocks, hit.slots, by)

    def _drop_tail(self, name: str) -> None:
        if (tail := self.host.tails.pop(name, None)) is not None:
            self.host.free(np.array([tail.slot], np.int32))

    def _drop_tails(self) -> None:
        for name in list(self.host.tails):
            self._drop_tail(name)
