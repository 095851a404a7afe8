"""The engine's steps observed from outside: when each ended, the host's time, and the device's time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pagetide import LLM

HOST = ("schedule", "begin", "apply")


@dataclass(frozen=True, slots=True)
class Step:
    """One return of `EngineCore.step`."""

    took_s: float  # since the one before it returned; of the first one, since it was called
    tokens: int  # that it told
    host_s: tuple[float, ...]  # spent in each of HOST; of plans that are begun ahead partly for the next step
    device_s: float  # of the plan that it took in, as the device counts
    ahead: bool  # that plan was begun before the one before it was taken in


@dataclass
class Steps:
    """What was seen so far. Grows while the engine is watched."""

    all: list[Step] = field(default_factory=list)

    def full(self, rows: int) -> list[Step]:
        """Those that gave `rows` tokens, and followed one that did."""
        return [step for last, step in itertools.pairwise(self.all) if last.tokens == step.tokens == rows]


@contextmanager
def watched(llm: LLM) -> Iterator[Steps]:
    """Note every step of the engine."""
    with llm.locked_engine() as engine:
        core: Any = engine.core
    scheduler, runner = core.scheduler, core.runner
    steps, spent, planned_ahead = Steps(), dict.fromkeys(HOST, 0.0), set[int]()
    took_in: list[tuple[float, bool]] = []  # by the step that is made
    ended: float | None = None

    def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*given)
            finally:
                spent[part] += time.perf_counter() - began

        return run

    schedule_ahead, apply = timed("schedule", scheduler.schedule_ahead), timed("apply", scheduler.apply)

    def noted_ahead() -> Any:
        plan = schedule_ahead()
        if plan is not None:
            planned_ahead.add(plan.step_id)
        return plan

    def noted_apply(plan: Any, result: Any) -> Any:
        took_in.append((result.compute_s, plan.step_id in planned_ahead))
        return apply(plan, result)

    def noted(step: Callable[[bool], Any]) -> Callable[[bool], Any]:
        def run(ahead: bool = True) -> Any:
            nonlocal ended
            took_in.clear()
            spent.update(dict.fromkeys(HOST, 0.0))
            began = time.perf_counter()
            emissions = step(ahead)
            now = time.perf_counter()
            device_s, ahead = took_in[0] if took_in else (0.0, False)
            since = began if ended is None else ended
            steps.all.append(Step(now - since, len(emissions.tokens), tuple(spent.values()), device_s, ahead))
            ended = now
            return emissions

        return run

    core.step = noted(core.step)
    scheduler.schedule = timed("schedule", scheduler.schedule)
    scheduler.schedule_ahead, scheduler.apply = noted_ahead, noted_apply
    runner.begin = timed("begin", runner.begin)
    try:
        yield steps
    finally:
        del core.step, scheduler.schedule, scheduler.schedule_ahead, scheduler.apply, runner.begin
