"""The engine's memory between steps, against a scripted broker: real scheduler, cache and arena, an injected clock."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np
import pytest
from device_users import BLOCK_SIZE, alone, core_over
from extent_core import SteppedEngine
from fakes import continuation
from scripted_lease import ScriptedLease

from pagetide.allocator.host_arena import HostArena
from pagetide.allocator.leased_arena import LeasedArena
from pagetide.engine.memory.base_memory import BaseMemory
from pagetide.engine.memory.decision import ASK_S, PoolBounds
from pagetide.engine.memory.engine_memory import EngineMemory
from pagetide.engine.memory.pool_use import SchedulerPoolUse
from pagetide.scheduler.request import Sampling

MIB = 1 << 20
TOKEN_BYTES = 4096
PER = 4  # blocks of an extent
EXTENT = PER * BLOCK_SIZE * TOKEN_BYTES  # 256 KiB
BASE = 10 * MIB
EXTENTS, MINIMUM = 16, 2
IDLE_S = 5.0


def total(extents: int) -> int:
    """What the process holds with so many extents."""
    return BASE + extents * EXTENT


class Engine(SteppedEngine):
    """A core with its memory. `granted` counts extents; None is an engine without a lease."""

    def __init__(self, granted: int | None = EXTENTS, mapped: int = MINIMUM, *, overlaps: bool = False) -> None:
        super().__init__()
        self.base, self.trims, self.tidied, self.refuses = BASE, 0, 0, False
        self.waiting_s = 0.0
        self.host = HostArena(EXTENTS, EXTENT, budget=lambda: 0 if self.refuses else 1 << 40)
        self.lease: Any = None if granted is None else ScriptedLease(total(granted), total(MINIMUM), BASE)
        self.arena: Any = self.host if self.lease is None else LeasedArena(self.host, self.lease)
        self.arena.map(range(mapped))
        self.core = core_over(self.arena, blocks_per_extent=PER, max_seqs=8, forecast=False, overlaps=overlaps)
        bounds = PoolBounds(EXTENTS, MINIMUM, EXTENT, IDLE_S)
        self.pool = SchedulerPoolUse(lambda: self.core.scheduler, bounds, clock=lambda: self.waiting_s)  # requests arrive at 0
        base = BaseMemory(lambda: self.base, weights_bytes=4 * MIB, reserve_bytes=0, trim=self._trim, tidy=self._tidy)
        self.core.memory = self.memory = EngineMemory(self.pool, self.arena, base, lease=self.lease, clock=lambda: self.now)

    def _trim(self) -> None:
        self.trims += 1

    def _tidy(self) -> None:
        self.tidied += 1

    @property
    def size(self) -> int:
        return self.host.mapped_bytes // EXTENT

    def settle(self) -> None:
        if self.lease is not None:
            assert self.lease.held_bytes >= self.base + self.host.mapped_bytes

    def keep(self, seconds: float = 0.05, most: int = 50) -> int:
        """As the thread that keeps memory does: steps for its sake alone. Returns how many it made."""
        self.now += seconds
        for made in range(most):
            if not self.memory.due:
                return made
            while self.core.is_ahead:
                self.core.step(ahead=False)
            self.step()
        raise AssertionError("memory is due without end")


def test_it_grows_by_need_within_what_is_granted() -> None:
    engine = Engine(granted=8)
    engine.add("a", 300)  # 19 blocks: 5 extents
    engine.run()
    assert 5 <= engine.size <= 7
    assert engine.memory.stats.grown_bytes == (engine.size - 2) * EXTENT
    assert engine.lease.held_bytes == total(engine.size)
    assert engine.lease.asked == []


def test_what_has_waited_is_asked_for_although_it_is_granted() -> None:
    """Another lease's requests may have waited for less long, and the broker weighs both."""
    engine = Engine(granted=8)
    engine.waiting_s = ASK_S
    engine.add("a", 300)
    engine.step()
    assert engine.lease.asked[0] in (total(6), total(7)) and engine.lease.keeps == engine.lease.asked
    engine.run()


