"""The HTTP server of the metrics page and of reservations. Any client may connect, so everything a client can send is bounded
and answered. Reading needs no password; a change needs the token of the token file.

An invalid request is answered with a status from 400 to 431, 501 or 505, and not logged. An internal error is answered
with 500, and logged once a minute per code location.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import io
import json
import logging
import math
import re
import socket
import socketserver
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, MetricsHandler, ProcessCollector

from .errors import ConfigInvalid, MonitorError
from .log_throttle import Occurrences
from .metrics import SnapshotCollector
from .snapshot import Snapshot
from .token_file import is_authorized, prepare_token, read_token

log = logging.getLogger(__name__)

PATH = "/metrics"
RESERVATIONS = "/reservations"
MAX_BODY_BYTES = 4096
# At a time, each with a thread and a descriptor: the monitor needs descriptors for the devices
MAX_CONNECTIONS = 16
_LINGER_S = 0.2  # timeout between reads while a refused request is drained
# Of a request line and its headers; a single line has at most 64 KiB
MAX_HEAD_BYTES = 128 * 1024
# From accept to the answer's last byte; Prometheus gives a scrape up after the same time
_REQUEST_TIMEOUT_S = 10.0
_LOOK_UP_S = 0.05  # how often the accepting thread checks for shutdown, expired connections and free descriptors


class MetricsServer:
    """Serves /metrics from its own threads until it is closed."""

    def __init__(
        self,
        read: Callable[[], Snapshot],
        port: int,
        address: str = "127.0.0.1",
        answer: Callable[[str, str, Mapping[str, Any]], tuple[int, object]] | None = None,
        token_file: Path | None = None,
    ) -> None:
        """Begin to serve at `address`; port 0 takes a free one.

        `read` is called by several threads at a time; its MonitorError is answered as 503, with the message. `answer` gives the
        status and the JSON value for a method, a path below /reservations and a body; without `token_file` it is asked by GET
        alone. Raises ConfigInvalid if the address or the token file cannot be used.
        """
        if token_file is not None:
            prepare_token(token_file)
        registry = CollectorRegistry()
        registry.register(SnapshotCollector(read))
        ProcessCollector(registry=registry)  # memory, CPU time and descriptors of the monitor itself (Linux)
        settings = {"registry": registry, "answer": staticmethod(answer) if answer else None, "token_file": token_file}
        handler = type("_RegistryHandler", (_Handler,), settings)
        self._server = _listen(address, port, handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_LOOK_UP_S,), name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is served."""
        port: int = self._server.server_address[1]
        return port

    def close(self) -> None:
        """Stop serving and close all connections; the port is free on return. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Head:
    """The request file for `http.server`; yields at most MAX_HEAD_BYTES."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file = file
        self._left_bytes = MAX_HEAD_BYTES

    def readline(self, limit: int) -> bytes:
        """The next line, or its first `limit` bytes. Raises LineTooLong, answered with 431, at the bound."""
        line = self._file.readline(limit)
        self._left_bytes -= len(line)
        if self._left_bytes < 0:
            raise http.client.LineTooLong("header")
        return line

    def read(self, num_bytes: int) -> bytes:
        """The bytes after the head, as far as they come."""
        return self._file.read(num_bytes)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Handler(MetricsHandler):
    """Answers GET /metrics, in the requested format, requests for reservations, and nothing else."""

    answer: Callable[[str, str, Mapping[str, Any]], tuple[int, object]] | None = None
    token_file: Path | None = None

    # For a request line without a valid version, so that its answer has a status too.
    default_request_version = "HTTP/1.0"

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.rfile)  # type: ignore[assignment]  # all that is used of it

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """See `http.server`; a request about reservations gets {"error": ...}, like every answer to it."""
        path = getattr(self, "path", "").partition("?")[0]  # none before the request's first line is read
        if self.answer is not None and _is_of_reservations(path):
            self._send_json(code, {"error": explain or message or HTTPStatus(code).phrase})
        else:
            super().send_error(code, message, explain)
        assert isinstance(self.server, _Server)
        self.server.refused.add(self.connection)

    def do_GET(self) -> None:
        try:
            path = urlsplit(self.path).path
        except ValueError as error:  # such as "[" without "]"
            return self.send_error(400, explain=f"the request's address is invalid: {error}")
        if self.answer is not None and _is_of_reservations(path):
            return self._answer(path, {})
        if path != PATH:
            return self.send_error(404, explain=f"the metrics are at {PATH}")
        accept = _accepted(self.headers.get("Accept", ""))
        del self.headers["Accept"]
        self.headers["Accept"] = accept
        try:
            super().do_GET()
        except OSError:  # the client is gone
            raise
        except MonitorError as error:  # before anything was written: the page is built first
            self.send_error(503, explain=str(error))
        except Exception:
            self.send_error(500, explain="the page could not be made; see the monitor's log")
            raise

    def do_POST(self) -> None:
        """Change reservations: with a token, and a small JSON object as the body."""
        path = self.path.partition("?")[0]
        if self.answer is None or not _is_of_reservations(path):
            return self.send_error(501, explain=f"{self.command} is not for this path")
        if self.token_file is None:
            return self.send_error(403, explain="this monitor changes nothing over HTTP; start it with --token-file FILE")
        try:
            token = read_token(self.token_file)
        except MonitorError as error:
            return self.send_error(503, explain=str(error))
        if not is_authorized(self.headers.get("Authorization", ""), token):
            return self.send_error(401, explain="send the token of the monitor's token file: Authorization: Bearer TOKEN")
        length = self.headers.get("Content-Length", "0" if self.command == "DELETE" else "")
        if not re.fullmatch(r"\d{1,9}", length, re.ASCII) or "Transfer-Encoding" in self.headers:
            return self.send_error(411, explain="send the body with its Content-Length")
        if int(length) > MAX_BODY_BYTES:
            return self.send_error(413, explain=f"a body has at most {MAX_BODY_BYTES} bytes")
        content = self.rfile.read(int(length))
        if len(content) < int(length):
            return self.send_error(400, explain="the body ended before its Content-Length")
        try:
            body = json.loads(content or b"{}", parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            return self.send_error(400, explain=f"the body is not JSON: {error}")
        if not isinstance(body, dict):
            return self.send_error(400, explain='the body is not an object such as {"size": "8GiB", "time": "2h"}')
        self._answer(path, body)

    do_PATCH = do_DELETE = do_POST

    def _answer(self, path: str, body: Mapping[str, Any]) -> None:
        assert self.answer is not None
        try:
            status, value = self.answer(self.command, path, body)
        except Exception:
            self.send_error(500, explain="there is no answer; see the monitor's log")
            raise
        self._send_json(status, value)

    def _send_json(self, status: int, value: object) -> None:
        content = json.dumps(value).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _is_of_reservations(path: str) -> bool:
    return path == RESERVATIONS or path.startswith(RESERVATIONS + "/")


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not a JSON number")


_OPENMETRICS = "application/openmetrics-text"
_VERSIONS = {"version=0.0.1", "version=1.0.0"}  # the newest is sent


def _accepted(header: str) -> str:
    """An Accept header for the client library, which repeats the version that it is asked for: OpenMetrics, or "" for text."""
    for media_range in header.split(","):
        kind, *parameters = (part.strip().replace('"', "") for part in media_range.split(";"))
        if kind == _OPENMETRICS and _VERSIONS.issuperset(one for one in parameters if one.startswith("version")):
            return f"{_OPENMETRICS};version=1.0.0"
    return ""


class _Server(socketserver.ThreadingTCPServer):
    """A listening server with a thread per connection, at most MAX_CONNECTIONS at a time; further ones are closed at once.

    They would otherwise wait behind slow ones. (http.server's own server looks up the machine's name, which can take
    seconds and is not needed.)
    """

    allow_reuse_address = sys.platform != "win32"  # a port with closing connections counts as free
    daemon_threads = True
    request_queue_size = 128  # a burst is rejected now, not left to retry a second later

    def __init__(self, family: socket.AddressFamily, where: tuple[Any, ...], handler: type[_Handler]) -> None:
        self.address_family = family
        self._faults = Occurrences()
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}  # connection -> its deadline, monotonic; under the lock
        self.refused: set[socket.socket] = set()  # connections with requests that were answered by an error
        super().__init__(where, handler)

    def get_request(self) -> tuple[Any, Any]:
        """The next connection. Without a free descriptor it stays queued; the sleep keeps `serve_forever` from spinning."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_LOOK_UP_S)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is a slot for this connection; it is then taken until `close_request`."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                return False
            self._open[request] = time.monotonic() + _REQUEST_TIMEOUT_S
            return True

    def service_actions(self) -> None:
        """Called after each connection, and every _LOOK_UP_S."""
        self._hang_up(time.monotonic())

    def _hang_up(self, now: float) -> None:
        """Shut down expired connections, which wakes their threads. (A socket timeout would restart at each byte.)"""
        with self._lock:
            for connection, end in self._open.items():
                if end <= now:
                    with contextlib.suppress(OSError):  # the client closed it first
                        connection.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """End the answer and the connection, after draining a refused request for a moment.

        Closing with unread data sends a reset, which may reach the client before the answer.
        """
        if request in self.refused:
            self.refused.remove(request)
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_WR)
                request.settimeout(_LINGER_S)
                left = 4 * MAX_HEAD_BYTES
                while left > 0 and (data := request.recv(65536)):
                    left -= len(data)
        super().shutdown_request(request)

    def close_request(self, request: Any) -> None:
        with self._lock:  # else `_hang_up` could meet the descriptor's next owner
            self._open.pop(request, None)
            super().close_request(request)

    def server_close(self) -> None:
        super().server_close()
        self._hang_up(math.inf)  # no thread checks deadlines any more

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an internal error, at most once a minute per code location. A client that hung up is not logged."""
        error = sys.exception()
        if error is None or isinstance(error, OSError):
            return
        last = traceback.extract_tb(error.__traceback__)[-1]  # the client may choose the message, but not the location
        with self._lock:
            times = self._faults.record(f"{type(error).__name__} at {last.filename}:{last.lineno}", time.monotonic_ns())
        if times:
            again = f" ({times} times since the last message)" if times > 1 else ""
            log.error("making the metrics page failed%s", again, exc_info=error)


def _listen(address: str, port: int, handler: type[_Handler]) -> _Server:
    """A listening server. Raises ConfigInvalid, saying what to do."""
    if not 0 <= port <= 65535:
        raise ConfigInvalid(f"the metrics port must be between 0 and 65535, got {port}")
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return _Server(family, where, handler)
    except (OSError, UnicodeError) as error:
        raise ConfigInvalid(_refusal(address, port, error)) from error


def _refusal(address: str, port: int, error: OSError | UnicodeError) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if isinstance(error, socket.gaierror | UnicodeError) or code == errno.EADDRNOTAVAIL:
        return (
            f"metrics cannot be served at {address!r}: that is no address of this machine. "
            "Use 127.0.0.1 for this machine alone, 0.0.0.0 for every network it is in"
        )
    if code == errno.EADDRINUSE:
        return (
            f"port {port} at {address} is in use by another program, perhaps another vram-monitor. "
            "Choose another metrics port, or 0 for a free one"
        )
    if code == errno.EACCES:
        return f"port {port} at {address} may not be used: ports below 1024 are root's. Choose a higher metrics port"
    return f"metrics cannot be served at port {port} of {address}: {error}"
