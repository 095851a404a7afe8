"""The engine's side: against a broker in a thread, a false one, and in processes that hold real memory and are killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from broker_rig import (
    DEVICE,
    Numbers,
    Process,
    broker_thread,
    processes,
    resident_bytes,
    short_folder,
    test_device,
    wait_until,
)
from false_broker import FalseBroker

from pagetide.allocator import wire
from pagetide.allocator.broker_client import BrokerClient
from pagetide.allocator.broker_socket import connect, listen
from pagetide.allocator.errors import (
    BrokerUnavailable,
    GrantExceeded,
    InvalidLease,
    LeaseClosed,
    LeaseRefused,
    LeaseTooSmall,
    MinimumsExceedCapacity,
    ProtocolMismatch,
)
from pagetide.allocator.lease import Lease
from pagetide.allocator.lease_events import Denied, Granted, Limited, Lost, Recalled, Rejoined, Withdrawn
from pagetide.allocator.lease_record import bounds_between

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases need Linux")
MIB = 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


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


# ---- with a broker ------------------------------------------------------------------------------


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


def test_a_lease_below_what_the_weights_need_is_told(folder: Path) -> None:
    with broker_thread(folder / "broker", Numbers()), lease(folder / "broker", high=500) as a:
        a.require(500, "weights")
        with pytest.raises(
            LeaseTooSmall, match="weights need 700 bytes and the lease may hold 500 at most; raise its max by 200"
        ):
            a.require(700, "weights")


def test_a_broker_that_does_not_answer_is_not_waited_for(folder: Path) -> None:
    listener = listen(folder / "broker")
    with pytest.raises(BrokerUnavailable, match="did not answer in time"):
        lease(folder / "broker", timeout_s=0.05)
    listener.close()


def test_a_crowd_before_the_broker_is_waited_out(folder: Path) -> None:
    listener = listen(folder / "broker")
    crowd = []
    with contextlib.suppress(BlockingIOError):
        while True:
            crowd.append(connect(folder / "broker"))
    with pytest.raises(BrokerUnavailable, match="cannot be reached"):
        lease(folder / "broker", timeout_s=0.05)

    def serve() -> None:
        for _ in crowd:
            listener.accept()[0].close()

    thread = threading.Timer(0.05, serve)
    thread.start()
    with pytest.raises(BrokerUnavailable, match="did not answer in time"):  # so it was let in
        lease(folder / "broker", timeout_s=1)
    thread.join()
    for sock in (*crowd, listener):
        sock.close()


def test_no_more_is_held_than_granted(folder: Path) -> None:
    with broker_thread(folder / "broker", Numbers()), lease(folder / "broker", low=100) as a:
        with pytest.raises(GrantExceeded, match="grants 100 bytes, 101 would be held"), changed(a, 101):
            pytest.fail("the body must not run")
        with changed(a, 100):
            pass
        assert a.held_bytes == 100


def test_the_minimum_stays_granted(folder: Path) -> None:
    with broker_thread(folder / "broker", Numbers()) as broker, lease(folder / "broker", low=100) as a:
        a.ask(500)
        assert a.wait_granted(500, 30)
        a.answer_unmapped(0)
        assert a.granted_bytes == 100
        wait_until(lambda: broker.leases()[0].granted_bytes == 100, "the grant to fall")


def test_the_descriptor_tells_when_to_poll(folder: Path) -> None:
    with broker_thread(folder / "broker", Numbers()), lease(folder / "broker") as a:
        assert select.select([a.fileno()], [], [], 0)[0] == []
        a.ask(100)
        assert select.select([a.fileno()], [], [], 30)[0]
        assert a.poll() == (Granted(100),)
        assert select.select([a.fileno()], [], [], 0)[0] == []


# ---- with a false broker ------------------------------------------------------------------------


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


def generation(counter: int, epoch: int = 7) -> wire.OrderGeneration:
    return wire.OrderGeneration(epoch, counter)


@pytest.mark.parametrize(
    "stale",
    [
        wire.GrantMessage(1, generation(99), 900),  # of before this lease
        wire.GrantMessage(1, generation(100), 500),  # what it was registered with, once more
        wire.GrantMessage(1, generation(101, epoch=6), 900),  # of another broker
        wire.GrantMessage(2, generation(101), 900),  # of another lease: the one that ended on this connection
        wire.RecallMessage(1, generation(99), 0, 100),
        wire.WithdrawMessage(1, generation(99)),
        wire.LimitMessage(1, 5, generation(99)),
        wire.LimitMessage(2, 5, generation(101)),
        wire.LimitMessage(2, 5),
    ],
    ids=repr,
)
def test_an_order_for_a_lease_that_has_ended_is_refused(
    folder: Path, false_broker: FalseBroker, stale: wire.FromBroker
) -> None:
    with engine_of(false_broker, folder) as a:
        false_broker.say(stale, wire.GrantMessage(1, generation(102), 600))
        assert a.wait(30) == (Granted(600),)
        assert (a.granted_bytes, a.recall, a.max_bytes, a.generation) == (600, None, None, generation(102))


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
        assert (a.granted_bytes, a.held_bytes, a.recall) == (300, 300, None), (
            "it keeps what it holds, and takes no more"
        )
        thread = threading.Thread(target=false_broker.serve, args=(450,))
        thread.start()
        assert wait_for(a, Rejoined) == Rejoined(450)
        thread.join()
        assert false_broker.request.held_bytes == 300


def test_a_limit_is_an_order_like_the_others(folder: Path, false_broker: FalseBroker) -> None:
    with engine_of(false_broker, folder) as a:
        false_broker.say(wire.LimitMessage(1, 800, generation(103)))
        assert a.wait(30) == (Limited(800),)
        false_broker.say(
            wire.LimitMessage(1, 700, generation(102)), wire.GrantMessage(1, generation(102), 600)
        )  # superseded
        false_broker.say(wire.LimitMessage(1, 900, generation(104)))
        assert a.wait(30) == (Limited(900),)
        assert (a.max_bytes, a.granted_bytes, a.generation) == (900, 500, generation(104))
        a.answer_unmapped(100)
        assert false_broker.hear() == wire.UnmappedMessage(100, generation(104))


def test_a_broker_that_speaks_version_1_is_spoken_to_in_it(folder: Path) -> None:
    broker = FalseBroker(folder / "broker", protocol=1)
    with engine_of(broker, folder) as a:
        assert broker.hellos == [2, 1]
        for max_bytes in (800, 700, 900):  # without a generation the last one counts
            broker.socket.send(frame(b'{"type":"limit","lease_id":1,"max_bytes":%d}' % max_bytes))
            assert a.wait(30) == (Limited(max_bytes),)
        assert (a.max_bytes, a.generation) == (900, generation(100))
        broker.say(wire.GrantMessage(1, generation(101), 600))
        assert a.wait(30) == (Granted(600),)
        broker.socket.close()
        wait_for(a, Lost)
        thread = threading.Thread(target=broker.serve, args=(400,))  # its successor is no newer
        thread.start()
        assert wait_for(a, Rejoined) == Rejoined(400)
        thread.join()
        assert broker.hellos == [2, 1, 2, 1], "the successor might have been"
    broker.close()


def frame(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def test_the_answer_names_the_newest_order_that_was_seen(folder: Path, false_broker: FalseBroker) -> None:
    with engine_of(false_broker, folder) as a:
        false_broker.say(
            wire.RecallMessage(1, generation(103), 400, 1000), wire.RecallMessage(1, generation(105), 200, 1000)
        )
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


def test_a_grant_that_crossed_an_answer_counts_for_both_sides(folder: Path, false_broker: FalseBroker) -> None:
    with engine_of(false_broker, folder) as a:
        a.answer_unmapped(100)
        assert a.granted_bytes == 100
        false_broker.say(
            wire.GrantMessage(1, generation(101), 700), wire.RefusedMessage("refused", "the answer is older")
        )
        granted, denied = a.wait(30)
        assert granted == Granted(700) and isinstance(denied, Denied)
        assert a.granted_bytes == 700


def test_the_record_bounds_what_is_done(folder: Path, false_broker: FalseBroker) -> None:
    with engine_of(false_broker, folder, held_bytes=50) as a:
        bounds = lambda: bounds_between(false_broker.record.read(), false_broker.record.read())  # noqa: E731
        assert bounds() == (50, 50)
        with changed(a, 200):
            assert bounds() == (50, 200)
        assert bounds() == (200, 200)
        a.shift(0, 200)
        with changed(a, 450):
            assert bounds() == (200, 450), "changes overlap"
        assert bounds() == (250, 450)
        a.shift(0, -200)
        with changed(a, 80):
            assert bounds() == (80, 250)
        assert bounds() == (80, 80)
        with pytest.raises(GrantExceeded, match="grants 500 bytes, 501 would be held"):
            a.shift(-10, 421)
        assert bounds() == (80, 80)
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


def test_a_recall_can_be_withdrawn(folder: Path, false_broker: FalseBroker) -> None:
    with engine_of(false_broker, folder) as a:
        false_broker.say(wire.RecallMessage(1, generation(101), 200, 1000))
        assert [type(event) for event in a.wait(30)] == [Recalled]
        false_broker.say(wire.WithdrawMessage(1, generation(102)))
        assert a.wait(30) == (Withdrawn(),)
        assert (a.recall, a.granted_bytes, a.generation) == (None, 500, generation(102))


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
        thread = threading.Thread(target=false_broker.serve)
        thread.start()
        while not a.connected:
            a.wait(1)
        thread.join()
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


def test_a_map_that_runs_while_the_broker_changes_is_bounded_in_the_new_record(
    folder: Path, false_broker: FalseBroker
) -> None:
    with engine_of(false_broker, folder) as a:
        with changed(a, 100):
            pass
        with changed(a, 400):
            false_broker.socket.close()
            wait_for(a, Lost)
            thread = threading.Thread(target=false_broker.serve, args=(400,))
            thread.start()
            wait_for(a, Rejoined)
            thread.join()
            assert false_broker.request.held_bytes == 400
            assert bounds_between(false_broker.record.read(), false_broker.record.read()) == (100, 400)
        assert bounds_between(false_broker.record.read(), false_broker.record.read()) == (400, 400)


@pytest.mark.parametrize("harm", [b"\0\0\0\4null", b"\x7f\0\0\0", wire.to_frame(wire.DoneMessage())], ids=repr)
def test_a_broker_that_makes_no_sense_is_left(folder: Path, false_broker: FalseBroker, harm: bytes) -> None:
    with engine_of(false_broker, folder) as a:
        with changed(a, 300):
            pass
        false_broker.socket.send(harm)
        (lost,) = a.wait(30)
        assert isinstance(lost, Lost) and lost.reason
        assert (a.connected, a.granted_bytes, a.held_bytes) == (False, 300, 300)


@pytest.mark.parametrize(
    ("theirs", "remedy"),
    [(wire.PROTOCOL + 1, "update the engine"), (wire.OLDEST_PROTOCOL - 1, "update the broker: restart vram-monitor")],
)
def test_a_broker_of_another_version_is_refused(
    folder: Path, false_broker: FalseBroker, theirs: int, remedy: str
) -> None:
    def other() -> None:
        false_broker.accept()
        false_broker.say(wire.WelcomeMessage(theirs, 7, 1))

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(ProtocolMismatch, match=f"speaks version {theirs} .* and this process version 2; {remedy}"):
        lease(folder / "broker")
    thread.join()


def test_a_broker_that_never_reads_stops_nothing(folder: Path, false_broker: FalseBroker) -> None:
    a = engine_of(false_broker, folder)
    for number in range(30_000):
        a.ask(number)
    event = wait_for(a, Lost)
    assert "does not read" in event.reason
    a.close()


# ---- successors ---------------------------------------------------------------------------------


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


def test_a_map_that_runs_while_the_broker_dies_is_within_what_the_successor_is_told(folder: Path) -> None:
    path, numbers = folder / "broker", Numbers()
    with broker_thread(path, numbers):
        a = lease(path, low=500)
        change = changed(a, 500)
        change.__enter__()
    wait_for(a, Lost)
    assert a.granted_bytes == 500
    with broker_thread(path, numbers, grace_s=0.0) as successor:
        wait_for(a, Rejoined)
        assert successor.leases()[0].granted_bytes == 500
        change.__exit__(None, None, None)
        wait_until(lambda: successor.leases()[0].held_bytes == 500, "the record")
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


def test_looking_for_a_broker_costs_little_and_ends_with_the_lease(folder: Path) -> None:
    clock = [0.0]
    with broker_thread(folder / "broker", Numbers()):
        a = lease(folder / "broker", clock=lambda: clock[0])
    (folder / "broker").unlink()
    wait_for(a, Lost)
    tries = 0
    original = a._link.connect

    def counted(request: wire.RegisterMessage) -> None:
        nonlocal tries
        tries += 1
        original(request)

    a._link.connect = counted  # type: ignore[method-assign]
    for _ in range(10_000):
        clock[0] += 0.01
        assert a.poll() == ()
    assert 190 <= tries <= 220  # 100 s, twice a second
    a.close()


# ---- processes that hold memory -----------------------------------------------------------------

CAPACITY, HEADROOM = 512 * MIB, 64 * MIB
UUID = test_device(CAPACITY).uuid if sys.platform == "linux" else ""


def broker_process(start: Any, path: Path, externals: str = "") -> Process:
    process: Process = start("broker", path, CAPACITY, HEADROOM, externals)
    return process.start()


def engine_process(
    start: Any, path: Path, name: str, low: int = 0, high: int = 480 * MIB, granule: int = MIB
) -> Process:
    process: Process = start("engine", path, name, low, high, granule, UUID)
    return process


def rows(path: Path) -> dict[str, wire.LeaseView]:
    return {row.name: row for row in BrokerClient(path, timeout_s=60).leases()}


def test_processes_that_ask_at_once_for_the_last_extents_get_them_all_and_no_more(folder: Path) -> None:
    """Eight of them, with real memory; the same 10,000 times over in tests/stress."""
    path = folder / "broker"
    with processes() as start:
        broker_process(start, path)
        engines = [engine_process(start, path, f"e{i}") for i in range(8)]
        bases = sum(engine.start().tell("state")["base"] for engine in engines)
        extents = (CAPACITY - HEADROOM - HEADROOM // 4 - bases) // MIB
        assert extents > 100
        for round_ in range(5):
            for engine in engines:
                engine.write(f"ask {extents * MIB}")
            for engine in engines:
                engine.read()

            def shared() -> bool:
                found = rows(path).values()
                granted = sum(row.granted_bytes for row in found)
                assert granted <= bases + extents * MIB
                alike = all(abs(row.granted_bytes - row.min_bytes - extents * MIB / 8) < MIB for row in found)
                return granted == bases + extents * MIB and alike

            wait_until(shared, f"all extents of round {round_}, fairly shared")
            wait_until(lambda: sum(e.tell("state")["held"] for e in engines) == extents * MIB, "all of them mapped")
            for engine in engines:
                state = engine.tell("state")
                assert resident_bytes(engine.pid) <= state["base"] + state["granted"]
            for engine in engines:
                engine.tell("ask 0")

            def given_back() -> bool:
                for engine in engines:  # one that was granted something just now has to say so again
                    engine.tell("keep 0")
                return sum(row.granted_bytes for row in rows(path).values()) == bases

            wait_until(given_back, "everything to be given back")


def test_a_external_is_made_room_for_and_a_killed_engines_memory_goes_to_the_others(folder: Path) -> None:
    path = folder / "broker"
    with processes() as start:
        external = start("external").start()
        broker_process(start, path, str(external.pid))
        a, b = (engine_process(start, path, name) for name in "ab")
        for engine in (a, b):
            engine.start().tell(f"ask {480 * MIB}")
        wait_until(lambda: min(e.tell("state")["held"] for e in (a, b)) > 100 * MIB, "both to fill the device")
        before = a.tell("state")["held"] + b.tell("state")["held"]
        for taken in (40, 80, 120, 160):
            external.tell(str(taken * MIB))
            wait_until(
                lambda taken=taken: sum(resident_bytes(e.pid) for e in (a, b, external)) <= CAPACITY - HEADROOM,
                f"room after {taken} MiB",
            )
        assert sum(engine.tell("state")["held"] for engine in (a, b)) <= before - 130 * MIB
        held = b.tell("state")["held"]
        a.kill()
        wait_until(lambda: b.tell("state")["held"] > held + 50 * MIB, "the dead one's memory to be granted")
        wait_until(lambda: list(rows(path)) == ["b"], "the dead one to be forgotten")


def test_a_stopped_engine_is_overdue_and_the_others_are_served(folder: Path) -> None:
    path = folder / "broker"
    with processes() as start:
        broker_process(start, path)
        a, b = (engine_process(start, path, name) for name in "ab")
        for engine in (a, b):
            engine.start().tell(f"ask {480 * MIB}")
        wait_until(lambda: min(e.tell("state")["held"] for e in (a, b)) > 100 * MIB, "both to fill the device")
        wait_until(lambda: {row.state for row in rows(path).values()} == {"ok"}, "rest")
        a.signal(signal.SIGSTOP)
        c = engine_process(start, path, "c", low=64 * MIB, high=64 * MIB)
        c.start()
        wait_until(lambda: rows(path)["a"].state == "overdue", "the recall to be overdue")
        granted = rows(path)["a"].granted_bytes
        wait_until(lambda: c.tell("state")["held"] == 64 * MIB, "the third one to be served by the second")
        assert (rows(path)["a"].granted_bytes, rows(path)["a"].state) == (granted, "overdue")
        a.signal(signal.SIGCONT)
        wait_until(lambda: rows(path)["a"].state == "ok", "the recall to be served at last")
        wait_until(lambda: abs(a.tell("state")["held"] - b.tell("state")["held"]) <= MIB, "equal shares again")


def test_a_killed_broker_costs_nothing_but_growth(folder: Path) -> None:
    path = folder / "broker"
    with processes() as start:
        broker = broker_process(start, path)
        a, b = (engine_process(start, path, name) for name in "ab")
        a.start().tell(f"ask {150 * MIB}")
        b.start().tell(f"ask {480 * MIB}")
        wait_until(lambda: a.tell("state")["held"] == 150 * MIB, "a's share")
        wait_until(lambda: b.tell("state")["held"] > 200 * MIB, "b's share")
        held = [engine.tell("state")["held"] for engine in (a, b)]
        broker.kill()
        wait_until(lambda: not any(e.tell("state")["connected"] for e in (a, b)), "both to notice")
        assert [engine.tell("state")["held"] for engine in (a, b)] == held
        broker_process(start, path)
        wait_until(lambda: all(e.tell("state")["connected"] for e in (a, b)), "both to come back")
        assert [engine.tell("state")["held"] for engine in (a, b)] == held
        wait_until(lambda: sorted(row.state for row in rows(path).values()) == ["ok", "ok"], "both to be known")
        a.kill()
        b.tell(f"ask {480 * MIB}")
        wait_until(lambda: b.tell("state")["held"] > held[1] + 100 * MIB, "b to grow again")
