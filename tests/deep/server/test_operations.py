"""A server that is left running: keys, full queues, engines that die, models that come and go, signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from checkout import ROOT
from monitors import wait_until
from servers import ServerProcess, children

KEYS = """
alice: sk-alice-1234
bob: {key: sk-bob-12345, max_requests: 1}
carol: {key: sk-carol-1234, max_blocks: 64}
dave: {key: sk-dave-12345, tokens_per_minute: 600}
ops: {key: sk-operator-1, admin: true}
"""
ENGINE = ["--device", "cpu", "--dtype", "float32", "--kv-memory", "8MiB", "--no-share", "--max-seqs", "2"]


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{name}"}


ALICE, BOB, OPS = key("alice-1234"), key("bob-12345"), key("operator-1")
CAROL, DAVE = key("carol-1234"), key("dave-12345")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "keys.yaml").write_text(KEYS)
    arguments = ["demo", *ENGINE, "--api-key-file", str(folder / "keys.yaml"), "--max-queue", "2"]
    with ServerProcess(arguments, folder / "log", OMP_NUM_THREADS="1") as server:
        yield server


def complete(server: ServerProcess, headers: dict[str, str], **fields: Any) -> Any:
    body = {"model": "demo", "prompt": "The sea", "max_tokens": 4, "seed": 1} | fields
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120)


eventually = partial(wait_until, timeout_s=120)
LONG = {"prompt": "The sea", "max_tokens": 900, "ignore_eos": True}


def streaming(server: ServerProcess, headers: dict[str, str], **fields: Any) -> Any:
    """A long request whose answer is a stream."""
    body = LONG | {"stream": True} | fields
    return httpx.stream("POST", f"{server.url}/v1/completions", headers=headers, timeout=60, json=body)


def test_nobody_says_on_behalf_of_whom_he_asks(server: ServerProcess) -> None:
    headers = {"X-Forwarded-For": "203.0.113.7", "X-Request-Id": "no-proxy"}
    assert httpx.get(f"{server.url}/health", headers=headers).status_code == 200
    assert server.logged("no-proxy")["client"] == "127.0.0.1"


def test_keys_share_no_cached_blocks(server: ServerProcess) -> None:
    prompt = "It is a truth universally acknowledged, that a whale in possession of a sea, " * 3

    def cached(headers: dict[str, str], **fields: Any) -> int:
        usage = complete(server, headers, prompt=prompt, **fields).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(ALICE) == 0 and cached(ALICE) > 0
    assert cached(BOB) == 0 and cached(ALICE, cache_salt="apart") == 0 and cached(BOB) > 0


def test_one_request_cannot_take_more_than_the_places_there_are(server: ServerProcess) -> None:
    answer = complete(server, ALICE, prompt=["The sea"] * 2, n=3)
    assert answer.status_code == 400 and "6 sequences" in answer.json()["error"]["message"]
    assert "retry-after" not in answer.headers
    assert complete(server, ALICE, prompt=["The sea"] * 2, n=2).status_code == 200
    assert complete(server, ALICE, best_of=5).status_code == 400


def test_a_key_may_go_behind_others_and_not_before_them(server: ServerProcess) -> None:
    found = [complete(server, who, priority=at).status_code for who, at in ((ALICE, 5), (ALICE, -1), (OPS, -1))]
    assert found == [200, 403, 200]


def test_a_limit_of_blocks_takes_a_request_that_fits(server: ServerProcess) -> None:
    info = httpx.get(f"{server.url}/v1/models/demo", headers=CAROL).json()
    blocks = -(-info["max_model_len"] // 16)
    assert complete(server, CAROL, max_tokens=None, n=1).status_code == (200 if blocks <= 64 else 400)
    answer = complete(server, CAROL, max_tokens=300, n=4)  # 4 times 19 blocks
    assert answer.status_code == 400 and "the key carol may use 64" in answer.json()["error"]["message"]
    assert complete(server, CAROL, max_tokens=300, n=3).status_code == 200


def test_all_that_is_generated_counts(server: ServerProcess) -> None:
    usage = complete(server, ALICE, n=1, best_of=3, ignore_eos=True).json()["usage"]
    assert usage["completion_tokens"] == 12 and usage["total_tokens"] == usage["prompt_tokens"] + 12
    # Of a key with 600 tokens a minute: 3 times 150 are used, and at most 30 come back in 3 s.
    assert complete(server, DAVE, n=1, best_of=3, max_tokens=150, ignore_eos=True).status_code == 200
    answer = complete(server, DAVE, n=4, max_tokens=140, ignore_eos=True)
    assert answer.status_code == 429 and "may need 5" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) > 0


def amid_requests(server: ServerProcess, ends: Callable[[], None]) -> tuple[Any, list[str]]:
    """What two long requests get as `ends` is called: the answer of one, and the events of one that streams."""
    with ThreadPoolExecutor(1) as pool, streaming(server, ALICE) as stream:
        events = stream.iter_lines()
        next(events)
        answer = pool.submit(complete, server, ALICE, **LONG)
        eventually(lambda: httpx.get(f"{server.url}/load", headers=ALICE).json() == {"server_load": 2})
        ends()
        return answer.result(60), [line for line in events if line.startswith("data: ")]


def test_sleep_fails_what_does_not_end_in_time(server: ServerProcess) -> None:
    def sleep() -> None:
        assert httpx.post(f"{server.url}/sleep?drain_s=0", headers=OPS, timeout=60).status_code == 200

    for drain_s in ("-1", "nan", "inf", "1e9"):
        refused = httpx.post(f"{server.url}/sleep?drain_s={drain_s}", headers=OPS, timeout=60)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "drain_s")
    answer, events = amid_requests(server, sleep)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert answer.headers["retry-after"]
    assert events[-1] == "data: [DONE]" and '"code":"unavailable"' in events[-2]
    assert not any('"finish_reason":"' in event for event in events)
    assert httpx.get(f"{server.url}/is_sleeping", headers=ALICE).json() == {"is_sleeping": True}
    assert httpx.post(f"{server.url}/wake_up", headers=OPS, timeout=60).status_code == 200
    assert httpx.get(f"{server.url}/is_sleeping", headers=ALICE).json() == {"is_sleeping": False}
    assert complete(server, ALICE).status_code == 200


@pytest.mark.parametrize(("sent", "why"), [(signal.SIGKILL, "ended while it served"), (signal.SIGSTOP, "hung: it was")])
def test_an_engine_that_dies_or_hangs_is_started_again(server: ServerProcess, sent: int, why: str) -> None:
    restarts = r'pagetide_engine_restarts_total{model_name="demo"} (\d+)'
    (before,) = re.findall(restarts, metrics(server))
    (engine,) = children(server)
    answer, events = amid_requests(server, lambda: os.kill(engine, sent))
    assert answer.status_code == 503 and why in answer.json()["error"]["message"]
    assert events[-1] == "data: [DONE]" and why in events[-2] and '"error"' in events[-2]
    eventually(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
    assert complete(server, ALICE).status_code == 200
    assert re.findall(restarts, metrics(server)) == [str(int(before) + 1)]


def test_models_come_and_go_while_others_serve(server: ServerProcess) -> None:
    """The tokens of whole answers and of streams stay the same meanwhile."""
    fields = {"model": "demo", "prompt": "The sea", "max_tokens": 64, "seed": 1, "stream": True}
    wanted = complete(server, ALICE, max_tokens=64).json()["choices"][0]["text"]
    small = {"device": "cpu", "dtype": "float32", "kv_memory": "4MiB", "share": False}
    with ThreadPoolExecutor(2) as pool:
        loading = pool.submit(
            httpx.post, f"{server.url}/admin/models/load", headers=OPS, timeout=120,
            json={"model": "demo", "name": "second", "options": small},
        )  # fmt: skip
        while not loading.done():
            assert complete(server, ALICE, max_tokens=64).json()["choices"][0]["text"] == wanted
            events = server.events("/v1/completions", headers=ALICE, json=fields)
            assert "".join(event["choices"][0]["text"] for event in events) == wanted
    assert loading.result().json()["name"] == "second"
    assert complete(server, ALICE, model="second", max_tokens=64).json()["choices"][0]["text"] == wanted
    assert complete(server, ALICE, model=None).status_code == 400  # which of the two?
    assert httpx.post(f"{server.url}/sleep?model=second", headers=OPS, timeout=60).status_code == 200
    assert httpx.get(f"{server.url}/is_sleeping", headers=ALICE).json() == {"is_sleeping": False}  # not all of them
    again = httpx.post(f"{server.url}/admin/models/load", headers=OPS, json={"model": "demo"})
    assert again.status_code == 409
    missing = httpx.post(f"{server.url}/admin/models/load", headers=OPS, json={"model": "moby"}, timeout=120)
    assert missing.status_code == 400 and "moby" in missing.json()["error"]["message"]
    typo = httpx.post(f"{server.url}/admin/models/load", headers=OPS, json={"model": "x", "options": {"max_sqs": 4}})
    assert "unknown setting 'max_sqs'; did you mean max_seqs?" in typo.json()["error"]["message"]
    gone = httpx.post(f"{server.url}/admin/models/unload", headers=OPS, json={"name": "second"}, timeout=60)
    assert gone.status_code == 200
    assert complete(server, ALICE, model="second").status_code == 404


def test_the_first_signal_drains(server: ServerProcess) -> None:
    with streaming(server, ALICE, max_tokens=300, seed=1) as stream:
        events = stream.iter_lines()
        next(events)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        assert complete(server, ALICE).status_code == 503
        lines = [line for line in events if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in lines[-2]
    assert server.process.wait(60) == 0


def test_the_end_of_the_drain_fails_what_still_runs_and_systemd_is_told(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(KEYS)
    arguments = ["demo", *ENGINE, "--api-key-file", str(tmp_path / "keys.yaml"), "--drain-timeout", "0.1"]
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address)
        manager.settimeout(60)
        environ = {"OMP_NUM_THREADS": "1", "NOTIFY_SOCKET": "@" + address}
        with ServerProcess(arguments, tmp_path / "log", **environ) as server:
            assert manager.recv(100) == b"READY=1"
            assert httpx.get(f"{server.url}/ready").status_code == 200
            answer, events = amid_requests(server, lambda: server.process.send_signal(signal.SIGTERM))
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert events[-1] == "data: [DONE]" and '"code":"unavailable"' in events[-2]
            assert server.process.wait(60) == 0 and "Traceback" not in server.said
        assert manager.recv(100) == b"STOPPING=1"
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.recv(100)


def metrics(server: ServerProcess) -> str:
    return str(httpx.get(f"{server.url}/metrics", headers=OPS).text)


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pagetide", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environ)


def test_starts_that_cannot_succeed_say_why(tmp_path: Path) -> None:
    open_to_all = run("demo", "--host", "0.0.0.0", "--port", "0")
    assert open_to_all.returncode == 2 and "there is no API key: set PAGETIDE_API_KEY" in open_to_all.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        busy = run("demo", "--port", port)
    assert busy.returncode == 2 and f"port {port}: Address already in use; the port is in use" in busy.stderr
    assert "choose another with --port" in busy.stderr
    nothing = run(PAGETIDE_PORT="0")
    assert nothing.returncode == 2 and "no model given" in nothing.stderr
    missing = run("moby", "--port", "0")
    assert missing.returncode == 2 and "the model moby cannot be loaded" in missing.stderr
    models = [ROOT / "engine" / "demo_model"] * 2
    entries = ", ".join(f"{{model: {model}, name: {name}, preload: true}}" for name, model in zip("ab", models, strict=True))
    (tmp_path / "serve.yaml").write_text(f"models: [{entries}]")
    weights = (models[0] / "model.safetensors").stat().st_size
    sizes = "--models-memory", str(weights * 3 // 2), "--kv-memory", "8MiB", "--dtype", "bfloat16"
    exceeding = run("--config", str(tmp_path / "serve.yaml"), "--port", "0", *sizes, "--no-share")
    assert exceeding.returncode == 1 and "cannot be loaded: its weights take" in exceeding.stderr
    assert "those of pinned and preloaded models" in exceeding.stderr
    assert all("Traceback" not in one.stderr for one in (open_to_all, busy, nothing, missing, exceeding))


def test_an_import_that_fails_while_it_serves_ends_it_once() -> None:
    from pagetide.server.run import run_event_loop

    begun: list[int] = []

    async def main() -> None:
        begun.append(1)
        raise ImportError("planted")

    with pytest.raises(ImportError, match="planted"):
        run_event_loop(main())
    assert begun == [1]
