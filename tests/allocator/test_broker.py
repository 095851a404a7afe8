"""The broker on a made-up clock: its answers, its ticks, death, grace, and clients who mean it harm. Real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from broker_rig import DEVICE, Bench, Numbers, broker_thread, on_a_bench
from monitors import wait_until

from pagetide.allocator import broker as broker_module
from pagetide.allocator import broker_connection, wire
from pagetide.allocator.broker import Broker, BrokerThread
from pagetide.allocator.broker_client import BrokerClient, Channel
from pagetide.allocator.broker_socket import connect, listen
from pagetide.allocator.errors import BrokerUnavailable, LeaseRefused, UnknownEngine
from pagetide.allocator.lease_record import LeaseRecordWriter
from pagetide.allocator.lease_table import LeaseTable
from pagetide.common.frames import frame

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases need Linux")


def view(bench: Bench, name: str) -> wire.LeaseView:
    (found,) = [row for row in bench.broker.leases() if row.name == name]
    return found


@on_a_bench()
async def test_a_lease_is_granted_asked_recalled_and_released(bench: Bench) -> None:
    a = await bench.engine("a", 100)
    assert view(bench, "a").granted_bytes == 100
    (grant,) = await a.say(wire.AskMessage(2000, 60_000))
    assert grant == wire.GrantMessage(a.lease_id, grant.generation, 880)
    b = await bench.engine("b", 60)
    (recall,) = await a.hear()
    assert isinstance(recall, wire.RecallMessage)
    assert (recall.target_bytes, recall.deadline_ms) == (840, 1000)
    assert recall.generation > grant.generation
    assert await a.say(wire.UnmappedMessage(840, recall.generation)) == []
    assert [type(message) for message in await b.hear()] == [wire.GrantMessage]
    assert view(bench, "b").granted_bytes == 60
    await a.say(wire.ReleaseMessage())
    assert [row.name for row in bench.broker.leases() if row.state != "reaping"] == ["b"]
    await bench.tick()
    assert [row.name for row in bench.broker.leases()] == ["b"]
    assert bench.engines[-1] == {os.getpid()}, "the source of numbers is told whose memory is an engine's"
    await b.say(wire.ReleaseMessage())
    await bench.tick()
    assert bench.engines[-1] == frozenset()


@on_a_bench()
async def test_the_view_tells_all_there_is(bench: Bench) -> None:
    a = await bench.engine("a", 100, 700, weight=2.5, priority=3, granule_bytes=50)
    await a.say(wire.AskMessage(500, 60_000), wire.ReportMessage({"weights": 80, "kv": 20}, 6, 4, 2))
    writer = LeaseRecordWriter(os.dup(a.fd))
    writer.set(100, 200)
    await bench.tick()
    import pwd

    assert bench.broker.leases() == (
        wire.LeaseView(
            a.lease_id, "a", os.getpid(), pwd.getpwuid(os.getuid()).pw_name, DEVICE, 100, 700, 2.5, 3,
            granted_bytes=500, held_bytes=200, held={"weights": 80, "kv": 20}, free_bytes=10, asked_bytes=500,
            state="ok", recall_target_bytes=None, recall_age_ms=None, kept_bytes=4, num_waiting=2,
        ),
    )  # fmt: skip
    (device,) = bench.broker.devices()
    assert (device.uuid, device.capacity_bytes, device.headroom_bytes) == (DEVICE, 1000, 100)
    assert (device.granted_bytes, device.foreign_bytes, device.reserved_bytes) == (500, 0, 0)
    await bench.tick(60)
    assert view(bench, "a").asked_bytes is None


@on_a_bench()
async def test_a_device_that_says_nothing_is_not_leased(bench: Bench) -> None:
    bench.numbers.capacity = None
    await bench.client().refused(
        wire.RegisterMessage("a", DEVICE, 0, None, 1.0, 0, 10, 0), "does not say how much memory it has"
    )


@on_a_bench()
async def test_one_connection_has_one_lease(bench: Bench) -> None:
    a = await bench.engine("a")
    await a.refused(wire.RegisterMessage("b", DEVICE, 0, None, 1.0, 0, 10, 0), "holds a lease or a reservation already")
    for message in (
        wire.AskMessage(1, 1),
        wire.ReportMessage({}, 0),
        wire.UnmappedMessage(0, wire.OrderGeneration(0, 0)),
        wire.ReleaseMessage(),
    ):
        await bench.client().refused(message, "holds no lease")


@on_a_bench()
async def test_an_answer_that_crossed_a_new_grant_is_refused(bench: Bench) -> None:
    """The engine goes down to 100 while it is granted 500: if both counted, 400 bytes would be granted twice."""
    a = await bench.engine("a")
    (grant,) = await a.say(wire.AskMessage(100, 60_000))
    assert isinstance(grant, wire.GrantMessage)
    (newer,) = await a.say(wire.AskMessage(500, 60_000))
    assert isinstance(newer, wire.GrantMessage)
    for stale in (grant.generation, wire.OrderGeneration(newer.generation.epoch + 1, newer.generation.counter)):
        await a.refused(wire.UnmappedMessage(100, stale), "older than the newest grant")
        assert view(bench, "a").granted_bytes == 500
    assert await a.say(wire.AskMessage(1, 1), wire.UnmappedMessage(100, newer.generation)) == []
    assert view(bench, "a").granted_bytes == 100


@on_a_bench()
async def test_what_an_engine_unmaps_is_granted_without_a_new_measurement(bench: Bench) -> None:
    a = await bench.engine("a", held_bytes=880)
    bench.numbers.used = 880
    await bench.tick()
    b = await bench.engine("b")
    await b.say(wire.AskMessage(300, 60_000))
    writer = LeaseRecordWriter(os.dup(a.fd))
    writer.set(500, 500)
    await a.say(wire.UnmappedMessage(500, a.generation))
    assert [message.granted_bytes for message in await b.hear() if isinstance(message, wire.GrantMessage)] == [300]


@on_a_bench()
async def test_a_measurement_from_before_a_lease_says_nothing_about_it(bench: Bench) -> None:
    """What is used may all be an external process's: on a test device the engine is counted from now on."""
    a = await bench.engine("a")
    bench.numbers.used = 300
    await bench.tick()
    bench.numbers.age_ns = 10_000_000
    bench.clock.advance(0.015)
    await bench.engine("b", held_bytes=300)
    await a.say(wire.AskMessage(880, 600_000))
    assert view(bench, "a").granted_bytes == 280
    await bench.tick()
    assert view(bench, "a").granted_bytes == 580  # it was b's


