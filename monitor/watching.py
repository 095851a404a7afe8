"""`monitor.watch()`: a reader for an engine; where no monitor runs, one is started, and it ends with its last user.

    user     shared lock on users.lock ── is a monitor there? ──no──► start one, wait for its record
    monitor  exclusive lock on monitor.lock, or end: another was first
             now and then: exclusive lock on users.lock?  ──yes──► nobody is left: take the record away, end

A user takes its lock before it looks, and the monitor holds the users' lock until it has ended, so nobody is left with a
monitor that is about to go.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from .errors import MonitorFailed, RecordError
from .record import RecordReader
from .runtime_dir import FileLock, RuntimeDir, own_dir, readable_dirs
from .snapshot import DeviceInfo, DeviceMemory, Snapshot

ALREADY_MONITORED_STATUS = 3  # how a monitor says that another was first


class Watch:
    """What the monitor of `directory` sees, read without a lock. Close it, or a monitor that was started for it goes on."""

    def __init__(self, directory: RuntimeDir, reader: RecordReader, users: FileLock | None) -> None:
        self.directory = directory
        self._reader = reader
        self._users = users

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
        self._reader.close()
        if self._users is not None:
            self._users.close()

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
    own.prepare()
    users = FileLock(own.users_lock)
    try:
        if not users.wait_shared(timeout_s):
            raise MonitorFailed(f"the monitor in {own.path} is ending and does not come to its end")
        return Watch(own, _live(own) or _started(own, timeout_s), users)
    except BaseException:
        users.close()
        raise


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


def _started(directory: RuntimeDir, timeout_s: float) -> RecordReader:
    """Start a monitor, which gives way if another was first, and wait for the record of whichever runs."""
    command = [
        sys.executable, "-P", "-m", "pagetide.vram_monitor",
        "serve", "--until-unused", "--runtime-dir", str(directory.path),
    ]  # fmt: skip
    descriptor = os.open(directory.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,  # Ctrl-C at the engine's terminal is not for the monitor of others
        )
    finally:
        os.close(descriptor)
    # It may outlive its first user or end before it: a thread that waits leaves no zombie behind.
    threading.Thread(target=process.wait, name="vram-monitor", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while (reader := _live(directory)) is None:
        status = process.returncode
        if status not in (None, 0, ALREADY_MONITORED_STATUS):
            raise MonitorFailed(f"the monitor ended with status {status}: {_said(directory)}")
        if time.monotonic() > deadline:
            raise MonitorFailed(f"no monitor answered within {timeout_s:g} s: {_said(directory)}")
        time.sleep(0.005)
    return reader


def _said(directory: RuntimeDir) -> str:
    """The end of the monitor's log."""
    try:
        return directory.log.read_text("utf-8", "replace").strip()[-2000:] or f"{directory.log} is empty"
    except OSError as error:
        return f"{directory.log} cannot be read: {error.strerror}"
