"""The lease protocol: messages between engine and broker, as frames of bytes and as validated dataclasses.

    frame      as in common/frames.py, with a payload of at most 64 KiB
    payload    one JSON object in UTF-8: {"type": "ask", "target_bytes": 4294967296, "expires_ms": 1000}

    engine    hello ──► register ──────────────► ask ──────► report   unmapped, lower_min ──► release
    broker    ◄── welcome   ◄── registered + record   ◄── grant   ◄── recall, withdraw, limit    ◄── refused

The first frames, `hello` and `welcome`, are the same in every version and carry its number. A broker of another version
than the client's names its own and ends the connection. All other frames are strict: an extra or missing key or a value
out of range is a ProtocolViolation and ends the connection. Amounts are bytes. Times are durations, since two processes'
clocks need not agree.

A generation is the revision of a lease's state: (the broker's epoch, a counter that rises with every order). Every
order has its own generation. An order older than the last is superseded and ignored. An answer names the newest
generation its engine has seen.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

from ..common.frames import FrameReader, frame
from .errors import (
    InvalidLease,
    LeaseRefused,
    MemoryNotFree,
    MinimumsExceedCapacity,
    NotPermitted,
    ProtocolViolation,
    UnknownEngine,
)

PROTOCOL = 8
MAX_PAYLOAD_BYTES = 64 * 1024
# More memory than any machine has; sums of a few still fit into 64 bits
MAX_BYTES = 2**62
MAX_SENTENCE = 4096  # characters
MAX_RESERVATION_S = 30 * 24 * 3600
MAX_CLASSES = 8  # kinds of memory that an engine reports


class OrderGeneration(NamedTuple):
    """The generation of an order: within an epoch, larger is newer; another epoch is another broker."""

    epoch: int
    counter: int


# ---- values: (field name, received value) -> the checked value ----------------------------------

T = TypeVar("T")
_Read = Callable[[str, object], T]


def _wrong(name: str, wanted: str, value: object) -> ProtocolViolation:
    return ProtocolViolation(f"{name} must be {wanted}, got {reprlib.repr(value)}")


def _whole(low: int, high: int) -> _Read[int]:
    def read(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _wrong(name, f"a whole number between {low} and {high}", value)
        return value

    return read


def _number(low: float, high: float) -> _Read[float]:
    def read(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise _wrong(name, f"a number between {low:g} and {high:g}", value)
        return float(value)

    return read


def _text(longest: int) -> _Read[str]:
    def read(name: str, value: object) -> str:
        if not isinstance(value, str) or not 0 < len(value) <= longest or not value.isprintable():
            raise _wrong(name, f"a printable text of 1 to {longest} characters", value)
        return value

    return read


def _classes(name: str, value: object) -> Mapping[str, int]:
    if not isinstance(value, dict) or len(value) > MAX_CLASSES:
        raise _wrong(name, f"an object of at most {MAX_CLASSES} amounts", value)
    return {_CLASS(f"a key of {name}", key): _AMOUNT(f"{name}.{key}", amount) for key, amount in value.items()}


def _generation(name: str, value: object) -> OrderGeneration:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise _wrong(name, "a pair of whole numbers", value)
    return OrderGeneration(_COUNT(f"{name}[0]", value[0]), _COUNT(f"{name}[1]", value[1]))


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def _optional(read: _Read[T]) -> _Read[T | None]:
    return lambda name, value: None if value is None else read(name, value)


_AMOUNT, _COUNT, _CLASS = _whole(0, MAX_BYTES), _whole(0, 2**63 - 1), _text(32)
_MS = _whole(1, 24 * 3600 * 1000)
_LONG_MS = _whole(0, MAX_RESERVATION_S * 1000)

Bytes = Annotated[int, _AMOUNT]
MaybeBytes = Annotated[int | None, _optional(_AMOUNT)]
PositiveBytes = Annotated[int, _whole(1, MAX_BYTES)]
Count = Annotated[int, _COUNT]
Pid = Annotated[int, _whole(0, 2**31 - 1)]
Flag = Annotated[bool, _flag]
Ms = Annotated[int, _MS]
LongMs = Annotated[int, _LONG_MS]
MaybeLongMs = Annotated[int | None, _optional(_LONG_MS)]
MaybeMs = Annotated[int | None, _optional(_whole(0, 2**63 - 1))]
Name = Annotated[str, _text(128)]
Sentence = Annotated[str, _text(MAX_SENTENCE)]
Weight = Annotated[float, _number(0.001, 1000)]
Priority = Annotated[int, _whole(-1000, 1000)]
Classes = Annotated[Mapping[str, int], _classes]
Order = Annotated[OrderGeneration, _generation]


# ---- from the client ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HelloMessage:
    """The client's first frame."""

    protocol: Count


