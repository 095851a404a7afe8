"""Throttles for log messages about recurring changes and events, with counts."""

from __future__ import annotations

QUIET_NS = 10_000_000_000  # between two lines about the same subject
QUIET_CAUSE_NS = 60_000_000_000  # between two lines about the same cause
MAX_CAUSES = 100


class LogThrottle:
    """Logs each change of a state, but a flapping one at most every ten seconds.

    Follows one subject, which starts in the state None. Mutable; used by one thread at a time.
    """

    __slots__ = ("_changes", "_quiet_until_ns", "state")

    def __init__(self) -> None:
        self.state: str | None = None
        self._changes = 0  # not logged yet
        self._quiet_until_ns: int | None = None

    def record(self, state: str | None, now_ns: int) -> int:
        """Record the current state. Returns the number of changes to log now; 0: log nothing."""
        if state != self.state:
            self.state = state
            self._changes += 1
        if not self._changes or (self._quiet_until_ns is not None and now_ns < self._quiet_until_ns):
            return 0
        changes, self._changes = self._changes, 0
        self._quiet_until_ns = now_ns + QUIET_NS
        return changes


class Occurrences:
    """Logs a recurring event at once, and then at most once a minute for each cause.

    Mutable; used by one thread at a time. Remembers the MAX_CAUSES causes logged last.
    """

    __slots__ = ("_causes",)

    def __init__(self) -> None:
        self._causes: dict[str, tuple[int, int]] = {}  # (when it was last logged, occurrences since)

    def record(self, cause: str, now_ns: int) -> int:
        """Record an occurrence. Returns the occurrences since the last log line, including this one; 0: log nothing."""
        told_ns, times = self._causes.get(cause, (now_ns - QUIET_CAUSE_NS, 0))
        if now_ns - told_ns < QUIET_CAUSE_NS:
            self._causes[cause] = (told_ns, times + 1)
            return 0
        self._causes.pop(cause, None)
        self._causes[cause] = (now_ns, 0)
        if len(self._causes) > MAX_CAUSES:
            del self._causes[next(iter(self._causes))]
        return times + 1
