"""Alerts of a real daemon: real commands, a real local HTTP server, one that hangs, floods, settings read again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from monitors import MonitorProcess, wait_until

from pagetide.common.child_process import ChildProcess
from pagetide.monitor.event_log import EventReader
from pagetide.monitor.events import EventKind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="commands see /proc")
HOLDS = """
import sys
held = bytearray(300 << 20)
held[::4096] = b"x" * len(held[::4096])
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding() -> Iterator[int]:
    """A process that holds 300 MiB."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


class Hooks(ThreadingHTTPServer):
    """A chat service: keeps what it is sent; answers with `status`, or at /hang not before it is closed."""

    daemon_threads = True

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, Any]]] = []
        self.status = 200
        self.closing = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: Hooks

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/json"
        self.server.got.append((self.path, json.loads(body)))
        if self.path == "/hang":
            self.server.closing.wait()
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def written(settings: Path, *rules: dict[str, Any]) -> None:
    settings.write_text(json.dumps({"alerts": rules, "detail_interval": 0.1}))  # which is YAML, too


def test_commands_and_webhooks_get_what_happened_and_one_that_hangs_stops_none(tmp_path: Path) -> None:
    """On a test device: its one member is an external process, which is killed in the end."""
    directory, out, settings = tmp_path / "run", tmp_path / "out", tmp_path / "monitor.yaml"
    script = """
cat >> "$0"
printf '\\n%s|%s|%s\\n' "$VRAM_ALERT" "$VRAM_STATE" "$VRAM_TEXT" >> "$0"
grep SigBlk /proc/self/status >> "$0"
"""
    external, free = {"when": "external", "above": "200MiB"}, {"when": "free", "below": "100%"}
    with Hooks() as hooks, holding() as pid:
        written(
            settings,
            {"name": "hangs", **external, "webhook": hooks.url("/hang")},
            {"name": "intruder", **external, "command": ["sh", "-c", script, str(out)]},
            {"name": "chat", **free, "webhook": hooks.url("/chat?token=s3cret")},
            {"name": "fails", **free, "command": ["sh", "-c", "exit 7"]},
            {"name": "missing", **free, "command": ["/no/such/program"]},
        )
        device = ("--capacity", "2GiB", "--members", str(pid))
        with MonitorProcess(directory, "--config", str(settings), *device) as monitor:
            wait_until(lambda: out.exists() and "intruder|firing|" in out.read_text())
            wait_until(lambda: len(hooks.got) == 2)
            wait_until(lambda: "'fails' could not be delivered: " in monitor.said() and "'missing' could not" in monitor.said())
            psutil.Process(pid).kill()
            wait_until(lambda: "intruder|resolved|" in out.read_text())
            said = monitor.said()
            assert "sh ended with status 7" in said and "No such file" in said and "s3cret" not in said
            children = psutil.Process(monitor.pid).children(recursive=True)
            assert monitor.end() == 0
        wait_until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))
        told = next(message for path, message in hooks.got if path == "/chat?token=s3cret")
    lines = out.read_text().splitlines()
    first = json.loads(next(line for line in lines if line.startswith("{")))
    assert (first["alert"], first["state"], first["pid"], first["device"]) == ("intruder", "firing", pid, "host")
    assert f"(pid {pid}, " in first["text"] and "of device host without a lease" in first["text"]
    assert {line.split()[1] for line in lines if line.startswith("SigBlk")} == {"0" * 16}, "no signal is blocked in commands"
    assert (told["alert"], told["state"]) == ("chat", "firing") and "free on device host, less than 2.00 GiB" in told["text"]
    alerts = [event.reason or "" for event in EventReader(directory / "events").newest(100) if event.kind is EventKind.ALERT]
    assert {reason.partition(":")[0] for reason in alerts} == {"hangs", "intruder", "chat", "fails", "missing"}


def test_a_command_that_takes_too_long_ends_with_what_it_has_started(tmp_path: Path) -> None:
    program = "from pagetide.monitor import alert_delivery as it; it.TIMEOUT_S = 0.5; it.main()"
    script = 'sleep 600 & echo $! > "$0"; sleep 600'
    with ChildProcess(("-c", program), captures=True) as child:
        message = {"alert": "a", "state": "firing", "text": "t"}
        child.send((["sh", "-c", script, str(tmp_path / "pid")], None, message))
        assert child.wait(30) == -signal.SIGKILL and child.said == "sh took longer than 0.5 s"
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_rules_are_read_again_on_sighup(tmp_path: Path) -> None:
    directory, out, settings = tmp_path / "run", tmp_path / "out", tmp_path / "monitor.yaml"
    written(settings)
    with MonitorProcess(directory, "--config", str(settings)) as monitor:
        written(settings, {"when": "free", "below": "100%"})
        monitor.signal(signal.SIGHUP)
        wait_until(lambda: "not reloaded: " in monitor.said())
        assert f"{settings}:1: alert 'free' needs either a command or a webhook" in monitor.said()
        written(settings, {"when": "free", "below": "100%", "command": ["touch", str(out)]})
        monitor.signal(signal.SIGHUP)
        wait_until(out.exists)
        assert monitor.end() == 0


def test_the_end_of_a_monitor_ends_a_delivery_that_hangs_and_what_it_has_started(tmp_path: Path) -> None:
    directory, settings = tmp_path / "run", tmp_path / "monitor.yaml"
    script = 'echo $$ > "$0"; sleep 600 & sleep 600'
    rule = {"when": "free", "below": "100%", "command": ["sh", "-c", script, str(tmp_path / "pid")]}
    settings.write_text(json.dumps({"alerts": [rule]}))
    with MonitorProcess(directory, "--config", str(settings)) as monitor:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
        shell = psutil.Process(int((tmp_path / "pid").read_text()))
        wait_until(lambda: len(shell.children()) == 2)
        started = [shell, *shell.children()]
        assert monitor.end() == 0
    wait_until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in started))
