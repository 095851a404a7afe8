"""The log of the prefix index: a consumer that replays it has the index's own set of findable blocks, at every moment.

test_prefix_index_life.py does so after every operation of a random life.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from fakes import World
from prefix_fakes import EventCopy, EventWatcher, blocks_of
from random_walk import PAIRWISE, walk

from pagetide.cache.cache_events import CacheEventLog, CacheEvents, StoredBlock
from pagetide.cache.eviction import Lru
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.cache.prefix_index import PrefixIndex


@pytest.mark.parametrize("variant", [variant for variant in PAIRWISE if "bare" not in variant])
def test_a_consumer_of_a_schedulers_random_walk_has_the_findable_blocks(variant: str) -> None:
    """Pools that resize, host tiers, windows and failures: the consumer looks after each step."""
    walk(1, variant, 80, look=EventWatcher())


def index_with(log: CacheEventLog, num_blocks: int = 64) -> PrefixIndex:
    index = PrefixIndex(PrefixHasher(2, b"seed"), num_blocks, Lru, num_slots=8)
    index.report_to(log)
    return index


def register(index: PrefixIndex, tokens: Iterable[int], blocks: list[int], salt: bytes | None = None) -> list[int]:
    """Make the blocks of `tokens` findable in `blocks`, without references. Returns their digests."""
    chain = index.hasher.chain(list(tokens), salt)
    places = index.register(chain, np.array(blocks, np.int32), 0)
    index.mark_evictable(places.blocks)
    return [first << 64 | second for first, second in chain.digests(chain.num_blocks).tolist()]


def test_exact_events() -> None:
    log = CacheEventLog()
    index = index_with(log)
    assert log.take().events() == CacheEvents(cleared=True)
    one, two = register(index, [1, 2, 3, 4], [1, 2])
    (salted,) = register(index, [1, 2], [3], b"tenant")
    stored = [StoredBlock(one, None, (1, 2)), StoredBlock(two, one, (3, 4))]
    assert log.take().events() == CacheEvents([*stored, StoredBlock(salted, None, (1, 2), False, b"tenant")])
    assert [one >> 64, two >> 64] == index.hasher.chain([1, 2, 3, 4]).digests(2)[:, 0].tolist()
    index.demote([2], [5])
    assert log.take().events() == CacheEvents([StoredBlock(two, one, (3, 4), on_host=True)])
    index.evict([1])
    assert log.take().events() == CacheEvents(removed=[one, two])
    index.reset()
    assert log.take().events() == CacheEvents(cleared=True)
    assert not log.take().events()


def test_a_log_that_is_not_taken_stays_bounded_and_a_snapshot_follows() -> None:
    log = CacheEventLog(most_pending=4)
    index = index_with(log)
    for n in range(6):
        register(index, [n, n], [1 + n])
        assert log.take().num_blocks == 1
    for n in range(6, 12):
        register(index, [n, n], [1 + n])
    taken = log.take()
    assert taken.events() == CacheEvents(lost=True) and taken.num_blocks == 0
    copy = EventCopy()
    copy.apply(CacheEvents(list(index.snapshot().blocks()), cleared=True))
    assert copy.blocks == blocks_of(index) and len(copy.blocks) == 12
    register(index, [50, 50], [50])
    copy.apply(log.take().events())
    assert copy.blocks == blocks_of(index) and len(copy.blocks) == 13
    # What is cleared is known again.
    for n in range(12, 20):
        register(index, [n, n], [1 + n])
    index.reset()
    (digest,) = register(index, [1, 1], [1])
    assert log.take().events() == CacheEvents([StoredBlock(digest, None, (1, 1))], cleared=True)


def test_a_snapshot_has_parents_before_children_and_needs_no_log() -> None:
    index = PrefixIndex(PrefixHasher(2, b"seed"), 64, Lru)
    register(index, range(20), [*range(20, 30)])
    index.mark_used([20, 21, 22])
    register(index, [*range(6), 1, 1, 1, 1], [20, 21, 22, 1, 2])
    found = list(index.snapshot().blocks())
    known: set[int] = set()
    for block in found:
        assert block.parent is None or block.parent in known
        known.add(block.digest)
    assert len(found) == 12 and index.events is None


def test_a_rebuilt_manager_goes_on_with_the_log() -> None:
    world = World(usable=8, block_size=4, caching=True)
    log = world.cache.index.events = CacheEventLog()
    world.add("a", 12)
    world.run()
    assert len(log.take().events().stored) >= 3
    world.add("b", 12)
    world.run()
    rebuilt = world.cache.rebuilt()
    assert rebuilt.index.events is log and log.take().events() == CacheEvents(cleared=True)
