"""Background threads that survive exceptions."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import Attempt, format_error

log = logging.getLogger(__name__)


class BackgroundThread(threading.Thread):
    """A daemon thread that calls `turn` until it returns False.

    An exception in a turn is logged and counted. The next turn begins `pause_s` seconds later.
    """

    def __init__(self, name: str, turn: Callable[[], bool], pause_s: float) -> None:
        super().__init__(name=name, daemon=True)
        self.num_faults = 0
        self.last_fault: str | None = None
        self._turn = turn
        self._pause_s = pause_s

    def run(self) -> None:
        """See `threading.Thread`."""
        goes_on = True
        while goes_on:
            with Attempt() as attempt:
                goes_on = self._turn()
            if attempt.error is not None:  # SystemExit too: it ends a thread silently
                self.num_faults += 1
                self.last_fault = format_error(attempt.error)
                log.error("the thread %s failed; it continues in %g s", self.name, self._pause_s, exc_info=attempt.error)
                attempt.error = None  # it keeps its frames alive
                time.sleep(self._pause_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `LLM.stats`."""
        return {"alive": self.is_alive(), "faults": self.num_faults, "last_fault": self.last_fault}
