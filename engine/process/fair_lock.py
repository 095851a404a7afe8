"""A first-come, first-served lock.

`threading.Lock` goes to the fastest thread, which is the one that has just released it. A thread that runs one step after
another would starve the rest as long as it has work.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from types import FrameType, TracebackType

from .fork import MakerProcess


class FairLock:
    """As `threading.Lock`, but first come, first served. Not reentrant; only the owning thread can release it.

    An interrupt may keep a thread from releasing the lock. That thread can acquire it again once the call that held it has
    ended. In a forked child `acquire` raises: the owner may not exist there.
    """

    def __init__(self) -> None:
        self._maker = MakerProcess()
        self._mutex = threading.Lock()  # of the fields below; held briefly
        self.barred: int | None = None  # the owning thread while acquiring again would deadlock; `acquire` raises then
        self._owner: int | None = None  # the owning thread
        self._holder: FrameType | None = None  # the call that holds the lock; None while it is handed over
        # Turns in the queue, each locked until its turn comes, with their threads.
        self._waiting: deque[tuple[threading.Lock, int]] = deque()

    def acquire(self, blocking: bool = True) -> bool:
        """Acquire the lock, after all threads that already wait. Returns whether it was acquired.

        Without `blocking` it never waits, and may interrupt any other call, as the garbage collector does. Raises RuntimeError
        when blocking within a call of the same thread that holds the lock, EngineClosed in a forked child.
        """
        return self._acquire(sys._getframe(1), blocking)

    def release(self) -> None:
        """Hand the lock to the next thread in the queue. Does nothing in a thread that does not own it."""
        with self._mutex:
            self._hand_over()

    def __enter__(self) -> None:
        self._acquire(sys._getframe(1), True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
            entry = next((one for one in self._waiting if one[1] == me), None)
            if entry is None:
                entry = threading.Lock(), me
                entry[0].acquire()
                self._waiting.append(entry)
            # Otherwise an interrupt left it there, and a second one behind it would never get its turn.
            turn = entry[0]
        try:
            turn.acquire()
        except BaseException:  # an interrupt: pass this turn on
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
        """Hand the lock to the next thread in the queue, if the calling thread owns it.

        A turn stays in the queue until its thread has noticed it, so that an interrupt in between does not lose it.
        """
        me = threading.get_ident()
        if self._owner != me:
            return
        self._holder = None
        while self._waiting and self._waiting[0][1] == me:  # stale, after an interrupt
            self._waiting.popleft()
        if not self._waiting:
            self._owner = None
            return
        turn, owner = self._waiting[0]
        self._owner = owner
        turn.release()


def _runs(holder: FrameType | None, frame: FrameType | None) -> bool:
    """Whether the call `holder` is `frame` or one of its callers."""
    while holder is not None and frame is not None:
        if frame is holder:
            return True
        frame = frame.f_back
    return False
