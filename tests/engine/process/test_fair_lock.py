"""A fair lock: in the order asked, never two at a time, nothing lost by an interrupt or a collector."""

from __future__ import annotations

import linecache
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from monitors import wait_until

from pagetide.engine.process.fair_lock import FairLock


def started(target: Callable[..., object], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments)
    thread.start()
    return thread


def asking(lock: FairLock, name: int, order: list[int]) -> threading.Thread:
    """A thread that is in line when this returns."""
    before = len(lock._waiting)

    def run() -> None:
        with lock:
            order.append(name)

    thread = started(run)
    wait_until(lambda: len(lock._waiting) == before + 1, "a thread to wait")
    return thread


def held_elsewhere(lock: FairLock) -> Callable[[], None]:
    """Have another thread take the lock. What is returned has it release it, and waits for that."""
    taken, go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            go.wait()

    thread = started(hold)
    taken.wait()

    def release() -> None:
        go.set()
        thread.join()

    return release


def main_thread_waits(lock: FairLock) -> bool:
    """Whether the main thread is in line, and in the call that waits for its turn."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return len(lock._waiting) == 1 and line.strip() == "turn.acquire()"


def test_who_asked_first_is_served_first() -> None:
    """Who releases and asks again comes after those who wait."""
    lock, order = FairLock(), []
    with lock:
        threads = [asking(lock, i, order) for i in range(20)]
        assert not lock.acquire(blocking=False)
    with lock:
        order.append(20)
    for thread in threads:
        thread.join()
    assert order == list(range(21))
    assert lock.acquire(blocking=False)
    lock.release()


def test_an_interrupt_while_waiting_leaves_the_line() -> None:
    lock, order = FairLock(), []
    release = held_elsewhere(lock)

    def interrupt() -> None:
        wait_until(lambda: main_thread_waits(lock), "the main thread to wait")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = started(interrupt)
    with pytest.raises(KeyboardInterrupt):
        lock.acquire()
    thread.join()
    assert not lock._waiting
    late = asking(lock, 1, order)
    release()
    late.join()
    assert order == [1]


def test_a_turn_that_came_with_the_interrupt_goes_on_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, order = FairLock(), []
    release = held_elsewhere(lock)
    next_one = []

    class Turn:
        """A lock that is handed over in the moment in which its waiter is interrupted."""

        calls = 0

        def acquire(self) -> bool:
            self.calls += 1
            if self.calls == 2:
                monkeypatch.undo()
                next_one.append(asking(lock, 1, order))
                release()
                raise KeyboardInterrupt
            return True

        def release(self) -> None:
            pass

    monkeypatch.setattr(threading, "Lock", Turn)
    with pytest.raises(KeyboardInterrupt):
        lock.acquire()
    next_one[0].join()
    assert order == [1]


def test_a_place_in_line_that_an_interrupt_left_is_that_of_the_next_call() -> None:
    lock, order = FairLock(), []
    release, stale = held_elsewhere(lock), threading.Lock()
    stale.acquire()
    lock._waiting.append((stale, threading.get_ident()))  # the interrupt came right behind this

    def later() -> None:
        wait_until(lambda: main_thread_waits(lock), "the main thread to wait")
        release()

    thread = started(later)
    with lock:
        order.append(1)
    thread.join()
    assert order == [1] and lock._owner is None and not lock._waiting


def test_neither_a_collector_in_the_middle_of_a_call_nor_a_thread_that_is_barred_waits() -> None:
    lock = FairLock()
    with lock._mutex:
        assert not lock.acquire(blocking=False)
    with lock:
        lock.barred = threading.get_ident()
        with pytest.raises(RuntimeError, match="would wait for itself"):
            lock.acquire()
        assert lock.acquire(blocking=False) is False
        lock.barred = None
    with lock:
        pass


def test_what_an_interrupt_left_locked_its_thread_goes_on_with() -> None:
    """The interrupt comes at the entry of the release, or right behind the acquisition; others still come one at a time."""
    lock, order = FairLock(), []

    def interrupted() -> None:
        lock.acquire()  # and it is not released

    interrupted()
    thread = asking(lock, 1, order)
    assert not lock.acquire(blocking=False), "a collector in the middle of it finds it locked"
    with lock:
        order.append(0)
        assert not lock.acquire(blocking=False)
    thread.join()
    assert order == [0, 1] and lock._owner is None


def test_a_call_in_the_middle_of_a_call_is_refused_and_lets_nobody_in() -> None:
    """As from a signal's handler."""
    lock, order = FairLock(), []
    with lock:
        threads = [asking(lock, i, order) for i in range(2)]
        for ask in (lock.acquire, lock.__enter__):
            with pytest.raises(RuntimeError, match="would wait for itself"):
                ask()
        assert order == [] and len(lock._waiting) == 2
    for thread in threads:
        thread.join()
    assert order == [0, 1]


def test_nobody_releases_what_another_thread_has() -> None:
    lock = FairLock()
    release = held_elsewhere(lock)
    lock.release()
    assert not lock.acquire(blocking=False)
    release()
    assert lock.acquire(blocking=False)


def test_a_storm_of_interrupts_leaves_nobody_waiting() -> None:
    """And lets one in at a time."""
    lock, done, stop, inside = FairLock(), [0, 0], threading.Event(), list[int]()

    def work(number: int) -> None:
        while not stop.is_set():
            with lock:
                inside.append(number)
                done[number] += 1
                assert inside == [number]
                inside.clear()

    def once() -> None:
        with lock:
            assert not inside

    threads = [started(work, i) for i in range(2)]
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(300):
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.0005)
                while True:
                    once()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    once()
    before = list(done)
    wait_until(lambda: all(now > then for now, then in zip(done, before, strict=True)), "both to go on")
    stop.set()
    for thread in threads:
        thread.join()
