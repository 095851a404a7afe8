"""`pagetide demo` for real through a pipe, in a process of its own."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pagetide.cli import main
from pagetide.demo import engines, run
from pagetide.demo.results import DemoResult

SMALLER = ["--prompts", "16", "--max-new-tokens", "48", "--pool", "0.6"]  # a third of the time; still too small a pool

RECORDED = """
import pickle, sys
from pagetide import cli
from pagetide.demo import run
results, run_demo = [], run.run_demo
def recorded(*arguments):
    results.append(run_demo(*arguments))
    return results[-1]
run.run_demo = recorded
status = cli.main(sys.argv[2:])
with open(sys.argv[1], "wb") as file:
    pickle.dump(results[0], file)
sys.exit(status)
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, DemoResult]:
    """A demo as `pagetide demo | cat` gives it: (exit status, what it printed, its result).

    In a process of its own, whose heap has no room left over: then the pool exceeds its lease's minimum, and is recalled.
    """
    file: Path = tmp_path_factory.mktemp("demo") / "result"
    command = [sys.executable, "-P", "-c", RECORDED, str(file), "demo", "--device", "cpu", "--table", *SMALLER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout, pickle.loads(file.read_bytes())


def test_many_prompts_out_of_a_small_pool(shown: tuple[int, str, DemoResult]) -> None:
    status, _, result = shown
    pressed, free = result.pressed, result.free
    stats = pressed.stats
    assert status == 0 and result.is_success
    assert len(pressed.outputs) == 16
    assert stats["preemptions"] == sum(output.num_preemptions for output in pressed.outputs) > 0
    assert stats["recomputed_tokens"] > 0
    assert free.stats["preemptions"] == 0
    assert result.usable_blocks < free.stats["peak_used_blocks"] <= result.needed_blocks, "the pool was not too small"
    assert stats["blocks"]["live"] == free.stats["blocks"]["live"] == 0
    assert [o.token_ids for o in pressed.outputs] == [o.token_ids for o in free.outputs]
    longest_prompt = max(len(o.prompt_token_ids) for o in pressed.outputs)
    assert longest_prompt > engines.MAX_STEP_TOKENS, "no prompt was computed in chunks"
    recall = pressed.recall
    assert recall is not None and recall.recalls >= 1 and 0.4 < recall.share < 0.6
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


def test_as_json(
    shown: tuple[int, str, DemoResult], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, result = shown
    monkeypatch.setattr(run, "run_demo", lambda *_: result)
    assert main(["demo", "--device", "cpu", *SMALLER, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(result.to_dict()))
    failed = replace(result, free=replace(result.free, outputs=result.free.outputs[::-1]))
    monkeypatch.setattr(run, "run_demo", lambda *_: failed)
    assert main(["demo", "--device", "cpu", *SMALLER, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["tokens changed"] == failed.num_changed > 0
