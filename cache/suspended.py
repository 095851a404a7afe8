"""Preempted sequences that will return: the blocks that they want, and their tails.

A tail is the last, partly filled block of a sequence, in each table, and its state. It is not findable, and waits in slots of
the host tier.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..allocator.blocks import BlockIds
from .block_table import Int32
from .host_offload import HostOffloadPolicy
from .host_tier import HostTail, HostTier
from .prefix_hash import Chain
from .prefix_index import PrefixHit, PrefixIndex


class SuspendedSequences:
    """What is kept for sequences by name. `take_slots` takes up to so many slots of `host`, evicting others.

    `bytes_at` is the manager's: where each block's bytes are until the next plan is done. Does nothing without slots.
    """

    def __init__(
        self,
        index: PrefixIndex,
        host: HostTier,
        offload_policy: HostOffloadPolicy,
        bytes_at: Int32,
        take_slots: Callable[[int], Int32],
    ) -> None:
        self._index = index
        self._host = host
        self._offload_policy = offload_policy
        self._bytes_at = bytes_at
        self._take_slots = take_slots
        self._block_size = index.hasher.block_size
        self._has_states = any(window.group.is_state for window in index.windows)
        self._chains: dict[str, tuple[Chain, int]] = {}  # with the number of computed tokens

    def keep(self, name: str, chain: Chain, num_tokens: int, tail: BlockIds) -> None:
        """Record that `name`, which computed the first `num_tokens` tokens of `chain`, waits for its blocks.

        `tail` are its last blocks, one per table, and those of its state, to keep if slots are available; empty: none is to be
        kept. A state is kept if copying it takes less time than computing the tokens behind the last one that is found.
        """
        if not self._host.capacity:
            return
        self._chains[name] = chain, num_tokens
        self._want(chain, num_tokens, 1)
        if self._has_states and len(tail):
            lost = (num_tokens - self._index.lookup(chain, num_tokens).num_tokens) / self._block_size
            tail = tail if 2 * len(tail) * self._host.copy_share < lost else tail[:0]
        slots = self._take_slots(len(tail))
        if len(slots) < len(tail):
            self._host.free(slots)
        elif len(slots):
            self._host.queue_swap_out(self._bytes_at[tail], slots, beside=False)
            self._host.tails[name] = HostTail(slots, num_tokens)

    def resume(self, name: str) -> bool:
        """Record that `name` does not wait for its blocks any more. Returns whether it did."""
        if (waiting := self._chains.pop(name, None)) is None:
            return False
        self._want(*waiting, -1)
        return True

    def hit_of(self, name: str, hit: PrefixHit, max_tokens: int) -> PrefixHit:
        """What `name` can go on from, of at most `max_tokens` tokens: `hit`, or, with the state that is kept for it, more."""
        tail = self._host.tails.get(name)
        if tail is None or not (self._has_states and self._host.promotes and hit.num_tokens < tail.num_tokens <= max_tokens):
            return hit
        return self._index.without_state(hit, tail.num_tokens // self._block_size)

    def tail_behind(self, name: str, hit: PrefixHit) -> int | None:
        """The tokens of the tail that is kept for `name`, if it follows `hit` and is worth promoting; else None."""
        tail = self._host.tails.get(name)
        if tail is None or not self._host.promotes:
            return None
        full, rest = divmod(tail.num_tokens, self._block_size)
        return rest if hit.num_tokens == full * self._block_size else None

    def take_tail(self, name: str, blocks: BlockIds) -> None:
        """Swap the tail of `name` in to `blocks`, as many as it has; with no blocks, drop it. Does nothing without a tail."""
        if (tail := self._host.tails.pop(name, None)) is None:
            return
        if len(blocks):
            self._host.queue_swap_in(tail.slots, blocks)
        else:
            self._host.free(tail.slots)

    def drop(self, name: str) -> None:
        """Forget what was kept for `name`, which will not return. Does nothing if nothing was kept."""
        self.resume(name)
        self.take_tail(name, self._bytes_at[:0])

    def drop_tails(self, slots: Int32 | None = None) -> None:
        """Drop the tails in `slots`; None: all of them."""
        for name, tail in list(self._host.tails.items()):
            if slots is None or np.isin(tail.slots, slots).any():
                self.take_tail(name, self._bytes_at[:0])

    def reset(self) -> None:
        """Forget all of them: the index is empty."""
        self._chains.clear()
        self.drop_tails()

    def wanted(self) -> list[tuple[BlockIds, Int32]]:
        """The blocks and slots that each of the sequences finds."""
        return [self._places(chain, num_tokens) for chain, num_tokens in self._chains.values()]

    def _places(self, chain: Chain, num_tokens: int) -> tuple[BlockIds, Int32]:
        return self._index.places_of(self._index.lookup(chain, num_tokens).matched)

    def _want(self, chain: Chain, num_tokens: int, by: int) -> None:
        """Count `by` more sequences that wait for the first `num_tokens` tokens of `chain`."""
        self._offload_policy.wanted(*self._places(chain, num_tokens), by)
