"""The link to the queue: each call is named and typed, errors come through, and a queue that is away says so."""

from __future__ import annotations

import inspect
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import msgspec
import pytest

from pagetide.fleet import messages
from pagetide.fleet.links import CALLS, ERRORS, QueueLink, answer_call, result_of
from pagetide.fleet.messages import (
    Assignment,
    CacheChanges,
    Deliveries,
    FleetInfo,
    Orders,
    Registration,
    Report,
    StaleEpoch,
    Submission,
    WorkerRefused,
    encode,
)
from pagetide.fleet.queue_server import QueueServer
from tests.fleet_stand_ins import MODEL, new_request, worker_state

REQUEST = new_request("r")
EXAMPLES: list[tuple[str, list[Any], Any]] = [
    ("info", [1.0], FleetInfo(MODEL, b"secret", 8)),
    ("info", [0.0], None),
    ("submit", ["front", [REQUEST]], [Submission(1), Submission(kind="invalid", error="no")]),
    ("attach", ["front", "r", "tenant", "f"], Submission(3, request=REQUEST)),
    ("read", ["front", None], Deliveries({1: (2, [b"a"])}, [7])),
    ("read", ["front", {1: 5}], Deliveries()),
    ("leave", ["front", [1, 2], True], None),
    ("cancel", ["cmpl-a", None, 0.5, "no"], 3),
    ("status", [], {"workers": []}),
    ("register", [Registration("w", MODEL, 8, worker_state(), pid=4)], 1 << 32),
    ("pull", ["w", 1 << 32], Orders([Assignment(1, [REQUEST.handover], "r")], [2], [3], True)),
    ("report", [Report("w", 1 << 40, 2, [b"a"], [3], worker_state(), CacheChanges([1 << 63], [2], True), {4: "no"})], None),
    ("cache", ["w", 5, CacheChanges([2**64 - 1], [], True)], None),
    ("drain", ["w"], None),
    ("add", [2], ["w1", "w2"]),
    ("stop", [1.5], None),
]


async def test_arguments_and_results_come_through_as_they_are() -> None:
    for method, arguments, answer in EXAMPLES:
        target = Mock(**{method: AsyncMock(return_value=answer)})
        data = await answer_call(target, method, encode(arguments))
        assert target.mock_calls == [getattr(call, method)(*arguments)] and result_of(method, data) == answer


async def test_errors_of_the_queue_come_through_with_their_words() -> None:
    for error in (StaleEpoch("register again"), WorkerRefused("another model")):
        data = await answer_call(Mock(pull=AsyncMock(side_effect=error)), "pull", encode(["w", 1]))
        with pytest.raises(type(error), match=str(error)):
            result_of("pull", data)


async def test_arguments_of_a_wrong_type_are_no_call() -> None:
    target = Mock()
    for wrong in (["w"], ["w", "1"], [1, 1], ["w", 1, 2], {}):
        with pytest.raises(msgspec.ValidationError):
            await answer_call(target, "pull", encode(wrong))
    assert target.mock_calls == []


def test_each_call_of_the_link_has_its_types_and_the_queues_parameters() -> None:
    methods = {name for name, one in vars(QueueLink).items() if inspect.isfunction(one) and not name.startswith("_")}
    assert methods <= CALLS.keys() and ERRORS.keys() == {"StaleEpoch", "WorkerRefused"}
    for name in methods:
        ours, theirs = (inspect.signature(getattr(one, name)).parameters for one in (QueueLink, QueueServer))
        assert list(ours) == list(theirs), name


def test_messages_are_arrays_that_nobody_changes() -> None:
    structs = [one for one in vars(messages).values() if inspect.isclass(one) and issubclass(one, msgspec.Struct)]
    configs = {one.__name__: one.__struct_config__ for one in structs if one.__module__ == messages.__name__}
    assert {name for name, config in configs.items() if not config.array_like} == {"TaggedPiece"}
    assert len(configs) > 10 and all(config.frozen for config in configs.values())
