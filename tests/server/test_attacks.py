"""What an attacker sends: every connection gets a clean answer, and the server goes on serving with nothing left of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from async_rig import until
from servers import ServerProcess

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx2")

from pagetide.server import guard, http_protocol  # noqa: E402
from pagetide.server.admission import RequestAdmission  # noqa: E402
from pagetide.server.guard import Guard, GuardRules  # noqa: E402
from pagetide.server.http_protocol import BoundedHttpProtocol  # noqa: E402
from pagetide.server.keys import ApiKey, ApiKeys, digest_of  # noqa: E402

KEYS = {"PAGETIDE_API_KEY": "sk-alice-1234", "PAGETIDE_ADMIN_KEY": "sk-operator-1", "OMP_NUM_THREADS": "1"}
ALICE, OPS = ({"Authorization": f"Bearer {key}"} for key in ("sk-alice-1234", "sk-operator-1"))
ENGINE = ["--device", "cpu", "--dtype", "float32", "--kv-memory", "8MiB", "--no-share", "--max-seqs", "8"]
GET = b"GET /health HTTP/1.1\r\nConnection: close\r\n"
HOST = b"Host: 127.0.0.1\r\nAuthorization: Bearer sk-alice-1234\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\nContent-Type: application/json\r\n" + HOST
FORM = POST.replace(b"application/json", b"text/plain") + b"Content-Length: 29\r\n"
BODY = b'{"prompt":"a","max_tokens":1}'
CHUNKED = b"1d\r\n" + BODY + b"\r\n0\r\n\r\n"
FAR_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(["demo", *ENGINE], tmp_path_factory.mktemp("server") / "log", **KEYS) as server:
        yield server
        assert "Traceback" not in server.said
        assert server.end(signal.SIGTERM) == 0


@pytest.fixture(autouse=True)
def serves_on(server: ServerProcess) -> Iterator[None]:
    """After each test the server answers, and nothing is left running."""
    yield
    assert complete(server).status_code == 200
    idle(server)


def complete(server: ServerProcess, **fields: Any) -> Any:
    body = {"prompt": "The sea", "max_tokens": 2, "seed": 1} | fields
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=ALICE, timeout=FAR_S)


def idle(server: ServerProcess) -> None:
    until = time.monotonic() + FAR_S
    while True:
        load = httpx.get(f"{server.url}/load", headers=ALICE).json()
        page = httpx.get(f"{server.url}/metrics", headers=ALICE).text.splitlines()
        live = [line.rsplit(" ", 1)[1] for line in page if line.startswith("pagetide_kv_blocks{") and '"live"' in line]
        if load == {"server_load": 0} and live and set(live) == {"0.0"}:
            return
        assert time.monotonic() < until, (load, live)
        time.sleep(0.05)


def connected(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), FAR_S)


def answered(server: ServerProcess, data: bytes) -> bytes:
    """Everything that the server answers to `data` until it closes the connection."""
    with connected(server) as client:
        with contextlib.suppress(OSError):  # it has answered and closed already
            client.sendall(data)
        found = b""
        try:
            while part := client.recv(1 << 16):
                found += part
        except ConnectionResetError:
            pass
    return found


@pytest.mark.parametrize(
    "head",
    [
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
    ],
)
def test_smuggling_is_one_refusal(server: ServerProcess, head: bytes) -> None:
    found = answered(server, POST + head + b"\r\n" + CHUNKED + GET + HOST + b"\r\n")
    assert found.startswith(b"HTTP/1.1 400 ") and found.count(b"HTTP/1.1") == 1 and b'"error"' in found


@pytest.mark.parametrize(
    ("data", "status"),
    [
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
    ],
)  # fmt: skip
def test_heads_and_bodies_beyond_the_limits(server: ServerProcess, data: bytes, status: int) -> None:
    assert answered(server, data).startswith(b"HTTP/1.1 %d " % status)


def test_chunks_beyond_the_limit(server: ServerProcess) -> None:
    chunks = (b" " * (1 << 20) for _ in range(9))
    assert httpx.post(f"{server.url}/v1/completions", content=chunks, headers=ALICE, timeout=FAR_S).status_code == 413


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/metrics/", "//metrics", "/%6detrics", "/health/../metrics", "/health/%2e%2e/metrics",
     "/health;/../metrics", "//health/", "/METRICS", "/openapi.json", "/v1/models/", "/ready/", "/sleep/", "//sleep",
     "/%73leep", "/admin//models/load"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "PUT"])
def test_no_spelling_of_a_path_goes_around_the_key(server: ServerProcess, method: str, path: str) -> None:
    found = answered(
        server,
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode(),
    )
    assert found.startswith(b"HTTP/1.1 401 ")


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


CHAT = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1,'
BODIES = {
    "invalid UTF-8": b'{"prompt":"\xff\xfe"}',
    "lone surrogate": b'{"prompt":"\\ud800"}',
    "lone surrogate in stop": b'{"prompt":"a","stop":"\\ud800"}',
    "lone surrogate in regex": b'{"prompt":"a","structured_outputs":{"regex":"\\ud800"}}',
    "deep": b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep schema": b'{"prompt":"a","structured_outputs":{"json":' + nested(600) + b"}}",
    "NaN": b'{"prompt":"a","temperature":NaN}',
    "infinite bias": b'{"prompt":"a","logit_bias":{"5":1e999}}',
    "overflowing bias": b'{"prompt":"a","logit_bias":{"5":1e308}}',
    "tiny penalty": b'{"prompt":"a","repetition_penalty":1e-40}',
    "5000 digits": b'{"prompt":"a","max_tokens":' + b"9" * 5000 + b"}",
    "seed beyond 64 bits": b'{"prompt":"a","seed":18446744073709551616}',
    "bias of 5000 digits": b'{"prompt":"a","logit_bias":{"' + b"9" * 5000 + b'":1}}',
    "schema beyond 64 bits": b'{"prompt":"a","structured_outputs":{"json":{"minimum":' + b"9" * 60 + b"}}}",
    "a million stops": b'{"prompt":"a","stop":[' + b",".join([b'"x"'] * 1_000_000) + b"]}",
    "n": b'{"prompt":"a","n":1000000000}',
    "reference to itself": b'{"prompt":"a","structured_outputs":{"json":{"$ref":"#"}}}',
    "reference to a file": b'{"prompt":"a","structured_outputs":{"json":{"$ref":"file:///etc/passwd"}}}',
    "huge enum": json.dumps({"prompt": "a", "structured_outputs": {"json": {"enum": list(range(200_000))}}}).encode(),
    "n of many prompts": json.dumps({"prompt": ["a"] * 129, "n": 16}).encode(),
    "best of many prompts": json.dumps({"prompt": ["a"] * 129, "best_of": 16}).encode(),
    "a million negative ids": json.dumps({"prompt": [-1] * 1_000_000}).encode(),
    "too many ids": b'{"prompt":[' + b"5," * 1_400_000 + b"5]}",
    "too many messages": b'{"messages":[' + b'{"role":"user"},' * 20_000 + b"1]}",
    "large and broken": b'{"prompt":"' + b"a" * 100_000 + b'"',
    "huge regex": b'{"prompt":"a","structured_outputs":{"regex":"(x{1000}){1000}"}}',
}
CHATS = {
    "chat template": CHAT + b'"chat_template_kwargs":{"chat_template":"{{ 1 }}"}}',
    "self": CHAT + b'"chat_template_kwargs":{"self":1}}',
    "deep options": CHAT + b'"chat_template_kwargs":{"x":' + nested(600) + b"}}",
    "deep tool": CHAT + b'"tools":[{"type":"function","function":{"name":"a","parameters":' + nested(600) + b"}}]}",
}


@pytest.mark.parametrize(
    ("path", "body"),
    [*(("/v1/completions", body) for body in BODIES.values()), *(("/v1/chat/completions", body) for body in CHATS.values())],
    ids=[*BODIES, *CHATS],
)  # fmt: skip
def test_bodies_that_cannot_be_served(server: ServerProcess, path: str, body: bytes) -> None:
    headers = ALICE | {"content-type": "application/json"}
    answer = httpx.post(f"{server.url}{path}", content=body, headers=headers, timeout=FAR_S)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_a_chain_of_rules_and_a_catastrophic_regex_leave_the_engine_alive(server: ServerProcess) -> None:
    (engine,) = children(server)
    chain = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(5_000))
    assert complete(server, structured_outputs={"grammar": f'start: r0\n{chain}\nr5000: "b"'}).status_code == 200
    assert complete(server, structured_outputs={"regex": "(a+)+$"}).json()["choices"][0]["text"].strip("a") == ""
    assert children(server) == [engine]


def test_more_tokens_than_a_call_may_detokenize(server: ServerProcess) -> None:
    answer = httpx.post(f"{server.url}/detokenize", json={"tokens": [5] * 70_000}, headers=ALICE, timeout=FAR_S)
    assert answer.status_code == 400 and "at most 65,536" in answer.json()["error"]["message"]


def test_models_loaded_and_unloaded_at_the_same_time(server: ServerProcess) -> None:
    options = {"device": "cpu", "dtype": "float32", "kv_memory": "4MiB", "share": False}

    def change(number: int) -> int:
        body = {"model": "demo", "name": "second", "options": options} if number % 2 else {"name": "second"}
        path = "load" if number % 2 else "unload"
        url = f"{server.url}/admin/models/{path}"
        return int(httpx.post(url, json=body, headers=OPS, timeout=2 * FAR_S).status_code)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(change, range(8)))
    assert set(found) <= {200, 404, 409, 503}, found
    httpx.post(f"{server.url}/admin/models/unload", json={"name": "second"}, headers=OPS, timeout=FAR_S)
    assert len(children(server)) == 1


def test_an_engine_killed_amid_streams_ends_them_with_an_error(server: ServerProcess) -> None:
    def stream(number: int) -> list[str]:
        body = {"prompt": "The sea", "max_tokens": 200, "ignore_eos": True, "stream": True, "seed": number}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=ALICE, timeout=FAR_S) as answer:
            lines = []
            for line in answer.iter_lines():
                if line:
                    lines.append(line)
                if line and len(lines) == 1:
                    begun.release()
            return lines

    begun = threading.Semaphore(0)
    (engine,) = children(server)
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(stream, number) for number in range(4)]
        assert all(begun.acquire(timeout=FAR_S) for _ in streams)
        os.kill(engine, signal.SIGKILL)
        for one in streams:
            *_, error, done = one.result(FAR_S)
            assert done == "data: [DONE]" and "ended while it served" in error
    until = time.monotonic() + 2 * FAR_S
    while httpx.get(f"{server.url}/ready").status_code != 200:
        assert time.monotonic() < until
        time.sleep(0.1)


def children(server: ServerProcess) -> list[int]:
    """The engine processes of a server."""
    found = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid in found.split()]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_access_log_stops_nothing(tmp_path: Path) -> None:
    second = ServerProcess(["demo", *ENGINE], tmp_path / "log", **KEYS)
    with second:
        limit = (0, resource.RLIM_INFINITY)  # no file may grow, as on a full disk
        resource.prlimit(second.process.pid, resource.RLIMIT_FSIZE, limit)
        assert [complete(second).status_code for _ in range(3)] == [200] * 3
        assert second.end(signal.SIGTERM) == 0


# ---- slow clients, with short limits ------------------------------------------------------------------------------


@asynccontextmanager
async def guarded(app: Any, keys: ApiKeys, statuses: list[int] | None = None, **options: Any) -> AsyncIterator[Any]:
    """The guard around `app`, on the address that this gives. It appends to `statuses` with what a request has ended."""
    uvicorn = pytest.importorskip("uvicorn")

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


def exchanged(sent: bytes, app: Any) -> bytes:
    """What the guard around `app` answers to `sent` until it closes the connection."""

    async def run() -> bytes:
        async with guarded(app, ApiKeys()) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(sent)
            found = await asyncio.wait_for(reader.read(), FAR_S)
            writer.close()
        return found

    return asyncio.run(run())


async def unused(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("a refused request went through")


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", POST, POST + b"Content-Length: 9\r\n\r\n{"], ids=len)
def test_slow_heads_and_bodies_are_cut_off(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.2)
    monkeypatch.setattr(guard, "BODY_S", 0.2)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass

    assert exchanged(sent, app).startswith(b"HTTP/1.1 408 ")


# ---- clients that do not read --------------------------------------------------------------------------------------

LARGE = 16 << 20


async def large(scope: Any, receive: Any, send: Any) -> None:
    """An endpoint with a large response."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LARGE)]})
    await send({"type": "http.response.body", "body": b"x" * LARGE})


