"""The trend against what is known exactly, against a naive regression, and under any numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetide.monitor.trend import Trend

SECOND, TAU_S, GIB, MIB = 10**9, 5.0, 1 << 30, 1 << 20

Samples = Sequence[tuple[int, int]]


def trends(samples: Samples) -> list[float | None]:
    trend = Trend()
    return [trend.update(at_ns, used) for at_ns, used in samples]


def sampled(used: Callable[[float], float], times_s: Sequence[float]) -> Samples:
    return [(round(at * SECOND), round(used(at))) for at in times_s]


def every(step_s: float, until_s: float) -> list[float]:
    return [step * step_s for step in range(round(until_s / step_s) + 1)]


def irregular(seed: int, until_s: float, longest_s: float) -> list[float]:
    rng, times = random.Random(seed), [0.0]
    while times[-1] < until_s:
        times.append(times[-1] + rng.uniform(0.001, longest_s))
    return times


def naive(samples: Samples) -> float:
    """Weighted least squares over the whole past, with nothing incremental in it."""
    end = samples[-1][0]
    ages = [(end - at_ns) / SECOND / TAU_S for at_ns, _ in samples]
    # a sample stands for the time since the one before, the first for all the time before it
    weights = [math.exp(-ages[0])] + [math.exp(-age) - math.exp(-before) for before, age in pairwise(ages)]
    assert sum(weights) == pytest.approx(1)
    mean_x = sum(w * -a * TAU_S for w, a in zip(weights, ages, strict=True))
    mean_y = sum(w * used for w, (_, used) in zip(weights, samples, strict=True))
    deviations = [
        (w, -a * TAU_S - mean_x, used - mean_y) for w, a, (_, used) in zip(weights, ages, samples, strict=True)
    ]
    cov, var_x, var_y = (
        sum(w * one * other for w, one, other in products)
        for products in (
            deviations,
            [(w, x, x) for w, x, _ in deviations],
            [(w, y, y) for w, _, y in deviations],
        )
    )
    explained = cov * cov / (var_x * var_y) if var_y else 0.0
    return cov / var_x * max(0.0, (explained - 0.1) / 0.9)


@pytest.mark.parametrize("rate", [1, 1000, 3 * GIB, -GIB // 7])
@pytest.mark.parametrize("times", [every(0.02, 60), every(1, 60), irregular(1, 60, 1.5)], ids=["20 ms", "1 s", "any"])
def test_constant_growth_is_told_exactly_from_the_first_word_on(rate: int, times: list[float]) -> None:
    found = trends(sampled(lambda at: 100 * GIB + rate * at * 1000, times))
    said = [value for value in found if value is not None]
    assert len(said) == sum(at >= TAU_S for at in times)
    assert said == pytest.approx([rate * 1000] * len(said), rel=2e-3)  # bytes are whole
    assert found[: len(found) - len(said)] == [None] * (len(found) - len(said))


def test_growth_that_begins_is_told_within_a_few_time_constants() -> None:
    found = trends(sampled(lambda at: max(0.0, at - 30) * GIB, every(0.02, 60)))
    assert found[round(30 / 0.02)] == 0.0
    assert found[round(40 / 0.02)] == pytest.approx(0.47 * GIB, rel=0.02)
    assert found[round(50 / 0.02)] == pytest.approx(0.88 * GIB, rel=0.02)
    assert found[round(60 / 0.02)] == pytest.approx(GIB, rel=0.03)
    later = [value for value in found[round(30 / 0.02) :] if value is not None]
    assert min(later) == 0.0 and max(later) < 1.25 * GIB


def test_growth_that_ends_is_forgotten() -> None:
    found = trends(sampled(lambda at: min(at, 30) * GIB, every(0.02, 90)))
    assert found[round(30 / 0.02)] == pytest.approx(GIB)
    assert found[round(75 / 0.02) :] == [0.0] * (len(found) - round(75 / 0.02))


@pytest.mark.parametrize("step", [10 * GIB, -GIB])
def test_a_single_step_counts_little_and_not_for_long(step: int) -> None:
    found = trends(sampled(lambda at: 20 * GIB + (step if at > 20 else 0), every(0.02, 100)))
    after = [value for value in found[round(20 / 0.02) + 1 :] if value is not None]
    assert max(abs(value) for value in after) == pytest.approx(0.23 * abs(step) / TAU_S, rel=0.01)
    assert all(value * step >= 0 for value in after)
    assert after[round(6 * TAU_S / 0.02) :] == [0.0] * (len(after) - round(6 * TAU_S / 0.02))


@pytest.mark.parametrize("period_s", [0.5, 1, 2, 5])
def test_a_staircase_is_the_slope_it_climbs(period_s: float) -> None:
    found = trends(sampled(lambda at: math.floor(at / period_s) * period_s * GIB, every(0.02, 120)))
    for value in found[round(60 / 0.02) :]:
        assert value == pytest.approx(GIB, rel=0.2)


@pytest.mark.parametrize("seed", range(5))
def test_noise_around_a_level_is_no_trend(seed: int) -> None:
    rng = random.Random(seed)
    found = trends([(step * 20_000_000, 40 * GIB + rng.randrange(-64 * MIB, 64 * MIB)) for step in range(6000)])
    assert set(found[round(30 / 0.02) :]) == {0.0}


@pytest.mark.parametrize("period_s", [0.3, 2, 5, 9])
def test_a_wave_of_up_to_two_time_constants_is_no_trend(period_s: float) -> None:
    found = trends(sampled(lambda at: 40 * GIB + GIB * math.sin(at * 2 * math.pi / period_s), every(0.02, 120)))
    assert max(abs(value or 0) for value in found[round(60 / 0.02) :]) < 0.02 * GIB


@pytest.mark.parametrize("seed", range(5))
def test_irregular_sampling_tells_the_same_as_regular(seed: int) -> None:
    def used(at: float) -> float:  # slow growth, then fast, then none
        return 10 * GIB + GIB * (0.1 * at + 2 * max(0.0, min(at, 50) - 40))

    regular = dict(zip(every(0.02, 80), trends(sampled(used, every(0.02, 80))), strict=True))
    times = irregular(seed, 79, 0.4)
    for at, value in list(zip(times, trends(sampled(used, times)), strict=True))[100:]:
        expected = regular[round(at / 0.02) * 0.02]
        assert expected is not None
        assert value == pytest.approx(expected, abs=0.1 * GIB)


@pytest.mark.parametrize("seed", range(10))
def test_it_agrees_with_a_naive_regression(seed: int) -> None:
    rng, used, samples = random.Random(seed), 50 * GIB, []
    for at in irregular(seed, 30, rng.choice([0.02, 0.5, 4])):
        used += rng.choice([0, 0, rng.randrange(-GIB, 2 * GIB)])
        samples.append((7 * 10**15 + round(at * SECOND), used))
    found = trends(samples)
    for end in range(1, len(samples), 1 + len(samples) // 50):
        if (value := found[end]) is not None:
            assert value == pytest.approx(naive(samples[: end + 1]), rel=1e-6, abs=1e-3)


def test_it_keeps_its_digits_over_years_and_at_any_level() -> None:
    year_ns, trend = 365 * 86400 * SECOND, Trend()
    for step in range(1000):
        value = trend.update(40 * year_ns + step * 20_000_000, 2**63 + step * 20)
    assert value == pytest.approx(1000, rel=1e-9)


# --- starting anew


def speaking(until_s: float = 10) -> Trend:
    trend = Trend()
    for at_ns, used in sampled(lambda at: at * GIB, every(0.02, until_s)):
        value = trend.update(at_ns, used)
    assert value is not None
    return trend


@pytest.mark.parametrize(
    ("at_s", "used"), [(10.02, None), (15.5, 0), (9.9, 0)], ids=["unknown", "silence", "backwards"]
)
def test_what_breaks_the_past_off_starts_anew(at_s: float, used: int | None) -> None:
    trend = speaking()
    assert trend.update(round(at_s * SECOND), used) is None
    found = [trend.update(round((at_s + at) * SECOND), round(at * MIB)) for at in every(0.02, 10)]
    assert found[: round(TAU_S / 0.02)] == [None] * round(TAU_S / 0.02)
    assert found[-1] == pytest.approx(MIB, rel=1e-6)  # nothing of the GiB before


def test_reset_forgets() -> None:
    trend = speaking()
    trend.reset()
    assert trend.update(round(10.02 * SECOND), 0) is None
    assert trend.update(round(10.04 * SECOND), GIB) is None


def test_two_samples_at_one_instant_are_no_slope() -> None:
    trend = speaking()
    assert trend.update(10 * SECOND, 10 * GIB) == pytest.approx(GIB, rel=1e-6)
    value = trend.update(10 * SECOND, 11 * GIB)
    assert value is not None and math.isfinite(value)


def test_a_time_constant_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 ns, got 0"):
        Trend(0)


# --- any numbers

steps = st.lists(st.tuples(st.integers(0, 6 * SECOND), st.integers(0, 2**40)), max_size=60)


def added_up(steps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    at_ns, samples = 0, []
    for elapsed_ns, used in steps:
        at_ns += elapsed_ns
        samples.append((at_ns, used))
    return samples


@given(st.lists(st.tuples(st.integers(0, 2**63), st.none() | st.integers(0, 2**64 - 1))), st.integers(1, 2**63))
def test_it_is_always_finite(samples: list[tuple[int, int | None]], time_constant_ns: int) -> None:
    trend = Trend(time_constant_ns)
    for at_ns, used in sorted(samples, key=lambda sample: sample[0]) + samples:
        value = trend.update(at_ns, used)
        assert value is None or math.isfinite(value)


@given(steps, st.integers(0, 2**60), st.integers(0, 2**62))
def test_neither_the_level_nor_the_hour_matters(steps: list[tuple[int, int]], level: int, hour: int) -> None:
    samples = added_up(steps)
    assert trends([(at_ns + hour, used + level) for at_ns, used in samples]) == trends(samples)


@given(steps, st.integers(-3, 20))
def test_it_scales_with_the_bytes(steps: list[tuple[int, int]], power: int) -> None:
    samples = [(at_ns, used << 3) for at_ns, used in added_up(steps)]
    scaled = [(at_ns, used << power if power >= 0 else used >> -power) for at_ns, used in samples]
    assert trends(scaled) == [None if value is None else value * 2.0**power for value in trends(samples)]


@given(steps)
def test_what_falls_is_the_mirror_of_what_rises(steps: list[tuple[int, int]]) -> None:
    samples = added_up(steps)
    mirrored = trends([(at_ns, 2**40 - used) for at_ns, used in samples])
    assert mirrored == [None if value is None else -value for value in trends(samples)]
