"""What every arena keeps, as tests: subclass `ArenaContract` with a fixture `rig` that makes arenas of one kind."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pagetide.allocator.arena import Arena
from pagetide.allocator.errors import BlockMisuse, OutOfDeviceMemory


@dataclass(frozen=True)
class Rig:
    """How the contract's tests make arenas of one kind, and read and write their memory."""

    extent_bytes: int
    make: Callable[..., Arena]  # make(num_extents, budget=None)
    read: Callable[[Arena, int], bytes]  # all bytes of one mapped extent
    fill: Callable[[Arena, int, int], None]  # every byte of one mapped extent
    fence: Callable[[], AbstractContextManager[Any]] = nullcontext  # around what may not overlap: kernels and mapping

    def holds(self, arena: Arena, extent: int, value: int) -> bool:
        """Whether every byte of a mapped extent is `value`."""
        return self.read(arena, extent) == bytes([value]) * self.extent_bytes


class ArenaContract:
    """The contract. Subclasses have the fixture `rig`."""

    num_rounds = 100  # of each thread

    def test_a_new_arena_is_a_range_without_memory(self, rig: Rig) -> None:
        arena = rig.make(8)
        assert (arena.num_extents, arena.extent_bytes) == (8, rig.extent_bytes)
        assert (arena.mapped_extents, arena.mapped_bytes, arena.held) == (frozenset(), 0, (0, 0))

    def test_a_map_beyond_the_budget_maps_nothing_and_says_both_numbers(self, rig: Rig) -> None:
        arena = rig.make(8, budget=lambda: 3 * rig.extent_bytes - 1)
        with pytest.raises(OutOfDeviceMemory) as refusal:
            arena.map([0, 4, 5])
        assert (refusal.value.asked_bytes, refusal.value.free_bytes) == (3 * rig.extent_bytes, 3 * rig.extent_bytes - 1)
        assert arena.mapped_extents == frozenset()
        arena.map([4, 5])
        assert arena.mapped_extents == {4, 5}

    def test_what_is_done_wrongly_is_refused_and_changes_nothing(self, rig: Rig) -> None:
        arena = rig.make(8)
        arena.map([3])
        rig.fill(arena, 3, 9)
        wrong = [(arena.map, extents) for extents in ([8], [-1], [1, 1], [0, 3])]  # beyond, negative, twice, mapped
        wrong += [(arena.unmap, extents) for extents in ([8], [-1], [3, 3], [3, 4])]  # ..., not mapped
        for call, extents in wrong:
            with pytest.raises(BlockMisuse):
                call(extents)
            assert arena.mapped_extents == {3} and rig.holds(arena, 3, 9), (call, extents)

    def test_extents_are_integers_of_any_kind_and_nothing_else(self, rig: Rig) -> None:
        arena = rig.make(4)
        arena.map(np.array([1, 2], np.int32))  # type: ignore[arg-type]
        assert arena.mapped_extents == {1, 2} and all(type(extent) is int for extent in arena.mapped_extents)
        arena.unmap(np.array([2], np.int64))  # type: ignore[arg-type]
        for wrong in ([0.0], ["0"]):
            with pytest.raises(TypeError):
                arena.map(wrong)  # type: ignore[arg-type]
        assert arena.mapped_extents == {1}

    def test_what_is_prepared_counts_and_goes_with_the_wish_for_it(self, rig: Rig) -> None:
        arena = rig.make(8)
        with pytest.raises(ValueError, match="must not be negative, got -1"):
            arena.prepare(-1)
        arena.map([0])
        arena.prepare(3)
        least, most = arena.held
        assert rig.extent_bytes <= least <= most <= 4 * rig.extent_bytes
        arena.map([1, 2])
        assert 3 * rig.extent_bytes <= arena.held.upper_bytes <= 4 * rig.extent_bytes
        arena.prepare(0)
        arena.trim()
        assert arena.held == (3 * rig.extent_bytes, 3 * rig.extent_bytes)
        assert arena.drain_failures() == []

    def test_a_closed_arena_holds_nothing_and_refuses(self, rig: Rig) -> None:
        arena = rig.make(4)
        arena.map([0, 1])
        arena.close()
        arena.close()
        assert (arena.mapped_extents, arena.mapped_bytes, arena.held) == (frozenset(), 0, (0, 0))
        for call in (lambda: arena.map([2]), lambda: arena.unmap([0]), lambda: arena.buffer):
            with pytest.raises(BlockMisuse, match="closed"):
                call()

    def test_two_arenas_have_nothing_in_common(self, rig: Rig) -> None:
        one, other = rig.make(3), rig.make(3)
        one.map([0, 1])
        other.map([1, 2])
        rig.fill(one, 1, 11)
        rig.fill(other, 1, 22)
        assert rig.holds(one, 1, 11)
        one.close()
        assert rig.holds(other, 1, 22) and rig.holds(other, 2, 0)

    def test_threads_have_their_extents_each(self, rig: Rig) -> None:
        arena = rig.make(16)
        arena.map([0])
        wrong: list[str] = []

        def live(thread: int) -> None:
            random_of_thread = random.Random(thread)
            mine = range(1 + 5 * thread, 6 + 5 * thread)
            values: dict[int, int] = {}
            for value in range(1, 1 + self.num_rounds):
                extents = random_of_thread.sample(mine, random_of_thread.randint(1, 5))
                coming = [extent for extent in extents if extent not in values]
                going = [extent for extent in extents if extent in values]
                with rig.fence():
                    wrong.extend(f"{extent} changed" for extent in going if not rig.holds(arena, extent, values[extent]))
                with rig.fence():
                    arena.unmap(going)
                with rig.fence():
                    arena.map(coming)
                with rig.fence():
                    wrong.extend(f"{extent} was not zero" for extent in coming if not rig.holds(arena, extent, 0))
                    for extent in coming:
                        rig.fill(arena, extent, value % 256)
                for extent in going:
                    del values[extent]
                values |= dict.fromkeys(coming, value % 256)
            with rig.fence():
                arena.unmap(sorted(values))

        def guarded(thread: int) -> None:
            try:
                live(thread)
            except BaseException as error:
                wrong.append(repr(error))

        threads = [threading.Thread(target=guarded, args=(thread,)) for thread in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert arena.mapped_extents == {0}

    @pytest.mark.hypothesis
    def test_any_life_agrees_with_a_dictionary(self, rig: Rig) -> None:
        checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            lambda: Life(rig), settings=settings(stateful_step_count=15, suppress_health_check=checks)
        )


