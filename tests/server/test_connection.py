"""Frames of messages over a byte stream, cut anywhere."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import pytest

pytest.importorskip("msgspec")

from hypothesis import given
from hypothesis import strategies as st

from pagetide.server.connection import BadFrame, CannotEncode, FrameReader, MessageConnection, encoded, frame
from pagetide.server.messages import Cancel, Failed, OutputPieces, Piece, Score, Submit, ToEngine, ToServer

MESSAGES = [
    OutputPieces(
        [Piece(1, 0, "the ", [5], [Score(5, "the ", -0.5, 1, [(5, "the ", -0.5)])]), Piece(2, 1, "", [], None, "stop")]
    ),
    Failed(3, "too_long", "12 tokens"),
    OutputPieces([]),
]


def framed(messages: list[Any]) -> bytes:
    return frame([encoded(message) for message in messages])


@given(st.lists(st.integers(1, 40), max_size=30))
def test_messages_survive_any_cut(cuts: list[int]) -> None:
    data = framed(MESSAGES[:2]) + framed(MESSAGES[2:])
    reader: FrameReader[ToServer] = FrameReader(ToServer)
    found: list[ToServer] = []
    for size in cuts:
        found += reader.feed(data[:size])
        data = data[size:]
    assert found + reader.feed(data) == MESSAGES


@pytest.mark.parametrize(
    "data", [struct.pack("<I", 2**31), framed([{"type": "Nonsense"}]), struct.pack("<I", 3) + b"abc"]
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BadFrame):
        FrameReader[ToServer](ToServer).feed(data)


def test_messages_of_a_turn_arrive_in_order_and_the_end_is_told() -> None:
    async def run() -> None:
        one, other = socket.socketpair()
        received: list[ToEngine] = []
        lost = asyncio.Event()
        reading = await MessageConnection.open(other, ToEngine, received.append, lost.set)
        writing = await MessageConnection.open(one, ToServer, lambda _: None, lambda: None)
        sent = [Submit(number=i, params={"max_new_tokens": 4}, prompt="x" * 100_000) for i in range(5)] + [Cancel(3)]
        for message in sent:
            writing.send(message)
        writing.close()
        await asyncio.wait_for(lost.wait(), 30)
        assert received == sent
        reading.send(Cancel(1))  # into the void

    asyncio.run(run())


def test_a_message_that_cannot_be_handled_does_not_end_the_connection() -> None:
    async def run() -> None:
        one, other = socket.socketpair()
        received: list[ToEngine] = []

        def receive(message: ToEngine) -> None:
            if message == Cancel(1):
                raise RuntimeError("planted")
            received.append(message)

        lost = asyncio.Event()
        await MessageConnection.open(other, ToEngine, receive, lost.set)
        writing = await MessageConnection.open(one, ToServer, lambda _: None, lambda: None)
        for number in (1, 2):
            writing.send(Cancel(number))
        writing.close()
        await asyncio.wait_for(lost.wait(), 30)
        assert received == [Cancel(2)]

    asyncio.run(run())


DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(("value", "what"), [("\ud800", "Unicode"), (2**64, "64 bits"), (DEEP, "nested")])
def test_a_message_that_cannot_be_sent_takes_no_other_along(value: Any, what: str) -> None:
    async def run() -> None:
        one, other = socket.socketpair()
        received: list[ToEngine] = []
        lost = asyncio.Event()
        await MessageConnection.open(other, ToEngine, received.append, lost.set)
        writing = await MessageConnection.open(one, ToServer, lambda _: None, lambda: None)
        writing.send(Cancel(1))
        with pytest.raises(CannotEncode, match=what):
            writing.send(Submit(number=2, params={"value": value}))
        writing.send(Cancel(3))
        writing.close()
        await asyncio.wait_for(lost.wait(), 30)
        assert received == [Cancel(1), Cancel(3)]

    asyncio.run(run())


def test_nesting_that_the_reader_cannot_follow_is_a_bad_frame() -> None:
    with pytest.raises(BadFrame):
        FrameReader[ToEngine](ToEngine).feed(frame([b"\x91" * 100_000 + b"\x90"]))
