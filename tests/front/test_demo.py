"""The demo: once for real, in a process of its own, then with its runs played back, changed and unchanged."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pagetide import RequestOutput, demo
from pagetide.cli import main
from pagetide.engine import llm as llm_module

ContiguousCopies = list[Any]
SMALLER = ["--prompts", "16", "--max-new-tokens", "64", "--pool", "0.6"]  # half the time; still too small a pool


RECORDED = """
import pickle, sys
from pagetide import cli, demo
runs, serve = [], demo._serve
def recorded(*arguments, **options):
    runs.append(serve(*arguments, **options))
    return runs[-1]
demo._serve = recorded
status = cli.main(sys.argv[2:])
with open(sys.argv[1], "wb") as file:
    pickle.dump(runs, file)
sys.exit(status)
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, ContiguousCopies]:
    """A demo as `pagetide demo` gives it: (exit status, what it printed, its two runs).

    In a process of its own, whose heap has no room left over: then the pool exceeds its lease's minimum, and is recalled.
    """
    runs: Path = tmp_path_factory.mktemp("demo") / "runs"
    command = [sys.executable, "-P", "-c", RECORDED, str(runs), "demo", "--device", "cpu", *SMALLER]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.stderr == ""
    return run.returncode, run.stdout, pickle.loads(runs.read_bytes())