@dataclass(frozen=True, slots=True)
class RegisterMessage:
    """Register a lease for this process. `max_bytes` None: the whole device."""

    name: Name
    device_uuid: Name
    min_bytes: Bytes
    max_bytes: MaybeBytes
    weight: Weight
    priority: Priority
    granule_bytes: PositiveBytes
    held_bytes: Bytes


@dataclass(frozen=True, slots=True)
class AskMessage:
    """The engine's requests could use `target_bytes` in all; with `keep_bytes` cached prefixes would stay too.

    Counts as demand until it expires or the next ask comes. `waiting_ms`: how long the oldest request has waited.
    """

    target_bytes: Bytes
    expires_ms: Ms
    waiting_ms: Count = 0
    keep_bytes: Bytes = 0


@dataclass(frozen=True, slots=True)
class ReportMessage:
    """The bytes the engine holds by class. Of these, no request needs `free_bytes`, nor `kept_bytes`, which hold prefixes.

    `num_waiting` of its requests are not running. `reused`: prompts find half of their tokens or more in its prefixes.
    """

    held: Classes
    free_bytes: Bytes
    kept_bytes: Bytes = 0
    num_waiting: Count = 0
    reused: Flag = True


@dataclass(frozen=True, slots=True)
class UnmappedMessage:
    """The engine holds `held_bytes` and will hold no more without a grant newer than `generation`."""

    held_bytes: Bytes
    generation: Order


@dataclass(frozen=True, slots=True)
class LowerMinMessage:
    """Lower the engine's minimum to `min_bytes`."""

    min_bytes: Bytes


@dataclass(frozen=True, slots=True)
class ReleaseMessage:
    """End the lease or the reservation; the connection may stay open."""


@dataclass(frozen=True, slots=True)
class ListLeasesMessage:
    """List the leases. Answered by a `LeaseView` for each, then `DoneMessage`."""


@dataclass(frozen=True, slots=True)
class SetLimitMessage:
    """Limit the engine (name, pid or #number) to `max_bytes`. Answered by `LimitSetMessage`."""

    engine: Name
    max_bytes: Bytes


@dataclass(frozen=True, slots=True)
class RecallBytesMessage:
    """Recall `num_bytes` of what the engine (as in `SetLimitMessage`) holds. Answered by `RecallingMessage`."""

    engine: Name
    num_bytes: PositiveBytes


@dataclass(frozen=True, slots=True)
class ReserveMessage:
    """Reserve `num_bytes` for an external process. Answered by `ReservedMessage`, or by a refusal after `wait_ms`.

    Ends with this connection, with the process `pid` (0: the connection's), and `duration_ms` after the answer; then comes
    `ReservationEndedMessage`.
    """

    device_uuid: Name
    num_bytes: PositiveBytes
    name: Name = "a program"
    priority: Priority = 0  # of the queue: a lower number is served first
    duration_ms: MaybeLongMs = None  # None: no time limit
    wait_ms: LongMs = MAX_RESERVATION_S * 1000
    pid: Pid = 0
    # The last broker had granted it: a new one need not wait until the bytes are free.
    renewed: Flag = False


@dataclass(frozen=True, slots=True)
class ResizeMessage:
    """Change this connection's reservation to `num_bytes`. Answered as `ReserveMessage`; a refusal leaves it as it was."""

    num_bytes: PositiveBytes
    wait_ms: LongMs


@dataclass(frozen=True, slots=True)
class EndReservationMessage:
    """End a reservation of this user, or any as root or the broker's user. Answered by `DoneMessage`."""

    reservation_id: Count


@dataclass(frozen=True, slots=True)
class ListReservationsMessage:
    """List the reservations. Answered by a `ReservationView` for each, then `DoneMessage`."""


# ---- from the broker ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WelcomeMessage:
    """The broker's first frame."""

    protocol: Count
    epoch: Count
    pid: Count


