"""`pagetide` as a command: arguments, processes, and what it says when it fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pagetide import LLM
from pagetide.cli import main
from pagetide.monitor import watch

PROMPTS = ['"What is the matter," said', "Natásha went to the window and", "CORIOLANUS:\n"]
DEMO = ["--model-name", "demo", "--device", "cpu", "--kv-memory", "32MiB"]
SHORT = ["--max-new-tokens", "12"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "pagetide", *arguments]


def finished(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300, check=False, **options)


def prompt_arguments(prompts: list[str]) -> list[str]:
    return [argument for prompt in prompts for argument in ("--prompt", prompt)]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run what has to fail; its one line of complaint."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pagetide: ") and err.endswith("\n") and err.count("\n") == 1, err
    return err


@pytest.fixture(scope="module", autouse=True)
def _one_monitor() -> Iterator[None]:
    """Else each engine would start one, and end it again. Models are the built-in ones."""
    with pytest.MonkeyPatch.context() as patch, watch(timeout_s=60):
        patch.delenv("PAGETIDE_CONFIG", raising=False)
        yield


@pytest.fixture(name="demo", scope="module")
def demo_fixture() -> Iterator[LLM]:
    with LLM("demo", device="cpu", kv_memory="32MiB") as llm:
        yield llm
