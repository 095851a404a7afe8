"""Request groups: what they make of events, faults, hand-overs and lost ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from beam_rig import as_input

from pagetide import SamplingParams
from pagetide.engine.requests.beams import BeamRules
from pagetide.engine.requests.groups import BeamGroup, ContinuationGroup
from pagetide.engine.requests.states import GroupActions
from pagetide.scheduler.outcome import Finished
from pagetide.scheduler.request import Request

PROMPT = np.array([1, 2], np.int32)


def continuations(n: int = 2) -> ContinuationGroup:
    params = SamplingParams(n=n, max_new_tokens=4)
    return ContinuationGroup(0, as_input([1, 2], params), Request("r", PROMPT, params.resolve()).forked(n))


def beams(n: int = 1) -> BeamGroup:
    params = SamplingParams(num_beams=2, n=n, max_new_tokens=4)
    requests = Request("r", PROMPT, params.resolve()).forked(2)
    return BeamGroup(0, as_input([1, 2], params), requests, BeamRules(2, 1.0, False, frozenset({9}), 4))


def ended(request_id: str, tokens: list[int], reason: Any = "length", **more: Any) -> Finished:
    return Finished(request_id, reason, np.array(tokens, np.int32), more.pop("num_preemptions", 0), **more)


def completions(group: ContinuationGroup | BeamGroup) -> list[tuple[str, list[int], str | None]]:
    return [(one.finish_reason, one.token_ids, one.error) for one in group.output.completions]


def test_all_unfinished_continuations_fail_together() -> None:
    group = continuations(3)
    group.deliver("r.1", ended("r.1", [5]), 1.0)
    group.fail(OSError("gone"))
    for name in ("r", "r.2"):
        group.deliver(name, ended(name, [], "error"), 2.0)
    assert completions(group) == [("error", [], "OSError: gone"), ("length", [5], None), ("error", [], "OSError: gone")]


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
