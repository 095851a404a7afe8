"""The command `vram-monitor`: shows device memory, watches and leases it (`serve`), records it, and controls leases."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from .allocator.errors import AllocatorError
from .common.settings import Settings, add_flags, settings_of
from .common.units import format_bytes, format_seconds, parse_bytes, parse_seconds
from .flags import FlagParser
from .monitor.config import MonitorConfig
from .monitor.errors import AlreadyMonitored, ConfigInvalid, MonitorError, MonitorFailed
from .monitor.snapshot import DeviceInfo, LeaseUse, Origin, ReservationUse, Snapshot
from .version import __version__

if TYPE_CHECKING:
    from .allocator.broker import Broker, BrokerThread
    from .allocator.broker_client import BrokerClient
    from .allocator.lease_policy import Rules
    from .allocator.reservation import Reservation
    from .allocator.reservation_service import ReservationService
    from .allocator.wire import LeaseView
    from .monitor.daemon import Daemon
    from .monitor.event_log import EventReader
    from .monitor.following import Follower
    from .monitor.record import RecordReader
    from .monitor.runtime_dir import RuntimeDir
    from .monitor.view.listing import Listing
    from .monitor.view.state import Action

log = logging.getLogger("vram-monitor")

ALREADY_MONITORED_STATUS = 3
UNUSED_CHECK_S = 0.1
_BROKER_TIMEOUT_S = 1.0  # of the view, which waits for it

_EVENTS_SHOWN = 16  # in the view

_SOURCE = ("source", "capacity", "members", "runtime_dir")
# The packages that not every environment has, by the name to import.
_PACKAGES = {
    "numpy": "numpy",
    "prometheus_client": "prometheus-client",
    "psutil": "psutil",
    "pynvml": "nvidia-ml-py",
    "rich": "rich",
    "yaml": "pyyaml",
}
# Three per place at the broker, and as many again for the devices, /proc and the metrics page
_DESCRIPTORS = 4096


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    0, 2 for bad input, 3 if another monitor runs, 130 if interrupted, 141 if the reader closed the output pipe. `run`
    returns its program's status, 126 if the program cannot be started and 127 if there is none.
    """
    args = parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        status = run(args)
        if sys.stdout is not None:  # stdout may be closed
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe
        sys.stderr.close()
        return 141
    except AlreadyMonitored as error:
        print(f"vram-monitor: {error}", file=sys.stderr)
        return ALREADY_MONITORED_STATUS
    except (MonitorError, AllocatorError, OSError) as error:
        print(f"vram-monitor: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = _PACKAGES.get((error.name or "").split(".")[0])
        if package is None:
            raise
        print(f"vram-monitor: the package {package} is missing: pip install {package}", file=sys.stderr)
        return 2


T = TypeVar("T")
_Commands: TypeAlias = "argparse._SubParsersAction[FlagParser]"


def parser() -> argparse.ArgumentParser:
    """All options. Options not given are None or absent, so that a configuration file can set them."""
    top = FlagParser(
        prog="vram-monitor",
        description="Show the memory of GPUs and of this machine, and which processes hold it. Without a command, shows a "
        "live view: q quits, ? explains it.",
        epilog="vram-monitor -1 prints the view once. vram-monitor events --since 03:00 lists what took memory since then, "
        "vram-monitor owners sums it by container, pod, unit and user.",
    )
    top.add_argument("--version", action="version", version=f"vram-monitor {__version__}")
    top.add_argument("-1", "--once", action="store_true", help="print the view once and exit")
    top.add_argument("--json", action="store_true", help="print JSON and exit; with --interval, one line per interval")
    top.add_argument(
        "-o", "--only", dest="devices", nargs="+", metavar="DEVICE", help="show only these devices (index or uuid)"
    )
    top.add_argument("-i", "--interval", dest="refresh", metavar="SECONDS", help="refresh interval (default 1)")
    top.add_argument("--no-color", action="store_true", help="disable colours (also: NO_COLOR)")
    top.add_argument(
        "--min-memory",
        metavar="SIZE",
        help="hide processes without a lease below this size (default: 0, which shows all; in the live view 16MiB on the host)",
    )
    _add_source(top)
    top.set_defaults(run=_view)
    commands = top.add_subparsers(metavar="COMMAND", title="commands")
    _add_serve(commands)
    _add_record(commands)
    _add_lease_commands(commands)
    _add_reservation_commands(commands)
    _add_event_commands(commands)
    return top


def _add_serve(commands: _Commands) -> None:
    serve = commands.add_parser(
        "serve",
        help="run the monitor, for the engines of this user or this machine",
        description="Watch the devices and publish the measurements: to engines through shared memory, to Prometheus through a "
        "metrics page. SIGHUP reloads the configuration, SIGTERM and SIGINT stop the monitor.",
    )
    serve.add_argument("--config", type=Path, metavar="FILE", help="settings in YAML; flags override them")
    _add_source(serve)
    add_flags(serve, _flags(*(name for name in settings_of(MonitorConfig) if name not in (*_SOURCE, "alerts"))))
    # Set when `monitor.watch` starts the command.
    serve.add_argument("--until-unused", action="store_true", help=argparse.SUPPRESS)
    serve.set_defaults(run=_serve)


def _add_record(commands: _Commands) -> None:
    record = commands.add_parser(
        "record",
        help="record to a file; --source replay:FILE plays it back",
        description="Record snapshots to a file until interrupted, or for --duration.",
    )
    record.add_argument("file", type=Path, metavar="FILE")
    record.add_argument("--duration", type=float, metavar="SECONDS", help="recording time (default: until interrupted)")
    _add_source(record)
    add_flags(record, _flags("devices", "interval", "detail_interval"))
    record.set_defaults(run=_record)


def _add_lease_commands(commands: _Commands) -> None:
    """Add the commands to the broker."""
    leases = commands.add_parser(
        "leases",
        help="list the leases of engines, and the reservations",
        description="List the leases of engines, the memory that each holds and may hold, and the reservations.",
    )
    leases.add_argument("--json", action="store_true", help="print JSON")
    leases.set_defaults(run=_leases)
    limit = commands.add_parser(
        "limit",
        help="set an engine's maximum memory",
        description="Set the maximum memory of an engine. Memory above it is freed as requests finish.",
    )
    limit.add_argument("engine", metavar="ENGINE", help="name, process id or '#number' of the engine")
    limit.add_argument(
        "--max", dest="size", required=True, metavar="SIZE", help="maximum for all memory of the engine, e.g. 2GiB"
    )
    limit.set_defaults(run=_limit)
    recall = commands.add_parser(
        "recall",
        help="recall memory from an engine",
        description="Recall memory from an engine: free blocks first, then blocks of requests. Its minimum is never recalled.",
    )
    recall.add_argument("engine", metavar="ENGINE", help="name, process id or '#number' of the engine")
    recall.add_argument("size", metavar="SIZE", help="amount to recall, e.g. 512MiB")
    recall.set_defaults(run=_recall)
    for command in (leases, limit, recall):
        _of_a_broker(command)


def _add_reservation_commands(commands: _Commands) -> None:
    """Add the commands that reserve memory for other programs."""
    run = commands.add_parser(
        "run",
        help="start a program once enough memory is free",
        description="Reserve memory, recalling it from engines if needed, and run a program with this reservation.",
    )
    run.add_argument("--reserve", required=True, metavar="SIZE", help="memory that the program needs, e.g. 8GiB")
    _add_reservation(run)
    run.add_argument("program", nargs="+", metavar="CMD", help="program and its arguments, after --")
    run.set_defaults(run=_run)
    reserve = commands.add_parser(
        "reserve",
        help="keep memory free for programs that are no engines",
        description="Reserve memory, recalling it from engines if needed, until the time is over or this command ends.",
    )
    reserve.add_argument("size", metavar="SIZE", help="memory to keep free, e.g. 8GiB")
    reserve.add_argument("--time", metavar="TIME", help="end after this time, e.g. 2h (default: when this command ends)")
    reserve.add_argument("--name", help="name in lists and messages (default: vram-monitor reserve)")
    _add_reservation(reserve)
    reserve.set_defaults(run=_reserve)
    reservations = commands.add_parser(
        "reservations",
        help="list the reservations",
        description="List the reservations: which process keeps how much of which device, until when, and which ones wait.",
    )
    reservations.add_argument("--json", action="store_true", help="print JSON")
    reservations.set_defaults(run=_reservations)
    release = commands.add_parser(
        "release",
        help="end a reservation",
        description="End a reservation, and tell its program. Its user, root and the monitor's user may do that.",
    )
    release.add_argument("reservation", metavar="ID", help="number of the reservation, as vram-monitor reservations shows it")
    release.set_defaults(run=_release)
    for command in (run, reserve, reservations, release):
        _of_a_broker(command)


def _of_a_broker(command: argparse.ArgumentParser) -> None:
    """Let a command take the flag that names the broker's folder; it keeps what was given before the command."""
    command.argument_default = argparse.SUPPRESS
    add_flags(command, _flags("runtime_dir"))


def _add_reservation(command: argparse.ArgumentParser) -> None:
    """Add what both commands that reserve can be told."""
    command.add_argument("--device", metavar="D", help="device index or uuid (default: the first GPU, or the only device)")
    command.add_argument(
        "--priority",
        type=int,
        default=0,
        metavar="N",
        help="a waiting reservation of a lower number is served first (default 0)",
    )
    command.add_argument("--wait", default="60s", metavar="TIME", help="longest wait for the memory (default 60s)")


def _add_event_commands(commands: _Commands) -> None:
    events = commands.add_parser(
        "events",
        help="list what took memory, gave it back, was refused or recalled from, and when",
        description="List the events that the monitor has kept: which process or engine took memory, gave it back, was "
        "refused or recalled from, or ended. Times are like 03:12, '2026-11-27 03:12', or how long ago: 90s, 15min, 2h, 1d.",
    )
    events.add_argument("--since", default="1h", metavar="TIME", help="first time to list (default: 1h, one hour ago)")
    events.add_argument("--until", metavar="TIME", help="last time to list (default: now)")
    events.add_argument("-f", "--follow", action="store_true", help="go on with what comes, until interrupted")
    events.add_argument(
        "--summary", action="store_true", help="list what each process and engine held: at the start, at most, at the end"
    )
    events.add_argument("--json", action="store_true", help="print JSON, an event on each line")
    events.set_defaults(run=_events)
    owners = commands.add_parser(
        "owners",
        help="sum the memory of containers, pods, systemd units and users",
        description="Sum the memory of processes by their container, pod, systemd unit and user, on each device. Of host "
        "memory, the 64 largest processes count, and shared pages for each; CHARGED is what the kernel charges to the cgroup.",
    )
    owners.add_argument(
        "--idle", default="10min", metavar="TIME", help="count memory that was not used for so long as idle (default: 10min)"
    )
    owners.add_argument("--json", action="store_true", help="print JSON")
    _add_source(owners)
    owners.set_defaults(run=_owners)
    events.argument_default = argparse.SUPPRESS
    add_flags(events, _flags("runtime_dir", "events_dir"))


def _add_source(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("devices")
    group.argument_default = argparse.SUPPRESS  # so that a subcommand keeps what was given before it
    add_flags(group, _flags(*_SOURCE))


def _flags(*names: str) -> Settings:
    return {name: settings_of(MonitorConfig)[name] for name in names}


def _settings(args: argparse.Namespace, *names: str, file: Path | None = None) -> MonitorConfig:
    """The settings of these names, or all."""
    return MonitorConfig.resolve(file, {name: getattr(args, name, None) for name in names or settings_of(MonitorConfig)})


# ---- serve --------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    from .monitor.daemon import Daemon

    sys.setswitchinterval(0.0005)  # the thread that lists processes must not delay the one that reads memory
    config = _settings(args, file=args.config)
    _log_to_stderr(config.log_level)
    signals = _Signals()
    _allow_descriptors()
    usual = config == MonitorConfig(runtime_dir=config.runtime_dir)  # so that `monitor.watch` can start another like it
    daemon = Daemon(config, _Leases(config), on_demand=args.until_unused and usual)
    daemon.start()
    try:
        while (taken := signals.wait(UNUSED_CHECK_S if args.until_unused else None)) in (None, signal.SIGHUP):
            if taken == signal.SIGHUP:
                _reload(daemon, args)
            if args.until_unused and daemon.unused():
                log.info("the last user of this monitor has ended")
                break
    finally:
        daemon.stop()
    log.info("stopped")
    return 0


def _allow_descriptors() -> None:
    """Raise the limit of open files to what all places at the broker need, as far as the system allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < _DESCRIPTORS:
        log.warning(
            "this process may open %d files at most, and one engine takes three: raise the hard limit (LimitNOFILE=%d)",
            most,
            _DESCRIPTORS,
        )


class _Leases:
    """The broker that runs beside the monitor."""

    def __init__(self, config: MonitorConfig) -> None:
        self._config = config
        self._broker: Broker | None = None
        self._thread: BrokerThread | None = None
        self._service: ReservationService | None = None
        self._open_service: Callable[[], ReservationService] | None = None
        self._service_lock = threading.Lock()

    def open(self, daemon: Daemon) -> None:
        from .allocator.broker import Broker, BrokerThread
        from .allocator.lease_table import LeaseTable
        from .allocator.quota import Quota
        from .monitor.runtime_dir import group_id

        config = self._config
        quota = Quota(config.user_engines, config.user_share, frozenset({0, os.geteuid()}))
        table = LeaseTable(daemon.reader, self._rules, quota, daemon.count_engines, tell=daemon.tell)
        gid = None if config.group is None else group_id(config.group)
        self._broker = Broker(table, daemon.directory.socket, gid=gid)
        self._thread = BrokerThread(self._broker)
        self._thread.start()
        self._open_service = partial(self._service_of, daemon)

    def answer(self, method: str, path: str, body: Mapping[str, Any]) -> tuple[int, object]:
        if self._open_service is None:
            return 503, {"error": "the monitor is starting; try again"}
        with self._service_lock:
            self._service = self._service or self._open_service()
        return self._service.answer(method, path, body)

    @staticmethod
    def _service_of(daemon: Daemon) -> ReservationService:
        """At the first request: a start does not wait for its modules."""
        from .allocator.reservation_service import ReservationService

        return ReservationService(daemon.directory.socket, daemon.reader.devices)

    def leases(self) -> list[LeaseUse]:
        return [] if self._broker is None else [_lease_use(view) for view in self._broker.leases()]

    def reservations(self) -> list[ReservationUse]:
        from .allocator.reservation import reservation_uses

        return [] if self._broker is None else reservation_uses(self._broker.reservations())

    def close(self) -> None:
        if self._service is not None:
            self._service.close()
        if self._thread is not None:
            self._thread.close()

    def _rules(self, info: DeviceInfo, capacity_bytes: int) -> Rules:
        from .allocator.lease_policy import Rules

        return Rules.of(capacity_bytes, self._config.headroom)


def _lease_use(view: LeaseView) -> LeaseUse:
    return LeaseUse(
        engine=view.name,
        pid=view.pid,
        user=view.user,
        device_uuid=view.device_uuid,
        min_bytes=view.min_bytes,
        max_bytes=view.max_bytes,
        weight=view.weight,
        priority=view.priority,
        granted_bytes=view.granted_bytes,
        held_bytes=view.held_bytes,
        held_by_class=dict(view.held),
        spare_bytes=view.free_bytes,
        asked_bytes=view.asked_bytes,
        state="loading" if view.state == "ok" and not view.held else view.state,
        recall_target_bytes=view.recall_target_bytes,
        recall_age_seconds=None if view.recall_age_ms is None else view.recall_age_ms / 1000,
        kept_bytes=view.kept_bytes,
        num_waiting=view.num_waiting,
    )


class _Signals:
    """Takes SIGTERM, SIGINT and SIGHUP one at a time, in the waiting thread.

    The signals are blocked, also in threads started later, and not handled. A handler runs between any two steps of the
    main thread, and one that sets an Event while that thread holds the Event's own lock never returns.
    """

    def __init__(self) -> None:
        names = ("SIGTERM", "SIGINT", "SIGHUP")
        known = [getattr(signal, name) for name in names if hasattr(signal, name)]
        # An ignored SIGINT or SIGHUP stays ignored, as under nohup and in a script's background; SIGTERM always counts.
        self._taken = {n for n in known if n == signal.SIGTERM or signal.getsignal(n) != signal.SIG_IGN}
        if not hasattr(signal, "pthread_sigmask"):
            raise ConfigInvalid(f"this needs a POSIX system, which {sys.platform} is not")
        signal.pthread_sigmask(signal.SIG_BLOCK, self._taken)
        # The system may discard a signal that the parent ignored instead of keeping it for `wait`.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def wait(self, timeout_s: float | None) -> int | None:
        """The next signal, or None after `timeout_s`. With None it waits indefinitely."""
        if timeout_s is None:
            return signal.sigwait(self._taken)
        if hasattr(signal, "sigtimedwait"):
            taken = signal.sigtimedwait(self._taken, max(0.0, timeout_s))
            return None if taken is None else taken.si_signo
        deadline = time.monotonic() + timeout_s  # macOS
        while not (pending := signal.sigpending() & self._taken) and time.monotonic() < deadline:
            time.sleep(min(0.02, max(0.0, deadline - time.monotonic())))
        return signal.sigwait(pending) if pending else None


def _reload(daemon: Any, args: argparse.Namespace) -> None:
    try:
        daemon.reload(_settings(args, file=args.config))
        logging.getLogger().setLevel(daemon.config.log_level.upper())
        log.info("configuration reloaded")
    except MonitorError as error:
        log.error("configuration not reloaded: %s", error)
    except Exception:  # a failed reload must not end the monitor
        log.exception("configuration not reloaded")


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)


# ---- views and recordings -----------------------------------------------------------------------


@contextlib.contextmanager
def _observed(config: MonitorConfig) -> Iterator[tuple[Callable[[], Snapshot], Follower | None]]:
    """Snapshots from the running monitor, while there is one, with its follower.

    For a named source they come from a poller in this process, without a follower.
    """
    from .monitor.daemon import directory_of
    from .monitor.following import Follower
    from .monitor.runtime_dir import readable_dirs

    if config == MonitorConfig(runtime_dir=config.runtime_dir, devices=config.devices):
        directories = readable_dirs() if config.runtime_dir is None else (directory_of(config),)
        with Follower(directories, config.devices, lambda: _polled(config), _with_leases) as follower:
            yield follower.read, follower
    else:
        with _polled(config) as read:
            yield read, None


def _with_leases(directory: RuntimeDir, snapshot: Snapshot) -> Snapshot:
    """The snapshot with the leases of the monitor's broker, or with the reason why they are missing."""
    from .allocator.errors import LeaseError

    try:
        return _leased(snapshot, directory, _BROKER_TIMEOUT_S)
    except LeaseError as error:
        return replace(snapshot, leases_error=str(error))


def _leased(snapshot: Snapshot, directory: RuntimeDir, timeout_s: float = 5.0) -> Snapshot:
    """The snapshot with the leases and reservations of its devices. Raises LeaseError."""
    from .allocator.broker_client import BrokerClient
    from .allocator.errors import ProtocolMismatch
    from .allocator.reservation import reservation_uses

    client, shown = BrokerClient(directory.socket, timeout_s=timeout_s), {device.info.uuid for device in snapshot.devices}
    leases = [_lease_use(view) for view in client.leases() if view.device_uuid in shown]
    reservations: list[ReservationUse] = []
    with contextlib.suppress(ProtocolMismatch):  # the monitor is older than this command
        reservations = [use for use in reservation_uses(client.reservations()) if use.device_uuid in shown]
    return snapshot.with_leases(leases, reservations)


class _WithEvents:
    """Snapshots of a follower with the newest events that its monitor has kept, if it keeps any."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._events: EventReader | None = None

    def __call__(self) -> Snapshot:
        from .monitor.event_log import EventReader

        snapshot, directory = self._follower.read(), self._follower.directory
        if directory is None:
            return snapshot
        if self._events is None or self._events.directory != directory.events:
            self._events = EventReader(directory.events)
        with contextlib.suppress(OSError):  # they are another user's
            return replace(snapshot, events=self._events.newest(_EVENTS_SHOWN))
        return snapshot


def _act(follower: Follower, action: Action) -> str:
    """Send an action of the view to the broker. Returns its result; raises MonitorFailed with a refusal."""
    from .allocator.broker_client import BrokerClient
    from .monitor.view.state import RECALL, action_text

    lease = action.lease
    if follower.directory is None:
        raise MonitorFailed(f"cannot {action_text(action)}: no monitor is running")
    client = BrokerClient(follower.directory.socket, timeout_s=_BROKER_TIMEOUT_S)
    wanted = lease.engine, lease.pid, lease.device_uuid
    try:
        views = client.leases()
        found = [view for view in views if (view.name, view.pid, view.device_uuid) == wanted]
        if not found:
            raise MonitorFailed(f"cannot {action_text(action)}: its lease has ended")
        send = _send_recall if action.kind == RECALL else _send_limit
        return send(client, f"#{found[0].lease_id}", action.num_bytes, f"{lease.engine} (pid {lease.pid})")
    except AllocatorError as error:
        raise MonitorFailed(str(error)) from error


@contextlib.contextmanager
def _polled(config: MonitorConfig) -> Iterator[Callable[[], Snapshot]]:
    """Snapshots from a poller in this process; the first one is complete."""
    from .monitor.poller import Poller
    from .monitor.record import RecordReader, RecordWriter
    from .monitor.sources.combined import CombinedSource, open_source

    source = open_source(config.source, capacity_bytes=config.capacity, members=config.members)
    with RecordWriter.private(source=source.name) as writer, RecordReader.of(writer) as reader:
        poller = Poller(
            source, writer, interval_s=config.interval, detail_interval_s=config.detail_interval, devices=config.devices
        )
        try:
            poller.start()
            _wait_for_answers(reader.snapshot)
            unavailable = source.unavailable if isinstance(source, CombinedSource) else {}
            yield lambda: replace(reader.snapshot(), origin=Origin.DIRECT, unavailable=unavailable)
        finally:
            poller.stop()


def _wait_for_answers(read: Callable[[], Snapshot], timeout_s: float = 3.0) -> None:
    """Wait until every device was read once, at most `timeout_s`, so that a device that does not answer causes no hang."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if all(device.memory.at_ns and device.detail.at_ns for device in read().devices):
            return
        time.sleep(0.005)


def _view(args: argparse.Namespace) -> int:
    logging.getLogger("pagetide").addHandler(logging.NullHandler())  # keeps logs off the screen
    refresh = MonitorConfig.resolve(None, {"interval": args.refresh or 1.0}).interval
    config = _settings(args, "devices", *_SOURCE)
    size = args.min_memory
    min_bytes = None if size is None else 0 if size.strip() == "0" else _parsed("--min-memory", parse_bytes, size)
    with _observed(config) as (read, follower):
        from .monitor.view.listing import Listing

        listing = Listing(min_bytes=min_bytes or 0)
        if args.json:
            return _print_json(read, refresh if args.refresh else None, listing)
        from rich.console import Console

        from .monitor.view import live

        console = Console(no_color=True if args.no_color else None, highlight=False)
        if args.once or not console.is_terminal:
            live.render_once(read(), console, listing)
        else:
            listing = Listing(min_bytes=min_bytes)
            act = None if follower is None else partial(_act, follower)
            live.run_live(
                read if follower is None else _WithEvents(follower),
                interval_s=refresh,
                console=console,
                listing=listing,
                act=act,
            )
    return 0


def _print_json(read: Callable[[], Snapshot], interval_s: float | None, listing: Listing) -> int:
    from .monitor.snapshot_json import to_json

    def line(indent: int | None) -> str:
        snapshot = read()
        return to_json(replace(snapshot, devices=listing.without_small(snapshot.devices)), indent=indent)

    print(line(1 if interval_s is None else None), flush=True)
    while interval_s is not None:
        time.sleep(interval_s)
        print(line(None), flush=True)
    return 0


def _record(args: argparse.Namespace) -> int:
    from .monitor.device_frames import DeviceRecorder

    if args.duration is not None and not args.duration > 0:
        raise ConfigInvalid(f"--duration must be a number of seconds above 0, got {args.duration:g}")
    config = _settings(args)
    signals = _Signals()
    with (
        _observed(config) as (read, _),
        DeviceRecorder(args.file, read(), detail_interval_s=config.detail_interval) as recording,
    ):
        begun = due = time.monotonic()
        while args.duration is None or due - begun < args.duration:
            due += config.interval
            if signals.wait(due - time.monotonic()) is not None:
                break
            recording.write(read())
    return 0


# ---- leases -------------------------------------------------------------------------------------


def _running(args: argparse.Namespace) -> tuple[RuntimeDir, RecordReader]:
    """The running monitor. Raises RecordMissing if there is none, MonitorFailed if it does not answer."""
    from .monitor.daemon import directory_of
    from .monitor.errors import RecordMissing
    from .monitor.runtime_dir import readable_dirs
    from .monitor.watching import find_running

    config = _settings(args, "runtime_dir")
    directories = readable_dirs() if config.runtime_dir is None else (directory_of(config),)
    if (running := find_running(directories)) is None:
        where = " or ".join(str(directory.path) for directory in directories)
        raise RecordMissing(f"no monitor is running in {where}; start an engine or `vram-monitor serve`")
    return running


def _client(args: argparse.Namespace) -> BrokerClient:
    from .allocator.broker_client import BrokerClient

    directory, reader = _running(args)
    reader.close()
    return BrokerClient(directory.socket)


def _leases(args: argparse.Namespace) -> int:
    return _show_held(args, "leases")


def _show_held(args: argparse.Namespace, what: str) -> int:
    """Print the leases, or only the reservations; as JSON one of both."""
    directory, reader = _running(args)
    from .monitor.snapshot_json import to_dict

    with reader:
        snapshot = _leased(reader.snapshot(), directory)
    if args.json:
        print(json.dumps(to_dict(snapshot)[what], indent=1))
        return 0
    from rich.console import Console

    from .monitor.view import live

    show = live.render_leases if what == "leases" else live.show_reservations
    show(snapshot, Console(highlight=False))
    return 0


def _limit(args: argparse.Namespace) -> int:
    print(_send_limit(_client(args), args.engine, _parsed("--max", parse_bytes, args.size), args.engine))
    return 0


def _send_limit(client: BrokerClient, engine: str, num_bytes: int, name: str) -> str:
    done = client.limit(engine, num_bytes)
    over = f"; {format_bytes(done.over_bytes)} above the limit are freed as requests finish" if done.over_bytes else ""
    return f"{name} is limited to {format_bytes(done.max_bytes)}{over}"


def _recall(args: argparse.Namespace) -> int:
    print(_send_recall(_client(args), args.engine, _parsed("SIZE", parse_bytes, args.size), args.engine))
    return 0


def _send_recall(client: BrokerClient, engine: str, num_bytes: int, name: str) -> str:
    recalling = client.recall(engine, num_bytes)
    return f"{name} must shrink to {format_bytes(recalling.target_bytes)} within {recalling.deadline_ms / 1000:g} s"


def _run(args: argparse.Namespace) -> int:
    from .reserved_run import CannotStart, run_reserved

    with _reserved(args, "--reserve", args.reserve, name=os.path.basename(args.program[0])) as (reservation, _):
        try:
            return run_reserved(args.program, reservation, format_bytes(reservation.num_bytes))
        except CannotStart as error:
            print(f"vram-monitor: {error}", file=sys.stderr)
            return error.status


# ---- events -------------------------------------------------------------------------------------


def _events(args: argparse.Namespace) -> int:
    from .event_commands import find_log, show_events
    from .monitor.daemon import directory_of
    from .monitor.runtime_dir import readable_dirs

    config = _settings(args, "runtime_dir", "events_dir")
    directories = readable_dirs() if config.runtime_dir is None else (directory_of(config),)
    return show_events(args, find_log(directories, config.events_dir))


def _owners(args: argparse.Namespace) -> int:
    from .event_commands import show_owners

    logging.getLogger("pagetide").addHandler(logging.NullHandler())
    idle_after_s = _parsed("--idle", parse_seconds, args.idle)
    with _observed(_settings(args, *_SOURCE)) as (read, _):
        return show_owners(args, read(), idle_after_s)


def _reserve(args: argparse.Namespace) -> int:
    from .reserved_run import LOOK_S, Lookout

    with _reserved(args, "SIZE", args.size, name=args.name or "vram-monitor reserve", time=args.time) as (reservation, info):
        until = "" if reservation.left_s is None else f", for {format_seconds(reservation.left_s + 0.5)}"
        what = format_bytes(reservation.num_bytes)
        print(f"{what} of {info.index} are reserved{until}; Ctrl-C or the end of this process gives them back", flush=True)
        signals, lookout = _Signals(), Lookout(reservation, what, "this command")
        while not reservation.ended and signals.wait(LOOK_S) is None:
            lookout.look()
    return 0


@contextlib.contextmanager
def _reserved(
    args: argparse.Namespace, option: str, size: str, *, name: str, time: str | None = None
) -> Iterator[tuple[Reservation, DeviceInfo]]:
    """A reservation by the options of `_add_reservation`, with its device. While it waits, stderr says for what."""
    from .allocator.reservation import Reservation, choose_device, shown

    num_bytes = _parsed(option, parse_bytes, size)
    wait_s, duration_s = (
        _parsed("--wait", parse_seconds, args.wait),
        None if time is None else _parsed("--time", parse_seconds, time),
    )
    directory, reader = _running(args)
    with reader:
        info = choose_device(reader.devices(), args.device)
    with Reservation.granted(
        directory.socket, info.uuid, num_bytes,
        name=shown(name), priority=args.priority, duration_s=duration_s, wait_s=wait_s,
        on_queued=lambda reason: print(f"vram-monitor: waiting: {reason}", file=sys.stderr, flush=True),
    ) as reservation:  # fmt: skip
        yield reservation, info


def _reservations(args: argparse.Namespace) -> int:
    return _show_held(args, "reservations")


def _release(args: argparse.Namespace) -> int:
    number = args.reservation.removeprefix("#")
    if not re.fullmatch(r"\d{1,18}", number, re.ASCII):
        raise ConfigInvalid(f"ID: {args.reservation!r} is no number of a reservation; vram-monitor reservations lists them")
    _client(args).end_reservation(int(number))
    print(f"reservation #{number} has ended")
    return 0


def _parsed(option: str, parse: Callable[[str], T], text: str) -> T:
    """The amount or time of an option. Raises ConfigInvalid, naming it."""
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigInvalid(f"{option}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
