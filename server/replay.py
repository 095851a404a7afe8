"""Serves the page over a recording: `pagetide replay FILE`. No engine, no keys; to this machine alone."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import signal
import socket

from fastapi import FastAPI, Query
from fastapi.responses import Response
from starlette.types import ASGIApp

from ..common.recording import FrameRecording
from ..version import __version__
from .admission import RequestAdmission
from .app import add_errors
from .choices import json_encode
from .config import LOOPBACK, ServeConfig
from .errors import ApiError
from .guard import Guard, GuardRules
from .keys import ApiKeys
from .page import PageFiles
from .run import CannotServe, HttpServer, listen, run_event_loop

MOST_FRAMES = 2000  # of an answer, beside those that lead to its first moment
MOST_ANSWER_BYTES = 32 << 20
_NO_STORE = {"cache-control": "no-store"}


def serve_recording(recording: FrameRecording, host: str, port: int) -> int:
    """Serve the page over `recording` until a signal. Returns the exit status. Raises CannotServe."""
    if not _is_loopback(host):
        raise CannotServe(f"a recording is shown on this machine alone: --host is 127.0.0.1 or ::1, not {host}")
    listening = listen(ServeConfig(host=host, port=port))
    config = ServeConfig(host=host, port=listening.getsockname()[1])
    run_event_loop(_serve(recording, config, listening))
    return 0


def replay_app(recording: FrameRecording, files: PageFiles, host: str = LOOPBACK[0]) -> ASGIApp:
    """The ASGI application: the page, and the frames of `recording`."""
    app = FastAPI(title="pagetide", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    add_errors(app)
    info = {
        "mode": "replay", "needs_key": False, "has_keys": False, "signed_in": False, "admin": False, "version": __version__,
        "began": recording.began, "ended": recording.ended, "model": recording.header.get("model", ""),
    }  # fmt: skip

    @app.get("/page/info")
    async def get_info() -> Response:
        return Response(json_encode(info), 200, _NO_STORE, "application/json")

    @app.get("/page/frames")
    # On a thread: it unpacks.
    def frames(since: float = Query(0.0, alias="from"), until: float = math.inf) -> Response:
        if math.isnan(since) or math.isnan(until):
            raise ApiError(400, "from and until must be seconds since 1970", param="from")
        return Response(recorded_lines(recording, since, until), 200, _NO_STORE, "application/jsonl")

    files.add_to(app)
    rules = GuardRules(tuple(dict.fromkeys([*LOOPBACK, host.lower()])), open_paths=files.paths)
    return Guard(app, ApiKeys(), RequestAdmission(lambda: 1, 0), rules, lambda *_: None)


def recorded_lines(recording: FrameRecording, since: float, until: float) -> bytes:
    """Frames as JSON lines: the last full one at or before `since` (else the first), and what follows up to `until`.

    The last line is {"more", "until"}: whether frames were left out, and up to which time all are there.
    """
    lines: list[bytes] = []
    num_bytes, reached, more = 0, since, False
    for frame in recording.frames(since, max(since, until)):
        is_full = len(lines) >= MOST_FRAMES or num_bytes >= MOST_ANSWER_BYTES
        if is_full and frame.time_s > reached > since:  # so that the next answer goes further
            more = True
            break
        lines.append(frame.line)
        num_bytes += len(frame.line)
        reached = frame.time_s
    end = {"more": more, "until": reached if more or math.isinf(until) else max(since, until)}
    return b"\n".join([*lines, json_encode(end), b""])


async def _serve(recording: FrameRecording, config: ServeConfig, listening: socket.socket) -> None:
    logging.getLogger("pagetide.access").setLevel(logging.WARNING)
    http = HttpServer(replay_app(recording, PageFiles(), config.host), proxy_headers=False)
    loop = asyncio.get_running_loop()

    def end() -> None:
        http.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    print(f"ready: serving {recording.path} at {config.url}", flush=True)
    await http.serve(sockets=[listening])


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
