"""`vram-monitor events` and `vram-monitor owners`: what happened to memory, and the owners of the processes that hold it."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from .common.units import parse_seconds
from .monitor.errors import ConfigInvalid, RecordMissing
from .monitor.event_log import EventReader, files_of
from .monitor.events import EventKind, MemoryEvent, to_dict
from .monitor.holders import names_of, summarize
from .monitor.owners import charge, owner_uses
from .monitor.snapshot import MAX_HOST_PROCESSES, DeviceKind, Snapshot
from .monitor.snapshot_json import plain

if TYPE_CHECKING:
    from rich.console import Console

    from .monitor.runtime_dir import RuntimeDir

FOLLOW_S = 0.5  # between two looks at the log
_ROWS = 2000  # of a table that is printed at once
_PIPE_CELLS = 240  # width of a table that no terminal shows
_CLOCK = re.compile(r"\d{1,2}:\d{2}(:\d{2})?")


def find_log(directories: Sequence[RuntimeDir], named: Path | None) -> Path:
    """The log of events: the named one, or the first that there is. Raises RecordMissing."""
    if named is not None:
        looked = [named]
    else:
        looked = [path for directory in directories for path in (directory.events, directory.event_log())]
    for path in looked:
        with suppress(PermissionError):  # another user's
            if files_of(path):
                return path.resolve()
    where = " or ".join(dict.fromkeys(str(path) for path in looked))
    raise RecordMissing(
        f"no events that you may read are kept in {where}: they are kept while `vram-monitor serve` or an engine's monitor "
        "runs; one with events_dir in its settings keeps them there (--events-dir)"
    )


def time_of(option: str, text: str, now_s: float) -> float:
    """Seconds since 1970 of "03:12", "2026-11-27 03:12", "90s", "15min", "2h", "1d" (ago). Raises ConfigInvalid."""
    given = text.strip()
    if given[-1:].isalpha():
        with suppress(ValueError):
            return now_s - parse_seconds(given)
    try:
        if _CLOCK.fullmatch(given):
            return _last_time_of_day(given, now_s)
        return datetime.fromisoformat(given).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ConfigInvalid(
            f"{option}: cannot read {text!r:.80} as a time; write 03:12, 2026-11-27 03:12, or how long ago: 90s, 15min, 2h, 1d"
        ) from None


def _last_time_of_day(given: str, now_s: float) -> float:
    """When it was last so late. An hour that a clock set back has twice counts twice. Raises ValueError."""
    hour, minute, second = [*map(int, given.split(":")), 0][:3]
    today = datetime.fromtimestamp(now_s).replace(hour=hour, minute=minute, second=second, microsecond=0)
    there = [(today - timedelta(days=days)).replace(fold=fold).timestamp() for days in (0, 1) for fold in (0, 1)]
    return max(at_s for at_s in there if at_s <= now_s)


def span_of(since: str, until: str | None, now_s: float) -> tuple[float, float]:
    """The first and the last second. Of two times of day the second may be to come. Raises ConfigInvalid."""
    since_s, until_s = time_of("--since", since, now_s), math.inf
    if until is not None:
        until_s = time_of("--until", until, now_s)
        if until_s < since_s and all(_CLOCK.fullmatch(one.strip()) for one in (since, until)):
            until_s = math.inf
    if until_s < since_s:
        raise ConfigInvalid(f"--until {until} is before --since {since}; a time of day is the last one that has passed")
    return since_s, until_s


def show_events(args: Namespace, log: Path) -> int:
    """Print the events of a time, their summary, or what comes."""
    now_s = time.time()
    since_s, until_s = span_of(args.since, args.until, now_s)
    if args.follow and (args.summary or args.until is not None):
        raise ConfigInvalid("--follow goes with neither --summary nor --until")
    reader = EventReader(log)
    newest = reader.newest(1)
    last_id = newest[-1].id if newest else 0
    found = reader.events(since_s, until_s)
    if args.summary:
        return _print_summary(args, found, since_s)
    listed = (event for event in found if event.kind is not EventKind.HOLDS and event.time >= since_s and event.id <= last_id)
    _print_events(args, list(islice(listed, _ROWS)), first=True)
    while some := list(islice(listed, _ROWS)):
        _print_events(args, some, first=False)
    while args.follow:
        time.sleep(FOLLOW_S)
        newest = reader.newest(1)
        if newest and newest[-1].id != last_id:
            came = reader.since_id(last_id)  # more may have come since `newest` was read
            _print_events(args, came, first=False)
            last_id = (came or newest)[-1].id
    return 0


def show_owners(args: Namespace, snapshot: Snapshot, idle_after_s: float) -> int:
    """Print the memory of containers, pods, units and users on each device."""
    rows = []
    for device in snapshot.devices:
        owners = owner_uses(device, snapshot.leases, snapshot.devices, idle_after_s=idle_after_s)
        if device.info.kind is DeviceKind.HOST:
            charge(owners)
        rows += [(device, owner) for owner in owners]
    if args.json:
        shown = ("kind", "name", "num_processes", "used_bytes", "unknown", "idle_bytes", "charged_bytes")
        told = [
            {"device": device.info.index, "device_uuid": device.info.uuid}
            | {name: getattr(owner, name) for name in shown}
            | {"largest_only": device.lists_largest_only}
            for device, owner in rows
        ]
        print(json.dumps(plain(told), indent=1))
        return 0
    if not rows:
        print("no process is known to hold memory of these devices")
        return 0
    from .monitor.view.events import owner_lines
    from .monitor.view.live import print_lines

    print_lines(lambda width, symbols: owner_lines(rows, idle_after_s, width=width, symbols=symbols), _console())
    for device in snapshot.devices:
        if device.lists_largest_only:
            print(f"{device.info.index}: the {MAX_HOST_PROCESSES} largest processes are counted; CHARGED has all of a cgroup")
    return 0


def _print_summary(args: Namespace, events: Iterable[MemoryEvent], since_s: float) -> int:
    holders = summarize(events, since_s)
    if args.json:
        print(json.dumps(plain([holder.to_dict() for holder in holders]), indent=1))
        return 0
    if not holders:
        print("nothing was held in that time, as far as events are kept")
        return 0
    from .monitor.view.events import summary_lines
    from .monitor.view.live import print_lines

    print_lines(lambda width, symbols: summary_lines(holders, width=width, symbols=symbols), _console())
    return 0


def _print_events(args: Namespace, events: Sequence[MemoryEvent], *, first: bool) -> None:
    if args.json:
        for event in events:
            names = {name: value for name, value in names_of(event).items() if value is not None}
            print(json.dumps(plain(to_dict(event) | names)))
        sys.stdout.flush()
        return
    if not events:
        if first and not args.follow:
            print("no events in that time")
        return
    from .monitor.view.events import event_lines
    from .monitor.view.live import print_lines

    now = datetime.now()
    print_lines(
        lambda width, symbols: event_lines(events, width=width, symbols=symbols, with_titles=first, now=now), _console()
    )
    sys.stdout.flush()


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_CELLS)
