"""One client of the broker: reads and writes a socket with an untrusted peer, within bounds.

A client's violation ends its own connection and costs other clients nothing: an invalid or oversized frame, too many
messages, an incomplete frame followed by silence, or not reading what it is sent.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .errors import ProtocolViolation
from .wire import Message, message_reader, to_frame

READ_BYTES = 4096  # per read, so that one client cannot delay the others
MAX_UNREAD_BYTES = 256 * 1024
MESSAGES_PER_S = 500  # sustained rate, and
BURST_MESSAGES = 1000  # burst, of a client with a lease or a reservation;
STRANGERS_BURST = 100  # of any other client
HELLO_WITHIN_S = 2.0
FRAME_WITHIN_S = 5.0
IDLE_S = 10.0  # without a lease or a reservation

_CREDENTIALS = struct.Struct("3i")
_SO_PEERPIDFD = 77  # Linux 6.5; not in the socket module yet


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, as the kernel reports it; pid 0 if it is not visible here."""

    pid: int
    uid: int


class Dropped(Exception):
    """The connection has to end. `kind` names the reason in general, the message in detail."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Connection:
    """A client's socket in the broker's loop. `received` and `dropped` are called from the loop."""

    def __init__(
        self,
        sock: socket.socket,
        now_ns: int,
        *,
        received: Callable[[Connection, Message], None],
        dropped: Callable[[Connection, Dropped], None],
        clock: Callable[[], int],
    ) -> None:
        """Take ownership of `sock`. Raises OSError if it is already gone."""
        sock.setblocking(False)
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        self.peer = Peer(pid, uid)
        self.greeted = False
        self.lease_id: int | None = None
        self.reservation_id: int | None = None
        self.closed = False
        self._sock = sock
        self._received, self._dropped, self._clock = received, dropped, clock
        self._decoder = message_reader()
        self._opened_ns = self._heard_ns = self._part_since_ns = now_ns
        self._burst, self._counted_ns = 0.0, now_ns
        self._out: deque[tuple[bytes, int | None]] = deque()
        self._out_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._readable)

    @property
    def needed(self) -> bool:
        """Whether the connection holds a lease or a reservation."""
        return self.lease_id is not None or self.reservation_id is not None

    def pidfd(self) -> int | None:
        """A descriptor that becomes readable when the peer's process ends; None if the system cannot provide one.

        Raises ProcessLookupError if the process has already ended.
        """
        try:
            return self._sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        except ProcessLookupError:
            raise
        except OSError:  # before Linux 6.5
            return os.pidfd_open(self.peer.pid) if self.peer.pid else None

    def send(self, message: Message, fd: int | None = None) -> None:
        """Queue a message; `fd` is closed here once sent. Drops a client that does not read."""
        if self.closed:
            if fd is not None:
                os.close(fd)
            return
        frame = to_frame(message)
        self._out.append((frame, fd))
        self._out_bytes += len(frame)
        self._flush()
        if self._out_bytes > MAX_UNREAD_BYTES:
            self.drop(Dropped("does not read", f"{self._out_bytes:,} bytes wait for it"))

    def drop(self, reason: Dropped) -> None:
        """Close the connection and call `dropped`. Idempotent."""
        if not self.closed:
            self.close()
            self._dropped(self, reason)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        for _, fd in self._out:
            if fd is not None:
                os.close(fd)
        self._out.clear()

    def check_open(self) -> None:
        """Drop a client that has closed its socket, if the loop has not noticed yet."""
        if not self.closed:
            try:
                if not self._sock.recv(1, socket.MSG_PEEK):
                    self.drop(Dropped("is gone", "it closed its socket"))
            except BlockingIOError:
                return
            except OSError as error:
                self.drop(Dropped("is gone", str(error)))

    def check_times(self, now_ns: int) -> None:
        """Drop a client that exceeds a time limit."""
        if not self.greeted and now_ns - self._opened_ns > HELLO_WITHIN_S * 1e9:
            self.drop(Dropped("says nothing", f"no hello within {HELLO_WITHIN_S:g} s"))
        elif self._decoder.has_part and now_ns - self._part_since_ns > FRAME_WITHIN_S * 1e9:
            self.drop(Dropped("stops in a frame", f"a frame was not completed within {FRAME_WITHIN_S:g} s"))
        elif not self.needed and now_ns - self._heard_ns > IDLE_S * 1e9:
            self.drop(Dropped("is idle", f"it holds nothing and asked nothing for {IDLE_S:g} s"))

    def _readable(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.drop(Dropped("is gone", str(error)))
            return
        if not data:
            self.drop(Dropped("is gone", "it closed its socket"))
            return
        had_part, self._heard_ns = self._decoder.has_part, self._clock()
        try:
            for message in self._decoder.feed(data):
                had_part = False
                self._count()
                self._received(self, message)
                if self.closed:
                    return
        except ProtocolViolation as error:
            self.drop(Dropped("sent an invalid message", str(error)))
        except Dropped as reason:
            self.drop(reason)
        if not had_part:
            self._part_since_ns = self._heard_ns

    def _count(self) -> None:
        """Count one message. Raises Dropped if the rate limit is exceeded."""
        forgotten = (self._heard_ns - self._counted_ns) / 1e9 * MESSAGES_PER_S
        self._burst = max(0.0, self._burst - forgotten) + 1
        self._counted_ns = self._heard_ns
        if self._burst > (BURST_MESSAGES if self.needed else STRANGERS_BURST):
            raise Dropped("sends too much", f"more than {MESSAGES_PER_S} messages a second")

    def _flush(self) -> None:
        try:
            while self._out:
                frame, fd = self._out[0]
                sent = self._sock.send(frame) if fd is None else socket.send_fds(self._sock, [frame], [fd])
                if fd is not None:
                    os.close(fd)
                self._out_bytes -= sent
                self._out[0] = (frame[sent:], None)
                if sent < len(frame):
                    continue
                self._out.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._flush)
            return
        except OSError as error:
            self.drop(Dropped("is gone", str(error)))
            return
        self._loop.remove_writer(self._sock)
