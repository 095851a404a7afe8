"""A private test device: some of this machine's memory behind its own broker, and an external process that uses it.

`pagetide demo` and examples/tide.py use it. The monitor is the real one, in a temporary
runtime directory, so that it disturbs no other monitor. The external process takes real memory and knows no broker.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from .common.child_process import ChildProcess, parent_channel
from .common.frames import ChannelClosed
from .common.on_error import OnError
from .monitor.errors import MonitorFailed
from .monitor.runtime_dir import VARIABLE, FileLock, RuntimeDir

if TYPE_CHECKING:
    from .allocator.broker_client import BrokerClient
    from .allocator.wire import LeaseView
    from .monitor.record import RecordReader

START_S = 30.0
END_S = 10.0


class ExternalProcess(ChildProcess):
    """A process that holds a given amount of memory. It ends with the context or with this process."""

    name = "the external process"

    def __init__(self) -> None:
        """Start the process, which holds nothing yet."""
        super().__init__(("-m", __name__))
        self.held_bytes: int = self.receive()

    def hold(self, num_bytes: int) -> None:
        """Allocate up to `num_bytes` in one piece, or free the last pieces beyond it; returns when done."""
        self.send(num_bytes)
        self.held_bytes = self.receive()


class PrivateDevice:
    """`vram-monitor serve` over `capacity_bytes` of this machine's memory, for engines and an optional external process.

    Engines use the device if they are made in a process with `environ`, or inside `here`.
    """

    def __init__(self, capacity_bytes: int, headroom_bytes: int, external: ExternalProcess | None = None) -> None:
        """Start the monitor and wait until it answers. Raises MonitorFailed with its output if it ends or does not answer."""
        self.capacity_bytes = capacity_bytes
        self.headroom_bytes = headroom_bytes
        self._folder = Path(tempfile.mkdtemp(prefix="pagetide-"))
        self._directory = RuntimeDir(self._folder / "run").prepare()
        self._users = FileLock(self._directory.users_lock)
        self._process: ChildProcess | None = None
        self._reader: RecordReader | None = None
        with OnError(self.close):
            self._users.wait_shared(END_S)  # the monitor ends when this lock is free, also after this process is killed
            self._process = self._start(external)
            self._reader = self._wait(self._process)

    @property
    def socket(self) -> Path:
        """The broker's socket."""
        return self._directory.socket

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables that put a process's engines on this device."""
        return {VARIABLE: str(self._directory.path)}

    @property
    def client(self) -> BrokerClient:
        """A client for commands to the broker."""
        from .allocator.broker_client import BrokerClient

        return BrokerClient(self.socket)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Put the engines that this process makes inside the context on this device."""
        before = os.environ.get(VARIABLE)
        os.environ.update(self.environ)
        try:
            yield
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before

    def leases(self) -> tuple[LeaseView, ...]:
        """The leases of the engines."""
        return self.client.leases()

    def free_bytes(self) -> int:
        """Free bytes by the last measurement."""
        assert self._reader is not None
        (device,) = self._reader.snapshot().devices
        if device.memory.free_bytes is None:
            raise MonitorFailed(f"the private device is not measured: {device.memory.error}")
        return device.memory.free_bytes

    def close(self) -> None:
        """End the monitor and delete its files. Idempotent."""
        if self._reader is not None:
            self._reader.close()
        self._users.close()
        if self._process is not None:
            self._process.kill(signal.SIGTERM)
            self._process.close(END_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> PrivateDevice:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self, external: ExternalProcess | None) -> ChildProcess:
        from .monitor.watching import start_monitor

        members = () if external is None else ("--members", str(external.pid))
        bounds = ("--capacity", str(self.capacity_bytes), "--headroom", str(self.headroom_bytes))
        return start_monitor(self._directory, "--source", "host", *bounds, *members)

    def _wait(self, process: ChildProcess) -> RecordReader:
        from .monitor.watching import find_live

        deadline = time.monotonic() + START_S
        while (found := find_live((self._directory,))) is None:
            if process.status is not None or time.monotonic() > deadline:
                said = self._directory.log.read_text("utf-8", "replace").strip()[-2000:]
                raise MonitorFailed(f"the monitor of the private device does not answer; it said: {said}")
            time.sleep(0.005)
        return found[1]


def main() -> None:
    """The external process: holds what its parent says, in pieces of real memory."""
    parent, pieces, held = parent_channel(), list[mmap.mmap](), 0
    with contextlib.suppress(ChannelClosed):
        while True:
            parent.send(held)
            wanted = parent.receive()
            if wanted > held:
                piece = mmap.mmap(-1, wanted - held, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                for at in range(0, len(piece), mmap.PAGESIZE):
                    piece[at] = 1
                pieces.append(piece)
            while pieces and held - len(pieces[-1]) >= wanted:
                held -= len(pieces[-1])
                pieces.pop().close()
            held = sum(map(len, pieces))


if __name__ == "__main__":
    main()
