"""A real `vram-monitor serve` in a process of its own, for tests and benchmarks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from pagetide.monitor.errors import RecordError
from pagetide.monitor.record import RecordReader

DEADLINE_S = 30.0


def wait_until(true: Callable[[], object], what: str = "it", timeout_s: float = DEADLINE_S) -> None:
    """Wait for another process, not for time to pass."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s:g} s"
        time.sleep(0.002)


def command(*arguments: str | Path) -> list[str]:
    """`vram-monitor` with these arguments, as the interpreter of the tests runs it."""
    return [sys.executable, "-P", "-m", "pagetide.vram_monitor", *map(str, arguments)]


def run(*arguments: str | Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `vram-monitor` to its end."""
    environ = os.environ | (env or {})
    return subprocess.run(command(*arguments), capture_output=True, text=True, env=environ, timeout=120, check=False)


class MonitorProcess:
    """`vram-monitor serve --runtime-dir DIRECTORY`, running until the context ends."""

    def __init__(
        self, directory: Path, *arguments: str, source: str | None = "host", env: Mapping[str, str] | None = None
    ) -> None:
        self.directory = directory
        sources = () if source is None else ("--source", source)
        self._command = command("serve", "--runtime-dir", directory, *sources, *arguments)
        self._env = os.environ | (env or {})
        self._log = directory.parent / f"{directory.name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def record(self) -> Path:
        return self.directory / "record"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> MonitorProcess:
        """Start it and wait until its record is there. Fails with what it said when it ended instead."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_until(self._answers, "the monitor's record")
        return self

    def said(self) -> str:
        """Its log so far."""
        return self._log.read_text()

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def end(self) -> int:
        """SIGTERM, and wait. Returns its exit status."""
        self.signal(signal.SIGTERM)
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def __enter__(self) -> MonitorProcess:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the monitor ended: {self.said()}"
        try:
            with RecordReader.open(self.record) as reader:
                answered = all(device.memory.at_ns for device in reader.snapshot().devices)
                return reader.monitor_pid == self.pid and reader.is_live() and answered
        except RecordError:
            return False
