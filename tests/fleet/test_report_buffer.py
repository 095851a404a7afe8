"""What a worker has not reported: joined pieces, ends after them, and when a report is due."""

from __future__ import annotations

import asyncio

from pagetide.fleet.messages import Record, decode_record
from pagetide.fleet.report_buffer import ReportBuffer
from pagetide.server.messages import Failed, Piece, RequestEnd, Score


def piece(number: int, token: int, index: int = 0, reason: str | None = None, scored: bool = False) -> Piece:
    scores = [Score(token, "", -1.0, 1)] if scored else None
    return Piece(number, index, f"{token} ", [token], scores, reason)  # type: ignore[arg-type]


def taken(buffer: ReportBuffer) -> list[Record]:
    return [decode_record(data) for data in buffer.take()[0]]


async def is_due(buffer: ReportBuffer) -> bool:
    """Whether a report is due at once, without the 20 ms."""
    waiting = asyncio.ensure_future(buffer.wait(10.0))
    for _ in range(5):
        await asyncio.sleep(0)
    due = waiting.done()
    waiting.cancel()
    return due


def test_pieces_of_a_continuation_are_joined_and_ends_come_after_them() -> None:
    buffer = ReportBuffer()
    assert buffer.is_empty and buffer.take() == ([], [], {})
    buffer.add_all([piece(1, 5, scored=True), piece(2, 8), piece(1, 6, scored=True), piece(1, 7, index=1)])
    buffer.add(RequestEnd(1, [], 0))
    buffer.add(piece(2, 9, reason="stop"))
    buffer.release(3)
    buffer.fail(2, "the step failed")
    assert not buffer.is_empty
    records, released, faults = buffer.take()
    assert [decode_record(data) for data in records] == [
        Piece(1, 0, "5 6 ", [5, 6], [Score(5, "", -1.0, 1), Score(6, "", -1.0, 1)], None),
        piece(1, 7, index=1),
        Piece(2, 0, "8 9 ", [8, 9], None, "stop"),
        RequestEnd(1, [], 0),
    ]
    assert (released, faults) == ([3], {2: "the step failed"})
    assert buffer.is_empty and buffer.take() == ([], [], {})


def test_first_pieces_ends_releases_and_faults_are_reported_at_once_others_are_not() -> None:
    async def main() -> None:
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
        for urgent in (
            lambda: buffer.add(Failed(1, "invalid", "no")), lambda: buffer.release(1), lambda: buffer.fail(2, "no"),
        ):  # fmt: skip
            urgent()
            assert await is_due(buffer)
            buffer.take()
            assert not await is_due(buffer)

    asyncio.run(main())


def test_other_pieces_are_due_after_the_interval_and_nothing_is_after_the_timeout() -> None:
    async def main() -> None:
        buffer = ReportBuffer()
        await buffer.wait(0.0)
        await buffer.wait(-1.0)
        buffer.add(piece(1, 5))
        buffer.take()
        buffer.add(piece(1, 6))
        await buffer.wait(10.0)  # ends after REPORT_EVERY_S
        assert taken(buffer) == [piece(1, 6)]

    asyncio.run(main())


def test_a_request_that_came_back_begins_anew_and_nothing_of_ended_ones_is_kept() -> None:
    async def main() -> None:
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

    asyncio.run(main())


def test_a_cancelled_request_is_dropped_with_all_that_is_not_reported() -> None:
    buffer = ReportBuffer()
    buffer.add_all([piece(1, 5), RequestEnd(1, [], 0), piece(2, 6)])
    buffer.fail(1, "no")
    buffer.drop(1)
    assert taken(buffer) == [piece(2, 6)]
