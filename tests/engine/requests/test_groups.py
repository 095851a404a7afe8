"""Request groups: what they make of events, faults, hand-overs and lost ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagetide import SamplingParams
from pagetide.engine.requests.beams import BeamRules
from pagetide.engine.requests.groups import BeamGroup, ContinuationGroup
from pagetide.engine.requests.inputs import PromptInput
from pagetide.engine.requests.states import GroupActions, RequestState, ready_chunk
from pagetide.engine.text.encoder import PreparedParams
from pagetide.scheduler.outcome import BeamMove, Finished
from pagetide.scheduler.plan import NO_TOKENS, Candidates
from pagetide.scheduler.request import Request

PROMPT = np.array([1, 2], np.int32)


def as_input(params: SamplingParams) -> PromptInput:
    return PromptInput(None, PROMPT, params, PreparedParams())


def continuations(n: int = 2) -> ContinuationGroup:
    params = SamplingParams(n=n, max_new_tokens=4)
    return ContinuationGroup(0, as_input(params), Request("r", PROMPT, params.resolve()).forked(n))


def beams(n: int = 1) -> BeamGroup:
    params = SamplingParams(num_beams=2, n=n, max_new_tokens=4)
    requests = Request("r", PROMPT, params.resolve()).forked(2)
    return BeamGroup(0, as_input(params), requests, BeamRules(2, 1.0, False, frozenset({9}), 4))


def ended(request_id: str, tokens: list[int], reason: Any = "length", **more: Any) -> Finished:
    return Finished(request_id, reason, np.array(tokens, np.int32), more.pop("num_preemptions", 0), **more)


def candidates(*tokens: int) -> Candidates:
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    return Candidates(0, np.array(tokens, np.int32), logprobs, logprobs)


def completions(group: ContinuationGroup | BeamGroup) -> list[tuple[str, list[int], str | None]]:
    return [(one.finish_reason, one.token_ids, one.error) for one in group.output.completions]


# -- continuations -----------------------------------------------------------------------------------------------------


def test_each_continuation_has_its_own_tokens_and_end() -> None:
    group = continuations()
    assert group.request_ids == ["r", "r.1"] and not group.is_finished
    for token in (5, 6):
        assert group.deliver("r.1", token, 1.0) is None
    assert group.deliver("r.1", ended("r.1", [5, 6]), 2.0) is None
    assert group.request_ids == ["r"] and [state.number for state in group.exportable] == [0]
    assert not group.is_finished
    assert group.deliver("r", ended("r", [], "aborted"), 3.0) is None
    assert group.is_finished and group.request_ids == []
    assert completions(group) == [("aborted", [], None), ("length", [5, 6], None)]


def test_a_failed_delivery_ends_its_continuation_alone() -> None:
    group = continuations()
    actions = group.fail_delivery("r", RuntimeError("broke"), 1.0)
    assert actions == GroupActions(aborts=[("r", "error")])
    group.deliver("r", ended("r", [5], "error"), 2.0)
    group.deliver("r.1", ended("r.1", [6]), 2.0)
    assert completions(group) == [("error", [5], "RuntimeError: broke"), ("length", [6], None)]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(1)])
def test_a_continuation_goes_on_after_an_interrupt(interrupt: BaseException) -> None:
    group = continuations(1)
    assert group.fail_delivery("r", interrupt, 1.0) == GroupActions()
    group.deliver("r", ended("r", [5]), 2.0)
    assert completions(group) == [("length", [5], None)]


def test_all_unfinished_continuations_fail_together() -> None:
    group = continuations(3)
    group.deliver("r.1", ended("r.1", [5]), 1.0)
    group.fail(OSError("gone"))
    for name in ("r", "r.2"):
        group.deliver(name, ended(name, [], "error"), 2.0)
    assert completions(group) == [("error", [], "OSError: gone"), ("length", [5], None), ("error", [], "OSError: gone")]


def test_a_continuation_is_handed_over_alone() -> None:
    group = continuations()
    state = group.states[1]
    assert group.requests_of(state) == ["r.1"]
    group.deliver("r.1", 7, 1.0)
    handover = group.hand_over(state, [ended("r.1", [7], "aborted", num_preemptions=2)], 2.0)
    assert (handover.token_ids.tolist(), handover.index, handover.num_preemptions) == ([7], 1, 2)
    assert state.completion is not None and group.request_ids == ["r"]


@pytest.mark.parametrize("make", [continuations, beams])
def test_lost_ends_are_errors(make: Any) -> None:
    group = make()
    group.end_lost(1.0)
    assert group.is_finished
    for reason, tokens, error in completions(group):
        assert (reason, tokens) == ("error", []) and "was lost" in str(error)
    before = [state.completion for state in group.states]
    group.end_lost(2.0)
    assert [state.completion for state in group.states] == before


def test_chunks_come_from_each_state_in_turn_and_the_last_has_the_output() -> None:
    group = continuations()
    states = list(group.states)
    assert ready_chunk(states, 1) is None
    for name in ("r", "r.1"):
        group.deliver(name, 5, 1.0)
        group.deliver(name, 6, 1.0)
    assert ready_chunk(states, 3) is None
    chunks = [ready_chunk(states, 2), ready_chunk(states, 2), ready_chunk(states, 2)]
    assert [None if c is None else (c.number, c.token_ids) for c in chunks] == [(0, [5, 6]), (1, [5, 6]), None]
    for name in ("r.1", "r"):
        group.deliver(name, ended(name, [5, 6]), 2.0)
    first, last = ready_chunk(states, 2), ready_chunk(states, 2)
    assert first is not None and last is not None
    assert (first.output, last.output) == (None, group.output) and not states


# -- beams -------------------------------------------------------------------------------------------------------------


def test_candidates_become_moves_once_all_are_there() -> None:
    group = beams()
    first = group.deliver("r", candidates(5, 6), 0.0)
    assert first == GroupActions(moves=[BeamMove("r", "r", 5), BeamMove("r.1", "r.1", 6)], spare=[])
    assert group.deliver("r", candidates(7), 0.0) is None
    second = group.deliver("r.1", candidates(8), 0.0)
    assert second is not None and [move.token for move in second.moves] == [7, 8] and second.aborts == ()


def test_a_search_that_is_over_ends_its_requests_and_gives_its_hypotheses() -> None:
    group = beams(n=2)
    group.deliver("r", candidates(5, 6), 0.0)
    group.deliver("r", candidates(9), 0.0)
    over = group.deliver("r.1", candidates(9), 0.0)
    assert over == GroupActions(aborts=[("r", "stop"), ("r.1", "stop")])
    assert group.requests_of(group.states[0]) == [] and group.request_ids == ["r", "r.1"]
    assert group.deliver("r", ended("r", [5], "stop"), 1.0) is None and not group.is_finished
    assert group.deliver("r.1", ended("r.1", [6], "stop"), 1.0) is None and group.is_finished
    assert completions(group) == [("stop", [5, 9], None), ("stop", [6, 9], None)]


@pytest.mark.parametrize("error", [RuntimeError("broke"), KeyboardInterrupt("broke")])
def test_a_failed_delivery_ends_all_beams(error: BaseException) -> None:
    group = beams()
    actions = group.fail_delivery("r.1", error, 1.0)
    assert actions == GroupActions(aborts=[("r", "stop"), ("r.1", "stop")])
    assert group.deliver("r", candidates(5, 6), 1.0) is None, "candidates of a failed search"
    for name in ("r", "r.1"):
        assert group.deliver(name, ended(name, [], "stop"), 2.0) is None
    assert completions(group) == [("error", [], f"{type(error).__name__}: broke")]


def test_a_fault_at_the_last_end_completes_the_states_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    group = beams(n=2)
    group.deliver("r", ended("r", [], "aborted"), 1.0)

    def broken(self: BeamGroup, now: float) -> None:
        raise RuntimeError("broke")

    monkeypatch.setattr(BeamGroup, "_complete", broken)
    with pytest.raises(RuntimeError) as caught:
        group.deliver("r.1", ended("r.1", [], "aborted", num_cached_tokens=1), 2.0)
    assert group.fail_delivery("r.1", caught.value, 2.0) == GroupActions(aborts=[])
    assert group.is_finished
    assert completions(group) == [("error", [], "RuntimeError: broke")] * 2


def test_a_whole_search_is_handed_over_without_tokens() -> None:
    group = beams(n=2)
    assert [state.number for state in group.exportable] == [0]
    group.deliver("r", candidates(5, 6), 0.0)
    names = group.requests_of(group.states[0])
    withdrawn = [ended(name, [5], "aborted", num_preemptions=1, num_cached_tokens=1) for name in names]
    handover = group.hand_over(group.states[0], withdrawn, 1.0)
    assert (handover.token_ids.tolist(), handover.num_preemptions, handover.num_cached_tokens) == ([], 2, 1)
    assert handover.params.num_beams == 2 and group.is_finished and group.request_ids == []


def test_a_state_that_cannot_be_exported_says_why() -> None:
    def processor(ids: Any, scores: Any) -> Any:
        return scores

    params = SamplingParams(logits_processors=[processor])
    state = ContinuationGroup(0, as_input(params), [Request("r", PROMPT, params.resolve())]).states[0]
    with pytest.raises(ValueError, match="has logits_processors"):
        state.check_exportable()
    plain: RequestState = continuations(1).states[0]
    plain.check_exportable()
    plain.end(Finished("r", "aborted", NO_TOKENS, 0), 1.0)
    with pytest.raises(ValueError, match="has ended"):
        plain.check_exportable()
