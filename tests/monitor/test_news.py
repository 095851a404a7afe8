"""monitor/news.py, at times that the test says."""

from __future__ import annotations

from pagetide.monitor.news import QUIET_NS, News


def test_what_changes_seldom_is_told_each_time_and_at_once() -> None:
    news = News()
    assert news.take(None, 0) == 0
    for number, state in enumerate(["lost", None, "slow", "lost"]):
        assert news.take(state, number * QUIET_NS) == 1
        assert news.take(state, number * QUIET_NS + 1) == 0
        assert news.state == state


def test_what_flaps_is_told_when_it_was_quiet_for_long_enough_with_the_number_of_changes() -> None:
    news = News()
    told = [news.take("lost" if number % 2 == 0 else None, number) for number in range(101)]
    assert told == [1] + [0] * 100
    assert news.take("lost", QUIET_NS - 1) == 0
    assert news.take("lost", QUIET_NS) == 100
    assert [news.take("lost", time) for time in (QUIET_NS + 1, 2 * QUIET_NS, 9 * QUIET_NS)] == [0, 0, 0]
    assert news.take(None, 9 * QUIET_NS + 1) == 1
