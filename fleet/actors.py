"""The fleet's processes as Ray actors, and how a fleet is started and ended.

Ray starts, places and restarts processes and reports exits. An actor that Ray restarts by itself (the queue, front ends) is
away for about two seconds. Workers are not restarted by Ray but by the queue (`WorkerKeeper`), since only then their deaths
are reported within milliseconds. What the calls carry is msgpack (`links.CALLS`). The queue's process loads no torch: actors
import what they run when they begin.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from ..common.on_error import OnError
from .cluster import (
    NAMESPACE,
    START_S,
    RayLink,
    connect,
    connect_ray,
    import_ray,
    is_running,
    queue_name,
    start_cluster,
    starting,
    stop_cluster,
)
from .config import LOCAL, FleetConfig
from .errors import FleetError
from .journal import Durability
from .keeper import WorkerKeeper
from .links import QueueUnavailable, answer_call
from .queue_server import QueueOptions, QueueServer
from .watchdog import Watchdog

log = logging.getLogger(__name__)

CALLS_AT_ONCE = 1000


# ---- actors ---------------------------------------------------------------------------------------------------------


class QueueActor:
    """The process of the queue."""

    def __init__(self, settings: Mapping[str, Any], start_id: str) -> None:
        _log_to_stderr()
        self._config = FleetConfig(**settings)
        self._start_id = start_id
        self._starting: asyncio.Task[None] | None = None
        self._server: QueueServer
        self._keeper: WorkerKeeper

    async def call(self, method: str, data: bytes) -> bytes:
        """Answer a call of `links.CALLS`."""
        await self._started()
        own = {"drain": self._keeper, "add": self._keeper, "status": self, "stop": self}
        return await answer_call(own.get(method, self._server), method, data)

    async def _started(self) -> None:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        config = self._config
        options = QueueOptions(
            config.journal,
            cast(Durability, config.durability),
            config.hang_s,
            config.keep_s,
            config.unread_s,
            shares=config.shares,
            start_id=self._start_id,
        )
        self._server = QueueServer(options)
        self._server.start()
        self._keeper = WorkerKeeper(self._server, RayLauncher(config, self._server.secret))
        await self._keeper.begin(config.workers)
        self._watchdog = Watchdog()  # only now: reading a long journal holds up the loop

    async def status(self) -> dict[str, Any]:
        """See `QueueServer.status`, with what the keeper knows."""
        status = await self._server.status()
        status["kept"] = self._keeper.names
        status["errors"] = dict(self._keeper.errors)
        resources = dict(self._config.worker_resources)
        if resources:
            ready = {worker["name"] for worker in status["workers"]}
            for name in self._keeper.names:
                if name not in ready:
                    status["errors"].setdefault(name, f"loads the model, or waits for {resources} of Ray's nodes")
        status["restarts"] = self._keeper.num_restarts
        return status

    async def stop(self, drain_s: float) -> None:
        """End all workers, and close the journal, once what runs has ended or after `drain_s`."""
        deadline = time.monotonic() + drain_s
        while self._server.queue.entries and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await self._keeper.stop()
        await self._server.close()


class WorkerActor:
    """The process of a worker."""

    def __init__(self, name: str, settings: Mapping[str, Any], secret: bytes) -> None:
        _log_to_stderr()
        self._name = name
        self._config = FleetConfig(**settings)
        self._secret = secret
        self._running: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Load the model and serve the queue until it orders the end. Callers after the first wait for the same end."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        await asyncio.shield(self._running)

    async def pid(self) -> int:
        """The process id."""
        return os.getpid()

    async def _run(self) -> None:
        from ..engine.async_llm import AsyncLLM
        from .worker import UNLIMITED_WAITING, EngineHangs, FleetWorker, model_of

        options = {**self._config.engine, "prefix_hash_secret": self._secret, "kv_events": True}
        if options.get("prefix_caching") is False:
            del options["prefix_hash_secret"], options["kv_events"]
        llm = await asyncio.to_thread(lambda: AsyncLLM(self._config.model, max_waiting=UNLIMITED_WAITING, **options))
        link = RayLink(import_ray().get_actor(queue_name(self._config.name), namespace=NAMESPACE))
        publisher = None
        if self._config.kv_events is not None:
            from .kv_events import KvEventPublisher

            port = self._config.kv_events + 2 * int(self._name.rpartition("-")[2])
            publisher = KvEventPublisher(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
        hangs, self._watchdog = False, Watchdog()  # of this event loop; the worker watches the engine's thread
        try:
            await FleetWorker(self._name, llm, model_of(llm, self._config.model), link, publisher).run()
        except EngineHangs:
            hangs = True
            raise
        finally:
            if publisher is not None:
                publisher.close()
            if not hangs:  # else it ends with this process, which the keeper kills
                await llm.stop()


class FrontActor:
    """The process of a front end: an HTTP server on an event loop of its own."""

    def __init__(self, settings: Mapping[str, Any], number: int) -> None:
        _log_to_stderr()
        self._config = FleetConfig(**settings)
        self._number = number
        self.error: str | None = None
        self._thread = threading.Thread(target=self._serve, name="pagetide-front", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        from .front import serve_front

        try:
            serve_front(self._config, self._number)
        except Exception as error:
            log.exception("the front end ended")
            self.error = str(error)
            os._exit(1)  # Ray starts it again

    async def url(self) -> str:
        """Where it listens."""
        config = self._config
        return f"http://{config.host}:{config.port + self._number}"

    async def pid(self) -> int:
        """The process id."""
        return os.getpid()


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s: %(message)s")
    logging.getLogger("pagetide").setLevel(logging.INFO)


class RayLauncher:
    """Starts workers as actors: see `keeper.Launcher`."""

    def __init__(self, config: FleetConfig, secret: bytes) -> None:
        self._config = config
        self._secret = secret

    async def start(self, name: str) -> Any:
        """The running actor of this name, or a new one."""
        ray = import_ray()
        full = f"{self._config.name}/{name}"
        with suppress(ValueError):
            return ray.get_actor(full, namespace=NAMESPACE)
        resources = dict(self._config.worker_resources)
        options = {key: resources.pop(key) for key in ("num_cpus", "num_gpus") if key in resources}
        options.setdefault("num_cpus", 0)
        threads = self._config.threads or max(1, (os.cpu_count() or 1) // max(self._config.workers, 1))
        actor = ray.remote(WorkerActor).options(
            name=full,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            max_concurrency=CALLS_AT_ONCE,
            resources=resources or None,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
            **options,
        )
        return actor.remote(name, self._config.to_dict(), self._secret)

    async def ended(self, handle: Any) -> str:
        """Wait for the end of a worker. Returns the reason: empty if it ended by order."""
        ray = import_ray()
        try:
            await handle.run.remote()
        except ray.exceptions.RayActorError:
            return "has died"
        except ray.exceptions.RayTaskError as error:
            await self.kill(handle)
            return f"failed: {error.cause}"
        await self.kill(handle)
        return ""

    async def kill(self, handle: Any) -> None:
        """End a worker at once."""
        import_ray().kill(handle, no_restart=True)


@dataclass(frozen=True, slots=True)
class RunningFleet:
    """A fleet that was started: the addresses of its front ends, and its actors."""

    urls: list[str]
    queue: Any
    fronts: list[Any]


def start_fleet(config: FleetConfig) -> RunningFleet:
    """Start the fleet's actors on its cluster. Raises FleetError, and what wrong settings raise; nothing runs then."""
    if config.address != LOCAL:
        check_settings(config)
        return _start_actors(config, config.address)
    with starting(config.name):
        if is_running(config.name):
            raise FleetError(
                f"a fleet named {config.name!r} runs on this machine already: `pagetide fleet stop` ends it, and another name "
                "in the settings starts a second one"
            )
        stop_cluster(config.name)  # what a cluster has left that lost its head
        check_settings(config)
        with OnError(lambda: stop_cluster(config.name)):
            return _start_actors(config, start_cluster(config.name))