@on_a_bench()
async def test_an_overdue_recall_is_seen_and_others_are_served(bench: Bench) -> None:
    a = await bench.engine("a", 100)
    await a.say(wire.AskMessage(600, 600_000))
    b = await bench.engine("b", 100)
    await b.say(wire.AskMessage(800, 600_000))
    (recall,) = await a.hear()
    assert isinstance(recall, wire.RecallMessage)
    await bench.tick(0.7)
    assert (view(bench, "a").state, view(bench, "a").recall_age_ms) == ("recalling", 700)
    await bench.tick(0.4)
    assert view(bench, "a").state == "overdue"
    assert view(bench, "a").recall_target_bytes == recall.target_bytes
    c = await bench.engine("c", 20)
    await c.hear()
    assert view(bench, "c").granted_bytes == 20
    await a.say(wire.UnmappedMessage(recall.target_bytes, recall.generation))
    assert view(bench, "a").state != "overdue"


@on_a_bench()
async def test_an_overdue_recall_is_logged_once_and_withdrawn_when_nobody_needs_it(bench: Bench) -> None:
    a = await bench.engine("a", 100)
    await a.say(wire.AskMessage(800, 600_000))
    b = await bench.engine("b", 500)
    assert [type(message) for message in await a.hear()] == [wire.RecallMessage]
    with logged() as lines:
        for _ in range(10):
            await bench.tick(1.5)
    assert len([line for line in lines if "'a' (pid" in line and "is overdue" in line]) == 1
    assert view(bench, "a").state == "overdue"
    await b.say(wire.ReleaseMessage())
    await bench.tick()
    (withdrawn,) = await a.hear()
    assert isinstance(withdrawn, wire.WithdrawMessage) and withdrawn.lease_id == a.lease_id
    assert (view(bench, "a").state, view(bench, "a").recall_target_bytes) == ("ok", None)
    await a.say(wire.AskMessage(880, 600_000))
    await bench.tick(3.0)
    assert view(bench, "a").granted_bytes == 880, "it is an engine like any other again"


