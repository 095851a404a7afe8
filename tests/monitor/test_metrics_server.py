"""The metrics page under requests that no scraper sends: each is answered, none is logged. Raw sockets."""

from __future__ import annotations

import errno
import logging
import random
import socket
import threading
from collections.abc import Iterator

import pytest

from pagetide.monitor import metrics_server
from pagetide.monitor.log_throttle import QUIET_CAUSE_NS
from pagetide.monitor.metrics_server import MAX_HEAD_BYTES, MetricsServer
from pagetide.monitor.snapshot import Snapshot

SNAPSHOT = Snapshot(at_ns=10, source="test", monitor_pid=1, started_ns=1, devices=())
GET = b"GET /metrics HTTP/1.1\r\n"
PLAIN, OPEN = b"text/plain", b"application/openmetrics-text"


@pytest.fixture
def server(caplog: pytest.LogCaptureFixture) -> Iterator[MetricsServer]:
    """A server, of whose clients not a word is logged and no thread is left."""
    caplog.set_level(logging.DEBUG)
    before = set(threading.enumerate())
    server = MetricsServer(lambda: SNAPSHOT, 0)
    yield server
    server.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert caplog.records == []


def ask(server: MetricsServer, request: bytes) -> bytes:
    """All that comes back."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
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


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.0 ") else 0


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET http://[::1/metrics HTTP/1.1", 400),
        (b"GET http://]/metrics HTTP/1.1", 400),
        (b"GET http://[nonsense]/metrics HTTP/1.1", 400),
        (b"GET http://[::1]:9776/metrics HTTP/1.1", 200),
        (b"GET http://a:b:c/metrics HTTP/1.1", 200),
        (b"GET /metrics", 200),
        (b"POST /metrics", 400),
        (b"GET \xff\xfe HTTP/1.1", 404),
        (b"GET /metrics?name[]=%ff%00&name[]=up HTTP/1.1", 200),
        (b"GET /metrics?" + b"&" * 60_000 + b" HTTP/1.1", 200),
        (b"GET /metrics and more HTTP/1.1", 400),
        (b"GET /metrics HTTP/x.y", 400),
        (b"GET /metrics HTTP/" + b"9" * 5000 + b".1", 400),
        (b"GET /metrics HTTP/2.0", 505),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1", 414),
        (b"__init__ /metrics HTTP/1.1", 501),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else value,
)
def test_any_request_line_is_answered(server: MetricsServer, request_line: bytes, status: int) -> None:
    assert status_of(ask(server, request_line + b"\r\n\r\n")) == status
    assert status_of(ask(server, GET + b"\r\n")) == 200


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (PLAIN + b"; version=x.y.z", None),
        (OPEN + b";version=1.x", None),
        (OPEN + b";version=2.x", None),  # which the client library would repeat in its answer
        (PLAIN + b";version=", None),
        (OPEN + b";version=-1", None),
        (PLAIN + b";version=\xb9.0.0", None),
        (PLAIN + b";version=" + b"9" * 5000, None),
        (OPEN + b";version=1.0.0\r\n Set-Cookie: a=b", None),
        (OPEN + b";version=2.0.0," + PLAIN + b";version=0.0.4", b"text/plain; version=0.0.4; charset=utf-8"),
        (b"text/html;version=x," + OPEN + b";version=1.0.0", b"application/openmetrics-text; version=1.0.0"),
        (OPEN + b'; version="1.0.0" ;q=0.5', b"application/openmetrics-text; version=1.0.0"),
        (OPEN + b";escaping=\xff", b"application/openmetrics-text; version=1.0.0"),
        (b"*/*", b"text/plain; version=0.0.4; charset=utf-8"),
        (b"", b"text/plain; version=0.0.4; charset=utf-8"),
        (b",;=/" * 10_000, b"text/plain; version=0.0.4; charset=utf-8"),
    ],
    ids=lambda value: repr(value[:60]) if isinstance(value, bytes) else "406",
)
def test_any_accept_header_is_answered(server: MetricsServer, accept: bytes, content_type: bytes | None) -> None:
    head, _, body = ask(server, GET + b"Accept: " + accept + b"\r\n\r\n").partition(b"\r\n\r\n")
    if content_type is None:
        assert status_of(head) == 406
        assert b"ask for text/plain;version=0.0.4 or application/openmetrics-text;version=1.0.0" in body
        assert b"Set-Cookie" not in head
    else:
        assert status_of(head) == 200
        assert b"\r\nContent-Type: " + content_type in head


@pytest.mark.parametrize(
    "headers",
    [b"A: b\r\n" * 200, b"A: " + b"b" * 70_000 + b"\r\n", (b"A: " + b"b" * 1500 + b"\r\n") * 99],
    ids=["many", "long", "much"],
)
def test_headers_are_bounded(server: MetricsServer, headers: bytes) -> None:
    assert status_of(ask(server, GET + headers + b"\r\n")) == 431


def test_what_is_read_of_a_request_is_bounded_in_all(server: MetricsServer) -> None:
    """A hundred lines of 64 KiB for each of sixteen connections would be a hundred megabytes."""
    largest = GET + b"A: " + b"b" * 65_000 + b"\r\nB: " + b"b" * 60_000 + b"\r\n\r\n"
    assert len(largest) < MAX_HEAD_BYTES
    assert status_of(ask(server, largest)) == 200
    assert status_of(ask(server, largest[:-2] + b"C: " + b"b" * 10_000 + b"\r\n\r\n")) == 431


PIECES = [
    b"GET", b" ", b"/metrics", b"HTTP/1.1", b"\r\n", b"\n", b":", b"Accept", PLAIN, OPEN, b";", b"version=", b"1.0", b"x",
    b",", b"[", b"]", b"http://", b"%", b"?name[]=", b"\0", b"\xff", b"q=", b"Host", b"\t", b"escaping=", b'"', b"-", b"9" * 30,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
def test_random_requests_are_answered_and_leave_nothing(server: MetricsServer, seed: int) -> None:
    rng = random.Random(seed)
    usual = (
        GET + b"Accept: " + OPEN + b";version=1.0.0," + PLAIN + b";version=0.0.4;q=0.5\r\nAccept-Encoding: gzip\r\n\r\n"
    )
    for _ in range(150):
        request = b"".join(rng.choices(PIECES, k=rng.randrange(40))) + b"\r\n\r\n"
        ask(server, request)
        request = bytearray(usual)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(request))
            request[at : at + rng.randrange(3)] = rng.choice([*PIECES, rng.randbytes(1)])
        ask(server, bytes(request))
    assert status_of(ask(server, usual)) == 200


def test_a_fault_of_ours_is_answered_and_logged_once_a_minute_for_each_place(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = 0
    now_ns = [10**12]
    monkeypatch.setattr(metrics_server.time, "monotonic_ns", lambda: now_ns[0])

    def read() -> Snapshot:
        nonlocal faults
        faults += 1
        if faults % 2:
            raise ZeroDivisionError(f"planted {faults}")
        raise KeyError(f"planted {faults}")

    before = set(threading.enumerate())
    server = MetricsServer(read, 0)
    try:
        for _ in range(20):
            assert status_of(ask(server, GET + b"\r\n")) == 500
        now_ns[0] += QUIET_CAUSE_NS
        assert status_of(ask(server, GET + b"\r\n")) == 500
    finally:
        server.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    told = [(record.getMessage(), record.exc_info is not None and record.exc_info[0]) for record in caplog.records]
    said = "the metrics page could not be made"
    again = f"{said} (10 times since the last message)"
    assert told == [(said, ZeroDivisionError), (said, KeyError), (again, ZeroDivisionError)]
