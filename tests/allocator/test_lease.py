"""The engine's side: against a broker in a thread, a false one, and in processes that hold real memory and are killed."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from broker_rig import DEVICE, Numbers, broker_thread
from false_broker import FalseBroker
from monitors import wait_until

from pagetide.allocator import broker_client, wire
from pagetide.allocator.broker_client import BrokerClient
from pagetide.allocator.broker_socket import connect
from pagetide.allocator.errors import (
    BrokerUnavailable,
    GrantExceeded,
    InvalidLease,
    LeaseClosed,
    LeaseRefused,
    MinimumsExceedCapacity,
)
from pagetide.allocator.lease import Lease
from pagetide.allocator.lease_events import Denied, Granted, Limited, Lost, Recalled, Rejoined
from pagetide.allocator.lease_record import bounds_between
from pagetide.common.frames import frame

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases need Linux")


@contextlib.contextmanager
def changed(lease: Lease, total_bytes: int) -> Iterator[None]:
    """Around what maps or unmaps so much that `total_bytes` are held afterwards."""
    by = total_bytes - lease.held_bytes
    lease.shift(min(0, by), max(0, by))
    yield
    lease.shift(max(0, by), min(0, by))


def lease(path: Path, name: str = "a", low: int = 0, high: int | None = None, **more: Any) -> Lease:
    options = {"device_uuid": DEVICE, "granule_bytes": 10, "timeout_s": 30} | more
    return Lease.register(path, name=name, min_bytes=low, max_bytes=high, **options)


def wait_for(held: Lease, kind: type, timeout_s: float = 30) -> Any:
    """The next event of a kind."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for event in held.wait(deadline - time.monotonic()):
            if isinstance(event, kind):
                return event
    pytest.fail(f"no {kind.__name__} came")


def test_a_life(folder: Path) -> None:
    numbers = Numbers()
    with broker_thread(folder / "broker", numbers) as broker:
        with lease(folder / "broker", low=100, high=900) as a:
            assert (a.name, a.device_uuid, a.min_bytes, a.max_bytes) == ("a", DEVICE, 100, 900)
            assert (a.granted_bytes, a.held_bytes, a.recall, a.connected) == (100, 0, None, True)
            assert a.poll() == ()
            a.ask(500, expires_s=600)
            assert a.wait(30) == (Granted(500),)
            with changed(a, 500):
                numbers.used = 500
            a.report({"weights": 100, "kv": 400}, free_bytes=50)
            assert a.held_bytes == 500
            wait_until(lambda: broker.leases()[0].held == {"weights": 100, "kv": 400}, "the report")
            a.ask(0)
            BrokerClient(folder / "broker").recall("a", 200)
            event = wait_for(a, Recalled)
            assert a.recall == event and event.target_bytes == 300
            with pytest.raises(ValueError, match="500 bytes are held still, not 300"):
                a.answer_unmapped(300)
            with changed(a, 300):
                numbers.used = 300
            a.answer_unmapped(300)
            assert (a.recall, a.granted_bytes) == (None, 300)
            wait_until(lambda: broker.leases()[0].granted_bytes == 300, "the grant to fall")
            BrokerClient(folder / "broker").limit("a", 250)
            assert wait_for(a, Limited) == Limited(250)
            assert a.max_bytes == 250
        numbers.used = 0
        wait_until(lambda: broker.leases() == (), "the end of the lease")
    with pytest.raises(LeaseClosed, match="the lease of 'a' has ended"):
        a.poll()
    a.close()


def test_numbers_that_contradict_each_other_are_refused_without_a_broker(folder: Path) -> None:
    with pytest.raises(InvalidLease, match=r"max_bytes \(5\) must be at least 1 and not below min_bytes \(10\)"):
        lease(folder / "broker", low=10, high=5)
    with pytest.raises(InvalidLease, match=r"register\.granule_bytes must be"):
        lease(folder / "broker", granule_bytes=0)
    with pytest.raises(InvalidLease, match=r"register\.weight must be a number between 0\.001 and 1000"):
        lease(folder / "broker", weight=0)
    with pytest.raises(BrokerUnavailable, match="no broker listens"):
        lease(folder / "broker")