@pytest.fixture
def played_back(
    shown: tuple[int, str, ContiguousCopies], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs the demo with the given runs in the place of real ones: (exit status, its JSON)."""
    monkeypatch.setattr(demo, "_engines", lambda *_, **__: contextlib.nullcontext((None, None, None)))

    def play(pressed: Any, free: Any) -> tuple[int, dict[str, Any]]:
        left = [pressed, free]
        monkeypatch.setattr(demo, "_serve", lambda *_, **__: left.pop(0))
        status = main(["demo", "--device", "cpu", *SMALLER, "--json"])
        return status, json.loads(capsys.readouterr().out)

    return play


def test_many_prompts_out_of_a_small_pool(shown: tuple[int, str, ContiguousCopies]) -> None:
    status, out, (pressed, free) = shown
    stats = pressed.stats
    assert status == 0
    assert len(pressed.outputs) >= 16
    assert stats["preemptions"] == sum(output.num_preemptions for output in pressed.outputs) > 0
    assert stats["recomputed_tokens"] > 0
    assert free.stats["preemptions"] == 0
    assert stats["blocks"]["usable"] < free.stats["peak_used_blocks"], "the pool was not too small"
    assert stats["blocks"]["live"] == free.stats["blocks"]["live"] == 0
    assert [o.token_ids for o in pressed.outputs] == [o.token_ids for o in free.outputs]
    assert {o.finish_reason for o in pressed.outputs} <= {"stop", "length"}
    longest_prompt = max(len(o.prompt_token_ids) for o in pressed.outputs)
    assert longest_prompt > demo.MAX_STEP_TOKENS, "no prompt was computed in chunks"
    assert "the pool has" in out and "] " in out and "half of the pool is recalled" in out
    assert len([line for line in out.splitlines() if line.startswith("step ")]) >= 2, "no live progress"
    assert pressed.pressure["recalls of the pool's memory"] >= 1
    assert 0 < pressed.pressure["pool, KiB after it"] < pressed.pressure["pool, KiB before the recall"]
    assert pressed.pressure["given back, KiB"] > 0 and pressed.pressure["grown again, KiB"] > 0
    assert free.pressure == {}
    table = out[out.rindex("  device ") :]
    assert all(f"  {name:<36}{value:>12,}" in table for name, value in pressed.pressure.items())
    assert f"preemptions{stats['preemptions']:>37,}" in table
    assert "tokens equal to an unpressured run           yes" in table
    flat = " ".join(out.split())
    for output in pressed.outputs:
        assert " ".join(output.text.split())[:40] in flat


def test_as_json(
    shown: tuple[int, str, ContiguousCopies], played_back: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    _, _, (pressed, free) = shown
    status, told = played_back(pressed, free)
    assert status == 0
    assert told["tokens equal to an unpressured run"] is True
    assert told["preemptions"] == pressed.stats["preemptions"] > 0
    assert told["tokens generated"] == sum(len(o.token_ids) for o in pressed.outputs)
    assert told["tokens per second"] == pytest.approx(told["tokens generated"] / pressed.seconds, rel=0.01)
    assert told["steps"] == pressed.stats["steps"]
    assert 0 < told["peak blocks used"] <= told["blocks of the pool"] < told["blocks that all need together"]
    assert [o["text"] for o in told["outputs"]] == [o.text for o in pressed.outputs]
    assert pressed.pressure.items() <= told.items()


def with_first(output: RequestOutput, **changes: Any) -> RequestOutput:
    """`output` with another first completion."""
    first, *others = output.completions
    return replace(output, completions=(replace(first, **changes), *others))


@pytest.mark.parametrize("which", ["the pressed run", "the other run"])
def test_the_verdict_is_computed(
    which: str, shown: tuple[int, str, ContiguousCopies], played_back: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    """One token of one output differs."""
    _, _, runs = shown
    at = ["the pressed run", "the other run"].index(which)
    outputs = list(runs[at].outputs)
    tokens = list(outputs[5].token_ids)
    tokens[-1] += 1
    outputs[5] = with_first(outputs[5], token_ids=tokens)
    changed = [*runs]
    changed[at] = replace(runs[at], outputs=outputs)
    status, told = played_back(*changed)
    assert (status, told["tokens equal to an unpressured run"]) == (1, False)


def test_a_request_that_was_not_served_fails_the_demo(
    shown: tuple[int, str, ContiguousCopies], played_back: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    _, _, (pressed, free) = shown
    for run in (pressed, free):
        outputs = [*run.outputs[:-1], with_first(run.outputs[-1], finish_reason="error", error="planted")]
        changed = replace(run, outputs=outputs)
        status, _ = played_back(*(changed if one is run else one for one in (pressed, free)))
        assert status == 1


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


class Recorded:
    """An engine that only notes how it was made."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, *_: Any, **options: Any) -> None:
        self.made.append(options)

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_where_the_pool_is_one_allocation_there_is_no_pressure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: a pool of fixed size, on nobody's private device."""
    plan = replace(demo._plan("cpu", 100), device="cuda")
    monkeypatch.setattr(llm_module, "LLM", Recorded)
    monkeypatch.setattr(Recorded, "made", [])
    with demo._engines(plan, least_blocks=10, roomy_blocks=200) as (_, _, pressure):
        assert pressure is None
    assert (Recorded.made[0]["kv_memory"], Recorded.made[0]["share"]) == (plan.kv_bytes, False)


def test_the_first_wave_fills_the_pool() -> None:
    assert demo._waves([5, 5, 5, 5], usable=11) == [range(3), range(3, 4)]
    assert demo._waves([5, 5], usable=10) == demo._waves([5, 5], usable=99) == [range(2)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_live_line_is_rewritten_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Still:
        def stats(self) -> dict[str, Any]:
            return {
                "steps": 7, "running": 3, "waiting": 2, "preemptions": 1, "blocks": {"live": 5, "usable": 10},
            }  # fmt: skip

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    line = demo._Line(live=True)
    line.update(Still(), 1, 16, 123.4)  # type: ignore[arg-type]
    line.end(Still(), 16, 16, 99.0)  # type: ignore[arg-type]
    text = terminal.getvalue()
    assert text.count("\r\x1b[2K") == 2 and text.count("\n") == 2 and text.endswith("\n")
    assert "done  1/16" in text and "done 16/16" in text
    assert "pool [##########..........]    5/10" in text
    silent = demo._Line(live=False)
    silent.update(Still(), 1, 16, 1.0)  # type: ignore[arg-type]
    silent.end(Still(), 1, 16, 1.0)  # type: ignore[arg-type]
    assert terminal.getvalue() == text
