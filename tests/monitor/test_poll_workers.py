"""monitor/poll_workers.py: real threads, and members that hang until the test lets them go."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetide.monitor.poll_workers import QUICK_ANSWERS_TO_RETURN, PollWorkers, next_due_ns

MS = 1_000_000


def wait_until(true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.001)


class PromptInput:
    """Counts who was asked; hangs those that shall hang; notes who was asked twice at the same time."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.gates: dict[str, threading.Event] = {}
        self.at_once: set[str] = set()
        self.twice: list[str] = []

    def __call__(self, member: str) -> None:
        if member in self.at_once:
            self.twice.append(member)
        self.at_once.add(member)
        if gate := self.gates.get(member):
            gate.wait(60)
        self.counts[member] += 1
        self.at_once.discard(member)


@contextmanager
def lanes_of(asked: Callable[[str], None], interval_ms: float = 1) -> Iterator[tuple[PollWorkers[str], list[str]]]:
    late: list[str] = []
    workers = PollWorkers("test", asked, int(interval_ms * MS), late=late.append)
    try:
        yield workers, late
    finally:
        workers.stop(10)


def threads() -> int:
    return sum(thread.name == "test" for thread in threading.enumerate())


def test_every_member_is_asked_again_and_again_by_one_thread() -> None:
    asked = PromptInput()
    with lanes_of(asked) as (workers, late):
        workers.set_members(["a", "b", "c"])
        wait_until(lambda: all(asked.counts[name] >= 20 for name in "abc"))
        assert threads() == 1
        assert max(asked.counts.values()) - min(asked.counts.values()) <= 1
    assert late == [] and threads() == 0


def test_one_that_hangs_goes_on_alone_and_comes_back() -> None:
    asked = PromptInput()
    with lanes_of(asked) as (workers, late):
        gate = asked.gates["b"] = threading.Event()
        workers.set_members(["a", "b", "c"])
        wait_until(lambda: (workers.separate_slow(), late == ["b"])[1])
        before = asked.counts.copy()
        wait_until(lambda: all(asked.counts[name] > before[name] + 50 for name in "ac"))
        assert asked.counts["b"] == before["b"]
        workers.separate_slow()
        assert late == ["b"], "told once"
        del asked.gates["b"]
        gate.set()
        wait_until(lambda: asked.counts["b"] > before["b"] + QUICK_ANSWERS_TO_RETURN)
        wait_until(lambda: threads() == 1)
        at = asked.counts["b"]
        wait_until(lambda: asked.counts["b"] > at + 10)
    assert asked.twice == []


def test_several_that_hang_each_have_a_lane() -> None:
    asked = PromptInput()
    with lanes_of(asked) as (workers, late):
        asked.gates |= {name: threading.Event() for name in "ac"}
        workers.set_members(["a", "b", "c"])
        wait_until(lambda: (workers.separate_slow(), sorted(late) == ["a", "c"])[1])
        at = asked.counts["b"]
        wait_until(lambda: asked.counts["b"] > at + 20)
        assert threads() == 3
        for gate in asked.gates.values():
            gate.set()
    assert asked.twice == []


def test_who_left_is_asked_no_more_even_after_it_hung() -> None:
    asked = PromptInput()
    with lanes_of(asked) as (workers, late):
        gate = asked.gates["a"] = threading.Event()
        workers.set_members(["a", "b"])
        wait_until(lambda: (workers.separate_slow(), late == ["a"])[1])
        workers.set_members(["b", "c"])
        wait_until(lambda: asked.counts["c"] > 5)
        gate.set()
        wait_until(lambda: threads() == 1)
        assert asked.counts["a"] == 1


def test_no_member_is_asked_twice_at_once_whatever_hangs() -> None:
    rng = random.Random(7)
    asked = PromptInput()

    def sometimes_slow(member: str) -> None:
        asked(member)
        if rng.random() < 0.05:
            time.sleep(0.004)

    with lanes_of(sometimes_slow) as (workers, _):
        workers.set_members(["a", "b", "c", "d"])
        for _ in range(300):
            workers.separate_slow()
            workers.set_members(rng.sample(["a", "b", "c", "d"], rng.randint(1, 4)))
            time.sleep(0.001)
    assert asked.twice == []


def test_what_asking_raises_ends_no_lane_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    asked = PromptInput()

    def fail_for_a(member: str) -> None:
        asked(member)
        if member == "a":
            raise ZeroDivisionError("oops")

    with lanes_of(fail_for_a) as (workers, late):
        workers.set_members(["a", "b"])
        wait_until(lambda: all(asked.counts[name] > 20 for name in "ab"))
        assert threads() == 1
    assert late == []
    (told,) = caplog.records
    assert told.getMessage() == "asking for test failed, and goes on" and "oops" in (told.exc_text or "")


def test_a_shorter_interval_wakes_every_lane_and_stopping_too() -> None:
    asked = PromptInput()
    with lanes_of(asked) as (workers, late):
        gate = asked.gates["b"] = threading.Event()
        workers.set_members(["a", "b"])
        wait_until(lambda: (workers.separate_slow(), late == ["b"])[1])
        workers.set_interval(3600 * 1000 * MS)
        assert workers.interval_ns == 3600 * 1000 * MS
        gate.set()
        del asked.gates["b"]
        wait_until(lambda: not asked.at_once)
        before = asked.counts.copy()
        workers.set_interval(MS)
        wait_until(lambda: all(asked.counts[name] > before[name] + 5 for name in "ab"))
        workers.set_interval(3600 * 1000 * MS)
    assert threads() == 0


def test_stop_says_whether_a_thread_is_left_in_a_driver() -> None:
    asked = PromptInput()
    gate = asked.gates["a"] = threading.Event()
    workers = PollWorkers("test", asked, MS, late=lambda _: None)
    workers.set_members(["a"])
    wait_until(lambda: "a" in asked.at_once)
    assert workers.stop(0.01) is False
    gate.set()
    assert workers.stop(30) is True


@given(due=st.integers(0, 10**12), took=st.integers(0, 10**10), interval=st.integers(1, 10**9))
def test_rounds_keep_the_beat_and_never_come_in_bursts(due: int, took: int, interval: int) -> None:
    following = next_due_ns(due, due + took, interval)
    assert (following - due) % interval == 0
    assert due + took < following <= due + took + interval


def test_a_shorter_interval_begins_at_once() -> None:
    assert next_due_ns(10_000, 2_000, 100) == 2_100
