"""A lock whose holders come in the order in which they asked.

`threading.Lock` goes to whoever is quickest, which is the thread that has just released it: one that makes a step after
another would keep the rest out for as long as it has work.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from types import FrameType, TracebackType

from .fork import MakerProcess


class FairLock:
    """As `threading.Lock`, first come first served. Not reentrant, and released by the thread that has it alone.

    An interrupt may keep a thread from releasing it. When that thread asks again, and what had taken it runs no more, it goes
    on with it. In a forked child nobody gets it: whoever had it there is no more.
    """

    def __init__(self) -> None:
        self._maker = MakerProcess()
        self._mutex = threading.Lock()  # of the fields below; held for moments
        self.barred: int | None = None  # a thread that has it, and would wait for itself if it asked again
        self._owner: int | None = None  # the thread that has it
        self._holder: FrameType | None = None  # the call that has it; None while it is handed over
        # Turns, each locked until it comes, and their threads.
        self._waiting: deque[tuple[threading.Lock, int]] = deque()

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock, after all who wait already. Without `blocking` only if that is now; returns whether it was. Raises
        RuntimeError in the middle of a call of the same thread that has it, EngineClosed in a forked child.

        The latter may be called in the middle of any other call, as a collector does.
        """
        return self._acquire(sys._getframe(1), blocking)

    def release(self) -> None:
        """Hand the lock to the next in line. Nothing in a thread that does not have it."""
        with self._mutex:
            self._hand_over()

    def __enter__(self) -> None:
        self._acquire(sys._getframe(1), True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _acquire(self, holder: FrameType, blocking: bool) -> bool:
        self._maker.check()
        me = threading.get_ident()
        if not blocking:
            taken = False
            try:
                taken = self._mutex.acquire(False)
                if not taken or self._owner is not None:
                    return False
                self._owner, self._holder = me, holder
                return True
            finally:
                if taken:
                    self._mutex.release()
        with self._mutex:
            if self._owner is None or self._owner == me:
                if self._owner == me and (self.barred == me or _runs(self._holder, holder)):
                    raise RuntimeError(
                        "the engine was called from the middle of one of its own calls, such as by a logits processor in a "
                        "step, by a signal's handler, or inside locked_engine(): it would wait for itself"
                    )
                self._owner, self._holder = me, holder
                return True
            turn = threading.Lock()
            turn.acquire()
            entry = turn, me
            self._waiting.append(entry)
        try:
            turn.acquire()
        except BaseException:  # an interrupt: nobody may wait for this turn to end
            with self._mutex:
                self._leave_line(entry)
                self._hand_over()
            raise
        with self._mutex:
            self._leave_line(entry)
            self._holder = holder
        return True

    def _leave_line(self, entry: tuple[threading.Lock, int]) -> None:
        if entry in self._waiting:
            self._waiting.remove(entry)

    def _hand_over(self) -> None:
        """To the next in line, if this thread has it. A turn stays in line until its thread has seen that it came: an interrupt
        between the two loses nobody.
        """
        me = threading.get_ident()
        if self._owner != me:
            return
        self._holder = None
        while self._waiting and self._waiting[0][1] == me:  # left there by an interrupt
            self._waiting.popleft()
        if not self._waiting:
            self._owner = None
            return
        turn, owner = self._waiting[0]
        self._owner = owner
        turn.release()


def _runs(holder: FrameType | None, frame: FrameType | None) -> bool:
    """Whether the call `holder` is one of those that `frame` was called from."""
    while holder is not None and frame is not None:
        if frame is holder:
            return True
        frame = frame.f_back
    return False
