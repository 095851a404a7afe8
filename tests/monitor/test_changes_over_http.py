"""Requests that change something over HTTP: the token file, its file's rights, bounds of bodies. What answers is a stand-in."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from monitors import exchanged, wait_until

from pagetide.monitor import metrics_server, token_file
from pagetide.monitor.errors import ConfigInvalid
from pagetide.monitor.metrics_server import MAX_BODY_BYTES, MetricsServer
from pagetide.monitor.snapshot import Snapshot
from pagetide.monitor.token_file import is_authorized, prepare_token, read_token

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="rights of files are POSIX'")


class Served:
    """A server that repeats in its answers what it was asked."""

    def __init__(self, token: Path | None) -> None:
        self.asked: list[tuple[str, str, Mapping[str, Any]]] = []
        self.server = MetricsServer(lambda: Snapshot(0, "x", 0, 0, ()), 0, answer=self._answer, token_file=token)

    def _answer(self, method: str, path: str, body: Mapping[str, Any]) -> tuple[int, object]:
        self.asked.append((method, path, body))
        if body.get("fail"):
            raise RuntimeError("a fault")
        return 201 if method == "POST" else 200, {"path": path}

    def ask(self, method: str, path: str = "/reservations", body: bytes | str = b"{}", **headers: str) -> tuple[int, str]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)) as connection:
            connection.request(method, path, None if method == "GET" else body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()


@pytest.fixture(name="file")
def file_fixture(tmp_path: Path) -> Path:
    return tmp_path / "token"


@pytest.fixture(name="served")
def served_fixture(file: Path) -> Iterator[Served]:
    served = Served(file)
    yield served
    served.server.close()


def test_reading_needs_no_token_and_a_change_needs_the_one_of_the_file(served: Served, file: Path) -> None:
    token = file.read_text().strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(token) >= 40
    assert served.ask("GET") == (200, '{"path": "/reservations"}\n')
    good = {"Authorization": f"Bearer {token}"}
    for method, status in (("POST", 201), ("PATCH", 200), ("DELETE", 200)):
        assert served.ask(method, "/reservations/7", '{"size": 1}', **good)[0] == status
        assert served.asked[-1] == (method, "/reservations/7", {"size": 1})
    assert served.ask("POST", Authorization=f"bearer  {token} ")[0] == 201
    number = len(served.asked)
    for wrong in ("", "Bearer", "Bearer ", f"Bearer {token}x", f"Bearer {token[:-1]}", f"Basic {token}", token, "Bearer \xe4"):
        status, text = served.ask("POST", Authorization=wrong)
        assert status == 401 and "Authorization: Bearer TOKEN" in text and token not in text, wrong
    assert served.ask("POST")[0] == 401
    assert served.ask("GET", "/reservationsx")[0] == 404 and served.ask("POST", "/reservationsx", **good)[0] == 501
    assert served.ask("POST", "/metrics", **good)[0] == 501
    assert len(served.asked) == number


def test_every_refusal_is_an_object_with_the_error(served: Served, file: Path) -> None:
    good = {"Authorization": f"Bearer {read_token(file)}"}
    for method, body, headers in (
        ("POST", "{}", {}), ("POST", "{", good), ("DELETE", "[]", good), ("PATCH", '{"fail": 1}', good), ("PUT", "{}", good),
        ("POST", " " * (MAX_BODY_BYTES + 1), good),
    ):  # fmt: skip
        status, text = served.ask(method, "/reservations/7?x", body, **headers)
        assert status >= 400 and set(json.loads(text)) == {"error"} and json.loads(text)["error"], (method, text)
    assert exchanged(served.server.port, b"HEAD /reservations HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\n"), "no body"
    assert served.ask("POST", "/metrics", "{}", **good)[1].startswith("<!DOCTYPE")


def test_without_a_token_file_nothing_is_changed() -> None:
    served = Served(None)
    status, text = served.ask("POST", Authorization="Bearer x")
    assert status == 403 and "--token-file" in text
    assert served.ask("GET")[0] == 200 and [method for method, *_ in served.asked] == ["GET"]
    served.server.close()


def test_a_new_token_counts_at_once_and_a_file_that_others_may_read_counts_for_nothing(served: Served, file: Path) -> None:
    old = {"Authorization": f"Bearer {read_token(file)}"}
    file.write_text("another token of mine\n")
    new = {"Authorization": "Bearer another token of mine"}
    assert (served.ask("POST", **old)[0], served.ask("POST", **new)[0]) == (401, 201)
    file.chmod(0o640)
    status, text = served.ask("POST", **new)
    assert status == 503 and "readable by no other: chmod 600" in text
    file.chmod(0o600)
    file.write_text("short\n")
    assert served.ask("POST", Authorization="Bearer short")[0] == 503
    file.unlink()
    assert served.ask("POST", Authorization="Bearer ")[0] == 503
    file.symlink_to("/dev/zero")
    assert served.ask("POST", Authorization="Bearer ")[0] == 503


def test_bodies_are_small_json_objects(served: Served, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = {"Authorization": f"Bearer {read_token(file)}"}
    for body, status, said in (
        ("[]", 400, "not an object"), ("7", 400, "not an object"), ("{", 400, "not JSON"), ("\xff", 400, "not JSON"),
        ('{"size": NaN}', 400, "NaN is not a JSON number"), ("[" * MAX_BODY_BYTES, 400, "not JSON"),
        ('{"size": ' + "9" * 4080 + "}", 201, ""), (" " * (MAX_BODY_BYTES + 1), 413, "at most 4096 bytes"),
    ):  # fmt: skip
        answer = served.ask("POST", body=body.encode("latin-1"), **good)
        assert answer[0] == status and said in answer[1], (body[:20], answer)
    head = f"POST /reservations HTTP/1.1\r\nAuthorization: {good['Authorization']}\r\n".encode()
    for more, status in (
        (b"\r\n{}", 411), (b"Content-Length: x\r\n\r\n{}", 411), (b"Content-Length: -1\r\n\r\n{}", 411),
        (b"Content-Length: 99999999999\r\n\r\n{}", 411), (b"Content-Length: 9999999\r\n\r\n{}", 413),
        (b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 411),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}", 411), (b'Content-Length: 9\r\n\r\n{"a":', 400),
    ):  # fmt: skip
        answer_bytes = exchanged(served.server.port, head + more)
        assert int(answer_bytes.split()[1]) == status, more
    assert not caplog.records
    assert served.ask("POST", body='{"fail": true}', **good)[0] == 500
    wait_until(lambda: "a fault" in caplog.text, "the fault in the log")


def test_a_body_that_does_not_come_ends_with_its_time(served: Served, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_REQUEST_TIMEOUT_S", 0.2)
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=60) as client:
        head = f"POST /reservations HTTP/1.1\r\nAuthorization: Bearer {read_token(file)}\r\nContent-Length: 5\r\n\r\n"
        client.sendall(head.encode())
        assert b" 400 " in client.recv(65536) or not client.recv(1)
    assert served.ask("GET")[0] == 200 and [method for method, *_ in served.asked] == ["GET"]


def test_noise_is_answered_and_changes_nothing(served: Served, file: Path) -> None:
    rng = random.Random(5)
    good = f"POST /reservations HTTP/1.1\r\nAuthorization: Bearer {'x' * 43}\r\nContent-Length: 2\r\n\r\n{{}}".encode()
    for _ in range(60):
        request = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            request[rng.randrange(len(request))] = rng.randrange(256)
        exchanged(served.server.port, bytes(request))
    assert all(method == "GET" for method, *_ in served.asked)
    assert served.ask("POST", Authorization=f"Bearer {read_token(file)}")[0] == 201


def test_a_token_file_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    """A full disk stands as a limit of file sizes, at which a write fails as well."""
    file = tmp_path / "token"
    code = f"""if True:
        import resource, signal
        from pathlib import Path
        from pagetide.monitor.errors import ConfigInvalid
        from pagetide.monitor.token_file import prepare_token
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        try:
            prepare_token(Path({str(file)!r}))
        except ConfigInvalid as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    """
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"the token file {file} cannot be made: "), done
    assert list(tmp_path.iterdir()) == []
    prepare_token(file)
    first = file.read_text()
    prepare_token(file)
    assert file.read_text() == first and [entry.name for entry in tmp_path.iterdir()] == ["token"]


def test_token_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="cannot be made: No such file or directory"):
        prepare_token(tmp_path / "none" / "token")
    with pytest.raises(ConfigInvalid, match="cannot be read: Is a directory"):
        prepare_token(tmp_path)
    os.mkfifo(fifo := tmp_path / "fifo", 0o600)
    with pytest.raises(ConfigInvalid, match="not a regular file"):
        read_token(fifo)
    for text in ("", "\n", "x" * 15, "x" * 20 + "\x01", "ä" * 20):
        (file := tmp_path / "token").write_text(text)
        file.chmod(0o600)
        with pytest.raises(ConfigInvalid, match="needs a line of at least 16 printable ASCII characters"):
            read_token(file)


def test_comparison_takes_no_prefix_for_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    real = token_file.hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return bool(real(a, b))

    monkeypatch.setattr(token_file.hmac, "compare_digest", compare)
    token = "a secret of some length"
    given = [f"Bearer {token[:length]}" for length in range(len(token) + 1)] + ["Bearer \udcff", ""]
    assert [is_authorized(one, token) for one in given] == [False] * len(token) + [True, False, False]
    assert compared == [(32, 32)] * len(given), "digests of one length, whatever came"
