"""The exchange with an engine's process: JSON lines on its standard input and output. Only the standard library."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[2]
END_S = 30.0


class PeerEngine(Protocol):
    """A loaded model."""

    settings: dict[str, Any]

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Greedy tokens of all prompts at once: {"seconds", "tokens"}, the time from the call to the last token."""
        ...


def serve(load: Callable[[dict[str, Any]], PeerEngine]) -> None:
    """Answer requests until standard input ends: one "load", then any number of "run"."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print on standard output too
    engine: PeerEngine | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "load":
            engine = load(request)
            answer: dict[str, Any] = engine.settings
        elif engine is None:
            raise RuntimeError(f"{request['op']!r} came before 'load'")
        else:
            answer = engine.run(request["prompts"], request["new_tokens"])
        answers.write(json.dumps(answer) + "\n")


class PeerProcess:
    """An engine's process, stopped but during its own turns. Use as a context manager."""

    def __init__(self, python: str, module: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
        self._module = module
        self._process = subprocess.Popen(
            [python, "-m", module], cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def request(self, **message: Any) -> dict[str, Any]:
        """Let the process run for one request. Raises ChildProcessError where it ends instead of answering."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        self._process.send_signal(signal.SIGCONT)
        line = ""
        try:
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            pass  # as without an answer
        if not line:
            status = self._process.wait(END_S)
            raise ChildProcessError(f"{self._module} ended with status {status}; its own message is above")
        self._process.send_signal(signal.SIGSTOP)  # its idle threads may spin
        return dict(json.loads(line))

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()
