"""`pagetide fleet`, `pagetide run --fleet` and `pagetide serve --fleet`: what they say, write and refuse."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagetide import AsyncLLM
from pagetide.batch.output import Output
from pagetide.cli import main
from pagetide.fleet import api
from tests.fleet_rig import FleetRig, FleetThread
from tests.fleets import FleetProcess, free_ports

LINES = [
    '{"prompt": "Call me Ishmael."}',
    '{"prompt": "Natásha went to the window", "id": 7, "seed": 3, "temperature": 0.9}',
    "",
    "{broken",
    '{"custom_id": "b", "prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}',
    '{"messages": [{"role": "user", "content": "Where is he?"}]}',
    '{"prompt": "To be", "n": 2, "best_of": 3, "stop": ["zzzz"], "logit_bias": {"11": 0.5}}',
    '{"prompt": "The sea", "logprobs": 1, "prompt_logprobs": 0}',
    '{"prompt": [4096]}',
    '{"prompt": ""}',
]
OPENAI = [
    json.dumps(
        {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": {"prompt": "The", "logprobs": 1}}
    ),
    json.dumps({"custom_id": "two", "method": "POST", "url": "/v1/completions", "body": {"prompt": "A", "n": 2}}),
]
SETTINGS = ["--max-new-tokens", "12", "--temperature", "0.7", "--seed", "2", "--output-token-ids"]


@pytest.fixture(scope="module")
def worker() -> Iterator[AsyncLLM]:
    llm = AsyncLLM("demo", device="cpu", kv_memory="32MiB", max_seqs=4, kv_events=True, share=False)
    yield llm
    asyncio.run(llm.stop())


@pytest.fixture
def fleet(worker: AsyncLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetRig]:
    """A fleet of one worker, to which every address leads."""
    with FleetThread(FleetRig(tmp_path, "demo", first=worker)) as thread:
        monkeypatch.setattr(api, "_connect", lambda address, name: thread.rig.link)
        yield thread.rig


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Runs `pagetide`; tells its status and what it printed."""

    def run(*arguments: str) -> SimpleNamespace:
        capsys.readouterr()
        try:
            status = main(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
        out, err = capsys.readouterr()
        return SimpleNamespace(status=status, out=out, err=err)

    return run


@pytest.fixture
def batch(command: Any, tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """Runs `pagetide run` over lines; tells the content of the output too."""

    def run(lines: list[str], output: str, *more: str) -> SimpleNamespace:
        source = tmp_path / "in.jsonl"
        source.write_text("\n".join(lines) + "\n", "utf-8")
        target = tmp_path / output
        done = command("run", "--input", str(source), "--output", str(target), *SETTINGS, *more)
        done.content = target.read_bytes() if target.exists() else None
        return done

    return run


def one_line(done: SimpleNamespace) -> str:
    """The error of a command that failed with status 2 and a line."""
    assert done.status == 2, done
    assert done.err.startswith("pagetide: ") and done.err.count("\n") == 1, done.err
    return str(done.err.removeprefix("pagetide: ").rstrip())


# -- run ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [LINES, OPENAI], ids=["lines", "openai"])
def test_records_are_those_of_an_engine(lines: list[str], fleet: FleetRig, batch: Any) -> None:
    here = batch(lines, "engine.jsonl", "--model", "demo", "--device", "cpu", "--no-share")
    there = batch(lines, "fleet.jsonl", "--fleet", "local")
    assert here.content is not None and there.content == here.content
    assert there.status == here.status == int(lines is LINES)
    assert there.out.splitlines()[0].startswith(f"records            {sum(map(bool, lines))} in ")
    again = batch(lines, "fleet.jsonl", "--fleet", "local", "--model", "demo")
    assert "nothing is left to be done" in again.err and again.content == here.content
    assert fleet.is_empty


def test_a_run_that_was_stopped_goes_on_and_computes_nothing_twice(
    fleet: FleetRig, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = batch(LINES, "whole.jsonl", "--fleet", "local", "--overwrite")
    counters = fleet.server.queue.counters
    num_served = sum("error" not in json.loads(line) for line in whole.content.splitlines())
    assert counters.accepted == num_served > 5
    write, count = Output.write, 0

    def interrupted(output: Output, record: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        write(output, record)

    with monkeypatch.context() as patch:
        patch.setattr(Output, "write", interrupted)
        stopped = batch([*LINES, LINES[0]], "out.jsonl", "--fleet", "local")
    assert stopped.status == 130 and "2 of 10 records are there" in stopped.err
    done = batch([*LINES, LINES[0]], "out.jsonl", "--fleet", "local")
    assert "going on: 2 of 10 records are there" in done.err
    lines = done.content.splitlines()
    assert lines[:-1] == whole.content.splitlines()
    assert json.loads(lines[-1])["line"] == 11
    assert counters.accepted == 2 * num_served + 1 and counters.cancelled == 0


def test_a_run_of_an_engine_does_not_go_on_with_a_fleet(
    fleet: FleetRig, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(output: Output, record: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Output, "write", broken)
        assert batch(LINES, "out.jsonl", "--fleet", "local").status == 130
    (part,) = (Path(fleet._folder)).glob("out.jsonl.part")
    part.write_bytes(b"{}\n")
    assert "fleet.dtype was 'float32' and is not given" in one_line(
        batch(LINES, "out.jsonl", "--model", "demo", "--device", "cpu")
    )


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--dtype", "float32", "--max-seqs", "4"], "own engine settings: leave out dtype, max_seqs"),
        (["--model", "other"], "the fleet serves demo, and not other: leave the model out"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_what_the_fleet_decides_is_refused(more: list[str], text: str, fleet: FleetRig, batch: Any) -> None:
    assert text in one_line(batch(LINES, "out.jsonl", "--fleet", "local", *more))
    assert fleet.server.queue.counters.accepted == 0


# -- errors of all commands --------------------------------------------------------------------------------------------

ON_FLEETS = {
    "run": ["run", "--input", "in.txt", "--output", "out.jsonl", "--fleet", "local", "--fleet-name"],
    "serve": ["serve", "--fleet", "local", "--fleet-name"],
    "status": ["fleet", "status", "--name"],
    "stop": ["fleet", "stop", "--name"],
    "add": ["fleet", "add", "2", "--name"],
    "drain": ["fleet", "drain", "worker-0", "--name"],
}


@pytest.mark.parametrize("arguments", ON_FLEETS.values(), ids=ON_FLEETS.keys())
def test_a_fleet_that_is_not_there(
    arguments: list[str], command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    said = one_line(command(*arguments, "nowhere"))
    assert said.startswith("no fleet named 'nowhere' was started on this machine (")
    assert "start it with `pagetide fleet start`" in said


@pytest.mark.parametrize("arguments", ON_FLEETS.values(), ids=ON_FLEETS.keys())
def test_without_ray_the_extra_is_named(arguments: list[str], command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    said = one_line(command(*arguments, "nowhere"))
    assert "Ray, which is not installed: pip install 'pagetide[ray]'" in said


def test_a_start_without_ray(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "fleet.yaml").write_text("model: demo\n")
    done = command("fleet", "start", "--config", str(tmp_path / "fleet.yaml"))
    assert done.status == 2 and "pip install 'pagetide[ray]'" in done.err.splitlines()[-1]


def test_an_address_that_leads_nowhere(command: Any) -> None:
    pytest.importorskip("ray")
    address = f"127.0.0.1:{free_ports(1)}"
    said = one_line(command("fleet", "status", "--address", address))
    assert said.startswith(f"the Ray cluster {address} cannot be reached: Connection refused.")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("workers: 2\n", "model: name the model that the workers load"),
        ("model: demo\nworker: 2\n", "unknown setting 'worker'; did you mean workers?"),
        ("model: demo\nworkers: many\n", "workers must be an integer"),
        ("model: demo\nengine: {kv_memori: 1GiB}\n", "engine: unknown setting 'kv_memori'; did you mean kv_memory?"),
        ("- model\n", "must map settings to values"),
        ("model: [\n", "not valid YAML"),
    ],
)
def test_a_configuration_that_is_wrong(text: str, said: str, command: Any, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    done = command("fleet", "start", "--config", str(file))
    assert done.out == ""
    told = one_line(done)
    assert told.startswith(str(file)) and said in told


@pytest.mark.parametrize(
    "arguments",
    [["fleet"], *(["fleet", action] for action in ("start", "status", "drain", "add", "stop")), ["run"], ["serve"]],
    ids=" ".join,
)
def test_help(arguments: list[str], command: Any) -> None:
    done = command(*arguments, "--help")
    assert done.status == 0 and done.err == ""
    wanted = {"fleet": "run several|Run a fleet|--address|--config"}.get(arguments[0], "--fleet ADDRESS")
    assert re.search(wanted, done.out)


def test_an_action_is_needed(command: Any) -> None:
    done = command("fleet")
    assert done.status == 2 and "ACTION" in done.err


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["demo"], "leave out MODEL"),
        (["--model", "demo"], "leave out MODEL"),
        (["--config", "models.yaml"], "leave out MODEL"),
    ],
)
def test_a_server_of_a_fleet_takes_no_model(
    more: list[str], text: str, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.yaml").write_text("models: [demo]\n")
    assert text in one_line(command("serve", "--fleet", "local", *more))


# -- on Ray ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    pytest.importorskip("ray")
    engine = {"kv_memory": "32MiB", "max_seqs": 4, "device": "cpu", "share": False}
    with FleetProcess(tmp_path_factory.mktemp("fleet"), workers=2, front_ends=0, threads=1, engine=engine) as fleet:
        yield fleet


def test_a_run_on_ray(running: FleetProcess, batch: Any, tmp_path: Path) -> None:
    here = batch(LINES, "engine.jsonl", "--model", "demo", "--device", "cpu", "--no-share")
    target = tmp_path / "fleet.jsonl"
    done = running.command(
        "run", "--fleet", "local", "--fleet-name", running.name, "--input", str(tmp_path / "in.jsonl"),
        "--output", str(target), *SETTINGS,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert target.read_bytes() == here.content
    refused = running.command("serve", "--fleet", "local", "--fleet-name", running.name, "--dtype", "float32")
    assert refused.returncode == 2 and "own engine settings: leave out dtype" in refused.stderr


def test_a_server_on_ray(running: FleetProcess) -> None:
    port = free_ports(1)
    line = [
        sys.executable, "-P", "-m", "pagetide", "serve", "--fleet", "local", "--fleet-name", running.name,
        "--port", str(port), "--served-model-name", "whale",
    ]  # fmt: skip
    log = running.folder / "serve.log"
    with log.open("wb") as output:
        server = subprocess.Popen(line, env=running.environ, stdout=output, stderr=output)
        try:
            _wait_ready(server, port, log)
            body = {"model": "whale", "prompt": "Call me", "max_tokens": 5, "temperature": 0}
            status, answer = _request(port, "POST", "/v1/completions", body)
            assert status == 200, answer
            assert answer["model"] == "whale" and answer["usage"]["completion_tokens"] == 5
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0, log.read_text()


def _wait_ready(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    while server.poll() is None:
        try:
            if _request(port, "GET", "/ready")[0] == 200:
                return
        except OSError:
            pass
    raise AssertionError(log.read_text())


def _request(port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")
    finally:
        connection.close()


def test_an_address_that_another_program_has_now_is_no_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "pagetide" / "stale"
    folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as other:
        (folder / "address").write_text(f"127.0.0.1:{other.getsockname()[1]}")
        assert main(["fleet", "status", "--name", "stale"]) == 2
    assert "does not run any more" in capsys.readouterr().err
