"""Steps on the CPU use fewer threads while others need the cores."""

from __future__ import annotations

import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from async_rig import run_threads

from pagetide import native
from pagetide.engine.process import cpu_threads
from pagetide.engine.process.cpu_threads import CpuThreads, one_thread, own_threads, thread_counts


class Machine:
    """`cores` cores, on which others use `others` of them, and this process `own`. Torch has `most` threads of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: int, most: int | None = None) -> None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
        monkeypatch.setattr("torch.get_num_threads", lambda: self.threads)
        monkeypatch.setattr("torch.set_num_threads", lambda count: setattr(self, "threads", count))
        self.threads = most or cores
        self.now = 1_000.0
        self.used_s = (0.0, 0.0)  # by everybody, by this process
        self.others = self.own = 0.0
        self.cpu_threads = CpuThreads(lambda: self.now, lambda: self.used_s)

    def goes_on(self, seconds: float) -> None:
        self.now += seconds
        everybody_s, own_s = self.used_s
        self.used_s = everybody_s + (self.own + self.others) * seconds, own_s + self.own * seconds

    def steps(self, count: int, seconds: float = 0.25) -> list[int]:
        """What steps of so many seconds use, one after the other."""
        found = []
        for _ in range(count):
            with self.cpu_threads.for_a_step():
                found.append(self.threads)
                self.goes_on(seconds)
            self.goes_on(0.001)
        return found


def test_alone_all_are_used_and_one_core_is_left_to_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 2)
    machine.own = 2.0
    assert machine.steps(4) == [2] * 4
    machine.own = machine.others = 1.0
    assert machine.steps(8) == [2] + [1] * 7, "the first step has seen nobody yet"
    machine.others = 0.0
    assert machine.steps(6) == [1, 1, 1, 1, 2, 2], "more are used when it has been quiet for a second"
    machine.others = 0.2
    assert machine.steps(4) == [2] * 4, "a little is not a neighbour"
    assert machine.threads == 2


def test_neighbours_of_short_and_long_steps_are_seen_and_their_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in (0.001, 0.02, 0.4, 3.0, 20.0):
        machine = Machine(monkeypatch, 2)
        machine.others, steps = 1.0, 2 + int(0.3 / seconds)
        assert machine.steps(steps, seconds)[-1] == 1, seconds
        machine.others, steps = 0.0, 5 + int(1.3 / seconds)
        assert machine.steps(steps, seconds)[-1] == 2, seconds


def test_halves_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    for others, expected in ((0.0, 8), (0.2, 8), (1.0, 4), (4.0, 4), (5.0, 2), (6.5, 1), (8.0, 1)):
        machine = Machine(monkeypatch, 8)
        machine.others = others
        assert machine.steps(4)[1:] == [expected] * 3, others
    machine = Machine(monkeypatch, 8, most=4)
    machine.others = 4.0
    assert machine.steps(3) == [4] * 3, "cores that torch was not to use are there for others"


def test_the_numbers_of_threads_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 64)
    machine.others = 64.0
    assert machine.steps(4)[1:] == [8] * 3, "no less than an eighth"
    assert [thread_counts(most) for most in (1, 2, 3, 6, 64)] == [(1,), (2, 1), (3, 1), (6, 3, 1), (64, 32, 16, 8)]
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert thread_counts(6) == (6,)


def test_cores_that_a_pause_leaves_to_others_count_as_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines that take turns are no neighbours; one that was there before a short pause still is."""
    machine = Machine(monkeypatch, 2)
    for _ in range(3):
        machine.own, machine.others = 2.0, 0.0
        assert machine.steps(8, 0.05) == [2] * 8
        machine.own, machine.others = 0.0, 2.0
        machine.goes_on(1.5)
    machine.own = machine.others = 1.0
    assert machine.steps(8)[-1] == 1
    machine.goes_on(1.0)
    assert machine.steps(8) == [1] * 8


def test_threads_that_begin_during_a_step_of_another_engine_have_all_of_them() -> None:
    found: list[int] = []

    def of_an_engine(count: int) -> None:
        cpu_threads.use_own_threads(count)
        found.append(torch.get_num_threads())

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with cpu_threads._reduced(1, 2):
            assert torch.get_num_threads() == 1
            with cpu_threads._reduced(1, 1):
                assert own_threads() == 2
            run_threads(partial(of_an_engine, own_threads()))
        assert (found, own_threads(), torch.get_num_threads()) == ([2], 2, 2)
    finally:
        torch.set_num_threads(before)


