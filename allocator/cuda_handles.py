"""The pool of a CUDA arena's unmapped physical handles: created before they are needed, released afterwards.

    cuMemCreate ──► ready ── take ──► behind an address (the arena's)
                     ▲  │                       │
                     │  └──► cuMemRelease       │
                     └───────── give ───────────┘

The pool aims at `wanted` ready handles. A thread creates missing ones, releases surplus ones, and ends when there is
nothing to do. Creating and releasing may run beside kernels; only mapping needs a fence.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from .cuda_driver import CudaDevice
from .errors import DriverError

_KEPT_FAILURES = 64


class HandlePool:
    """Handles of `extent_bytes` each on one device; at most `limit` are kept ready.

    Unless stated otherwise, call methods inside `first()` and, if they call the driver, with the device's context
    current.
    """

    def __init__(self, device: CudaDevice, extent_bytes: int, limit: int) -> None:
        self._taken = 0
        self._device = device
        self._extent_bytes = extent_bytes
        self._limit = limit
        self._wanted = 0
        self._ready: list[int] = []
        self._failures: deque[DriverError] = deque(maxlen=_KEPT_FAILURES)
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._working = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def first(self) -> Iterator[None]:
        """Exclusive use of the pool before the thread's next step. With one lock the thread could win it again and again."""
        with self._turn, self._lock:
            yield

    @property
    def num_ready(self) -> int:
        """Handles that `take` returns without creating one. Callable anywhere."""
        return len(self._ready)

    @property
    def is_emptying(self) -> bool:
        """Whether the thread is releasing all ready handles. Callable anywhere."""
        return self._working and not self._wanted

    @property
    def num_held(self) -> tuple[int, int]:
        """The least and the most handles that exist, mapped or not, at any instant until the next call.

        A handle to be created counts before its creation, one to be released until after its release. Both numbers are
        exact when nothing is left to do. Callable anywhere.
        """
        # Read first: if a creation fails, the thread lowers `_wanted`, but not below this number.
        ready = len(self._ready)
        wanted = self._wanted
        return self._taken + min(ready, wanted), self._taken + max(ready, wanted)

    def take(self) -> int:
        """A handle to map: a ready one, else a new one. Raises DriverError."""
        self._taken += 1
        try:
            handle = self._ready.pop() if self._ready else self._create()
        except BaseException:
            self._taken -= 1
            raise
        self._wanted = max(0, self._wanted - 1)
        return handle

    def give(self, handle: int) -> None:
        """Return a handle that is no longer mapped; it is ready until `shed` or the thread of `start` releases it."""
        self._ready.append(handle)
        self._taken -= 1

    def shed(self) -> None:
        """Release ready handles beyond the limit, synchronously. A failure is kept for `drain_failures`."""
        with self._noting_failures():
            while len(self._ready) > self._limit:
                self._release(self._ready[-1])

    def release_all(self) -> None:
        """Release all ready handles, and set the wanted number to 0.

        Raises the first DriverError after all were tried. A handle that the driver kept is still ready.
        """
        self._wanted = 0
        errors = []
        for handle in tuple(self._ready):
            try:
                self._release(handle)
            except DriverError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def want(self, count: int) -> None:
        """Set the wanted number of ready handles to `count`, at most `limit`; `start` begins the work."""
        self._wanted = min(count, self._limit)

    def start(self, owner: object) -> None:
        """Start a thread that brings the ready handles to the wanted number; it keeps `owner` alive until it ends.

        If no thread can be started, the work is done when this returns.
        """
        if self._working or len(self._ready) == self._wanted:
            return
        thread = threading.Thread(target=self._work, args=(owner,), name="pagetide-extents")
        self._working = True
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # too many threads, or the interpreter is shutting down
            self._working = False
            with self._noting_failures(), self._device.current():
                while self._advance():
                    pass
            self._wish_for_no_more()

    def join(self) -> None:
        """Set the wanted number to 0 and wait until the thread has ended. Not inside `first()`."""
        with self.first():
            self._wanted = 0
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def note(self, failure: DriverError) -> None:
        """Keep a failure for `drain_failures`, without its traceback frames: they refer to the arena's `owner`."""
        failure.__context__ = None
        self._failures.append(failure.with_traceback(None))

    def drain_failures(self) -> list[DriverError]:
        """Failures that no call raised, oldest first, each returned once; the latest 64 are kept. Callable anywhere."""
        return [self._failures.popleft() for _ in range(len(self._failures))]

    def _work(self, owner: object) -> None:
        """The thread: advance until nothing is left to do. Its frame keeps `owner` alive."""
        try:
            with self._device.current():
                while True:
                    with self._turn:
                        pass  # lets a waiting caller go first
                    with self._lock:
                        if not self._advance():
                            self._working = False
                            return
        except BaseException as error:  # no context available
            with self._lock:
                self._working = False
                self._wish_for_no_more()
            if not isinstance(error, DriverError):
                raise
            self.note(error)

    def _advance(self) -> bool:
        """Create or release one handle. False if nothing is left to do or the call failed."""
        before = len(self._ready)
        with self._noting_failures():
            if before < self._wanted:
                self._ready.append(self._create())
            elif before > self._wanted:
                self._release(self._ready[-1])
        if len(self._ready) != before:
            return True
        self._wish_for_no_more()
        return False

    def _wish_for_no_more(self) -> None:
        """Lower the wanted number to the ready handles: the missing ones will not be created, so they must not count."""
        self._wanted = min(self._wanted, len(self._ready))

    def _create(self) -> int:
        return self._device.driver.call("cuMemCreate", self._extent_bytes, self._device.number, 0)[0]

    def _release(self, handle: int) -> None:
        self._device.driver.call("cuMemRelease", handle)
        self._ready.remove(handle)

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        try:
            yield
        except DriverError as error:
            self.note(error)
