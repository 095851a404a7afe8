"""The engine's core: owns the order of a step: memory, plan, execution, what came out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..scheduler.outcome import Emissions
from ..scheduler.plan import NO_ROWS, NO_TOKENS, Failure, Plan, Result
from ..scheduler.request import Request
from ..scheduler.scheduler import Scheduler
from ..scheduler.sequence import FinishReason
from .memory import EngineMemory

if TYPE_CHECKING:
    from .runner import Runner  # which loads torch; the core has no need of it

log = logging.getLogger(__name__)


class EngineCore:
    """Scheduler and runner, one step at a time. Not thread-safe: one caller at a time, as `LLM` sees to."""

    def __init__(self, scheduler: Scheduler, runner: Runner, clock: Callable[[], float] = time.monotonic) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.memory: EngineMemory | None = None  # of an elastic pool
        self._untold: Emissions | None = None  # of a step that an interrupt ended

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self.scheduler.has_work or self._untold is not None

    def add(self, request: Request) -> None:
        """Queue a request. Raises what `Scheduler.add` raises."""
        self.scheduler.add(request)

    def abort(self, request_id: str, reason: FinishReason = "aborted") -> bool:
        """End a request before the next step; its end comes with the next emissions."""
        return self.scheduler.abort(request_id, reason)

    def step(self) -> Emissions:
        """Decide a step, run it, take in what came out.

        A runner that raises ends the requests of this step, with what it raised as their error, and no others. So does an
        interrupt (KeyboardInterrupt) there; it goes on to the caller, and the next step tells of the ends. What comes in
        the middle of the bookkeeping, or of a step that moves memory, ends all requests.
        """
        if self._untold is not None:
            emissions, self._untold = self._untold, None
            return emissions
        told: Emissions | None = None
        try:
            if self.memory is not None:
                self.memory.prepare()
            plan = self.scheduler.schedule(self.clock())
            result, trouble = self._execute(plan)
            emissions = told = self.scheduler.apply(plan, result)
            if self.memory is not None:
                self.memory.settle()
        except BaseException as error:  # half a change may have been made: go on with an empty scheduler
            trouble = error
            self.scheduler, emissions = self.scheduler.renewed(_told(error), self.runner.mapped_extents)
            if isinstance(error, Exception):
                log.exception("the bookkeeping broke; all %d requests end", len(emissions.finished))
            if told is not None:  # the step itself was done: the scheduler knows no more of what it gave and who ended
                emissions = replace(told, finished=told.finished + emissions.finished)
        if trouble is not None and not isinstance(trouble, Exception):
            self._untold = emissions
            raise trouble
        return emissions

    def _execute(self, plan: Plan) -> tuple[Result, BaseException | None]:
        """What the runner makes of `plan`; when it raises, the failure of all its chunks, and what it raised.

        Raises it on where the plan copies blocks or resizes the pool: nobody knows then which of it was done.
        """
        if plan.is_empty:
            return Result(plan.step_id, NO_ROWS, NO_TOKENS), None
        try:
            return self.runner.execute(plan), None
        except BaseException as error:
            if plan.moves_memory:
                raise
            if isinstance(error, Exception):
                log.exception("step %d failed as a whole; its %d requests end", plan.step_id, len(plan.rows))
            failures = tuple(Failure(i, _told(error)) for i in range(len(plan.rows)))
            return Result(plan.step_id, np.zeros(len(plan.rows), np.int64), NO_TOKENS, failures), error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
