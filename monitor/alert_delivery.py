"""Delivers alerts: each in a process of its own, so that no command or address can hold up or harm the monitor.

`AlertDelivery` starts `python -m pagetide.monitor.alert_delivery`, which runs a command or posts to a webhook.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from ..common.child_process import ChildProcess, parent_channel
from .alerts import Alert
from .log_throttle import Occurrences

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0  # of a command or a post
_GRACE_S = 5.0
_MOST_WAITING = 64
_WORKERS = 2
_MAX_ANSWER_BYTES = 1 << 16


class AlertDelivery:
    """Starts the processes, two at a time; the others wait, at most 64. Thread-safe."""

    def __init__(self) -> None:
        self.failures = 0
        self._waiting: queue.Queue[tuple[Alert, dict[str, Any]] | None] = queue.Queue(_MOST_WAITING)
        self._threads: list[threading.Thread] = []
        self._throttle = Occurrences()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._host = socket.gethostname()

    def send(self, alert: Alert) -> None:
        """Deliver an alert soon; one that finds the queue full is lost, which the log says."""
        if not self._threads:
            self._threads = [threading.Thread(target=self._run, name="alerts", daemon=True) for _ in range(_WORKERS)]
            for thread in self._threads:
                thread.start()
        try:
            self._waiting.put_nowait((alert, alert.to_dict(round(time.time(), 3), self._host)))
        except queue.Full:
            self._failed(alert, f"{_MOST_WAITING} others wait already")

    def close(self, timeout_s: float = 1.0) -> None:
        """Drop what waits and end what runs. Idempotent."""
        self._closed.set()
        for _ in self._threads:
            with suppress(queue.Full):  # then they find that it is closed
                self._waiting.put_nowait(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while (taken := self._waiting.get()) is not None and not self._closed.is_set():
            alert, message = taken
            try:
                self._deliver(alert, message)
            except Exception as error:  # the thread is there for others too
                self._failed(alert, str(error))

    def _deliver(self, alert: Alert, message: dict[str, Any]) -> None:
        child = ChildProcess(("-m", "pagetide.monitor.alert_delivery"), captures=True, cwd="/")
        try:
            child.send((alert.rule.command, alert.rule.webhook, message))
            deadline = time.monotonic() + TIMEOUT_S + _GRACE_S
            while (status := child.wait(0.1)) is None and time.monotonic() < deadline and not self._closed.is_set():
                pass
            if status != 0 and not self._closed.is_set():
                self._failed(alert, child.ending() if status is not None else f"it took longer than {TIMEOUT_S:g} s")
        finally:
            if child.status is None:
                with suppress(OSError):
                    os.killpg(child.pid, signal.SIGKILL)  # with the command, which is in its group
            child.close()

    def _failed(self, alert: Alert, why: str) -> None:
        with self._lock:
            self.failures += 1
            times = self._throttle.record(alert.rule.title, time.monotonic_ns())
        if times:
            again = f" ({times} times since the last message)" if times > 1 else ""
            log.warning("alert %r could not be delivered%s: %s", alert.rule.title, again, why)


# ---- in the child -------------------------------------------------------------------------------


def main() -> int:
    """Deliver the alert that the parent sends. The last line on standard error says why it failed."""
    command, webhook, message = parent_channel().receive()
    data = json.dumps(message).encode()
    try:
        if command is not None:
            _run_command(command, data, message)
        else:
            _post(webhook, data)
    except subprocess.TimeoutExpired:
        print(f"{command[0]} took longer than {TIMEOUT_S:g} s", file=sys.stderr)
        os.killpg(0, signal.SIGKILL)  # with what the command has started
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _run_command(command: tuple[str, ...], data: bytes, message: dict[str, Any]) -> None:
    """Raises OSError if it cannot be started, or fails, and TimeoutExpired."""
    environ = os.environ | {"VRAM_ALERT": message["alert"], "VRAM_STATE": message["state"], "VRAM_TEXT": message["text"]}
    try:
        # What it prints goes nowhere: it could fill a disk.
        null = subprocess.DEVNULL
        subprocess.run(command, input=data, stdout=null, stderr=null, env=environ, timeout=TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise OSError(f"{command[0]} ended with status {error.returncode}") from error


def _post(url: str, data: bytes) -> None:
    """Raises OSError. Messages have the host alone: the rest of an address may be a secret."""
    from urllib.error import HTTPError, URLError
    from urllib.parse import urlsplit
    from urllib.request import Request, urlopen

    request = Request(url, data, {"Content-Type": "application/json", "User-Agent": "vram-monitor"})
    host = urlsplit(url).hostname
    try:
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            answer.read(_MAX_ANSWER_BYTES)
    except HTTPError as error:
        raise OSError(f"{host} answered {error.code} {error.reason}") from error
    except URLError as error:
        raise OSError(f"{host}: {error.reason}") from error


if __name__ == "__main__":
    raise SystemExit(main())
