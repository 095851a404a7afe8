"""`monitor.watch()`: a reader for an engine; where no monitor runs, one is started, and it ends with its last user.

    user     shared lock on users.lock ── is a monitor there? ──no──► start one, wait for its record
    monitor  exclusive lock on monitor.lock, or end: another was first
             now and then: exclusive lock on users.lock?  ──yes──► nobody is left: take the record away, end

A user takes its lock before it looks, and the monitor holds the users' lock until it has ended, so nobody is left with a
monitor that is about to go. One that was started on demand and dies is replaced by whichever user notices first, within
seconds. A daemon that dies is waited for: only who runs it knows its settings, and another in its place would keep it out.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from .errors import ConfigInvalid, MonitorError, MonitorFailed, RecordError
from .holders import last_holder, monitor_pid
from .record import RecordReader
from .runtime_dir import FileLock, RuntimeDir, own_dir, readable_dirs
from .snapshot import DeviceInfo, DeviceMemory, Snapshot

log = logging.getLogger(__name__)

ALREADY_MONITORED_STATUS = 3  # how a monitor says that another was first
GUARD_S = 1.0  # how often a user looks whether its monitor is alive
OTHERS_FIRST_S = 3.0  # how long a dead monitor is left to whoever else may start it again
FIRST_ANSWER_S = 1.0


class Watch:
    """What the monitor of `directory` sees, read without a lock. Close it, or a monitor that was started for it goes on."""

    def __init__(self, directory: RuntimeDir, reader: RecordReader, users: FileLock | None) -> None:
        """With the `users` lock held the monitor is ours too: if it was started on demand and dies, another is started."""
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
        """The memory of one device, in a few microseconds; see `DeviceMemory.is_stale`. Raises NoSuchDevice."""
        return self._reader.memory(uuid)

    def snapshot(self) -> Snapshot:
        """All that is known of all devices."""
        return self._reader.snapshot()

    @property
    def monitor_pid(self) -> int:
        """The process that polls; another one after a restart."""
        return self._reader.monitor_pid

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._drop()
        if self._guard is not None:
            self._guard.join(GUARD_S)  # unless it is starting a monitor just now
        self._reader.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def watch(*, runtime_dir: Path | str | None = None, timeout_s: float = 10.0) -> Watch:
    """Watch the devices through the monitor that runs, or through one that is started now and ends with its last user.

    `runtime_dir` names the directory to look and start in, instead of the usual ones. Waits at most `timeout_s` for a
    monitor that is started. Raises MonitorFailed with what the monitor said, ConfigInvalid for an unusable directory.
    """
    own = own_dir() if runtime_dir is None else RuntimeDir(Path(runtime_dir).absolute())
    for directory in () if runtime_dir is not None else readable_dirs():
        if directory != own and (reader := _live(directory)) is not None:
            return Watch(directory, reader, None)
    try:
        own.prepare()
    except ConfigInvalid:
        if (reader := _live(own)) is not None:  # somebody else's, for us to read
            return Watch(own, reader, None)
        raise
    deadline = time.monotonic() + timeout_s
    users = FileLock(own.users_lock)
    try:
        if not users.wait_shared(timeout_s):
            raise MonitorFailed(f"the monitor in {own.path} is ending and does not come to its end")
        reader = _live(own) or _started(own, deadline)
        _wait_for_answers(reader, deadline)
        return Watch(own, reader, users)
    except BaseException:
        users.close()
        raise


def _drop(users: FileLock | None, closed: threading.Event) -> None:
    closed.set()
    if users is not None:
        users.close()


def _guard(directory: RuntimeDir, reader: RecordReader, closed: threading.Event) -> None:
    """Start another monitor when one that was started on demand has died, as long as somebody watches.

    Whoever wants a daemon in its place has some time to start that first. The reader finds the successor by itself.
    """
    live_at, waits = time.monotonic(), False
    while not closed.wait(GUARD_S):
        try:
            if reader.is_live() or _is_held(directory):
                live_at, waits = time.monotonic(), False
            elif time.monotonic() - live_at < OTHERS_FIRST_S or waits:
                continue
            elif (holder := last_holder(directory)) is not None and holder.on_demand:
                log.warning("the monitor has died; another one is started")
                _started(directory, time.monotonic() + 10 * GUARD_S).close()
            else:
                waits = True
                log.warning(
                    "the monitor in %s has ended; it was no engine's, so it is waited for until somebody starts it again",
                    directory.path,
                )
        except RecordError:  # closed
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
    """A reader of the monitor in `directory`, or None where none runs that can be read."""
    try:
        reader = RecordReader.open(directory.record)
    except RecordError:
        return None
    if reader.is_live():
        return reader
    reader.close()
    return None


def find_running(
    directories: Sequence[RuntimeDir], *, timeout_s: float = 2.0
) -> tuple[RuntimeDir, RecordReader] | None:
    """As `find_live`, but a monitor that holds a directory and is busy, starting or ending has time to show it.

    Raises MonitorFailed, which names its process, where it does not within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while (found := find_live(directories)) is None:
        held = next((directory for directory in directories if _is_seen_held(directory)), None)
        if held is None:
            return None
        if time.monotonic() > deadline:
            raise MonitorFailed(_silence(held))
        time.sleep(0.02)
    return found


