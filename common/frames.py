"""Messages over a stream socket, each in a frame: 8 bytes of length, little-endian, and as many of the message."""

from __future__ import annotations

import pickle
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

MOST_FRAME_BYTES = 1 << 36
_LENGTH = struct.Struct("<Q")


class ChannelClosed(Exception):
    """The process at the other end is gone."""


class BadFrame(Exception):
    """The other side sent something that is no frame of a message."""


def frame(data: bytes) -> bytes:
    """The frame that carries an encoded message."""
    return _LENGTH.pack(len(data)) + data


class FrameReader:
    """Splits a stream of bytes, cut anywhere, into messages of at most `most_bytes`.

    `decode` must keep no reference to its argument. `fault` is raised for what is no frame of a message, also by `decode`.
    """

    def __init__(
        self, decode: Callable[[memoryview], Any], most_bytes: int = MOST_FRAME_BYTES, fault: type[Exception] = BadFrame
    ) -> None:
        self._decode, self._most_bytes, self._fault = decode, most_bytes, fault
        self._buffer = bytearray()

    @property
    def has_part(self) -> bool:
        """Whether a part of a frame has come."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that `data` completes. Raises `fault`, after which the stream cannot be read on."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer)
            if size > self._most_bytes:  # before all of it is here
                raise self._fault(f"a frame of {size:,} bytes, and {self._most_bytes:,} are the most: {bytes(buffer[:80])!r}")
            end = _LENGTH.size + size
            if len(buffer) < end:
                break
            with memoryview(buffer) as whole, whole[_LENGTH.size : end] as view:
                try:
                    message = self._decode(view)
                except self._fault:
                    raise
                except Exception as error:
                    raise self._fault(f"{type(error).__name__}: {error}") from error
            del buffer[:end]
            yield message


class PickleChannel:
    """One end of a pair of sockets, for objects that can be pickled. Any thread may send, and one at a time receive.

    The processes at both ends run the same code and trust each other: one has started the other.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = FrameReader(pickle.loads)
        self._messages: deque[Any] = deque()
        self._fault: BadFrame | None = None  # after these messages
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def fileno(self) -> int:
        """The descriptor, readable when a part of a message is there."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Send `message`; waits while the other side does not read. Raises ChannelClosed, and what pickle raises."""
        data = frame(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        try:
            with self._sending:
                self._socket.sendall(data)
        except (OSError, ValueError) as error:
            raise ChannelClosed(str(error)) from error

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether `receive` has something to read; waits up to `timeout_s` for it."""
        return bool(self._messages or self._fault or self._poll.poll(timeout_s * 1000))

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message; waits for it. Raises ChannelClosed, BadFrame, and TimeoutError after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._messages:
            if deadline is not None and not self.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            self._read()
        return self._messages.popleft()

    def received(self) -> list[Any]:
        """All messages that have come, after one read that may wait. Raises ChannelClosed, once all were returned; BadFrame."""
        self._read()
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._socket.close()

    def _read(self) -> None:
        if self._fault is not None:
            raise self._fault
        try:
            data = self._socket.recv(1 << 18)
        except (OSError, ValueError) as error:
            raise ChannelClosed(str(error)) from error
        if not data:
            raise ChannelClosed("the other end is closed")
        try:
            self._messages.extend(self._reader.feed(data))
        except BadFrame as error:
            self._fault = error
            if not self._messages:
                raise
