"""Connects an engine to the monitor: `watch()` finds a running monitor or starts one, and replaces a dead one.

    user     shared lock on users.lock ── is a monitor there? ──no──► start one, wait for its record
    monitor  exclusive lock on monitor.lock, or end: another was first
             now and then: exclusive lock on users.lock?  ──yes──► no user is left: remove the record, end

A user takes its lock before it looks for a monitor, and an ending monitor holds users.lock until it has ended. So no
user keeps a monitor that is about to end. If a monitor started on demand dies, the first user to notice replaces it. A
daemon that dies is not replaced: only its operator knows its settings, and a replacement would block its restart.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ..common.child_process import ChildProcess
from ..common.on_error import OnError
from .errors import ConfigInvalid, MonitorError, MonitorFailed, RecordError
from .record import RecordReader
from .runtime_dir import FileLock, RuntimeDir, last_holder, monitor_pid, own_dir, readable_dirs
from .snapshot import DeviceInfo, DeviceMemory, Snapshot

log = logging.getLogger(__name__)

ALREADY_MONITORED_STATUS = 3  # exit status of a monitor that found another one running
GUARD_S = 1.0  # how often a user checks that its monitor is alive
OTHERS_FIRST_S = 3.0  # grace period in which others may replace a dead monitor
FIRST_ANSWER_S = 1.0


class Watch:
    """A lock-free view of the monitor in `directory`. Close it, else a monitor started for it keeps running."""

    def __init__(self, directory: RuntimeDir, reader: RecordReader, users: FileLock | None) -> None:
        """If the `users` lock is held, this process is a user: it restarts a monitor started on demand that dies."""
        self.directory = directory
        self._reader = reader
        self._closed = threading.Event()
        self._drop = weakref.finalize(self, _drop, users, self._closed)
        self._guard: threading.Thread | None = None
        if users is not None:
            self._guard = threading.Thread(
                target=_guard, args=(directory, reader, self._closed), name="pagetide-watch", daemon=True
            )
            self._guard.start()

    def devices(self) -> tuple[DeviceInfo, ...]:
        """The devices that are watched now."""
        return self._reader.devices()

    def memory(self, uuid: str) -> DeviceMemory:
        """The memory of one device; see `DeviceMemory.is_stale`. Raises NoSuchDevice."""
        return self._reader.memory(uuid)

    def snapshot(self) -> Snapshot:
        """Everything known about all devices."""
        return self._reader.snapshot()

    @property
    def monitor_pid(self) -> int:
        """The pid of the monitor; it changes after a restart."""
        return self._reader.monitor_pid

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._drop()
        if self._guard is not None:
            self._guard.join(GUARD_S)  # it takes longer while a monitor is being started
        self._reader.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def watch(*, runtime_dir: Path | str | None = None, timeout_s: float = 10.0) -> Watch:
    """Watch the devices through the running monitor, or through one that is started now and ends with its last user.

    `runtime_dir` replaces the usual directories to look and start in. Waits at most `timeout_s` for a starting monitor.
    Raises MonitorFailed with the monitor's output, ConfigInvalid for an unusable directory.
    """
    own = own_dir() if runtime_dir is None else RuntimeDir(Path(runtime_dir).absolute())
    for directory in () if runtime_dir is not None else readable_dirs():
        if directory != own and (reader := _live(directory)) is not None:
            return Watch(directory, reader, None)
    try:
        own.prepare()
    except ConfigInvalid:
        if (reader := _live(own)) is not None:  # another user's, readable by this one
            return Watch(own, reader, None)
        raise
    deadline = time.monotonic() + timeout_s
    users = FileLock(own.users_lock)
    with OnError(users.close):
        if not users.wait_shared(timeout_s):
            raise MonitorFailed(f"the monitor in {own.path} is stopping but does not finish")
        reader = _live(own) or _started(own, deadline)
        _wait_for_answers(reader, deadline)
        return Watch(own, reader, users)


def _drop(users: FileLock | None, closed: threading.Event) -> None:
    closed.set()
    if users is not None:
        users.close()


def _guard(directory: RuntimeDir, reader: RecordReader, closed: threading.Event) -> None:
    """Restart a monitor that was started on demand and died, until the watch is closed.

    A grace period lets the user start a daemon instead.
    """
    live_at, waits = time.monotonic(), False
    while not closed.wait(GUARD_S):
        try:
            if reader.is_live() or _is_held(directory):
                live_at, waits = time.monotonic(), False
            elif time.monotonic() - live_at < OTHERS_FIRST_S or waits:
                continue
            elif (holder := last_holder(directory)) is not None and holder.on_demand:
                log.warning("the monitor died; starting another one")
                _started(directory, time.monotonic() + 10 * GUARD_S).close()
            else:
                waits = True
                log.warning(
                    "the monitor in %s has ended; it was not started by an engine, so restart it by hand", directory.path
                )
        except RecordError:  # the reader was closed
            return
        except (MonitorError, OSError) as error:
            log.warning("no monitor could be started: %s", error)


def find_live(directories: Sequence[RuntimeDir]) -> tuple[RuntimeDir, RecordReader] | None:
    """The first of the directories in which a monitor runs, with a reader of its record. Starts nothing."""
    for directory in directories:
        if (reader := _live(directory)) is not None:
            return directory, reader
    return None


def _live(directory: RuntimeDir) -> RecordReader | None:
    """A reader of the monitor in `directory`, or None if no readable monitor runs there."""
    try:
        reader = RecordReader.open(directory.record)
    except RecordError:
        return None
    if reader.is_live():
        return reader
    reader.close()
    return None


def find_running(directories: Sequence[RuntimeDir], *, timeout_s: float = 2.0) -> tuple[RuntimeDir, RecordReader] | None:
    """Like `find_live`, but waits for a monitor that holds a directory and is busy, starting or ending.

    Raises MonitorFailed, naming its process, if it does not answer within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while (found := find_live(directories)) is None:
        held = next((directory for directory in directories if is_seen_held(directory)), None)
        if held is None:
            return None
        if time.monotonic() > deadline:
            raise MonitorFailed(silence_of(held))
        time.sleep(0.02)
    return found


