"""The fleet's processes on Ray: its actors, how they call each other, and a cluster of this machine.

Ray starts, places and restarts processes and reports exits. An actor that Ray restarts by itself (the queue, front ends) is
away for about two seconds. Workers are not restarted by Ray but by the queue (`WorkerKeeper`), since only then their deaths
are reported within milliseconds. What the calls carry is msgpack (`links.CALLS`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from .config import LOCAL, FleetConfig, state_dir
from .errors import FleetError
from .journal import Durability
from .keeper import WorkerKeeper
from .links import CALLS, QueueUnavailable, answer_call, result_of
from .messages import encode
from .queue_server import QueueOptions, QueueServer

log = logging.getLogger(__name__)

NAMESPACE = "pagetide"
OBJECT_STORE_BYTES = 100 << 20  # Ray's own; nothing large passes through it
MEMORY_THRESHOLD = 0.98  # of the node's memory, at which Ray kills workers: above what elastic pools fill
CALLS_AT_ONCE = 1000
REACH_S = 5.0
MARK = "PAGETIDE_FLEET_CLUSTER"


def import_ray() -> Any:
    """The library. Raises FleetError, which names the extra."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise FleetError(
            "a fleet runs on Ray, which is not installed: pip install 'pagetide[ray]' (about 80 MB)"
        ) from error
    return ray


# ---- calls ----------------------------------------------------------------------------------------------------------


class RayLink:
    """A link to the queue's actor: see `links.QueueLink`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            raise AttributeError(name)

        async def call(*arguments: Any) -> Any:
            ray = import_ray()
            try:
                answer = await self._actor.call.remote(name, encode(list(arguments)))
            except ray.exceptions.RayTaskError as error:  # a defect, which no repetition mends
                raise FleetError(f"the queue failed on {name}: {type(error.cause).__name__}: {error.cause}") from error
            except ray.exceptions.RayError as error:
                raise QueueUnavailable(f"{type(error).__name__}: {str(error).splitlines()[0]:.200}") from error
            return result_of(name, answer)

        return call


def queue_name(fleet: str) -> str:
    """The name of a fleet's queue among the actors."""
    return f"{fleet}/queue"


# ---- actors ---------------------------------------------------------------------------------------------------------


class QueueActor:
    """The process of the queue."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        _log_to_stderr()
        self._config = FleetConfig(**settings)
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
            shares=config.shares,
        )
        self._server = QueueServer(options)
        self._server.start()
        self._keeper = WorkerKeeper(self._server, RayLauncher(config, self._server.secret))
        await self._keeper.begin(config.workers)

    async def status(self) -> dict[str, Any]:
        """See `QueueServer.status`, with what the keeper knows."""
        status = self._server.status()
        status["kept"] = self._keeper.names
        status["errors"] = dict(self._keeper.errors)
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
        from .worker import UNLIMITED_WAITING, Worker, model_of

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
        try:
            await Worker(self._name, llm, model_of(llm, self._config.model), link, publisher).run()
        finally:
            if publisher is not None:
                publisher.close()
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
            name=full, namespace=NAMESPACE, lifetime="detached", max_restarts=0, max_concurrency=CALLS_AT_ONCE,
            resources=resources or None, runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}}, **options,
        )  # fmt: skip
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


# ---- the cluster ----------------------------------------------------------------------------------------------------


def connect(address: str, fleet: str) -> Any:
    """Connect this process to a cluster. Returns the queue's actor. Raises FleetError."""
    _use_token(fleet)  # Ray reads it when it is imported
    ray = import_ray()
    _connect(ray, address, fleet)
    try:
        return ray.get_actor(queue_name(fleet), namespace=NAMESPACE)
    except ValueError as error:
        raise FleetError(
            f"there is no fleet named {fleet!r} on the cluster {address}: start it with `pagetide fleet start`"
        ) from error


def _connect(ray: Any, address: str, fleet: str) -> None:
    if ray.is_initialized():
        return
    if address == LOCAL:
        file = _state(fleet) / "address"
        try:
            address = file.read_text().strip()
        except OSError as error:
            raise FleetError(
                f"no fleet named {fleet!r} was started on this machine ({file} is not there): start it with `pagetide "
                "fleet start`, or name the address of its cluster"
            ) from error
    _use_token(fleet)
    _check_listens(address)
    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises ConnectionError, ValueError, RuntimeError and others
        raise FleetError(
            f"the Ray cluster {address} cannot be reached: {str(error).splitlines()[0] if str(error) else error!r:.300}. "
            "Is it running, and is this its token (RAY_AUTH_TOKEN_PATH)?"
        ) from error


