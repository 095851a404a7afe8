"""Signs that work goes on: the thread that works beats, and another thread or process judges by the beats whether it hangs.

A thread that hangs may leave all others of its process alive, so that a beat from one of these says nothing. The worker
beats at each part of its work, and announces parts that take longer: a bound of seconds alone would be too short for a long
prefill on a slow machine, or too long for everything else.
"""

from __future__ import annotations

# At work without a beat. Parts of a step take milliseconds, and seconds where a machine is overloaded or swaps.
STILL_S = 20.0
# The same where kernels are compiled within a step, at the first use of a shape: some seconds each, on a fast machine.
COMPILING_S = 120.0
# A process without any sign while it loads: importing libraries from a cold disk holds up all its threads.
LOADING_S = 120.0


class Progress:
    """What a worker says of its work. The worker changes it, any thread may read it.

    Attributes:
        beats: Grows as long as the work goes on.
        allowed_s: How long it may take to the next beat; 0 while there is nothing to do.
    """

    __slots__ = ("allowed_s", "base_s", "beats")

    def __init__(self, base_s: float = STILL_S) -> None:
        self.base_s = base_s
        self.beats = 0
        self.allowed_s = 0.0

    def begin(self, more_s: float = 0.0) -> None:
        """Beat at the beginning of work of which a part may take `more_s` longer than the base."""
        self.allowed_s = self.base_s + more_s
        self.beats += 1

    def beat(self) -> None:
        """Beat between two parts of the work."""
        self.beats += 1

    def rest(self) -> None:
        """There is nothing to do."""
        self.allowed_s = 0.0


class SilenceWatch:
    """How long what a worker says has stayed the same, in looks of the watcher.

    Args:
        most_look_s: The most that one look counts. A watcher that is held up itself, as on a machine that is overloaded or was
            suspended, does not take that time for a hang of the worker.
    """

    def __init__(self, most_look_s: float) -> None:
        self._most_look_s = most_look_s
        self._said: object = None
        self._looked_at = 0.0
        self._silent_s = 0.0

    def look(self, said: object, now: float) -> float:
        """Seconds since `said` has changed."""
        if said != self._said:
            self._said, self._silent_s = said, 0.0
        else:
            self._silent_s += min(now - self._looked_at, self._most_look_s)
        self._looked_at = now
        return self._silent_s
