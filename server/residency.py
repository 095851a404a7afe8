"""Which loaded models leave the memory for another one: decisions without a state, at times that are given.

See docs/decisions/0074-models-on-demand.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..common.units import format_bytes

LEAST_RESIDENT_S = 1.0
RESIDENT_EXCHANGES = 4  # a model stays for as many times of its loading at least
FIRST_TOKEN_S = 5.0  # in which a request should have its first token
LEAST_IDLE_S = 1e-3


@dataclass(frozen=True, slots=True)
class Residency:
    """When a model is loaded, and how long it stays.

    Attributes:
        keep_alive_s: Seconds without requests after which it is unloaded; below 0: never.
        pinned: It leaves for no other model, and not for want of requests.
        preload: It is loaded at the start, and again whenever its engine ends by itself.
    """

    keep_alive_s: float = -1.0
    pinned: bool = True
    preload: bool = True


@dataclass(frozen=True, slots=True)
class RouterRules:
    """What holds for all models.

    Attributes:
        load_timeout_s: A request waits so long for its model.
        most_bytes: That the weights of loaded models may take together; None: as many as can be loaded.
        min_resident_s: A loaded model stays so long; None: the larger of 1 s and four times its last loading.
        patience_s: A request waits so long for other models to fall idle, before a busy one makes way for its model.
        return_s: So long do the requests of a busy model that made way, unless others wait for it, too, and those of a model
            that comes too slowly for them to be in time.
    """

    load_timeout_s: float = 300.0
    most_bytes: int | None = None
    min_resident_s: float | None = None
    patience_s: float = FIRST_TOKEN_S / 2
    return_s: float = 6 * FIRST_TOKEN_S

    def resident_s(self, exchange_s: float) -> float:
        """How long a model stays at least that took so long to load."""
        return max(LEAST_RESIDENT_S, RESIDENT_EXCHANGES * exchange_s) if self.min_resident_s is None else self.min_resident_s

    def waits_s(self, exchange_s: float) -> float:
        """How long a request waits before a busy model makes way for its model, which took so long to load."""
        return self.patience_s if exchange_s <= self.patience_s else max(self.patience_s, self.return_s)


@dataclass(frozen=True, slots=True)
class Taker:
    """What waits for memory that models hold.

    Attributes:
        name: Of a reservation, or of an engine.
        num_requests: That wait for KV of the engine; None: it is a reservation.
    """

    name: str
    num_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that holds memory.

    Attributes:
        last_used: When its last request ended, in seconds of any clock.
        stays_until: The end of its minimum residency.
        num_requests: That it serves, or that wait for it.
        exchange_s: How long its last loading or waking took.
        is_kept: Its keep_alive has no end.
    """

    name: str
    num_bytes: int
    last_used: float
    stays_until: float
    num_requests: int = 0
    pinned: bool = False
    exchange_s: float = 0.0
    is_kept: bool = False

    def value(self, now: float) -> float:
        """What idle weights are worth: the seconds of waiting that they save each second, if requests come as far apart as the
        last one is away.
        """
        return self.exchange_s / max(now - self.last_used, LEAST_IDLE_S)

    def yields_to(self, taker: Taker, now: float) -> bool:
        """Whether idle weights are worth less than the memory is to `taker`: each of its requests loses a second each second.

        Reservations go first. A model that is to stay for good leaves for no KV.
        """
        if taker.num_requests is None:
            return True
        return not self.is_kept and self.value(now) < taker.num_requests

    def may_leave(self, now: float, busy: bool = False) -> bool:
        """Whether another model may take its place; `busy`: also while it has requests, which wait meanwhile."""
        return not self.pinned and (busy or not self.num_requests) and now >= self.stays_until


@dataclass(frozen=True, slots=True)
class Departure:
    """A model has left the memory for another one, or for a reservation.

    Attributes:
        victim: The model.
        at: In seconds since 1970.
        taker: What needed the memory; None: all took more than they may.
        value: As of `Resident.value`; None: it had requests.
        idle_s: Seconds without requests, by which it was chosen: no other one that might leave had more.
        num_bytes: Of its weights.
        resident_s: How long it was there.
        num_suspended: Requests that go on when it returns; with some, it was chosen as it was there longest.
    """

    victim: str
    at: float
    taker: str | None
    value: float | None
    idle_s: float
    num_bytes: int
    resident_s: float
    num_suspended: int = 0

    def __str__(self) -> str:
        taker = "as all take more than they may" if self.taker is None else f"for {self.taker}"
        why = f"its requests, {self.num_suspended}, go on when it returns"
        if self.value is not None:
            why = f"it had no request for {self.idle_s:.1f} s and saved {self.value:.2g} s of waiting a second"
        return f"{taker} after {self.resident_s:.1f} s: {why}, and gives {format_bytes(self.num_bytes)}"


def victims(residents: Iterable[Resident], excess_bytes: int, now: float, busy: bool = False) -> list[str] | None:
    """The models that leave, so that the others hold `excess_bytes` less: the least recently used first, and none without
    need. None: what may leave now does not suffice.

    With `busy`, models with requests follow, the one that was there longest first: they take turns.
    """
    chosen: list[Resident] = []
    leaving = [one for one in residents if one.may_leave(now, busy)]
    for one in sorted(leaving, key=lambda one: (one.num_requests > 0, one.stays_until if one.num_requests else one.last_used)):
        if excess_bytes <= 0:
            break
        chosen.append(one)
        excess_bytes -= one.num_bytes
    if excess_bytes > 0:
        return None
    for one in reversed(chosen[:-1]):
        if one.num_bytes <= -excess_bytes:
            chosen.remove(one)
            excess_bytes += one.num_bytes
    return [one.name for one in chosen]
