"""The forecast of output lengths: what it learns, from whom, and the peak it expects."""

from __future__ import annotations

import numpy as np
import pytest

from pagetide.scheduler.forecast import EDGES, LengthForecast


def taught(lengths, allowed=1_000, **options) -> LengthForecast:
    forecast = LengthForecast(**options)
    for length in lengths:
        forecast.observe(int(length), allowed)
    return forecast


def peak(forecast, known, generated, allowed, block_size=16):
    return forecast.peak(*(np.asarray(numbers, np.int64) for numbers in (known, generated, allowed)), block_size)


def longer_than(forecast, tokens, running=(), longest=1_000) -> float:
    """The share of outputs longer than `tokens`, one of EDGES."""
    (at,) = np.flatnonzero(EDGES == tokens)
    return float(forecast.survival(np.asarray(running, np.int64), longest)[at])


def test_without_knowledge_every_allowed_length_is_as_likely():
    forecast = LengthForecast()
    for tokens in (0, 256, 512, 768):
        assert longer_than(forecast, tokens, longest=1_024) == pytest.approx(1 - tokens / 1_024)


def test_lengths_are_learned():
    forecast = taught(np.random.default_rng(0).integers(256, 768, 500))
    assert longer_than(forecast, 256) == pytest.approx(1, abs=0.02)
    assert longer_than(forecast, 512) == pytest.approx(0.5, abs=0.06)
    assert longer_than(forecast, 768) == pytest.approx(0, abs=0.02)


def test_who_still_runs_counts_as_having_come_so_far():
    """Ten short ones ended; ninety of their age run on. Without these it would look as if everybody ended short."""
    forecast = taught([100] * 10)
    assert longer_than(forecast, 112) < 0.35
    assert longer_than(forecast, 112, running=[400] * 90) == pytest.approx(0.9, abs=0.02)


def test_long_after_the_start_the_ended_tell_the_lengths_alone():
    lengths = np.random.default_rng(1).integers(100, 300, 5_000)
    running = np.random.default_rng(2).integers(0, 200, 256)
    forecast = taught(lengths)
    assert longer_than(forecast, 208, running) == pytest.approx((lengths > 208).mean(), abs=0.06)


def test_who_was_cut_tells_nothing_of_where_it_would_have_ended():
    forecast = taught([50] * 300, allowed=50)
    assert longer_than(forecast, 48, longest=1_000) > 0.95
    assert peak(forecast, [100] * 10, [0] * 10, [50] * 10).expected_blocks > 0.9 * 10 * 150 / 16


def test_old_lengths_are_forgotten():
    forecast = taught([100] * 2_000 + [700] * 2_000)
    assert longer_than(forecast, 256) > 0.95


def test_a_sequence_that_runs_to_what_it_is_allowed_is_counted_in_full():
    """All cut at 64: each comes to 36 + 64 tokens, and nobody leaves before."""
    forecast = taught([64] * 400, allowed=64)
    assert peak(forecast, [36] * 8, [0] * 8, [64] * 8).blocks == 8 * 7


def test_one_fixed_length_needs_next_to_no_margin():
    alike = peak(taught([300] * 500), [200] * 50, [0] * 50, [1_000] * 50)
    differing = peak(taught([20, 580] * 250), [200] * 50, [0] * 50, [1_000] * 50)
    assert alike.margin_blocks < 0.02 * alike.expected_blocks
    assert alike.expected_blocks == pytest.approx(50 * 500 / 16, rel=0.08)  # bins and times are that coarse
    assert differing.margin_blocks > 0.05 * differing.expected_blocks


def test_those_about_to_end_make_room():
    """Lengths of 300: who has 290 will not grow to what somebody at the start grows to."""
    forecast = taught([300] * 500)
    old = peak(forecast, [490] * 50, [290] * 50, [1_000] * 50)
    new = peak(forecast, [200] * 50, [0] * 50, [1_000] * 50)
    assert old.blocks <= 1.02 * 50 * 490 / 16
    assert old.in_steps <= 16 < 200 < new.in_steps


def test_the_peak_is_what_a_simulation_gives():
    """Against draws from the true lengths, each sequence given that it is longer than what it has generated."""
    rng = np.random.default_rng(3)
    forecast = taught(rng.integers(256, 769, 5_000), allowed=1_024, deviations=0.0)
    generated = rng.integers(0, 600, 80)
    known = generated + rng.integers(256, 769, 80)
    draws = rng.integers(256, 769, (400, 2_000))
    held = np.zeros((2_000, 769))
    for tokens, given in zip(known, generated, strict=True):
        lengths = draws[rng.integers(400)]
        lengths = np.where(lengths > given, lengths, rng.integers(max(256, given + 1), 769, 2_000))
        times = np.arange(769)
        held += np.where(lengths[:, None] - given > times, -(-(tokens + times) // 16), 0)
    assert peak(forecast, known, generated, [1_024] * 80).expected_blocks == pytest.approx(held.mean(0).max(), rel=0.01)


def test_the_order_of_sequences_is_nothing():
    rng = np.random.default_rng(4)
    forecast = taught(rng.integers(1, 500, 100))
    numbers = np.array([(400 + g, g, g + more) for g, more in rng.integers(1, 400, (60, 2))])
    assert peak(forecast, *numbers.T) == peak(forecast, *rng.permutation(numbers).T)


@pytest.mark.parametrize("length", [2**17 - 1, 2**17, 2**20])
def test_the_longest_outputs(length):
    forecast = taught([length] * 10, allowed=2**21)
    assert np.isfinite(peak(forecast, [length], [length - 1], [2**21]).expected_blocks)
    assert peak(forecast, [100], [0], [2**21]).blocks >= 100 / 16