def check_settings(config: FleetConfig) -> None:
    """Raise the error of settings that the fleet's processes would meet one by one: of the engine, the server, the ports."""
    from ..engine.config import EngineConfig
    from .front import check_front

    if config.address == LOCAL:  # elsewhere the model is on the workers' machines
        EngineConfig.resolve(config.model, **config.engine)
    for number in range(config.front_ends):
        check_front(config, number)


def _start_actors(config: FleetConfig, address: str) -> RunningFleet:
    ray = import_ray()
    connect_ray(ray, address, config.name)
    with suppress(ValueError):
        ray.get_actor(queue_name(config.name), namespace=NAMESPACE)
        raise FleetError(f"a fleet named {config.name!r} runs already: `pagetide fleet status`")
    settings = {**config.to_dict(), "state_dir": str(config.journal.parent.absolute())}
    options = {"namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1, "num_cpus": 0}
    queue = ray.remote(QueueActor).options(name=queue_name(config.name), max_concurrency=CALLS_AT_ONCE, **options)
    try:
        actor = queue.remote(settings, secrets.token_hex(8))
    except ValueError as error:  # the name is taken: another process has started it meanwhile
        raise FleetError(f"another process starts the fleet {config.name!r} on this cluster now: {error}") from error
    try:
        asyncio.run(RayLink(actor, START_S).status())
    except QueueUnavailable as error:
        raise FleetError(f"the queue cannot be started: {error}") from error
    except FleetError:
        ray.kill(actor, no_restart=True)
        raise
    fronts = [
        ray.remote(FrontActor).options(name=f"{config.name}/front-{number}", **options).remote(settings, number)
        for number in range(config.front_ends)
    ]
    return RunningFleet(ray.get([front.url.remote() for front in fronts]), actor, fronts)


def stop_fleet(fleet: str, address: str, drain_s: float) -> None:
    """End a fleet's actors, and its cluster if it is this machine's own. Raises FleetError if there is none."""
    try:
        actor = connect(address, fleet)
        ray = import_ray()
        with suppress(QueueUnavailable, FleetError):  # of a queue that cannot work: it ends all the same
            asyncio.run(RayLink(actor).stop(drain_s))
        for one in ray.util.list_named_actors(all_namespaces=True):
            if one["namespace"] == NAMESPACE and one["name"].startswith(f"{fleet}/"):
                with suppress(ValueError):
                    ray.kill(ray.get_actor(one["name"], namespace=NAMESPACE), no_restart=True)
        ray.shutdown()
    except FleetError:
        if address != LOCAL or not stop_cluster(fleet):
            raise
    else:
        if address == LOCAL:
            stop_cluster(fleet)
