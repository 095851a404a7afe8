"""The broker's clients: a non-blocking channel to its socket, and the blocking calls of commands.

    client = BrokerClient(path)
    for lease in client.leases(): ...
    client.limit("engine", 2 * GIB)

Each call of a client opens its own connection.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from . import wire
from .broker_socket import connect
from .errors import BrokerUnavailable, LeaseError, ProtocolMismatch, ProtocolViolation

_READ_BYTES = 65536
_MAX_UNSENT_BYTES = 256 * 1024

M = TypeVar("M")


class Channel:
    """One connection to a broker. Not thread-safe."""

    def __init__(self, path: Path, deadline: float | None = None) -> None:
        """Connect and send hello; the answer is checked on the first read. Raises BrokerUnavailable.

        If the socket's backlog is full, it retries until `deadline`, by time.monotonic; without a deadline it does not.
        """
        try:
            self._socket = _connect_by(path, deadline)
        except FileNotFoundError:
            raise BrokerUnavailable(f"no broker listens at {path}; is vram-monitor running?") from None
        except ConnectionRefusedError:
            raise BrokerUnavailable(f"the broker that listened at {path} has ended") from None
        except OSError as error:
            raise BrokerUnavailable(f"the broker at {path} cannot be reached: {error.strerror}") from error
        self._path = path
        self._decoder = wire.message_reader()
        self._out = bytearray()
        self._fds: deque[int] = deque()
        self._inbox: deque[wire.Message] = deque()
        self._failure: LeaseError | None = None
        self._greeted = False
        self.send(wire.HelloMessage(wire.PROTOCOL))

    def fileno(self) -> int:
        """Readable when there is something to receive."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether some sent data still waits for the broker."""
        return bool(self._out)

    def send(self, message: wire.FromClient) -> None:
        """Send, or queue until the broker reads. Errors are raised later, by `receive` and `wait`."""
        if self._failure is None:
            self._out += wire.to_frame(message)
            self._flush()
            if len(self._out) > _MAX_UNSENT_BYTES:
                self._failure = BrokerUnavailable(
                    f"the broker at {self._path} does not read: {len(self._out):,} bytes wait for it"
                )

    def receive(self) -> list[wire.Message]:
        """The messages that have come. Raises ProtocolMismatch and ProtocolViolation too; then only `close` is allowed."""
        self._read()
        messages = list(self._inbox)
        self._inbox.clear()
        if not messages and self._failure is not None:
            raise self._failure
        return messages

    def wait(self, deadline: float, *kinds: type[M]) -> M:
        """Wait for the next message, which must be of these kinds or a refusal. `deadline` is by time.monotonic.

        Raises the LeaseRefused of a refusal, and ProtocolViolation for any other message.
        """
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        self._read()
        while not self._inbox:
            if self._failure is not None:
                raise self._failure
            left = deadline - time.monotonic()
            if left <= 0:
                raise BrokerUnavailable(f"the broker at {self._path} did not answer in time")
            poller.poll(min(left, 0.05 if self._out else left) * 1000)
            self._read()
        message = self._inbox.popleft()
        if isinstance(message, wire.RefusedMessage):
            raise wire.error_of(message)
        if not isinstance(message, kinds):
            raise ProtocolViolation(f"the broker answered with {type(message).__name__}")
        return message

    def take_fd(self) -> int:
        """The oldest descriptor received and not taken; the caller closes it. Raises ProtocolViolation if there is none."""
        if not self._fds:
            raise ProtocolViolation("the broker sent no descriptor with its answer")
        return self._fds.popleft()

    def close(self) -> None:
        """Close the socket and all descriptors not taken. Idempotent."""
        self._socket.close()
        while self._fds:
            os.close(self._fds.popleft())

    def _read(self) -> None:
        """Read up to the first error, which is kept until the messages before it have been received."""
        if self._failure is not None:
            return
        try:
            self._flush()
            while True:
                data, fds, _, _ = socket.recv_fds(self._socket, _READ_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
                self._fds.extend(fds)
                if not data:
                    raise self._gone("it closed the connection")
                for message in self._decoder.feed(data):
                    if self._greeted:
                        self._inbox.append(message)
                    else:
                        self._greet(message)
        except BlockingIOError:
            pass
        except OSError as error:
            self._failure = self._gone(error.strerror)
        except LeaseError as error:
            self._failure = error

    def _greet(self, message: wire.Message) -> None:
        if not isinstance(message, wire.WelcomeMessage):
            raise ProtocolViolation(f"the broker's first message was {type(message).__name__}")
        if message.protocol != wire.PROTOCOL:
            raise ProtocolMismatch(ours=wire.PROTOCOL, theirs=message.protocol)
        self._greeted = True

    def _flush(self) -> None:
        """Send what the broker accepts. If it is gone, `_read` reports why: the broker may have sent a reason."""
        while self._out:
            try:
                sent = self._socket.send(self._out)
            except BlockingIOError:
                return
            except OSError:
                self._out.clear()
                return
            del self._out[:sent]

    def _gone(self, why: str | None) -> BrokerUnavailable:
        return BrokerUnavailable(f"the broker at {self._path} is gone: {why}")


def _connect_by(path: Path, deadline: float | None) -> socket.socket:
    while True:
        try:
            return connect(path)
        except BlockingIOError:
            if deadline is None or time.monotonic() > deadline:
                raise
            time.sleep(0.005)


class BrokerClient:
    """User commands to a broker. Every call raises BrokerUnavailable, ProtocolMismatch and LeaseRefused."""

    def __init__(self, path: Path, *, timeout_s: float = 5.0) -> None:
        """Does not connect yet."""
        self._path = path
        self._timeout_s = timeout_s

    def leases(self) -> tuple[wire.LeaseView, ...]:
        """All leases, oldest first."""
        with self._channel() as (channel, deadline):
            return _rows(channel, deadline, wire.ListLeasesMessage(), wire.LeaseView)

    def limit(self, engine: str, max_bytes: int) -> wire.LimitSetMessage:
        """Limit an engine (name, pid or #number). Memory above the limit comes back as its requests end."""
        with self._channel() as (channel, deadline):
            channel.send(wire.SetLimitMessage(engine, max_bytes))
            return channel.wait(deadline, wire.LimitSetMessage)

    def recall(self, engine: str, num_bytes: int) -> wire.RecallingMessage:
        """Recall `num_bytes` of what an engine (name, pid or #number) holds; its minimum stays."""
        with self._channel() as (channel, deadline):
            channel.send(wire.RecallBytesMessage(engine, num_bytes))
            return channel.wait(deadline, wire.RecallingMessage)

    def reservations(self) -> tuple[wire.ReservationView, ...]:
        """All reservations, oldest first."""
        with self._channel() as (channel, deadline):
            return _rows(channel, deadline, wire.ListReservationsMessage(), wire.ReservationView)

    def end_reservation(self, reservation_id: int) -> None:
        """End a reservation of this user; as root or the broker's user any."""
        with self._channel() as (channel, deadline):
            channel.send(wire.EndReservationMessage(reservation_id))
            channel.wait(deadline, wire.DoneMessage)

    @contextlib.contextmanager
    def _channel(self) -> Iterator[tuple[Channel, float]]:
        deadline = time.monotonic() + self._timeout_s
        channel = Channel(self._path, deadline)
        try:
            yield channel, deadline
        finally:
            channel.close()


def _rows(channel: Channel, deadline: float, question: wire.FromClient, kind: type[M]) -> tuple[M, ...]:
    """The answer to a question for rows of this kind."""
    channel.send(question)
    rows = []
    while isinstance(row := channel.wait(deadline, kind, wire.DoneMessage), kind):
        rows.append(row)
    return tuple(rows)
