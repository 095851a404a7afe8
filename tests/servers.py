"""Real servers for tests: `pagetide serve` as a process, to be asked over real sockets."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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

    def __init__(self, arguments: Sequence[str], log: Path, command: str = "serve", **environ: str) -> None:
        self._log = log
        self._arguments = [sys.executable, "-P", "-m", "pagetide", command, "--port", "0", *arguments]
        self._environ = os.environ | environ
        self.process: subprocess.Popen[bytes]
        self.url = ""

    def __enter__(self) -> ServerProcess:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self._arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environ
            )
        try:
            self.url = self._wait_for(r"ready: serving .* at (\S+)")
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGTERM)

    @property
    def said(self) -> str:
        """What it has printed and logged."""
        return self._log.read_text("utf-8", "replace")

    def events(self, path: str, **options: Any) -> Iterator[dict[str, Any]]:
        """The events of a stream; `options` are those of the request."""
        import httpx2

        with httpx2.stream("POST", f"{self.url}{path}", timeout=START_S, **options) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def logged(self, request_id: str) -> dict[str, Any]:
        """The line of the access log of a request, which comes after its answer."""
        self._wait_for(f'"{request_id}"')
        (line,) = [line for line in self.said.splitlines() if f'"{request_id}"' in line]
        entry: dict[str, Any] = json.loads(line[line.index("{") :])
        return entry

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
                raise AssertionError(f"the server did not say {pattern}; it said: {self.said}")
            time.sleep(0.02)
        return found.group(found.re.groups)


def children(server: ServerProcess) -> list[int]:
    """The engine processes of a server."""
    found = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid in found.split()]


def wait_until_idle(url: str, headers: dict[str, str], timeout_s: float = START_S) -> None:
    """Wait until no request is open and all blocks are back."""
    import httpx2

    until = time.monotonic() + timeout_s
    while True:
        load = httpx2.get(f"{url}/load", headers=headers).json()["server_load"]
        samples = {}
        for line in httpx2.get(f"{url}/metrics", headers=headers).text.splitlines():
            name, _, value = line.rpartition(" ")
            if re.match(r'vllm:num_requests_|pagetide_kv_blocks{.*state="live"', name):
                samples[name] = float(value)
        left = {name: value for name, value in samples.items() if value}
        if not load and samples and not left:
            return
        assert time.monotonic() < until, f"something is left: {load} open requests, {left}"
        time.sleep(0.05)
