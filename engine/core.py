"""The engine's core: runs each step in order: memory, plan, execution, outputs."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..scheduler.outcome import StepOutputs
from ..scheduler.plan import NO_ROWS, NO_TOKENS, Failure, Plan, Result
from ..scheduler.request import FinishReason, Request
from ..scheduler.scheduler import Scheduler
from .errors import Attempt, EngineError, ShardLost, format_error
from .memory.engine_memory import EngineMemory

if TYPE_CHECKING:
    from .execution.disk_tier import DiskTier
    from .execution.runner import ModelRunner, PendingStep  # imports torch, which the core does not need
    from .shards.sharded_runner import ShardedRunner, ShardedStep

log = logging.getLogger(__name__)

DISK_WAIT_S = 0.005  # of a step with nothing to do but wait for the disk


class EngineCore:
    """Scheduler and runner, one step at a time. Not thread-safe: the engine's thread calls it.

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
        self.disk: DiskTier | None = None
        # Launched, result not applied: at most two. A result is there already of a plan that is empty, or failed to launch.
        self._pending: deque[tuple[Plan, PendingStep | ShardedStep | Result]] = deque()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_work or self.is_ahead or (self.disk is not None and self.disk.is_behind)

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

    def step(self, ahead: bool = True) -> StepOutputs:
        """Plan a step, execute it and return its outputs; with `ahead` the next one may be launched too.

        If the runner raises, the requests of this step end with that error, and no others. An exception in the bookkeeping, or
        in a step that moves memory, ends all requests. So does ShardLost, after which the engine can only be closed.
        """
        outputs: StepOutputs | None = None
        try:
            if not self._pending:
                if self.memory is not None:
                    self.memory.prepare()
                self._launch(self.scheduler.schedule(self.clock()))
            if ahead:
                self._launch_ahead()
            outputs = self._complete()
            if self._pending and not self.scheduler.num_running:  # all requests of the step ahead have ended
                outputs = replace(outputs, finished=outputs.finished + self._complete().finished)
            if self.memory is not None:
                self.memory.after_step(waited_for=ahead)
            if self.disk is not None:
                # ends are delivered before it: another step follows
                self.save(self.disk, is_idle=not (outputs.finished or self.scheduler.num_running or self.scheduler.num_waiting))
            return outputs
        except Exception as error:
            return self._fail(error, outputs)

    def save(self, disk: DiskTier, *, is_idle: bool) -> None:
        """Begin to write to `disk` what the prefix cache came to hold, as `DiskTier.save`; a fault ends its use alone. A step
        with nothing else to do waits for a write that takes the room for the next one.
        """
        with Attempt() as attempt:
            disk.save(self.scheduler.cache, is_idle)
            if is_idle and disk.is_behind and not (self.scheduler.has_work or self._pending):
                disk.wait(DISK_WAIT_S)
        if attempt.error is not None:
            log.error("the disk tier failed, and is not used any more", exc_info=attempt.error)
            self.disk = self.scheduler.cache.disk = None

    def _launch_ahead(self) -> None:
        """Launch the next decode step before the pending one's result is on the host, if it only continues that one."""
        if not self.runner.overlaps or len(self._pending) > 1 or (self.memory is not None and self.memory.wants_turn):
            return
        if (behind := self.scheduler.schedule_ahead()) is not None:
            self._launch(behind)

    def _complete(self) -> StepOutputs:
        """Wait for the oldest pending step, and apply its result."""
        plan, pending = self._pending.popleft()
        result: Result | None = None
        with Attempt() as attempt:
            result = pending if isinstance(pending, Result) else pending.wait()
        result = result or _failed_result(plan, attempt)
        outputs = self.scheduler.apply(plan, result)
        if self.memory is not None and len(result.deferred):
            self.memory.relieve()
        return outputs

    def _launch(self, plan: Plan) -> None:
        """Launch `plan` on the runner. If the runner raises, all chunks of the plan have failed."""
        pending: PendingStep | ShardedStep | Result = Result(plan.step_id, NO_ROWS, NO_TOKENS)
        with Attempt() as attempt:
            if not plan.is_empty:
                pending = self.runner.begin(plan)
        if attempt.error is not None:
            pending = _failed_result(plan, attempt)
        self._pending.append((plan, pending))

    def _fail(self, error: Exception, outputs: StepOutputs | None) -> StepOutputs:
        """End all requests with `error`: the scheduler may be half changed, and is replaced by an empty one.

        Returns their ends, behind the `outputs` of the step if its result was applied before.
        """
        while self._pending:  # these must not write to blocks that are reused afterwards
            _, pending = self._pending.popleft()
            with Attempt() as attempt:
                if not isinstance(pending, Result):
                    pending.wait()
            if attempt.error is not None:
                log.debug("a discarded step failed", exc_info=attempt.error)
        self.scheduler, ends = self.scheduler.rebuilt(format_error(error), self.runner.mapped_extents)
        if isinstance(error, ShardLost):
            log.error("ending all %d requests: %s", len(ends.finished), error)
        else:
            log.error("the bookkeeping failed; ending all %d requests", len(ends.finished), exc_info=error)
        return ends if outputs is None else replace(outputs, finished=outputs.finished + ends.finished)


def _failed_result(plan: Plan, attempt: Attempt) -> Result:
    """The result of a plan with all chunks failed. Raises if it moves memory: which operations were done is unknown. Raises
    ShardLost: no plan can run any more.
    """
    error = attempt.error
    assert error is not None
    if isinstance(error, ShardLost):
        raise error
    if plan.moves_memory:
        raise error if isinstance(error, Exception) else EngineError(format_error(error))
    log.error("step %d failed as a whole; ending its %d requests", plan.step_id, len(plan.rows), exc_info=error)
    failures = tuple(Failure(i, format_error(error)) for i in range(len(plan.rows)))
    return Result(plan.step_id, np.zeros(len(plan.rows), np.int64), NO_TOKENS, failures)