def _is_seen_held(directory: RuntimeDir) -> bool:
    """Whether a monitor holds the directory, as far as this user may see; makes nothing."""
    try:
        return directory.monitor_lock.exists() and _is_held(directory)
    except OSError:
        log.debug("whether a monitor holds %s cannot be seen", directory.path, exc_info=True)
        return False


def _silence(directory: RuntimeDir) -> str:
    """A sentence about the monitor that holds the directory and does not answer."""
    pid = monitor_pid(directory)
    who = "a process" if pid is None else f"process {pid}"
    return f"{who} holds {directory.path} as its monitor and does not answer: it is stopped, or hangs; let it go on, or end it"


def _is_held(directory: RuntimeDir) -> bool:
    """Whether a monitor holds the directory, though it may be starting, stopped or hanging."""
    lock = FileLock(directory.monitor_lock)
    try:
        return not lock.try_shared()
    finally:
        lock.close()


def _started(directory: RuntimeDir, deadline: float) -> RecordReader:
    """Start a monitor, unless another user is at it or one is there that says nothing yet, and wait for its record."""
    start = FileLock(directory.start_lock)
    try:
        process = None
        while (reader := _live(directory)) is None:
            if process is None and start.try_exclusive() and not _is_held(directory):
                process = _spawn(directory)
            status = None if process is None else process.returncode
            if status in (0, ALREADY_MONITORED_STATUS):
                process = None  # another was first, or just looked: see what becomes of it
            elif status is not None:
                raise MonitorFailed(f"the monitor ended with status {status}: {_said(directory)}")
            if time.monotonic() > deadline:
                if process is None and _is_held(directory):
                    raise MonitorFailed(_silence(directory))
                raise MonitorFailed(f"no monitor answered in time: {_said(directory)}")
            time.sleep(0.005)
        return reader
    finally:
        start.close()


def _spawn(directory: RuntimeDir) -> subprocess.Popen[bytes]:
    """A monitor in a process of its own. The start lock is held."""
    command = [
        sys.executable, "-P", "-m", "pagetide.vram_monitor",
        "serve", "--until-unused", "--runtime-dir", str(directory.path),
    ]  # fmt: skip
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(directory.log, flags, 0o600)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            cwd="/",
            start_new_session=True,  # Ctrl-C at the engine's terminal is not for the monitor of others
        )
    finally:
        os.close(descriptor)
    # It may outlive its first user or end before it: a thread that waits leaves no zombie behind.
    threading.Thread(target=process.wait, name="vram-monitor", daemon=True).start()
    return process


def _wait_for_answers(reader: RecordReader, deadline: float) -> None:
    """Wait until every device was asked once, but not long for one that does not answer."""
    deadline = min(deadline, time.monotonic() + FIRST_ANSWER_S)
    while not all(device.memory.at_ns for device in reader.snapshot().devices) and time.monotonic() < deadline:
        time.sleep(0.002)


def _said(directory: RuntimeDir) -> str:
    """The end of the monitor's log."""
    try:
        return directory.log.read_text("utf-8", "replace").strip()[-2000:] or f"{directory.log} is empty"
    except OSError as error:
        return f"{directory.log} cannot be read: {error.strerror}"
