"""The events of a lease: what the broker has changed, as `Lease.poll` returns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .errors import LeaseRefused


@dataclass(frozen=True, slots=True)
class Granted:
    """The lease may now hold `granted_bytes` in all."""

    granted_bytes: int


@dataclass(frozen=True, slots=True)
class Recalled:
    """The lease must be at or under `target_bytes` by `due` (lease clock); answer with `answer_unmapped`.

    With `spares_requests` only as far as running requests do not need the memory: any answer ends the recall.
    """

    target_bytes: int
    due: float
    spares_requests: bool = False


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The recall is no longer needed."""


@dataclass(frozen=True, slots=True)
class Limited:
    """The max has changed: admit nothing that would exceed it, and shrink to it as requests end."""

    max_bytes: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The broker is gone or refuses the lease."""

    reason: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Rejoined:
    """A broker has registered the lease again."""

    granted_bytes: int


@dataclass(frozen=True, slots=True)
class Denied:
    """The broker refused a message. An answer that crossed a newer grant gets this; it needs no reply."""

    error: LeaseRefused


Event: TypeAlias = Granted | Recalled | Withdrawn | Limited | Lost | Rejoined | Denied
