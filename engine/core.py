"""The engine's core: runs each step in order: memory, plan, execution, outputs."""

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
from .errors import ShardLost, is_interrupt
from .memory.engine_memory import EngineMemory

if TYPE_CHECKING:
    from .execution.runner import ModelRunner, PendingStep  # imports torch, which the core does not need
    from .shards.sharded_runner import ShardedRunner, ShardedStep

log = logging.getLogger(__name__)


class EngineCore:
    """Scheduler and runner, one step at a time. Not thread-safe: the request manager serializes calls.

    If the runner `overlaps`, the next decode step is planned and launched before the previous step's result is on the host
    (asynchronous scheduling).
    """

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner | ShardedRunner, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.memory: EngineMemory | None = None  # of an elastic pool
        # Launched, result not applied: at most two.
        self._pending: deque[tuple[Plan, PendingStep | ShardedStep | _KnownResult]] = deque()
        self._unreported: StepOutputs | None = None  # of an interrupted step; the next call returns them

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_work or self.is_ahead or self._unreported is not None

    @property
    def lost(self) -> ShardLost | None:
        """Why nothing can be computed any more; None as long as something can."""
        return self.runner.lost

    @property
    def is_ahead(self) -> bool:
        """Whether a step is pending: between two calls of `step`, one that was launched ahead."""
        return bool(self._pending)

    def add(self, request: Request) -> None:
        """Queue a request. Raises what `Scheduler.add` raises."""
        self.scheduler.add(request)

    def abort(self, request_id: str, reason: FinishReason = "aborted") -> bool:
        """End a request before the next step. The next step's outputs report its end."""
        return self.scheduler.abort(request_id, reason)

    def catch_up(self) -> StepOutputs:
        """As `step`, but launch no step ahead."""
        return self._step(ahead=False)

    def step(self) -> StepOutputs:
        """Plan a step, execute it and return its outputs.

        If the runner raises, the requests of this step end with that error, and no others. An interrupt (`is_interrupt`) there
        does the same, but propagates; the next call returns the ends. An exception in the bookkeeping, or in a step that moves
        memory, ends all requests. So does ShardLost, after which the engine can only be closed.
        """
        return self._step(ahead=True)

    def _step(self, ahead: bool) -> StepOutputs:
        if self._unreported is not None:
            outputs, self._unreported = self._unreported, None
            return outputs
        applied: StepOutputs | None = None
        step_error: BaseException | None = None
        try:
            if not self._pending:
                if self.memory is not None:
                    self.memory.prepare()
                step_error = self._launch(self.scheduler.schedule(self.clock()))
            if ahead and step_error is None and self._may_launch_ahead():
                behind = self.scheduler.schedule_ahead(self.clock())
                step_error = None if behind is None else self._launch(behind)
            plan, result, error = self._wait_for_oldest()
            step_error = step_error or error
            outputs = applied = self.scheduler.apply(plan, result)
            if self.memory is not None and len(result.deferred):
                self.memory.relieve()
            if self._pending and not self.scheduler.num_running:  # all requests of the step ahead have ended
                plan, result, error = self._wait_for_oldest()
                step_error = step_error or error
                finished = outputs.finished + self.scheduler.apply(plan, result).finished
                outputs = applied = replace(outputs, finished=finished)
            if self.memory is not None:
                self.memory.after_step(waited_for=ahead)
        except BaseException as error:  # the scheduler may be half changed: replace it with an empty one
            step_error = self._discard_pending() or error
            self.scheduler, outputs = self.scheduler.rebuilt(_format_error(error), self.runner.mapped_extents)
            if isinstance(error, ShardLost):
                log.error("ending all %d requests: %s", len(outputs.finished), error)
            elif not is_interrupt(error):
                log.exception("the bookkeeping failed; ending all %d requests", len(outputs.finished))
            if applied is not None:  # the step was applied: its outputs and ends are only here
                outputs = replace(applied, finished=applied.finished + outputs.finished)
        if step_error is not None and is_interrupt(step_error):
            self._unreported = outputs
            raise step_error
        return outputs

    def _may_launch_ahead(self) -> bool:
        """Whether runner and memory allow another step behind the pending one; the scheduler may still refuse."""
        return self.runner.overlaps and len(self._pending) == 1 and (self.memory is None or not self.memory.wants_turn)

    def _launch(self, plan: Plan) -> BaseException | None:
        """Launch `plan` on the runner. If the runner raises, all chunks of the plan have failed; returns the error.

        Re-raises the error if the plan moves memory: it is unknown then which of the operations were done.
        """
        if plan.is_empty:
            self._pending.append((plan, _KnownResult(Result(plan.step_id, NO_ROWS, NO_TOKENS))))
            return None
        try:
            self._pending.append((plan, self.runner.begin(plan)))
            return None
        except BaseException as error:
            self._pending.append((plan, _KnownResult(_failed_result(plan, error))))
            return error

    def _wait_for_oldest(self) -> tuple[Plan, Result, BaseException | None]:
        """Wait for the oldest pending plan. Returns the plan, its result and the runner's error, handled as in
        `_launch`."""
        plan, pending = self._pending.popleft()
        try:
            return plan, pending.wait(), None
        except BaseException as error:
            return plan, _failed_result(plan, error), error

    def _discard_pending(self) -> BaseException | None:
        """Wait for all pending steps and drop their results. They must not write to blocks that are reused afterwards.

        Returns an interrupt that arrived during the wait.
        """
        interrupt: BaseException | None = None
        while self._pending:
            try:
                self._pending.popleft()[1].wait()
            except BaseException as error:
                if is_interrupt(error):
                    interrupt = error
                else:
                    log.debug("a discarded step failed", exc_info=error)
        return interrupt


@dataclass(frozen=True, slots=True, eq=False)
class _KnownResult:
    """The known result of a plan that is empty or that the runner could not launch."""

    result: Result

    def wait(self) -> Result:
        return self.result


def _failed_result(plan: Plan, error: BaseException) -> Result:
    """The result of a plan with all chunks failed. Re-raises `error` if it moves memory, or if no plan can run any more."""
    if plan.moves_memory or isinstance(error, ShardLost):
        raise error
    if not is_interrupt(error):
        log.error("step %d failed as a whole; ending its %d requests", plan.step_id, len(plan.rows), exc_info=error)
    failures = tuple(Failure(i, _format_error(error)) for i in range(len(plan.rows)))
    return Result(plan.step_id, np.zeros(len(plan.rows), np.int64), NO_TOKENS, failures)


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
