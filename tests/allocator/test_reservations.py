"""Reservations at a broker on a made-up clock, and their clients over real sockets: the queue, times, sizes, owners."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from broker_rig import DEVICE, Bench, Client, Numbers, broker_thread, on_a_bench, short_folder
from monitors import wait_until

import pagetide
from pagetide.allocator import reservation as reservation_module
from pagetide.allocator import wire
from pagetide.allocator.broker import Broker
from pagetide.allocator.broker_client import BrokerClient
from pagetide.allocator.errors import BrokerUnavailable, InvalidLease, LeaseClosed, LeaseRefused, MemoryNotFree
from pagetide.allocator.reservation import Reservation, choose_device, shown
from pagetide.allocator.reservation_service import MAX_RESERVATIONS, ReservationService
from pagetide.monitor.errors import NoSuchDevice
from pagetide.monitor.events import MemoryEvent
from pagetide.monitor.snapshot import DeviceInfo, DeviceKind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases need Linux")

ASKS = wire.ReserveMessage(DEVICE, 300, "train.py", 0, None, 60_000)


async def held(client: Client, **changes: Any) -> int:
    """Reserves what is free; returns the id."""
    (answer,) = await client.say(replace(ASKS, **changes))
    assert isinstance(answer, wire.ReservedMessage) and answer.num_bytes == changes.get("num_bytes", ASKS.num_bytes), answer
    return answer.reservation_id


async def views(bench: Bench) -> dict[str, wire.ReservationView]:
    *rows, _ = await bench.client().say(wire.ListReservationsMessage())
    return {row.name: row for row in rows if isinstance(row, wire.ReservationView)}


def reserved_bytes(bench: Bench) -> int:
    return sum(device.reserved_bytes for device in bench.broker.devices())


@on_a_bench()
async def test_it_is_answered_when_the_bytes_are_back_and_lasts_as_long_as_its_socket(bench: Bench) -> None:
    a = await bench.engine("a")
    await a.say(wire.AskMessage(880, 600_000))
    person = bench.client()
    assert await person.say(ASKS) == []
    (recall,) = await a.hear()
    assert isinstance(recall, wire.RecallMessage) and recall.target_bytes == 580
    assert (await views(bench))["train.py"].waiting_ms == 0
    await bench.tick(1.1)
    (queued,) = await person.hear()
    assert isinstance(queued, wire.QueuedMessage) and "300 bytes of 0 are not free yet" in queued.reason
    await a.say(wire.UnmappedMessage(580, recall.generation))
    (answer,) = await person.hear()
    assert answer == wire.ReservedMessage(300, queued.reservation_id)
    for _ in range(1000):  # 20 s: it does not count as idle
        await bench.tick()
    assert not await person.ends() and reserved_bytes(bench) == 300
    person.close()
    await bench.tick()
    assert reserved_bytes(bench) == 0 and bench.broker.leases()[0].granted_bytes == 880


@on_a_bench()
async def test_it_ends_with_its_time_which_begins_when_the_bytes_are_free(bench: Bench) -> None:
    first, second = bench.client(), bench.client()
    await held(first, num_bytes=800, duration_ms=10_000)
    assert await second.say(replace(ASKS, name="late.py", duration_ms=5_000, wait_ms=20_000)) == []
    await bench.tick(9.9)
    assert (await views(bench))["train.py"].left_ms == 100
    assert (await views(bench))["late.py"].left_ms is None and (await views(bench))["late.py"].waiting_ms == 9900
    await second.hear()
    await bench.tick(0.1)
    assert await first.hear() == [wire.ReservationEndedMessage("its time is over")]
    (answer,) = await second.hear()
    assert isinstance(answer, wire.ReservedMessage) and answer.left_ms == 5_000
    await bench.tick(5.0)
    assert await second.hear() == [wire.ReservationEndedMessage("its time is over")]
    await held(second, duration_ms=4_000)  # the connection may reserve again
    await bench.tick(3.0)
    (resized,) = await second.say(wire.ResizeMessage(400, 0))
    assert isinstance(resized, wire.ReservedMessage) and resized.left_ms == 1_000, "another size gives no more time"
    assert bench.broker._pidfds.keys() == {(await views(bench))["train.py"].reservation_id}


@on_a_bench()
async def test_one_that_waits_too_long_is_told_what_holds_the_memory_and_until_when(bench: Bench) -> None:
    engine = await bench.engine("chat", 100)
    await held(bench.client(), num_bytes=400, duration_ms=7_200_000)
    await held(bench.client(), num_bytes=150, name="comfy")
    bench.numbers.used = 650
    await bench.tick()
    await bench.tick()
    waits, late = bench.client(), bench.client()
    assert await waits.say(replace(ASKS, name="first.py", num_bytes=700, priority=-1)) == []
    assert await late.say(replace(ASKS, num_bytes=30, wait_ms=3000)) == []
    await bench.tick(3.0)
    *_, refused = await late.hear()
    assert isinstance(refused, wire.RefusedMessage) and refused.code == "not_free"
    me = f"(pid {os.getpid()}, "
    for part in (
        "30 bytes of 0 have not become free within 3 s: ",
        f"'train.py' {me}",
        "has reserved 400 bytes for 1 h more",
        f"'comfy' {me}",
        "has reserved 150 bytes until it ends",
        f"'first.py' {me}",
        "waits before it for 700 bytes",
        f"100 bytes are guaranteed to 'chat' {me[:-2]}",
        "external processes hold 650 bytes",
    ):
        assert part in refused.message, (part, refused.message)
    assert not await late.ends(), "it may ask again"
    await bench.tick(57.0)
    assert isinstance((await waits.hear())[-1], wire.RefusedMessage)
    assert reserved_bytes(bench) == 550 and len(await views(bench)) == 2
    engine.close()


@on_a_bench()
async def test_what_is_free_is_given_without_a_wait(bench: Bench) -> None:
    person = bench.client()
    await held(person, wait_ms=0)
    other = bench.client()
    assert await other.say(replace(ASKS, num_bytes=601, wait_ms=0)) == []
    await bench.tick()
    (refused,) = await other.hear()
    assert isinstance(refused, wire.RefusedMessage) and refused.code == "not_free"


@on_a_bench()
async def test_it_grows_when_there_is_room_and_stays_as_it_was_when_there_is_none(bench: Bench) -> None:
    a = await bench.engine("a", 100)
    person = bench.client()
    number = await held(person)
    assert await person.say(wire.ResizeMessage(500, 1000)) == [wire.ReservedMessage(500, number)]
    assert await person.say(wire.ResizeMessage(200, 0)) == [wire.ReservedMessage(200, number)]
    await a.say(wire.AskMessage(700, 600_000))
    assert await person.say(wire.ResizeMessage(801, 1000)) == []
    await bench.tick(1.0)
    (refused,) = await person.hear()
    assert isinstance(refused, wire.RefusedMessage) and "601 bytes of 0 have not become free within 1 s" in refused.message
    row = (await views(bench))["train.py"]
    assert (row.held_bytes, row.wanted_bytes, row.waiting_ms) == (200, 200, None)
    await person.refused(wire.ResizeMessage(901, 1000), "901 bytes cannot be reserved")
    await bench.client().refused(wire.ResizeMessage(1, 1), "holds no reservation")


@on_a_bench()
async def test_a_clock_that_jumps_ends_only_what_has_a_time_and_breaks_nothing(bench: Bench) -> None:
    """The broker's clock is monotonic and jumps in no system that is known; the wall clock it does not read."""
    for_ever, timed, waits = (bench.client() for _ in range(3))
    await held(for_ever, num_bytes=100, name="for ever")
    await held(timed, num_bytes=500, duration_ms=1000)
    assert await waits.say(replace(ASKS, name="waits", num_bytes=700)) == []
    bench.clock.advance(-1e6)
    for _ in range(3):
        await bench.tick()
    seen = await views(bench)
    assert (seen["train.py"].left_ms, seen["waits"].waiting_ms) == (1_000_000_940, 0)
    bench.clock.advance(4e6)
    await bench.tick()
    assert await timed.hear() == [wire.ReservationEndedMessage("its time is over")]
    (given,) = await waits.hear()
    assert isinstance(given, wire.RefusedMessage), "its wait is over too"
    assert set(await views(bench)) == {"for ever"} and reserved_bytes(bench) == 100


