"""The link to the queue: each call is named and typed, errors come through, and a queue that is away says so."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagetide.fleet.links import CALLS, ERRORS, DirectLink, QueueLink, QueueUnavailable, answer_call, result_of
from pagetide.fleet.messages import (
    Assignment,
    CacheChanges,
    Deliveries,
    FleetInfo,
    NewRequest,
    Orders,
    Registration,
    Report,
    StaleEpoch,
    Submission,
    WorkerRefused,
    decode_record,
    encode,
    encode_record,
)
from pagetide.fleet.queue_server import QueueOptions, QueueServer
from pagetide.server.messages import Failed, Piece, RequestEnd, Score
from tests.fleet_stand_ins import MODEL, new_request, worker_state

REQUEST = new_request("r", logprobs=2)
EXAMPLES: list[tuple[str, list[Any], Any]] = [
    ("info", [1.0], FleetInfo(MODEL, b"secret", 8)),
    ("info", [0.0], None),
    ("submit", ["front", [REQUEST]], [Submission(1), Submission(kind="invalid", error="no")]),
    ("attach", ["front", "r", "tenant", "f"], Submission(3, request=REQUEST)),
    ("read", ["front", None], Deliveries({1: (2, [b"a"])}, [7])),
    ("read", ["front", {1: 5}], Deliveries()),
    ("leave", ["front", [1, 2], True], None),
    ("status", [], {"workers": []}),
    ("register", [Registration("w", MODEL, 8, worker_state(), pid=4)], 1 << 32),
    ("pull", ["w", 1 << 32], Orders([Assignment(1, [REQUEST.handover], "r")], [2], [3], True)),
    ("report", [Report("w", 1 << 40, 2, [b"a"], [3], worker_state(), CacheChanges([1 << 63], [2], True), {4: "no"})], None),
    ("cache", ["w", 5, CacheChanges([2**64 - 1], [], True)], None),
    ("drain", ["w"], None),
    ("add", [2], ["w1", "w2"]),
    ("stop", [1.5], None),
]  # fmt: skip


class Target:
    """Answers each call with what was prepared, and keeps its arguments."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.arguments: list[Any] = []

    def __getattr__(self, method: str) -> Any:
        async def call(*arguments: Any) -> Any:
            self.arguments = list(arguments)
            if isinstance(self._answer, Exception):
                raise self._answer
            return self._answer

        return call


@pytest.mark.parametrize(("method", "arguments", "answer"), EXAMPLES)
def test_arguments_and_results_come_through_as_they_are(method: str, arguments: list[Any], answer: Any) -> None:
    target = Target(answer)
    data = asyncio.run(answer_call(target, method, encode(arguments)))
    assert target.arguments == arguments and result_of(method, data) == answer


@pytest.mark.parametrize("error", [StaleEpoch("register again"), WorkerRefused("another model")])
def test_errors_of_the_queue_come_through_with_their_words(error: Exception) -> None:
    data = asyncio.run(answer_call(Target(error), "pull", encode(["w", 1])))
    with pytest.raises(type(error), match=str(error)):
        result_of("pull", data)


def test_arguments_of_a_wrong_type_are_no_call() -> None:
    target = Target(None)
    for wrong in (["w"], ["w", "1"], [1, 1], ["w", 1, 2], {}):
        with pytest.raises(msgspec.ValidationError):
            asyncio.run(answer_call(target, "pull", encode(wrong)))
    assert target.arguments == []


def test_each_call_of_the_link_has_its_types_and_the_queues_parameters() -> None:
    methods = {name for name, one in vars(QueueLink).items() if inspect.isfunction(one) and not name.startswith("_")}
    assert methods <= CALLS.keys() and ERRORS.keys() == {"StaleEpoch", "WorkerRefused"}
    for name in methods:
        ours, theirs = (inspect.signature(getattr(one, name)).parameters for one in (QueueLink, QueueServer))
        assert list(ours) == list(theirs), name


def test_a_direct_link_is_the_queue_while_there_is_one(tmp_path: Path) -> None:
    async def main() -> None:
        server = QueueServer(QueueOptions(tmp_path / "journal.sqlite"))
        link = DirectLink(server)
        assert (await link.status())["queue"]["waiting"] == 0
        assert await link.submit("front", [REQUEST]) == [Submission(1)]
        link.server = None
        for call in (link.status(), link.submit("front", [REQUEST]), link.pull("w", 1)):
            with pytest.raises(QueueUnavailable, match="away"):
                await call
        await server.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "record",
    [
        Piece(1, 2, "text", [5, 6], [Score(5, "t", -0.5, 1, [(6, "u", -1.0)]), Score(6, "u", None, 0)], None),
        Piece(1, 0, "\U0001f600 \ufffd", [], None, "error", "no"),
        RequestEnd(1, [], 3, [Score(5, "t", None, 0)], 0.5, None, 2.0, 7),
        Failed(1, "internal", "no"),
    ],
)
def test_records_are_the_same_after_the_journal(record: Any) -> None:
    data = encode_record(record)
    assert decode_record(data) == record and encode_record(decode_record(data)) == data


def test_a_request_is_the_same_after_the_journal() -> None:
    request = new_request("r", n=3, priority=-2, tenant="t", logprobs=0, digests=[2**64 - 1, 0], fingerprint="f")
    again = msgspec.msgpack.decode(encode(request), type=NewRequest)
    assert again == request
    assert (again.priority, again.most_new_tokens, again.is_beam_search) == (-2, 6, False)
    assert again.prompt_token_ids == request.handover["prompt_token_ids"]