@dataclass(frozen=True, slots=True)
class RegisteredMessage:
    """The lease is registered; the descriptor of its record comes with this frame. Further grants follow."""

    lease_id: Count
    generation: Order
    granted_bytes: Bytes


@dataclass(frozen=True, slots=True)
class GrantMessage:
    """The engine may now hold `granted_bytes` in all."""

    lease_id: Count
    generation: Order
    granted_bytes: Bytes


@dataclass(frozen=True, slots=True)
class RecallMessage:
    """The engine must be at or under `target_bytes` within `deadline_ms`.

    With `spares_requests` only as far as running requests do not need the memory: any answer ends the recall.
    """

    lease_id: Count
    generation: Order
    target_bytes: Bytes
    deadline_ms: Ms
    spares_requests: Flag = False


@dataclass(frozen=True, slots=True)
class WithdrawMessage:
    """The recall is no longer needed: the engine may keep its grant."""

    lease_id: Count
    generation: Order


@dataclass(frozen=True, slots=True)
class LimitMessage:
    """The engine's max has changed. Above it, the engine admits no requests and shrinks as its requests end."""

    lease_id: Count
    max_bytes: Bytes
    generation: Order


@dataclass(frozen=True, slots=True)
class RefusedMessage:
    """The request was refused and nothing was done. `code` names the LeaseRefused: see `refusal` and `error_of`."""

    code: Name
    message: Sentence


@dataclass(frozen=True, slots=True)
class LeaseView:
    """One lease as shown to users and metrics."""

    lease_id: Count
    name: Name
    pid: Count
    user: Name
    device_uuid: Name
    min_bytes: Bytes
    max_bytes: MaybeBytes  # None: the whole device
    weight: Weight
    priority: Priority
    granted_bytes: Bytes
    held_bytes: Bytes  # the current upper bound of its record
    held: Classes  # by class, as last reported
    free_bytes: Bytes  # of these, what it can give back without affecting a request
    asked_bytes: MaybeBytes  # None: no demand
    state: Name  # ok, recalling, overdue, reaping
    recall_target_bytes: MaybeBytes
    recall_age_ms: MaybeMs  # since the oldest pending recall
    kept_bytes: Bytes = 0  # of `free_bytes`, what holds cached prefixes
    num_waiting: Count = 0  # requests, as last reported
    lacking_ms: MaybeMs = None  # how long its requests have waited for memory beyond the grant; None: they do not


@dataclass(frozen=True, slots=True)
class DoneMessage:
    """The end of the rows, or that a command was carried out."""


@dataclass(frozen=True, slots=True)
class LimitSetMessage:
    """The limit is set; `over_bytes` above it are still granted."""

    max_bytes: Bytes
    over_bytes: Bytes


@dataclass(frozen=True, slots=True)
class RecallingMessage:
    """The engine was ordered to be at or under `target_bytes`."""

    target_bytes: Bytes
    deadline_ms: Ms


@dataclass(frozen=True, slots=True)
class ReservedMessage:
    """The bytes are free now and no lease will use them."""

    num_bytes: Bytes
    reservation_id: Count = 0
    left_ms: MaybeLongMs = None  # until its end; None: no time limit


@dataclass(frozen=True, slots=True)
class QueuedMessage:
    """The reservation, or what it wants more, waits; `reason` says for what."""

    reservation_id: Count
    reason: Sentence


@dataclass(frozen=True, slots=True)
class ReservationEndedMessage:
    """The reservation has ended."""

    reason: Sentence


@dataclass(frozen=True, slots=True)
class ReservationView:
    """One reservation as shown to users."""

    reservation_id: Count
    name: Name
    pid: Count
    user: Name
    device_uuid: Name
    held_bytes: Bytes  # free for its process, or used by it
    wanted_bytes: Bytes  # more than held: the rest waits
    priority: Priority
    waiting_ms: MaybeMs  # None: it does not wait
    left_ms: MaybeLongMs  # None: no time limit, or it has not begun


