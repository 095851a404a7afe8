"""Real fleets for tests: processes on a Ray of their own, clients that reconnect, and kills."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.ports import free_ports

READY_S = 600.0


class FleetProcess:
    """A fleet started by `pagetide fleet start`, with its state in `folder`. Use it as a context manager.

    Attributes:
        urls: Of its front ends.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        fronts = int(settings.get("front_ends", 1))
        self.name = f"test{os.getpid()}"
        self.settings = {"model": "demo", "name": self.name, "port": free_ports(fronts), **settings}
        self.environ = os.environ | {"XDG_STATE_HOME": str(folder / "state"), "PYTHONUNBUFFERED": "1"}
        self.urls = [f"http://127.0.0.1:{self.settings['port'] + i}" for i in range(fronts)]

    def command(self, *arguments: str, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Run `pagetide` with these arguments."""
        line = [sys.executable, "-P", "-m", "pagetide", *arguments]
        return subprocess.run(
            line, capture_output=True, text=True, env=self.environ, timeout=timeout_s, check=False, cwd=self.folder
        )

    def fleet(self, action: str, *arguments: str, timeout_s: float = 600.0) -> str:
        """Run an action of `pagetide fleet` on this fleet. Returns what it prints."""
        found = self.command("fleet", action, "--name", self.name, *arguments, timeout_s=timeout_s)
        assert found.returncode == 0, found.stderr
        return found.stdout

    def __enter__(self) -> FleetProcess:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "fleet.yaml"
        file.write_text(yaml.safe_dump(self.settings))
        found = self.command("fleet", "start", "--config", str(file))
        try:
            assert found.returncode == 0, found.stderr
            self.wait_ready()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the fleet and its cluster."""
        self.command("fleet", "stop", "--name", self.name, "--drain-timeout", "0")
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()

    def wait_ready(self, workers: int | None = None) -> None:
        """Wait until all workers are ready, and all front ends."""
        deadline = time.monotonic() + READY_S
        wanted = self.settings.get("workers", 1) if workers is None else workers
        while time.monotonic() < deadline:
            status = self.status()
            if len(status["workers"]) >= wanted and all(map(_answers, self.urls)):
                return
            time.sleep(0.2)
        raise AssertionError(f"the fleet is not ready: {self.status()}\n{self.logs()}")

    def status(self) -> dict[str, Any]:
        """What `pagetide fleet status` says."""
        found: dict[str, Any] = json.loads(self.fleet("status", "--json"))
        return found

    def logs(self) -> str:
        """The last lines of what its processes have logged."""
        folder = self.session()
        files = sorted(folder.glob("logs/worker-*.err")) if folder is not None else []
        return "\n".join(f"== {file.name}\n{file.read_text('utf-8', 'replace')[-3000:]}" for file in files)

    def session(self) -> Path | None:
        """The folder of Ray's logs."""
        for process in self.processes():
            with suppress(psutil.Error):
                for part in process.cmdline():
                    if part.startswith("--log_dir="):
                        return Path(part.removeprefix("--log_dir=")).parent
        return None

    def processes(self) -> list[psutil.Process]:
        """The processes of its cluster."""
        found: set[psutil.Process] = set()
        for process in psutil.process_iter(["pid"]):
            with suppress(psutil.Error):
                if process.environ().get("XDG_STATE_HOME") == self.environ["XDG_STATE_HOME"]:
                    found.update([process, *process.children(recursive=True)])  # a title hides the environment
        return list(found - {psutil.Process()})

    def actors(self, role: str) -> list[psutil.Process]:
        """The processes of a role: "WorkerActor", "QueueActor" or "FrontActor"."""
        found = []
        for process in self.processes():
            with suppress(psutil.Error):
                if f"ray::{role}" in (" ".join(process.cmdline())):
                    found.append(process)
        return found


def _answers(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        with socket.create_connection((host, int(port)), 2.0) as connection:
            connection.sendall(b"GET /ready HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            return b" 200 " in connection.recv(64)
    except OSError:
        return False


@dataclass(slots=True)
class StreamResult:
    """What a client has read of a stream, over all its connections.

    Attributes:
        gaps: Between arrivals, as (time of the later one, seconds).
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_ends: int = 0
    num_connections: int = 0
    error: str | None = None
    gaps: list[tuple[float, float]] = field(default_factory=list)


class ResumingClient:
    """Streams completions from any of several front ends; reconnects with Last-Event-ID when a connection breaks."""

    def __init__(self, urls: Sequence[str], give_up_s: float = 120.0) -> None:
        self._urls = urls
        self._give_up_s = give_up_s

    async def stream(self, body: Mapping[str, Any], key: str, at: int = 0) -> StreamResult:
        """Stream one completion to its end. `key` is its idempotency key."""
        import httpx2

        result, last_id = StreamResult(), ""
        deadline = time.monotonic() + self._give_up_s
        last_at = time.monotonic()
        data = json.dumps({**body, "stream": True, "return_token_ids": True}).encode()
        while result.num_ends == 0 and time.monotonic() < deadline:
            url = self._urls[(at + result.num_connections) % len(self._urls)]
            headers = {"Content-Type": "application/json", "Idempotency-Key": key}
            headers |= {"Last-Event-ID": last_id} if last_id else {}
            result.num_connections += 1
            try:
                async with aclosing(_events(url, data, headers, deadline)) as events:
                    async for event_id, event in events:
                        now = time.monotonic()
                        if event == "[DONE]":
                            result.num_ends += 1
                            continue
                        found = json.loads(event)
                        if "error" in found:
                            result.error = json.dumps(found["error"])
                            if "503" in result.error or "unavailable" in result.error:
                                raise ConnectionError(result.error)
                            return result
                        result.error = None
                        result.gaps.append((now, now - last_at))
                        last_at = now
                        (choice,) = found["choices"] or ({"text": "", "token_ids": [], "finish_reason": None},)
                        assert result.finish_reason is None or not choice["token_ids"], "tokens after the end"
                        result.text += choice["text"]
                        result.token_ids += choice["token_ids"]
                        result.finish_reason = choice["finish_reason"] or result.finish_reason
                        last_id = event_id
            except (ConnectionError, httpx2.TransportError):
                await asyncio.sleep(0.1)
        return result


async def _events(url: str, data: bytes, headers: Mapping[str, str], deadline: float) -> AsyncGenerator[tuple[str, str], None]:
    """The events of one connection, with their ids. Raises httpx2.TransportError if it breaks or the server is busy."""
    import httpx2

    timeout = httpx2.Timeout(None, connect=max(deadline - time.monotonic(), 0.1))
    async with (
        httpx2.AsyncClient(timeout=timeout, trust_env=False, verify=False) as client,
        client.stream("POST", f"{url}/v1/completions", content=data, headers=headers) as answer,
    ):
        if answer.status_code in (429, 503):
            raise httpx2.ConnectError(f"the server cannot serve this now: {answer.status_code}")
        assert answer.status_code == 200, (answer.status_code, await answer.aread())
        event_id = headers.get("Last-Event-ID", "")
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                event_id = value
            elif name == "data":
                yield event_id, value


def pause(process: psutil.Process, seconds: float) -> None:
    """SIGSTOP a process, and let it go on after some time, in the background."""
    with suppress(psutil.Error):
        process.send_signal(signal.SIGSTOP)
    subprocess.Popen(
        [sys.executable, "-c", f"import os,time;time.sleep({seconds});os.kill({process.pid},18)"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
