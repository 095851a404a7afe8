"""Threads for the work of several owners, such as the keys of a server, in turns."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

from ..errors import Attempt

Work = Callable[[], Any]

# Whose work the running task submits; "" is nobody's in particular.
OWNER: ContextVar[str] = ContextVar("pagetide_owner", default="")


class FairThreads:
    """Runs up to `each` pieces of work of an owner at a time, first come, first served, and owners in turns.

    An owner's next piece goes to the end of the line. So what an owner submits waits for few pieces of each other owner at
    most, and for none while a thread is free.
    """

    def __init__(self, num_threads: int, each: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, name)
        self._each = each
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[tuple[Work, Future[Any]]]] = {}  # of owners with work that runs or is in line
        self._in_line: Counter[str] = Counter()  # pieces given to the pool
        self._pending: dict[Future[Any], None] = {}
        self._is_closed = False

    def submit(self, work: Work, owner: str | None = None) -> Future[Any]:
        """Run `work` for `owner`, or for that of the running task. Raises RuntimeError after `shutdown`."""
        owner, future = OWNER.get() if owner is None else owner, Future[Any]()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the threads are shut down")
            self._pending[future] = None
            self._waiting.setdefault(owner, deque()).append((work, future))
            self._advance(owner)
        return future

    @property
    def pending(self) -> list[Future[Any]]:
        """The work that has not ended."""
        with self._changed:
            return list(self._pending)

    def shutdown(self) -> None:
        """Take no more work, and wait for the end of what was submitted. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._pending)
        self._pool.shutdown()

    def _advance(self, owner: str) -> None:
        """Give the pool the owner's next piece, if it has one and may run one more. Call it under the lock."""
        if self._waiting[owner] and self._in_line[owner] < self._each:
            self._in_line[owner] += 1
            self._pool.submit(self._run, owner, *self._waiting[owner].popleft())

    def _run(self, owner: str, work: Work, future: Future[Any]) -> None:
        result, runs = None, future.set_running_or_notify_cancel()
        with Attempt() as attempt:
            result = work() if runs else None
        with self._changed:
            del self._pending[future]
            self._in_line[owner] -= 1
            self._advance(owner)
            if not self._in_line[owner]:
                del self._in_line[owner], self._waiting[owner]
            self._changed.notify_all()
        if attempt.error is not None:
            future.set_exception(attempt.error)
        elif runs:
            future.set_result(result)
