"""Threads of a step on the CPU: fewer while other processes need the cores.

OpenMP's threads wait for each other at the end of every product, and spin meanwhile. Where one of them shares its core with
another process the others spin through its time slices: one busy process on two cores made steps four times as slow, and two
engines beside each other as slow together as one should be alone. So a step uses as many threads as there are idle cores:
all that torch would use, or a half, a quarter or an eighth of them, as oneDNN keeps primitives for each number of threads.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import psutil
import torch

log = logging.getLogger(__name__)

_LOOK_S = 0.25  # how often the cores are looked at
_STALE_S = 2.0  # no step for so long: what was measured is of another time
_FIRST_LOOK_S = 0.1  # how soon the cores are looked at then
_LOOKS = 4  # of which the busiest counts
_BUSY_CORES = 0.3  # of others, which a step leaves out of account
_NAMES = ("user", "system", "irq", "softirq")  # of times that count: what a hypervisor takes is no neighbour's
_DIVISORS = (1, 2, 4, 8)  # of torch's number of threads

_lock = threading.Lock()
_num_reduced = 0  # steps of this process that use fewer threads than torch's own number, at this moment
_full = 0  # torch's own number meanwhile


def own_threads() -> int:
    """Torch's own number of threads, whatever a step of another engine of this process uses at this moment.

    `torch.set_num_threads` is of its thread, but threads that use torch for the first time take over the last number that any
    thread has set.
    """
    with _lock:
        return _full if _num_reduced else torch.get_num_threads()


def use_own_threads(count: int) -> None:
    """Have torch use `count` threads of the calling thread, a new one of an engine: see `own_threads`."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def thread_counts(most: int) -> tuple[int, ...]:
    """The numbers of threads that steps use where torch's own is `most`: each at most once, the largest first."""
    if _fixed():
        return (most,)
    return tuple(dict.fromkeys(max(1, most // divisor) for divisor in _DIVISORS))


def _fixed() -> bool:
    """Whether somebody has decided how many threads there are."""
    return "OMP_NUM_THREADS" in os.environ


class CpuThreads:
    """How many threads the steps of an engine use. Used by one thread at a time.

    OMP_NUM_THREADS in the environment fixes it. In any case torch's own number of threads is never exceeded, and is the same
    after a step as before.

    Args:
        clock: Seconds, monotonic.
        used: CPU seconds used so far, by everybody on the cores of this process, and by this process.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, used: Callable[[], tuple[float, float]] | None = None
    ) -> None:
        self._clock = clock
        self._used = used or _used
        self._adapts = not _fixed()
        self._left_at = self._looked_at = -_STALE_S  # when the last step ended; when the cores were looked at
        self._look_s = _FIRST_LOOK_S  # after which they are looked at again
        self._before = (0.0, 0.0)
        self._others: deque[float] = deque([0.0], _LOOKS)  # cores that other processes used
        self._num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @contextmanager
    def for_a_step(self) -> Iterator[None]:
        """Inside, torch uses as many threads of this one as there are cores to spare."""
        most = torch.get_num_threads()
        count = self.count(most) if self._adapts and most > 1 else most
        try:
            with nullcontext() if count == most else _reduced(count, most):
                yield
        finally:
            self._left_at = self._clock()

    def count(self, most: int) -> int:
        """Threads that are to be used now, of at most `most`."""
        self._look()
        spare = self._num_cores - max(self._others)
        counts = thread_counts(most)
        return next((count for count in counts if count <= spare + _BUSY_CORES), counts[-1])

    def _look(self) -> None:
        now = self._clock()
        idle = now - self._left_at > _STALE_S
        if not idle and now - self._looked_at < self._look_s:
            return
        try:
            before, self._before = self._before, self._used()
        except (OSError, RuntimeError, psutil.Error) as error:  # a sandbox without /proc, for one
            log.warning("steps use all threads: the CPU time of other processes cannot be read: %s", error)
            self._adapts = False
            self._others.extend([0.0] * _LOOKS)
            return
        elapsed, self._looked_at = now - self._looked_at, now
        if idle:
            self._others.clear()
            self._others.append(0.0)
            self._look_s = _FIRST_LOOK_S
            return
        (all_before, own_before), (all_now, own_now) = before, self._before
        self._others.append(((all_now - all_before) - (own_now - own_before)) / elapsed)
        self._look_s = _LOOK_S


@contextmanager
def _reduced(count: int, most: int) -> Iterator[None]:
    """Torch uses `count` threads of this one, and `most` again afterwards."""
    global _num_reduced, _full
    with _lock:
        _full = max(most, _full if _num_reduced else 0)
        _num_reduced += 1
    try:
        torch.set_num_threads(count)
        yield
    finally:
        with _lock:  # together: nobody is to read the smaller number when no step uses it
            torch.set_num_threads(most)
            _num_reduced -= 1


def _used() -> tuple[float, float]:
    cores = psutil.cpu_times(percpu=True)
    ours = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(cores))
    if max(ours) >= len(cores):  # not all are shown, or by other numbers, as in a container
        ours = range(len(cores))
    nice = os.getpriority(os.PRIO_PROCESS, 0) > 0  # such processes give way to others, not to each other
    names = (*_NAMES, "nice") if nice else _NAMES
    busy = sum(getattr(cores[core], name, 0.0) for core in ours for name in names)
    return busy, time.process_time()
