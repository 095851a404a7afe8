"""What one user may have: a table, then brokers whose clients are bound, in one process and as several users."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from broker_rig import DEVICE, Bench, Numbers, broker_thread, on_a_bench, processes

from pagetide.allocator import broker as broker_module
from pagetide.allocator import broker_connection, wire
from pagetide.allocator.errors import LeaseRefused, MinimumsExceedCapacity
from pagetide.allocator.quota import Promise, Quota

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases need Linux")
QUOTA = Quota(engines=3, share=0.5, exempt=frozenset({0, 77}))
ANN, OWNER = 1001, 77


@pytest.mark.parametrize(
    ("uid", "living", "ending", "said"),
    [
        (ANN, 2, 3, None),
        (ANN, 0, 5, None),
        (ANN, 3, 0, "ann has 3 engines and reservations at this broker, and one user may have 3: end some, or "),
        (ANN, 2, 4, "ann has 2 engines and reservations at this broker, and 4 that have ended and whose memory "),
        (ANN, 0, 6, "and whose memory is not back; one user may have 6 of both: try again in a few seconds, or "),
        (0, 99, 99, None),
        (OWNER, 99, 99, None),
    ],
)
def test_places(uid: int, living: int, ending: int, said: str | None) -> None:
    if said is None:
        QUOTA.check_place(uid, "ann", living, ending)
        return
    with pytest.raises(LeaseRefused) as refusal:
        QUOTA.check_place(uid, "ann", living, ending)
    assert said in str(refusal.value) and "or have the monitor's owner raise the bound" in str(refusal.value)
    assert "vram-monitor serve --user-engines N" in str(refusal.value)


@pytest.mark.parametrize("kind", [LeaseRefused, MinimumsExceedCapacity])
def test_promises(kind: type[LeaseRefused]) -> None:
    for promised, asked in ((0, 450), (449, 1), (450, 0), (900, 0)):
        QUOTA.check_promise(ANN, "ann", Promise("a min", asked, kind), promised, 900)
    for uid in QUOTA.exempt:
        QUOTA.check_promise(uid, "ann", Promise("a min", 900, kind), 900, 900)
    for promised, asked, left in ((0, 451, 450), (400, 51, 50), (900, 1, 0)):
        with pytest.raises(kind) as refusal:
            QUOTA.check_promise(ANN, "ann", Promise("a min for 'x'", asked, kind), promised, 900)
        assert type(refusal.value) is kind
        said = str(refusal.value)
        assert f"makes {promised + asked} bytes with what ann is promised of this device already ({promised}" in said
        assert "one user may be promised 450 bytes, 50% of the 900 bytes that can be leased" in said
        assert f"Ask for {left} bytes or less, end an engine of ann, or have the monitor's owner raise" in said


BOUND = Quota(engines=4, share=0.5, exempt=frozenset[int]())  # binds the user of this process


def register(name: str = "x", low: int = 0) -> wire.RegisterMessage:
    return wire.RegisterMessage(name, DEVICE, low, None, 1.0, 0, 10, 0)


@on_a_bench(quota=BOUND)
async def test_one_engine_too_many_is_refused_and_the_others_go_on(bench: Bench) -> None:
    engines = [await bench.engine("a") for _ in range(3)]
    person = bench.client()
    assert [type(message) for message in await person.say(wire.ReserveMessage(DEVICE, 10))] == [wire.ReservedMessage]
    for message in (register(), wire.ReserveMessage(DEVICE, 10)):
        (answer,) = await bench.client().say(message)
        assert isinstance(answer, wire.RefusedMessage) and answer.code == "refused"
        assert "has 4 engines and reservations at this broker, and one user may have 4: end some" in answer.message
    assert [type(message) for message in await engines[0].say(wire.AskMessage(200, 60_000))] == [wire.GrantMessage]
    await engines[0].say(wire.ReleaseMessage())
    await bench.tick()
    await bench.engine("b")


@on_a_bench(quota=BOUND)
async def test_ended_leases_whose_memory_is_not_back_count_too(bench: Bench) -> None:
    """One client that registers and releases without end would use up the broker's descriptors."""
    bench.numbers.used = 800
    await bench.tick()
    client = bench.client()
    before = len(os.listdir("/proc/self/fd"))
    refused = 0
    for _ in range(40):
        answer, *_ = await client.say(wire.RegisterMessage("x", DEVICE, 0, None, 1.0, 0, 10, 50), wire.ReleaseMessage())
        refused += isinstance(answer, wire.RefusedMessage)
    assert refused == 32
    assert len(bench.broker.leases()) == 8
    assert len(os.listdir("/proc/self/fd")) <= before + 1 + 8 * 3  # of these a third is the client's
    for _ in range(300):
        await bench.tick()
    assert bench.broker.leases() == ()
    await bench.engine("b")


@on_a_bench(quota=BOUND)
async def test_engines_that_come_back_are_not_one_too_many(bench: Bench) -> None:
    for _ in range(3):  # all are cut off and come back, as often as it may be
        engines = [await bench.engine(f"engine {number}", 100, held_bytes=100) for number in range(4)]
        assert len(bench.broker.leases()) == 4
        for engine in engines:
            engine.close()
        await bench.pump()
        bench.clients.clear()


