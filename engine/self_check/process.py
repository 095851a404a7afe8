"""Runs the tests of parts in separate processes, so that a crash, a hang or a broken device context there affects nothing else.

One process tests the parts in order. It exits at the first failure, and another process continues. The failed part is first
tested again, so that a transient failure does not count. Imports no torch.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.child_process import END_S, ChildProcess
from ...common.frames import BadFrame, ChannelClosed
from .report import FAILED, UNTRIED, PartOutcome

log = logging.getLogger(__name__)

# Given parts to test and parts that failed, the interpreter's arguments for a process that tests them. See `child`.
Command = Callable[[Sequence[str], Collection[str]], Sequence[str]]


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
            child = ChildProcess(command(self.todo, failed), captures=True)
        except OSError as error:
            return f"no process could be started: {error}"
        with child:
            trouble = self._test_in(child)
            if trouble is None:
                child.wait(END_S)  # it exits by itself, which frees its device memory
        return trouble

    def _test_in(self, child: ChildProcess) -> str | None:
        try:
            first = child.channel.receive(self._left_s(self._bounds.ready_s))
        except TimeoutError:
            return "its process was not ready in time"
        except BadFrame as error:
            return f"its process said {error}"
        except ChannelClosed:
            return f"its process {child.ending()}"
        if first != {"identity": self._identity}:
            return "its process sees another device, or other versions"
        while self.todo and time.monotonic() < self._deadline:
            outcome, goes_on = self._next(child)
            if outcome.state == FAILED and self._first is None:
                log.info("self-check: %s failed; trying it again: %s", outcome.part, outcome.reason)
                self._first = outcome
                return None
            self._first = None
            self.found.append(outcome)
            self.todo.pop(0)
            if outcome.state == FAILED or not goes_on:
                return None
        return f"other parts took all of {self._bounds.total_s:g} s" if self.todo else None

    def leave_the_rest(self, reason: str) -> None:
        """Stop testing. A part that failed once, and cannot be tested again, has failed."""
        if self._first is not None:
            self.found.append(self._first)
            self.todo.pop(0)
        self.found += [PartOutcome(part, UNTRIED, reason, at=self._clock()) for part in self.todo]
        self.todo.clear()

    def _next(self, child: ChildProcess) -> tuple[PartOutcome, bool]:
        """The outcome of the next part, and whether the process can test another one. If not, it is dead."""
        part, began, limit_s = self.todo[0], time.monotonic(), self._left_s(self._bounds.part_s)
        try:
            return PartOutcome.from_dict({**child.channel.receive(limit_s), "part": part}), True
        except TimeoutError:
            enough, why = limit_s == self._bounds.part_s, f"it did not end within {limit_s:.3g} s"
        except ChannelClosed:
            why = f"its process {child.ending()}"
            # Only the kernel (out of memory) or an operator sends SIGKILL here.
            enough = child.status != -signal.SIGKILL
        except (BadFrame, ValueError, TypeError, KeyError) as error:
            enough, why = False, f"its process gave no outcome: {error}"
        child.kill()
        state = FAILED if enough else UNTRIED
        return PartOutcome(part, state, why, round(time.monotonic() - began, 3), self._clock()), False

    def _left_s(self, limit_s: float) -> float:
        return max(0.0, min(limit_s, self._deadline - time.monotonic()))
