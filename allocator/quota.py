"""Bounds on what one user may have of the broker, so that no user of a shared machine locks out the others. Pure.

    places      leases and reservations at a time: each costs the broker three descriptors and part of every decision
    promises    of each device: minimums of leases, and reservations; no other lease can be given these bytes
    waits       of reservations: the first one that waits holds up all others

Users are identified by the uid that the kernel reports for the other end of a socket. Memory held above the minimums
needs no bound: the lease policy shares it out and recalls it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..common.units import format_bytes
from .errors import LeaseRefused

LONGEST_WAIT_MS = 3600 * 1000  # of a reservation


@dataclass(frozen=True, slots=True)
class Promise:
    """Bytes of a device that a user wants guaranteed.

    Attributes:
        what: A noun phrase for messages: "a min for 'chat'", "a reservation".
        refusal: The error to raise. An engine that gets MinimumsExceedCapacity waits for loading engines, which will
            need less once loaded.
    """

    what: str
    num_bytes: int
    refusal: type[LeaseRefused]


@dataclass(frozen=True, slots=True)
class Quota:
    """The bounds for each user.

    Attributes:
        engines: Leases and reservations at a time. The limit is twice as high including ended ones with memory not back
            yet, so that a user can restart at once engines that were all killed.
        share: The part of a device's leasable memory that may be promised to one user; above 0, at most 1.
        exempt: Uids without bounds: root's and the broker's own, which could end the broker anyway.
    """

    engines: int
    share: float
    exempt: frozenset[int]

    def check_place(self, uid: int, user: str, living: int, ending: int) -> None:
        """Raise LeaseRefused if the user has too many leases and reservations for one more."""
        if uid in self.exempt:
            return
        remedy = "or have the monitor's owner raise the bound (vram-monitor serve --user-engines N)"
        if living >= self.engines:
            raise LeaseRefused(
                f"{user} has {living} engines and reservations at this broker, and one user may have {self.engines}: "
                f"end some, {remedy}"
            )
        if living + ending >= 2 * self.engines:
            raise LeaseRefused(
                f"{user} has {living} engines and reservations at this broker, and {ending} that have ended and whose memory "
                f"is not back; one user may have {2 * self.engines} of both: try again in a few seconds, {remedy}"
            )

    def check_priority(self, uid: int, user: str, priority: int) -> None:
        """Raise LeaseRefused if the user's reservation would go before those of all others."""
        if priority < 0 and uid not in self.exempt:
            raise LeaseRefused(
                f"a reservation of {user} has priority 0 or more, got {priority}; below 0 is for root and the owner"
            )

    def wait_ms(self, uid: int, wait_ms: int) -> int:
        """The longest that a reservation of the user waits, which wants to wait for `wait_ms`."""
        return wait_ms if uid in self.exempt else min(wait_ms, LONGEST_WAIT_MS)

    def check_promise(self, uid: int, user: str, asked: Promise, promised_bytes: int, leasable_bytes: int) -> None:
        """Raise the promise's refusal if the user would be promised too much of a device.

        `leasable_bytes` is the device's capacity without the headroom.
        """
        most_bytes = int(self.share * leasable_bytes)
        total_bytes = promised_bytes + asked.num_bytes
        if uid in self.exempt or not asked.num_bytes or total_bytes <= most_bytes:
            return
        left_bytes = max(0, most_bytes - promised_bytes)
        raise asked.refusal(
            f"{asked.what} of {format_bytes(asked.num_bytes)} makes {format_bytes(total_bytes)} with what {user} is promised "
            f"of this device already ({format_bytes(promised_bytes)}); one user may be promised {format_bytes(most_bytes)}, "
            f"{self.share:.0%} of the {format_bytes(leasable_bytes)} that can be leased. Ask for {format_bytes(left_bytes)} "
            f"or less, end an engine of {user}, or have the monitor's owner raise the bound "
            "(vram-monitor serve --user-share SHARE)"
        )
