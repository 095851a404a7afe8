"""A lease's connection to its broker, and to the broker's successors."""

from __future__ import annotations

import select
from collections.abc import Callable
from pathlib import Path

from . import wire
from .broker_client import Channel
from .errors import BrokerUnavailable, LeaseError, LeaseRefused
from .lease_events import Lost

_FIRST_RETRY_S, _LAST_RETRY_S = 0.02, 0.5  # retries for a successor; its grace period is longer
_REFUSED_RETRY_S = 5.0
_ANSWER_WITHIN_S = 5.0


class BrokerLink:
    """At most one channel to a broker. It knows when to try the next one.

    Not thread-safe; `Lease` has a lock.

    Args:
        clock: Seconds, for retries.
    """

    def __init__(self, path: Path, clock: Callable[[], float], epoll: select.epoll) -> None:
        self.registered = False  # whether the broker has registered the lease
        self._path, self._clock, self._epoll = path, clock, epoll
        self._channel: Channel | None = None
        self._retry_at, self._retry_s = 0.0, _FIRST_RETRY_S
        self._refusal: str | None = None  # why the last broker refused the lease
        self._answer_by = 0.0

    @property
    def is_open(self) -> bool:
        """Whether there is a channel, registered or not."""
        return self._channel is not None

    @property
    def retry_due(self) -> bool:
        """Whether it is time to try the next broker."""
        return self._clock() >= self._retry_at

    @property
    def idle_s(self) -> float:
        """Seconds until there is work that no descriptor signals."""
        if self._channel is None:
            return max(0.001, self._retry_at - self._clock())
        return 0.05 if self._channel.unsent or not self.registered else 60.0

    def connect(self, request: wire.RegisterMessage, deadline: float | None = None) -> None:
        """Connect and send the registration; the answer comes later. Raises BrokerUnavailable."""
        self._channel = Channel(self._path, deadline)
        self._epoll.register(self._channel, select.EPOLLIN)
        self._answer_by = self._clock() + _ANSWER_WITHIN_S
        self._channel.send(request)

    def register(self, request: wire.RegisterMessage, deadline: float) -> wire.RegisteredMessage:
        """Connect and wait for the answer. Raises what `Channel.wait` raises. `deadline` is by time.monotonic."""
        self.connect(request, deadline)
        assert self._channel is not None
        return self._channel.wait(deadline, wire.RegisteredMessage)

    def take_fd(self) -> int:
        """The descriptor that came with the answer; the caller closes it. Raises ProtocolViolation if there is none."""
        assert self._channel is not None
        return self._channel.take_fd()

    def set_registered(self) -> None:
        """The broker has registered the lease: forget failed attempts."""
        self.registered, self._retry_s, self._refusal = True, _FIRST_RETRY_S, None

    def receive(self) -> list[wire.Message]:
        """The messages that have come. Raises LeaseError; then call `lose`."""
        assert self._channel is not None
        return self._channel.receive()

    def check_answered(self) -> None:
        """Raises BrokerUnavailable if the registration has waited too long for its answer."""
        if not self.registered and self._clock() > self._answer_by:
            raise BrokerUnavailable(f"the broker at {self._path} does not answer")

    def send(self, message: wire.FromClient) -> None:
        """Send if a broker has registered the lease. `receive` reports a broker that stops reading."""
        if self._channel is not None and self.registered:
            self._channel.send(message)

    def lose(self, error: LeaseError) -> Lost | None:
        """Drop the broker and schedule a retry. Returns `Lost` only for a lost registration or a new refusal."""
        was_registered = self.registered
        self.close()
        refused = isinstance(error, LeaseRefused)
        self._retry_at = self._clock() + (_REFUSED_RETRY_S if refused else 0.0 if was_registered else self._retry_s)
        self._retry_s = min(self._retry_s * 2, _LAST_RETRY_S)
        is_new = was_registered or (refused and str(error) != self._refusal)
        if refused:
            self._refusal = str(error)
        return Lost(str(error), refused) if is_new else None

    def close(self) -> None:
        """Close the channel. Idempotent."""
        self.registered = False
        if self._channel is not None:
            self._channel.close()  # this also removes it from the epoll set
            self._channel = None
