"""What to log of something that changes or happens again and again: not each time, but with a count."""

from __future__ import annotations

QUIET_NS = 10_000_000_000  # between two lines about the same thing
QUIET_CAUSE_NS = 60_000_000_000  # between two lines about the same cause
MAX_CAUSES = 100


class LogThrottle:
    """Each change of one thing is told once, but one that flaps at most every ten seconds.

    Follows one thing, which begins in the state None. Mutable; used by one thread at a time; asks no clock."""

    __slots__ = ("_changes", "_quiet_until_ns", "state")

    def __init__(self) -> None:
        self.state: str | None = None
        self._changes = 0  # not told yet
        self._quiet_until_ns: int | None = None

    def take(self, state: str | None, now_ns: int) -> int:
        """Take in how it is now. Returns how many changes are to be told of now; 0: there is nothing to say."""
        if state != self.state:
            self.state = state
            self._changes += 1
        if not self._changes or (self._quiet_until_ns is not None and now_ns < self._quiet_until_ns):
            return 0
        changes, self._changes = self._changes, 0
        self._quiet_until_ns = now_ns + QUIET_NS
        return changes


class Occurrences:
    """What happens again and again is told at once, and then at most once a minute for each cause.

    Mutable; used by one thread at a time; asks no clock. Remembers MAX_CAUSES causes, those that were told last.
    """

    __slots__ = ("_causes",)

    def __init__(self) -> None:
        self._causes: dict[str, tuple[int, int]] = {}  # (when it was told last, how often it happened since)

    def take(self, cause: str, now_ns: int) -> int:
        """Take in that it happened. Returns how often it did since it was told last, this time included; 0: say nothing."""
        told_ns, times = self._causes.get(cause, (now_ns - QUIET_CAUSE_NS, 0))
        if now_ns - told_ns < QUIET_CAUSE_NS:
            self._causes[cause] = (told_ns, times + 1)
            return 0
        self._causes.pop(cause, None)
        self._causes[cause] = (now_ns, 0)
        if len(self._causes) > MAX_CAUSES:
            del self._causes[next(iter(self._causes))]
        return times + 1