def is_seen_held(directory: RuntimeDir) -> bool:
    """Whether a monitor holds the directory, as far as this user can see. Creates nothing."""
    try:
        return directory.monitor_lock.exists() and _is_held(directory)
    except OSError:
        log.debug("whether a monitor holds %s cannot be seen", directory.path, exc_info=True)
        return False


def silence_of(directory: RuntimeDir) -> str:
    """A sentence about the monitor that holds the directory and does not answer."""
    pid = monitor_pid(directory)
    name = "a process" if pid is None else f"process {pid}"
    return f"{name} holds {directory.path} as its monitor and does not answer: it is stopped or hangs; resume or kill it"


def _is_held(directory: RuntimeDir) -> bool:
    """Whether a monitor holds the directory, even if it is starting, stopped or hanging."""
    lock = FileLock(directory.monitor_lock)
    try:
        return not lock.try_shared()
    finally:
        lock.close()


def _started(directory: RuntimeDir, deadline: float) -> RecordReader:
    """Start a monitor and wait for its record, unless another user is starting one or a silent one is there."""
    start = FileLock(directory.start_lock)
    try:
        process = None
        while (reader := _live(directory)) is None:
            if process is None and start.try_exclusive() and not _is_held(directory):
                process = start_monitor(directory)
            status = None if process is None else process.status
            if status in (0, ALREADY_MONITORED_STATUS):
                process = None  # another was first, or only probed the lock: check again
            elif status is not None:
                raise MonitorFailed(f"the monitor ended with status {status}: {_said(directory)}")
            if time.monotonic() > deadline:
                if process is None and _is_held(directory):
                    raise MonitorFailed(silence_of(directory))
                raise MonitorFailed(f"no monitor answered in time: {_said(directory)}")
            time.sleep(0.005)
        return reader
    finally:
        start.close()


def start_monitor(directory: RuntimeDir, *arguments: str) -> ChildProcess:
    """Start `vram-monitor serve`, in a process that ends by itself when `directory` has no user. It logs there."""
    program = ("-m", "pagetide.vram_monitor", "serve", "--until-unused", "--runtime-dir", str(directory.path))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(directory.log, flags, 0o600)
    try:
        process = ChildProcess((*program, *arguments), log=descriptor, cwd="/")
    finally:
        os.close(descriptor)
    process.socket.close()
    # It may outlive its first user or end before it: a waiting thread prevents a zombie process.
    threading.Thread(target=process.wait, name="vram-monitor", daemon=True).start()
    return process


def _wait_for_answers(reader: RecordReader, deadline: float) -> None:
    """Wait until every device was read once, with a short limit for one that does not answer."""
    deadline = min(deadline, time.monotonic() + FIRST_ANSWER_S)
    while not all(device.memory.at_ns for device in reader.snapshot().devices) and time.monotonic() < deadline:
        time.sleep(0.002)


def _said(directory: RuntimeDir) -> str:
    """The end of the monitor's log."""
    try:
        return directory.log.read_text("utf-8", "replace").strip()[-2000:] or f"{directory.log} is empty"
    except OSError as error:
        return f"{directory.log} cannot be read: {error.strerror}"
