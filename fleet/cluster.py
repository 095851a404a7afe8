"""The Ray cluster of a fleet: the library, a cluster of this machine, and the link of a process to the fleet's queue."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..common.error_text import install_command
from ..common.heartbeat import STILL_S
from ..common.state_dir import state_dir
from .config import LOCAL
from .errors import FleetError
from .links import CALLS, QueueUnavailable, result_of
from .messages import encode

NAMESPACE = "pagetide"
OBJECT_STORE_BYTES = 100 << 20  # Ray's own; nothing large passes through it
MEMORY_THRESHOLD = 0.98  # of the node's memory, at which Ray kills workers: above what elastic pools fill
REACH_S = 5.0
ANSWER_S = STILL_S + 5.0  # the watchdog of a queue that hangs has killed it by then
START_S = 600.0  # a queue that starts reads its journal
MARK = "PAGETIDE_FLEET_CLUSTER"


def import_ray() -> Any:
    """The library. Raises FleetError, which names the extra."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise FleetError(f"a fleet runs on Ray, which is not installed: {install_command('ray')} (about 80 MB)") from error
    return ray


# ---- calls ----------------------------------------------------------------------------------------------------------


class RayLink:
    """A link to the queue's actor: see `links.QueueLink`. A call may take `answer_s`, beyond what it is to wait."""

    def __init__(self, actor: Any, answer_s: float = ANSWER_S) -> None:
        self._actor = actor
        self._answer_s = answer_s

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            raise AttributeError(name)

        async def call(*arguments: Any) -> Any:
            ray = import_ray()
            most_s = self._answer_s + (arguments[0] if name in ("info", "stop") else 0.0)
            try:
                async with asyncio.timeout(most_s):
                    answer = await self._actor.call.remote(name, encode(list(arguments)))
            except TimeoutError as error:
                raise QueueUnavailable(f"the queue has not answered {name} for {most_s:g} s") from error
            except ray.exceptions.RayTaskError as error:  # a defect, which no repetition mends
                raise FleetError(f"the queue failed on {name}: {type(error.cause).__name__}: {error.cause}") from error
            except ray.exceptions.RayError as error:
                raise QueueUnavailable(f"{type(error).__name__}: {str(error).splitlines()[0]:.200}") from error
            return result_of(name, answer)

        return call


def queue_name(fleet: str) -> str:
    """The name of a fleet's queue among the actors."""
    return f"{fleet}/queue"


# ---- the cluster ----------------------------------------------------------------------------------------------------


def connect(address: str, fleet: str) -> Any:
    """Connect this process to a cluster. Returns the queue's actor. Raises FleetError."""
    _use_token(fleet)  # Ray reads it when it is imported
    ray = import_ray()
    connect_ray(ray, address, fleet)
    try:
        return ray.get_actor(queue_name(fleet), namespace=NAMESPACE)
    except ValueError as error:
        raise FleetError(
            f"there is no fleet named {fleet!r} on the cluster {address}: start it with `pagetide fleet start`"
        ) from error


def is_running(fleet: str) -> bool:
    """Whether this machine's cluster of a fleet runs: its head does, and answers."""
    try:
        address = (_state(fleet) / "address").read_text().strip()
        _check_listens(address)
    except (OSError, FleetError):
        return False
    return bool(_processes(fleet, address))


@contextmanager
def starting(fleet: str) -> Iterator[None]:
    """Held by the one process that starts a fleet on this machine. Raises FleetError while another one does."""
    import fcntl

    folder = _state(fleet)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (folder / "start.lock").open("w")
    except OSError as error:
        raise FleetError(
            f"the folder {folder} of the fleet cannot be written: {error.strerror}. If it belongs to another user, choose "
            "another name, or set XDG_STATE_HOME"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise FleetError(f"another process is starting the fleet {fleet!r} now") from error
        yield


def connect_ray(ray: Any, address: str, fleet: str) -> None:
    """Connect this process to a cluster, unless it is connected. Raises FleetError."""
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
        if not is_running(fleet):  # another program may listen there, which Ray would ask for a minute
            raise FleetError(
                f"the fleet {fleet!r} of this machine is no longer running: `pagetide fleet start` resumes from its journal"
            )
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
    """Let Ray use the token of this fleet's own cluster, unless the user names another. That of a fleet that this process, or
    the one that started it, used before is not the user's.
    """
    file, named = _state(fleet) / "ray-token", Path(os.environ.get("RAY_AUTH_TOKEN_PATH", ""))
    is_of_user = str(named) != "." and (named.name, named.parent.parent.name) != ("ray-token", "pagetide")
    if os.access(file, os.R_OK) and not is_of_user and not os.environ.get("RAY_AUTH_TOKEN"):
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
        "RAY_worker_niceness": "0",  # 15 by default: any busy neighbour would take the cores
        "RAY_USAGE_STATS_ENABLED": "0",
        MARK: _mark(fleet, f"127.0.0.1:{port}"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [
        sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}",
        "--include-dashboard=false", f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats",
        f"--num-cpus={os.cpu_count() or 1}",
    ]  # fmt: skip
    address = f"127.0.0.1:{port}"
    (folder / "address").write_text(address)
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise FleetError(f"Ray cannot be started:\n{(found.stderr or found.stdout)[-2000:]}")
    return address


def stop_cluster(fleet: str) -> bool:
    """End the Ray of this machine that `start_cluster` started, and what it has left. Returns whether there was something."""
    import psutil

    file = _state(fleet) / "address"
    if not file.is_file():
        return False
    processes = _processes(fleet, file.read_text().strip())
    file.unlink()
    for process in processes:
        with suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=3)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    return bool(processes)


def _processes(fleet: str, address: str) -> list[Any]:
    """The processes of this user's cluster at `address`."""
    import psutil

    mark = _mark(fleet, address)
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # those of other users cannot be looked into
            if process.environ().get(MARK) == mark:  # a process that has set its title has no environment to be seen
                found.update([process, *process.children(recursive=True)])
    return list(found - {psutil.Process()})


def _mark(fleet: str, address: str) -> str:
    """What the processes of a cluster have in their environment, so that they can be found."""
    return f"{os.getuid()}-{fleet}-{address}"
