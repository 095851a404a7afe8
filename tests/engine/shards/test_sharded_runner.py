"""The driver's runner, with a team that is interrupted where a test says so: no result is taken twice, or by another step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagetide.engine.errors import ShardLost
from pagetide.engine.shards.messages import PlanDone, ShardLoaded
from pagetide.engine.shards.sharded_arena import ShardedArena
from pagetide.engine.shards.sharded_runner import ShardedRunner
from pagetide.scheduler.plan import NO_ROWS, NO_TOKENS, Plan, Resize, Result

LOADED = ShardLoaded("torch", False, False, (), True, 0, None, "none")


class InterruptedTeam:
    """Answers every plan at once; `wait` and `forget` are interrupted as often as said."""

    size = 2

    class plans:
        @staticmethod
        def write(plan: Plan) -> tuple[Plan, dict[int, bytes]]:
            return plan, {}

    def __init__(self) -> None:
        self.lost: ShardLost | None = None
        self.plan_of: dict[int, Plan] = {}
        self.interrupts = {"wait": 0, "forget": 0}
        self.fails = False

    def post(self, messages: list[Any]) -> int:
        self.plan_of[len(self.plan_of)] = messages[0].place
        return len(self.plan_of) - 1

    def wait(self, number: int, ranks: range) -> list[PlanDone]:
        self._interrupt("wait")
        if self.fails:
            raise ValueError("the books are wrong")
        plan = self.plan_of[number]
        done = Result(plan.step_id, NO_ROWS, NO_TOKENS, mapped=plan.resize.map, unmapped=plan.resize.unmap)
        return [PlanDone(done) for _ in ranks]

    def forget(self, number: int) -> None:
        self._interrupt("forget")

    def fail(self, why: str) -> ShardLost:
        self.lost = ShardLost(why)
        return self.lost

    def _interrupt(self, where: str) -> None:
        if self.interrupts[where]:
            self.interrupts[where] -= 1
            raise KeyboardInterrupt


def plan_of(step_id: int, maps: list[int] | None = None) -> Plan:
    none = np.empty(0, np.int64)
    return Plan(step_id, none, none, none, np.empty(0, np.bool_), resize=Resize(np.array(maps or [], np.int64), none))


@pytest.mark.parametrize("where", ["wait", "forget"])
def test_an_interrupted_wait_is_made_up_before_the_next_plan(where: str) -> None:
    team: Any = InterruptedTeam()
    runner = ShardedRunner(team, ShardedArena(8, 4096, None, [0], 2), [LOADED] * 2)
    step = runner.begin(plan_of(1, [1, 2]))
    team.interrupts[where] = 1
    with pytest.raises(KeyboardInterrupt):
        step.wait()
    assert runner.mapped_extents == {0, 1, 2}
    assert runner.begin(plan_of(2)).wait().step_id == 2


def test_a_step_that_was_interrupted_before_its_wait_holds_up_no_other() -> None:
    team: Any = InterruptedTeam()
    runner = ShardedRunner(team, ShardedArena(8, 4096, None, [0], 2), [LOADED] * 2)
    runner.begin(plan_of(1, [3]))
    assert runner.begin(plan_of(2)).wait().step_id == 2
    assert runner.mapped_extents == {0, 3}


def test_a_step_that_fails_ends_the_team() -> None:
    team: Any = InterruptedTeam()
    runner = ShardedRunner(team, ShardedArena(8, 4096, None, [0], 2), [LOADED] * 2)
    team.fails = True
    with pytest.raises(ShardLost, match="a step failed: ValueError: the books are wrong"):
        runner.begin(plan_of(1)).wait()
    assert runner.lost is team.lost is not None
