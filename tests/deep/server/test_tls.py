"""A server with TLS behind a proxy, started with few open files, and ended by a second signal."""

from __future__ import annotations

import resource
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from servers import ServerProcess

ENGINE = ["--device", "cpu", "--dtype", "float32", "--kv-memory", "8MiB", "--no-share", "--max-seqs", "2"]
SAN = "subjectAltName=DNS:localhost,IP:127.0.0.1"
FEW_FILES = 256


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for this machine, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl, to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "server.pem", folder / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-noenc", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-addext", SAN, "-keyout", key, "-out", made], check=True, capture_output=True)
    return made, key


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, certificate: tuple[Path, Path]) -> Iterator[ServerProcess]:
    tls = ["--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(certificate[1])]
    arguments = ["demo", *ENGINE, *tls, "--host", "0.0.0.0", "--forwarded-allow-ips", "127.0.0.1"]
    environ = {"OMP_NUM_THREADS": "1", "PAGETIDE_API_KEY": "sk-alice-1234"}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, hard))
        try:
            log = tmp_path_factory.mktemp("server") / "log"
            server = stack.enter_context(ServerProcess([*arguments, "--drain-timeout", "600"], log, **environ))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        yield server


@pytest.fixture
def client(certificate: tuple[Path, Path]) -> Iterator[Any]:
    """Trusts this certificate alone."""
    context = ssl.create_default_context(cafile=certificate[0])
    with httpx.Client(verify=context, headers={"Authorization": "Bearer sk-alice-1234"}, timeout=120) as client:
        yield client


def test_the_certificate_is_shown_and_plain_http_is_not_answered(server: ServerProcess, client: Any) -> None:
    assert server.url.startswith("https://127.0.0.1:")  # of 0.0.0.0
    assert f'  curl {server.url}/v1/chat/completions -H "Authorization: Bearer $KEY" -H' in server.said
    body = {"prompt": "The sea", "max_tokens": 4, "seed": 1}
    answer = client.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    lines = client.post(f"{server.url}/v1/completions", json=body | {"stream": True}).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{server.url}/health")
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{server.url}/health".replace("https", "http"))


def test_a_refusal_before_the_body_is_whole_arrives(server: ServerProcess, certificate: tuple[Path, Path]) -> None:
    context = ssl.create_default_context(cafile=certificate[0])
    port = int(server.url.rpartition(":")[2])
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    raw = socket.create_connection(("127.0.0.1", port), 60)
    with raw, context.wrap_socket(raw, server_hostname="localhost") as connection:
        connection.sendall(head + b" " * 100_000)
        found = connection.recv(1 << 16)
    assert found.startswith(b"HTTP/1.1 401 ") and b"\r\nconnection: close\r\n" in found


def test_the_client_that_a_trusted_proxy_names(server: ServerProcess, client: Any) -> None:
    headers = {"X-Forwarded-For": "203.0.113.7", "X-Request-Id": "by-proxy"}
    assert client.get(f"{server.url}/health", headers=headers).status_code == 200
    assert server.logged("by-proxy")["client"] == "203.0.113.7"


def test_as_many_open_files_as_may_be(server: ServerProcess) -> None:
    soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    if hard <= FEW_FILES:
        pytest.skip("the hard limit of this machine is lower")
    assert soft == min(hard, 1 << 20)


def test_the_second_signal_ends_at_once(server: ServerProcess, client: Any) -> None:
    body = {"prompt": "The sea", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with client.stream("POST", f"{server.url}/v1/completions", json=body) as stream:
        events = stream.iter_lines()
        lines = [next(events)]
        server.process.send_signal(signal.SIGTERM)
        while client.get(f"{server.url}/ready").status_code != 503:
            pass
        assert server.process.poll() is None  # it drains
        server.process.send_signal(signal.SIGTERM)
        with suppress(httpx.RemoteProtocolError):
            lines += events
    assert server.process.wait(60) == 0  # of the 600 s that the first signal gives
    assert len(lines) > 1 and '"finish_reason":"length"' not in "".join(lines)  # it ended before the stream did
    assert "Traceback" not in server.said
