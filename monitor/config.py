"""The settings of a monitor, from a YAML file and flags, as one checked, frozen object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.settings import (
    Kind,
    Sourced,
    check_names,
    checked,
    choice,
    integer,
    items,
    located,
    of_file,
    path,
    readable,
    seconds,
    setting,
    settings_of,
    share,
    size,
    text,
)
from ..common.units import format_bytes
from .alerts import AlertRule, rules_of
from .errors import ConfigInvalid

LEAST_EVENTS_BYTES = 4 << 20  # of the log of events

# Settings that a running monitor applies on SIGHUP; the others need a restart.
RELOADED = ("devices", "interval", "detail_interval", "metrics_port", "metrics_address", "token_file", "alerts", "log_level")


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """The devices, intervals and access rights of a monitor. The YAML keys are the names of the fields."""

    # fmt: off
    source: str = setting("auto", text("S"), "auto, nvml, host or replay:FILE")
    devices: tuple[str, ...] = setting(
        (), items(text(), "I,J"), "watch only these devices, by index or uuid", unset="all",
    )
    interval: float = setting(0.02, seconds(0.001, 3600), "interval between memory readings")
    detail_interval: float = setting(1.0, seconds(0.001, 3600), "interval between readings of load and processes")
    metrics_port: int | None = setting(
        None, integer(0, 65_535, "a port"), "port of the metrics page; 0 picks a free one", unset="no page",
    )
    metrics_address: str = setting("127.0.0.1", text("A"), "address of the metrics page")
    token_file: Path | None = setting(
        None, path("FILE"), "file with the token for reservations over HTTP, beside the metrics page; made if there is none",
        unset="HTTP is read-only",
    )
    runtime_dir: Path | None = setting(
        None, path("DIR"), "directory of the monitor", unset="PAGETIDE_RUNTIME_DIR, or the usual ones",
    )
    group: str | None = setting(None, text("G"), "serve the whole machine from /run/pagetide, readable by this group")
    capacity: int | None = setting(None, size(), "with host: use a test device of this size, e.g. 2GiB")
    members: tuple[int, ...] = setting(
        (), items(integer(1, 2**31 - 1, "a process id"), "PID,..."), "with --capacity: the processes that use the test device",
    )
    headroom: int | None = setting(None, size(), "memory never leased", unset="a sixteenth of each device")
    user_engines: int = setting(
        64, integer(1, 100_000, "a number of engines"), "maximum leases and reservations per user; no limit for root",
    )
    user_share: float = setting(
        0.9, share(), "maximum share of a device's leasable memory that minimums and reservations may guarantee to one user; "
        "no limit for root", unset="90%",
    )
    events_size: int = setting(
        64 << 20, size("no events"), "maximum size of the log of events on disk; 0 keeps none", unset="64MiB",
    )
    events_dir: Path | None = setting(
        None, path("DIR"), "directory of the log of events", unset="/var/lib/pagetide/events with a group, else "
        "$XDG_STATE_HOME/pagetide/events; with a directory of the monitor, in that",
    )
    idle_after: float = setting(600.0, seconds(1, 1e7), "memory that a process holds without use for so long is an event")
    alerts: tuple[AlertRule, ...] = setting((), Kind("RULES", tuple), "rules: what is told to a command or webhook")
    log_level: str = setting("info", choice("debug", "info", "warning", "error", metavar="L"), "debug, info, warning, error")
    # fmt: on

    @classmethod
    def resolve(cls, file: Path | None, flags: Mapping[str, Any]) -> MonitorConfig:
        """Merge the settings of `file` with `flags`; flags that are not None win. Raises ConfigInvalid, naming the setting."""
        known = settings_of(cls)
        given = {} if file is None else of_file(file, ConfigInvalid)
        check_names(given, known, ConfigInvalid)
        given |= {name: Sourced(value, known[name].flags[0]) for name, value in flags.items() if value is not None}
        given = readable(given, known)
        values = {name: one.value for name, one in given.items()}
        if file is not None and "alerts" in given:
            values["alerts"] = rules_of(file, given["alerts"])
        config = cls(**located(given, lambda: checked(cls, values, ConfigInvalid), ConfigInvalid))
        if config.capacity is not None and config.headroom is not None and config.headroom >= config.capacity:
            raise ConfigInvalid(
                f"headroom ({format_bytes(config.headroom)}) leaves nothing of the capacity "
                f"({format_bytes(config.capacity)}) to lease; choose a smaller headroom"
            )
        if 0 < config.events_size < LEAST_EVENTS_BYTES:
            raise ConfigInvalid(
                f"events_size must be 0 or at least {format_bytes(LEAST_EVENTS_BYTES)}, got {format_bytes(config.events_size)}"
            )
        if config.token_file is not None and config.metrics_port is None:
            raise ConfigInvalid("token_file is for requests over HTTP, and no port is served; set metrics_port too")
        return config
