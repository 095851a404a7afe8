"""What is counted beside the pool, and when heap and caches are freed, on a made-up clock."""

from __future__ import annotations

import logging
import math

import pytest

from pagetide.engine.memory.base_memory import BaseMemory

MIB = 1 << 20
PLANNED = 11 * MIB  # 10 measured, 1 in reserve


class Process:
    """A process whose size the test sets."""

    def __init__(self, tidies: bool = True) -> None:
        self.size, self.now, self.calls = 10 * MIB, 100.0, list[str]()
        self.broken = False
        self.freed = 0  # by each call
        self.base = BaseMemory(
            self.measure,
            weights_bytes=0,
            reserve_bytes=MIB,
            trim=lambda: self.free("trim"),
            tidy=(lambda: self.free("tidy")) if tidies else None,
        )

    def measure(self) -> int:
        if self.broken:
            raise OSError("no free file descriptor")
        return self.size

    def free(self, call: str) -> None:
        self.calls.append(call)
        self.size -= self.freed

    def update(self, *, has_work: bool = True, room_bytes: float = math.inf, after: float = 0.0) -> list[str]:
        """What was freed."""
        self.now += after
        self.calls.clear()
        self.base.update(self.now, has_work=has_work, room_bytes=room_bytes)
        return list(self.calls)


def test_the_counted_bytes_lie_between_the_plan_and_the_most() -> None:
    process = Process()
    assert process.base.planned_bytes == process.base.num_bytes == PLANNED
    for size, counted in ((5 * MIB, PLANNED), (13 * MIB, 13 * MIB), (40 * MIB, 20 * MIB)):
        process.base.most_bytes = 20 * MIB
        process.size = size
        process.update()
        assert process.base.num_bytes == counted


def test_the_heap_is_tidied_when_it_has_grown_by_more_than_4_mib() -> None:
    process = Process()
    assert process.update() == []
    process.size = 14 * MIB
    assert process.update() == [] and not process.base.measure_untidy()
    process.size += 1
    assert process.base.measure_untidy() and process.base.num_bytes == 14 * MIB, "only an update counts"
    process.freed = MIB
    assert process.update() == ["tidy"]
    assert process.base.num_bytes == 13 * MIB + 1
    process.size = 17 * MIB + 2
    assert process.update(after=0.4) == [], "while there is work, half a second apart"
    assert process.update(after=0.1) == ["tidy"]
    process.size += 5 * MIB
    assert process.update(has_work=False) == ["tidy"], "without work at once"


def test_what_tidying_left_is_where_growth_starts() -> None:
    process = Process()
    process.update()
    process.size = 15 * MIB
    assert process.update() == ["tidy"]
    process.size = 19 * MIB
    assert process.update(after=1.0) == []
    process.size = 12 * MIB
    process.update(after=1.0)
    process.size = 17 * MIB
    assert process.update(after=1.0) == ["tidy"], "the least since then counts"


def test_caches_are_emptied_at_most_every_two_seconds_above_room_and_plan() -> None:
    process = Process(tidies=False)
    assert process.update(room_bytes=0) == [], "no more than was planned"
    process.size = 13 * MIB
    assert process.update(room_bytes=13 * MIB) == []
    process.freed = MIB
    assert process.update(room_bytes=13 * MIB - 1) == ["trim"]
    assert process.base.num_bytes == 12 * MIB
    assert process.update(room_bytes=0, after=1.9) == []
    assert process.update(room_bytes=0, after=0.2) == ["trim"]
    process.size = 100 * MIB
    assert process.update() == [] and not process.base.measure_untidy(), "there is no heap to tidy"


def test_what_cannot_be_measured_stays_as_it_was_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    process = Process()
    process.size = 13 * MIB
    process.update()
    process.broken = True
    process.update()
    process.update()
    assert process.base.num_bytes == 13 * MIB
    assert caplog.text.count("the memory of this process cannot be measured") == 1
    process.broken, process.size = False, 12 * MIB
    process.update()
    assert process.base.num_bytes == 12 * MIB


def test_a_library_that_cannot_free_stops_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    process = Process()
    monkeypatch.setattr(process, "free", lambda call: 1 / 0)
    with caplog.at_level(logging.WARNING):
        process.base.trim()
        process.size = 50 * MIB
        process.update(room_bytes=0)
        process.update(room_bytes=0)
    assert "memory that libraries keep could not be freed" in caplog.text
    assert process.base.num_bytes == 50 * MIB
