"""What to log of something that changes: each change once, but one that flaps at most every ten seconds, with a count."""

from __future__ import annotations

QUIET_NS = 10_000_000_000  # between two lines about the same thing


class News:
    """Follows one thing, which begins in the state None. Mutable; used by one thread at a time; asks no clock."""

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
