"""What a worker has not reported: joined pieces, ends after them, and when a report is due."""

from __future__ import annotations

import asyncio

import pytest

from pagetide.fleet import report_buffer
from pagetide.fleet.messages import Record, decode_record
from pagetide.fleet.report_buffer import ReportBuffer
from pagetide.server.messages import Failed, Piece, RequestEnd


def piece(number: int, token: int, index: int = 0) -> Piece:
    return Piece(number, index, f"{token} ", [token], None, None)


def taken(buffer: ReportBuffer) -> list[Record]:
    return [decode_record(data) for data in buffer.take()[0]]


@pytest.fixture(autouse=True)
def interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than any test, so that what is due is due by itself."""
    monkeypatch.setattr(report_buffer, "REPORT_EVERY_S", 3600.0)


async def is_due(buffer: ReportBuffer) -> bool:
    """Whether a report is due at once."""
    waiting = asyncio.ensure_future(buffer.wait(3600.0))
    for _ in range(5):
        await asyncio.sleep(0)
    due = waiting.done()
    waiting.cancel()
    return due


async def test_first_pieces_ends_releases_and_faults_are_reported_at_once_others_are_not() -> None:
    buffer = ReportBuffer()
    assert not await is_due(buffer)
    buffer.add(piece(1, 5))
    assert await is_due(buffer)
    buffer.take()
    buffer.add(piece(1, 6))
    assert not await is_due(buffer)
    buffer.add(piece(1, 7, index=1))
    assert await is_due(buffer)
    buffer.take()
    for urgent in (lambda: buffer.add(Failed(1, "invalid", "no")), lambda: buffer.release(1), lambda: buffer.fail(2, "no")):
        urgent()
        assert await is_due(buffer)
        buffer.take()
        assert not await is_due(buffer)


async def test_other_pieces_are_due_after_the_interval_and_nothing_is_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer = ReportBuffer()
    await buffer.wait(0.0)
    await buffer.wait(-1.0)
    buffer.add(piece(1, 5))
    buffer.take()
    buffer.add_all([piece(1, 6), piece(1, 7), RequestEnd(1, [], 0), piece(2, 8), piece(2, 9)])
    buffer.drop(2)
    monkeypatch.setattr(report_buffer, "REPORT_EVERY_S", 0.001)
    await buffer.wait(3600.0)
    assert taken(buffer) == [Piece(1, 0, "6 7 ", [6, 7], None, None), RequestEnd(1, [], 0)] and buffer.is_empty


async def test_a_request_that_came_back_begins_anew_and_nothing_of_ended_ones_is_kept() -> None:
    buffer = ReportBuffer()
    for number in range(100):
        buffer.add(piece(number, 5))
        buffer.take()
        if number % 4 == 0:
            buffer.add(RequestEnd(number, [], 0))
        elif number % 4 == 1:
            buffer.release(number)
        elif number % 4 == 2:
            buffer.fail(number, "the step failed")
        else:
            buffer.drop(number)
        buffer.take()
        buffer.add(piece(number, 6))
        assert await is_due(buffer)
        buffer.drop(number)
        buffer.take()
    assert not buffer._begun