@on_a_bench(grace_s=0.0)
async def test_events_tell_refusals_recalls_failed_ones_limits_reservations_and_ends(bench: Bench) -> None:
    a = await bench.engine("a", 100)
    await a.say(wire.AskMessage(600, 600_000))
    poor = bench.client()
    await poor.refused(wire.RegisterMessage("poor", DEVICE, 950, None, 1.0, 0, 10, 0), "Lower the min")
    nowhere = bench.client()
    await nowhere.refused(wire.ReserveMessage("GPU-none", 5), "is not watched")
    await bench.client().say(wire.SetLimitMessage("a", 700))
    b = await bench.engine("b", 400)
    await bench.tick(1.5)
    shell = bench.client()
    await shell.say(wire.ReserveMessage(DEVICE, 1, "train.py"))
    shell.close()
    b.close()
    await bench.tick()
    for _ in range(3):  # what b had comes back
        await bench.tick(0.5)
    program = bench.client()
    await program.say(wire.ReserveMessage(DEVICE, 2, "train.py"))
    for size in (5, 5, 1):
        await program.say(wire.ResizeMessage(size, 0))
    await bench.tick()
    await a.say(wire.ReleaseMessage())
    told = [(event.kind.value, event.engine, event.bytes, event.device) for event in bench.events]
    assert told[:3] == [("refused", "poor", 950, "0"), ("refused", None, 5, None), ("limited", "a", 700, "0")]
    kinds = [(kind, engine) for kind, engine, _, _ in told]
    assert kinds[3:5] == [("recalled", "a"), ("overdue", "a")] and kinds.count(("overdue", "a")) == 1
    assert ("died", "b") in kinds and kinds[-1] == ("ended", "a") and ("released", None, 0, "0") in told
    reserved = [(event.kind.value, event.bytes) for event in bench.events if event.command == "train.py" and event.bytes]
    assert reserved[-3:] == [("reserved", 2), ("reserved", 3), ("released", 4)]
    recalled = bench.events[3]
    assert recalled.bytes == 100 and recalled.reason == "for minimums, reservations and headroom"
    assert "Lower the min to" in (bench.events[0].reason or "")
    assert {event.pid for event in bench.events} == {os.getpid()}
    died = next(event for event in bench.events if event.kind == "died")
    assert died.reason is not None and died.device_uuid == DEVICE


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Warnings of the broker."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pagetide.allocator")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@on_a_bench()
async def test_a_cut_lease_is_reaped_as_its_memory_is_measured_back(bench: Bench) -> None:
    a = await bench.engine("a", held_bytes=600)
    b = await bench.engine("b")
    bench.numbers.used = 600
    await bench.tick()
    await b.say(wire.AskMessage(880, 600_000))
    assert view(bench, "b").granted_bytes == 280
    a.close()
    await bench.pump()
    await bench.tick()
    assert (view(bench, "a").state, view(bench, "a").granted_bytes) == ("reaping", 600)
    bench.numbers.used = 250
    await bench.tick()
    assert view(bench, "a").granted_bytes == 600, "its process lives, and may not have seen yet that it was cut"
    await bench.tick(1.0)
    assert view(bench, "a").granted_bytes == 250
    bench.numbers.used = 0
    await bench.tick()
    assert view(bench, "b").granted_bytes == 880
    assert [row.name for row in bench.broker.leases()] == ["b"]


@on_a_bench()
async def test_an_engine_that_was_cut_off_goes_on_with_what_it_holds(bench: Bench) -> None:
    a = await bench.engine("a", 200, held_bytes=600)
    bench.numbers.used = 600
    await bench.tick()
    a.close()
    await bench.pump()
    assert view(bench, "a").state == "reaping"
    again = await bench.engine("a", 200, held_bytes=500)
    assert [(row.name, row.state, row.granted_bytes) for row in bench.broker.leases()] == [("a", "ok", 500)]
    assert again.lease_id != a.lease_id


