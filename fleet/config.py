"""The settings of a fleet: `fleet.yaml`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..api.arguments import table_answer
from ..common.settings import (
    Kind,
    Settings,
    Sourced,
    check_names,
    checked,
    choice,
    described,
    entries,
    integer,
    located,
    mapping,
    number,
    of_file,
    readable,
    seconds,
    setting,
    settings_of,
    text,
    unknown_setting,
)
from ..common.state_dir import state_dir
from ..engine.config import EngineArguments
from ..server.config import ENGINE_SETTINGS, ServeConfig

DEFAULT_NAME = "fleet"
LOCAL = "local"  # an address: Ray is started on this machine
MOST_PORT = 65_535
_SERVER_SETTINGS = {
    name: one for name, one in settings_of(ServeConfig).items() if name not in ("host", "port", "record", "record_text")
}
_FILES = ("api_key_file", "chat_template", "ssl_certfile", "ssl_keyfile")  # of the server's settings


class FleetConfigInvalid(ValueError):
    """A setting is wrong; the message names it."""


def _of(settings: Settings, cls: Any) -> Kind:
    """A mapping of some settings of `cls` to values."""

    def check(name: str, value: Any) -> None:
        if name not in settings:
            raise ValueError(unknown_setting(name, settings, table_answer))
        if value is not None:
            checked(cls, {name: value}, ValueError)

    return mapping(check)


def _name(given: Any) -> str:
    if not isinstance(given, str) or not re.fullmatch(r"[\w-]*[^\W_][\w-]*", given):
        raise ValueError(f"must be of letters, digits, - and _, got {given!r:.80}")
    return given


def _folder(given: Any) -> str:
    if not isinstance(given, str):
        raise ValueError(f"must be a folder's name, got {given!r:.80}")
    return given


def _weight(name: str, given: Any) -> None:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < 1e9:
        raise ValueError(f"{name!r} must have a weight above 0, got {given!r:.80}")


def _amount(name: str, given: Any) -> None:
    try:
        number(0, 1e9).check(given)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The settings of a fleet."""

    # fmt: off
    model: str = field(metadata=described(text(), "what each worker loads: a name, a folder or a hub id in the local cache"))
    name: str = setting(DEFAULT_NAME, Kind("NAME", _name), "name of the fleet; several on one cluster have different ones")
    address: str = setting(LOCAL, text("ADDRESS"), "address of a running Ray cluster, or local for this machine")
    workers: int = setting(1, integer(0, 10_000), "number of workers")
    front_ends: int = setting(1, integer(0, 1_000), "number of front ends")
    engine: Mapping[str, Any] = setting(
        dict, _of(ENGINE_SETTINGS, EngineArguments), "arguments of `LLM` for each worker, as in `pagetide serve`'s file",
    )
    worker_resources: Mapping[str, float] = setting(
        dict, mapping(_amount), "what Ray reserves for each worker: `num_gpus`, `num_cpus`, and others by their names",
    )
    threads: int = setting(
        0, integer(0, 10_000), "threads of a worker's computations (`OMP_NUM_THREADS`, which Ray would set to 1)",
        unset="cores / workers",
    )
    host: str = setting("127.0.0.1", text("ADDRESS"), "where the front ends listen")
    port: int = setting(8000, integer(0, MOST_PORT, "a port"), "port of the first front end; others take the following ones")
    server: Mapping[str, Any] = setting(
        dict, _of(_SERVER_SETTINGS, ServeConfig), "other settings of `pagetide serve`: keys, TLS, limits",
    )
    state_dir: str = setting("", Kind("DIR", _folder), "folder of the journal", unset="$XDG_STATE_HOME/pagetide/NAME")
    durability: str = setting(
        "process", choice("process", "power"), "the crash after which the journal has every record that a client has seen",
    )
    hang_s: float = setting(5.0, seconds(0.5, 1e9), "seconds of silence after which a worker's requests are given to others")
    keep_s: float = setting(600.0, seconds(0.5, 1e9), "ended requests can be read again for so long, 20,000 of them at most")
    unread_s: float = setting(3600.0, seconds(0.5, 1e9), "an unfinished request that no client reads for so long is cancelled")
    shares: Mapping[str, float] = setting(
        dict, mapping(_weight), "weights of tenants (names of API keys) among waiting requests of one priority, and for "
        "places in the queue", unset="1 each",
    )
    kv_events: int | None = setting(None, integer(1, MOST_PORT, "a port"), "first port of the workers' KV events", unset="off")
    # fmt: on

    def __post_init__(self) -> None:
        checked(type(self), {name: getattr(self, name) for name in settings_of(type(self))}, FleetConfigInvalid)
        ports = [("port", self.port, self.front_ends)]
        if self.kv_events is not None:
            ports.append(("kv_events", self.kv_events, 2 * self.workers))
        for name, port, count in ports:
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
        known = settings_of(cls)
        found = readable(of_file(file, FleetConfigInvalid), known)
        check_names(found, known, FleetConfigInvalid, answer=table_answer)
        found |= {name: Sourced(value, known[name].flags[0]) for name, value in (given or {}).items() if value is not None}
        values = {name: one.value for name, one in found.items()}
        if "model" not in found:
            raise FleetConfigInvalid(f"{file}: model: name the model that the workers load")
        inner_settings: dict[str, Settings] = {"engine": ENGINE_SETTINGS, "server": _SERVER_SETTINGS}
        for name in ("engine", "server", "shares", "worker_resources"):
            if isinstance(values.get(name), Mapping):
                names = inner_settings.get(name, {})
                inner = entries(file, found[name], FleetConfigInvalid, None if names else _resource)
                values[name] = {key: one.value for key, one in readable(inner, names).items()}
        for name in _FILES:  # written as seen from the settings' own folder
            if isinstance(values.get("server"), dict) and isinstance(named := values["server"].get(name), str):
                values["server"][name] = str((file.parent / named).absolute())
        if isinstance(folder := values.get("state_dir"), str) and folder:
            values["state_dir"] = str((file.parent / folder).absolute())
        return located(found, lambda: cls(**values), FleetConfigInvalid)


def _resource(name: str) -> str:
    """The name of a resource or a tenant, which stays as it is, but for Ray's own."""
    return name.replace("-", "_") if name.startswith("num-") else name
