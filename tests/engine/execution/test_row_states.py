"""The host's state per row: sampling that could not be released, and chunks behind one that could not be computed."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np

from pagetide.engine.execution.parts import ChunkGroup, Computed
from pagetide.engine.execution.row_states import RowStates, format_error
from pagetide.engine.sampling.sampler import Sampler
from pagetide.scheduler.plan import Plan
from pagetide.scheduler.request import Request, Sampling

ROWS, TOKENS, VOCAB = 4, 16, 32


def admitted(tokens_of: dict[int, list[int]]) -> dict[int, Request]:
    return {row: Request(f"r{row}", np.array(tokens, np.int32), Sampling(8)) for row, tokens in tokens_of.items()}


def plan_of(chunks: list[tuple[int, int, int]] = [], **changes: Any) -> Plan:  # noqa: B006
    """Of chunks (row, start, length), each of which samples."""
    rows, starts, lengths = np.array(chunks, np.int64).reshape(-1, 3).T
    return Plan(0, rows, starts, lengths, np.ones(len(rows), np.bool_), **changes)


def test_unreleased_sampling_is_released_before_the_next_admission() -> None:
    sampler = Sampler(ROWS, VOCAB)
    states, sampler.release = RowStates(sampler, ROWS, TOKENS), (release := Mock(wraps=sampler.release))

    def released_by_an_admission() -> list[list[int]]:
        release.reset_mock()
        states.apply(plan_of(admitted=admitted({2: [1]})))
        return [call.args[0].tolist() for call in release.call_args_list]

    usual = released_by_an_admission()
    release.side_effect = RuntimeError("release fails")
    states.apply(plan_of(released=np.array([0, 2])))
    release.side_effect = None
    assert released_by_an_admission() == [[2], *usual]
    assert released_by_an_admission() == usual, "only the first admission finds something to release"


def test_a_single_token_is_deferred_before_it_fails() -> None:
    states = RowStates(Sampler(ROWS, VOCAB), ROWS, TOKENS)
    states.apply(plan_of(admitted=admitted({0: [5, 6, 7], 2: [9]})))
    plan, error = plan_of([(0, 3, 1), (2, 1, 1)]), RuntimeError("no")
    total = Computed(np.zeros(2, np.int32))
    states.defer_or_fail(plan, 1, error, total)
    states.computed(plan, total)
    assert (total.deferred, total.failures, states.faulty) == ({1}, {}, True)
    later = plan_of([(2, 1, 1), (2, 2, 1), (0, 4, 1)])
    total = Computed(np.zeros(3, np.int32))
    part = states.computable(later, ChunkGroup.of(later), total)
    assert (part.chunks.tolist(), total.deferred) == ([0, 2], {1}), "what follows a deferred chunk is deferred too"
    states.defer_or_fail(later, 0, error, total)
    assert (total.deferred, total.failures) == ({1}, {0: "RuntimeError: no"})
    states.computed(plan, Computed(np.zeros(2, np.int32)))
    assert not states.faulty, "the deferred chunk was computed"
    states.fail(np.array([0, 2]), format_error(ValueError("too late")))
    total = Computed(np.zeros(2, np.int32))
    assert len(states.computable(plan, ChunkGroup.of(plan), total)) == 0
    assert total.failures == dict.fromkeys((0, 1), "ValueError: too late")