def test_torch_has_its_threads_again_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 2)
    machine.others = 1.5
    machine.steps(2)
    with machine.cpu_threads.for_a_step():
        assert machine.threads == 1
    with pytest.raises(ZeroDivisionError), machine.cpu_threads.for_a_step():
        raise ZeroDivisionError
    assert machine.threads == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    machine.cpu_threads = CpuThreads(lambda: machine.now, lambda: machine.used_s)
    assert machine.steps(4) == [2] * 4, "who set the variable has decided"


def test_where_nothing_can_be_read_all_threads_are_used(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def refused() -> tuple[float, float]:
        raise PermissionError("planted")

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)))
    threads = CpuThreads(used=refused)
    assert [threads.count(4) for _ in range(3)] == [4, 4, 4]
    with threads.for_a_step():
        pass
    assert "cannot be read: planted" in caplog.text


def test_whose_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = CpuThreads()._used()
    while (after := CpuThreads()._used())[0] == before[0]:
        torch.zeros(1 << 22).add_(1)
    assert after[1] > before[1], "the real counters go up"
    times = SimpleNamespace(user=0.5, system=0.25, irq=0.125, softirq=0.125, nice=0.5, idle=9.0, iowait=9.0, steal=9.0)
    monkeypatch.setattr("psutil.cpu_times", lambda percpu: [times] * 4)
    for cpus, niceness, expected in (
        ({0, 1, 2, 3}, 0, 4.0), ({1}, 0, 1.0), ({8, 9}, 0, 4.0),  # a container shows its CPUs as 0 to 3
        ({0, 1, 2, 3}, 5, 6.0), ({2}, 5, 1.5),
    ):  # fmt: skip
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, cpus=cpus: cpus)
        monkeypatch.setattr("os.getpriority", lambda which, who, niceness=niceness: niceness)
        assert CpuThreads()._used()[0] == expected, (cpus, niceness)


def test_a_fork_gets_a_pool_of_threads_before_several_threads_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch makes it in `set_num_threads`. The first process has one."""
    made: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", made.append)
    cpu_threads.mend_threads_of_a_fork()
    assert made == []
    if (child := os.fork()) == 0:
        try:
            cpu_threads.mend_threads_of_a_fork()
        finally:
            os._exit(0 if made == [torch.get_num_threads()] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_beside_native_threads_torch_uses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 8)
    of_kernels: list[int] = []
    machine.cpu_threads = CpuThreads(lambda: machine.now, lambda: machine.used_s, of_kernels.append)
    assert machine.steps(2) == [1, 1] and of_kernels == [8, 0, 8, 0]
    for others, expected in ((0.8, 8), (1.0, 7), (4.0, 4), (4.5, 4), (7.95, 1)):
        machine.others = others
        assert machine.steps(6)[-1] == 1 and of_kernels[-4:] == [expected, 0, expected, 0], others
    assert machine.threads == 8


def test_native_threads_are_those_of_the_calling_thread() -> None:
    if native.instructions() is None:
        pytest.skip("the native kernels are not built")
    found: list[int] = []
    before = torch.get_num_threads()
    torch.ops.pagetide.set_threads(before + 3)
    try:
        run_threads(lambda: found.append(torch.ops.pagetide.num_threads()))
        assert (found, torch.ops.pagetide.num_threads()) == ([before], before + 3)
    finally:
        torch.ops.pagetide.set_threads(0)
    assert torch.ops.pagetide.num_threads() == before


def test_one_thread_of_torch_beside_all_of_the_kernels() -> None:
    """Others still learn torch's own number meanwhile."""
    before, of_kernels = torch.get_num_threads(), list[int]()
    torch.set_num_threads(3)
    try:
        with one_thread(of_kernels.append):
            assert (torch.get_num_threads(), own_threads(), of_kernels) == (1, 3, [3])
        assert (torch.get_num_threads(), own_threads(), of_kernels) == (3, 3, [3, 0])
    finally:
        torch.set_num_threads(before)
