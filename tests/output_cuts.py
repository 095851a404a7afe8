"""Requests cut after any record of their output: the engine behind them, the records, and what has to be the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from pagetide import AsyncLLM, RequestOutput, SamplingParams
from pagetide.engine.requests.handover import Handover
from pagetide.fleet.messages import Assignment, FleetInfo, NewRequest, Record, decode_record, encode_record
from pagetide.fleet.output_log import OutputLog
from pagetide.fleet.preparation import RequestPreparer
from pagetide.fleet.report_buffer import ReportBuffer
from pagetide.fleet.worker import FleetWorker, model_of
from pagetide.server.choices import joined
from pagetide.server.messages import Piece, RequestEnd, Score

PROMPT = "Call me Ishmael. Some years ago"
# Stop strings are pieces of the greedy text: see `with_stop`.
CASES = {
    "greedy": {"max_new_tokens": 16, "temperature": 0},
    "sampled": {"max_new_tokens": 14, "temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 7},
    "penalties": {"max_new_tokens": 14, "temperature": 0.8, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.4,
                  "presence_penalty": 0.3},
    "logprobs": {"max_new_tokens": 10, "temperature": 0.7, "seed": 4, "logprobs": 3, "prompt_logprobs": 1},
    "no logprobs beside the token's": {"max_new_tokens": 6, "temperature": 0, "logprobs": 0},
    "min_new_tokens": {"max_new_tokens": 20, "min_new_tokens": 9, "temperature": 0, "logit_bias": {1: 60.0}},
    "bad words": {"max_new_tokens": 12, "temperature": 0, "bad_words": ["the", "I"], "logit_bias": {260: -4.0}},
    "n": {"max_new_tokens": 7, "temperature": 1.0, "n": 3, "seed": 2},
    "best_of": {"max_new_tokens": 6, "temperature": 1.0, "n": 2, "best_of": 4, "seed": 5},
    "stop string": {"max_new_tokens": 24, "temperature": 0, "stop": "with_stop"},
    "multi-byte": {"max_new_tokens": 40, "temperature": 1.0, "seed": 9, "regex": "(é|😀|漢){5}"},
    "json": {"max_new_tokens": 40, "temperature": 1.0, "seed": 11,
             "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                             "additionalProperties": False}},
    "regex and n": {"max_new_tokens": 12, "temperature": 1.0, "seed": 6, "n": 2, "regex": "[a-c]{4,8}"},
}  # fmt: skip


class RecordingBuffer(ReportBuffer):
    """Keeps each record as the worker added it."""

    def __init__(self) -> None:
        super().__init__()
        self.added: list[Record] = []
        self.faults: dict[int, str] = {}

    def add(self, record: Record) -> None:
        self.added.append(record)

    def fail(self, number: int, error: str) -> None:
        self.faults[number] = error


class Cutter:
    """Runs requests through a worker from any recorded state."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        model = model_of(llm, "demo")
        self.worker = FleetWorker("w", llm, model, None)  # type: ignore[arg-type]
        self.preparer = RequestPreparer(FleetInfo(model, bytes(32), 8))

    def request(self, params: SamplingParams) -> NewRequest:
        (prompt,) = self.preparer.intake.encode([PROMPT], params)
        request = self.preparer.of_input(prompt, 0, None, "r")
        return msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=NewRequest)

    async def records_after(self, log: OutputLog) -> list[Record]:
        """What a worker records from this state on."""
        handovers = json.loads(json.dumps(log.handovers()))
        for one in handovers:
            parsed = Handover.from_dict(one, self.worker.model.name, self.worker.model.vocab_size)
            assert parsed.token_ids.tolist() == one["token_ids"]
        self.worker._buffer = buffer = RecordingBuffer()
        await self.worker._generate(Assignment(1, handovers))
        assert buffer.faults == {}
        return buffer.added


def log_of(request: NewRequest, records: Sequence[Record]) -> OutputLog:
    log = OutputLog(request)
    for record in records:
        log.append(decode_record(encode_record(record)))
    return log


def whole(records: Sequence[Record]) -> dict[int, Piece]:
    """All output by continuation."""
    by_index: dict[int, list[Piece]] = {}
    for record in records:
        if isinstance(record, Piece):
            by_index.setdefault(record.index, []).append(record)
    return {index: joined(pieces) for index, pieces in sorted(by_index.items())}


def check_same(found: dict[int, Piece], expected: dict[int, Piece]) -> None:
    """The same text, tokens and reasons, and log-probabilities up to rounding: other steps compute them."""
    without = [[msgspec.structs.replace(one, scores=None) for one in each.values()] for each in (found, expected)]
    assert without[0] == without[1]
    for index, one in found.items():
        theirs: Sequence[Score] = expected[index].scores or ()
        for score, other in zip(one.scores or (), theirs, strict=True):
            assert (score.token_id, score.token) == (other.token_id, other.token)
            assert score.logprob == pytest.approx(other.logprob, abs=2e-3)
            assert len(score.top) == len(other.top)


def check_like_the_engine(output: RequestOutput, found: dict[int, Piece]) -> None:
    completions = {(one.text, tuple(one.token_ids), one.finish_reason) for one in output.completions}
    assert completions <= {(one.text, tuple(one.token_ids), one.finish_reason) for one in found.values()}


async def with_stop(cutter: Cutter, params: dict[str, Any]) -> dict[str, Any]:
    """Stop strings that straddle several tokens of the text, and one that nearly matches earlier."""
    (plain,) = await cutter.llm.generate([PROMPT], SamplingParams(**{**params, "stop": None}))
    text = plain.text
    middle = len(text) // 2
    return {**params, "stop": [text[middle - 4 : middle + 4], text[3:9] + "\x00"]}


async def check_cut_after_every_record(cutter: Cutter, case: str) -> None:
    """The request of `case` goes on with the same output, wherever its worker is lost."""
    if case in ("multi-byte", "json", "regex and n"):
        pytest.importorskip("llguidance")
    params = CASES[case]
    if params.get("stop") == "with_stop":
        params = await with_stop(cutter, params)
    sampling = SamplingParams(**params)
    request = cutter.request(sampling)
    records = await cutter.records_after(OutputLog(request))
    reference = whole(records)
    check_like_the_engine((await cutter.llm.generate([PROMPT], sampling))[0], reference)
    assert isinstance(records[-1], RequestEnd) and len(reference) == request.num_sequences
    recorded: list[Record] = []
    for _ in range(500):
        first = next(record for record in records)
        if not isinstance(first, Piece):
            break
        recorded.append(first)
        log = log_of(request, recorded)
        if not log.handovers():
            break
        records = await cutter.records_after(log)
        end = records[-1]
        assert isinstance(end, RequestEnd)
        assert (end.prompt_scores is None) == (sampling.prompt_logprobs is None)
        check_same(whole([*recorded, *records]), reference)
    assert len(recorded) >= min(len(one.token_ids) for one in reference.values()) // 2, "it was hardly cut"