@on_a_bench()
async def test_many_that_wait_are_told_a_few_at_a_time(bench: Bench) -> None:
    """The broker serves others meanwhile. Each hears how many wait before it, and at its wait's end that it is over."""
    for number in range(6):
        await held(bench.client(), num_bytes=100 + number, name=f"job {number}")
    crowd = [bench.client() for _ in range(40)]
    for client in crowd:
        assert await client.say(replace(ASKS, num_bytes=500, wait_ms=5000)) == []
    heard: dict[int, list[wire.Message]] = {number: [] for number in range(40)}
    for seconds, kind in ((1.1, wire.QueuedMessage), (3.9, wire.RefusedMessage)):
        for look in range(3):
            await bench.tick(seconds if not look else 0.02)
            for number, client in enumerate(crowd):
                heard[number] += await client.hear()
            assert sum(isinstance(one, kind) for some in heard.values() for one in some) == min(40, 16 * (look + 1))
    first, second, last = (heard[number][0] for number in (0, 1, 39))
    assert all(isinstance(one, wire.QueuedMessage) for one in (first, second, last))
    assert "'job 5'" in first.reason and "2 more have reserved memory" in first.reason and "waits" not in first.reason
    assert second.reason.count("waits before it for 500 bytes") == 1 and "more wait" not in second.reason
    assert "38 more wait before it" in last.reason
    assert len(await views(bench)) == 6 and reserved_bytes(bench) == 615


