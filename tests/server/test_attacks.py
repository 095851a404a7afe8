"""What an attacker sends: every connection gets a clean answer, and the server goes on serving with nothing left of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from coroutine_tests import in_thread
from durable_rig import FrontEnd, KeptRequests, at_once
from page_rig import ALICE, FAR_S, eventually, httpx2, two_keys

from pagetide.server import guard, http_protocol
from pagetide.server.admission import RequestAdmission
from pagetide.server.guard import Guard, GuardRules
from pagetide.server.http_protocol import BoundedHttpProtocol
from pagetide.server.keys import ApiKeys

GET = b"GET /health HTTP/1.1\r\nConnection: close\r\n"
HOST = b"Host: 127.0.0.1\r\nAuthorization: Bearer sk-alice-1234\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\nContent-Type: application/json\r\n" + HOST
FORM = POST.replace(b"application/json", b"text/plain") + b"Content-Length: 29\r\n"
BODY = b'{"prompt":"a","max_tokens":1}'
CHUNKED = b"1d\r\n" + BODY + b"\r\n0\r\n\r\n"


@pytest.fixture(scope="module")
def running() -> Iterator[FrontEnd]:
    """The whole application on a real socket, in a thread, with a stand-in for the engine."""
    front = FrontEnd(KeptRequests(), at_once, two_keys())
    front.engine.is_durable = False
    with in_thread(front):
        yield front


@pytest.fixture
def server(running: FrontEnd, caplog: pytest.LogCaptureFixture) -> Iterator[FrontEnd]:
    """After the test the server answers, no request is left, and no error was logged."""
    yield running
    body = {"prompt": "The sea", "max_tokens": 2}
    assert httpx2.post(f"{running.url}/v1/completions", json=body, headers=ALICE, timeout=FAR_S).status_code == 200
    deadline = time.monotonic() + FAR_S
    while httpx2.get(f"{running.url}/load", headers=ALICE).json() != {"server_load": 0}:
        assert time.monotonic() < deadline
    assert [record.message for record in caplog.records if record.exc_info] == []


def answered(server: FrontEnd, data: bytes) -> bytes:
    """Everything that the server answers to `data` until it closes the connection."""
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), FAR_S) as client:
        with contextlib.suppress(OSError):  # it has answered and closed already
            client.sendall(data)
        found = b""
        try:
            while part := client.recv(1 << 16):
                found += part
        except ConnectionResetError:
            pass
    return found


SMUGGLING = [
    b"Content-Length: 29\r\nContent-Length: 3\r\n",
    b"Content-Length: 29\r\nContent-Length: 29\r\n",
    b"Content-Length: 29, 29\r\n",
    b"Content-Length: +29\r\n",
    b"Content-Length: 29\r\nTransfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
    b"Transfer-Encoding : chunked\r\n",
    b"Transfer-Encoding: xchunked\r\n",
    b"X: a\r\n folded\r\n",
    b"X: a\0b\r\n",
]


def test_smuggling_is_one_refusal(server: FrontEnd) -> None:
    for head in SMUGGLING:
        found = answered(server, POST + head + b"\r\n" + CHUNKED + GET + HOST + b"\r\n")
        assert found.startswith(b"HTTP/1.1 400 ") and found.count(b"HTTP/1.1") == 1 and b'"error"' in found, head


BEYOND_LIMITS = [
    (GET + HOST + b"X: " + b"a" * 1_000_000 + b"\r\n\r\n", 431),
    (GET + HOST + b"".join(b"x%d: a\r\n" % i for i in range(50_000)) + b"\r\n", 431),
    (b"GET /" + b"a" * 1_000_000, 431),
    (POST + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED[:-2] + b"x: y\r\n" * 50_000, 431),
    (POST + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED[:-2] + b"x: " + b"y" * 1_000_000, 431),
    (POST + b"Content-Length: " + b"0" * 5000 + b"29\r\n\r\n" + BODY, 200),
    (POST + b"Content-Length: " + b"9" * 19 + b"\r\n\r\n" + BODY, 413),
    (bytes(range(256)), 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    (GET + b"\r\n", 403),
    (GET.replace(b"1.1", b"1.0") + b"\r\n", 200),  # has no Host
    (GET.replace(b"1.1", b"1.0") + b"Host: evil.example\r\n\r\n", 403),
    (GET + b"Host: evil.example\r\n\r\n", 403),
    (GET + b"Host: evil.example@localhost\r\n\r\n", 403),
    (GET + b"Host: localhost/evil.example\r\n\r\n", 403),
    (GET + b"Host: [zz]\r\n\r\n", 403),
    (GET + b"Host: ]a[\r\n\r\n", 403),
    (GET + b"Host: \xff\r\n\r\n", 403),
    (GET + b"Host: LOCALHOST:1\r\n\r\n", 200),
    (GET + b"Host: [::1]:1\r\n\r\n", 200),
    (GET + b"Host: localhost\r\nHost: evil.example\r\n\r\n", 400),
    (GET + b"Host: localhost\r\nOrigin: null\r\n\r\n", 403),
    (FORM + b"Origin: https://evil.example\r\n\r\n" + BODY, 403),
    (FORM + b"Origin: null\r\n\r\n" + BODY, 403),
    (FORM + b"Sec-Fetch-Site: cross-site\r\n\r\n" + BODY, 403),
    (FORM + b"Origin: http://127.0.0.1\r\nSec-Fetch-Site: same-origin\r\n\r\n" + BODY, 200),
    (FORM + b"\r\n" + BODY, 200),
]


def test_heads_and_bodies_beyond_the_limits(server: FrontEnd) -> None:
    for data, status in BEYOND_LIMITS:
        assert answered(server, data).startswith(b"HTTP/1.1 %d " % status), data[:200]
    chunks = (b" " * (1 << 20) for _ in range(9))
    assert httpx2.post(f"{server.url}/v1/completions", content=chunks, headers=ALICE, timeout=FAR_S).status_code == 413


def test_a_head_is_that_of_get_and_a_key_may_stand_in_x_api_key(server: FrontEnd) -> None:
    for path in ("/health", "/ready", "/version", "/page/info", "/v1/models", "/v1/models/none"):
        head, whole = (httpx2.request(method, server.url + path, headers=ALICE, timeout=FAR_S) for method in ("HEAD", "GET"))
        assert (head.status_code, head.content) == (whole.status_code, b""), path
        assert head.headers["content-length"] == whole.headers["content-length"], path
    for key, status in (("sk-alice-1234", 200), ("sk-alice-123", 401)):
        assert httpx2.get(f"{server.url}/v1/models", headers={"x-api-key": key}, timeout=FAR_S).status_code == status


SPELLINGS = [
    "/metrics", "/metrics/", "//metrics", "/%6detrics", "/health/../metrics", "/health/%2e%2e/metrics", "/health;/../metrics",
    "//health/", "/METRICS", "/openapi.json", "/v1/models/", "/ready/", "/sleep/", "//sleep", "/%73leep",
    "/admin//models/load",
]  # fmt: skip


def test_no_spelling_of_a_path_goes_around_the_key(server: FrontEnd) -> None:
    for path in SPELLINGS:
        for method in ("GET", "POST", "HEAD", "PUT"):
            head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            found = answered(server, head.encode())
            assert found.startswith(b"HTTP/1.1 401 ") and b"\r\nwww-authenticate: Bearer\r\n" in found, (method, path)


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


CHAT = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1,'
BODIES = {
    "invalid UTF-8": b'{"prompt":"\xff\xfe"}',
    "deep schema": b'{"prompt":"a","structured_outputs":{"json":' + nested(600) + b"}}",
    "NaN": b'{"prompt":"a","temperature":NaN}',
    "infinite bias": b'{"prompt":"a","logit_bias":{"5":1e999}}',
    "5000 digits": b'{"prompt":"a","max_tokens":' + b"9" * 5000 + b"}",
    "seed beyond 64 bits": b'{"prompt":"a","seed":18446744073709551616}',
    "bias of 5000 digits": b'{"prompt":"a","logit_bias":{"' + b"9" * 5000 + b'":1}}',
    "n": b'{"prompt":"a","n":1000000000}',
    "huge enum": json.dumps({"prompt": "a", "structured_outputs": {"json": {"enum": list(range(200_000))}}}).encode(),
    "a million negative ids": json.dumps({"prompt": [-1] * 1_000_000}).encode(),
    "too many ids": b'{"prompt":[' + b"5," * 1_400_000 + b"5]}",
}
CHATS = {
    "chat template": CHAT + b'"chat_template_kwargs":{"chat_template":"{{ 1 }}"}}',
    "deep options": CHAT + b'"chat_template_kwargs":{"x":' + nested(600) + b"}}",
    "deep tool": CHAT + b'"tools":[{"type":"function","function":{"name":"a","parameters":' + nested(600) + b"}}]}",
}


def test_bodies_that_cannot_be_served(server: FrontEnd) -> None:
    """Before an engine sees them; tests/deep has those that the engine refuses."""
    headers, found = ALICE | {"content-type": "application/json"}, {}
    for name, body in (BODIES | CHATS).items():
        path = "/v1/chat/completions" if name in CHATS else "/v1/completions"
        answer = httpx2.post(f"{server.url}{path}", content=body, headers=headers, timeout=FAR_S)
        found[name] = answer.status_code, bool(answer.json().get("error", {}).get("message"))
    assert {name: one for name, one in found.items() if one != (400, True)} == {}


@asynccontextmanager
async def guarded(app: Any, keys: ApiKeys, statuses: list[int] | None = None, **options: Any) -> AsyncIterator[Any]:
    """The guard around `app`, on the address that this gives. It appends to `statuses` with what a request has ended."""

    def answered(method: str, path: str, status: int, seconds: float) -> None:
        if statuses is not None:
            statuses.append(status)

    layer = Guard(app, keys, RequestAdmission(lambda: 1, 1), GuardRules(), answered)
    http = uvicorn.Server(uvicorn.Config(layer, http=BoundedHttpProtocol, log_config=None, lifespan="off", **options))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(http.serve(sockets=[listening]))
        yield listening.getsockname()
        http.should_exit = True
        await serving


async def exchanged(sent: bytes, app: Any) -> bytes:
    """What the guard around `app` answers to `sent` until it closes the connection."""
    async with guarded(app, ApiKeys()) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        found = await reader.read()
        writer.close()
    return found


async def unused(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("a refused request went through")


async def test_slow_heads_and_bodies_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that is over at once; the other one is not."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass

    for short, other, sent in (
        ((http_protocol, "HEAD_S"), (guard, "BODY_S"), [b"", b"POST /v1/comp", POST]),
        ((guard, "BODY_S"), (http_protocol, "HEAD_S"), [POST + b"Content-Length: 9\r\n\r\n{"]),
    ):
        monkeypatch.setattr(*short, 0.01)
        monkeypatch.setattr(*other, FAR_S)
        for part in sent:
            assert (await exchanged(part, app)).startswith(b"HTTP/1.1 408 "), part


LARGE = 16 << 20


async def large(scope: Any, receive: Any, send: Any) -> None:
    """An endpoint with a large response."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LARGE)]})
    await send({"type": "http.response.body", "body": b"x" * LARGE})


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("path", [b"POST /v1/completions", b"GET /static"])
def test_a_client_that_does_not_read_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, loop: str, path: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "STALL_S", 0.2)
    request = path + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    statuses: list[int] = []

    async def run() -> None:
        async with guarded(large, ApiKeys(), statuses) as address:
            with socket.create_connection(address) as client:
                client.sendall(3 * request)
                # the first response waits in the server's memory; the second waits for it, the third is not begun
                await eventually(lambda: statuses == [200, guard.LEFT])
            # A client that reads is not cut off, however busy it is.
            monkeypatch.setattr(http_protocol, "STALL_S", FAR_S)
            with socket.create_connection(address) as client:
                client.setblocking(False)
                await asyncio.get_running_loop().sock_sendall(client, request)
                reader, writer = await asyncio.open_connection(sock=client)
                found = await asyncio.wait_for(reader.readexactly(LARGE), FAR_S)
                assert found.startswith(b"HTTP/1.1 200 ")
                writer.close()

    pytest.importorskip(loop).run(run())
    assert statuses == [200, guard.LEFT, 200]
    assert [record.message for record in caplog.records if record.exc_info or record.levelname == "ERROR"] == []


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[BoundedHttpProtocol]:
    """The connections that were made."""
    made: list[BoundedHttpProtocol] = []
    connection_made = BoundedHttpProtocol.connection_made

    def noted(self: BoundedHttpProtocol, transport: asyncio.BaseTransport) -> None:
        made.append(self)
        connection_made(self, transport)

    monkeypatch.setattr(BoundedHttpProtocol, "connection_made", noted)
    return made


