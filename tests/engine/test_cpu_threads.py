"""Steps on the CPU use fewer threads while others need the cores."""

from __future__ import annotations

import pytest
import torch

from pagetide.engine.cpu_threads import CpuThreads, fewer_threads


class Machine:
    """`cores` cores, on which others use `others` of them, and this process `own`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
        self.now = self.everybody_s = self.own_s = 0.0
        self.others = self.own = 0.0
        self.threads = CpuThreads(lambda: self.now, lambda: (self.everybody_s, self.own_s))

    def goes_on(self, seconds: float) -> None:
        self.now += seconds
        self.own_s += self.own * seconds
        self.everybody_s += (self.own + self.others) * seconds

    def counts(self, most: int, looks: int) -> list[int]:
        """What steps use in the next looks, a quarter of a second each."""
        found = []
        for _ in range(looks):
            self.goes_on(0.25)
            found.append(self.threads.count(most))
        return found


def test_alone_all_are_used_and_one_core_is_left_to_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 2)
    machine.own = 2.0
    assert machine.counts(2, 4) == [2] * 4
    machine.own = machine.others = 1.0
    assert machine.counts(2, 8) == [1] * 8
    machine.others = 0.0
    assert machine.counts(2, 6) == [1, 1, 1, 2, 2, 2], "more are used when it has been quiet for a second"
    machine.others = 0.2
    assert machine.counts(2, 4) == [2] * 4, "a little is not a neighbour"


@pytest.mark.parametrize(("others", "expected"), [(0.0, 8), (0.2, 8), (1.0, 4), (4.0, 4), (5.0, 2), (6.5, 1), (8.0, 1)])
def test_halves_of_eight(monkeypatch: pytest.MonkeyPatch, others: float, expected: int) -> None:
    machine = Machine(monkeypatch, 8)
    machine.others = others
    assert machine.counts(8, 3)[1:] == [expected] * 2


def test_cores_that_torch_was_not_to_use_are_there_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 8)
    machine.others = 4.0
    assert machine.counts(4, 3) == [4] * 3


def test_what_was_measured_long_ago_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 2)
    machine.goes_on(0.25)
    machine.threads.count(2)
    machine.others = 2.0
    machine.goes_on(60.0)  # in which there was no step
    machine.others = 0.0
    assert machine.counts(2, 3) == [2] * 3


def test_torch_has_its_threads_again_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        machine = Machine(monkeypatch, 2)
        machine.others = 1.5
        machine.counts(2, 2)
        with machine.threads.for_a_step():
            assert torch.get_num_threads() == 1
        with pytest.raises(ZeroDivisionError), machine.threads.for_a_step():
            _ = 1 // 0
        assert torch.get_num_threads() == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        fixed = CpuThreads(lambda: machine.now, lambda: (0.0, 0.0))
        fixed._others.append(2.0)
        with fixed.for_a_step():
            assert torch.get_num_threads() == 2, "who set the variable has decided"
    finally:
        torch.set_num_threads(before)


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


def test_the_real_counters_go_up() -> None:
    threads = CpuThreads()
    everybody, own = threads._used()
    torch.zeros(1 << 22).add_(1)
    while threads._used()[0] == everybody:
        torch.zeros(1 << 22).add_(1)
    assert threads._used()[1] > own
    assert [fewer_threads(n) for n in (1, 2, 3, 8)] == [1, 1, 1, 4]
