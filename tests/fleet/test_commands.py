"""`pagetide fleet`, `pagetide run --fleet` and `pagetide serve --fleet`: what they say, write and refuse."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from coroutine_tests import in_thread
from fleet_fixtures import LINES, ON_FLEETS, one_line
from nearly import nearly

from pagetide import AsyncLLM
from pagetide.batch.output import Output
from pagetide.fleet import api
from tests.fleet_rig import FleetRig

OPENAI = [
    json.dumps({"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": {"prompt": "The", "logprobs": 1}}),
    json.dumps({"custom_id": "two", "method": "POST", "url": "/v1/completions", "body": {"prompt": "A", "n": 2}}),
]


@pytest.fixture(scope="module")
def worker() -> Iterator[AsyncLLM]:
    llm = AsyncLLM("demo", device="cpu", kv_memory="32MiB", max_seqs=4, kv_events=True, share=False)
    yield llm
    asyncio.run(llm.stop())


@pytest.fixture
def fleet(worker: AsyncLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetRig]:
    """A fleet of one worker, to which every address leads."""
    with in_thread(FleetRig(tmp_path, "demo", first=worker)) as rig:
        monkeypatch.setattr(api, "_connect", lambda address, name: rig.link)
        yield rig


@pytest.mark.parametrize("lines", [LINES, OPENAI], ids=["lines", "openai"])
def test_records_are_those_of_an_engine(lines: list[str], fleet: FleetRig, batch: Any) -> None:
    here = batch(lines, "engine.jsonl", "--model", "demo", "--device", "cpu", "--no-share")
    there = batch(lines, "fleet.jsonl", "--fleet", "local")
    assert there.records == nearly(here.records)
    assert there.status == here.status == int(lines is LINES)
    assert there.out.splitlines()[0].startswith(f"records            {sum(map(bool, lines))} in ")
    again = batch(lines, "fleet.jsonl", "--fleet", "local", "--model", "demo")
    assert "already complete with these settings" in again.err and again.content == there.content
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
    assert stopped.status == 130 and "2 of 10 records are complete" in stopped.err
    done = batch([*LINES, LINES[0]], "out.jsonl", "--fleet", "local")
    assert "resuming: 2 of 10 records are complete, 8 to do" in done.err
    *lines, last = done.records
    assert lines == nearly(whole.records) and last["line"] == 11
    assert counters.accepted == 2 * num_served + 1 and counters.cancelled == 0


def test_a_run_of_an_engine_does_not_go_on_with_a_fleet(fleet: FleetRig, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(output: Output, record: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Output, "write", broken)
        assert batch(LINES, "out.jsonl", "--fleet", "local").status == 130
    (part,) = fleet.options.journal.parent.glob("out.jsonl.part")
    part.write_bytes(b"{}\n")
    assert "fleet.dtype was 'float32' and is not given" in one_line(
        batch(LINES, "out.jsonl", "--model", "demo", "--device", "cpu")
    )


def test_what_the_fleet_decides_is_refused(fleet: FleetRig, batch: Any) -> None:
    for more, text in (
        (["--dtype", "float32", "--max-seqs", "4"], "own engine settings: leave out dtype, max_seqs"),
        (["--model", "other"], "the fleet serves demo, and not other: leave the model out"),
        (["--temperature", "-1"], "temperature"),
    ):
        assert text in one_line(batch(LINES, "out.jsonl", "--fleet", "local", *more))
    assert fleet.server.queue.counters.accepted == 0


def test_without_ray_the_extra_is_named(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for arguments in ON_FLEETS:
        assert f"Ray, which is not installed: pip install -e '{ROOT}[ray]'" in one_line(command(*arguments, "nowhere"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "fleet.yaml").write_text("model: demo\n")
    done = command("fleet", "start", "--config", str(tmp_path / "fleet.yaml"))
    assert done.status == 2 and f"pip install -e '{ROOT}[ray]'" in done.err.splitlines()[-1]


def test_a_configuration_that_is_wrong(command: Any, tmp_path: Path) -> None:
    """Its file and the error come in one line; the errors are those of tests/fleet/test_config.py."""
    file = tmp_path / "fleet.yaml"
    file.write_text("model: demo\nworker: 2\n")
    done = command("fleet", "start", "--config", str(file))
    told = one_line(done)
    assert done.out == "" and told.startswith(str(file)) and "unknown setting 'worker'; did you mean workers?" in told


def test_help(command: Any) -> None:
    for action in (None, "start", "status", "drain", "add", "cancel", "stop"):
        done = command("fleet", *([action] if action else []), "--help")
        assert (done.status, done.err) == (0, "")
        assert re.search("run several|Run a fleet|--address|--config", done.out), action
    for name in ("run", "serve"):
        done = command(name, "--help")
        assert (done.status, done.err) == (0, "") and "--fleet ADDRESS" in done.out
    done = command("fleet")
    assert done.status == 2 and "ACTION" in done.err


def test_a_server_of_a_fleet_takes_no_model(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.yaml").write_text("models: [demo]\n")
    for more in (["demo"], ["--model", "demo"], ["--config", "models.yaml"]):
        assert "leave out MODEL" in one_line(command("serve", "--fleet", "local", *more))
