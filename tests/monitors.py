"""A real `vram-monitor serve` in a process of its own, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from pagetide.monitor.errors import RecordError
from pagetide.monitor.record import RecordReader

DEADLINE_S = 60.0


def wait_until(true: Callable[[], object], what: str = "it", timeout_s: float = DEADLINE_S) -> None:
    """Wait for another process, not for time to pass."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s:g} s"
        time.sleep(0.002)


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-P", "-m", "pagetide.vram_monitor", *map(str, arguments)]


def run(*arguments: str | Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environ = os.environ | (env or {})
    return subprocess.run(command(*arguments), capture_output=True, text=True, env=environ, timeout=120, check=False)


def without(folder: Path, library: str, text: str) -> dict[str, str]:
    """The environment of a process that finds this text in place of a library."""
    (folder / library).mkdir()
    (folder / library / "__init__.py").write_text(text)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def run_here(*arguments: str | Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """As `run`, but in this process: for commands that end by themselves and take no signals."""
    from pagetide.vram_monitor import main

    told, said, given = io.StringIO(), io.StringIO(), list(map(str, arguments))
    with mock.patch.dict(os.environ, env or {}), contextlib.redirect_stdout(told), contextlib.redirect_stderr(said):
        try:
            status = main(given)
        except SystemExit as ended:  # of argparse
            status = int(ended.code or 0)
    return subprocess.CompletedProcess(given, status, told.getvalue(), said.getvalue())


class MonitorProcess:
    """`vram-monitor serve --runtime-dir DIRECTORY`, running until the context ends."""

    def __init__(
        self, directory: Path, *arguments: str, source: str | None = "host", env: Mapping[str, str] | None = None
    ) -> None:
        self.directory = directory
        sources = () if source is None else ("--source", source)
        self.command = command("serve", "--runtime-dir", directory, *sources, *arguments)
        self._env = os.environ | (env or {})
        self._log = directory.parent / f"{directory.name}.log"
        self.process: Any = None  # of subprocess.Popen, once it is started

    @property
    def record(self) -> Path:
        return self.directory / "record"

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self) -> MonitorProcess:
        """Start it and wait until its record is there. Fails with what it said when it ended instead."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self.command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(self._answers, "the monitor's record")
        return self

    def said(self) -> str:
        return self._log.read_text()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def end(self, number: int | None = None) -> int:
        """SIGTERM, or another signal, and wait. Returns its exit status."""
        self.signal(number or signal.SIGTERM)
        return self.process.wait(DEADLINE_S)

    def __enter__(self) -> MonitorProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _answers(self) -> bool:
        assert self.process.poll() is None, f"the monitor ended: {self.said()}"
        try:
            with RecordReader.open(self.record) as reader:
                answered = all(device.memory.at_ns for device in reader.snapshot().devices)
                return reader.monitor_pid == self.pid and reader.is_live() and answered
        except RecordError:
            return False


def exchanged(port: int, request: bytes) -> bytes:
    """All that a server on this machine answers to the bytes of `request`."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        answer = b""
        try:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            while data := client.recv(65536):
                answer += data
        except OSError as error:  # it has heard enough
            if error.errno not in (errno.ENOTCONN, errno.ECONNRESET, errno.EPIPE):
                raise
        return answer
