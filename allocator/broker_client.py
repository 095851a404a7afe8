"""The broker's clients: a channel to its socket that never blocks, and what people ask of it, which does.

    client = BrokerClient(path)
    for lease in client.leases(): ...
    client.limit("engine", 2 * GIB)
    with client.reserve("GPU-...", 8 * GIB, timeout_s=60) as reservation:
        ...                                   # these bytes are free, and no engine takes them
        reservation.poll()                    # now and then: if the broker ended, its successor has to be told

Every call of a client is a connection of its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from . import wire
from .broker_socket import connect
from .errors import BrokerUnavailable, LeaseError, ProtocolMismatch, ProtocolViolation

_READ_BYTES = 65536
_MAX_UNSENT_BYTES = 256 * 1024
_RETRY_S = 1.0  # a reservation's, for a broker to tell

M = TypeVar("M")


class Channel:
    """One connection to a broker. Not thread-safe."""

    def __init__(self, path: Path, deadline: float | None = None, *, protocol: int = wire.OLDEST_PROTOCOL) -> None:
        """Connect and say hello; the answer is looked at with what else comes. Raises BrokerUnavailable.

        While too many others wait to be accepted it tries again until `deadline`, by time.monotonic; without one, not.
        `protocol` is the version to speak: what people ask is the same in all, so they speak the one that any broker knows.
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
        self._decoder = wire.FrameDecoder()
        self._out = bytearray()
        self._fds: deque[int] = deque()
        self._inbox: deque[wire.Message] = deque()
        self._failure: LeaseError | None = None
        self._greeted = False
        self._protocol = protocol
        self.send(wire.HelloMessage(protocol))

    def fileno(self) -> int:
        """Readable when there is something to receive."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether the broker has not taken all that was sent."""
        return bool(self._out)

    def send(self, message: wire.FromClient) -> None:
        """Send, or keep it until the broker reads. That it does not, or is gone, `receive` and `wait` say."""
        if self._failure is None:
            self._out += wire.to_frame(message)
            self._flush()
            if len(self._out) > _MAX_UNSENT_BYTES:
                self._failure = BrokerUnavailable(
                    f"the broker at {self._path} does not read: {len(self._out):,} bytes wait for it"
                )

    def receive(self) -> list[wire.Message]:
        """What has come. Raises ProtocolMismatch and ProtocolViolation too; after any error only `close`."""
        self._read()
        messages = list(self._inbox)
        self._inbox.clear()
        if not messages and self._failure is not None:
            raise self._failure
        return messages

    def wait(self, deadline: float, *kinds: type[M]) -> M:
        """The next message, which is of these kinds or a refusal. `deadline` by time.monotonic.

        Raises the LeaseRefused that comes instead, and ProtocolViolation for anything else.
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
        """The oldest descriptor that came and was not taken; the caller closes it. Raises ProtocolViolation for none."""
        if not self._fds:
            raise ProtocolViolation("the broker sent no descriptor with its answer")
        return self._fds.popleft()

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
        while self._fds:
            os.close(self._fds.popleft())

    def _read(self) -> None:
        """Take in what has come, up to the first error, which is kept for when the rest was received."""
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
        if message.protocol != self._protocol:
            raise ProtocolMismatch(ours=self._protocol, theirs=message.protocol)
        self._greeted = True

    def _flush(self) -> None:
        """Send what the broker takes. One that has gone may have said why: that is for `_read` to find."""
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


class Reservation:
    """Bytes that are kept free for as long as it is open and there is a broker. Made by `BrokerClient.reserve`.

    Attributes:
        kept: whether a broker keeps them free now.
        trouble: why not; None while it does.
    """

    def __init__(
        self, path: Path, request: wire.ReserveMessage, channel: Channel, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Takes `channel` over, on which the request was answered."""
        self._path, self._request, self._clock = path, request, clock
        self._channel: Channel | None = channel
        self._retry_at = 0.0
        self.kept = True
        self.trouble: str | None = None

    def fileno(self) -> int | None:
        """Readable when `poll` has something to do; None while there is no broker: then call it now and then."""
        return None if self._channel is None else self._channel.fileno()

    def poll(self) -> None:
        """Look whether the broker is there still; if not, ask its successor for the same bytes. Never blocks."""
        try:
            if self._channel is None:
                if self._clock() < self._retry_at:
                    return
                self._channel = Channel(self._path)
                self._channel.send(self._request)
            for message in self._channel.receive():
                if isinstance(message, wire.RefusedMessage):
                    raise wire.error_of(message)
                if not isinstance(message, wire.ReservedMessage):
                    raise ProtocolViolation(f"the broker answered with {type(message).__name__}")
                self.kept, self.trouble = True, None
        except LeaseError as error:
            self.close()
            self.trouble = str(error)
            self._retry_at = self._clock() + _RETRY_S

    def close(self) -> None:
        """Keep them free no longer. Idempotent."""
        self.kept = False
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class BrokerClient:
    """What people ask of a broker. Every call raises BrokerUnavailable, ProtocolMismatch and LeaseRefused."""

    def __init__(self, path: Path, *, timeout_s: float = 5.0) -> None:
        """Does nothing yet."""
        self._path = path
        self._timeout_s = timeout_s

    def leases(self) -> tuple[wire.LeaseView, ...]:
        """All leases, the oldest first."""
        with self._channel() as (channel, deadline):
            channel.send(wire.ListLeasesMessage())
            rows = []
            while isinstance(row := channel.wait(deadline, wire.LeaseView, wire.DoneMessage), wire.LeaseView):
                rows.append(row)
            return tuple(rows)

    def limit(self, engine: str, max_bytes: int) -> wire.LimitSetMessage:
        """Let an engine (name, pid or #number) grow no further. What it is granted above comes back as its requests end."""
        with self._channel() as (channel, deadline):
            channel.send(wire.SetLimitMessage(engine, max_bytes))
            return channel.wait(deadline, wire.LimitSetMessage)

    def recall(self, engine: str, num_bytes: int) -> wire.RecallingMessage:
        """Have an engine (name, pid or #number) give back so much of what it holds; its minimum stays."""
        with self._channel() as (channel, deadline):
            channel.send(wire.RecallBytesMessage(engine, num_bytes))
            return channel.wait(deadline, wire.RecallingMessage)

    @contextlib.contextmanager
    def reserve(self, device_uuid: str, num_bytes: int, *, timeout_s: float) -> Iterator[Reservation]:
        """Inside, `num_bytes` of the device are free for whoever knows no broker: engines give them back first.

        Waits for them at most `timeout_s`.
        """
        request = wire.ReserveMessage(device_uuid, num_bytes)
        channel = Channel(self._path, time.monotonic() + self._timeout_s)
        try:
            channel.send(request)
            channel.wait(time.monotonic() + timeout_s, wire.ReservedMessage)
        except BaseException:
            channel.close()
            raise
        reservation = Reservation(self._path, request, channel)
        try:
            yield reservation
        finally:
            reservation.close()

    @contextlib.contextmanager
    def _channel(self) -> Iterator[tuple[Channel, float]]:
        deadline = time.monotonic() + self._timeout_s
        channel = Channel(self._path, deadline)
        try:
            yield channel, deadline
        finally:
            channel.close()
