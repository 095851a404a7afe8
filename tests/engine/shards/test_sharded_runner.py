"""The driver's runner, with a team that is interrupted where a test says so: no result is taken twice, or by another step."""

from __future__ import annotations

import pickle
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from pagetide.engine.errors import ShardLost
from pagetide.engine.shards.messages import PlanDone, ShardLoaded
from pagetide.engine.shards.sharded_arena import ShardedArena
from pagetide.engine.shards.sharded_runner import ShardedRunner
from pagetide.scheduler.plan import NO_ROWS, NO_TOKENS, Plan, Resize, Result

LOADED = ShardLoaded("torch", False, False, (), True, 0, None, "none")


def team_of() -> Any:
    """A stand-in that answers every plan at once."""
    posted: list[Plan] = []

    def answer(number: int, ranks: range) -> list[PlanDone]:
        plan = posted[number]
        done = Result(plan.step_id, NO_ROWS, NO_TOKENS, mapped=plan.resize.map, unmapped=plan.resize.unmap)
        return [PlanDone(done) for _ in ranks]

    team = Mock(size=2, lost=None, fail=Mock(side_effect=lambda why: ShardLost(why)))
    team.post = lambda messages: posted.append(pickle.loads(messages[0].plan)) or len(posted) - 1
    team.wait.side_effect = answer
    return team


def plan_of(step_id: int, maps: list[int] | None = None) -> Plan:
    none = np.empty(0, np.int64)
    return Plan(step_id, none, none, none, np.empty(0, np.bool_), resize=Resize(np.array(maps or [], np.int64), none))


def test_a_step_that_fails_ends_the_team() -> None:
    team = team_of()
    runner = ShardedRunner(team, ShardedArena(8, 4096, None, [0], 2), [LOADED] * 2)
    team.wait.side_effect = ValueError("the bookkeeping is wrong")
    with pytest.raises(ShardLost, match="a step failed: ValueError: the bookkeeping is wrong"):
        runner.begin(plan_of(1)).wait()
    team.fail.assert_called_once()
