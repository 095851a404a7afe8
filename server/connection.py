"""Carries messages over a stream socket on an event loop: frames (`common/frames.py`) of msgpack."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from ..common.frames import BadFrame, FrameReader, frame

log = logging.getLogger(__name__)

# At both ends, other threads hold up the event loop and the engine's thread for so long at a time
SWITCH_S = 0.0002
_encode = msgspec.msgpack.Encoder().encode

Received = TypeVar("Received")


class CannotEncode(ValueError):
    """A message has a value that cannot be sent: a lone surrogate, a number beyond 64 bits, deep nesting."""


def encoded(message: Any) -> bytes:
    """`message` as msgpack. Raises CannotEncode."""
    try:
        return _encode(message)
    except UnicodeEncodeError as error:
        raise CannotEncode(f"a text has an invalid Unicode character: {error.object[error.start]!r}") from error
    except OverflowError as error:
        raise CannotEncode("a number is beyond 64 bits") from error
    except RecursionError as error:
        raise CannotEncode("the values are nested too deeply") from error


class MessageConnection(asyncio.Protocol, Generic[Received]):
    """One end of a connection on an event loop.

    Args:
        kind: The type of the messages that arrive.
        receive: Called with each of them, in order.
        lost: Called once, when the other side is gone or sent a bad frame.
    """

    def __init__(self, kind: Any, receive: Callable[[Received], None], lost: Callable[[], None]) -> None:
        self._reader = FrameReader(msgspec.msgpack.Decoder(kind).decode)
        self._receive = receive
        self._lost = lost
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(
        cls, end: socket.socket, kind: Any, receive: Callable[[Received], None], lost: Callable[[], None]
    ) -> MessageConnection[Received]:
        """A connection over the connected socket `end`, which it closes at its end."""
        connection = cls(kind, receive, lost)
        end.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=end)
        return connection

    def send(self, message: Any) -> None:
        """Send `message`. Does nothing once the connection is lost. Raises CannotEncode, which concerns no other message."""
        data = frame(encoded(message))
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection once what was sent is written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once, whatever was not written yet."""
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            for message in self._reader.feed(data):
                try:
                    self._receive(message)
                except Exception:  # a fault with one message is no fault of the connection
                    log.exception("a message could not be handled: %.200r", message)
        except BadFrame as error:
            log.error("the connection is closed: %s", error)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost()
