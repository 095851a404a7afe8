"""A lock whose holders come in the order in which they asked.

`threading.Lock` goes to whoever is quickest, which is the thread that has just released it: one that makes a step after
another would keep the rest out for as long as it has work.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """As `threading.Lock`, first come first served. Not reentrant.

    A thread that has it asks again only where an interrupt has kept it from releasing it: it goes on with it then.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()  # of the fields below; held for moments
        self.barred: int | None = None  # a thread that has it, and would wait for itself if it asked again
        self._owner: int | None = None  # the thread that has it
        self._waiting: deque[tuple[threading.Lock, int]] = deque()  # each locked, until it is its thread's turn

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock, after all who wait already. Without `blocking` only if that is now; returns whether it was. Raises
        RuntimeError in a thread that is `barred`.

        The latter may be called in the middle of any other call, as a collector does.
        """
        if not self._mutex.acquire(blocking):
            return False
        try:
            if self._owner is None:
                self._owner = threading.get_ident()
                return True
            if not blocking:
                return False
            if self.barred == threading.get_ident():
                raise RuntimeError(
                    "the engine was called from the middle of one of its own steps, such as by a logits processor: it would "
                    "wait for itself"
                )
            if self._owner == threading.get_ident():
                return True
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append((turn, threading.get_ident()))
        finally:
            self._mutex.release()
        try:
            return turn.acquire()
        except BaseException:  # an interrupt: nobody may wait for this turn to end
            self._give_up(turn)
            raise

    def release(self) -> None:
        """Hand the lock to the next in line."""
        with self._mutex:
            if self._waiting:
                turn, self._owner = self._waiting.popleft()
                turn.release()
            else:
                self._owner = None

    def _give_up(self, turn: threading.Lock) -> None:
        with self._mutex:
            entry = turn, threading.get_ident()
            waits = entry in self._waiting
            if waits:
                self._waiting.remove(entry)
        if not waits:
            self.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
