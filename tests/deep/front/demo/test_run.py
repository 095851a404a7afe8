"""`pagetide demo` for real through a pipe, in a process of its own."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pagetide.cli import main
from pagetide.demo import run
from pagetide.demo.results import DemoResult

SMALLER = ["--prompts", "16", "--max-new-tokens", "48", "--pool", "0.6"]  # a third of the time; still too small a pool

RECORDED = """
import pickle, sys
from pagetide import cli
from pagetide.demo import run
results, run_demo = [], run.run_demo
async def recorded(*arguments):
    results.append(await run_demo(*arguments))
    return results[-1]
run.run_demo = recorded
status = cli.main(sys.argv[2:])
with open(sys.argv[1], "wb") as file:
    pickle.dump(results[0], file)
sys.exit(status)
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, DemoResult]:
    """A demo as `pagetide demo | cat` gives it: (exit status, what it printed, its result)."""
    file: Path = tmp_path_factory.mktemp("demo") / "result"
    command = [sys.executable, "-P", "-c", RECORDED, str(file), "demo", "--device", "cpu", "--table", *SMALLER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout, pickle.loads(file.read_bytes())


def test_many_prompts_out_of_a_small_pool(shown: tuple[int, str, DemoResult]) -> None:
    status, _, result = shown
    pressed, stats = result.run, result.run.stats
    assert status == 0 and result.is_success
    assert len(pressed.outputs) == 16
    assert stats["preemptions"] == sum(output.num_preemptions for output in pressed.outputs) > 0
    assert stats["recomputed_tokens"] > 0
    assert result.room_preemptions == 0
    assert stats["peak_used_blocks"] <= result.usable_blocks < result.needed_blocks, "the pool was not too small"
    assert stats["blocks"]["live"] == 0
    assert [o.token_ids for o in pressed.outputs] == [o.token_ids for o in pressed.with_room]
    longest_prompt = max(len(str(o.prompt).split()) for o in pressed.outputs)
    assert longest_prompt > run.MAX_STEP_TOKENS, "no prompt was computed in chunks"
    recall = result.recall
    assert recall is not None and recall.recalls >= 1 and 0.4 < recall.share < 0.7
    assert recall.given_back_bytes > 0 and recall.grown_bytes > 0


def test_what_a_pipe_gets(shown: tuple[int, str, DemoResult]) -> None:
    _, out, result = shown
    lines = out.splitlines()
    assert "\x1b" not in out and "\r" not in out
    assert all(len(line) <= 80 for line in lines)
    assert lines[0] == "Loading PyTorch and the bundled model ..."
    for said in ("The pool fills:", "RECALL: half of the pool, ", "The memory comes back:", "The same again, "):
        assert len([line for line in lines if line.startswith(said)]) == 1, said
    assert len([line for line in lines if "tokens/s" in line and " done " in line]) >= 2, "no live progress"
    assert lines[-4:] == result.lines()
    assert lines[-4 - len(result.table_lines(80)) : -4] == result.table_lines(80)


def returning(result: DemoResult) -> Callable[..., Awaitable[DemoResult]]:
    """Stands for `run_demo`."""

    async def run_demo(*_: object) -> DemoResult:
        return result

    return run_demo


def test_as_json(
    shown: tuple[int, str, DemoResult], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, result = shown
    monkeypatch.setattr(run, "run_demo", returning(result))
    assert main(["demo", "--device", "cpu", *SMALLER, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(result.to_dict()))
    failed = replace(result, run=replace(result.run, with_room=result.run.with_room[::-1]))
    monkeypatch.setattr(run, "run_demo", returning(failed))
    assert main(["demo", "--device", "cpu", *SMALLER, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["tokens changed"] == failed.run.num_changed > 0
