"""What tests of fleets in both tiers have in common: commands, and an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from output_cuts import Cutter

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
SETTINGS = ["--max-new-tokens", "12", "--temperature", "0.7", "--seed", "2", "--output-token-ids"]
ON_FLEETS = [  # commands that end with the name of a fleet
    ["run", "--input", "in.txt", "--output", "out.jsonl", "--fleet", "local", "--fleet-name"],
    ["serve", "--fleet", "local", "--fleet-name"],
    ["fleet", "status", "--name"],
    ["fleet", "stop", "--name"],
    ["fleet", "add", "2", "--name"],
    ["fleet", "drain", "worker-0", "--name"],
    ["fleet", "cancel", "--key", "bob", "--name"],
]


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Runs `pagetide`; tells its status and what it printed."""

    from pagetide.cli import main

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
        done.records = [json.loads(line) for line in (done.content or b"").splitlines()]
        return done

    return run


def one_line(done: SimpleNamespace) -> str:
    """The error of a command that failed with status 2 and a line."""
    assert done.status == 2, done
    assert done.err.startswith("pagetide: ") and done.err.count("\n") == 1, done.err
    return str(done.err.removeprefix("pagetide: ").rstrip())


@pytest.fixture(scope="module")
def cutter() -> Iterator[Cutter]:
    """Requests that are cut, and the engine behind them."""
    from pagetide import AsyncLLM
    from tests.output_cuts import Cutter

    llm = AsyncLLM("demo", device="cpu", kv_memory="32MiB", max_seqs=8, share=False)
    yield Cutter(llm)
    asyncio.run(llm.stop())
