"""A lease's connection to its broker: attempts and their times, versions of the protocol, and losses, by a false broker."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from broker_rig import DEVICE, short_folder
from false_broker import FalseBroker

from pagetide.allocator import wire
from pagetide.allocator.broker_link import BrokerLink
from pagetide.allocator.errors import BrokerUnavailable, LeaseRefused, ProtocolMismatch, ProtocolViolation
from pagetide.allocator.lease_events import Lost

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases need Linux")
REQUEST = wire.RegisterMessage("a", DEVICE, 0, None, 1.0, 0, 10, 0)


class Rig:
    """A link at `path` with a clock that stands still."""

    def __init__(self, path: Path) -> None:
        self.now = 100.0
        self.path = path
        self.epoll = select.epoll()
        self.link = BrokerLink(path, lambda: self.now, self.epoll)

    def retry_in(self) -> float:
        """Seconds until the next attempt is due, by moving the clock."""
        before = self.now
        while not self.link.retry_due:
            self.now += 0.001
        return round(self.now - before, 3)

    def register(self, broker: FalseBroker) -> None:
        thread = threading.Thread(target=broker.serve)
        thread.start()
        message = self.link.register(REQUEST, time.monotonic() + 30)
        thread.join()
        assert message == wire.RegisteredMessage(1, wire.OrderGeneration(7, 100), 500)
        os.close(self.link.take_fd())
        self.link.set_registered()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with short_folder() as folder:
        rig = Rig(folder / "broker")
        yield rig
        rig.link.close()
        rig.epoll.close()


@pytest.fixture
def broker(rig: Rig) -> Iterator[FalseBroker]:
    broker = FalseBroker(rig.path)
    yield broker
    broker.close()


def test_without_a_broker_attempts_become_rarer(rig: Rig) -> None:
    assert rig.link.retry_due, "the first at once"
    waits = []
    for _ in range(7):
        with pytest.raises(BrokerUnavailable, match="no broker listens") as raised:
            rig.link.connect(REQUEST)
        assert rig.link.lose(raised.value) is None, "there was none to lose"
        assert not rig.link.is_open
        idle_s = rig.link.idle_s
        waits.append(rig.retry_in())
        assert waits[-1] == pytest.approx(idle_s, abs=0.002)
    assert waits == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5], abs=0.002)


def test_a_registration_and_its_loss(rig: Rig, broker: FalseBroker) -> None:
    rig.register(broker)
    assert (rig.link.is_open, rig.link.registered, rig.link.idle_s) == (True, True, 60.0)
    rig.link.send(wire.AskMessage(5, 1000))
    assert broker.hear() == wire.AskMessage(5, 1000)
    broker.say(wire.WithdrawMessage(1, wire.OrderGeneration(7, 101)))
    assert rig.epoll.poll(30)
    assert rig.link.receive() == [wire.WithdrawMessage(1, wire.OrderGeneration(7, 101))]
    broker.socket.close()
    assert rig.epoll.poll(30)
    with pytest.raises(BrokerUnavailable) as raised:
        rig.link.receive()
    assert rig.link.lose(raised.value) == Lost(str(raised.value))
    assert (rig.link.is_open, rig.link.registered) == (False, False)
    assert rig.link.retry_due, "a successor may be there already"
    assert rig.epoll.poll(0) == []
    rig.link.send(wire.AskMessage(6, 1000))  # to none


def test_an_answer_is_waited_for_by_the_clock(rig: Rig, broker: FalseBroker) -> None:
    rig.link.connect(REQUEST)
    broker.accept()
    assert (rig.link.is_open, rig.link.registered, rig.link.idle_s) == (True, False, 0.05)
    rig.now += 5.0
    rig.link.check_answered()
    rig.now += 0.1
    with pytest.raises(BrokerUnavailable, match="does not answer"):
        rig.link.check_answered()


def test_nothing_is_sent_before_the_registration(rig: Rig, broker: FalseBroker) -> None:
    rig.link.connect(REQUEST)
    rig.link.send(wire.AskMessage(5, 1000))
    broker.serve()
    rig.link.set_registered()
    rig.link.send(wire.AskMessage(6, 1000))
    assert broker.hear() == wire.AskMessage(6, 1000)


def test_a_refusal_is_told_once_and_the_next_attempt_is_late(rig: Rig) -> None:
    refusal = LeaseRefused("too much")
    assert rig.link.lose(refusal) == Lost("too much", refused=True)
    assert rig.retry_in() == pytest.approx(5.0, abs=0.002)
    assert rig.link.lose(refusal) is None
    assert rig.link.lose(LeaseRefused("something else")) == Lost("something else", refused=True)


@pytest.mark.parametrize(
    ("version", "remedy"), [(wire.PROTOCOL - 1, "update the broker"), (wire.PROTOCOL + 1, "update the engine")]
)
def test_a_broker_of_another_version_is_refused(rig: Rig, broker: FalseBroker, version: int, remedy: str) -> None:
    def other() -> None:
        broker.accept()
        broker.say(wire.WelcomeMessage(version, 7, 1))

    thread = threading.Thread(target=other)
    thread.start()
    said = f"speaks version {version} of the lease protocol and this process version {wire.PROTOCOL}; {remedy}"
    with pytest.raises(ProtocolMismatch, match=said):
        rig.link.register(REQUEST, time.monotonic() + 30)
    thread.join()


def test_an_answer_without_a_descriptor_is_a_violation(rig: Rig, broker: FalseBroker) -> None:
    rig.link.connect(REQUEST)
    broker.accept()
    with pytest.raises(ProtocolViolation, match="no descriptor"):
        rig.link.take_fd()