@on_a_bench()
async def test_a_client_that_does_not_read_its_answers_loses_only_its_own(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagetide.allocator import broker_connection

    good, bad, worse = (bench.client() for _ in range(3))
    await held(good, num_bytes=500)
    for client in (bad, worse):
        assert await client.say(replace(ASKS, num_bytes=450, wait_ms=2000)) == []
    monkeypatch.setattr(broker_connection, "MAX_UNREAD_BYTES", -1)  # whatever is sent is too much
    for _ in range(3):
        await bench.tick(1.1)
    monkeypatch.undo()
    assert await bad.ends() and await worse.ends() and not await good.ends()
    assert set(await views(bench)) == {"train.py"} and reserved_bytes(bench) == 500


@on_a_bench()
async def test_it_ends_when_it_is_released(bench: Bench) -> None:
    person = bench.client()
    await held(person)
    assert await person.say(wire.ReleaseMessage()) == [wire.ReservationEndedMessage("it was released")]
    await bench.tick()
    assert (reserved_bytes(bench), bench.broker._pidfds, await views(bench)) == (0, {}, {})


@on_a_bench()
async def test_it_ends_with_the_process_that_it_is_for(bench: Bench) -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        person = bench.client()
        await held(person, pid=process.pid)
        assert (await views(bench))["train.py"].pid == process.pid
    finally:
        process.kill()
        process.wait()
    answers: list[wire.Message] = []
    while not answers:  # the kernel tells the broker
        answers = await person.hear()
    assert answers == [wire.ReservationEndedMessage("its process has ended")]
    await person.refused(replace(ASKS, pid=process.pid), f"there is no process {process.pid}")
    person.channel.send(replace(ASKS, pid=1))
    (answer,) = await person.hear()
    assert isinstance(answer, wire.ReservedMessage)  # root may name any process


@on_a_bench()
async def test_a_process_of_another_user_is_not_ones_own_to_name(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagetide.allocator import broker_connection

    person = bench.client()
    await person.say()
    (connection,) = bench.broker._connections
    connection.peer = broker_connection.Peer(connection.peer.pid, 4001)
    monkeypatch.setattr(os, "geteuid", lambda: 4000)
    await person.refused(replace(ASKS, pid=1), "process 1 is root's; reserve for a process of your own")
    assert bench.broker._pidfds == {}


@on_a_bench()
async def test_a_command_ends_those_of_its_user_and_as_root_or_the_brokers_user_any(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagetide.allocator import broker_connection

    person = bench.client()
    number = await held(person)
    (connection,) = bench.broker._connections
    connection.peer = broker_connection.Peer(connection.peer.pid, 4001)
    other = bench.client()
    await other.say()
    (*_, stranger) = bench.broker._connections
    monkeypatch.setattr(os, "geteuid", lambda: 4000)
    ends = wire.EndReservationMessage(number)
    await other.refused(
        wire.EndReservationMessage(99), "there is no reservation #99; it may have ended. Those that there are: 'train"
    )
    stranger.peer = broker_connection.Peer(1, 4002)
    await other.refused(ends, f"#{number}) cannot be ended by 4002; only 4001 and root and 4000 may do that")
    assert reserved_bytes(bench) == 300
    for uid in (4001, 4000, 0):
        stranger.peer = broker_connection.Peer(1, uid)
        assert await other.say(ends) == [wire.DoneMessage()]
        (ended,) = await person.hear()
        assert isinstance(ended, wire.ReservationEndedMessage) and "has ended it" in ended.reason
        ends = wire.EndReservationMessage(await held(person))


@on_a_bench()
async def test_the_queue_is_by_priority_and_then_by_time(bench: Bench) -> None:
    await held(bench.client(), num_bytes=800)
    for name, priority in (("a", 1), ("b", 0), ("c", 1)):
        assert await bench.client().say(replace(ASKS, name=name, priority=priority)) == []
        await bench.tick(0.1)
    places = {use.name: use.place for use in reservation_module.reservation_uses(bench.broker.reservations())}
    assert places == {"train.py": None, "a": 2, "b": 1, "c": 3}


@on_a_bench()
async def test_a_renewed_one_holds_at_once_only_while_a_successor_waits_for_those_that_return(bench: Bench) -> None:
    table = bench.broker._table
    bench.numbers.used = 300  # of its process
    await bench.tick()
    table.decide_from_ns = bench.clock() + 2_000_000_000
    late = bench.client()
    assert await late.say(replace(ASKS, name="new.py", num_bytes=650)) == []
    await held(bench.client(), renewed=True, num_bytes=400)
    for _ in range(200):
        await bench.tick()
    assert {name: row.held_bytes for name, row in (await views(bench)).items()} == {"new.py": 0, "train.py": 400}
    assert await bench.client().say(replace(ASKS, name="liar", num_bytes=700, renewed=True)) == []


# ---- clients ---------------------------------------------------------------------------------------


@pytest.fixture(name="path")
def path_fixture() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder / "broker"


def reserved(broker: Broker) -> int:
    return sum(device.reserved_bytes for device in broker.devices())


def test_a_client_waits_grows_shrinks_and_ends(path: Path) -> None:
    told: list[str] = []
    with broker_thread(path, Numbers()) as broker:
        with Reservation.granted(path, DEVICE, 300, name="x" * 80, duration_s=600) as lease:
            assert (lease.num_bytes, lease.kept, lease.device_uuid) == (300, True, DEVICE)
            assert lease.left_s is not None and 500 < lease.left_s <= 600
            lease.resize("500 B", wait=5)
            assert (lease.num_bytes, reserved(broker)) == (500, 500)
            said = r"401 bytes of 0 have not become free within 1 s: .*has reserved 500 bytes for"
            with pytest.raises(MemoryNotFree, match=said):
                Reservation.granted(path, DEVICE, 401, wait_s=1.2, on_queued=told.append)
            assert len(told) == 1 and "401 bytes of 0 are not free yet" in told[0]
            other = Reservation.granted(path, DEVICE, 400)
            with pytest.raises(MemoryNotFree):
                lease.resize(900, wait=0)
            assert lease.num_bytes == 500 and lease.kept
            with pytest.raises(LeaseRefused, match="901 bytes cannot be reserved"):
                lease.resize(901)
            lease.resize(100)
            assert [view.held_bytes for view in BrokerClient(path).reservations()] == [100, 400]
        assert lease.ended and lease.trouble == "it was released"
        with pytest.raises(LeaseClosed, match="has ended: it was released; reserve again"):
            lease.resize(5)
        lease.close()
        lease.poll()
        other.close()
        wait_until(lambda: BrokerClient(path).reservations() == (), "nothing to be left")
        for wrong in (
            {"duration_s": 0.0},
            {"duration_s": 31 * 86400.0},
            {"name": "\n" * 3, "priority": 2000},
            {"num_bytes": 0},
        ):
            with pytest.raises(InvalidLease):
                Reservation.ask(path, DEVICE, **({"num_bytes": 1} | wrong))  # type: ignore[arg-type]


def test_an_interrupted_resize_is_called_off(path: Path) -> None:
    def interrupt(reason: str) -> None:
        raise KeyboardInterrupt

    with broker_thread(path, Numbers()), Reservation.granted(path, DEVICE, 300) as lease:
        other = Reservation.granted(path, DEVICE, 400)
        lease.keep()
        wait, lease.wait_answered = lease.wait_answered, lambda wait_s: wait(wait_s, interrupt)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            lease.resize(900)
        lease.wait_answered = wait  # type: ignore[method-assign]
        wait_until(lambda: [one.wanted_bytes for one in BrokerClient(path).reservations()] == [300, 400])
        other.close()
        wait_until(lambda: [one.held_bytes for one in BrokerClient(path).reservations()] == [300])
        lease.resize(200)
        assert lease.num_bytes == 200


def test_sizes_that_several_threads_want_are_asked_for_one_after_the_other(path: Path) -> None:
    with broker_thread(path, Numbers()), Reservation.granted(path, DEVICE, 300) as lease, ThreadPoolExecutor(4) as threads:
        lease.keep()
        sizes = [*range(1, 40)]
        assert list(threads.map(lease.resize, sizes)) == [None] * len(sizes)
        assert lease.num_bytes in sizes


def test_its_time_ends_for_the_client_too(path: Path) -> None:
    told: list[MemoryEvent] = []
    with broker_thread(path, Numbers(), tell=told.append), Reservation.granted(path, DEVICE, 300, duration_s=0.05) as lease:
        wait_until(lambda: lease.poll() or lease.ended, "its end")
        assert not lease.kept and lease.trouble == "its time is over"
        wait_until(lambda: [event.reason for event in told] == [None, "its time is over"])


def test_it_is_made_again_at_the_next_broker(path: Path) -> None:
    with contextlib.ExitStack() as stack:
        with broker_thread(path, Numbers()):
            lease = stack.enter_context(Reservation.granted(path, DEVICE, 300, duration_s=600))
            lease.poll()
            assert lease.kept and lease.trouble is None and lease.fileno() is not None
        lease.poll()
        assert not lease.kept and "it closed the connection" in str(lease.trouble) and lease.fileno() is None
        with pytest.raises(BrokerUnavailable, match="it closed the connection"):
            lease.resize(1)
        now = [lease._clock()]
        lease._clock = lambda: now[0]
        lease.poll()
        assert "it closed the connection" in str(lease.trouble), "not looked for at once again"
        now[0] += 10
        lease.poll()
        assert "has ended" in str(lease.trouble)
        now[0] += 10
        path.unlink()  # as if no broker had been there: it refuses at once
        with broker_thread(path, Numbers(capacity=200)):
            wait_until(lambda: lease.poll() or "cannot be reserved" in str(lease.trouble), "the refusal")
            assert not lease.kept and not lease.ended
        now[0] += 10
        with broker_thread(path, Numbers()) as broker:
            wait_until(lambda: lease.poll() or lease.kept, "the same at the successor")
            assert lease.trouble is None and reserved(broker) == 300
            (view,) = BrokerClient(path).reservations()
            assert view.left_ms is not None and view.left_ms <= 571_000, "what is left of its time"
            lease.close()
            wait_until(lambda: BrokerClient(path).reservations() == (), "its end")
        now[0] += 1000
        lease.poll()
        assert lease.ended
    with broker_thread(path, Numbers()):
        lease = Reservation.granted(path, DEVICE, 300, duration_s=600)
    lease.poll()
    now = [lease._clock()]
    lease._clock = lambda: now[0]
    now[0] += 601
    lease.poll()
    assert (lease.ended, lease.trouble) == (True, "its time is over"), "without a broker too"


def test_one_that_was_never_granted_is_not_asked_for_again(path: Path) -> None:
    with broker_thread(path, Numbers()):
        lease = Reservation.ask(path, DEVICE, 901)
        with pytest.raises(LeaseRefused, match="cannot be reserved"):
            lease.wait_answered(5)
        lease._clock = lambda: time.monotonic() + 100
        lease.poll()
        assert lease.ended and BrokerClient(path).reservations() == ()


def test_a_fork_ends_nothing_and_keeps_nothing(path: Path) -> None:
    """The child has a copy of the socket, which must neither release the memory nor keep it after the parent's end."""
    with broker_thread(path, Numbers()) as broker, Reservation.granted(path, DEVICE, 300) as lease:
        lease.keep()
        child = multiprocessing.get_context("fork").Process(target=lambda: (lease.close(), time.sleep(600)))
        child.start()
        try:
            with pytest.raises(MemoryNotFree):
                Reservation.granted(path, DEVICE, 700, wait_s=0.1)
            assert reserved(broker) == 300 and lease.kept
            lease.close()
            wait_until(lambda: BrokerClient(path).reservations() == (), "its end")
        finally:
            child.kill()
            child.join()


def test_the_public_call_finds_the_monitor_and_keeps_the_reservation(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    class Watched:
        directory = type("directory", (), {"socket": path})

        def devices(self) -> tuple[DeviceInfo, ...]:
            return (DeviceInfo("HOST-1", "host", DeviceKind.HOST), DeviceInfo(DEVICE, "0", DeviceKind.GPU))

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(reservation_module, "watch", Watched)
    monkeypatch.setattr(sys, "argv", ["/x/train\x1b.py"])
    with broker_thread(path, Numbers()), pagetide.reserve("300B", duration="2h", priority=-1) as lease:
        assert isinstance(lease, pagetide.Reservation)
        (view,) = BrokerClient(path).reservations()
        assert (view.name, view.priority, view.held_bytes, view.pid) == ("train_.py", -1, 300, os.getpid())
    wait_until(lambda: closed == [True], "the end of the watch")
    with broker_thread(path, Numbers()) as broker:  # the thread asks the successor
        with Reservation.granted(path, DEVICE, 500), pytest.raises(pagetide.MemoryNotFree):
            pagetide.reserve(500, wait=0.01)
        assert len(closed) == 2
        lease = pagetide.reserve(300, device=0)
    wait_until(lambda: not lease.kept, "the loss to be noticed")
    with broker_thread(path, Numbers()) as broker:
        wait_until(lambda: lease.kept and reserved(broker) == 300, "the same at the successor")
        lease.close()
    with pytest.raises(NoSuchDevice):
        pagetide.reserve(300, device=7)
    for wrong in ({"size": "much"}, {"size": 1, "duration": "long"}, {"size": 1, "wait": -1}):
        with pytest.raises(ValueError, match="cannot read"):
            pagetide.reserve(**wrong)  # type: ignore[arg-type]


def test_names_and_devices() -> None:
    assert shown("") == "a program" and shown("a\nb" * 40) == ("a_b" * 40)[-80:]
    gpu, host = DeviceInfo("GPU-1", "0", DeviceKind.GPU), DeviceInfo("HOST-1", "host", DeviceKind.HOST)
    assert choose_device([host, gpu], None) is gpu and choose_device([host], None) is host
    assert choose_device([host, gpu], "host") is choose_device([host, gpu], "HOST-1") is host


# ---- over HTTP, without the HTTP --------------------------------------------------------------------


@pytest.fixture(name="service")
def service_fixture(path: Path) -> Iterator[ReservationService]:
    with broker_thread(path, numbers := Numbers()):
        service = ReservationService(path, numbers.devices)
        yield service
        service.close()
        wait_until(lambda: BrokerClient(path).reservations() == (), "nothing to be left")


def ok(answer: tuple[int, object], status: int) -> Any:
    assert answer[0] == status, answer
    return answer[1]


def test_the_life_of_a_reservation_over_http(service: ReservationService, path: Path) -> None:
    assert ok(service.answer("GET", "/reservations", {}), 200) == []
    made = ok(service.answer("POST", "/reservations", {"size": "300B", "time": "2h", "name": "comfy", "priority": 3}), 201)
    assert (made["state"], made["held_bytes"], made["name"], made["priority"]) == ("held", 300, "comfy", 3)
    assert 7190 < made["left_seconds"] <= 7200
    one = f"/reservations/{made['id']}"
    assert ok(service.answer("GET", one, {}), 200)["id"] == made["id"]
    assert ok(service.answer("PATCH", one, {"size": 600}), 200)["held_bytes"] == 600
    held = ok(service.answer("POST", "/reservations", {"size": 400, "time": 60, "wait": 0}), 409)
    assert "has reserved 600 bytes for 1 h more" in held["error"] and [row["id"] for row in held["reservations"]] == [
        made["id"]
    ]
    assert ok(service.answer("PATCH", one, {"size": 100}), 200)["held_bytes"] == 100
    assert ok(service.answer("DELETE", one, {}), 200) == {"id": made["id"], "state": "ended"}
    wait_until(lambda: BrokerClient(path).reservations() == (), "its end")
    with Reservation.granted(path, DEVICE, 5) as elsewhere:
        ok(service.answer("DELETE", f"/reservations/{elsewhere.reservation_id}", {}), 200)
        wait_until(lambda: elsewhere.poll() or elsewhere.ended, "its end")
    for method in ("GET", "PATCH", "DELETE"):
        assert "may have ended" in ok(service.answer(method, one, {"size": 1}), 404)["error"]


def test_one_that_waits_is_told_so_and_is_there_later(
    service: ReservationService, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagetide.allocator import reservation_service

    monkeypatch.setattr(reservation_service, "ANSWER_WITHIN_S", 1.2)
    first = Reservation.granted(path, DEVICE, 700)
    made = ok(service.answer("POST", "/reservations", {"size": 400, "time": "1h", "wait": "10min"}), 202)
    assert (made["state"], made["held_bytes"]) == ("waiting", 0) and "has reserved 700 bytes" in made["reason"]
    row = f"/reservations/{made['id']}"
    assert "still waits" in ok(service.answer("PATCH", row, {"size": 100}), 409)["error"]
    first.close()
    wait_until(lambda: ok(service.answer("GET", row, {}), 200)["state"] == "held", "its turn")


def test_a_request_that_is_none_gets_a_sentence_and_leaves_nothing(service: ReservationService, path: Path) -> None:
    good = {"size": 1, "time": 60}
    for change, said in (
        ({"size": "much"}, "cannot read 'much' as an amount"),
        ({"size": None}, "cannot read None as an amount"),
        ({"size": [1]}, "cannot read"),
        ({"size": 1.5}, "cannot read"),
        ({"size": 901}, "901 bytes cannot be reserved"),
        ({"size": 10**400}, "more memory than there is"),
        ({"time": 0}, "more than 0 seconds and at most 30 days"),
        ({"time": "31d"}, "more than 0 seconds and at most 30 days"),
        ({"time": 10**400}, "as a time"),
        ({"time": True}, "as a time"),
        ({"wait": -1}, "as a time"),
        ({"wait": float("nan")}, "as a time"),
        ({"device": "7"}, "there is no device 7; those that exist: 0"),
        ({"device": {}}, "there is no device"),
        ({"name": 7}, "reserve.name must be"),
        ({"name": "\x1b[2J"}, "reserve.name must be"),
        ({"priority": 5000}, "reserve.priority must be"),
        ({"priority": "high"}, "reserve.priority must be"),
        ({"pid": -1}, "reserve.pid must be"),
        ({"pid": 2**40}, "reserve.pid must be"),
        ({"pid": 2**31 - 1}, "there is no process"),
        ({"more": 1}, "there is no field more; those that exist: device, name, pid, priority, size, time, wait"),
    ):
        assert said in ok(service.answer("POST", "/reservations", good | change), 400)["error"], change
    assert "the body lacks size, time" in ok(service.answer("POST", "/reservations", {}), 400)["error"]
    for method, where in (
        ("PUT", "/reservations"), ("DELETE", "/reservations"), ("GET", "/reservations/"), ("GET", "/reservations/x"),
        ("POST", "/reservations/1"), ("GET", "/reservations/" + "9" * 30), ("GET", "/reservations/1/2"),
    ):  # fmt: skip
        ok(service.answer(method, where, good), 404)
    assert BrokerClient(path).reservations() == ()


def test_what_has_ended_keeps_no_descriptor(service: ReservationService) -> None:
    ok(service.answer("GET", "/reservations", {}), 200)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(8):
        ok(service.answer("POST", "/reservations", {"size": 1, "time": "50ms"}), 201)
    wait_until(lambda: service.answer("GET", "/reservations", {}) == (200, []), "their end")
    wait_until(lambda: service.answer("GET", "/x", {})[0] == 404 and len(os.listdir("/proc/self/fd")) <= before, "no leak")


def test_a_flood_over_http_is_bounded_and_ends(service: ReservationService, path: Path) -> None:
    answers = [service.answer("POST", "/reservations", {"size": 1, "time": "1h"})[0] for _ in range(MAX_RESERVATIONS + 3)]
    assert answers == [201] * MAX_RESERVATIONS + [429] * 3
    some = BrokerClient(path).reservations()[0]
    ok(service.answer("DELETE", f"/reservations/{some.reservation_id}", {}), 200)
    ok(service.answer("POST", "/reservations", {"size": 1, "time": "1h"}), 201)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        ok(service.answer("POST", "/reservations", {"size": 901, "time": "1h"}), 429)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_without_a_broker_it_says_so(tmp_path: Path) -> None:
    service = ReservationService(tmp_path / "none", lambda: [DeviceInfo(DEVICE, "0", DeviceKind.GPU)])
    assert "no broker listens" in ok(service.answer("POST", "/reservations", {"size": 1, "time": 1}), 503)["error"]
    assert "no broker listens" in ok(service.answer("GET", "/reservations", {}), 503)["error"]
