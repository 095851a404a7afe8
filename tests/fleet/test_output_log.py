"""Recorded outputs: a request that is cut after any record goes on elsewhere with the same text, tokens and scores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
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
from tests.fleet_stand_ins import MODEL, STOP_ID, new_request, outputs_of, text_of

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


@pytest.fixture(scope="module")
def cutter() -> Iterator[Cutter]:
    llm = AsyncLLM("demo", device="cpu", kv_memory="32MiB", max_seqs=8, share=False)
    yield Cutter(llm)
    asyncio.run(llm.stop())


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


@pytest.mark.parametrize("case", CASES)
def test_a_request_that_is_cut_after_every_record_goes_on_with_the_same_output(cutter: Cutter, case: str) -> None:
    if case in ("multi-byte", "json", "regex and n"):
        pytest.importorskip("llguidance")

    async def main() -> None:
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

    asyncio.run(main())


def test_a_request_that_fills_the_context_ends_there_also_if_its_end_is_lost(cutter: Cutter) -> None:
    async def main() -> None:
        request = cutter.request(SamplingParams(max_new_tokens=16, temperature=0))
        room = cutter.worker.model.max_model_len - 8
        request.handover["prompt_token_ids"] = [5 + place % 200 for place in range(room)]
        records = await cutter.records_after(OutputLog(request))
        (piece,) = whole(records).values()
        assert len(piece.token_ids) == 8 and piece.finish_reason == "length"
        recorded = msgspec.structs.replace(piece, finish_reason=None)
        again = await cutter.records_after(log_of(request, [recorded]))
        assert again == [Piece(1, 0, "", [], None, "length"), RequestEnd(1, [], 0)]

    asyncio.run(main())


@pytest.mark.parametrize("case", ["greedy", "min_new_tokens", "logprobs"])
def test_a_request_with_its_last_token_recorded_and_not_its_end_ends_there(cutter: Cutter, case: str) -> None:
    async def main() -> None:
        request = cutter.request(SamplingParams(**{**CASES[case], "prompt_logprobs": None}))
        records = await cutter.records_after(OutputLog(request))
        (piece,) = whole(records).values()
        recorded = msgspec.structs.replace(piece, finish_reason=None)
        again = await cutter.records_after(log_of(request, [recorded]))
        assert again == [Piece(1, 0, "", [], None, piece.finish_reason), RequestEnd(1, [], 0)]

    asyncio.run(main())


def test_the_last_piece_comes_in_one_record_set_with_the_end(cutter: Cutter) -> None:
    """Otherwise a request whose log-probabilities of the prompt come with its end could lose them."""

    async def main() -> None:
        request = cutter.request(SamplingParams(max_new_tokens=3, temperature=0, n=2, prompt_logprobs=0))
        cutter.worker._buffer = buffer = RecordingBuffer()
        together: list[list[Record]] = []
        buffer.add_all = lambda records: together.append(list(records))  # type: ignore[method-assign]
        await cutter.worker._generate(Assignment(1, OutputLog(request).handovers()))
        *_, (piece, end) = together
        assert isinstance(piece, Piece) and piece.finish_reason == "length"
        assert isinstance(end, RequestEnd) and end.prompt_scores is not None
        assert sum(record.finish_reason is not None for record in buffer.added if isinstance(record, Piece)) == 1

    asyncio.run(main())


def test_beams_come_whole_and_a_search_begins_anew_wherever_it_is_cut(cutter: Cutter) -> None:
    async def main() -> None:
        sampling = SamplingParams(max_new_tokens=8, num_beams=3, n=2, temperature=0)
        request = cutter.request(sampling)
        log = OutputLog(request)
        assert log.num_unfinished == 3
        records = await cutter.records_after(log)
        assert [type(record) for record in records] == [Piece, Piece, RequestEnd]
        (output,) = await cutter.llm.generate([PROMPT], sampling)
        assert [one.token_ids for one in output.completions] == [one.token_ids for one in whole(records).values()]
        assert log_of(request, records[:1]).handovers() == log.handovers()

    asyncio.run(main())


# -- without an engine ---------------------------------------------------------------------------------------------------


def test_handovers_have_the_output_of_their_own_continuation_and_leave_the_request_as_it_is() -> None:
    request = new_request("r", new=5, n=3, logprobs=1)
    before = json.dumps(request.handover)
    outputs = outputs_of(request)
    log = OutputLog(request)
    scores = [Score(token, "", -1.5, 2, [(9, "", -0.5)]) for token in outputs[1][:2]]
    log.append(Piece(1, 1, "ab", outputs[1][:2], scores, None))
    log.append(
        Piece(1, 2, "xyz", outputs[2], [Score(token, "", -1.0, 1, [(9, "", -0.5)]) for token in outputs[2]], "length")
    )
    first, second = log.handovers()
    assert (log.num_tokens, log.num_unfinished) == (7, 2)
    assert json.dumps(request.handover) == before == json.dumps(first)
    assert second == {
        **request.handover, "index": 1, "token_ids": outputs[1][:2], "num_told_tokens": 2, "num_told_characters": 2,
        "logprobs": {"token_ids": [[token, 9] for token in outputs[1][:2]], "logprobs": [[-1.5, -0.5]] * 2, "ranks": [2, 2]},
    }  # fmt: skip
    for one in (first, second):
        Handover.from_dict(json.loads(json.dumps(one)), MODEL.name, MODEL.vocab_size)
    log.append(RequestEnd(1, [], 0))
    assert log.num_unfinished == 0 and log.end == RequestEnd(1, [], 0)


def test_records_are_kept_as_the_bytes_that_came() -> None:
    request = new_request("r")
    piece = Piece(1, 0, text_of(5), [5, STOP_ID], None, "stop")
    log = OutputLog(request)
    log.append(piece, data := encode_record(piece))
    assert log.records[0] is data and decode_record(data) == piece and log.handovers() == []
