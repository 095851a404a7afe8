"""The driver's runner, with a team that is interrupted where a test says so: no result is taken twice, or by another step."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from pagetide.cache.block_table import BlockBytes
from pagetide.engine.errors import ShardLost
from pagetide.engine.shards import sharded_runner
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


def test_bytes_from_disk_go_to_each_shard_by_its_part_before_their_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_runner, "_PUT_BYTES", 6)
    data, sent = np.arange(5 * 8, dtype=np.uint8).reshape(5, 8), []
    team = Mock(size=2, post=lambda messages: sent.append(messages) or len(sent))
    runner = ShardedRunner(team, None, [LOADED] * 2)
    assert runner.put_s_per_byte == 0
    runner.begin(replace(plan_of(7), reads=(BlockBytes(np.arange(3, 8, dtype=np.int32), data),)))
    *puts, plans = sent
    assert [pickle.loads(one.plan).reads for one in plans] == [(), ()]
    assert all(one.answers for one in plans), "what one shard cannot put makes all compute"
    assert {put.step_id for of_all in puts for put in of_all} == {7}
    for rank in range(2):
        assert np.concatenate([of_all[rank].read.blocks for of_all in puts]).tolist() == [3, 4, 5, 6, 7]
        assert (np.concatenate([of_all[rank].read.data for of_all in puts]) == data[:, 4 * rank : 4 * rank + 4]).all()
    assert runner.put_s_per_byte > 0


def test_copied_blocks_are_joined_by_rank_and_one_that_fails_keeps_none() -> None:
    team = Mock(size=2)
    team.wait.return_value = [np.zeros((3, 4), np.uint8), np.ones((3, 4), np.uint8)]
    runner = ShardedRunner(team, None, [LOADED] * 2)
    assert runner.copy_blocks(np.array([5, 6, 7], np.int32)).wait().tolist() == [[0] * 4 + [1] * 4] * 3
    assert [message.blocks.tolist() for message in team.post.call_args.args[0]] == [[5, 6, 7]] * 2
    team.wait.return_value = [np.zeros((3, 4), np.uint8), RuntimeError("no memory on the device")]
    with pytest.raises(RuntimeError, match="no memory"):
        runner.copy_blocks(np.array([5], np.int32)).wait()
    assert team.forget.call_count == 2


def test_a_step_that_fails_ends_the_team() -> None:
    team = team_of()
    runner = ShardedRunner(team, ShardedArena(8, 4096, None, [0], 2), [LOADED] * 2)
    team.wait.side_effect = ValueError("the bookkeeping is wrong")
    with pytest.raises(ShardLost, match="a step failed: ValueError: the bookkeeping is wrong"):
        runner.begin(plan_of(1)).wait()
    team.fail.assert_called_once()