def test_beyond_the_grant_it_asks_again_and_again_and_grows_when_granted() -> None:
    engine = Engine(granted=2)
    engine.add("a", 300)
    engine.steps(25)
    assert (engine.size, engine.core.scheduler.starving) == (2, True)
    assert 2 <= len(engine.lease.asked) <= 3, "every quarter of a second"
    assert set(engine.lease.asked) == {total(6)} or set(engine.lease.asked) == {total(7)}
    engine.lease.grant(total(4))
    engine.steps(3)
    assert (engine.size, engine.core.scheduler.starving) == (4, True), "what there is is taken"
    engine.lease.grant(engine.lease.asked[-1])
    engine.run()


def test_without_a_lease_the_pool_resizes_between_its_own_bounds() -> None:
    engine = Engine(granted=None)
    engine.add("a", 700)
    engine.run()
    assert engine.size >= 11
    engine.keep(IDLE_S + 1)
    assert engine.size == 2
    assert engine.memory.to_dict()["lease"] is None


def test_a_device_that_says_no_costs_time_and_no_request() -> None:
    engine = Engine()
    engine.refuses = True
    engine.add("a", 300)
    engine.steps(50)  # a second
    refused = engine.memory.stats.refused
    assert 1 <= refused <= 3 and engine.size == 2, "half a second between two attempts"
    engine.refuses = False
    engine.run()


def test_what_nobody_needs_goes_back_after_a_while_and_the_broker_hears_of_it() -> None:
    engine = Engine()
    engine.add("a", 700)
    engine.run()
    grown = engine.size
    assert engine.keep(IDLE_S - 1) == 0 and engine.size == grown
    assert engine.keep(2) > 0
    assert engine.size == MINIMUM
    assert engine.lease.granted_bytes == total(MINIMUM) and engine.lease.answered[-1] == total(MINIMUM)
    assert engine.keep(100) == 0, "then there is rest"
    engine.add("b", 200)
    engine.lease.grant(total(EXTENTS))
    engine.run()


def test_what_lies_idle_is_told_as_soon_as_it_does_and_the_ask_is_taken_back() -> None:
    engine = Engine(granted=2)
    engine.add("a", 700)
    engine.steps(4)
    engine.lease.grant(engine.lease.asked[-1])
    engine.run()
    assert engine.size > MINIMUM
    held, free = engine.lease.reports[-1]
    assert (held["kv"], free) == (engine.size * EXTENT, (engine.size - MINIMUM) * EXTENT)
    assert engine.lease.asked[-1] == engine.lease.held_bytes


def grown() -> Engine:
    """An engine with a large pool, idle."""
    engine = Engine()
    engine.add("warm", 900)
    engine.run()
    assert engine.size >= 14
    return engine


def test_an_idle_recall_is_served_at_once_and_answered() -> None:
    engine = grown()
    engine.lease.recall_to(total(5))
    assert engine.keep() == 1
    assert engine.size == 5 and engine.lease.recall is None
    assert engine.lease.granted_bytes == total(5)
    assert engine.trims == 1
    assert (engine.memory.stats.recalls, engine.core.scheduler.stats.preemptions) == (1, 0)


