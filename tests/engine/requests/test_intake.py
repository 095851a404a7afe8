"""Intake: what callers pass in becomes groups and requests, and nothing is queued by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pagetide import LLM, RequestRejected, SamplingParams
from pagetide.engine.errors import EngineClosed
from pagetide.engine.requests.groups import BeamGroup, ContinuationGroup
from pagetide.engine.requests.inputs import check_cache_salt
from pagetide.engine.requests.intake import RequestIntake


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", kv_memory="8MiB", device="cpu", share=False) as llm:
        yield llm


@pytest.fixture
def intake(llm: LLM) -> Iterator[RequestIntake]:
    yield llm._manager.intake
    assert not llm._manager.has_work and not llm._manager.delivery.groups


def built(intake: RequestIntake, params: SamplingParams, streams: bool = False) -> tuple[Any, Any]:
    (prompt,) = intake.encode([5, 6], params)
    return intake.build(3, prompt, 2, "salt", streams)


def test_a_group_has_a_request_for_each_continuation(intake: RequestIntake) -> None:
    group, requests = built(intake, SamplingParams(n=2, best_of=3, max_new_tokens=4))
    assert isinstance(group, ContinuationGroup) and group.index == 3
    assert [state.request for state in group.states] == requests
    assert [request.fork_of for request in requests] == [None, requests[0].request_id, requests[0].request_id]
    assert {(request.priority, request.cache_salt) for request in requests} == {(2, b"salt")}
    other, _ = built(intake, SamplingParams())
    assert other.request_ids != group.request_ids[:1]


def test_a_search_has_a_request_for_each_beam(intake: RequestIntake) -> None:
    group, requests = built(intake, SamplingParams(num_beams=3, n=2, stop_token_ids=[1, 2], ignore_eos=True))
    assert isinstance(group, BeamGroup) and len(group.states) == 2
    assert group.request_ids == [request.request_id for request in requests] and len(requests) == 3
    assert {request.sampling.num_candidates for request in requests} == {9}, "even if all end ids are among the best"


def test_what_cannot_be_served_is_rejected(intake: RequestIntake) -> None:
    with pytest.raises(RequestRejected, match="best_of 3 cannot be streamed with n 2"):
        built(intake, SamplingParams(n=2, best_of=3), streams=True)
    with pytest.raises(RequestRejected, match="priority must be an integer"):
        intake.build(0, intake.encode([5], None)[0], None, None, False)
    with pytest.raises(RequestRejected, match="the prompt cannot be read: TypeError"):
        intake.encode_one(5, None)  # type: ignore[arg-type]
    for data in ([], "text", 5):
        with pytest.raises(RequestRejected, match="give what export gave"):
            intake.parse_exported(data)


def test_one_prompt_may_be_an_iterator_of_ids(intake: RequestIntake) -> None:
    (prompt,) = intake.encode_one(iter([5, 6]), None)  # type: ignore[arg-type]
    assert prompt.prompt is None and prompt.token_ids.tolist() == [5, 6]


@pytest.mark.parametrize("salt", [5, b"salt", ["salt"]])
def test_a_salt_is_a_text_or_none(salt: object) -> None:
    with pytest.raises(RequestRejected, match="cache_salt must be a text, or None"):
        check_cache_salt(salt)
    check_cache_salt(None)
    check_cache_salt("")


def test_a_closed_engine_has_no_intake() -> None:
    with LLM("demo", dtype="float32", kv_memory="8MiB", device="cpu", share=False) as llm:
        pass
    with pytest.raises(EngineClosed):
        _ = llm._manager.intake
