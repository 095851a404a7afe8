"""`pagetide demo`: once for real through a pipe, in a process of its own, then by its parts."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from pagetide.cli import main
from pagetide.demo import engines, run
from pagetide.demo.block_map import BlockHolders
from pagetide.demo.display import NoDisplay
from pagetide.demo.results import DemoResult
from pagetide.engine import llm as llm_module

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


def test_numbers_that_make_no_demo(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--prompts", "15"], "at least 16 prompts"),
        (["--pool", "0"], "must be in (0, 1], got 0.0"),
        (["--pool", "1.5"], "must be in (0, 1], got 1.5"),
        (["--pool", "nan"], "must be in (0, 1], got nan"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
    ):
        assert main(["demo", "--device", "cpu", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("pagetide: ") and message in err and err.count("\n") == 1


def test_the_first_line_needs_no_torch() -> None:
    """It is drawn before PyTorch is imported, which takes seconds."""
    code = """
import sys
from pagetide import cli
from pagetide.demo import run
def drawn(options, display):
    print("torch" in sys.modules, "transformers" in sys.modules)
    raise SystemExit
run.run_demo = drawn
cli.main(["demo"])
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["Loading PyTorch and the bundled model ...", "False False"], done.stderr


class Recorded:
    """An engine that only notes how it was made."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, *_: Any, **options: Any) -> None:
        self.made.append(options)

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_where_the_pool_is_one_allocation_there_is_no_recall(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: a pool of fixed size, on no private device."""
    plan = replace(engines.plan_pool("cpu", 100), device="cuda")
    monkeypatch.setattr(llm_module, "LLM", Recorded)
    monkeypatch.setattr(Recorded, "made", [])
    with engines.open_engines(plan, least_blocks=10, roomy_blocks=200) as (_, _, device):
        assert device is None
    assert (Recorded.made[0]["kv_memory"], Recorded.made[0]["share"]) == (plan.kv_bytes, False)


class Chunk:
    def __init__(self, text: str, output: object = None) -> None:
        self.text, self.token_ids, self.output = text, [1] * len(text), output


class StillEngine:
    """An engine of which requests hold the given blocks."""

    def stats(self) -> dict[str, Any]:
        return {"steps": 7, "running": 3, "waiting": 2, "preemptions": 1}


def test_two_panes_show_requests_that_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two that stream; one that was preempted stays, one that has ended is replaced after a moment."""
    now, held, waiting = [100.0], {0, 1, 2, 3}, set[int]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(run, "sample_pool", lambda *_: (BlockHolders(np.array(sorted(held), np.int16)), waiting))
    options = run.DemoOptions("cpu")
    watched = run.Watched(NoDisplay(), options.first_state(), [f"prompt {i}" for i in range(24)], options.sampling())

    def panes(after_s: float = 0.2) -> list[tuple[int, str, str]]:
        now[0] += after_s
        watched.look(StillEngine(), 0, None)  # type: ignore[arg-type]
        return [(pane.number, pane.state, pane.text) for pane in watched.state.panes]

    assert panes() == []
    watched.take(2, Chunk("ab"))  # type: ignore[arg-type]
    assert panes() == [(2, "running, 2 tokens", "ab")]
    watched.take(0, Chunk("c"))  # type: ignore[arg-type]
    watched.take(1, Chunk("d"))  # type: ignore[arg-type]
    assert panes() == [(2, "running, 2 tokens", "ab"), (0, "running, 1 token", "c")]
    held.discard(2)
    assert panes() == [(2, "running, 2 tokens", "ab"), (0, "running, 1 token", "c")], "its last token is to come"
    waiting.add(2)
    watched.take(0, Chunk("", output=object()))  # type: ignore[arg-type]
    held.discard(0)
    assert panes() == [(2, "preempted, waits, 2 tokens", "ab"), (0, "ended, 1 token", "c")]
    assert panes(run.ENDED_S) == [(2, "preempted, waits, 2 tokens", "ab"), (1, "running, 1 token", "d")]
    state = watched.state
    panes(0.01)
    assert watched.state is state, "sampled no more than ten times a second"
    assert len(state.history) == 6 and state.counts is not None and state.counts.running == 3
