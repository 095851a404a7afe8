"""The monitor process: one per runtime directory, with its record, its poller and its metrics page."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ..common.host_memory import host_memory
from ..common.on_error import OnError
from ..common.units import format_bytes
from .config import RELOADED, MonitorConfig
from .errors import AlreadyMonitored, ConfigInvalid, RecordError
from .event_log import EventLog
from .event_service import EventService
from .poller import Poller
from .record import RecordReader, RecordWriter
from .runtime_dir import (
    MACHINE_DIR,
    VARIABLE,
    FileLock,
    Holder,
    RuntimeDir,
    group_id,
    last_holder,
    monitor_pid,
    note_holder,
    own_dir,
    pids_of_users,
    readable_dirs,
)
from .snapshot import DeviceInfo, LeaseUse, ReservationUse, Snapshot
from .sources import Source
from .sources.combined import open_source
from .sources.host import HostSource

if TYPE_CHECKING:
    from .events import MemoryEvent
    from .metrics_server import MetricsServer

log = logging.getLogger(__name__)

_LOOK_S = 0.2  # a process that probes the monitor lock holds it for an instant


def directory_of(config: MonitorConfig) -> RuntimeDir:
    """The runtime directory of a monitor with these settings."""
    if config.runtime_dir is not None:
        return RuntimeDir(config.runtime_dir.absolute())
    if config.group is not None and not os.environ.get(VARIABLE, "").strip():
        return RuntimeDir(MACHINE_DIR)
    return own_dir()


class DaemonService(Protocol):
    """A service in the monitor's process that uses its readings: the lease broker."""

    def open(self, daemon: Daemon) -> None:
        """Called before readers see a live monitor. Raises MonitorError, OSError."""
        ...

    def leases(self) -> Sequence[LeaseUse]:
        """The current leases. Thread-safe."""
        ...

    def reservations(self) -> Sequence[ReservationUse]:
        """The current reservations. Thread-safe."""
        ...

    def answer(self, method: str, path: str, body: Mapping[str, Any]) -> tuple[int, object]:
        """The status and the JSON value for an HTTP request below /reservations. Thread-safe."""
        ...

    def close(self) -> None:
        """Called before the record ends. Idempotent, and harmless if it was never opened."""
        ...


class Daemon:
    """The monitor behind `vram-monitor serve`: `start`, then any number of `reload` and `unused` calls, then `stop`."""

    def __init__(self, config: MonitorConfig, companion: DaemonService | None = None, *, on_demand: bool = False) -> None:
        """`on_demand`: any of its users may start a replacement if it dies."""
        self.config = config
        self._on_demand = on_demand
        self._companion = companion
        self._source: Source | None = None
        self.directory = directory_of(config)
        self._lock: FileLock | None = None
        self._users: FileLock | None = None
        self._writer: RecordWriter | None = None
        self._reader: RecordReader | None = None
        self._poller: Poller | None = None
        self._metrics: MetricsServer | None = None
        self._events: EventService | None = None

    def start(self) -> None:
        """Take the directory, publish a record and poll. Raises MonitorError; then nothing is left behind."""
        with OnError(self.stop):
            self._start()

    def _start(self) -> None:
        config = self.config
        self.directory.prepare(group=config.group)
        self._lock = _open_lock(self.directory)
        if not self._lock.wait_exclusive(_LOOK_S):
            raise AlreadyMonitored(_who_monitors(self.directory))
        source = self._source = open_source(config.source, capacity_bytes=config.capacity, members=config.members)
        _refuse_if_watched_elsewhere(self, source.scan())
        _warn_of_more_than_there_is(config)
        gid = None if config.group is None else group_id(config.group)
        mode = 0o600 if gid is None else 0o640
        self._writer = RecordWriter.create(self.directory.record, source=source.name, mode=mode, gid=gid)
        self._reader = RecordReader.of(self._writer)
        self._poller = Poller(
            source, self._writer, interval_s=config.interval, detail_interval_s=config.detail_interval, devices=config.devices
        )
        self._events = EventService(
            self.snapshot, self._leases, self._event_log(), rules=config.alerts, idle_after_s=config.idle_after
        )
        self._metrics = self._open_metrics(config)
        # Only now: a monitor that failed to start held nothing.
        note_holder(self._lock, Holder(os.getpid(), self._on_demand))
        self._poller.start(self._open_companion)
        self._events.start()
        infos = self._reader.devices()
        log.info(
            "watches %s by %s every %g ms; record: %s",
            ", ".join(f"{info.index} ({info.name or info.uuid})" for info in infos) or "no device",
            source.name,
            config.interval * 1e3,
            self.directory.record,
        )

    def _open_companion(self) -> None:
        if self._companion is not None:
            self._companion.open(self)

    def reload(self, config: MonitorConfig) -> None:
        """Apply those new settings that a running monitor can change. Raises MonitorError; then the old ones stay in force."""
        assert self._poller is not None
        old = self.config
        taken = replace(old, **{name: getattr(config, name) for name in RELOADED})
        for name in (field for field in config.__slots__ if field not in RELOADED):
            if getattr(config, name) != getattr(old, name):
                log.warning("%s changed in the configuration; that needs a restart", name)
        self._move_metrics(old, taken)
        with OnError(lambda: self._move_metrics(taken, old)):
            self._poller.change(interval_s=taken.interval, detail_interval_s=taken.detail_interval, devices=taken.devices)
        assert self._events is not None
        self._events.change(taken.alerts)
        self.config = taken

    def unused(self) -> bool:
        """Whether no user holds the users' lock. If so, this process holds it until the end of `stop`."""
        if self._users is None:
            self._users = FileLock(self.directory.users_lock)
        return self._users.try_exclusive()

    @property
    def reader(self) -> RecordReader:
        """A reader of the record in this process."""
        assert self._reader is not None, "not started"
        return self._reader

    def snapshot(self) -> Snapshot:
        """All readings, with the leases and reservations."""
        reservations = () if self._companion is None else self._companion.reservations()
        snapshot = self.reader.snapshot().with_leases(self._leases(), reservations)
        return snapshot if self._events is None else replace(snapshot, event_counts=self._events.counts)

    def tell(self, event: MemoryEvent) -> None:
        """Keep an event. Thread-safe; never waits for the disk."""
        if self._events is not None:
            self._events.tell(event)

    def _leases(self) -> Sequence[LeaseUse]:
        return () if self._companion is None else self._companion.leases()

    def count_engines(self, uuid: str, pids: Iterable[int]) -> None:
        """Count these processes as users of the test device, if there is one."""
        if self.config.capacity is not None and isinstance(self._source, HostSource):
            with suppress(ConfigInvalid):  # a process that has ended uses nothing
                self._source.set_members([*self.config.members, *pids])

    def stop(self) -> None:
        """End everything: the record is removed before the locks are released, as a new monitor relies on. Idempotent."""
        if self._metrics is not None:
            self._metrics.close()
        if self._companion is not None:
            self._companion.close()
        if self._events is not None:
            self._events.close()
        if self._poller is not None:
            self._poller.stop()
        if self._reader is not None:
            self._reader.close()
        if self._writer is not None:
            self._writer.close()
        for lock in (self._lock, self._users):
            if lock is not None:
                lock.close()
        self._metrics = self._events = self._poller = self._reader = self._writer = self._lock = self._users = None

    def _event_log(self) -> Callable[[], EventLog] | None:
        """Opens the log of events, which readers find in the runtime directory."""
        config = self.config
        if not config.events_size:
            return None

        def open_log() -> EventLog:
            path = self.directory.event_log() if config.events_dir is None else config.events_dir.absolute()
            gid = None if config.group is None else group_id(config.group)
            opened = EventLog(path, config.events_size, mode=0o600 if gid is None else 0o640, gid=gid)
            with OnError(opened.close):
                self.directory.link_events(path)
            return opened

        return open_log

    def _move_metrics(self, old: MonitorConfig, new: MonitorConfig) -> None:
        """Serve the metrics page at the address of `new`. Raises ConfigInvalid; then it stays at that of `old`."""
        if all(getattr(new, name) == getattr(old, name) for name in ("metrics_port", "metrics_address", "token_file")):
            return
        if self._metrics is not None:
            self._metrics.close()  # first: the new place may be the old port at another address
        try:
            self._metrics = self._open_metrics(new)
        except ConfigInvalid:
            self._metrics = self._open_metrics(old)
            raise

    def _open_metrics(self, config: MonitorConfig) -> MetricsServer | None:
        if config.metrics_port is None:
            return None
        from .metrics_server import MetricsServer

        answer = None if self._companion is None else self._companion.answer
        server = MetricsServer(self.snapshot, config.metrics_port, config.metrics_address, answer, config.token_file)
        log.info("metrics at http://%s:%d/metrics", config.metrics_address, server.port)
        return server