@on_a_bench()
async def test_an_engine_may_be_back_before_its_old_sockets_end_is_read(bench: Bench) -> None:
    old = await bench.engine("a", 800, held_bytes=800)
    new = Channel(bench.path)
    await bench.pump()
    new.send(wire.RegisterMessage("a", DEVICE, 800, None, 1.0, 0, 10, 800))  # read first, since it came first
    old.close()
    await bench.pump()
    assert [type(message) for message in new.receive()] == [wire.RegisteredMessage]
    assert [(row.state, row.granted_bytes) for row in bench.broker.leases()] == [("ok", 800)]
    new.close()


@on_a_bench()
async def test_a_released_lease_is_not_gone_on_with(bench: Bench) -> None:
    a = await bench.engine("a", held_bytes=300)
    bench.numbers.used = 300
    await bench.tick()
    await a.say(wire.ReleaseMessage())
    await a.register("a")
    assert sorted((row.state, row.granted_bytes) for row in bench.broker.leases()) == [("ok", 0), ("reaping", 300)]


@on_a_bench()
async def test_a_process_whose_socket_a_child_holds_open_is_dead_all_the_same(bench: Bench) -> None:
    program = f"""
import os, sys, time
from pathlib import Path
from pagetide.allocator.lease import Lease
lease = Lease.register(Path({str(bench.path)!r}), name="parent", device_uuid={DEVICE!r}, min_bytes=0, granule_bytes=10)
if os.fork() == 0:
    print("forked", flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.readline()
os._exit(1)
"""
    with subprocess.Popen([sys.executable, "-P", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"forked\n"
        assert view(bench, "parent").state == "ok"
        process.kill()
        for _ in range(2000):
            await asyncio.sleep(0.005)
            bench.broker.tick()
            if not bench.broker.leases():
                break
        assert bench.broker.leases() == ()
        process.communicate()  # closes its input, which ends the child


def test_a_successor_grants_nothing_until_engines_had_time_to_come_back(folder: Path) -> None:
    path = folder / "broker"
    listen(path).close()  # a broker that was killed leaves its socket's name behind

    async def within() -> None:
        async with Bench(path, grace_s=2.0) as bench:
            bench.numbers.used = 400  # two engines that are not back yet, or external processes: nobody knows
            late = await bench.engine("new", 100)
            await late.say(wire.AskMessage(800, 600_000))
            await bench.tick()
            assert view(bench, "new").granted_bytes == 0
            await bench.engine("back", 50, held_bytes=400)
            await bench.tick(1.9)
            assert (view(bench, "new").granted_bytes, view(bench, "back").granted_bytes) == (0, 400)
            await bench.tick(0.1)
            assert view(bench, "new").granted_bytes == 480
            for _ in range(200):
                await bench.tick()
            assert bench.broker.devices()[0].foreign_bytes == 0

    asyncio.run(within())


def test_a_successor_says_that_limits_are_forgotten(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = folder / "broker"
    caplog.set_level(logging.INFO)

    async def within() -> None:
        async with Bench(path) as bench:
            await bench.tick()

    asyncio.run(within())
    assert "Limits" not in caplog.text
    listen(path).close()
    asyncio.run(within())
    assert "Limits set there are lost: set them again (vram-monitor limit)" in caplog.text


def test_a_broker_that_ends_leaves_a_sign_only_if_engines_will_look_for_it(folder: Path) -> None:
    path = folder / "broker"

    async def within(leave: bool) -> None:
        async with Bench(path) as bench:
            client = await bench.engine("a")
            if leave:
                await client.say(wire.ReleaseMessage())
            await bench.broker.close()

    asyncio.run(within(True))
    assert list(folder.iterdir()) == []
    asyncio.run(within(False))
    assert list(folder.iterdir()) == [path]

    async def successor() -> bool:
        async with Bench(path) as bench:
            client = await bench.engine("b", 100)
            granted = view(bench, "b").granted_bytes
            client.close()
        return granted == 100

    assert not asyncio.run(successor())  # it waits
    assert list(folder.iterdir()) == []
    assert asyncio.run(successor())


def test_the_socket_is_for_its_owner_or_for_a_group(folder: Path) -> None:
    for gid, mode in ((None, 0o600), (os.getgid(), 0o660)):
        listener = listen(folder / "broker", gid=gid)
        found = (folder / "broker").stat()
        assert stat.S_ISSOCK(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == mode
        assert gid is None or found.st_gid == gid
        connect(folder / "broker").close()
        listener.close()
    assert [entry.name for entry in folder.iterdir()] == ["broker"]


def test_a_path_longer_than_an_address_is_served(folder: Path) -> None:
    deep = folder / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    with broker_thread(deep / "broker", Numbers()):
        assert BrokerClient(deep / "broker").leases() == ()
    assert list(deep.iterdir()) == []


def test_a_broker_that_cannot_listen_says_so(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        BrokerThread(Broker(LeaseTable(Numbers()), folder / "no such folder" / "broker")).start()


@on_a_bench()
async def test_people_list_limit_and_recall(bench: Bench) -> None:
    a = await bench.engine("a", 100, 800)
    await a.say(wire.AskMessage(800, 600_000))
    LeaseRecordWriter(os.dup(a.fd)).set(800, 800)
    bench.numbers.used = 800
    await bench.tick()
    person = bench.client()
    row, done = await person.say(wire.ListLeasesMessage())
    assert row == view(bench, "a") and done == wire.DoneMessage()
    assert await person.say(wire.SetLimitMessage("a", 500)) == [wire.LimitSetMessage(500, 300)]
    (limit,) = await a.hear()
    assert isinstance(limit, wire.LimitMessage) and limit.max_bytes == 500
    assert await person.say(wire.RecallBytesMessage(str(os.getpid()), 200)) == [wire.RecallingMessage(600, 1000)]
    (recall,) = await a.hear()
    assert isinstance(recall, wire.RecallMessage) and recall.target_bytes == 600


@on_a_bench()
async def test_a_limit_is_an_order(bench: Bench) -> None:
    a = await bench.engine("a", 100, 800)
    (grant,) = await a.say(wire.AskMessage(800, 600_000))
    person = bench.client()
    await person.say(wire.SetLimitMessage("a", 500))
    await person.say(wire.SetLimitMessage("a", 600))
    first, second = await a.hear()
    assert (
        isinstance(grant, wire.GrantMessage) and isinstance(first, wire.LimitMessage) and isinstance(second, wire.LimitMessage)
    )
    assert (first.max_bytes, second.max_bytes) == (500, 600)
    assert grant.generation < first.generation < second.generation
    assert await a.say(wire.UnmappedMessage(700, grant.generation)) == [], "a limit is no grant that the answer must know of"
    assert view(bench, "a").granted_bytes == 700
    assert await a.say(wire.UnmappedMessage(600, second.generation)) == []
    assert view(bench, "a").granted_bytes == 600


@on_a_bench()
async def test_engines_that_cannot_be_told_are_refused_with_those_that_can(bench: Bench) -> None:
    person = bench.client()
    (answer,) = await person.say(wire.SetLimitMessage("a", 500))
    assert answer == wire.RefusedMessage("unknown", "no engine 'a' holds a lease; those that do: none")
    await bench.engine("a")
    await bench.engine("a")
    pid = os.getpid()
    (answer,) = await person.say(wire.RecallBytesMessage("b", 500))
    both = f"'a' (pid {pid}, #1), 'a' (pid {pid}, #2)"
    assert isinstance(answer, wire.RefusedMessage) and answer.message.endswith(f"those that do: {both}")
    (answer,) = await person.say(wire.SetLimitMessage("a", 500))
    assert isinstance(answer, wire.RefusedMessage) and answer.message.endswith(f"name one by its pid or #number: {both}")
    assert await person.say(wire.SetLimitMessage("#2", 500)) == [wire.LimitSetMessage(500, 0)]


@on_a_bench()
async def test_only_root_the_owner_and_its_own_user_command_an_engine(bench: Bench) -> None:
    await bench.engine("a")
    table = bench.broker._table
    (lease,) = table.leases.values()
    engine_uid, owner_uid = 4001, 4000
    lease.peer = broker_connection.Peer(lease.peer.pid, engine_uid)
    for uid in (0, owner_uid, engine_uid):
        assert table.find("a", broker_connection.Peer(1, uid), owner_uid) is lease
    with pytest.raises(LeaseRefused, match="is 4001's; only 4001 and root and 4000 may do that"):
        table.find("a", broker_connection.Peer(1, 4002), owner_uid)


def test_the_blocking_client(folder: Path) -> None:
    path = folder / "broker"
    with pytest.raises(BrokerUnavailable, match=r"no broker listens at .*; is vram-monitor running\?"):
        BrokerClient(path).leases()
    with broker_thread(path, Numbers()):
        client = BrokerClient(path)
        assert client.leases() == client.reservations() == ()
        with pytest.raises(UnknownEngine, match="no engine 'a'"):
            client.recall("a", 5)
        with pytest.raises(UnknownEngine, match="no engine 'a'"):
            client.limit("a", 5)
    listen(path).close()
    with pytest.raises(BrokerUnavailable, match="has ended"):
        BrokerClient(path).leases()


async def raw(bench: Bench, data: bytes = b"") -> socket.socket:
    sock = connect(bench.path)
    sock.send(data)
    await bench.pump()
    return sock


def ended(sock: socket.socket) -> bool:
    """Whether the broker has ended the connection; what it said before is passed over."""
    try:
        while sock.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True


HELLO = wire.to_frame(wire.HelloMessage(wire.PROTOCOL))
NONSENSE = [
    (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "sent an invalid message"),
    (struct.pack("<Q", 1 << 30), "sent an invalid message"),
    (frame(b""), "sent an invalid message"),
    (frame(b"null"), "sent an invalid message"),
    (HELLO + frame(b"{}"), "sent an invalid message"),
    (wire.to_frame(wire.ListLeasesMessage()), "says no hello"),
    (HELLO + wire.to_frame(wire.DoneMessage()), "sent a message that only the broker may send"),
    (HELLO + HELLO, "sent a message that only the broker may send"),
    (wire.to_frame(wire.HelloMessage(99)), "is of another version"),
    (HELLO + 1001 * wire.to_frame(wire.AskMessage(1, 1)), "sends too much"),
]


@pytest.mark.parametrize(("data", "why"), NONSENSE, ids=lambda value: value[:20] if isinstance(value, bytes) else value)
@on_a_bench()
async def test_who_makes_no_sense_is_dropped_with_a_line_and_the_rest_are_served(bench: Bench, data: bytes, why: str) -> None:
    engine = await bench.engine("a", 100)
    with logged() as lines:
        for _ in range(3):
            sock = await raw(bench)
            for start in range(0, len(data), 1000):
                with contextlib.suppress(BrokenPipeError):
                    sock.send(data[start : start + 1000])
                await bench.pump()
            assert ended(sock)
            sock.close()
    (line,) = lines
    assert line.startswith(f"a client that {why} was dropped (pid {os.getpid()}, uid {os.getuid()}): ")
    assert [type(message) for message in await engine.say(wire.AskMessage(200, 60_000))] == [wire.GrantMessage]


@pytest.mark.parametrize(("data", "seconds"), [(b"", 2.1), (HELLO[:9], 2.1), (HELLO + b"\0\0", 5.1), (HELLO, 10.1)], ids=repr)
@on_a_bench()
async def test_who_keeps_the_broker_waiting_is_dropped(bench: Bench, data: bytes, seconds: float) -> None:
    sock = await raw(bench, data)
    await bench.tick(seconds - 0.2)
    assert not ended(sock)
    await bench.tick(0.2)
    assert ended(sock)
    sock.close()


@on_a_bench()
async def test_an_engine_that_is_silent_for_hours_is_not_dropped(bench: Bench) -> None:
    a = await bench.engine("a")
    await bench.tick(10_000)
    assert not await a.ends()


@on_a_bench()
async def test_half_a_frame_now_and_then_does_not_count_as_progress(bench: Bench) -> None:
    sock = await raw(bench, HELLO)
    question = wire.to_frame(wire.ListLeasesMessage())
    for byte in question[:-1]:
        with contextlib.suppress(BrokenPipeError):
            sock.send(bytes([byte]))
        await bench.tick(1)
    assert ended(sock)
    sock.close()


@on_a_bench()
async def test_who_never_reads_is_dropped_and_costs_a_bounded_amount(bench: Bench) -> None:
    a = await bench.engine("a")
    for _ in range(20):
        await bench.engine("b" * 128, device_uuid=DEVICE)
    deaf = await raw(bench, HELLO)
    largest = 0
    for _ in range(10_000):
        try:
            deaf.send(wire.to_frame(wire.ListLeasesMessage()))
        except (BrokenPipeError, ConnectionResetError):
            break
        await bench.tick(0.02)
        largest = max(largest, *(connection._out_bytes for connection in bench.broker._connections))
    else:
        pytest.fail("it was never dropped")
    assert 0 < largest <= broker_connection.MAX_UNREAD_BYTES + 65536
    assert [type(message) for message in await a.say(wire.AskMessage(200, 60_000))] == [wire.GrantMessage]
    deaf.close()


@on_a_bench()
async def test_an_engines_pace_is_no_flood(bench: Bench) -> None:
    a = await bench.engine("a")
    await a.say(*[wire.AskMessage(1, 1)] * 500)  # at once
    for _ in range(3000):  # 400 a second
        a.channel.send(wire.AskMessage(1, 1))
        bench.clock.advance(0.0025)
        await asyncio.sleep(0)
    assert not await a.ends()


@on_a_bench()
async def test_thousands_of_connections_do_not_keep_an_engine_out(bench: Bench) -> None:
    first = await bench.engine("first", 100)
    crowd = [connect_or_none(bench.path) for _ in range(100)]
    with logged() as lines:
        for _ in range(20):
            await bench.pump()
            crowd += [connect_or_none(bench.path) for _ in range(100)]
            assert len(bench.broker._connections) <= broker_module.MAX_CONNECTIONS
    await bench.pump()
    late = await bench.engine("late", 100)
    assert view(bench, "late").granted_bytes == view(bench, "first").granted_bytes == 100
    assert not await first.ends() and not await late.ends()
    assert len([line for line in lines if "is one too many" in line]) == 1
    for sock in crowd:
        if sock is not None:
            sock.close()


def connect_or_none(path: Path) -> socket.socket | None:
    with contextlib.suppress(BlockingIOError):  # the queue of those who wait is full
        return connect(path)
    return None


@pytest.mark.parametrize("seed", range(3))
@on_a_bench()
async def test_random_bytes_from_random_clients_harm_nobody(bench: Bench, seed: int) -> None:
    random_ = random.Random(seed)
    frames = [HELLO, wire.to_frame(wire.ListLeasesMessage()), wire.to_frame(wire.SetLimitMessage("a", 5)), struct.pack("<Q", 9)]
    frames.append(wire.to_frame(wire.RegisterMessage("evil", DEVICE, 0, None, 1.0, 0, 10, 2**60)))
    frames.append(wire.to_frame(wire.ReserveMessage(DEVICE, 2**60)))
    engine = await bench.engine("engine", 100)
    for _ in range(200):
        sock = await raw(bench)
        for _ in range(random_.randrange(1, 6)):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.send(random_.choice([*frames, random_.randbytes(random_.randrange(50))]))
            await bench.pump()
        sock.close()
        await bench.tick(random_.choice([0.0, 0.02, 3.0]))
    assert not await engine.ends()
    for _ in range(20):
        await bench.tick(1.0)
    await engine.say(wire.AskMessage(300, 600_000))
    assert view(bench, "engine").granted_bytes == 300


def test_a_thousand_clients_leave_no_descriptor_behind(folder: Path) -> None:
    async def within() -> None:
        async with Bench(folder / "broker") as bench:
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(300):
                client = await bench.engine("a", held_bytes=10)
                client.close()
                bench.clients.clear()
                await bench.tick()
            await bench.tick(10)
            await bench.tick()
            assert bench.broker.leases() == ()
            assert len(os.listdir("/proc/self/fd")) == before

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(within())
    assert len(os.listdir("/proc/self/fd")) <= before + 1


class Faulty(Numbers):
    faulty = False

    def memory(self, uuid: str) -> Any:
        if self.faulty:
            raise ZeroDivisionError("a fault of ours")
        return super().memory(uuid)


@on_a_bench()
async def test_a_fault_in_an_answer_costs_one_client(bench: Bench) -> None:
    engine = await bench.engine("a", 100)
    faulty = Faulty(bench.clock)
    faulty.faulty = True
    bench.broker._table._readings = faulty
    unlucky = bench.client()
    with pytest.raises(BrokerUnavailable):
        await unlucky.say(wire.RegisterMessage("b", DEVICE, 0, None, 1.0, 0, 10, 0))
    faulty.faulty = False
    await bench.tick()
    assert [row.name for row in bench.broker.leases()] == ["a"]
    assert [type(message) for message in await engine.say(wire.AskMessage(200, 60_000))] == [wire.GrantMessage]


@on_a_bench()
async def test_a_device_that_does_not_answer_is_news_when_it_lasts_and_when_it_is_over(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def said() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("device 0 ")]
        caplog.clear()
        return lines

    engine = await bench.engine("a", 100)
    for _ in range(5):  # a busy machine
        bench.numbers.age_ns = 10**9
        await bench.tick(0.02)
        await bench.tick(0.9)
        bench.numbers.age_ns = 0
        await bench.tick(0.02)
    assert said() == []
    bench.numbers.age_ns = 10**9
    for _ in range(4):
        await bench.tick(0.6)
    assert said() == ["device 0 is not leased any further: its numbers are old"]
    assert await engine.say(wire.AskMessage(500, 60_000)) == []
    bench.numbers.error = "GPU is lost"
    await bench.tick(0.02)
    await bench.tick(0.02)
    assert said() == ["device 0 is not leased any further: GPU is lost"]
    bench.numbers.age_ns, bench.numbers.error = 0, None
    await bench.tick(0.02)
    await bench.tick(0.02)
    assert said() == ["device 0 is measured, and leased, again"]
    assert [type(message) for message in await engine.hear()] == [wire.GrantMessage]
    bench.numbers.error = "GPU is lost"
    await bench.tick(0.02)
    assert said() == []


def test_a_fault_in_a_tick_does_not_end_the_broker(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    numbers = Faulty()
    with broker_thread(folder / "broker", numbers) as broker:
        channel = Channel(folder / "broker")
        channel.send(wire.RegisterMessage("a", DEVICE, 100, None, 1.0, 0, 10, 0))
        wait_until(lambda: bool(broker.leases()), "a lease")
        numbers.faulty = True
        wait_until(lambda: "a fault of ours" in caplog.text, "the fault")
        numbers.faulty = False
        assert len(BrokerClient(folder / "broker").leases()) == 1
        channel.close()


@on_a_bench()
async def test_the_view_tells_how_long_requests_have_waited_for_memory_that_is_not_granted(bench: Bench) -> None:
    a = await bench.engine("a", 100)
    await a.say(wire.AskMessage(2000, 60_000, 400))
    await bench.tick(0.5)
    assert view(bench, "a").lacking_ms == 500, "it lacks memory since it asked"
    await a.say(wire.AskMessage(2000, 60_000, 400))
    await bench.tick(0.2)
    assert view(bench, "a").lacking_ms == 600, "its oldest request is another one"
    await a.say(wire.AskMessage(view(bench, "a").granted_bytes + 9, 60_000, 400))
    await bench.tick(0.2)
    assert view(bench, "a").lacking_ms is None, "grants are whole granules"
    await a.say(wire.ReleaseMessage())
    b = await bench.engine("b", 10, 50)
    await b.say(wire.AskMessage(2000, 60_000, 400))
    await bench.tick(0.5)
    assert (view(bench, "b").granted_bytes, view(bench, "b").lacking_ms) == (50, None), "it may not have more"
