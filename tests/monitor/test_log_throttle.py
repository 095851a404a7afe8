"""monitor/log_throttle.py, at times that the test says."""

from __future__ import annotations

from pagetide.monitor.log_throttle import MAX_CAUSES, QUIET_CAUSE_NS, QUIET_NS, LogThrottle, Occurrences


def test_what_changes_seldom_is_told_each_time_and_at_once() -> None:
    news = LogThrottle()
    assert news.record(None, 0) == 0
    for number, state in enumerate(["lost", None, "slow", "lost"]):
        assert news.record(state, number * QUIET_NS) == 1
        assert news.record(state, number * QUIET_NS + 1) == 0
        assert news.state == state


def test_what_flaps_is_told_when_it_was_quiet_for_long_enough_with_the_number_of_changes() -> None:
    news = LogThrottle()
    told = [news.record("lost" if number % 2 == 0 else None, number) for number in range(101)]
    assert told == [1] + [0] * 100
    assert news.record("lost", QUIET_NS - 1) == 0
    assert news.record("lost", QUIET_NS) == 100
    assert [news.record("lost", time) for time in (QUIET_NS + 1, 2 * QUIET_NS, 9 * QUIET_NS)] == [0, 0, 0]
    assert news.record(None, 9 * QUIET_NS + 1) == 1


def test_what_happens_again_and_again_is_told_at_once_and_then_once_a_minute_for_each_cause() -> None:
    occurrences = Occurrences()
    assert [occurrences.record("a", time) for time in range(5)] == [1, 0, 0, 0, 0]
    assert [occurrences.record("b", time) for time in range(3)] == [1, 0, 0]
    assert occurrences.record("a", QUIET_CAUSE_NS - 1) == 0
    assert occurrences.record("a", QUIET_CAUSE_NS) == 6
    assert occurrences.record("a", QUIET_CAUSE_NS + 1) == 0
    assert occurrences.record("b", 5 * QUIET_CAUSE_NS) == 3


def test_many_causes_cost_a_bounded_amount() -> None:
    occurrences = Occurrences()
    for number in range(1000):
        assert occurrences.record(str(number), number) == 1
    assert len(occurrences._causes) == MAX_CAUSES
    assert occurrences.record("999", 1000) == 0
    assert occurrences.record("0", 1000) == 1