def test_what_the_broker_refuses_is_raised(folder: Path) -> None:
    with broker_thread(folder / "broker", Numbers()):
        first = lease(folder / "broker", "first", low=800)
        with pytest.raises(MinimumsExceedCapacity, match=r"1000 bytes with what is promised.*900 bytes for leases"):
            lease(folder / "broker", "second", low=200)
        with pytest.raises(LeaseRefused, match="is not watched"):
            lease(folder / "broker", device_uuid="GPU-9")
        first.close()


def test_the_descriptor_tells_when_to_poll(folder: Path) -> None:
    with broker_thread(folder / "broker", Numbers()), lease(folder / "broker") as a:
        assert select.select([a.fileno()], [], [], 0)[0] == []
        a.ask(100)
        assert select.select([a.fileno()], [], [], 30)[0]
        assert a.poll() == (Granted(100),)
        assert select.select([a.fileno()], [], [], 0)[0] == []


@pytest.fixture
def false_broker(folder: Path) -> Iterator[FalseBroker]:
    broker = FalseBroker(folder / "broker")
    yield broker
    broker.close()


def engine_of(broker: FalseBroker, folder: Path, granted: int = 500, **more: Any) -> Lease:
    thread = threading.Thread(target=broker.serve, args=(granted,))
    thread.start()
    registered = lease(folder / "broker", **more)
    thread.join()
    return registered


def register_again(a: Lease, broker: FalseBroker, granted: int = 500) -> None:
    """Once it is lost."""
    thread = threading.Thread(target=broker.serve, args=(granted,))
    thread.start()
    assert wait_for(a, Rejoined) == Rejoined(granted)
    thread.join()


def test_a_crowd_before_the_broker_is_waited_out(
    folder: Path, false_broker: FalseBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd, turned_away = [], threading.Event()
    with contextlib.suppress(BlockingIOError):
        while True:
            crowd.append(connect(folder / "broker"))
    with pytest.raises(BrokerUnavailable, match="cannot be reached"):
        lease(folder / "broker", timeout_s=0.05)

    def try_to(path: Path) -> socket.socket:
        try:
            return connect(path)
        except BlockingIOError:
            turned_away.set()
            raise

    def serve() -> None:
        assert turned_away.wait(60)
        for _ in crowd:
            false_broker.accept()
            false_broker.socket.close()
        false_broker.serve()

    monkeypatch.setattr(broker_client, "connect", try_to)
    thread = threading.Thread(target=serve)
    thread.start()
    with lease(folder / "broker") as a:
        assert a.granted_bytes == 500
    thread.join()
    for sock in crowd:
        sock.close()


def generation(counter: int, epoch: int = 7) -> wire.OrderGeneration:
    return wire.OrderGeneration(epoch, counter)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (wire.GrantMessage(1, generation(101), 600), wire.GrantMessage(1, generation(101), 700)),
        (wire.LimitMessage(1, 600, generation(101)), wire.LimitMessage(1, 700, generation(101))),
        (wire.GrantMessage(1, generation(101), 600), wire.LimitMessage(1, 600, generation(101))),
        (wire.RecallMessage(1, generation(101), 400, 1000), wire.RecallMessage(1, generation(101), 400, 2000)),
        (wire.WithdrawMessage(1, generation(101)), wire.RecallMessage(1, generation(101), 400, 1000)),
        (None, wire.GrantMessage(1, generation(100), 499)),  # than the lease was registered with
    ],
    ids=["grants", "limits", "a grant and a limit", "recalls", "a withdrawal and a recall", "the first"],
)
def test_two_orders_of_one_generation_are_told_and_settled_by_a_new_registration(
    folder: Path, false_broker: FalseBroker, first: wire.FromBroker | None, second: wire.FromBroker
) -> None:
    with engine_of(false_broker, folder, held_bytes=300) as a:
        if first is not None:
            false_broker.say(first)
            assert len(a.wait(30)) == 1
            false_broker.say(first)  # the same once more says nothing new
        false_broker.say(second)
        lost = wait_for(a, Lost)
        assert "sent two orders of generation (7, 10" in lost.reason and str(second) in lost.reason
        assert (a.granted_bytes, a.held_bytes, a.recall) == (300, 300, None), "it keeps what it holds, and takes no more"
        register_again(a, false_broker, 450)
        assert false_broker.request.held_bytes == 300


