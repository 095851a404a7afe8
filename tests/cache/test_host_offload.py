"""Which blocks are worth a copy to the host tier: what is learned, what is sampled, and what who waits wants."""

from __future__ import annotations

import numpy as np
import pytest
from row_cache import A, B, C, D, RowCache

from pagetide.cache.host_offload import RECENT_BLOCKS, SAMPLED_ROWS, HostOffloadPolicy

NONE = np.empty(0, np.int32)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_before_anything_is_known_the_rule_of_succession_says() -> None:
    policy = HostOffloadPolicy(10, 10)
    assert policy.chances == (1 / 2, 2 / 3)
    policy.registered(ids(1, 2, 3), NONE)
    policy.found(ids(2))
    for least, expected in (0.49, [1, 1, 1]), (0.5, [0, 1, 0]), (0.66, [0, 1, 0]), (0.67, [0, 0, 0]), (1.0, [0, 0, 0]):
        assert policy.worth(ids(1, 2, 3), least).tolist() == expected


def test_what_lies_there_while_the_tier_is_taken_once_is_lost() -> None:
    policy = HostOffloadPolicy(20, 10)
    policy.registered(ids(*range(1, 11)), NONE)
    policy.taking(2, 10)
    policy.demoted(ids(1, 2), ids(1, 2))
    assert policy.chances[0] == 1 / 2, "nothing was taken since"
    policy.taking(5, 10)
    policy.demoted(ids(3, 4, 5, 6, 7), ids(3, 4, 5, 6, 7))
    assert policy.chances[0] == pytest.approx(1 / (2 + 2 * 5 / 10))
    policy.taking(5, 10)
    policy.forgotten(ids(1, 2))
    assert policy.chances[0] == pytest.approx(1 / (2 + 2 + 5 * 5 / 10)), "two are lost, and half of each of five"


def test_what_comes_back_is_won_and_is_found_from_then_on() -> None:
    policy = HostOffloadPolicy(20, 10)
    policy.registered(ids(1, 2), NONE)
    policy.demoted(ids(1, 2), ids(5, 6))
    policy.returned(ids(5), ids(9))
    policy.found(ids(9))
    assert policy.chances[0] == 2 / 3
    policy.forgotten(ids(6))
    assert policy.chances[0] == 2 / 3, "it was not there for long enough to be lost"
    policy.demoted(ids(9), ids(7))
    policy.returned(ids(7), ids(3))
    assert policy.chances == (2 / 3, 3 / 4), "a block that had been found"


def live(policy: HostOffloadPolicy, block: int, num: int, wanted: bool) -> None:
    """`num` times `block` goes to a tier of one slot, and comes back or makes room."""
    for _ in range(num):
        policy.demoted(ids(block), ids(1))
        if wanted:
            policy.returned(ids(1), ids(block))
        else:
            policy.taking(1, 1)
            policy.forgotten(ids(1))


def test_what_was_found_is_no_less_likely_than_what_was_not() -> None:
    policy = HostOffloadPolicy(3, 1)
    policy.registered(ids(1, 2), NONE)
    policy.found(ids(1))
    live(policy, 1, 9, wanted=False)
    assert policy.chances == (1 / 2, 1 / 2)
    live(policy, 2, 8, wanted=True)
    assert policy.chances == (9 / 10, 9 / 10)


@pytest.mark.parametrize("first", [True, False])
def test_a_change_of_load_is_noticed(first: bool) -> None:
    """However long it was otherwise, a few thousand blocks tell."""
    policy = HostOffloadPolicy(2, 1)
    live(policy, 1, 5_000, wanted=first)
    before = policy.chances[0]
    live(policy, 1, 2 * RECENT_BLOCKS, wanted=not first)
    after = policy.chances[0]
    assert (before > 0.99 and after < 0.2) if first else (before < 0.01 and after > 0.8)


def test_a_small_share_is_sampled_however_unlikely() -> None:
    policy = HostOffloadPolicy(SAMPLED_ROWS * 4, 8)
    chosen = []
    for row in range(2 * SAMPLED_ROWS):
        blocks = ids(2 * row % 64 + 1, 2 * row % 64 + 2)
        policy.registered(blocks, NONE)
        for _ in policy.sample(1):
            policy.left(blocks)
        chosen.append(policy.worth(blocks, 0.9).tolist())
    assert [i for i, worth in enumerate(chosen) if worth == [True, True]] == [SAMPLED_ROWS - 1, 2 * SAMPLED_ROWS - 1]
    assert sum(map(sum, chosen)) == 4
    assert not policy.worth(ids(1), 1.0).any(), "where no copy is worth it nothing is sampled"


def test_of_many_rows_at_once_the_same_are_sampled() -> None:
    one, many = HostOffloadPolicy(1, 1), HostOffloadPolicy(1, 1)
    singly = [row for row in range(100) for _ in one.sample(1)]
    assert singly == list(range(SAMPLED_ROWS - 1, 100, SAMPLED_ROWS))
    assert [first + i for first, n in ((0, 3), (3, 0), (3, 40), (43, 57)) for i in many.sample(n)] == singly


