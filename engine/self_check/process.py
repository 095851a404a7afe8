"""Runs the tests of parts in separate processes, so that a crash, a hang or a broken device context there affects nothing else.

One process tests the parts in order. It exits at the first failure, and another process continues. The failed part is first
tested again, so that a transient failure does not count. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from .report import FAILED, UNTRIED, PartOutcome

log = logging.getLogger(__name__)

# Given parts to test and parts that failed, the command of a process that tests them. See `child`.
Command = Callable[[Sequence[str], Collection[str]], Sequence[str]]

_END_S = 5.0  # wait for the exit of a process that is done or was killed
_SAID_CHARS = 300


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts in seconds. A start imports torch; the first use of a kernel compiles it."""

    ready_s: float = 60.0
    part_s: float = 60.0
    total_s: float = 180.0


def try_parts(
    parts: Sequence[str],
    command: Command,
    identity: Mapping[str, Any],
    bounds: Timeouts | None = None,
    clock: Callable[[], float] = time.time,
) -> list[PartOutcome]:
    """The outcome of each part, in order. Errors in a process do not raise.

    The tests of a process with another `identity` do not count.
    """
    trial = _Trial(parts, identity, bounds or Timeouts(), clock)
    while trial.todo:
        trouble = trial.advance(command)
        if trouble is not None:
            trial.leave_the_rest(trouble)
    return trial.found


class _Trial:
    """Parts to test, and the outcomes so far."""

    def __init__(self, parts: Sequence[str], identity: Mapping[str, Any], bounds: Timeouts, clock: Callable[[], float]) -> None:
        self.todo = list(parts)
        self.found: list[PartOutcome] = []
        self._identity = dict(identity)
        self._bounds = bounds
        self._clock = clock
        self._deadline = time.monotonic() + bounds.total_s
        self._first: PartOutcome | None = None  # of the next part, if it failed once

    def advance(self, command: Command) -> str | None:
        """Test parts in one process until it stops. Returns why the rest cannot be tested at all; None if it can."""
        failed = [one.part for one in self.found if one.state == FAILED]
        try:
            child = Child(command(self.todo, failed))
        except OSError as error:
            return f"no process could be started: {error}"
        with child:
            try:
                first = child.line(self._left_s(self._bounds.ready_s))
            except TimeoutError:
                return "its process was not ready in time"
            except ValueError as error:
                return str(error)
            if first is None:
                return f"its process {child.end()}"
            if first.get("identity") != self._identity:
                return "its process sees another device, or other versions"
            while self.todo and time.monotonic() < self._deadline:
                outcome = self._next(child)
                if outcome.state == FAILED and self._first is None:
                    log.info("self-check: %s failed; trying it again: %s", outcome.part, outcome.reason)
                    self._first = outcome
                    return None
                self._first = None
                self.found.append(outcome)
                self.todo.pop(0)
                if outcome.state == FAILED or child.is_over:
                    return None
        return f"other parts took all of {self._bounds.total_s:g} s" if self.todo else None

    def leave_the_rest(self, reason: str) -> None:
        """Stop testing. A part that failed once, and cannot be tested again, has failed."""
        if self._first is not None:
            self.found.append(self._first)
            self.todo.pop(0)
        self.found += [PartOutcome(part, UNTRIED, reason, at=self._clock()) for part in self.todo]
        self.todo.clear()

    def _next(self, child: Child) -> PartOutcome:
        """The outcome of the next part."""
        part, began, limit_s = self.todo[0], time.monotonic(), self._left_s(self._bounds.part_s)

        def ended(state: str, reason: str) -> PartOutcome:
            return PartOutcome(part, state, reason, round(time.monotonic() - began, 3), self._clock())

        try:
            line = child.line(limit_s)
            if line is not None:
                return PartOutcome.from_dict({**line, "part": part})
        except TimeoutError:
            enough = limit_s == self._bounds.part_s
            return ended(FAILED if enough else UNTRIED, f"it did not end within {limit_s:.3g} s")
        except (ValueError, TypeError, KeyError) as error:
            return ended(UNTRIED, f"its process gave no outcome: {error}")
        how = child.end()
        # Only the kernel (out of memory) or an operator sends SIGKILL here.
        return ended(UNTRIED if child.status == -signal.SIGKILL else FAILED, f"its process {how}")

    def _left_s(self, limit_s: float) -> float:
        return max(0.0, min(limit_s, self._deadline - time.monotonic()))


class Child:
    """A process that writes JSON objects, one per line, to its standard output. Leaving the context ends it. Raises OSError."""

    def __init__(self, command: Sequence[str]) -> None:
        with ExitStack() as undo:
            self._said = undo.enter_context(tempfile.TemporaryFile())  # its standard error
            # Its standard input ends with this process, and then it exits too.
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said)
            undo.pop_all()
        self.is_over = False  # it will write no more
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="pagetide-self-check", daemon=True)
        self._reader.start()

    @property
    def status(self) -> int | None:
        """Its exit status, negative for the signal that ended it; None while it runs."""
        return self._process.returncode

    def line(self, timeout_s: float) -> dict[str, Any] | None:
        """The next object; None at the end of output. On a timeout or any other output it kills the process and raises
        TimeoutError or ValueError.
        """
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self._kill()
            raise TimeoutError from None
        if line is None:
            self.is_over = True
            return None
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self._kill()
            raise ValueError(f"its process said {line[:_SAID_CHARS]!r}")
        return answer

    def end(self) -> str:
        """How the process ended, as the end of a sentence. Call it after `line` returned None."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        status = self._process.returncode
        if status is None:
            return "closed its output"
        how = f"ended with status {status}"
        if status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()
        log.debug("self-check: a process %s, and said:\n%s", how, said)
        last = said.rpartition("\n")[2]
        return f"{how}: {last[:_SAID_CHARS]}" if last else how

    def _kill(self) -> None:
        self.is_over = True
        self._process.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self._lines.put(line)
        self._lines.put(None)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        assert self._process.stdin is not None
        if kind is not None:
            self._kill()
        self._process.stdin.close()
        try:  # let it exit itself: that frees its device memory
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._kill()
            with suppress(subprocess.TimeoutExpired):  # a process stuck in the driver is left behind
                self._process.wait(_END_S)
        self._reader.join(_END_S)  # it closes the output
        self._said.close()
