"""The settings of a monitor, from a YAML file and flags, as one checked, frozen object."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..common.units import format_bytes, parse_bytes
from .errors import ConfigInvalid

# Settings that a running monitor applies on SIGHUP; the others need a restart.
RELOADED = ("devices", "interval", "detail_interval", "metrics_port", "metrics_address", "log_level")
LOG_LEVELS = ("debug", "info", "warning", "error")
LONGEST_INTERVAL_S = 3600.0
SHORTEST_INTERVAL_S = 0.001


@dataclass(frozen=True, slots=True)
class MonitorConfig:
    """The devices, intervals and access rights of a monitor. The YAML keys are the names of the fields."""

    source: str = "auto"  # auto, nvml, host, replay:FILE
    devices: tuple[str, ...] = ()  # indices or uuids; empty: all
    interval: float = 0.02  # seconds between two readings of memory
    detail_interval: float = 1.0  # seconds between two readings of load and processes
    metrics_port: int | None = None  # 0 takes a free port; None: no metrics page
    metrics_address: str = "127.0.0.1"
    runtime_dir: Path | None = None
    group: str | None = None  # the group that may read the record of a machine-wide monitor
    capacity: int | None = None  # bytes of a test device of host memory
    members: tuple[int, ...] = ()  # processes on the test device
    headroom: int | None = None  # bytes that are never leased; None: a sixteenth of each device
    user_engines: int = 64  # leases and reservations per user at a time; root and the monitor's own user have no limit
    # The largest share of a device's leasable memory that may be promised to one user, with the same exceptions.
    user_share: float = 0.9
    log_level: str = "info"

    @classmethod
    def resolve(cls, file: Path | None, flags: Mapping[str, Any]) -> MonitorConfig:
        """Merge the settings of `file` with `flags`; flags that are not None win. Raises ConfigInvalid, naming the setting."""
        given = {} if file is None else read_yaml(file)
        given |= {name: value for name, value in flags.items() if value is not None}
        config = cls(**{name: _checked(name, value) for name, value in given.items() if value is not None})
        if config.capacity is not None and config.headroom is not None and config.headroom >= config.capacity:
            raise ConfigInvalid(
                f"headroom ({format_bytes(config.headroom)}) leaves nothing of the capacity "
                f"({format_bytes(config.capacity)}) to lease; choose a smaller headroom"
            )
        return config


def _checked(name: str, value: Any) -> Any:
    try:
        return _CHECKS[name](name, value)
    except ConfigInvalid:
        raise
    # Numbers of thousands of digits, unknown users in ~USER, ...
    except (ValueError, OverflowError, RuntimeError) as error:
        raise ConfigInvalid(f"{name} cannot be used: {error}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings in a file, unchecked. Raises ConfigInvalid: file missing, invalid YAML, or unknown key."""
    from ..common import yaml_file  # imports yaml, which a monitor without a file does not need

    try:
        _, content = yaml_file.read_yaml(path)
    except OSError as error:
        raise ConfigInvalid(f"the configuration {path} cannot be read: {error.strerror}") from error
    except yaml_file.InvalidYaml as error:
        raise ConfigInvalid(f"the configuration {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigInvalid(f"the configuration {path} must be a mapping such as `interval: 0.02`")
    for key in content:
        if key not in _CHECKS:
            near = difflib.get_close_matches(str(key), _CHECKS, n=1)
            meant = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(_CHECKS)}"
            raise ConfigInvalid(f"the configuration {path} has an unknown key {key!r:.80}{meant}")
    return content


# ---- checks, one per kind of setting: (name for messages, value) -> checked value -----------------


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigInvalid(f"{name} must be a text, got {value!r:.80}")
    return value


def _seconds(name: str, value: Any) -> float:
    """A number of seconds, or a string such as 20ms, 1.5s."""
    match = re.fullmatch(r"\s*([\d.]+)\s*(ms|s)\s*", value) if isinstance(value, str) else None
    try:
        seconds = float(match[1]) / (1000 if match[2] == "ms" else 1) if match else float(value)
    except (TypeError, ValueError):
        raise ConfigInvalid(f"{name} must be a number of seconds, such as 0.02 or 20ms, got {value!r:.80}") from None
    if isinstance(value, bool) or not math.isfinite(seconds):
        raise ConfigInvalid(f"{name} must be a number of seconds, such as 0.02 or 20ms, got {value!r:.80}")
    if not SHORTEST_INTERVAL_S <= seconds <= LONGEST_INTERVAL_S:
        raise ConfigInvalid(
            f"{name} must be between {SHORTEST_INTERVAL_S:g} and {LONGEST_INTERVAL_S:g} seconds, got {value!r:.80}"
        )
    return seconds


def _whole(name: str, value: Any, low: int, high: int, what: str) -> int:
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= high:
        raise ConfigInvalid(f"{name} must be {what} between {low} and {high}, got {value!r:.80}")
    return number


def _share(name: str, value: Any) -> float:
    """A share, such as 0.9, or a string such as 90%."""
    percent = value.strip().removesuffix("%") if isinstance(value, str) and value.strip().endswith("%") else None
    try:
        share = float(value) if percent is None else float(percent) / 100
    except (TypeError, ValueError):
        share = math.nan
    if isinstance(value, bool) or not 0 < share <= 1:
        raise ConfigInvalid(f"{name} must be a share above 0 and at most 1, such as 0.9 or 90%, got {value!r}")
    return share


def _engines(name: str, value: Any) -> int:
    return _whole(name, value, 1, 100_000, "a number of engines")


def _port(name: str, value: Any) -> int:
    return _whole(name, value, 0, 65535, "a port")


def _items(name: str, value: Any) -> list[str]:
    """A list, or a comma-separated string."""
    values = value.split(",") if isinstance(value, str) else value
    if isinstance(values, int) and not isinstance(values, bool):
        values = [values]
    if not isinstance(values, list | tuple) or not all(isinstance(item, str | int) for item in values):
        raise ConfigInvalid(f"{name} must be a list such as [0, 1], got {value!r:.80}")
    return [text for item in values for part in str(item).split(",") if (text := part.strip())]


def _devices(name: str, value: Any) -> tuple[str, ...]:
    return tuple(_items(name, value))


def _members(name: str, value: Any) -> tuple[int, ...]:
    return tuple(_whole(name, item, 1, 2**31 - 1, "a process id") for item in _items(name, value))


def _bytes(name: str, value: Any) -> int:
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ConfigInvalid(f"{name}: {error}") from None


def _path(name: str, value: Any) -> Path:
    return Path(_text(name, str(value) if isinstance(value, Path) else value)).expanduser()


def _level(name: str, value: Any) -> str:
    level = _text(name, value).lower()
    if level not in LOG_LEVELS:
        raise ConfigInvalid(f"{name} must be one of {', '.join(LOG_LEVELS)}, got {value!r:.80}")
    return level


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "source": _text,
    "devices": _devices,
    "interval": _seconds,
    "detail_interval": _seconds,
    "metrics_port": _port,
    "metrics_address": _text,
    "runtime_dir": _path,
    "group": _text,
    "capacity": _bytes,
    "members": _members,
    "headroom": _bytes,
    "user_engines": _engines,
    "user_share": _share,
    "log_level": _level,
}
assert set(_CHECKS) == {field.name for field in fields(MonitorConfig)}
