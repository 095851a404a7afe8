"""Messages over a connection on an event loop."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

from pagetide.common.frames import frame
from pagetide.server.connection import CannotEncode, MessageConnection, encoded
from pagetide.server.messages import Cancel, Failed, OutputPieces, Piece, Score, Submit, ToEngine, ToServer

MESSAGES = [
    OutputPieces(
        [Piece(1, 0, "the ", [5], [Score.of(5, b"the ", -0.5, 1, [(5, b"the ", -0.5)])]), Piece(2, 1, "", [], None, "stop")]
    ),
    Failed(3, "too_long", "12 tokens"),
    OutputPieces([]),
]


async def test_other_bytes_end_the_connection_after_the_messages_before_them() -> None:
    nested = frame(b"\x91" * 100_000 + b"\x90")  # deeper than the reader can follow
    whole = b"".join(frame(encoded(message)) for message in MESSAGES)
    for data in (struct.pack("<Q", 2**63), frame(encoded({"type": "Nonsense"})), frame(b"abc"), nested):
        ours, theirs = socket.socketpair()
        lost, received = asyncio.Event(), list[ToServer]()
        await MessageConnection.open(ours, ToServer, received.append, lost.set)
        with theirs:
            theirs.sendall(whole + data)
            await lost.wait()
        assert received == MESSAGES


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