async def test_a_slow_reader_has_as_long_again_while_it_reads(connections: list[BoundedHttpProtocol]) -> None:
    async with guarded(large, ApiKeys()) as address:
        with socket.create_connection(address) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await eventually(lambda: connections and connections[0]._stall_timer is not None)
            (connection,) = connections
            unread = connection.transport.get_write_buffer_size()
            connection._stalled(unread + http_protocol.STALL_BYTES)
            assert not connection.transport.is_closing() and connection._stall_timer is not None
            connection._stalled(unread + http_protocol.STALL_BYTES - 1)
            assert connection.transport.is_closing()


async def test_what_nobody_reads_is_dropped_at_the_keep_alive_time_out(connections: list[BoundedHttpProtocol]) -> None:
    async with guarded(large, ApiKeys(), timeout_keep_alive=0.2) as address:
        with socket.create_connection(address) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await eventually(lambda: connections and connections[0].parser is None)  # it is lost


async def in_parts(scope: Any, receive: Any, send: Any) -> None:
    """An endpoint with a stream, which takes a while."""
    await asyncio.sleep(0.01)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (b"one ", b"two"):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


WHOLE = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def test_requests_before_garbage_get_their_own_answers() -> None:
    for garbage in (
        b"\x01\x02\x03 garbage\r\n\r\n",
        b"GET / HTTP/1.1\r\nno header\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ):
        for count in (1, 2):
            *answers, refusal = (await exchanged(count * WHOLE + garbage, in_parts)).split(b"HTTP/1.1 ")[1:]
            assert len(answers) == count and all(answer.startswith(b"200 ") for answer in answers), garbage
            assert all(answer.endswith(b"4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n") for answer in answers), garbage
            assert refusal.startswith(b"400 ") and b"connection: close" in refusal, garbage


async def test_http_1_0_gets_a_stream_without_chunks() -> None:
    head, _, body = (await exchanged(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n", in_parts)).partition(b"\r\n\r\n")
    assert body == b"one two" and b"transfer-encoding" not in head and b"connection: close" in head


async def test_a_head_has_a_number_of_headers() -> None:
    for more, status in ((0, 200), (1, 431)):
        fields = b"".join(b"x%d: a\r\n" % i for i in range(http_protocol.MOST_FIELDS + more - 2))
        head = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        assert (await exchanged(head + fields + b"\r\n", in_parts)).startswith(b"HTTP/1.1 %d " % status)


REFUSED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"


async def refusal(reader: asyncio.StreamReader) -> None:
    """Read a whole refusal, and the end of what the server sends."""
    found = await asyncio.wait_for(reader.read(), FAR_S)
    assert found.startswith(b"HTTP/1.1 401 ") and b"\r\nconnection: close\r\n" in found and found.endswith(b"}}")


async def test_a_refusal_comes_whole_while_its_body_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_S", FAR_S)
    async with guarded(unused, two_keys()) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(REFUSED + b" " * 500_000)
        await refusal(reader)
        (connection,) = BoundedHttpProtocol.lingering  # which would be reset if it were closed
        writer.write(b" " * 500_000)
        await writer.drain()
        writer.close()
        await eventually(lambda: connection not in BoundedHttpProtocol.lingering)  # the client has closed it


async def test_few_refused_connections_are_kept_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_S", FAR_S)
    monkeypatch.setattr(http_protocol, "MOST_LINGERING", 2)
    kept = []
    async with guarded(unused, two_keys()) as address:
        clients = [await asyncio.open_connection(*address) for _ in range(4)]
        for reader, writer in clients:
            writer.write(REFUSED)  # and never its body
            await refusal(reader)
            kept.append(len(BoundedHttpProtocol.lingering))
        for _, writer in clients:
            writer.close()
        await eventually(lambda: not BoundedHttpProtocol.lingering)
        monkeypatch.setattr(http_protocol, "LINGER_S", 0.01)
        reader, writer = await asyncio.open_connection(*address)
        writer.write(REFUSED)
        await refusal(reader)
        await eventually(lambda: not BoundedHttpProtocol.lingering)  # although the client does not close it
        writer.close()
    assert kept == [1, 2, 2, 2]


async def test_a_refusal_of_a_whole_request_keeps_the_connection() -> None:
    async with guarded(unused, two_keys()) as address:
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(2):
            writer.write(REFUSED.replace(b"1000000", b"3") + b"{} ")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), FAR_S)
            assert head.startswith(b"HTTP/1.1 401 ") and b"connection: close" not in head
            await asyncio.wait_for(reader.readuntil(b"}}"), FAR_S)
        writer.close()
