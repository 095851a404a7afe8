"""Delivery of step outputs: order, faults of one group, and what an interrupt leaves for the next call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from engines import TinyEngine
from families import tiny

from pagetide import SamplingParams
from pagetide.engine.requests.beams import BeamRules
from pagetide.engine.requests.delivery import OutputDelivery
from pagetide.engine.requests.groups import BeamGroup, ContinuationGroup
from pagetide.engine.requests.inputs import PromptInput
from pagetide.engine.requests.states import RequestGroup, RequestState
from pagetide.engine.text.encoder import PreparedParams
from pagetide.scheduler.outcome import Finished, StepOutputs
from pagetide.scheduler.request import Request


@lru_cache(maxsize=1)
def model() -> Any:
    return tiny("llama", seed=11)


class Rig:
    """A tiny engine whose outputs are delivered."""

    def __init__(self) -> None:
        self.core = TinyEngine(model(), usable=64, block_size=4).core
        self.delivery = OutputDelivery()
        self.noted: list[
            tuple[list[RequestGroup], list[RequestGroup]]
        ] = []  # groups with tokens, groups of ended requests
        self.delivery.on_outputs = lambda updated, ended: self.noted.append((list(updated), list(ended)))

    def add(self, name: str, n: int = 1, num_beams: int = 1, new: int = 3, streams: bool = True) -> RequestGroup:
        params = SamplingParams(temperature=0, max_new_tokens=new, n=n, num_beams=num_beams)
        prompt = PromptInput(None, np.array([5, 6, 7], np.int32), params, PreparedParams())
        request = Request(name, prompt.token_ids, params.resolve())
        group: RequestGroup
        if num_beams == 1:
            requests = request.forked(n)
            group = ContinuationGroup(0, prompt, requests, streams=streams)
        else:
            rules = BeamRules.resolve(params, (), new)
            sampling = type(request.sampling)(
                **{f: getattr(request.sampling, f) for f in request.sampling.__slots__}
                | {"num_candidates": rules.num_candidates}
            )
            requests = Request(name, prompt.token_ids, sampling).forked(num_beams)
            group = BeamGroup(0, prompt, requests, rules)
        for one in requests:
            self.core.add(one)
        self.delivery.add(group, requests)
        return group

    def step(self) -> StepOutputs:
        outputs = self.core.step()
        self.delivery.queue(outputs)
        return outputs

    def run(self) -> None:
        while self.core.has_work or self.delivery.is_pending:
            if not self.delivery.is_pending:
                self.step()
            self.delivery.deliver(self.core, 1.0)


def tokens(group: RequestGroup) -> list[tuple[str, list[int]]]:
    return [(one.finish_reason, one.token_ids) for one in group.output.completions]


def test_groups_of_both_kinds_get_their_outputs() -> None:
    rig = Rig()
    plain, both, search = rig.add("a"), rig.add("b", n=2), rig.add("c", n=2, num_beams=3)
    assert rig.delivery.groups.keys() == {"a", "b", "b.1", "c", "c.1", "c.2"}
    rig.run()
    assert not rig.delivery.groups and all(group.is_finished for group in (plain, both, search))
    (greedy,) = tokens(plain)
    assert greedy[0] == "length" and len(greedy[1]) == 3
    assert tokens(both) == [greedy, greedy]
    assert [(reason, len(ids)) for reason, ids in tokens(search)] == [("length", 3)] * 2
    assert [(plain in updated, plain in ended) for updated, ended in rig.noted[:3]] == [(True, False)] * 2 + [
        (True, True)
    ]
    assert [search in updated for updated, _ in rig.noted] == [False] * len(rig.noted), "candidates are no output"
    assert sum(ended.count(search) for _, ended in rig.noted) == 3


def test_tokens_that_are_not_followed_are_kept_and_not_noted() -> None:
    rig = Rig()
    waits, both, stream = rig.add("a", streams=False), rig.add("b", n=2, streams=False), rig.add("c")
    counts = []
    for now in (1.0, 2.0, 3.0, 4.0):  # the second of `both` starts when the first has its prompt
        rig.step()
        counts.append([state.num_generated for group in (waits, both) for state in group.states])
        rig.delivery.deliver(rig.core, now)
    assert counts == [[1, 1, 0], [2, 2, 1], [3, 3, 2], [3, 3, 3]]
    assert not rig.core.has_work and not rig.delivery.is_pending and not rig.delivery.groups
    assert [updated for updated, _ in rig.noted] == [[stream]] * 3 + [[]]
    assert tokens(waits) * 2 == tokens(both) == tokens(stream) * 2
    first = [one.timings.first_token_s for group in (waits, both, stream) for one in group.output.completions]
    assert first == [1.0 - waits.states[0].request.arrival + late for late in (0, 0, 1, 0)]


def test_removed_requests_get_nothing_more() -> None:
    rig = Rig()
    removed, stays = rig.add("a"), rig.add("b")
    rig.step()
    rig.delivery.remove(["a", "unknown"])
    rig.run()
    assert stays.is_finished and not removed.is_finished


def test_a_fault_of_one_group_ends_it_alone(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    rig = Rig()
    bad, good = rig.add("a", n=2), rig.add("b")
    push = RequestState.push

    def broken(state: RequestState, token: int, now: float) -> Any:
        if state.request.request_id == "a":
            raise RuntimeError("planted")
        return push(state, token, now)

    monkeypatch.setattr(RequestState, "push", broken)
    rig.run()
    assert [reason for reason, _ in tokens(bad)] == ["error", "length"]
    assert [reason for reason, _ in tokens(good)] == ["length"]
    assert "request a ends" in caplog.text


def test_an_interrupt_leaves_the_rest_for_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    first, second = rig.add("a", new=1), rig.add("b", new=1)
    outputs = rig.step()
    assert outputs.request_ids == ["a", "b"] and len(outputs.finished) == 2
    with monkeypatch.context() as patched:
        patched.setattr(RequestState, "push", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            rig.delivery.deliver(rig.core, 1.0)
    assert rig.delivery.is_pending and rig.noted == [([first], [])]
    rig.delivery.deliver(rig.core, 2.0)
    assert not rig.delivery.is_pending and rig.noted[1] == ([second], [first, second])
    assert tokens(first) == tokens(second) == [("length", outputs.finished[0].token_ids.tolist())]


def test_an_interrupt_at_the_choice_of_beams_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    search, other = rig.add("a", num_beams=3), rig.add("b")
    rig.step()
    with monkeypatch.context() as patched:
        patched.setattr(BeamGroup, "deliver", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            rig.delivery.deliver(rig.core, 1.0)
    rig.run()
    assert tokens(search) == [("error", [])] and search.output.error == "KeyboardInterrupt: "
    assert [reason for reason, _ in tokens(other)] == ["length"]
    assert rig.core.scheduler.cache.pool.counts().live == 0


def test_events_of_unknown_requests_are_ignored() -> None:
    rig = Rig()
    rig.delivery.queue(StepOutputs(0, ["x"], [5], (Finished("x", "aborted", np.empty(0, np.int32), 0),)))
    rig.delivery.deliver(rig.core, 1.0)
    assert not rig.delivery.is_pending and rig.noted == []


def _interrupted(*arguments: Any) -> Any:
    raise KeyboardInterrupt