def test_the_answer_names_the_newest_order_that_was_seen(folder: Path, false_broker: FalseBroker) -> None:
    with engine_of(false_broker, folder) as a:
        false_broker.say(wire.RecallMessage(1, generation(103), 400, 1000), wire.RecallMessage(1, generation(105), 200, 1000))
        while a.generation != generation(105):
            a.wait(30)
        assert a.recall is not None and a.recall.target_bytes == 200
        a.answer_unmapped(400)
        assert a.granted_bytes == 400 and a.recall is not None  # half of it
        a.answer_unmapped(200)
        assert a.recall is None
        assert [false_broker.hear(), false_broker.hear()] == [
            wire.UnmappedMessage(400, generation(105)),
            wire.UnmappedMessage(200, generation(105)),
        ]


def test_memory_that_is_recalled_is_not_granted_although_the_answer_is_due(folder: Path, false_broker: FalseBroker) -> None:
    with engine_of(false_broker, folder) as a:
        false_broker.say(wire.RecallMessage(1, generation(103), 200, 1000))
        wait_for(a, Recalled)
        assert a.granted_bytes == 500
        assert a.wait_granted(200, 0) and not a.wait_granted(201, 0)
        a.answer_unmapped(200)
        assert not a.wait_granted(500, 0)
        false_broker.say(wire.GrantMessage(1, generation(104), 500))
        assert a.wait_granted(500, 30)


def test_a_grant_that_crossed_an_answer_counts_for_both_sides(folder: Path, false_broker: FalseBroker) -> None:
    with engine_of(false_broker, folder) as a:
        a.answer_unmapped(100)
        assert a.granted_bytes == 100
        false_broker.say(wire.GrantMessage(1, generation(101), 700), wire.RefusedMessage("refused", "the answer is older"))
        granted, denied = a.wait(30)
        assert granted == Granted(700) and isinstance(denied, Denied)
        assert a.granted_bytes == 700


def test_the_record_bounds_what_is_done(folder: Path, false_broker: FalseBroker) -> None:
    with engine_of(false_broker, folder, held_bytes=50) as a:
        bounds = lambda: bounds_between(false_broker.record.read(), false_broker.record.read())  # noqa: E731
        a.shift(0, 150)
        with changed(a, 450):
            assert bounds() == (50, 450), "changes overlap"
        with pytest.raises(GrantExceeded, match="grants 500 bytes, 501 would be held"):
            a.shift(-10, 51)
        assert bounds() == (300, 450)
        a.report({"kv": 150, "torch": 40}, 0)
        assert bounds() == (190, 190)
        a.report({"kv": 150, "torch": 30}, 0, moving_bytes=20)
        assert bounds() == (160, 180)
        assert a.held_bytes == 180


def test_a_lease_that_has_ended_lets_memory_go_and_none_come(folder: Path, false_broker: FalseBroker) -> None:
    a = engine_of(false_broker, folder, held_bytes=50)
    a.close()
    a.shift(-50, -50)
    with pytest.raises(LeaseClosed, match="the lease of 'a' has ended"):
        a.shift(0, 1)


def test_a_minimum_is_lowered_for_the_next_broker_too(folder: Path, false_broker: FalseBroker) -> None:
    with engine_of(false_broker, folder, low=400) as a:
        a.lower_min(300)
        assert (a.min_bytes, false_broker.hear()) == (300, wire.LowerMinMessage(300))
        with pytest.raises(InvalidLease, match="300 bytes, not 301"):
            a.lower_min(301)
        a.answer_unmapped(0)
        assert a.granted_bytes == 300
        false_broker.socket.close()
        assert [type(event) for event in a.wait(30)] == [Lost]
        register_again(a, false_broker)
        assert false_broker.request.min_bytes == 300


def test_a_report_is_sent_once(folder: Path, false_broker: FalseBroker) -> None:
    with engine_of(false_broker, folder) as a:
        for free in (5, 5, 5, 6):
            a.report({"kv": 10}, free)
        assert [false_broker.hear(), false_broker.hear()] == [
            wire.ReportMessage({"kv": 10}, 5),
            wire.ReportMessage({"kv": 10}, 6),
        ]
        with pytest.raises(ValueError, match=r"report.held.kv must be"):
            a.report({"kv": -1}, 0)


