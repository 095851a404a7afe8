"""The engine's core: owns the order of a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from ..scheduler.plan import NO_ROWS, NO_TOKENS, Failure, Plan, Result
from ..scheduler.request import Request
from ..scheduler.scheduler import Emissions, FinishReason, Scheduler
from .runner import Runner

log = logging.getLogger(__name__)


class EngineCore:
    """Scheduler and runner, one step at a time. Not thread-safe: one caller at a time, as `LLM` sees to."""

    def __init__(self, scheduler: Scheduler, runner: Runner, clock: Callable[[], float] = time.monotonic) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
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
        the middle of the bookkeeping ends all requests.
        """
        if self._untold is not None:
            emissions, self._untold = self._untold, None
            return emissions
        try:
            plan = self.scheduler.schedule(self.clock())
            result, trouble = self._execute(plan)
            emissions = self.scheduler.apply(plan, result)
        except BaseException as error:  # half a change may have been made: go on with an empty scheduler
            trouble = error
            self.scheduler, emissions = self.scheduler.renewed(_told(error))
            if isinstance(error, Exception):
                log.exception("the scheduler broke; all %d requests end", len(emissions.finished))
        if trouble is not None and not isinstance(trouble, Exception):
            self._untold = emissions
            raise trouble
        return emissions

    def _execute(self, plan: Plan) -> tuple[Result, BaseException | None]:
        """What the runner makes of `plan`; when it raises, the failure of all its chunks, and what it raised."""
        if not len(plan.rows) and not len(plan.released):
            return Result(plan.step_id, NO_ROWS, NO_TOKENS), None
        try:
            return self.runner.execute(plan), None
        except BaseException as error:
            if isinstance(error, Exception):
                log.exception("step %d failed as a whole; its %d requests end", plan.step_id, len(plan.rows))
            failures = tuple(Failure(i, _told(error)) for i in range(len(plan.rows)))
            return Result(plan.step_id, np.zeros(len(plan.rows), np.int64), NO_TOKENS, failures), error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
