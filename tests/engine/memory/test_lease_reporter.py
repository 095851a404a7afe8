"""What a lease is told of an engine, and when, against a scripted broker."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_lease import ScriptedLease

from pagetide.allocator.lease_record import HeldBounds
from pagetide.engine.memory.base_memory import BaseMemory
from pagetide.engine.memory.decision import LeaseSnapshot
from pagetide.engine.memory.lease_reporter import LeaseReporter, MemoryStats

MIB = 1 << 20
BASE, WEIGHTS, EXTENT = 10 * MIB, 4 * MIB, MIB


class Rig:
    """A reporter over numbers that the test sets."""

    def __init__(self, granted: int = 20 * MIB) -> None:
        self.now, self.process, self.trims = 100.0, BASE, 0
        self.stats = MemoryStats()
        self.lease: Any = ScriptedLease(granted, 12 * MIB, BASE)
        self.arena: Any = SimpleNamespace(held=HeldBounds(5 * MIB, 5 * MIB), extent_bytes=EXTENT)
        counters = SimpleNamespace(preemptions=3, moved_blocks=7)
        self.scheduler: Any = SimpleNamespace(has_work=True, num_running=1, num_waiting=0, stats=counters)
        self.pool: Any = SimpleNamespace(
            unneeded_extents=(2, 0), is_reused=True, wanted_extents=0, waiting_s=0.0, scheduler=self.scheduler
        )
        base = BaseMemory(lambda: self.process, weights_bytes=WEIGHTS, reserve_bytes=0, trim=self.trim)
        self.reporter = LeaseReporter(self.lease, base, self.arena, self.pool, stats=self.stats, clock=lambda: self.now)
        self.reporter.measure_and_report(self.now)
        self.after_step(0.0)  # which measures
        self.lease.reports.clear()

    def trim(self) -> None:
        self.trims += 1

    def after_step(self, seconds: float, *, resized: bool = False) -> list[tuple[dict[str, int], int]]:
        """What a step makes the reporter report."""
        self.now += seconds
        before = len(self.lease.reports)
        self.reporter.after_step(self.now, self.arena.held, resized=resized)
        return self.lease.reports[before:]

    def receive(self) -> None:
        self.reporter.receive(self.lease.poll())


def report(kv: int = 5, other: int = 6, free: int = 2) -> tuple[dict[str, int], int]:
    return {"weights": WEIGHTS, "other": other * MIB, "kv": kv * MIB}, free * EXTENT


def test_a_resize_and_half_a_second_are_measured() -> None:
    rig = Rig()
    rig.process = BASE + MIB
    assert rig.after_step(0.01) == []
    assert rig.after_step(0.01, resized=True) == [report(other=7)]
    rig.process = BASE + 2 * MIB
    assert rig.after_step(0.4) == []
    assert rig.after_step(0.1) == [report(other=8)]


def test_changes_in_the_background_are_reported_at_once_with_both_bounds() -> None:
    rig = Rig()
    rig.arena.held = HeldBounds(5 * MIB, 7 * MIB)
    assert rig.after_step(0.001) == [report(kv=7)]
    assert rig.lease.held_bytes - rig.lease.lower_bytes == 2 * MIB
    assert rig.after_step(0.001) == []
    rig.reporter.report_changes(rig.arena.held)
    assert len(rig.lease.reports) == 1
    rig.arena.held = HeldBounds(6 * MIB, 6 * MIB)
    rig.reporter.report_changes(rig.arena.held)
    assert rig.lease.reports[1:] == [report(kv=6)]


def test_free_memory_is_forecast_every_tenth_of_a_second_and_whenever_nothing_runs() -> None:
    rig = Rig()
    rig.after_step(0.1)
    rig.pool.unneeded_extents = (2, 1)
    assert rig.after_step(0.09) == []
    assert rig.after_step(0.02) == [report(free=3)]
    rig.pool.unneeded_extents, rig.scheduler.num_running = (0, 4), 0
    assert rig.after_step(0.001) == [report(free=4)]
    assert rig.lease.kept_bytes == 4 * EXTENT
    assert rig.after_step(0.001) == []
    rig.scheduler.num_waiting = 3
    assert rig.after_step(0.001) == [report(free=4)] and rig.lease.num_waiting == 3
    rig.pool.is_reused = False
    assert rig.after_step(0.001) == [report(free=4)] and not rig.lease.reused


def test_a_process_beyond_its_grant_empties_caches_and_asks() -> None:
    rig = Rig(granted=16 * MIB)
    assert (rig.trims, rig.lease.asked) == (0, [])
    rig.process = BASE + 2 * MIB
    assert rig.after_step(0.0, resized=True) == [report(other=8)]
    assert (rig.trims, rig.lease.asked) == (1, [17 * MIB])
    rig.pool.wanted_extents = 9
    rig.after_step(0.5)
    assert rig.lease.asked == [17 * MIB, 21 * MIB], "what requests wait for is not forgotten"


def test_a_recall_is_answered_once_no_more_is_held(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.lease.recall_to(13 * MIB)
    with caplog.at_level(logging.INFO, "pagetide.engine.memory"):
        rig.receive()
        rig.reporter.answer(idle=True, over_recall=0)
        assert rig.lease.answered == [] and rig.reporter.is_recalled
        assert (rig.stats.recalls, rig.stats.recalled_bytes) == (1, 2 * MIB)
        rig.now += 0.25
        rig.scheduler.stats.moved_blocks += 5
        rig.scheduler.stats.preemptions += 1
        rig.lease.held_bytes = 13 * MIB
        rig.reporter.answer(idle=False, over_recall=0)
    assert rig.lease.answered == [13 * MIB] and not rig.reporter.is_recalled
    assert [record.getMessage() for record in caplog.records] == [
        "scripted: recalled to 13.00 MiB; 20.00 MiB were granted, 15.00 MiB are held",
        "scripted: recall served after 250 ms: 2.00 MiB given back, 13.00 MiB held; 5 blocks moved, 1 requests preempted",
    ]


def test_recalls_in_a_row_have_one_outcome(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.lease.recall_to(14 * MIB)
    rig.receive()
    rig.now += 1.0
    rig.lease.recall_to(13 * MIB)
    rig.receive()
    assert (rig.stats.recalls, rig.stats.recalled_bytes) == (2, 3 * MIB)
    rig.lease.withdraw()
    with caplog.at_level(logging.INFO, "pagetide.engine.memory"):
        rig.receive()
    assert "recall withdrawn after 1000 ms: 0 bytes given back" in caplog.text
    assert not rig.reporter.is_recalled


def test_a_limit_returns_what_is_granted_above_it_and_not_held() -> None:
    rig = Rig()
    rig.lease.limit(14 * MIB)
    rig.reporter.answer(idle=False, over_recall=0)
    assert rig.lease.answered == [15 * MIB], "what is held stays granted"
    rig.lease.held_bytes = 10 * MIB
    rig.reporter.answer(idle=False, over_recall=0)
    assert rig.lease.answered[1:] == [14 * MIB]
    rig.reporter.answer(idle=False, over_recall=0)
    assert len(rig.lease.answered) == 2
    rig.reporter.answer(idle=True, over_recall=0)
    assert rig.lease.answered[2:] == [10 * MIB] and rig.lease.granted_bytes == 12 * MIB, "the minimum stays granted"


def test_the_snapshot_has_the_time_of_the_last_grant() -> None:
    rig = Rig()
    assert rig.reporter.snapshot() == LeaseSnapshot(20 * MIB, 15 * MIB)
    rig.lease.grant(22 * MIB)
    rig.lease.limit(30 * MIB)
    rig.lease.recall_to(13 * MIB)
    rig.receive()
    rig.now += 1.0
    assert rig.reporter.snapshot() == LeaseSnapshot(22 * MIB, 15 * MIB, 100.0, 30 * MIB, 13 * MIB)
    rig.lease.lose()
    rig.receive()
    snapshot = rig.reporter.snapshot()
    assert snapshot is not None and not snapshot.connected and rig.stats.lost_brokers == 1


def test_a_recall_that_spares_requests_is_answered_with_what_is_held_once_nothing_unneeded_is_left() -> None:
    rig = Rig()
    rig.lease.recall_to(12 * MIB, spares_requests=True)
    rig.receive()
    rig.reporter.answer(idle=False, over_recall=1)
    assert rig.lease.answered == [] == rig.lease.reports
    rig.pool.unneeded_extents = (0, 0)
    rig.reporter.answer(idle=False, over_recall=0)
    assert rig.lease.reports == [report(free=0)], "the broker knows why"
    assert rig.lease.answered == [rig.lease.held_bytes] and rig.lease.held_bytes > 12 * MIB
    assert rig.lease.recall is None and not rig.reporter.is_recalled
