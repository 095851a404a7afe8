"""The number of CPU threads of a step: fewer while other processes need the cores.

OpenMP threads spin at a barrier at the end of every matrix product. If one of them shares its core with another process, the
others spin through that process's time slices: one busy process on two cores made steps four times as slow. So a step
uses as many threads as there are idle cores: all that torch would use, or a half, a quarter or an eighth of them, as
oneDNN keeps primitives for each number of threads.

Native kernels have threads of their own, which hardly spin and take the next piece of work when they are free. They use any
number of them, one more than there are idle cores where that core is idle at times. Beside them torch's would only be in the
way: where nearly all weights are the kernels', torch's operators use one thread in a step.
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

from .fork import MakerProcess

log = logging.getLogger(__name__)

_LOOK_S = 0.25  # interval of measurements
# A longer time without a step is not measured: others may use the cores that the engine leaves idle
_PAUSE_S = 0.25
_STALE_S = 2.0  # after this time without a step, measurements are discarded
_FIRST_LOOK_S = 0.1  # interval until the first measurement after a pause
_LOOKS = 4  # number of measurements kept; the busiest counts
_BUSY_CORES = 0.3  # load of other processes that is ignored
_SHARED_CORE = 0.9  # load of other processes on a core that native threads share with them
_NAMES = ("user", "system", "irq", "softirq")  # CPU times that count; steal time is no process's here
_DIVISORS = (1, 2, 4, 8)  # of torch's number of threads

_first_process = MakerProcess()
_lock = threading.Lock()
_num_reduced = 0  # steps of this process that currently use fewer threads than torch's own number
_full = 0  # torch's own number meanwhile


def own_threads() -> int:
    """Torch's own number of threads, even while a step of another engine of this process uses fewer.

    `torch.set_num_threads` is per thread, but a thread that uses torch for the first time inherits the last number that any
    thread has set.
    """
    with _lock:
        return _full if _num_reduced else torch.get_num_threads()


def use_own_threads(count: int) -> None:
    """Set torch's number of threads for the calling thread, a new thread of an engine: see `own_threads`."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def mend_threads_of_a_fork() -> None:
    """In a forked process, have torch replace its pool of threads, which the fork lacks. Elsewhere do nothing.

    Torch does it at the pool's first use. If that is in several threads at once, as when transformers loads weights, one of
    them finds no pool and raises ("Invalid thread pool!", torch 2.13).
    """
    if not _first_process.is_current:
        torch.set_num_threads(torch.get_num_threads())


def thread_counts(most: int) -> tuple[int, ...]:
    """The numbers of threads that steps may use if torch's own is `most`, the largest first."""
    if _fixed():
        return (most,)
    return tuple(dict.fromkeys(max(1, most // divisor) for divisor in _DIVISORS))


def _fixed() -> bool:
    """Whether the environment fixes the number of threads."""
    return "OMP_NUM_THREADS" in os.environ


class CpuThreads:
    """Chooses the number of threads for an engine's steps. Used by one thread at a time.

    OMP_NUM_THREADS in the environment fixes the number. Torch's own number is never exceeded, and is restored after a step.

    Args:
        clock: Seconds, monotonic.
        used: CPU seconds used so far by all processes on the cores of this process, and by this process.
        set_native: Sets the native kernels' threads for the calling thread, 0 for torch's number. If it is given, torch's own
            operators use one thread.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], tuple[float, float]] | None = None,
        set_native: Callable[[int], None] | None = None,
    ) -> None:
        self._set_native = set_native
        self._clock = clock
        self._used = used or _used
        self._adapts = not _fixed()
        self._left_at = self._looked_at = -_STALE_S  # times of the last step's end and of the last measurement
        self._look_s = _FIRST_LOOK_S  # interval until the next measurement
        self._before = (0.0, 0.0)
        self._others: deque[float] = deque([0.0], _LOOKS)  # cores used by other processes
        self._num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @contextmanager
    def for_a_step(self) -> Iterator[None]:
        """Within the context, a step of the calling thread uses as many threads as there are spare cores."""
        most = torch.get_num_threads()
        count = self.count(most) if self._adapts and most > 1 else most
        of_torch = count if self._set_native is None else 1
        try:
            with nullcontext() if of_torch == most else _reduced(of_torch, most), self._native(count):
                yield
        finally:
            self._left_at = self._clock()

    @contextmanager
    def _native(self, count: int) -> Iterator[None]:
        """Within the context, native kernels use `count` threads for the calling thread."""
        if self._set_native is None:
            yield
            return
        self._set_native(count)
        try:
            yield
        finally:
            self._set_native(0)

    def count(self, most: int) -> int:
        """The number of threads to use now, at most `most`."""
        self._look()
        spare = self._num_cores - max(self._others)
        if self._set_native is not None:
            return min(most, max(1, int(spare + _SHARED_CORE)))
        counts = thread_counts(most)
        return next((count for count in counts if count <= spare + _BUSY_CORES), counts[-1])

    def _look(self) -> None:
        now = self._clock()
        pause_s = now - self._left_at
        if pause_s <= _PAUSE_S and now - self._looked_at < self._look_s:
            return
        try:
            before, self._before = self._before, self._used()
        except (OSError, RuntimeError, psutil.Error) as error:  # for example a sandbox without /proc
            log.warning("steps use all threads: the CPU time of other processes cannot be read: %s", error)
            self._adapts = False
            self._others.extend([0.0] * _LOOKS)
            return
        elapsed, self._looked_at = now - self._looked_at, now
        if pause_s > _PAUSE_S:
            if pause_s > _STALE_S:
                self._others.clear()
                self._others.append(0.0)
            self._look_s = _FIRST_LOOK_S
            return
        (all_before, own_before), (all_now, own_now) = before, self._before
        self._others.append(((all_now - all_before) - (own_now - own_before)) / elapsed)
        self._look_s = _LOOK_S


@contextmanager
def one_thread(set_native: Callable[[int], None]) -> Iterator[None]:
    """Within the context, torch's operators use one thread for the calling thread, native kernels as many as before.

    Small operators end in a barrier at which threads spin, for as long as another process has one of their cores.
    """
    most = torch.get_num_threads()
    with _reduced(1, most):
        set_native(most)
        try:
            yield
        finally:
            set_native(0)


@contextmanager
def _reduced(count: int, most: int) -> Iterator[None]:
    """Within the context, torch uses `count` threads for the calling thread; then `most` again."""
    global _num_reduced, _full
    with _lock:
        _full = max(most, _full if _num_reduced else 0)
        _num_reduced += 1
    try:
        torch.set_num_threads(count)
        yield
    finally:
        with _lock:  # one change: `own_threads` must not read the smaller number
            torch.set_num_threads(most)
            _num_reduced -= 1


def _used() -> tuple[float, float]:
    cores = psutil.cpu_times(percpu=True)
    ours = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(cores))
    if max(ours) >= len(cores):  # in a container: cores hidden or renumbered
        ours = range(len(cores))
    nice = os.getpriority(os.PRIO_PROCESS, 0) > 0  # niced processes yield to others, not to each other
    names = (*_NAMES, "nice") if nice else _NAMES
    busy = sum(getattr(cores[core], name, 0.0) for core in ours for name in names)
    return busy, time.process_time()
