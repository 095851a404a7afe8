"""Snapshots of the running monitor; without one, of a poller in this process, until a monitor starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from types import TracebackType

from ..common.on_error import OnError
from .errors import MonitorError, MonitorFailed
from .poller import select
from .record import RecordReader
from .runtime_dir import RuntimeDir
from .snapshot import Origin, Snapshot
from .watching import find_live, find_running, is_seen_held

Read = Callable[[], Snapshot]


class Follower:
    """Attaches to the monitor that runs, detaches when it ends, and attaches to the next one. Not thread-safe.

    A monitor that is silent but still holds its directory keeps its view: it is stopped, or hangs.
    """

    def __init__(
        self,
        directories: Sequence[RuntimeDir],
        devices: Sequence[str],
        open_direct: Callable[[], AbstractContextManager[Read]],
        add_leases: Callable[[RuntimeDir, Snapshot], Snapshot],
    ) -> None:
        """`open_direct` starts a poller. Raises NoSuchDevice for a device that the running monitor does not watch."""
        self._directories, self._devices = directories, devices
        self._open_direct, self._add_leases = open_direct, add_leases
        self._direct: Read | None = None
        self._reader: RecordReader | None = None
        self._uuids: frozenset[str] = frozenset()
        self._trouble: str | None = None  # why a monitor that is there is not read
        self._open = ExitStack()  # the record or the poller
        self.directory: RuntimeDir | None = None  # of the monitor that is read
        try:
            found = find_running(directories)
        except MonitorFailed as error:
            found, self._trouble = None, str(error)
        if found is not None:
            self._attach(*found)

    def read(self) -> Snapshot:
        """A snapshot now. Raises MonitorError if there is no monitor and the devices cannot be read either."""
        if self._reader is not None and self.directory is not None:
            if self._reader.is_live() or is_seen_held(self.directory):
                return self._add_leases(self.directory, self._shown(self._reader.snapshot()))
            self._detach()
        elif self._direct is not None and (found := find_live(self._directories)) is not None:
            try:
                self._attach(*found)
                return self.read()
            except MonitorError as error:  # such as a device that this monitor does not watch
                self._trouble = str(error)
        if self._direct is None:
            self._direct = self._open.enter_context(self._open_direct())
        return replace(self._direct(), origin=Origin.WAITING, leases_error=self._trouble)

    def close(self) -> None:
        """Stop reading. Idempotent."""
        self._detach()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _attach(self, directory: RuntimeDir, reader: RecordReader) -> None:
        with OnError(reader.close):
            uuids = frozenset(info.uuid for info in select(reader.devices(), self._devices)) if self._devices else None
        self._detach()
        self._open.enter_context(reader)
        self._reader, self.directory, self._uuids = reader, directory, uuids or frozenset()

    def _detach(self) -> None:
        self._open.close()
        self._reader = self.directory = self._direct = self._trouble = None

    def _shown(self, snapshot: Snapshot) -> Snapshot:
        if not self._uuids:
            return snapshot
        return replace(snapshot, devices=tuple(device for device in snapshot.devices if device.info.uuid in self._uuids))
