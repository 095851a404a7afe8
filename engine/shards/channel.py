"""Messages between the driver and a shard: pickled objects, with their length before them, over a pair of sockets.

The two processes trust each other: the driver has started the shard, and no other has the sockets.
"""

from __future__ import annotations

import fcntl
import pickle
import select
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")


class ChannelClosed(Exception):
    """The process at the other end is gone."""


class ShardChannel:
    """One end. One thread at a time may send, and one receive."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = bytearray()

    @classmethod
    def pair(cls) -> tuple[ShardChannel, socket.socket]:
        """One end, and the socket of the other one, which a child process inherits."""
        ours, theirs = socket.socketpair()
        if theirs.fileno() <= 2:  # a program without its standard streams: in a child these numbers are others
            low, theirs = theirs, socket.socket(fileno=fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))
            low.close()
        return cls(ours), theirs

    def fileno(self) -> int:
        """The descriptor, readable when a part of a message is there."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Send `message`. Raises ChannelClosed."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except (OSError, ValueError) as error:
            raise ChannelClosed(str(error)) from error

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether `receive` has something to read; waits up to `timeout_s` for it."""
        return bool(self._received) or bool(select.select([self._socket], [], [], timeout_s)[0])

    def receive(self) -> Any:
        """The next message; waits for it. Raises ChannelClosed."""
        while (message := self._next()) is None:
            self._read()
        return message[0]

    def received(self) -> list[Any]:
        """All messages that have come, after one read that may wait. Raises ChannelClosed, once all before it were returned."""
        self._read()
        messages = []
        while (message := self._next()) is not None:
            messages.append(message[0])
        return messages

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._socket.close()

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 18)
        except (OSError, ValueError) as error:
            raise ChannelClosed(str(error)) from error
        if not data:
            raise ChannelClosed("the other end is closed")
        self._received += data

    def _next(self) -> tuple[Any] | None:
        """The next whole message, in a tuple; None if there is none."""
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        with memoryview(self._received) as view:
            message = pickle.loads(view[_LENGTH.size : end])
        del self._received[:end]
        return (message,)
