"""A private test device: some of this machine's memory behind its own broker, and an external process that uses it.

`pagetide demo` and examples/tide.py use it. The monitor is the real one, in a temporary
runtime directory, so that it disturbs no other monitor. The external process takes real memory and knows no broker.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from .monitor.errors import MonitorFailed
from .monitor.runtime_dir import VARIABLE, FileLock, RuntimeDir

if TYPE_CHECKING:
    from .allocator.broker_client import BrokerClient
    from .allocator.wire import LeaseView
    from .monitor.record import RecordReader

START_S = 30.0
END_S = 10.0

_PROGRAM = """
import mmap, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it too; its parent ends it
signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # an interrupted parent may be gone before the first answer
pieces = []
print(0, flush=True)
for line in sys.stdin:
    wanted, held = int(line), sum(map(len, pieces))
    if wanted > held:
        piece = mmap.mmap(-1, wanted - held, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for at in range(0, len(piece), mmap.PAGESIZE):
            piece[at] = 1
        pieces.append(piece)
    while pieces and held - len(pieces[-1]) >= wanted:
        held -= len(pieces[-1])
        pieces.pop().close()
    print(sum(map(len, pieces)), flush=True)
"""


class ExternalProcess:
    """A process that holds a given amount of memory. It ends with the context or with this process."""

    def __init__(self) -> None:
        """Start the process, which holds nothing yet."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.held_bytes = self._answer()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def hold(self, num_bytes: int) -> None:
        """Allocate up to `num_bytes` in one piece, or free the last pieces beyond it; returns when done."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # of a process that has ended, as the missing answer says
            self._process.stdin.write(f"{num_bytes}\n")
        self.held_bytes = self._answer()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildProcessError(f"the external process has ended with status {self._process.wait()}")
        return int(line)

    def close(self) -> None:
        """Kill the process. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # it may have died before it read the last input
                pipe.close()

    def __enter__(self) -> ExternalProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


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
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: RecordReader | None = None
        try:
            self._users.wait_shared(END_S)  # the monitor ends when this lock is free, also after this process is killed
            self._process = self._start(external)
            self._reader = self._wait(self._process)
        except BaseException:
            self.close()
            raise

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
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> PrivateDevice:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self, external: ExternalProcess | None) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-P", "-m", "pagetide.vram_monitor", "serve", "--until-unused", "--source", "host",
            "--runtime-dir", str(self._directory.path), "--capacity", str(self.capacity_bytes),
            "--headroom", str(self.headroom_bytes), *(() if external is None else ("--members", str(external.pid))),
        ]  # fmt: skip
        with self._directory.log.open("wb") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def _wait(self, process: subprocess.Popen[bytes]) -> RecordReader:
        from .monitor.watching import find_live

        deadline = time.monotonic() + START_S
        while (found := find_live((self._directory,))) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                said = self._directory.log.read_text("utf-8", "replace").strip()[-2000:]
                raise MonitorFailed(f"the monitor of the private device does not answer; it said: {said}")
            time.sleep(0.005)
        return found[1]