def loops() -> list[Any]:
    try:
        import uvloop
    except ImportError:
        return [asyncio.run]
    return [asyncio.run, uvloop.run]


@pytest.mark.parametrize("runs", loops(), ids=lambda runs: runs.__module__)
@pytest.mark.parametrize("path", [b"POST /v1/completions", b"GET /static"])
def test_a_client_that_does_not_read_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, runs: Any, path: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "STALL_S", 0.2)
    request = path + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    statuses: list[int] = []

    async def run() -> None:
        async with guarded(large, ApiKeys(), statuses) as address:
            with socket.create_connection(address) as client:
                client.sendall(3 * request)
                # the first response waits in the server's memory; the second waits for it, the third is not begun
                await until(lambda: statuses == [200, guard.LEFT])
            with socket.create_connection(address) as client:
                client.setblocking(False)
                await asyncio.get_running_loop().sock_sendall(client, request)
                reader, writer = await asyncio.open_connection(sock=client)
                found = await asyncio.wait_for(reader.readexactly(LARGE), FAR_S)
                assert found.startswith(b"HTTP/1.1 200 ")
                writer.close()

    runs(run())
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


def test_a_slow_reader_has_as_long_again_while_it_reads(connections: list[BoundedHttpProtocol]) -> None:
    async def run() -> None:
        async with guarded(large, ApiKeys()) as address:
            with socket.create_connection(address) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await until(lambda: connections and connections[0]._stall_timer is not None)
                (connection,) = connections
                unread = connection.transport.get_write_buffer_size()
                connection._stalled(unread + http_protocol.STALL_BYTES)
                assert not connection.transport.is_closing() and connection._stall_timer is not None
                connection._stalled(unread + http_protocol.STALL_BYTES - 1)
                assert connection.transport.is_closing()

    asyncio.run(run())


