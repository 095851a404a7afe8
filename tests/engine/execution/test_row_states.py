"""The host's state per row: tokens, the sampling of its request, and faults, against a real sampler that fails when told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagetide.engine.execution.parts import ChunkGroup, Computed
from pagetide.engine.execution.row_states import RowStates, format_error
from pagetide.engine.sampling.sampler import Sampler
from pagetide.scheduler.plan import NO_ROWS, Admission, ForcedTokens, Plan
from pagetide.scheduler.request import Sampling

ROWS, TOKENS, VOCAB = 4, 16, 32


class FailingSampler(Sampler):
    """Raises for the next `failures` calls of a method by name, and records the admissions that succeed."""

    def __init__(self) -> None:
        super().__init__(ROWS, VOCAB)
        self.failures: dict[str, int] = {}
        self.admissions: list[tuple[int, list[int]]] = []
        self.releases: list[int] = []

    def _fail(self, name: str) -> None:
        if self.failures.get(name, 0):
            self.failures[name] -= 1
            raise RuntimeError(f"{name} fails")

    def admit(self, row: int, sampling: Sampling, token_ids: Any, num_prompt: int) -> None:
        self._fail("admit")
        super().admit(row, sampling, token_ids, num_prompt)
        self.admissions.append((row, token_ids.tolist()))

    def release(self, rows: Any) -> None:
        self._fail("release")
        super().release(rows)
        self.releases += rows.tolist()

    def record_tokens(self, rows: Any, tokens: Any) -> None:
        self._fail("record_tokens")
        super().record_tokens(rows, tokens)


def admission(row: int, tokens: list[int], **sampling: Any) -> Admission:
    return Admission(row, f"r{row}", np.array(tokens, np.int32), len(tokens), Sampling(8, **sampling))


def plan_of(chunks: list[tuple[int, int, int]] = [], **changes: Any) -> Plan:  # noqa: B006
    """Of chunks (row, start, length), each of which samples."""
    rows, starts, lengths = np.array(chunks, np.int64).reshape(-1, 3).T
    return Plan(0, rows, starts, lengths, np.ones(len(rows), np.bool_), **changes)


def group(plan: Plan) -> ChunkGroup:
    return ChunkGroup.of(plan)


@pytest.fixture
def sampler() -> FailingSampler:
    return FailingSampler()


@pytest.fixture
def states(sampler: FailingSampler) -> RowStates:
    """Rows 0 and 2 are admitted."""
    states = RowStates(sampler, ROWS, TOKENS)
    states.apply(plan_of(admitted=(admission(0, [5, 6, 7]), admission(2, [9]))))
    return states


def test_admitted_and_given_tokens_are_known(states: RowStates, sampler: FailingSampler) -> None:
    assert states.tokens[0, :4].tolist() == [5, 6, 7, 0] and states.tokens[2, 0] == 9
    assert sampler.admissions == [(0, [5, 6, 7]), (2, [9])]
    states.apply(plan_of(given=ForcedTokens(np.array([2, 0]), np.array([1, 3]), np.array([4, 8], np.int32))))
    assert states.tokens[2, 1] == 4 and states.tokens[0, 3] == 8
    assert len(sampler.admissions) == 2 and not states.faulty


def test_rows_start_again_if_the_sampler_cannot_take_their_tokens(states: RowStates, sampler: FailingSampler) -> None:
    sampler.failures["record_tokens"] = 1
    states.apply(plan_of(given=ForcedTokens(np.array([0]), np.array([3]), np.array([8], np.int32))))
    assert sampler.admissions[2:] == [(0, [5, 6, 7, 8])] and not states.faulty


def test_sampling_restarts_for_chunks_that_sample(states: RowStates, sampler: FailingSampler) -> None:
    states.tokens[2, 1:3] = 3, 4
    part = group(plan_of([(0, 1, 1), (2, 0, 3)]))
    part.samples[0] = False
    states.restart_sampling(part)
    assert sampler.admissions[2:] == [(2, [9, 3, 4])]


def test_sampling_that_cannot_start_fails_the_row_until_it_is_released(
    states: RowStates, sampler: FailingSampler
) -> None:
    sampler.failures["admit"] = 1
    states.apply(plan_of(admitted=(admission(1, [3]),)))
    assert not states.faulty, "the second attempt succeeded"
    sampler.failures["admit"] = 2
    states.apply(plan_of(admitted=(admission(3, [3]),)))
    plan = plan_of([(0, 3, 1), (3, 0, 1)])
    total = Computed(np.zeros(2, np.int32))
    assert states.faulty
    assert states.computable(plan, group(plan), total).rows.tolist() == [0]
    assert total.failures == {1: "RuntimeError: admit fails"}
    states.apply(plan_of(released=np.array([3])))
    assert not states.faulty


def test_sampling_that_was_not_released_is_released_before_the_next_admission(
    states: RowStates, sampler: FailingSampler
) -> None:
    sampler.releases.clear()
    states.apply(plan_of(admitted=(admission(2, [1]),)))
    by_admission = list(sampler.releases)
    sampler.failures["release"] = 1
    states.apply(plan_of(released=np.array([0, 2])))
    assert sampler.releases == by_admission
    for expected in ([2, *by_admission], by_admission):  # only the first admission finds something to release
        sampler.releases.clear()
        states.apply(plan_of(admitted=(admission(2, [1]),)))
        assert sampler.releases == expected


@pytest.mark.parametrize("method", ["admit", "release"])
def test_an_interrupt_is_not_a_fault(states: RowStates, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(states.sampler, method, interrupted)
    changes = {"admitted": (admission(1, [3]),)} if method == "admit" else {"released": np.array([0])}
    with pytest.raises(KeyboardInterrupt):
        states.apply(plan_of(**changes))
    assert not states.faulty


def test_a_single_token_is_deferred_first_and_fails_the_second_time(states: RowStates) -> None:
    plan, error = plan_of([(0, 3, 1), (2, 1, 1)]), RuntimeError("no")
    total = Computed(np.zeros(2, np.int32))
    states.defer_or_fail(plan, 1, error, total)
    states.computed(plan, total)
    assert (total.deferred, total.failures, states.faulty) == ({1}, {}, True)
    later = plan_of([(2, 1, 1), (2, 2, 1), (0, 4, 1)])
    total = Computed(np.zeros(3, np.int32))
    part = states.computable(later, group(later), total)
    assert (part.chunks.tolist(), total.deferred) == ([0, 2], {1}), "what follows a deferred chunk is deferred too"
    states.defer_or_fail(later, 0, error, total)
    assert (total.deferred, total.failures) == ({1}, {0: "RuntimeError: no"})


def test_a_deferral_ends_when_the_chunk_is_computed(states: RowStates) -> None:
    plan = plan_of([(2, 1, 1)])
    total = Computed(np.zeros(1, np.int32))
    states.defer_or_fail(plan, 0, RuntimeError("no"), total)
    states.computed(plan, Computed(np.zeros(1, np.int32)))
    assert not states.faulty


def test_failed_rows_fail_with_the_message(states: RowStates) -> None:
    states.fail(np.array([0, 2]), format_error(ValueError("too late")))
    plan = plan_of([(0, 3, 1), (2, 1, 1)])
    total = Computed(np.zeros(2, np.int32))
    assert len(states.computable(plan, group(plan), total)) == 0
    assert total.failures == dict.fromkeys((0, 1), "ValueError: too late")


def test_tokens_stay_on_the_device_unless_the_host_needs_them(states: RowStates) -> None:
    changes = (admission(1, [3], logprobs=1), admission(3, [3], num_candidates=2))
    states.apply(plan_of(admitted=changes))
    drawn = [states.draws_on_device(np.array(rows, np.int64), np.full(len(rows), 5)) for rows in ([0, 2], [0, 1], [3])]
    assert drawn == [True, False, False]
    assert not states.draws_on_device(NO_ROWS, NO_ROWS)
    assert states.has_candidates.tolist() == [False, False, False, True]
    states.apply(plan_of(admitted=(admission(3, [3]),)))
    assert not states.has_candidates.any()