def test_waiting_threads_are_woken_by_events_and_by_the_end(folder: Path, false_broker: FalseBroker) -> None:
    a, seen = engine_of(false_broker, folder), []

    def wait() -> None:
        try:
            while True:
                seen.extend(a.wait(600))
        except LeaseClosed as error:
            seen.append(error)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(101, 110):
        false_broker.say(wire.GrantMessage(1, generation(number), number))
        wait_until(lambda number=number: Granted(number) in seen, "the grant")
    before = len(os.listdir("/proc/self/fd"))
    a.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert [type(event) for event in seen[-2:]] == [LeaseClosed, LeaseClosed]
    assert len(os.listdir("/proc/self/fd")) <= before - 2


def test_a_map_that_runs_while_the_broker_changes_is_bounded_in_the_new_record(folder: Path, false_broker: FalseBroker) -> None:
    with engine_of(false_broker, folder) as a:
        with changed(a, 100):
            pass
        with changed(a, 400):
            false_broker.socket.close()
            wait_for(a, Lost)
            register_again(a, false_broker, 400)
            assert false_broker.request.held_bytes == 400
            assert bounds_between(false_broker.record.read(), false_broker.record.read()) == (100, 400)
        assert bounds_between(false_broker.record.read(), false_broker.record.read()) == (400, 400)


@pytest.mark.parametrize("harm", [frame(b"null"), b"\x7f" * 8, wire.to_frame(wire.DoneMessage())], ids=repr)
def test_a_broker_that_makes_no_sense_is_left(folder: Path, false_broker: FalseBroker, harm: bytes) -> None:
    with engine_of(false_broker, folder) as a:
        with changed(a, 300):
            pass
        false_broker.socket.send(harm)
        (lost,) = a.wait(30)
        assert isinstance(lost, Lost) and lost.reason
        assert (a.connected, a.granted_bytes, a.held_bytes) == (False, 300, 300)


def test_a_broker_that_never_reads_stops_nothing(folder: Path, false_broker: FalseBroker) -> None:
    a = engine_of(false_broker, folder)
    for number in range(30_000):
        a.ask(number)
    event = wait_for(a, Lost)
    assert "does not read" in event.reason
    a.close()


def test_an_engine_keeps_what_it_has_and_goes_on_with_the_successor(folder: Path) -> None:
    path, numbers = folder / "broker", Numbers()
    with broker_thread(path, numbers):
        a = lease(path, low=100, high=900)
        a.ask(700, expires_s=600)
        assert a.wait_granted(700, 30)
        with changed(a, 400):
            numbers.used = 400
        a.report({"kv": 400}, 30)
    assert isinstance(wait_for(a, Lost), Lost)
    assert (a.granted_bytes, a.held_bytes, a.connected) == (400, 400, False)  # no growth, though 700 were granted
    with pytest.raises(GrantExceeded), changed(a, 401):
        pass
    with changed(a, 350):  # it may shrink
        numbers.used = 350
    a.report({"kv": 350}, 30)
    a.answer_unmapped(350)
    a.ask(700)
    with broker_thread(path, numbers, grace_s=0.2) as successor:
        assert wait_for(a, Rejoined) == Rejoined(350)
        wait_until(lambda: bool(successor.leases()) and successor.leases()[0].free_bytes == 30, "the report")
        (row,) = successor.leases()
        assert (row.granted_bytes, row.held_bytes, row.held) == (350, 350, {"kv": 350})
        with changed(a, 300):
            numbers.used = 300
        wait_until(lambda: successor.leases()[0].held_bytes == 300, "the new record")
        a.ask(700, expires_s=600)
        assert a.wait_granted(700, 30)
        a.close()


def test_a_successor_that_refuses_is_told_once_and_asked_again_later(folder: Path) -> None:
    path = folder / "broker"
    clock = [0.0]
    with broker_thread(path, Numbers()):
        a = lease(path, low=500, clock=lambda: clock[0])
    wait_for(a, Lost)
    with broker_thread(path, Numbers(), grace_s=0.0) as successor:
        other = lease(path, "other", low=600)
        clock[0] += 1
        assert "makes 1.07 KiB with what is promised to others" in wait_for(a, Lost).reason
        other.close()
        wait_until(lambda: successor.leases() == (), "the other's end")
        clock[0] += 4.9
        assert a.poll() == () and not a.connected
        clock[0] += 0.2
        wait_for(a, Rejoined)
        assert a.granted_bytes == 500 or a.wait_granted(500, 30)
        a.close()