def _open_lock(directory: RuntimeDir) -> FileLock:
    try:
        return FileLock(directory.monitor_lock)
    except OSError as error:
        raise ConfigInvalid(f"{directory.monitor_lock} cannot be opened: {error.strerror}") from error


def _who_monitors(directory: RuntimeDir) -> str:
    """A sentence about the monitor that holds a directory's lock; if engines started it, also what to do."""
    holder = last_holder(directory)
    try:
        with RecordReader.open(directory.record) as reader:
            pid = reader.monitor_pid
            devices = ", ".join(f"{info.index} ({info.name or info.uuid})" for info in reader.devices())
    except RecordError:
        starting = monitor_pid(directory)
        with_pid = "" if starting is None else f" with pid {starting}"
        return f"another vram-monitor{with_pid} is starting or ending in {directory.path}"
    said = f"vram-monitor with pid {pid} watches {devices or 'no device'} already, in {directory.path}"
    if holder is None or holder.pid != pid or not holder.on_demand:
        return said
    users = pids_of_users(directory)
    which = f"(process {', '.join(map(str, users))}) " if users else ""
    return f"{said}; engines started it, and it stops with the last of them: stop those {which}and start this one again"


def _warn_of_more_than_there_is(config: MonitorConfig) -> None:
    """Warn if the test device is larger than the machine's memory: memory that does not exist would be leased."""
    total_bytes = None if config.capacity is None else host_memory().total_bytes
    if config.capacity is not None and total_bytes is not None and config.capacity > total_bytes:
        log.warning(
            "the test device has %s, and the memory of this machine, or of its cgroup, is %s: what is leased beyond that "
            "does not exist; choose a smaller capacity",
            format_bytes(config.capacity),
            format_bytes(total_bytes),
        )


def _refuse_if_watched_elsewhere(daemon: Daemon, infos: Sequence[DeviceInfo]) -> None:
    """Raise AlreadyMonitored if another monitor watches a device: both would lease its memory.

    Does not apply to a directory that the user chose.
    """
    if daemon.config.runtime_dir is not None or os.environ.get(VARIABLE, "").strip():
        return
    mine = {info.uuid for info in infos}
    for directory in readable_dirs():
        if directory == daemon.directory:
            continue
        try:
            with RecordReader.open(directory.record) as reader:
                if reader.is_live() and mine & {info.uuid for info in reader.devices()}:
                    raise AlreadyMonitored(_who_monitors(directory))
        except RecordError:
            continue  # there is none, or none that this user can read