def test_a_recall_that_trimming_alone_satisfies_takes_no_extent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heaps keep pages for later: they go before anything that the pool holds."""
    engine = grown()
    size = engine.size
    engine.base = BASE + 3 * EXTENT
    engine.step(1.0)
    assert engine.lease.held_bytes == total(size + 3)
    monkeypatch.setattr(engine.memory._reporter.base, "_trim", lambda: setattr(engine, "base", BASE))
    engine.lease.recall_to(total(size))
    engine.steps(3)
    assert (engine.size, engine.lease.recall, engine.lease.granted_bytes) == (size, None, total(size))


def test_once_loaded_no_more_is_promised_than_is_needed() -> None:
    """What is registered before the weights are read covers what loading may take; a pool within that could not be recalled."""
    engine = Engine(mapped=4)
    least = total(MINIMUM)
    # A promise is never raised.
    for promised, base, promises in ((least + 5 * EXTENT, BASE - 10, least), (least - EXTENT, BASE, least - EXTENT)):
        engine.lease.min_bytes = promised
        held = BaseMemory(lambda base=base: base, weights_bytes=0, reserve_bytes=BASE - base, trim=engine._trim)
        EngineMemory(engine.pool, engine.host, held, lease=engine.lease)
        assert engine.lease.min_bytes == promises


def test_a_recall_that_is_met_already_is_answered_without_a_step() -> None:
    """Of bytes that were granted and never mapped."""
    engine = Engine(granted=12)
    engine.lease.recall_to(total(7))
    assert engine.keep() == 0
    assert engine.lease.recall is None and engine.lease.granted_bytes == total(7)
    engine.lease.recall_to(total(4))
    engine.step()  # nor is one needed where steps are made
    assert engine.lease.recall is None and engine.lease.granted_bytes == total(4)


def test_a_recall_is_answered_where_memory_is_unmapped() -> None:
    """And not with the end of the step: chunks may take long."""
    engine = Engine(mapped=8)
    engine.lease.recall_to(total(5))
    engine.memory.prepare()
    plan = engine.core.scheduler.schedule(engine.now)
    assert len(plan.resize.unmap) == 3
    engine.arena.unmap(plan.resize.unmap[:2])
    assert engine.lease.answered == []
    engine.arena.unmap(plan.resize.unmap[2:])
    assert engine.lease.answered == [total(5)] and engine.lease.recall is None


def test_a_recall_calls_off_what_was_to_be_mapped() -> None:
    engine = Engine(granted=12)
    engine.add("a", 700)
    engine.core.scheduler.pool.grow(8)  # decided, not done
    engine.lease.recall_to(total(3))
    engine.steps(5)
    assert engine.size <= 3 and engine.lease.recall is None
    assert engine.lease.granted_bytes == total(3)


def test_a_slice_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagetide.engine.memory.step_timer.SLICE_BYTES", 2 * EXTENT)
    monkeypatch.setattr("pagetide.engine.memory.step_timer.UNMAP_SLICE_BYTES", 2 * EXTENT)
    engine = Engine(mapped=EXTENTS)
    assert engine.memory.to_dict()["map_slice_bytes"] == 2 * EXTENT
    engine.add("a", 100, new=60)
    engine.steps(2)
    sizes = [engine.size]
    engine.lease.recall_to(total(4))
    while engine.lease.recall is not None:
        engine.step()
        sizes.append(engine.size)
    falls = [before - after for before, after in itertools.pairwise(sizes) if before > after]
    assert falls[0] <= 2 and all(more <= 8 * fall for fall, more in itertools.pairwise(falls)) and sizes[-1] == 4, sizes
    engine.run()


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_that_is_under_way_for_nobody_makes_no_recall_slow(overlaps: bool) -> None:
    """As where a stream is not read for a while: what is due goes back at once, not slice by slice."""
    engine = Engine(overlaps=overlaps)
    engine.add("a", 400, new=60)
    engine.add("b", 400, new=60)
    engine.steps(20)
    assert engine.core.is_ahead == overlaps and engine.core.scheduler.num_running == 2
    engine.lease.recall_to(total(2))
    assert engine.keep(1.0) == 1 and engine.size <= 2
    assert engine.lease.answered
    engine.lease.grant(total(EXTENTS))
    engine.run()


def test_a_limit_below_what_is_used_takes_nothing_from_anybody_and_comes_true_as_requests_end() -> None:
    engine = Engine(mapped=EXTENTS)
    for i in range(8):
        engine.add(f"before{i}", 20, new=40)
    engine.run()  # by now it knows how long requests get
    for i in range(4):
        engine.add(f"r{i}", 150, new=40)
    engine.steps(8, lambda: engine.core.scheduler.num_running == 4)
    assert engine.size == EXTENTS
    engine.lease.limit(total(6))
    engine.add("late", 30)
    engine.steps(3)
    assert engine.core.scheduler.num_running == 4 and engine.core.scheduler.num_waiting == 1, "nobody new"
    assert engine.core.scheduler.pool.excess_extents > 0
    engine.run()
    engine.keep()
    assert engine.core.scheduler.stats.preemptions <= 1, "the forecast of what they need has a margin, and may be short"
    assert engine.core.scheduler.pool.excess_extents == 0 and engine.size <= 6
    assert engine.lease.granted_bytes == total(6), "the broker hears of it, so that others may have the rest"


def test_a_limit_that_is_raised_lets_it_grow_again() -> None:
    engine = grown()
    engine.lease.limit(total(4))
    engine.keep()
    assert engine.size == 4 and engine.lease.granted_bytes == total(4)
    engine.add("a", 500)  # 32 blocks: 8 extents
    engine.steps(20)
    assert engine.core.scheduler.starving and engine.size == 4
    engine.lease.limit(total(10**6))
    engine.lease.grant(total(EXTENTS))
    engine.run()
    assert engine.core.scheduler.pool.limit_blocks == engine.core.scheduler.cache.pool.capacity


def test_without_a_broker_it_keeps_what_it_has_and_grows_no_further(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(granted=12)
    engine.add("a", 300)
    engine.steps(4)
    size = engine.size
    with caplog.at_level(logging.INFO, "pagetide.engine.memory"):
        engine.lease.lose()
        engine.add("b", 600)
        engine.steps(30)
        assert engine.size == size and engine.core.scheduler.starving
        engine.lease.rejoin()
        engine.lease.grant(total(EXTENTS))
        engine.run()
    assert engine.memory.stats.lost_brokers == 1
    said = [record.getMessage() for record in caplog.records]
    assert any("the broker is gone (it was killed)" in line for line in said)
    assert any("reconnected to a broker" in line for line in said)


def test_what_the_broker_refuses_is_said(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.lease.deny()
    with caplog.at_level(logging.INFO, "pagetide.engine.memory"):
        engine.step()
    assert "an answer crossed a grant" in caplog.text


def test_waiting_takes_in_what_comes() -> None:
    engine = Engine()
    engine.lease.recall_to(total(1))
    engine.memory.wait(3.5)
    assert engine.lease.waited == [3.5] and engine.memory.stats.recalls == 1
    alone = Engine(granted=None)
    alone.memory.close()
    alone.memory.wait(60.0)  # returns at once: nobody is to wait for a closed engine


def test_the_engines_of_the_stress_test_know_what_is_right() -> None:
    prompt = np.arange(100, dtype=np.int32)
    assert alone(prompt, 50) == continuation(prompt, Sampling(50))


def test_a_fault_behind_a_step_keeps_what_the_step_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    engine.add("ends", 20, new=1)
    engine.add("goes on", 20, new=50)

    def broken(waited_for: bool) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(engine.memory, "after_step", broken)
    emissions = engine.core.step()
    monkeypatch.undo()
    assert {end.request_id: end.reason for end in emissions.finished} == {"ends": "length", "goes on": "error"}
    assert emissions.request_ids == ["ends", "goes on"]
    assert not engine.core.has_work
    engine.requests.clear()
    engine.core.runner.owner.clear()  # type: ignore[attr-defined]  # the fake one is strict about rows
    engine.add("next", 40)
    engine.run()


def test_what_the_last_step_left_in_the_heap_is_given_back_at_once() -> None:
    engine = Engine(granted=None)
    for grown in (5 * MIB, 10 * MIB):  # within half a second
        engine.add(f"{grown}", 10, new=3)
        engine.steps(2)
        before, engine.base = engine.tidied, BASE + grown
        engine.steps(1)
        assert engine.core.scheduler.has_work is False and engine.tidied == before + 1
    engine.add("as much as before", 10, new=3)
    engine.steps(10)
    assert engine.tidied == 2


def test_after_a_step_without_memory_what_nobody_needs_goes_back_and_nothing_grows_for_a_while() -> None:
    engine = Engine(granted=EXTENTS)
    engine.add("a", 300)
    engine.run()
    most = engine.size
    assert most >= 5
    engine.add("b", 40)
    engine.step()
    engine.memory.relieve()
    assert engine.memory.wants_turn
    engine.step()
    assert MINIMUM <= engine.size < most, "what the request needs stays"
    least = engine.size
    engine.add("c", 300)
    engine.steps(20)
    assert engine.size == least, "nothing is mapped for half a second"
    engine.run()
    assert engine.size > least


def test_what_nobody_is_forecast_to_need_is_free_and_its_recall_preempts_nobody() -> None:
    engine = Engine(granted=EXTENTS)
    for name in "abcdefgh":
        engine.add(name, 10, new=200)
    engine.steps(100)  # in which all of them take a block now and then
    for name in "abcefg":
        engine.core.abort(name)
    engine.steps(10)
    scheduler = engine.core.scheduler
    _, free_bytes = engine.lease.reports[-1]
    needed = engine.size - free_bytes // EXTENT
    assert -(-(scheduler.pool.wanted_blocks() + 1) // PER) - needed in (0, 1), "it was told a tenth of a second ago"
    engine.lease.recall_to(engine.lease.held_bytes - free_bytes)
    engine.steps(10)
    assert (engine.size, scheduler.stats.preemptions, scheduler.num_running) == (needed, 0, 2)
    assert engine.lease.answered


def test_without_requests_all_but_the_minimum_is_free() -> None:
    pool = Engine(mapped=6).pool
    assert (pool.num_extents, pool.has_requests, pool.has_running, pool.is_short) == (6, False, False, False)
    assert (pool.idle_extents, pool.running_extents, pool.wanted_extents, pool.unneeded_extents) == (5, 1, 0, (4, 0))


def test_a_request_that_waits_makes_blocks_short_and_is_counted_with_the_null_block() -> None:
    engine = Engine(mapped=6)
    scheduler, pool = engine.core.scheduler, engine.pool
    engine.add("a", 8 * BLOCK_SIZE)
    assert (pool.has_requests, pool.has_running, pool.is_short) == (True, False, True)
    blocks = scheduler.pool.wanted_blocks()
    assert blocks >= 8
    assert pool.wanted_extents == -(-(blocks + 1) // PER) >= 3
    assert pool.unneeded_extents == (4, 0), "running requests need the minimum; the broker is asked for those that wait"
    scheduler.schedule()
    assert pool.unneeded_extents == (6 - pool.running_extents, 0)
    assert (pool.has_running, pool.is_short) == (True, False)
    assert pool.running_extents == -(-(scheduler.pool.running_blocks() + 1) // PER)


def test_what_grows_counts_at_once_and_unneeded_extents_are_never_negative() -> None:
    engine = Engine(mapped=2)
    pool = engine.pool
    engine.add("a", 30 * BLOCK_SIZE)
    assert pool.unneeded_extents == (0, 0)
    engine.core.scheduler.pool.grow(3)
    assert pool.num_extents == 5


def test_prefixes_are_kept_while_prompts_find_any_and_stay_beside_requests_while_they_find_half() -> None:
    engine = Engine(mapped=12)
    pool, lookups = engine.pool, engine.core.scheduler.stats.prefix_lookups
    pool.scheduler.cache.pool._num_free -= 8 * PER  # as if so many blocks were cached
    pool.scheduler.cache.pool._num_cached += 8 * PER
    assert pool.cached_extents == 8
    assert pool.unneeded_extents == (2, 8), "before any prompt they are worth keeping"
    assert pool.is_reused
    cases = ((15, 0, 8, True), (16, 790, 8, False), (31, 790, 8, False), (32, 1600, 8, True), (48, 1600, 0, False))
    for number, hit_tokens, kept, is_reused in cases:
        lookups.number, lookups.tokens, lookups.hit_tokens = number, 100 * number, hit_tokens
        assert (pool.unneeded_extents, pool.is_reused) == ((10 - kept, kept), is_reused), number


def test_a_recall_that_spares_requests_takes_what_no_running_request_needs() -> None:
    engine = grown()
    engine.add("a", 200, new=200)
    engine.steps(3)
    needed = engine.pool.running_extents
    assert MINIMUM < needed < engine.size
    engine.lease.recall_to(total(MINIMUM), spares_requests=True)
    engine.steps(20)
    assert engine.size >= needed and engine.lease.recall is None
    assert engine.lease.answered[-1] == engine.lease.granted_bytes >= total(needed)
    assert engine.core.scheduler.stats.preemptions == 0
    engine.lease.grant(total(EXTENTS))
    engine.run()
