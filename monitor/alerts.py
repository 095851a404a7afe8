"""Alerts: rules of the settings file, and when to tell that one is met or is met no longer. No processes, no network."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..common.settings import (
    Kind,
    Sourced,
    check_names,
    checked,
    choice,
    described,
    entries,
    located,
    readable,
    seconds,
    setting,
    settings_of,
    text,
)
from ..common.units import format_bytes, parse_bytes
from .errors import ConfigInvalid
from .events import program_name
from .holders import step_bytes
from .snapshot import Device, Snapshot

FREE, EXTERNAL, STALE, RECALL = "free", "external", "stale", "recall"
_PERCENT = re.compile(r"\s*([\d.]+)\s*%\s*")
_MAX_SUBJECTS = 256  # of a rule: devices, processes and leases that it is met by


def _size_or_share() -> Kind:
    """Bytes, such as 2GiB, or a share of the device, such as 5%: an int, or a float from 0 to 1."""

    def check(value: Any) -> int | float:
        if isinstance(value, str) and (match := _PERCENT.fullmatch(value)):
            share = float(match[1]) / 100
            if not 0 < share <= 1:
                raise ValueError(f"must be above 0% and at most 100%, got {value!r:.80}")
            return share
        return parse_bytes(value)

    return Kind("SIZE", check)


def _index_or_uuid() -> Kind:
    return Kind("DEVICE", lambda value: text().check(str(value) if type(value) is int else value))


def _command() -> Kind:
    def check(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not value or not all(isinstance(one, str) and one for one in value):
            raise ValueError(f"must be a list of a program and its arguments, as in [logger, -t, gpu], got {value!r:.80}")
        return tuple(value)

    return Kind("LIST", check)


def _url() -> Kind:
    def check(value: Any) -> str:
        with suppress(ValueError):
            if isinstance(value, str) and value.isascii() and value.isprintable() and " " not in value:
                parts = urlsplit(value)
                if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
                    return value
        # The value may hold a secret
        raise ValueError("must be an address that begins with http:// or https://, of ASCII characters without spaces")

    return Kind("URL", check)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRule:
    """A rule of the settings file. Exactly one of `command` and `webhook` is given."""

    # fmt: off
    when: str = field(metadata=described(
        choice(FREE, EXTERNAL, STALE, RECALL), "free: free memory is below `below`; external: a process without a lease holds "
        "more than `above`; stale: a device gives no new numbers; recall: an engine did not give memory back in time",
    ))
    name: str = setting("", text(), "name of the alert", unset="the value of `when`")
    device: str | None = setting(None, _index_or_uuid(), "index or uuid of the device", unset="each device")
    below: int | float | None = setting(None, _size_or_share(), "of `free`: bytes, or a share of the device")
    above: int | float | None = setting(None, _size_or_share(), "of `external`: bytes, or a share of the device")
    lasts: float = setting(0.0, seconds(0, 1e7), "tell only what has lasted so many seconds")
    every: float = setting(300.0, seconds(1, 1e7), "of each device, tell it at most once in so many seconds")
    command: tuple[str, ...] | None = setting(None, _command(), "program and arguments; it gets JSON on standard input")
    webhook: str | None = setting(None, _url(), "address to POST the same JSON to", secret=True)
    # fmt: on

    def trouble(self) -> str | None:
        """Which settings do not fit together; None if all do."""
        if (self.command is None) == (self.webhook is None):
            return f"alert {self.title!r} needs either a command or a webhook"
        if (self.below is not None) != (self.when == FREE):
            return f"below of alert {self.title!r}: `when: free` needs it, and no other rule has it"
        if self.above is not None and self.when != EXTERNAL:
            return f"above of alert {self.title!r}: only `when: external` has it"
        return None

    @property
    def title(self) -> str:
        """The name of the alert."""
        return self.name or self.when


def rules_of(file: Path, listed: Sourced) -> tuple[AlertRule, ...]:
    """The rules in a settings file. Raises ConfigInvalid, naming the line."""
    if not isinstance(listed.value, list):
        raise ConfigInvalid(f"{listed.where}: alerts must be a list of rules, got {listed.value!r:.80}")
    known, found = settings_of(AlertRule), []
    for value, node in zip(listed.value, listed.node.value, strict=True):
        where = f"{file}:{node.start_mark.line + 1}"
        given = entries(file, Sourced(value, where, node), ConfigInvalid) if isinstance(value, Mapping) else {}
        if "when" not in given:
            raise ConfigInvalid(f"{where}: an alert is a mapping with `when:`, as in `when: free`, got {value!r:.80}")
        check_names(given, known, ConfigInvalid)
        given = readable(given, known)
        values = {name: one.value for name, one in given.items()}

        rule = AlertRule(**located(given, partial(checked, AlertRule, values, ConfigInvalid), ConfigInvalid))
        if (trouble := rule.trouble()) is not None:
            raise ConfigInvalid(f"{where}: {trouble}")
        found.append(rule)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Alert:
    """What is sent: a rule is met (`firing`), or is met no longer."""

    rule: AlertRule
    firing: bool
    text: str
    device: Device
    pid: int | None = None
    engine: str | None = None

    def to_dict(self, time_s: float, host: str) -> dict[str, Any]:
        """The JSON of a command or webhook; chat services show its "text"."""
        return {
            "alert": self.rule.title,
            "state": "firing" if self.firing else "resolved",
            "text": f"{host}: {self.text}",
            "time": time_s,
            "host": host,
            "device": self.device.info.index,
            "device_uuid": self.device.info.uuid,
            "pid": self.pid,
            "engine": self.engine,
        }


@dataclass(frozen=True, slots=True)
class _Finding:
    """A rule is met by a device, or by a process or lease on it."""

    text: str
    device: Device
    pid: int | None = None
    engine: str | None = None


@dataclass(slots=True)
class _Met:
    """Since when a rule is met by something, and whether that was told."""

    finding: _Finding
    since_ns: int
    told: bool = False
    counted: bool = False  # in the text of another one


class Alerts:
    """Evaluates rules on one snapshot after the other. Not thread-safe.

    A rule is told once for what it is met by, and once more when that has passed. Of each device a rule tells one in `every`
    seconds; what comes in between waits, and is counted by the next one.
    """

    def __init__(self, rules: Sequence[AlertRule]) -> None:
        self.rules = tuple(rules)
        self._met: dict[tuple[AlertRule, str, int | None, str | None], _Met] = {}
        self._told_ns: dict[tuple[AlertRule, str], int] = {}

    def change(self, rules: Sequence[AlertRule]) -> None:
        """Take these rules from now on; those that stay keep their state."""
        self.rules = tuple(rules)
        self._met = {key: met for key, met in self._met.items() if key[0] in self.rules}
        self._told_ns = {key: at_ns for key, at_ns in self._told_ns.items() if key[0] in self.rules}

    def look(self, snapshot: Snapshot) -> list[Alert]:
        """What is to be told now."""
        now_ns, alerts = snapshot.at_ns, []
        seen = set()
        for rule in self.rules:
            for count, finding in enumerate(_findings(rule, snapshot)):
                if count >= _MAX_SUBJECTS:
                    break
                key = rule, finding.device.info.uuid, finding.pid, finding.engine
                seen.add(key)
                met = self._met.setdefault(key, _Met(finding, now_ns))
                met.finding = finding
        for key in self._met.keys() - seen:
            met = self._met.pop(key)
            if met.told:
                alerts.append(_alert(key[0], met.finding, firing=False))
        for rule, uuid in dict.fromkeys(key[:2] for key in self._met):
            alerts += self._due(rule, uuid, now_ns)
        return alerts

    def _due(self, rule: AlertRule, uuid: str, now_ns: int) -> Iterator[Alert]:
        """The alert of a rule and device, if one may be told: that of the oldest finding, and how many more there are."""
        last_ns = self._told_ns.get((rule, uuid))
        if last_ns is not None and now_ns - last_ns < rule.every * 1e9:
            return
        waiting = [met for key, met in self._met.items() if key[:2] == (rule, uuid) and not met.told and not met.counted]
        ripe = [met for met in waiting if now_ns - met.since_ns >= rule.lasts * 1e9]
        if rule.when == FREE:
            ripe = [met for met in ripe if _names_the_largest(met, now_ns)]
        if not ripe:
            return
        ripe[0].told = True
        for met in ripe[1:]:
            met.counted = True
        self._told_ns[rule, uuid] = now_ns
        yield _alert(rule, ripe[0].finding, firing=True, more=len(ripe) - 1)


def _names_the_largest(met: _Met, now_ns: int) -> bool:
    """Whether processes were listed since the rule is met; an older list would name the wrong one. Not for ever."""
    detail = met.finding.device.detail
    return detail.at_ns >= met.since_ns or now_ns - met.since_ns > 2 * detail.interval_ns


def _alert(rule: AlertRule, finding: _Finding, *, firing: bool, more: int = 0) -> Alert:
    said = finding.text if firing else f"no longer: {finding.text}"
    return Alert(rule, firing, f"{said}, and {more} more" if more else said, finding.device, finding.pid, finding.engine)


def _findings(rule: AlertRule, snapshot: Snapshot) -> Iterator[_Finding]:
    for device in snapshot.devices:
        if rule.device in (None, device.info.index, device.info.uuid):
            yield from {FREE: _free, EXTERNAL: _external, STALE: _stale, RECALL: _recall}[rule.when](rule, device, snapshot)


def _free(rule: AlertRule, device: Device, snapshot: Snapshot) -> Iterator[_Finding]:
    free_bytes, bound = device.memory.free_bytes, _bytes(rule.below, device)
    if free_bytes is not None and bound is not None and free_bytes < bound:
        largest = max(device.detail.reading.processes or (), key=lambda use: use.used_bytes or 0, default=None)
        holds = ""
        if largest is not None and largest.used_bytes:
            name = largest.engine or program_name(largest.command) or "a process"
            holds = f"; the most has {name} (pid {largest.pid}), {format_bytes(largest.used_bytes)}"
        yield _Finding(f"{format_bytes(free_bytes)} free on {_named(device)}, less than {format_bytes(bound)}{holds}", device)


def _external(rule: AlertRule, device: Device, snapshot: Snapshot) -> Iterator[_Finding]:
    bound = _bytes(rule.above, device)
    bound = step_bytes(device.memory.total_bytes) if bound is None else bound
    leased = {lease.pid for lease in snapshot.leases if lease.device_uuid == device.info.uuid}
    for use in device.detail.reading.processes or ():
        if use.pid not in leased and use.used_bytes is not None and use.used_bytes > bound:
            name = f"{program_name(use.command) or 'a process'} (pid {use.pid}, {use.user or 'unknown user'})"
            yield _Finding(f"{name} holds {format_bytes(use.used_bytes)} of {_named(device)} without a lease", device, use.pid)


def _stale(rule: AlertRule, device: Device, snapshot: Snapshot) -> Iterator[_Finding]:
    memory = device.memory
    if memory.error is not None:
        yield _Finding(f"{_named(device)} cannot be read: {memory.error}", device)
    elif memory.at_ns and memory.is_stale(snapshot.at_ns):
        yield _Finding(f"{_named(device)} gives no new numbers", device)


def _recall(rule: AlertRule, device: Device, snapshot: Snapshot) -> Iterator[_Finding]:
    for lease in snapshot.leases:
        if lease.device_uuid == device.info.uuid and lease.state == "overdue":
            what = f"{lease.engine} (pid {lease.pid}) has not given memory of {_named(device)} back in time"
            yield _Finding(what, device, lease.pid, lease.engine)


def _bytes(bound: int | float | None, device: Device) -> int | None:
    """A bound in bytes of this device."""
    if isinstance(bound, float):
        total = device.memory.total_bytes
        return None if total is None else int(bound * total)
    return bound


def _named(device: Device) -> str:
    return f"device {device.info.index}"
