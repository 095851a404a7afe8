"""Fleets to measure: on Ray as `pagetide fleet start` makes them, or for short runs in this process; and their stand-ins."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from benchmarks.fleet_requests import BytesLink
from benchmarks.fleet_stand_in import StandInActor, run_stand_in
from pagetide import AsyncLLM, Fleet
from pagetide.fleet.cluster import RayLink, connect, import_ray
from pagetide.fleet.links import QueueLink
from pagetide.fleet.queue_server import QueueOptions, QueueServer
from pagetide.fleet.worker import UNLIMITED_WAITING, FleetWorker, model_of

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from fleets import FleetProcess  # noqa: E402

ENGINE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_memory": "128MiB", "max_seqs": 64, "share": False}
WAIT_S = 60.0


@dataclass(slots=True)
class LiveFleet:
    """A fleet that runs, and this process's connection to it.

    Attributes:
        process: The fleet on Ray; None in this process.
    """

    process: FleetProcess | None
    fleet: Fleet


@asynccontextmanager
async def fleet_on_ray(folder: Path, **settings: Any) -> AsyncIterator[FleetProcess]:
    """A fleet on a Ray of its own. All fleets of this process have one `folder`, which holds the token of their clusters."""
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    os.environ.setdefault(
        "RAY_worker_niceness", "0"
    )  # Ray's 15 gives way to every other program, as `AsyncLLM` does not
    process = FleetProcess(folder, **settings)
    try:
        await asyncio.to_thread(process.__enter__)
        yield process
    finally:
        import_ray().shutdown()
        await asyncio.to_thread(process.end)
        for file in (folder / "state").glob("**/journal.*"):
            file.unlink()


@asynccontextmanager
async def live_fleet(folder: Path, model: str, one_process: bool, threads: int) -> AsyncIterator[LiveFleet]:
    """A fleet with one worker for `model`."""
    if not one_process:
        settings = {"model": model, "workers": 1, "threads": threads, "engine": ENGINE}
        async with fleet_on_ray(folder, **settings) as process, Fleet(name=process.name) as fleet:
            yield LiveFleet(process, fleet)
        return
    async with _queue(folder) as (server, link):
        options = {"prefix_hash_secret": server.secret, "kv_events": True, "max_waiting": UNLIMITED_WAITING}
        llm = await asyncio.to_thread(lambda: AsyncLLM(model, **ENGINE, **options))
        worker = asyncio.create_task(FleetWorker("worker-0", llm, model_of(llm, model), link).run())
        try:
            async with Fleet.of_link(link) as fleet:
                yield LiveFleet(None, fleet)
        finally:
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
            await llm.stop()


@asynccontextmanager
async def _queue(folder: Path) -> AsyncIterator[tuple[QueueServer, QueueLink]]:
    """A queue in this process, and a link to it."""
    server = QueueServer(QueueOptions(folder / "one-process" / "journal.sqlite"))
    server.start()
    try:
        yield server, cast(QueueLink, BytesLink(server))
    finally:
        await server.close()
        shutil.rmtree(folder / "one-process")


@dataclass(frozen=True, slots=True)
class StandIns:
    """How the stand-ins behave."""

    max_seqs: int
    step_s: float
    token_s: float


class StandInFleet:
    """A queue whose workers are stand-ins, as many as are wanted.

    Attributes:
        fleet: This process's connection, once there was a worker.
    """

    def __init__(self, stand_ins: StandIns, ray_fleet: str | None, link: QueueLink) -> None:
        self._stand_ins, self._ray_fleet, self._link = stand_ins, ray_fleet, link
        self._workers: list[Any] = []  # actors, or tasks
        self._number = 0
        self.fleet: Fleet

    async def set_workers(self, count: int) -> None:
        """Start or kill stand-ins, and wait until the queue knows it."""
        while len(self._workers) > count:
            await self._kill(self._workers.pop())
        while len(self._workers) < count:
            self._workers.append(self._start(f"stand-in-{self._number}"))
            self._number += 1
        async with asyncio.timeout(WAIT_S):
            info = None
            while info is None or info.max_seqs != count * self._stand_ins.max_seqs:
                info = await self._link.info(WAIT_S)
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Kill all stand-ins."""
        while self._workers:
            await self._kill(self._workers.pop())

    def _start(self, name: str) -> Any:
        one = self._stand_ins
        settings = (name, one.max_seqs, one.step_s, one.token_s)
        if self._ray_fleet is None:
            return asyncio.create_task(run_stand_in(self._link, *settings))
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        actor = import_ray().remote(StandInActor)
        handle = actor.options(num_cpus=0, runtime_env={"env_vars": {"PYTHONPATH": path}}).remote()
        handle.run.remote(self._ray_fleet, *settings)
        return handle

    async def _kill(self, worker: Any) -> None:
        if isinstance(worker, asyncio.Task):
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
        else:
            import_ray().kill(worker)


@asynccontextmanager
async def stand_in_fleet(folder: Path, stand_ins: StandIns, one_process: bool) -> AsyncIterator[StandInFleet]:
    """A fleet of one stand-in to begin with. The queue forgets one that was killed after `hang_s`."""
    if one_process:
        async with _queue(folder) as (_, link):
            found = StandInFleet(stand_ins, None, link)
            await found.set_workers(1)
            async with Fleet.of_link(link) as found.fleet:
                yield found
            await found.close()
        return
    settings = {"workers": 0, "front_ends": 0, "hang_s": 2.0}
    async with fleet_on_ray(folder, **settings) as process:
        link = cast(QueueLink, RayLink(connect("local", process.name)))
        found = StandInFleet(stand_ins, process.name, link)
        await found.set_workers(1)
        async with Fleet(name=process.name) as found.fleet:
            yield found