@on_a_bench(quota=BOUND)
async def test_minimums_and_reservations_beyond_the_share_are_refused_with_what_to_do(bench: Bench) -> None:
    a = await bench.engine("a", 300)
    person = bench.client()
    assert [type(message) for message in await person.say(wire.ReserveMessage(DEVICE, 100))] == [wire.ReservedMessage]
    (answer,) = await bench.client().say(register("b", 51))
    assert isinstance(answer, wire.RefusedMessage) and answer.code == "minimums", "an engine waits for those that load"
    assert "a min for 'b' of 51 bytes makes 451 bytes" in answer.message
    assert "Ask for 50 bytes or less" in answer.message
    (answer,) = await bench.client().say(wire.ReserveMessage(DEVICE, 51))
    assert isinstance(answer, wire.RefusedMessage) and answer.code == "refused"
    assert "a reservation of 51 bytes makes 451 bytes" in answer.message
    await person.refused(wire.ResizeMessage(151, 1000), "a reservation of 151 bytes makes 451 bytes")
    assert [type(message) for message in await person.say(wire.ResizeMessage(150, 1000))] == [wire.ReservedMessage]
    await person.say(wire.ResizeMessage(100, 1000))
    b = await bench.engine("b", 50)
    await a.say(wire.LowerMinMessage(100))  # it has loaded
    await bench.engine("c", 200)
    person.close()
    b.close()
    await bench.pump()
    await bench.engine("d", 150)
    assert [row.min_bytes for row in bench.broker.leases() if row.state != "reaping"] == [100, 200, 150]


@on_a_bench(quota=BOUND)
async def test_each_device_has_a_share_of_its_own(bench: Bench) -> None:
    bench.numbers = bench.broker._table._readings = TwoDevices(bench.clock)
    await bench.engine("a", 450)
    await bench.engine("b", 450, device_uuid="GPU-2")
    (answer,) = await bench.client().say(register("c", 1))
    assert isinstance(answer, wire.RefusedMessage)


class TwoDevices(Numbers):
    def devices(self):  # type: ignore[no-untyped-def]
        (info,) = super().devices()
        return info, type(info)("GPU-2", "1", info.kind)

    def memory(self, uuid: str):  # type: ignore[no-untyped-def]
        return super().memory(DEVICE)


@on_a_bench(quota=BOUND)
async def test_of_clients_that_hold_nothing_those_of_the_user_with_most_of_them_go(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "MAX_CONNECTIONS", 20)
    credentials = {"uid": 1}

    class Known(broker_connection.Peer):
        def __init__(self, pid: int, uid: int) -> None:
            super().__init__(pid, credentials["uid"])

    monkeypatch.setattr(broker_connection, "Peer", Known)

    quiet = [bench.client() for _ in range(3)]  # the oldest, and nobody else's business
    await bench.pump()
    credentials["uid"] = 2
    crowd = [bench.client() for _ in range(60)]
    await bench.pump()
    assert len(bench.broker._connections) == 20
    assert not any([await client.ends() for client in quiet])
    assert sum([await client.ends() for client in crowd]) == 60 - 17


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="only root starts processes of several users")
def test_one_user_cannot_keep_another_out(folder: Path) -> None:
    folder.chmod(0o755)
    path = folder / "broker"
    quota = Quota(engines=3, share=0.5, exempt=frozenset({0}))
    with broker_thread(path, Numbers(), gid=4321, quota=quota), processes() as start:
        greedy = start("user", path, DEVICE, 4321, 4321).start()
        other = start("user", path, DEVICE, 4322, 4321).start()
        assert greedy.tell("440") == "granted"
        assert "4321 is promised of this device already (440 bytes)" in greedy.tell("11")
        assert [greedy.tell("0") for _ in range(2)] == ["granted"] * 2
        assert "4321 has 3 engines and reservations at this broker, and one user may have 3" in greedy.tell("0")
        assert other.tell("440") == "granted"
        root = start("user", path, DEVICE, 0, 0).start()
        assert [root.tell("5") for _ in range(4)] == ["granted"] * 4, "root has no bounds"


@on_a_bench(quota=BOUND)
async def test_no_user_holds_up_the_queue_of_reservations_for_long(bench: Bench) -> None:
    """A reservation that cannot be served is first for an hour at most, and none goes before those of all others."""
    await bench.client().refused(wire.ReserveMessage(DEVICE, 10, priority=-1), "has priority 0 or more, got -1")
    first, other = bench.client(), bench.client()
    bench.numbers.used = 850
    await bench.tick()
    await bench.tick()
    assert await first.say(wire.ReserveMessage(DEVICE, 100)) == []
    assert await other.say(wire.ReserveMessage(DEVICE, 10, wait_ms=10**8)) == []
    await bench.tick(3599)
    assert not any(isinstance(message, wire.ReservedMessage) for message in await other.hear())
    await bench.tick(1.1)
    assert isinstance((await first.hear())[-1], wire.RefusedMessage)
    assert isinstance((await other.hear())[-1], wire.RefusedMessage), "both came at the same time"
    held = bench.client()
    (answer,) = await held.say(wire.ReserveMessage(DEVICE, 10))
    assert isinstance(answer, wire.ReservedMessage)
    assert await held.say(wire.ResizeMessage(300, 10**8)) == []
    await bench.tick(3601)
    assert isinstance((await held.hear())[-1], wire.RefusedMessage)


def test_those_without_bounds_wait_as_they_like() -> None:
    assert QUOTA.wait_ms(0, 10**9) == 10**9 and QUOTA.wait_ms(ANN, 10**9) == 3_600_000 and QUOTA.wait_ms(ANN, 5) == 5
    QUOTA.check_priority(0, "root", -5)