def _check_listens(address: str) -> None:
    """Raise FleetError unless something listens at `address`, for which Ray itself would wait more than a minute."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise FleetError(
            f"the Ray cluster {address} cannot be reached: {error.strerror or error}. Is it running, and is this its address?"
        ) from error


def _state(fleet: str) -> Path:
    return state_dir(os.environ) / fleet


def _use_token(fleet: str) -> None:
    """Let Ray use the token of this fleet's own cluster, unless the user names another."""
    file = _state(fleet) / "ray-token"
    if file.is_file() and not any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(file)
        os.environ["RAY_AUTH_MODE"] = "token"


def start_cluster(fleet: str) -> str:
    """Start Ray on this machine, with a token of its own. Returns the address."""
    folder = _state(fleet)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = folder / "ray-token"
    if not token.is_file():
        descriptor = os.open(token, os.O_CREAT | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    _use_token(fleet)  # Ray reads it when it is imported
    import_ray()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "RAY_memory_usage_threshold": str(MEMORY_THRESHOLD),
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        MARK: _mark(f"127.0.0.1:{port}"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [
        sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}", "--node-ip-address=127.0.0.1",
        "--include-dashboard=false", f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats",
        f"--num-cpus={os.cpu_count() or 1}",
    ]  # fmt: skip
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise FleetError(f"Ray cannot be started:\n{(found.stderr or found.stdout)[-2000:]}")
    address = f"127.0.0.1:{port}"
    (folder / "address").write_text(address)
    return address


def stop_cluster(fleet: str) -> None:
    """End the Ray of this machine that `start_cluster` started."""
    import psutil

    file = _state(fleet) / "address"
    if not file.is_file():
        return
    mark = _mark(file.read_text().strip())
    file.unlink()
    mine: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # those of other users cannot be looked into
            if process.environ().get(MARK) == mark:  # a process that has set its title has no environment to be seen
                mine.update([process, *process.children(recursive=True)])
    mine.discard(psutil.Process())
    for process in mine:
        with suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(mine, timeout=3)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()


def _mark(address: str) -> str:
    """What the processes of a cluster have in their environment, so that they can be found."""
    return f"{os.getuid()}-{address}"


@dataclass(frozen=True, slots=True)
class RunningFleet:
    """A fleet that was started: the addresses of its front ends, and its actors."""

    urls: list[str]
    queue: Any
    fronts: list[Any]


def start_fleet(config: FleetConfig) -> RunningFleet:
    """Start the fleet's actors on its cluster. Raises FleetError."""
    address = start_cluster(config.name) if config.address == LOCAL else config.address
    ray = import_ray()
    _connect(ray, address, config.name)
    with suppress(ValueError):
        ray.get_actor(queue_name(config.name), namespace=NAMESPACE)
        raise FleetError(f"a fleet named {config.name!r} runs already: `pagetide fleet status`")
    settings = {**config.to_dict(), "state_dir": str(config.journal.parent.absolute())}
    options = {"namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1, "num_cpus": 0}
    queue = ray.remote(QueueActor).options(name=queue_name(config.name), max_concurrency=CALLS_AT_ONCE, **options)
    actor = queue.remote(settings)
    link = RayLink(actor)
    try:
        asyncio.run(link.status())
    except QueueUnavailable as error:
        raise FleetError(f"the queue cannot be started: {error}") from error
    fronts = [
        ray.remote(FrontActor).options(name=f"{config.name}/front-{number}", **options).remote(settings, number)
        for number in range(config.front_ends)
    ]
    return RunningFleet(ray.get([front.url.remote() for front in fronts]), actor, fronts)


def stop_fleet(fleet: str, address: str, drain_s: float) -> None:
    """End a fleet's actors, and its cluster if it is this machine's own."""
    actor = connect(address, fleet)
    ray = import_ray()
    with suppress(QueueUnavailable):
        asyncio.run(RayLink(actor).stop(drain_s))
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["namespace"] == NAMESPACE and one["name"].startswith(f"{fleet}/"):
            with suppress(ValueError):
                ray.kill(ray.get_actor(one["name"], namespace=NAMESPACE), no_restart=True)
    ray.shutdown()
    if address == LOCAL:
        stop_cluster(fleet)