FromClient = (
    HelloMessage
    | RegisterMessage
    | AskMessage
    | ReportMessage
    | UnmappedMessage
    | LowerMinMessage
    | ReleaseMessage
    | ListLeasesMessage
    | SetLimitMessage
    | RecallBytesMessage
    | ReserveMessage
    | ResizeMessage
    | EndReservationMessage
    | ListReservationsMessage
)
FromBroker = (
    WelcomeMessage
    | RegisteredMessage
    | GrantMessage
    | RecallMessage
    | WithdrawMessage
    | LimitMessage
    | RefusedMessage
    | LeaseView
    | DoneMessage
    | LimitSetMessage
    | RecallingMessage
    | ReservedMessage
    | QueuedMessage
    | ReservationEndedMessage
    | ReservationView
)
Message = FromClient | FromBroker


def _type_name(kind: type) -> str:
    """`ListLeasesMessage` -> "list_leases"."""
    return "".join(
        f"_{letter.lower()}" if letter.isupper() else letter for letter in kind.__name__.removesuffix("Message")
    ).lstrip("_")


_KINDS: dict[str, type] = {_type_name(kind): kind for kind in (*get_args(FromClient), *get_args(FromBroker))}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_READERS: dict[type, dict[str, _Read[Any]]] = {
    kind: {name: hint.__metadata__[0] for name, hint in get_type_hints(kind, include_extras=True).items()} for kind in _NAMES
}


# ---- message <-> bytes --------------------------------------------------------------------------


def to_frame(message: Message) -> bytes:
    """Encode a message. Raises ProtocolViolation if the other side would refuse it."""
    name = _NAMES[type(message)]
    content = {key: read(f"{name}.{key}", getattr(message, key)) for key, read in _READERS[type(message)].items()}
    payload = json.dumps({"type": name, **content}, separators=(",", ":"), ensure_ascii=False).encode()
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ProtocolViolation(f"a frame holds at most {MAX_PAYLOAD_BYTES:,} bytes, {name} has {len(payload):,}")
    return frame(payload)


def from_payload(payload: bytes) -> Message:
    """Decode the message of a frame. Raises ProtocolViolation."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ProtocolViolation(f"a frame holds at most {MAX_PAYLOAD_BYTES:,} bytes, this one {len(payload):,}")
    try:
        content = json.loads(payload.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ProtocolViolation(f"a frame is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise _wrong("a frame", "a JSON object", content)
    type_name = content.pop("type", None)
    kind = _KINDS.get(type_name) if isinstance(type_name, str) else None
    if kind is None:
        raise _wrong("the type of a frame", f"one of {', '.join(_KINDS)}", type_name)
    readers = _READERS[kind]
    extra, missing = content.keys() - readers.keys(), readers.keys() - content.keys()
    if extra or missing:
        raise ProtocolViolation(f"{type_name} has {_listed(sorted(extra))} too many and lacks {_listed(sorted(missing))}")
    message: Message = kind(**{key: readers[key](f"{type_name}.{key}", value) for key, value in content.items()})
    return message


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not a JSON number")


def _listed(names: list[str]) -> str:
    return reprlib.repr(names) if names else "nothing"


_REFUSALS: dict[str, type[LeaseRefused]] = {
    "refused": LeaseRefused,
    "invalid": InvalidLease,
    "minimums": MinimumsExceedCapacity,
    "unknown": UnknownEngine,
    "not_permitted": NotPermitted,
    "not_free": MemoryNotFree,
}
_CODES = {kind: code for code, kind in _REFUSALS.items()}


def refusal(error: LeaseRefused) -> RefusedMessage:
    """Convert an error to an answer."""
    return RefusedMessage(_CODES.get(type(error), "refused"), str(error)[:MAX_SENTENCE])


def error_of(refused: RefusedMessage) -> LeaseRefused:
    """Convert an answer to an error to raise."""
    return _REFUSALS.get(refused.code, LeaseRefused)(refused.message)


def message_reader() -> FrameReader:
    """A reader of messages from bytes in pieces of any size. Raises ProtocolViolation; then stop reading."""
    return FrameReader(lambda payload: from_payload(bytes(payload)), MAX_PAYLOAD_BYTES, ProtocolViolation)


def milliseconds(seconds: float, most_s: int = 24 * 3600) -> int:
    """A duration for the protocol, rounded up, from 1 ms to `most_s`. Raises ValueError unless it is positive and finite."""
    if not seconds > 0 or not math.isfinite(seconds):
        raise ValueError(f"a duration must be more than 0 seconds, got {seconds:g}")
    return min(most_s * 1000, max(1, math.ceil(seconds * 1000)))
