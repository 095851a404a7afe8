"""Keeping workers running: they are started again, the longer the more often they end, until they are drained."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Self

import pytest

from pagetide.fleet import keeper as keeper_module
from pagetide.fleet.keeper import WorkerKeeper
from pagetide.fleet.messages import Registration, StaleEpoch
from pagetide.fleet.queue_server import QueueServer
from tests.fleet_stand_ins import MODEL, QueueRig, new_request, until, worker_state


class ScriptedLauncher:
    """Workers that end when the test says so."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.killed: list[str] = []
        self.running: dict[str, asyncio.Future[str]] = {}
        self.error: Exception | None = None

    async def start(self, name: str) -> str:
        self.started.append(name)
        if self.error is not None:
            raise self.error
        self.running[name] = asyncio.get_running_loop().create_future()
        return name

    async def ended(self, handle: str) -> str:
        return await self.running[handle]

    async def kill(self, handle: str) -> None:
        self.killed.append(handle)

    def end(self, name: str, reason: str) -> None:
        self.running[name].set_result(reason)


class Rig(QueueRig):
    """A queue, and what keeps its scripted workers."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.launcher = ScriptedLauncher()
        self.keeper = WorkerKeeper(self.server, self.launcher)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.keeper.stop()
        await self.server.close()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(keeper_module, "FIRST_RESTART_S", 0.0)
    monkeypatch.setattr(keeper_module, "MOST_RESTART_S", 0.001)
    return Rig(tmp_path)


async def register(server: QueueServer, name: str) -> int:
    return await server.register(Registration(name, MODEL, 8, worker_state()))


async def test_workers_are_started_and_started_again_under_their_names(rig: Rig) -> None:
    server, keeper, launcher = rig.server, rig.keeper, rig.launcher
    await keeper.begin(2)
    await until(lambda: len(launcher.running) == 2)
    assert launcher.started == ["worker-0", "worker-1"] == keeper.names
    await register(server, "worker-0")
    await server.submit("front", [new_request("r")])
    assert server.queue.entries[1].worker == "worker-0"
    launcher.end("worker-0", "was killed")
    await until(lambda: launcher.started.count("worker-0") == 2)
    assert server.queue.entries[1].worker is None, "its requests go on elsewhere"
    assert (keeper.errors, keeper.num_restarts) == ({"worker-0": "was killed"}, 1)
    assert await keeper.add(1) == ["worker-2"]


async def test_a_worker_that_cannot_be_started_is_tried_again_and_its_error_is_known(rig: Rig) -> None:
    keeper, launcher = rig.keeper, rig.launcher
    launcher.error = RuntimeError("no resources")
    await keeper.begin(1)
    await until(lambda: len(launcher.started) >= 3)
    assert keeper.errors == {"worker-0": "cannot be started: no resources"}
    launcher.error = None
    await until(lambda: "worker-0" in launcher.running)
    assert keeper.names == ["worker-0"]


async def test_a_drained_worker_ends_and_is_not_started_again_also_if_it_dies_meanwhile(rig: Rig) -> None:
    server, keeper, launcher = rig.server, rig.keeper, rig.launcher
    await keeper.begin(3)
    await until(lambda: len(launcher.running) == 3)
    for name in keeper.names:
        await register(server, name)
    await keeper.drain("worker-0")
    await keeper.drain("worker-1")
    assert (await server.writer.fact("workers", list)) == [["worker-2"], 3]
    launcher.end("worker-0", "")
    launcher.end("worker-1", "was killed")
    await until(lambda: keeper.names == ["worker-2"])
    assert [worker.name for worker in server.queue.workers] == ["worker-2"]
    assert launcher.started == ["worker-0", "worker-1", "worker-2"] and keeper.errors == {}
    with pytest.raises(StaleEpoch):
        await keeper.drain("worker-0")


async def test_after_a_restart_of_the_queue_the_same_workers_are_kept_and_names_are_not_used_again(rig: Rig) -> None:
    server, keeper, launcher = rig.server, rig.keeper, rig.launcher
    await keeper.begin(2)
    await until(lambda: len(launcher.running) == 2)
    await register(server, "worker-1")
    await keeper.drain("worker-1")
    again = WorkerKeeper(server, other := ScriptedLauncher())
    await again.begin(5)
    await until(lambda: bool(other.running))
    assert other.started == ["worker-0"] and await again.add(1) == ["worker-2"]
    await again.stop()
    assert set(other.killed) <= {"worker-0", "worker-2"} and "worker-0" in other.killed


async def test_stopping_kills_all_workers_and_starts_none(rig: Rig) -> None:
    keeper, launcher = rig.keeper, rig.launcher
    await keeper.begin(2)
    await until(lambda: len(launcher.running) == 2)
    await keeper.stop()
    assert sorted(launcher.killed) == ["worker-0", "worker-1"] and len(launcher.started) == 2
