"""Which loaded models leave the memory for another one: decisions without a state, at times that are given.

See docs/decisions/0074-models-on-demand.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..common.units import format_bytes

LEAST_RESIDENT_S = 1.0
RESIDENT_EXCHANGES = 4  # a model stays for as many times of its loading at least


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
    """

    load_timeout_s: float = 300.0
    most_bytes: int | None = None
    min_resident_s: float | None = None

    def resident_s(self, exchange_s: float) -> float:
        """How long a model stays at least that took so long to load."""
        return max(LEAST_RESIDENT_S, RESIDENT_EXCHANGES * exchange_s) if self.min_resident_s is None else self.min_resident_s


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that holds memory.

    Attributes:
        last_used: When its last request ended, in seconds of any clock.
        stays_until: The end of its minimum residency.
        num_requests: That it serves, or that wait for it.
    """

    name: str
    num_bytes: int
    last_used: float
    stays_until: float
    num_requests: int = 0
    pinned: bool = False

    def may_leave(self, now: float) -> bool:
        """Whether another model may take its place."""
        return not self.pinned and not self.num_requests and now >= self.stays_until


@dataclass(frozen=True, slots=True)
class Departure:
    """A model has left the memory for another one, or for a reservation.

    Attributes:
        at: In seconds since 1970.
        taker: What needed the memory; None: all took more than they may.
        idle_s: Seconds without requests, by which it was chosen: no other one that might leave had more.
        num_bytes: Of its weights.
    """

    at: float
    taker: str | None
    idle_s: float
    num_bytes: int

    def __str__(self) -> str:
        taker = "as all take more than they may" if self.taker is None else f"for {self.taker}"
        return f"{taker}: it had no request for {self.idle_s:.1f} s, and gives {format_bytes(self.num_bytes)}"


def victims(residents: Iterable[Resident], excess_bytes: int, now: float) -> list[str] | None:
    """The models that leave, so that the others hold `excess_bytes` less: the least recently used first, and none without
    need. None: what may leave now does not suffice.
    """
    chosen: list[Resident] = []
    for one in sorted((one for one in residents if one.may_leave(now)), key=lambda one: one.last_used):
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
