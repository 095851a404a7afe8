"""Threads of a step on the CPU: fewer while other processes need the cores.

OpenMP's threads wait for each other at the end of every product, and spin meanwhile. Where one of them shares its core with
another process the others spin through its time slices: one busy process on two cores made steps four times as slow, and two
engines beside each other as slow together as one should be alone. So a step uses as many threads as there are idle cores, in
halves of what torch would use: oneDNN keeps primitives for each number of threads.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

log = logging.getLogger(__name__)

_LOOK_S = 0.25  # how often the cores are looked at
_STALE_S = 2.0  # no step for so long: what was measured is of another time
_LOOKS = 4  # of which the busiest counts
_BUSY_CORES = 0.3  # of others, which a step leaves out of account
_NAMES = ("user", "system", "irq", "softirq", "steal")  # of times that count; not those of who has been told to be nice


def fewer_threads(most: int) -> int:
    """The next number of threads below `most` that steps use."""
    return max(1, most // 2)


class CpuThreads:
    """How many threads steps of this process use. Used by one thread at a time.

    Whoever sets OMP_NUM_THREADS has decided that. In any case torch's own number of threads is never exceeded, and is the same
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
        self._fixed = "OMP_NUM_THREADS" in os.environ
        self._looked_at = -_STALE_S
        self._before = (0.0, 0.0)
        self._others: deque[float] = deque([0.0], _LOOKS)  # cores that other processes used
        self._num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @contextmanager
    def for_a_step(self) -> Iterator[None]:
        """Inside, torch uses as many threads of this one as there are cores to spare."""
        most = torch.get_num_threads()
        count = most if self._fixed or most == 1 else self.count(most)
        if count == most:
            yield
            return
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(most)

    def count(self, most: int) -> int:
        """Threads that are to be used now, of at most `most`."""
        self._look()
        spare = self._num_cores - max(self._others)
        while most > 1 and most > spare + _BUSY_CORES:
            most = fewer_threads(most)
        return most

    def _look(self) -> None:
        now = self._clock()
        elapsed = now - self._looked_at
        if elapsed < _LOOK_S:
            return
        try:
            before, self._before, self._looked_at = self._before, self._used(), now
        except (OSError, RuntimeError, psutil.Error) as error:  # a sandbox without /proc, for one
            log.warning("steps use all threads: the CPU time of other processes cannot be read: %s", error)
            self._fixed = True
            self._others.extend([0.0] * _LOOKS)
            return
        if elapsed > _STALE_S:
            return
        (all_before, own_before), (all_now, own_now) = before, self._before
        self._others.append(((all_now - all_before) - (own_now - own_before)) / elapsed)


def _used() -> tuple[float, float]:
    cores = psutil.cpu_times(percpu=True)
    ours = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(cores))
    busy = sum(getattr(cores[core], name, 0.0) for core in ours if core < len(cores) for name in _NAMES)
    return busy, time.process_time()
