"""A lease whose broker is the test."""

from __future__ import annotations

from collections.abc import Mapping

from pagetide.allocator.errors import GrantExceeded, LeaseRefused
from pagetide.allocator.lease_events import Denied, Event, Granted, Limited, Lost, Recalled, Rejoined, Withdrawn


class ScriptedLease:
    """A `Lease` whose broker is the test: `grant`, `recall`, `limit` say what it says, `asked` and `answered` what it hears."""

    name, device_uuid = "scripted", "GPU-under-test"

    def __init__(self, granted_bytes: int, min_bytes: int, held_bytes: int) -> None:
        self.granted_bytes, self.min_bytes = granted_bytes, min_bytes
        self.max_bytes: int | None = None
        self.lower_bytes = self.held_bytes = held_bytes
        self.recall_now: Recalled | None = None
        self.connected = True
        self.asked: list[int] = []
        self.keeps: list[int] = []
        self.kept_bytes = self.num_waiting = 0
        self.reused = True
        self.answered: list[int] = []
        self.reports: list[tuple[dict[str, int], int]] = []
        self.waited: list[float] = []
        self._events: list[Event] = []

    def grant(self, granted_bytes: int) -> None:
        self.granted_bytes = granted_bytes
        self._events.append(Granted(granted_bytes))

    def recall_to(self, target_bytes: int, *, spares_requests: bool = False) -> None:
        self.recall_now = Recalled(target_bytes, 1.0, spares_requests)
        self._events.append(self.recall_now)

    def limit(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._events.append(Limited(max_bytes))

    def lose(self) -> None:
        self.connected, self.recall_now, self.granted_bytes = False, None, self.held_bytes
        self._events.append(Lost("it was killed"))

    def rejoin(self) -> None:
        self.connected = True
        self._events.append(Rejoined(self.granted_bytes))

    def deny(self) -> None:
        self._events.append(Denied(LeaseRefused("an answer crossed a grant")))

    @property
    def recall(self) -> Recalled | None:
        return self.recall_now

    def poll(self) -> tuple[Event, ...]:
        events, self._events = tuple(self._events), []
        return events

    def wait(self, timeout_s: float) -> tuple[Event, ...]:
        self.waited.append(timeout_s)
        return self.poll()

    def shift(self, lower_bytes: int, upper_bytes: int) -> None:
        if upper_bytes > 0 and self.held_bytes + upper_bytes > self.granted_bytes:
            raise GrantExceeded(self.held_bytes + upper_bytes, self.granted_bytes)
        self.lower_bytes += lower_bytes
        self.held_bytes += upper_bytes

    def report(
        self,
        held: Mapping[str, int],
        free_bytes: int,
        kept_bytes: int = 0,
        *,
        moving_bytes: int = 0,
        num_waiting: int = 0,
        reused: bool = True,
    ) -> None:
        self.held_bytes = sum(held.values())
        self.lower_bytes = self.held_bytes - moving_bytes
        self.reports.append((dict(held), free_bytes + kept_bytes))
        self.kept_bytes, self.num_waiting, self.reused = kept_bytes, num_waiting, reused

    def ask(self, target_bytes: int, *, expires_s: float, waiting_s: float = 0.0, keep_bytes: int = 0) -> None:
        assert expires_s > 0 and waiting_s >= 0
        self.asked.append(target_bytes)
        self.keeps.append(keep_bytes)

    def lower_min(self, min_bytes: int) -> None:
        assert min_bytes <= self.min_bytes, "it cannot be raised"
        self.min_bytes = min_bytes

    def withdraw(self) -> None:
        self.recall_now = None
        self._events.append(Withdrawn())

    def answer_unmapped(self, keep_bytes: int) -> None:
        assert keep_bytes >= self.held_bytes, "more is held"
        self.granted_bytes = min(self.granted_bytes, max(keep_bytes, self.min_bytes))
        if (now := self.recall_now) is not None and (now.spares_requests or self.granted_bytes <= now.target_bytes):
            self.recall_now = None
        self.answered.append(keep_bytes)
