"""The engine's core: owns the order of a step: memory, plan, execution, what came out."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..scheduler.outcome import StepOutputs
from ..scheduler.plan import NO_ROWS, NO_TOKENS, Failure, Plan, Result
from ..scheduler.request import Request
from ..scheduler.scheduler import Scheduler
from ..scheduler.sequence import FinishReason
from .errors import is_interrupt
from .memory.engine_memory import EngineMemory

if TYPE_CHECKING:
    from .execution.runner import ModelRunner, PendingStep  # which loads torch; the core has no need of it

log = logging.getLogger(__name__)


class EngineCore:
    """Scheduler and runner, one step at a time. Not thread-safe: one caller at a time, as `LLM` sees to.

    Where the runner `overlaps`, and a step is but the continuation of the one before it, it is planned and begun before the
    result of that one is here: the device goes on while the host takes in what came out.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, clock: Callable[[], float] = time.monotonic) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.memory: EngineMemory | None = None  # of an elastic pool
        self._out: deque[tuple[Plan, PendingStep | _Known]] = deque()  # begun, and not taken in: at most two
        self._untold: StepOutputs | None = None  # of a step that an interrupt ended

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self.scheduler.has_work or self.is_ahead or self._untold is not None

    @property
    def is_ahead(self) -> bool:
        """Whether a step has begun that is not taken in: between two calls of `step`, one that continues the last one."""
        return bool(self._out)

    def add(self, request: Request) -> None:
        """Queue a request. Raises what `Scheduler.add` raises."""
        self.scheduler.add(request)

    def abort(self, request_id: str, reason: FinishReason = "aborted") -> bool:
        """End a request before the next step; its end comes with the next emissions."""
        return self.scheduler.abort(request_id, reason)

    def catch_up(self) -> StepOutputs:
        """As `step`, and nothing is under way at the end: for those who want nothing of the step, but that it is over."""
        return self._step(ahead=False)

    def step(self) -> StepOutputs:
        """Decide a step, run it, take in what came out.

        A runner that raises ends the requests of this step, with what it raised as their error, and no others. So does an
        interrupt (`is_interrupt`) there; it goes on to the caller, and the next step tells of the ends. What comes in
        the middle of the bookkeeping, or of a step that moves memory, ends all requests.
        """
        return self._step(ahead=True)

    def _step(self, ahead: bool) -> StepOutputs:
        if self._untold is not None:
            emissions, self._untold = self._untold, None
            return emissions
        told: StepOutputs | None = None
        trouble: BaseException | None = None
        try:
            if not self._out:
                if self.memory is not None:
                    self.memory.prepare()
                trouble = self._begin(self.scheduler.schedule(self.clock()))
            if ahead and trouble is None and self._may_go_ahead():
                behind = self.scheduler.schedule_ahead(self.clock())
                trouble = None if behind is None else self._begin(behind)
            plan, result, error = self._take_in()
            trouble = trouble or error
            emissions = told = self.scheduler.apply(plan, result)
            if self.memory is not None and len(result.deferred):
                self.memory.relieve()
            if self._out and not self.scheduler.num_running:  # what goes on is of those alone who ended
                plan, result, error = self._take_in()
                trouble = trouble or error
                finished = emissions.finished + self.scheduler.apply(plan, result).finished
                emissions = told = replace(emissions, finished=finished)
            if self.memory is not None:
                self.memory.settle(waited_for=ahead)
        except BaseException as error:  # half a change may have been made: go on with an empty scheduler
            trouble = self._wait_for_all() or error
            self.scheduler, emissions = self.scheduler.rebuilt(_format_error(error), self.runner.mapped_extents)
            if not is_interrupt(error):
                log.exception("the bookkeeping broke; all %d requests end", len(emissions.finished))
            if told is not None:  # the step itself was done: the scheduler knows no more of what it gave and who ended
                emissions = replace(told, finished=told.finished + emissions.finished)
        if trouble is not None and is_interrupt(trouble):
            self._untold = emissions
            raise trouble
        return emissions

    def _may_go_ahead(self) -> bool:
        """Whether nobody but the scheduler could have something against another step behind the one that is under way."""
        return self.runner.overlaps and len(self._out) == 1 and (self.memory is None or not self.memory.wants_turn)

    def _begin(self, plan: Plan) -> BaseException | None:
        """Have the runner begin `plan`. When it raises, all its chunks have failed; returns what it raised.

        Raises it on where the plan copies blocks or resizes the pool: nobody knows then which of it was done.
        """
        if plan.is_empty:
            self._out.append((plan, _Known(Result(plan.step_id, NO_ROWS, NO_TOKENS))))
            return None
        try:
            self._out.append((plan, self.runner.begin(plan)))
            return None
        except BaseException as error:
            self._out.append((plan, _Known(_failure(plan, error))))
            return error

    def _take_in(self) -> tuple[Plan, Result, BaseException | None]:
        """The oldest plan that is out, what came of it, and what the runner raised meanwhile, as `_begin` has it."""
        plan, underway = self._out.popleft()
        try:
            return plan, underway.wait(), None
        except BaseException as error:
            return plan, _failure(plan, error), error

    def _wait_for_all(self) -> BaseException | None:
        """Let what is under way end, whatever comes of it: nothing may be written after it that is another's then. Returns an
        interrupt that came meanwhile.
        """
        interrupt: BaseException | None = None
        while self._out:
            try:
                self._out.popleft()[1].wait()
            except BaseException as error:
                if is_interrupt(error):
                    interrupt = error
                else:
                    log.debug("a step that nobody wants any more failed", exc_info=error)
        return interrupt


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """The result of a plan that the runner has nothing to do with, or could not begin."""

    result: Result

    def wait(self) -> Result:
        return self.result


def _failure(plan: Plan, error: BaseException) -> Result:
    """All chunks of `plan` failed. Raises `error` on where it moves memory."""
    if plan.moves_memory:
        raise error
    if not is_interrupt(error):
        log.error("step %d failed as a whole; its %d requests end", plan.step_id, len(plan.rows), exc_info=error)
    failures = tuple(Failure(i, _format_error(error)) for i in range(len(plan.rows)))
    return Result(plan.step_id, np.zeros(len(plan.rows), np.int64), NO_TOKENS, failures)


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
