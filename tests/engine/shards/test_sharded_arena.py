"""The pool of several shards: what counts as mapped, and what each lease counts meanwhile, whatever the shards refuse."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scripted_lease import ScriptedLease

from pagetide.allocator.errors import BlockMisuse
from pagetide.allocator.lease_record import HeldBounds
from pagetide.engine.shards.sharded_arena import ResizeOutcome, Settled, ShardedArena
from pagetide.scheduler.plan import Resize

BASE, EXTENT, EXTENTS = 1000, 16, 12


def resize(come: Iterable[int] = (), go: Iterable[int] = ()) -> Resize:
    return Resize(np.array(sorted(come), np.int64), np.array(sorted(go), np.int64))


def outcome(come: Iterable[int] = (), go: Iterable[int] = (), refused: str | None = None) -> ResizeOutcome:
    return ResizeOutcome(tuple(come), tuple(go), refused)


def arena_of(*granted: int, mapped: Iterable[int] = (0, 1)) -> tuple[ShardedArena, list[ScriptedLease]]:
    """An arena, and a lease for each shard, with so many extents granted."""
    mapped = tuple(mapped)
    leases = [ScriptedLease(BASE + n * EXTENT, BASE, BASE + len(mapped) * EXTENT) for n in granted]
    return ShardedArena(EXTENTS, EXTENT, leases, mapped, len(leases)), leases


def bounds(leases: Iterable[ScriptedLease]) -> list[tuple[int, int]]:
    """Of each lease, in extents."""
    return [((one.lower_bytes - BASE) // EXTENT, (one.held_bytes - BASE) // EXTENT) for one in leases]


def test_what_one_lease_lacks_no_shard_maps() -> None:
    arena, leases = arena_of(8, 8, 4, 8)
    why = arena.expect(resize([4, 5, 6], [1]))
    assert why is not None and why.startswith("GrantExceeded: ")
    assert bounds(leases) == [(1, 2)] * 4, "what goes is still expected to go"
    arena.settle(resize(go=[1]), [outcome(go=[1])] * 4)
    assert bounds(leases) == [(1, 1)] * 4 and arena.mapped_extents == {0}


def test_what_one_shard_refuses_the_others_undo_and_count_until_then() -> None:
    arena, leases = arena_of(8, 8, 8)
    plan = resize([4, 5], [1])
    assert arena.expect(plan) is None
    done = [outcome([4, 5], [1]), outcome([], [1], "OutOfDeviceMemory: none left"), outcome([4, 5], [1])]
    assert arena.settle(plan, done) == Settled(frozenset(), frozenset({1}), "OutOfDeviceMemory: none left")
    assert [arena.undo(rank) for rank in range(3)] == [(4, 5), (), (4, 5)]
    assert bounds(leases) == [(1, 3), (1, 1), (1, 3)] and arena.held == HeldBounds(EXTENT, 3 * EXTENT)
    why = arena.expect(resize([5, 6]))
    assert why == "extents [5] are still mapped on some of the 3 shards, from a resize before"
    assert bounds(leases) == [(1, 3), (1, 1), (1, 3)]
    arena.undone(0, (4, 5))
    arena.undone(2, (5,))
    assert [arena.undo(rank) for rank in range(3)] == [(), (), (4,)]
    arena.undone(2, (4, 5))
    assert bounds(leases) == [(1, 1)] * 3 and not any(map(arena.undo, range(3)))
    assert arena.expect(resize([5, 6])) is None


def test_it_works_without_leases_and_maps_by_plans_only() -> None:
    arena = ShardedArena(EXTENTS, EXTENT, None, [0], 2)
    plan = resize([3])
    assert arena.expect(plan) is None
    arena.settle(plan, [outcome([3]), outcome(refused="no")])
    arena.undone(0, arena.undo(0))
    assert arena.mapped_extents == {0}
    for change in (arena.map, arena.unmap):
        with pytest.raises(BlockMisuse, match="by plans"):
            change([3])
    arena.prepare(3)
    arena.trim()
    assert arena.buffer is None and arena.drain_failures() == [] and arena.held == HeldBounds(EXTENT, EXTENT)
    arena.close()
    arena.close()
    assert arena.mapped_extents == frozenset() and arena.undo(0) == ()


class Shards(RuleBasedStateMachine):
    """Plans, with shards that map, unmap and undo as it pleases hypothesis, and brokers that grant as it does."""

    @initialize(size=st.integers(2, 4), least=st.integers(1, 3))
    def start(self, size: int, least: int) -> None:
        self.arena, self.leases = arena_of(*[6] * size, mapped=range(least))
        self.there = [set(range(least)) for _ in range(size)]  # what each shard really has

    def check_bounds(self) -> None:
        for lease, there in zip(self.leases, self.there, strict=True):
            assert lease.lower_bytes <= BASE + len(there) * EXTENT <= lease.held_bytes

    def undo(self, rank: int, fails: bool) -> tuple[int, ...]:
        """What a shard does before a plan."""
        todo = self.arena.undo(rank)
        self.there[rank] -= set() if fails else set(todo)
        self.check_bounds()
        return tuple(extent for extent in todo if extent not in self.there[rank])

    def execute(self, rank: int, plan: Resize, refuses: bool, stays: set[int]) -> ResizeOutcome:
        """What a shard does of a plan."""
        there, come, go = self.there[rank], set(plan.map.tolist()), set(plan.unmap.tolist())
        assert not come & there and go <= there, "the shard's arena raises BlockMisuse"
        come = set() if refuses else come
        there |= come
        self.check_bounds()
        for extent in go - stays:
            there.discard(extent)
            self.check_bounds()
        return outcome(come, go - stays, "refused" if refuses or go & stays else None)

    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        arena, size, flags = self.arena, len(self.leases), st.lists(st.booleans(), min_size=4, max_size=4)
        mapped = arena.mapped_extents
        unmapped = sorted(set(range(EXTENTS)) - mapped)
        sent = resize(
            data.draw(st.sets(st.sampled_from(unmapped), max_size=4)) if unmapped else (),
            data.draw(st.sets(st.sampled_from(sorted(mapped - {0})), max_size=4)) if len(mapped) > 1 else (),
        )
        refused = arena.expect(sent) if sent else None
        lacks = any(lease.held_bytes + len(sent.map) * EXTENT > lease.granted_bytes for lease in self.leases)
        left = set().union(*(arena.undo(rank) for rank in range(size)))
        if refused is not None:
            assert lacks or left & set(sent.map.tolist())
            sent = resize(go=sent.unmap.tolist())
        undo_fails, refuses = data.draw(flags), data.draw(flags)
        done, undone = [], []
        for rank in data.draw(st.permutations(range(size))):
            undone.append((rank, self.undo(rank, undo_fails[rank])))
            stays = data.draw(st.sets(st.sampled_from(range(EXTENTS)), max_size=3))
            done.append((rank, self.execute(rank, sent, refuses[rank], stays)))
        for rank, extents in undone:
            arena.undone(rank, extents)
            self.check_bounds()
        if sent:
            outcomes = [one for _, one in sorted(done, key=lambda pair: pair[0])]
            settled = arena.settle(sent, outcomes)
            assert settled.mapped in (frozenset(), frozenset(sent.map.tolist()))
            assert bool(settled.mapped) == (bool(len(sent.map)) and not any(refuses[:size]))
            assert arena.mapped_extents == (mapped | settled.mapped) - settled.unmapped

    @rule()
    def plain_plan(self) -> None:
        for rank in range(len(self.leases)):
            self.arena.undone(rank, self.undo(rank, fails=False))
        assert not any(map(self.arena.undo, range(len(self.leases))))
        assert all(there == self.arena.mapped_extents for there in self.there)

    @rule()
    def report(self) -> None:
        held = self.arena.held
        for lease in self.leases:
            lease.report({"other": BASE, "kv": held.upper_bytes}, 0, moving_bytes=held.upper_bytes - held.lower_bytes)

    @rule(rank=st.integers(0, 3), extents=st.integers(0, EXTENTS + 2))
    def grant(self, rank: int, extents: int) -> None:
        lease = self.leases[rank % len(self.leases)]
        lease.granted_bytes = max(lease.held_bytes, BASE + extents * EXTENT)

    @invariant()
    def hold(self) -> None:
        self.check_bounds()
        mapped = self.arena.mapped_extents
        assert mapped == frozenset.intersection(*map(frozenset, self.there))
        for rank, there in enumerate(self.there):
            assert there == mapped | set(self.arena.undo(rank)) and not mapped & set(self.arena.undo(rank))
        most = max(len(there) for there in self.there)
        assert self.arena.held == HeldBounds(len(mapped) * EXTENT, most * EXTENT)


TestShards = Shards.TestCase
TestShards.settings = settings(stateful_step_count=25)