class Life(RuleBasedStateMachine):
    """Any sequence of calls, right and wrong ones, beside a dictionary of what each mapped extent must hold."""

    num_extents = 10
    any_extents = st.lists(st.integers(0, num_extents - 1), unique=True)

    def __init__(self, rig: Rig) -> None:
        super().__init__()
        self.rig = rig
        self.arena: Any = rig.make(self.num_extents)
        self.model: dict[int, int] = {}

    @rule(extents=any_extents)
    def map(self, extents: list[int]) -> None:
        coming = [extent for extent in extents if extent not in self.model]
        self.arena.map(coming)
        self.model |= dict.fromkeys(coming, 0)

    @rule(extents=any_extents)
    def unmap(self, extents: list[int]) -> None:
        going = [extent for extent in extents if extent in self.model]
        self.arena.unmap(going)
        for extent in going:
            del self.model[extent]

    @rule(extents=any_extents, value=st.integers(0, 255))
    def fill(self, extents: list[int], value: int) -> None:
        for extent in self.model.keys() & extents:
            self.rig.fill(self.arena, extent, value)
            self.model[extent] = value

    @rule(extents=any_extents)
    def misuse(self, extents: list[int]) -> None:
        if self.model.keys() & extents:
            with pytest.raises(BlockMisuse):
                self.arena.map(extents)
        if set(extents) - self.model.keys():
            with pytest.raises(BlockMisuse):
                self.arena.unmap(extents)

    @rule(count=st.integers(0, num_extents))
    def prepare(self, count: int) -> None:
        self.arena.prepare(count)

    @rule()
    def trim(self) -> None:
        self.arena.trim()
        assert self.arena.held == (self.arena.mapped_bytes, self.arena.mapped_bytes)

    @invariant()
    def agree(self) -> None:
        assert self.arena.mapped_extents == self.model.keys()
        assert self.arena.mapped_bytes == len(self.model) * self.rig.extent_bytes
        least, most = self.arena.held
        assert self.arena.mapped_bytes <= least <= most <= self.num_extents * self.rig.extent_bytes
        assert all(self.rig.holds(self.arena, extent, value) for extent, value in self.model.items())

    def teardown(self) -> None:
        self.arena.close()
