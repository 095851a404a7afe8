"""The settings of a fleet: `fleet.yaml`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from ..common.yaml_file import InvalidYaml, read_yaml
from ..server.config import ENGINE_SETTINGS, ServeConfig, by_name, unknown_setting, with_underscores

DEFAULT_NAME = "fleet"
LOCAL = "local"  # an address: Ray is started on this machine
_SERVER_SETTINGS = tuple(
    one.name for one in fields(ServeConfig) if one.name not in ("models", "host", "port", "record", "record_text")
)
_FILES = ("api_key_file", "chat_template", "ssl_certfile", "ssl_keyfile")  # of the server's settings
_DURABILITIES = ("process", "power")
MOST_PORT = 65_535
_COUNTS = {"workers": 10_000, "front_ends": 1_000, "threads": 10_000}  # and the most of each


class FleetConfigInvalid(ValueError):
    """A setting is wrong; the message names it."""


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The settings of a fleet.

    Attributes:
        model: A name of a models file, a folder, or a hub id in the local cache.
        name: Of the fleet; several on one cluster have different ones.
        address: Of a running Ray cluster, or "local".
        workers, front_ends: How many of each are started.
        engine: Arguments of `LLM` for each worker.
        worker_resources: What Ray reserves for a worker: `num_gpus`, `num_cpus`, and others by their names.
        threads: Of a worker's computations; 0: the machine's cores divided among its workers.
        host, port: Where the first front end listens; each further one listens on the next port.
        server: Other settings of `pagetide serve`.
        state_dir: Folder of the journal.
        durability: "process" or "power": the crash after which the journal has every record that a client has seen.
        hang_s: Seconds of silence after which a worker's requests are given to others.
        keep_s: How long ended requests can be read again.
        unread_s: An unfinished request that no client reads for so long is cancelled.
        shares: Weights of tenants (names of API keys) in the queue; others have 1.
        kv_events: Where each worker publishes the events of its prefix cache: the port of the first one; None: nowhere.
    """

    model: str
    name: str = DEFAULT_NAME
    address: str = LOCAL
    workers: int = 1
    front_ends: int = 1
    engine: Mapping[str, Any] = field(default_factory=dict)
    worker_resources: Mapping[str, float] = field(default_factory=dict)
    threads: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    server: Mapping[str, Any] = field(default_factory=dict)
    state_dir: str = ""
    durability: str = "process"
    hang_s: float = 5.0
    keep_s: float = 600.0
    unread_s: float = 3600.0
    shares: Mapping[str, float] = field(default_factory=dict)
    kv_events: int | None = None

    def __post_init__(self) -> None:
        for name in ("model", "address", "host"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise FleetConfigInvalid(f"{name} must be a text, got {value!r:.80}")
        if not isinstance(self.state_dir, str):
            raise FleetConfigInvalid(f"state_dir must be a folder's name, got {self.state_dir!r:.80}")
        if not isinstance(self.name, str) or not self.name.replace("-", "").replace("_", "").isalnum():
            raise FleetConfigInvalid(f"name must be of letters, digits, - and _, got {self.name!r:.80}")
        for name, most in _COUNTS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
                raise FleetConfigInvalid(f"{name} must be an integer from 0 to {most:,}, got {value!r:.80}")
        self._check_ports()
        for name in ("hang_s", "keep_s", "unread_s"):
            if not _is_number(value := getattr(self, name), 0.5):
                raise FleetConfigInvalid(f"{name} must be a number of seconds from 0.5 to 1e9, got {value!r:.80}")
        if self.durability not in _DURABILITIES:
            raise FleetConfigInvalid(f"durability must be process or power, got {self.durability!r:.80}")
        for name in ("engine", "server", "shares", "worker_resources"):
            if not isinstance(value := getattr(self, name), Mapping):
                raise FleetConfigInvalid(f"{name} must map names to values, got {value!r:.80}")
        for tenant, share in self.shares.items():
            if not _is_number(share, 0) or not share:
                raise FleetConfigInvalid(f"shares: {tenant!r} must have a weight above 0, got {share!r:.80}")
        for name, amount in self.worker_resources.items():
            if not _is_number(amount, 0):
                raise FleetConfigInvalid(f"worker_resources: {name} must be a number of at least 0, got {amount!r:.80}")
        _check_keys("engine", self.engine, ENGINE_SETTINGS)
        _check_keys("server", self.server, _SERVER_SETTINGS)

    def _check_ports(self) -> None:
        ports = [("port", self.port, self.front_ends, 0)]
        if self.kv_events is not None:
            ports.append(("kv_events", self.kv_events, 2 * self.workers, 1))
        for name, port, count, least in ports:
            if isinstance(port, bool) or not isinstance(port, int) or not least <= port <= MOST_PORT:
                raise FleetConfigInvalid(f"{name} must be a port from {least} to {MOST_PORT}, got {port!r:.80}")
            if port and port + count - 1 > MOST_PORT:
                raise FleetConfigInvalid(f"{name} {port} is too high: {count} ports from there on end above {MOST_PORT}")

    @property
    def journal(self) -> Path:
        """The journal's file."""
        folder = Path(self.state_dir) if self.state_dir else state_dir(os.environ) / self.name
        return folder / "journal.sqlite"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `FleetConfig(**data)`."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()}

    @classmethod
    def read(cls, file: Path, given: Mapping[str, Any] | None = None) -> FleetConfig:
        """The settings in a file; `given` go first. Raises FleetConfigInvalid."""
        try:
            _, data = read_yaml(file)
        except OSError as error:
            raise FleetConfigInvalid(f"{file} cannot be read: {error.strerror}") from error
        except InvalidYaml as error:  # names the file and the line
            raise FleetConfigInvalid(str(error)) from error
        if not isinstance(data, Mapping):
            raise FleetConfigInvalid(f"{file} must map settings to values")
        settings = by_name(data, str(file), FleetConfigInvalid)
        known = [one.name for one in fields(cls)]
        try:
            _check_keys(str(file), settings, known)
            settings.update({name: value for name, value in (given or {}).items() if value is not None})
            for name in ("engine", "server", "shares", "worker_resources"):
                if settings.get(name) is None:
                    settings[name] = {}
                elif isinstance(settings[name], Mapping):
                    settings[name] = by_name(settings[name], name, FleetConfigInvalid, partial(_setting, name))
            if not isinstance(settings.get("model"), str):
                raise FleetConfigInvalid("model: name the model that the workers load")
            for name in _FILES:  # written as seen from the settings' own folder
                if isinstance(given_file := settings["server"].get(name), str):
                    settings["server"][name] = str((file.parent / given_file).absolute())
            if isinstance(folder := settings.get("state_dir"), str) and folder:
                settings["state_dir"] = str((file.parent / folder).absolute())
            return cls(**settings)
        except FleetConfigInvalid as error:
            raise FleetConfigInvalid(f"{file}: {str(error).removeprefix(f'{file}: ')}") from error


def _setting(where: str, name: str) -> str:
    """The name of a setting, with "_" for "-". Names of tenants and of resources stay as they are."""
    return with_underscores(name) if where in ("engine", "server") or name.startswith("num-") else name


def _is_number(value: object, least: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < 1e9


def state_dir(environ: Mapping[str, str]) -> Path:
    """The folder of all fleets' states: $XDG_STATE_HOME/pagetide."""
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "pagetide"


def _check_keys(where: str, given: Mapping[str, Any], known: Any) -> None:
    for name in given:
        if name not in known:
            raise FleetConfigInvalid(f"{where}: {unknown_setting(str(name), list(known))}")
