"""What an attacker sends: every connection gets a clean answer, and the server goes on serving with nothing left of it."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from openapi_load import SERVER, send_requests
from servers import ServerProcess, children, wait_until_idle

KEYS = {"PAGETIDE_API_KEY": "sk-alice-1234", "PAGETIDE_ADMIN_KEY": "sk-operator-1", "OMP_NUM_THREADS": "1"}
ALICE, OPS = ({"Authorization": f"Bearer {key}"} for key in ("sk-alice-1234", "sk-operator-1"))
ENGINE = ["--device", "cpu", "--dtype", "float32", "--kv-memory", "8MiB", "--no-share", "--max-seqs", "8"]
FAR_S = 60.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(["demo", *ENGINE], tmp_path_factory.mktemp("server") / "log", **KEYS) as server:
        yield server
        assert "Traceback" not in server.said
        assert server.end(signal.SIGTERM) == 0


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    """After each test the server answers, and nothing is left running."""
    yield running
    assert complete(running).status_code == 200
    wait_until_idle(running.url, ALICE)


def complete(server: ServerProcess, **fields: Any) -> Any:
    body = {"prompt": "The sea", "max_tokens": 2, "seed": 1} | fields
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=ALICE, timeout=FAR_S)


BODIES = {
    "tiny penalty": b'{"prompt":"a","repetition_penalty":1e-40}',
    "schema beyond 64 bits": b'{"prompt":"a","structured_outputs":{"json":{"minimum":' + b"9" * 60 + b"}}}",
    "reference to itself": b'{"prompt":"a","structured_outputs":{"json":{"$ref":"#"}}}',
    "reference to a file": b'{"prompt":"a","structured_outputs":{"json":{"$ref":"file:///etc/passwd"}}}',
    "lone surrogate": b'{"prompt":"\\ud800"}',
    "lone surrogate in stop": b'{"prompt":"a","stop":"\\ud800"}',
    "lone surrogate in regex": b'{"prompt":"a","structured_outputs":{"regex":"\\ud800"}}',
    "overflowing bias": b'{"prompt":"a","logit_bias":{"5":1e308}}',
    "self": b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"chat_template_kwargs":{"self":1}}',
    "huge regex": b'{"prompt":"a","structured_outputs":{"regex":"(x{1000}){1000}"}}',
}


def test_bodies_that_the_engine_refuses(server: ServerProcess) -> None:
    headers = ALICE | {"content-type": "application/json"}
    for name, body in BODIES.items():
        path = "/v1/chat/completions" if b"messages" in body else "/v1/completions"
        answer = httpx.post(f"{server.url}{path}", content=body, headers=headers, timeout=FAR_S)
        assert answer.status_code == 400 and answer.json()["error"]["message"], name


def test_more_tokens_than_a_call_may_detokenize(server: ServerProcess) -> None:
    answer = httpx.post(f"{server.url}/detokenize", json={"tokens": [5] * 70_000}, headers=ALICE, timeout=FAR_S)
    assert answer.status_code == 400 and "at most 65,536" in answer.json()["error"]["message"]


def test_a_chain_of_rules_and_a_catastrophic_regex_leave_the_engine_alive(server: ServerProcess) -> None:
    (engine,) = children(server)
    chain = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(5_000))
    assert complete(server, structured_outputs={"grammar": f'start: r0\n{chain}\nr5000: "b"'}).status_code == 200
    assert complete(server, structured_outputs={"regex": "(a+)+$"}).json()["choices"][0]["text"].strip("a") == ""
    assert children(server) == [engine]


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_access_log_stops_nothing(tmp_path: Path) -> None:
    second = ServerProcess(["demo", *ENGINE], tmp_path / "log", **KEYS)
    with second:
        limit = (0, resource.RLIM_INFINITY)  # no file may grow, as on a full disk
        resource.prlimit(second.process.pid, resource.RLIMIT_FSIZE, limit)
        assert [complete(second).status_code for _ in range(3)] == [200] * 3
        assert second.end(signal.SIGTERM) == 0


def test_500_requests_by_the_openapi_description(tmp_path: Path) -> None:
    """No answer of 500, no hang, nothing left. `make soak` sends 10,000."""
    with ServerProcess(SERVER, tmp_path / "log", PAGETIDE_ADMIN_KEY="sk-operator-1", OMP_NUM_THREADS="1") as second:
        statuses = send_requests(second.url, 500, 0, OPS)
        assert sum(statuses.values()) >= 500 and statuses[200] >= 50 and statuses[400] >= 50, statuses
        for path in ("/sleep", "/wake_up", "/admin/models/load"):
            assert httpx.post(f"{second.url}{path}", json={"model": "demo"}).status_code == 401
        wait_until_idle(second.url, OPS)
        assert "Traceback" not in second.said
