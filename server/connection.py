"""Carries messages over a stream socket: frames of a length and a msgpack list. Messages of one loop turn share a frame."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

log = logging.getLogger(__name__)

MOST_FRAME_BYTES = 1 << 30
SWITCH_S = 0.0002  # at both ends, other threads hold up the event loop and the engine's thread for so long at a time
FULL_FRAME_BYTES = 16 << 20  # messages beyond this begin another frame
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode

Received = TypeVar("Received")


class BadFrame(Exception):
    """The other side sent something that is no frame of messages."""


class CannotEncode(ValueError):
    """A message has a value that cannot be sent: a lone surrogate, a number beyond 64 bits, deep nesting."""


class FrameReader(Generic[Received]):
    """Splits a stream of bytes into messages of type `kind`."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[list[Received]] = msgspec.msgpack.Decoder(list[kind])
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Received]:
        """The messages that `data` completes. Raises BadFrame."""
        buffer = self._buffer
        buffer += data
        messages: list[Received] = []
        begin = 0
        while len(buffer) - begin >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer, begin)
            if size > MOST_FRAME_BYTES:
                raise BadFrame(f"a frame of {size:,} bytes; at most {MOST_FRAME_BYTES:,} are allowed")
            end = begin + _LENGTH.size + size
            if len(buffer) < end:
                break
            try:
                messages += self._decoder.decode(memoryview(buffer)[begin + _LENGTH.size : end])
            except (msgspec.MsgspecError, RecursionError) as error:
                raise BadFrame(str(error)) from error
            begin = end
        if begin:
            del buffer[:begin]
        return messages


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


def frame(messages: list[bytes]) -> bytes:
    """The frame that carries these encoded messages."""
    head = b"\xdd" + struct.pack(">I", len(messages))  # msgpack's array with 32 bits of length
    return b"".join((_LENGTH.pack(len(head) + sum(map(len, messages))), head, *messages))


class MessageConnection(asyncio.Protocol, Generic[Received]):
    """One end of a connection on an event loop.

    Args:
        kind: The type of the messages that arrive.
        receive: Called with each of them, in order.
        lost: Called once, when the other side is gone or sent a bad frame.
    """

    def __init__(self, kind: Any, receive: Callable[[Received], None], lost: Callable[[], None]) -> None:
        self._reader: FrameReader[Received] = FrameReader(kind)
        self._receive = receive
        self._lost = lost
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    async def open(
        cls, end: socket.socket, kind: Any, receive: Callable[[Received], None], lost: Callable[[], None]
    ) -> MessageConnection[Received]:
        """A connection over the connected socket `end`, which it closes at its end."""
        connection = cls(kind, receive, lost)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=end)
        return connection

    def send(self, message: Any) -> None:
        """Send `message` with others of this turn of the loop. Does nothing once the connection is lost.

        Raises CannotEncode, which concerns no other message.
        """
        data = encoded(message)
        if not self._pending and self._loop is not None:
            self._loop.call_soon(self.flush)
        self._pending.append(data)
        self._pending_bytes += len(data)
        if self._pending_bytes > FULL_FRAME_BYTES and self._loop is not None:
            self.flush()

    def flush(self) -> None:
        """Hand what was sent to the transport."""
        messages, self._pending, self._pending_bytes = self._pending, [], 0
        if messages and self._transport is not None:
            self._transport.write(frame(messages))

    def close(self) -> None:
        """Close the connection once what was sent is written."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once, whatever was not written yet."""
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._loop = asyncio.get_running_loop()
        if self._pending:
            self.flush()

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            messages = self._reader.feed(data)
        except BadFrame as error:
            log.error("the connection is closed: %s", error)
            self._transport.abort()
            return
        for message in messages:
            try:
                self._receive(message)
            except Exception:  # a fault with one message is no fault of the connection
                log.exception("a message could not be handled: %.200r", message)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost()
