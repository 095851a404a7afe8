"""How much one step may copy or map, learned from the steps before it, on a made-up clock."""

from __future__ import annotations

import itertools

import pytest

from pagetide.engine.memory.step_timer import SLICE_BYTES, UNMAP_SLICE_BYTES, Slice, StepTimer
from pagetide.scheduler.outcome import Stats

EXTENT, BLOCK = 1 << 20, 1 << 18
PLAIN_S = 0.01


def test_a_slice_comes_to_take_most_of_a_steps_own_time() -> None:
    for bytes_per_s, plain_s in itertools.product((2e8, 3e9, 8e10), (0.002, 0.05, 0.4)):
        copying = Slice(1 << 16, SLICE_BYTES)
        for _ in range(40):
            copying.record(copying.num_bytes, copying.num_bytes / bytes_per_s, plain_s)
        assert copying.num_bytes / bytes_per_s == pytest.approx(Slice.SHARE * plain_s, rel=0.01), (bytes_per_s, plain_s)


def test_a_slice_learns_from_whole_ones_only_and_stays_within_bounds() -> None:
    copying = Slice(1 << 20, SLICE_BYTES)
    copying.record(SLICE_BYTES // 4, 10.0, 0.01)
    assert copying.num_bytes == SLICE_BYTES
    copying.record(SLICE_BYTES, 10.0, 0.01)
    assert copying.num_bytes == SLICE_BYTES // 2, "one slow step is no measurement"
    copying.record(SLICE_BYTES // 2, 0.0001, 0.01)
    assert copying.num_bytes == 4 * SLICE_BYTES, "eight times as many at most"
    for _ in range(20):
        copying.record(copying.num_bytes, 10.0, 0.01)
    assert copying.num_bytes == 1 << 20


class Steps:
    """A timer, with the steps that it sees."""

    def __init__(self) -> None:
        self.now, self.stats = 100.0, Stats()
        self.timer = StepTimer(EXTENT, BLOCK, self.now)

    def step(
        self, seconds: float = PLAIN_S, *, after: float = 0.0, in_use: bool = True, waited_for: bool = True,
        moved: int = 0, mapped: int = 0, ahead: bool = False, computing_s: float = 0.0, tokens: int = 1,
    ) -> None:  # fmt: skip
        self.now += after
        if not ahead:
            self.timer.begin(self.now, in_use=in_use)
        self.now += seconds
        self.stats.moved_blocks += moved
        self.stats.computing_s += computing_s
        self.stats.computed_tokens += tokens
        self.timer.end(self.now, self.stats, waited_for=waited_for, mapped_bytes=mapped)


def test_the_first_step_and_one_after_a_pause_of_steps_that_callers_wait_for_are_alone() -> None:
    steps = Steps()
    assert steps.timer.alone
    steps.step()
    assert steps.timer.alone
    steps.step()
    assert not steps.timer.alone
    steps.step(after=0.04)
    assert not steps.timer.alone
    steps.step(after=0.06)
    assert steps.timer.alone
    steps.step()
    steps.step(waited_for=False, after=0.03)
    assert not steps.timer.alone
    steps.step(after=0.03)
    assert steps.timer.alone


def test_the_last_use_is_the_end_of_the_last_step_with_a_request() -> None:
    steps = Steps()
    assert steps.timer.used_at == 100.0
    steps.step(seconds=3.0)
    assert steps.timer.used_at == steps.now == 103.0
    steps.step(in_use=False, seconds=1.0)
    assert steps.timer.used_at == 103.0


def plain_steps() -> Steps:
    steps = Steps()
    for _ in range(5):
        steps.step()
    return steps


def test_copies_and_maps_have_slices_of_their_own() -> None:
    steps = plain_steps()
    steps.step(2 * PLAIN_S, moved=SLICE_BYTES // BLOCK)
    assert (steps.timer.copying.num_bytes, steps.timer.mapping.num_bytes) == (pytest.approx(SLICE_BYTES), SLICE_BYTES)
    steps.step(10 * PLAIN_S, mapped=SLICE_BYTES)
    assert steps.timer.copying.num_bytes == pytest.approx(SLICE_BYTES)
    assert steps.timer.mapping.num_bytes == SLICE_BYTES // 2
    steps.step(10 * PLAIN_S, moved=SLICE_BYTES // BLOCK, mapped=SLICE_BYTES // 2)
    assert steps.timer.copying.num_bytes == SLICE_BYTES // 2, "a step that does both counts for the copies"


def test_a_step_that_only_unmaps_says_nothing_about_maps() -> None:
    steps = plain_steps()
    steps.step(10 * PLAIN_S, mapped=-SLICE_BYTES)
    assert steps.timer.mapping.num_bytes == SLICE_BYTES
    steps.step(3 * PLAIN_S, mapped=SLICE_BYTES)
    assert steps.timer.mapping.num_bytes == SLICE_BYTES // 2, "nor does it count as a plain step"


def test_unmaps_have_a_slice_of_their_own() -> None:
    steps = plain_steps()
    steps.step(1.25 * PLAIN_S, mapped=-UNMAP_SLICE_BYTES)
    assert steps.timer.unmapping.num_bytes == pytest.approx(4 * UNMAP_SLICE_BYTES), "which took a quarter of a step"
    assert (steps.timer.mapping.num_bytes, steps.timer.copying.num_bytes) == (SLICE_BYTES, SLICE_BYTES)


def test_steps_alone_and_steps_before_a_plain_one_teach_nothing() -> None:
    steps = Steps()
    steps.step(moved=SLICE_BYTES // BLOCK, seconds=1.0)
    steps.step(moved=SLICE_BYTES // BLOCK, seconds=1.0)
    assert steps.timer.copying.num_bytes == SLICE_BYTES
    steps = plain_steps()
    steps.step(1.0, after=1.0, moved=SLICE_BYTES // BLOCK)
    assert steps.timer.copying.num_bytes == SLICE_BYTES
    steps.step(1.0, moved=SLICE_BYTES // BLOCK)
    assert steps.timer.copying.num_bytes == SLICE_BYTES // 2, "the blocks before count once"


def test_a_step_launched_ahead_is_timed_from_the_end_of_the_one_before() -> None:
    steps = plain_steps()
    steps.step(2 * PLAIN_S, moved=SLICE_BYTES // BLOCK, ahead=True)
    assert steps.timer.copying.num_bytes == pytest.approx(SLICE_BYTES)


def test_a_long_prompt_does_not_make_maps_look_slow() -> None:
    steps = Steps()
    for _ in range(5):
        steps.step(computing_s=0.8 * PLAIN_S)
        steps.step(1e-6, tokens=0)  # says nothing of how long steps are
    steps.step(0.3, mapped=SLICE_BYTES, computing_s=0.3 - 0.7 * PLAIN_S)
    assert steps.timer.mapping.num_bytes == pytest.approx(2 * SLICE_BYTES), "half of a step's time"
    steps.step(0.3, mapped=2 * SLICE_BYTES, computing_s=0.3 - 1.2 * PLAIN_S)
    assert steps.timer.mapping.num_bytes == pytest.approx(2 * SLICE_BYTES)


def test_a_burst_that_maps_in_each_step_is_compared_with_its_own_computing() -> None:
    steps = Steps()
    for _ in range(2):
        steps.step(0.3, mapped=SLICE_BYTES, computing_s=0.25)
    assert steps.timer.mapping.num_bytes == pytest.approx(5 * SLICE_BYTES), "from the second on: the first is alone"
