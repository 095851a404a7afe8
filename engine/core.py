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

        A runner that raises ends the requests of this step, with what it raised as their error, and no others. An
        interrupt (KeyboardInterrupt) does the same and goes on to the caller; the next step tells of the ends.
        """
        if self._untold is not None:
            emissions, self._untold = self._untold, None
            return emissions
        plan = self.scheduler.schedule(self.clock())
        try:
            result = self.runner.execute(plan) if len(plan.rows) or len(plan.released) else _nothing(plan)
        except BaseException as error:
            emissions = self.scheduler.apply(plan, _all_failed(plan, error))
            if not isinstance(error, Exception):
                self._untold = emissions
                raise
            log.exception("step %d failed as a whole; its %d requests end", plan.step_id, len(plan.rows))
            return emissions
        return self.scheduler.apply(plan, result)


def _nothing(plan: Plan) -> Result:
    return Result(plan.step_id, NO_ROWS, NO_TOKENS)


def _all_failed(plan: Plan, error: BaseException) -> Result:
    message = f"{type(error).__name__}: {error}"
    failures = tuple(Failure(i, message) for i in range(len(plan.rows)))
    return Result(plan.step_id, np.zeros(len(plan.rows), np.int64), NO_TOKENS, failures)
