"""Real servers for tests: `pagetide serve` as a process, to be asked over real sockets."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

# The demo model on one core, with a lease and a host tier, so that every metric is there.
WITH_EVERYTHING = [
    "demo", "--device", "cpu", "--dtype", "float32", "--kv-memory", "min=2MiB,max=8MiB", "--host-kv-memory", "2MiB",
    "--max-seqs", "4",
]  # fmt: skip
START_S = 120.0
END_S = 60.0


class ServerProcess:
    """`pagetide serve` on a free port. Use it as a context manager.

    Attributes:
        url: Its address, such as "http://127.0.0.1:40123".
    """

    def __init__(self, arguments: Sequence[str], log: Path, **environ: str) -> None:
        self._log = log
        self._arguments = [sys.executable, "-P", "-m", "pagetide", "serve", "--port", "0", *arguments]
        self._environ = os.environ | environ
        self.process: subprocess.Popen[bytes]
        self.url = ""

    def __enter__(self) -> ServerProcess:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self._arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environ
            )
        try:
            self.url = self._wait_for(r"serving .* at (\S+)")
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGTERM)

    @property
    def said(self) -> str:
        """What it has printed and logged."""
        return self._log.read_text("utf-8", "replace")

    def end(self, number: int) -> int:
        """Send a signal and wait. Returns the exit status."""
        self.process.send_signal(number)
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def _wait_for(self, pattern: str) -> str:
        until = time.monotonic() + START_S
        while (found := re.search(pattern, self.said)) is None:
            if self.process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"the server did not start; it said: {self.said}")
            time.sleep(0.02)
        return found[1]
