"""Recorded outputs: a request that is cut after any record goes on elsewhere with the same text, tokens and scores."""

from __future__ import annotations

import msgspec
import pytest

from pagetide import SamplingParams
from pagetide.fleet.messages import Assignment, Record
from pagetide.fleet.output_log import OutputLog
from pagetide.server.messages import Piece, RequestEnd
from tests.output_cuts import CASES, PROMPT, Cutter, RecordingBuffer, check_cut_after_every_record, log_of, whole


@pytest.mark.parametrize("case", ["logprobs", "stop string"])
async def test_a_request_that_is_cut_after_every_record_goes_on_with_the_same_output(cutter: Cutter, case: str) -> None:
    await check_cut_after_every_record(cutter, case)


async def test_a_request_that_fills_the_context_ends_there_also_if_its_end_is_lost(cutter: Cutter) -> None:
    request = cutter.request(SamplingParams(max_new_tokens=16, temperature=0))
    room = cutter.worker.model.max_model_len - 8
    request.handover["prompt_token_ids"] = [5 + place % 200 for place in range(room)]
    records = await cutter.records_after(OutputLog(request))
    (piece,) = whole(records).values()
    assert len(piece.token_ids) == 8 and piece.finish_reason == "length"
    recorded = msgspec.structs.replace(piece, finish_reason=None)
    again = await cutter.records_after(log_of(request, [recorded]))
    assert again == [Piece(1, 0, "", [], None, "length"), RequestEnd(1, [], 0)]


@pytest.mark.parametrize("case", ["greedy", "min_new_tokens", "logprobs"])
async def test_a_request_with_its_last_token_recorded_and_not_its_end_ends_there(cutter: Cutter, case: str) -> None:
    request = cutter.request(SamplingParams(**{**CASES[case], "prompt_logprobs": None}))
    records = await cutter.records_after(OutputLog(request))
    (piece,) = whole(records).values()
    recorded = msgspec.structs.replace(piece, finish_reason=None)
    again = await cutter.records_after(log_of(request, [recorded]))
    assert again == [Piece(1, 0, "", [], None, piece.finish_reason), RequestEnd(1, [], 0)]


async def test_the_last_piece_comes_in_one_record_set_with_the_end(cutter: Cutter) -> None:
    """Otherwise log-probabilities of the prompt, which come with the end, could be lost."""
    request = cutter.request(SamplingParams(max_new_tokens=3, temperature=0, n=2, prompt_logprobs=0))
    cutter.worker._buffer = buffer = RecordingBuffer()
    together: list[list[Record]] = []
    buffer.add_all = lambda records: together.append(list(records))  # type: ignore[method-assign]
    await cutter.worker._generate(Assignment(1, OutputLog(request).handovers()))
    *_, (piece, end) = together
    assert isinstance(piece, Piece) and piece.finish_reason == "length"
    assert isinstance(end, RequestEnd) and end.prompt_scores is not None
    assert sum(record.finish_reason is not None for record in buffer.added if isinstance(record, Piece)) == 1


async def test_beams_come_whole_and_a_search_begins_anew_wherever_it_is_cut(cutter: Cutter) -> None:
    sampling = SamplingParams(max_new_tokens=8, num_beams=3, n=2, temperature=0)
    request = cutter.request(sampling)
    log = OutputLog(request)
    assert log.num_unfinished == 3
    records = await cutter.records_after(log)
    assert [type(record) for record in records] == [Piece, Piece, RequestEnd]
    (output,) = await cutter.llm.generate([PROMPT], sampling)
    assert [one.token_ids for one in output.completions] == [one.token_ids for one in whole(records).values()]
    assert log_of(request, records[:1]).handovers() == log.handovers()
    assert log_of(request, records).num_unfinished == 0