def test_wants_are_counted_and_move_along() -> None:
    policy = HostOffloadPolicy(20, 10)
    policy.registered(ids(1, 2, 3), NONE)
    policy.wanted(ids(1, 2), NONE, 1)
    policy.wanted(ids(1), NONE, 1)
    assert policy.worth(ids(1, 2, 3), 0.9).tolist() == [True, True, False]
    policy.demoted(ids(2), ids(4))
    policy.moved(ids(1), ids(7))
    policy.returned(ids(4), ids(8))
    policy.wanted(ids(7), NONE, -1)
    assert policy.worth(ids(7, 8), 0.9).tolist() == [True, True], "one of two still waits"
    policy.wanted(ids(7, 8), NONE, -1)
    assert not policy.worth(ids(7, 8), 0.9).any()
    assert policy.chances == (1 / 2, 2 / 3), "of what was sure to be wanted nothing is learned"


class Cache(RowCache):
    """A copy is worth it only for what is all but sure to be wanted again."""

    def __init__(self, usable: int, host_slots: int, least_chance: float = 0.9) -> None:
        super().__init__(usable, host_slots)
        self.manager.set_swap_costs(least_chance=least_chance, promotes=True)

    def demoted(self) -> int:
        """Blocks that the plan which is made now copies out."""
        swaps = self.manager.host.take_swaps()
        self.manager.check_invariants()
        return 0 if swaps is None else len(swaps.out_slots)


def test_what_nobody_waits_for_is_evicted_and_what_somebody_does_is_demoted() -> None:
    cache = Cache(10, 20)
    cache.begin(0, A)
    cache.end(0, A, "a")
    cache.run(B)
    cache.run(C)
    assert cache.demoted() == 4, "A's tail, and three of its blocks"
    cache.run(D)
    assert cache.demoted() == 1 and cache.manager.swapping.evicted_blocks == 3, "the last one of A's, and B's"
    assert cache.begin(0, A, "a") == 17
    cache.end(0, A)
    cache.run(B)
    cache.run(C)
    cache.demoted()
    cache.run(D)
    assert cache.demoted() == 0, "A ended"


def test_who_ends_while_it_waits_wants_nothing_any_more() -> None:
    cache = Cache(10, 20)
    cache.begin(0, A)
    cache.end(0, A, "a")
    cache.manager.swapping.suspended.drop("a")
    cache.run(B)
    cache.run(C)
    assert cache.demoted() == 0 and cache.manager.host.num_used == 0


def test_what_two_wait_for_stays_worth_it_when_one_is_back() -> None:
    cache = Cache(10, 20)
    longer = [*A[:16], *B]
    for name, tokens in ("a", A), ("b", longer):
        cache.begin(0, tokens)
        cache.end(0, tokens, name)
    assert cache.begin(0, A, "a") == 17
    cache.end(0, A)
    cache.demoted()
    for tokens in C, D, C:
        cache.run(tokens)
    assert cache.begin(0, longer, "b") == len(longer), "with what it shares with the other"


def test_an_ancestor_that_is_evicted_takes_along_what_was_worth_it() -> None:
    """Only what is behind nothing but what stays can stay."""
    cache = Cache(5, 20)
    cache.run(A)
    index = cache.manager.index
    blocks = index.lookup(cache.chain(A), 16).blocks
    cache.manager.swapping.offload_policy.wanted(blocks[2:3], NONE, 1)
    cache.run(B)
    swaps = cache.manager.host.take_swaps()
    assert swaps is None and cache.manager.host.num_used == 0
    assert index.lookup(cache.chain(A), 16).num_tokens == 0


def test_found_blocks_are_demoted_where_others_are_not() -> None:
    cache = Cache(6, 20, least_chance=0.6)
    cache.run(A)
    assert cache.run([*A[:8], *B[:7]]) == 8, "two blocks of A's"
    cache.run(C)
    cache.run(D)
    assert cache.demoted() == 2
    assert cache.run(A) == 8


def test_what_was_forgotten_with_the_cache_is_wanted_by_nobody() -> None:
    cache = Cache(10, 20)
    cache.begin(0, A)
    cache.end(0, A, "a")
    cache.manager.reset()
    cache.run(A)
    for tokens in B, C, D:
        cache.run(tokens)
    assert cache.demoted() == 0
    cache.manager.swapping.suspended.drop("a")
    cache.manager.check_invariants()


def test_a_tier_that_rests_forgets_and_takes_nothing_until_somebody_comes() -> None:
    cache = Cache(10, 20, least_chance=0.0)
    for tokens in A, B, C:
        cache.run(tokens)
    cache.demoted()
    manager = cache.manager
    assert manager.host.num_used > 0
    cached = manager.pool.counts().cached
    manager.swapping.rest()
    manager.check_invariants()
    assert manager.host.num_used == 0 and not manager.host.demotes
    assert manager.pool.counts().cached == cached, "what is on the device stays"
    assert cache.begin(0, C) == 16
    assert manager.host.demotes
    cache.begin(1, D)
    assert cache.demoted() > 0
    with pytest.raises(ValueError, match="slots are in use"):
        manager.host.rest()
