"""Work of several owners: each owner's in order, one piece at a time, and owners in turns."""

from __future__ import annotations

import threading

import pytest

from pagetide.engine.process.fair_threads import OWNER, FairThreads


def test_owners_have_turns_and_leave_threads_to_others() -> None:
    ran: list[str] = []
    gate, others = threading.Event(), FairThreads(3, 2, "test")
    held = [others.submit(gate.wait, "a") for _ in range(4)]
    assert others.submit(lambda: 5, "b").result() == 5 and sum(one.running() for one in held) <= 2
    threads = FairThreads(1, 1, "test")
    threads.submit(gate.wait, "a")
    for number in range(3):
        threads.submit(lambda number=number: ran.append(f"a{number}"), "a")
    OWNER.set("b")
    works = [threads.submit(lambda number=number: ran.append(f"b{number}")) for number in range(2)]
    failing = threads.submit(lambda: 1 // 0, "c")
    assert len(threads.pending) == 7
    gate.set()
    threads.shutdown()
    assert ran == ["b0", "a0", "b1", "a1", "a2"] and threads.pending == [] and works[1].result() is None
    assert isinstance(failing.exception(), ZeroDivisionError)
    with pytest.raises(RuntimeError):
        threads.submit(print)
