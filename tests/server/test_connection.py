"""Frames of messages over a byte stream, cut anywhere."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetide.server.connection import BadFrame, CannotEncode, FrameReader, MessageConnection, encoded, frame
from pagetide.server.messages import Cancel, Failed, OutputPieces, Piece, Score, Submit, ToEngine, ToServer

MESSAGES = [
    OutputPieces(
        [Piece(1, 0, "the ", [5], [Score.of(5, b"the ", -0.5, 1, [(5, b"the ", -0.5)])]), Piece(2, 1, "", [], None, "stop")]
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


def test_other_bytes_are_refused() -> None:
    nested = frame([b"\x91" * 100_000 + b"\x90"])  # deeper than the reader can follow
    for data in (struct.pack("<I", 2**31), framed([{"type": "Nonsense"}]), struct.pack("<I", 3) + b"abc", nested):
        with pytest.raises(BadFrame):
            FrameReader[ToServer](ToServer).feed(data)


async def received_of(sending: Callable[[Any], Any], fault: ToEngine | None = None) -> list[ToEngine]:
    """What arrives at the other end of a connection until it is closed, but for `fault`, which cannot be handled."""
    one, other = socket.socketpair()
    received: list[ToEngine] = []

    def receive(message: ToEngine) -> None:
        if message == fault:
            raise RuntimeError("planted")
        received.append(message)

    lost = asyncio.Event()
    reading = await MessageConnection.open(other, ToEngine, receive, lost.set)
    writing = await MessageConnection.open(one, ToServer, lambda _: None, lambda: None)
    sending(writing)
    writing.close()
    await lost.wait()
    reading.send(Cancel(1))  # into the void
    return received


async def test_messages_of_a_turn_arrive_in_order_and_the_end_is_told() -> None:
    sent = [Submit(number=i, params={"max_new_tokens": 4}, prompt="x" * 100_000) for i in range(5)] + [Cancel(3)]
    assert await received_of(lambda writing: [writing.send(message) for message in sent]) == sent
    # one that cannot be handled does not end the connection
    both = [Cancel(1), Cancel(2)]
    assert await received_of(lambda writing: [writing.send(message) for message in both], Cancel(1)) == [Cancel(2)]


DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(("value", "what"), [("\ud800", "Unicode"), (2**64, "64 bits"), (DEEP, "nested")])
async def test_a_message_that_cannot_be_sent_takes_no_other_along(value: Any, what: str) -> None:
    def send(writing: Any) -> None:
        writing.send(Cancel(1))
        with pytest.raises(CannotEncode, match=what):
            writing.send(Submit(number=2, params={"value": value}))
        writing.send(Cancel(3))

    assert await received_of(send) == [Cancel(1), Cancel(3)]