def test_what_nobody_reads_is_dropped_at_the_keep_alive_time_out(connections: list[BoundedHttpProtocol]) -> None:
    async def run() -> None:
        async with guarded(large, ApiKeys(), timeout_keep_alive=0.2) as address:
            with socket.create_connection(address) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await until(lambda: connections and connections[0].parser is None)  # it is lost

    asyncio.run(run())


# ---- requests that others follow, and HTTP/1.0 ----------------------------------------------------------------------


async def in_parts(scope: Any, receive: Any, send: Any) -> None:
    """An endpoint with a stream, which takes a while."""
    await asyncio.sleep(0.01)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (b"one ", b"two"):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


WHOLE = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x01\x02\x03 garbage\r\n\r\n",
        b"GET / HTTP/1.1\r\nno header\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_requests_before_garbage_get_their_own_answers(garbage: bytes, count: int) -> None:
    found = exchanged(count * WHOLE + garbage, in_parts)
    *answers, refusal = found.split(b"HTTP/1.1 ")[1:]
    assert len(answers) == count and all(answer.startswith(b"200 ") for answer in answers)
    assert all(answer.endswith(b"4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n") for answer in answers)
    assert refusal.startswith(b"400 ") and b"connection: close" in refusal


def test_http_1_0_gets_a_stream_without_chunks() -> None:
    head, _, body = exchanged(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n", in_parts).partition(b"\r\n\r\n")
    assert body == b"one two" and b"transfer-encoding" not in head and b"connection: close" in head


@pytest.mark.parametrize(("count", "status"), [(http_protocol.MOST_FIELDS, 200), (http_protocol.MOST_FIELDS + 1, 431)])
def test_a_head_has_a_number_of_headers(count: int, status: int) -> None:
    fields = b"".join(b"x%d: a\r\n" % i for i in range(count - 2))
    found = exchanged(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + fields + b"\r\n", in_parts)
    assert found.startswith(b"HTTP/1.1 %d " % status)


# ---- refusals that come before their request has arrived ----------------------------------------------------------


REFUSED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
ONE_KEY = ApiKeys([ApiKey("alice", digest_of("sk-alice-1234"))])


async def refusal(reader: asyncio.StreamReader) -> None:
    """Read a whole refusal, and the end of what the server sends."""
    found = await asyncio.wait_for(reader.read(), FAR_S)
    assert found.startswith(b"HTTP/1.1 401 ") and b"\r\nconnection: close\r\n" in found and found.endswith(b"}}")


def test_a_refusal_comes_whole_while_its_body_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_S", FAR_S)

    async def run() -> None:
        async with guarded(unused, ONE_KEY) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(REFUSED + b" " * 500_000)
            await refusal(reader)
            (connection,) = BoundedHttpProtocol.lingering  # which would be reset if it were closed
            writer.write(b" " * 500_000)
            await writer.drain()
            writer.close()
            await until(lambda: connection not in BoundedHttpProtocol.lingering)  # the client has closed it

    asyncio.run(run())


def test_a_refused_connection_is_dropped_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.1)

    async def run() -> None:
        async with guarded(unused, ONE_KEY) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(REFUSED)  # and never its body
            await refusal(reader)
            await until(lambda: not BoundedHttpProtocol.lingering)  # although the client does not close it
            writer.close()

    asyncio.run(run())


def test_few_refused_connections_are_kept_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_S", FAR_S)
    monkeypatch.setattr(http_protocol, "MOST_LINGERING", 2)
    kept = []

    async def run() -> None:
        async with guarded(unused, ONE_KEY) as address:
            clients = [await asyncio.open_connection(*address) for _ in range(4)]
            for reader, writer in clients:
                writer.write(REFUSED)
                await refusal(reader)
                kept.append(len(BoundedHttpProtocol.lingering))
            for _, writer in clients:
                writer.close()

    asyncio.run(run())
    assert kept == [1, 2, 2, 2] and not BoundedHttpProtocol.lingering


def test_a_refusal_of_a_whole_request_keeps_the_connection() -> None:
    async def run() -> None:
        async with guarded(unused, ONE_KEY) as address:
            reader, writer = await asyncio.open_connection(*address)
            for _ in range(2):
                writer.write(REFUSED.replace(b"1000000", b"3") + b"{} ")
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), FAR_S)
                assert head.startswith(b"HTTP/1.1 401 ") and b"connection: close" not in head
                await asyncio.wait_for(reader.readuntil(b"}}"), FAR_S)
            writer.close()

    asyncio.run(run())
