"""The physical extents of a CUDA arena while they are mapped nowhere: created ahead of need, released behind it.

    cuMemCreate ──► ready ── take ──► behind an address (the arena's)
                     ▲  │                       │
                     │  └──► cuMemRelease       │
                     └───────── give ───────────┘

One rule: `wanted` handles shall be ready. A thread creates what is missing, releases what is too many, and ends when
nothing is left to do. Creating and releasing may go on beside running kernels; only mapping needs a fence.
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
    """Handles of `extent_bytes` each on one device, of which the pool keeps at most `limit` ready.

    Calls are made inside `first()` and, where they call the driver, with the device's context current, unless said
    otherwise.
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
        """The pool alone, before the thread's next step. With one lock it would be the thread's again and again."""
        with self._turn, self._lock:
            yield

    @property
    def num_ready(self) -> int:
        """Handles that `take` gives without creating any. From anywhere."""
        return len(self._ready)

    @property
    def is_emptying(self) -> bool:
        """Whether the thread is releasing all that is ready. From anywhere."""
        return self._working and not self._wanted

    @property
    def num_held(self) -> tuple[int, int]:
        """At least and at most so many handles exist, wherever they are, at every instant until the next call.

        What the thread is to create counts from before it does, and what it is to release until after it did. Both are
        exact when nothing is left to do. From anywhere.
        """
        ready = len(self._ready)  # first: where a creation fails the thread lowers what is wanted, to no less than this
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
        """Take back a handle that is mapped nowhere any more; it is ready until `shed` or `start` has it released."""
        self._ready.append(handle)
        self._taken -= 1

    def shed(self) -> None:
        """Release what is ready beyond the limit, here and now. A failure is kept for `drain_failures`."""
        with self._noting_failures():
            while len(self._ready) > self._limit:
                self._release(self._ready[-1])

    def release_all(self) -> None:
        """Release all that is ready. Nothing is wanted any more.

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
        """`count` handles, or `limit` if that is less, shall be ready from now on; `start` sees to it."""
        self._wanted = min(count, self._limit)

    def start(self, owner: object) -> None:
        """Have a thread bring what is ready to what is wanted; it keeps `owner` until it ends.

        Where no thread is to be had the work is done when this returns.
        """
        if self._working or len(self._ready) == self._wanted:
            return
        thread = threading.Thread(target=self._work, args=(owner,), name="pagetide-extents")
        self._working = True
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # there are too many, or the interpreter is ending
            self._working = False
            with self._noting_failures(), self._device.current():
                while self._advance():
                    pass
            self._wish_for_no_more()

    def join(self) -> None:
        """Nothing is wanted any more; wait until the thread has ended. Not inside `first()`."""
        with self.first():
            self._wanted = 0
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def note(self, failure: DriverError) -> None:
        """Keep a failure for `drain_failures`, without the frames it came through: they hold the arena's `owner`."""
        failure.__context__ = None
        self._failures.append(failure.with_traceback(None))

    def drain_failures(self) -> list[DriverError]:
        """What failed where no caller waited, oldest first, each told once; the latest 64 are kept. From anywhere."""
        return [self._failures.popleft() for _ in range(len(self._failures))]

    def _work(self, owner: object) -> None:
        """The thread: step until nothing is left to do. `owner` stays alive with this call's frame."""
        try:
            with self._device.current():
                while True:
                    with self._turn:
                        pass  # a caller who waits goes first
                    with self._lock:
                        if not self._advance():
                            self._working = False
                            return
        except BaseException as error:  # no context to be had
            with self._lock:
                self._working = False
                self._wish_for_no_more()
            if not isinstance(error, DriverError):
                raise
            self.note(error)

    def _advance(self) -> bool:
        """Create or release one handle. False when nothing is left to do, or it failed: trying on would be no use."""
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
        """Nobody is going to create what is missing: it does not count any more."""
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
