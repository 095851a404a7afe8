"""How the scheduler behaves, by the numbers: order, budgets, chunks, preemption, limits, aborts."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from fakes import World

from pagetide.allocator.blocks import BlockAllocator
from pagetide.cache.manager import CacheManager
from pagetide.cache.row_tables import RowTables
from pagetide.scheduler.plan import Failure, InvalidCallOrder, Result
from pagetide.scheduler.request import DuplicateRequest, PromptTooLong, RequestRejected
from pagetide.scheduler.scheduler import Scheduler
from pagetide.scheduler.state import Limits


def test_a_sequence_holds_the_blocks_of_its_entries():
    """ceil((prompt + generated - 1) / block_size) after every step, whatever the lengths."""
    world = World(usable=64, block_size=4)
    world.add("a", 6, max_new=20)
    for generated in range(1, 20):
        world.step()
        assert world.used == -(-(6 + generated - 1) // 4)


def test_priorities_then_arrivals():
    world = World(usable=64, max_seqs=1)
    for i, (priority, arrival) in enumerate(zip([2, 1, 1, 0], [1, 3, 2, 4], strict=True)):
        world.add(f"r{i}", 10, max_new=2, priority=priority, arrival=float(arrival))
    world.run()
    assert world.started == ["r3", "r2", "r1", "r0"]


def test_waiting_does_not_push_out_who_runs():
    world = World(usable=64, max_seqs=1)
    world.add("low", 10, max_new=5, priority=5)
    world.step()
    world.add("high", 10, max_new=5, priority=0)
    world.run()
    assert world.started == ["low", "high"]
    assert world.scheduler.stats.preemptions == 0


def test_budgets_hold_in_every_step():
    world = World(usable=120, max_seqs=12, max_step_tokens=96)
    rng = np.random.default_rng(44)
    for n in range(600):
        if world.scheduler.num_waiting < 8:
            length, new = int(rng.integers(1, 200)), int(rng.integers(1, 30))
            world.add(f"r{n}", length, max_new=new, arrival=float(n), priority=int(rng.integers(3)))
        decoding = set(world.scheduler.state.decoding.tolist())
        preempted = world.scheduler.stats.preemptions
        plan = world.schedule()
        assert plan.num_tokens <= 96
        assert world.scheduler.num_running <= 12
        assert len(plan.rows) > 0, "an idle step"
        if world.scheduler.stats.preemptions == preempted:
            assert decoding <= set(plan.rows.tolist()), "a decode was left out"
        world.finish(plan)
    world.complete()


@pytest.mark.parametrize(("waiting", "length", "admitted"), [(5, 32, 4), (3, 48, 2)])
def test_cumulative_fit(waiting, length, admitted):
    world = World(usable=8)
    for i in range(waiting):
        world.add(f"r{i}", length, max_new=1)
    assert len(world.schedule().admitted) == admitted


def test_shares_of_a_step():
    world = World(usable=200, max_step_tokens=1024, max_chunk_tokens=400)
    for i in range(3):
        world.add(f"r{i}", 800, max_new=4, arrival=float(i))
    shares = []
    for _ in range(3):
        plan = world.schedule()
        shares.append(world.lengths(plan))
        world.finish(plan)
    assert shares == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]


def test_context_limit_cuts_and_exactly_equal_works():
    world = World(usable=20, max_model_len=64)
    world.add("cut", 60, max_new=10)
    world.add("equal", 60, max_new=4)
    with pytest.raises(PromptTooLong, match="may have 63 at most"):
        world.add("full", 64)
    world.run()
    assert len(world.finished["cut"].token_ids) == len(world.finished["equal"].token_ids) == 4
    assert world.finished["cut"].reason == "length"


def test_a_broken_scheduler_is_renewed_and_tells_every_end():
    world = World(usable=40)
    for name in "abc":
        world.add(name, 20, max_new=12)
    for _ in range(3):
        world.step()
    world.add("late", 10)
    world.scheduler.rows.assign = None  # breaks the next admission, half way
    with pytest.raises(TypeError):
        world.scheduler.schedule()
    fresh, emissions = world.scheduler.rebuilt("TypeError: broke")
    assert {(end.request_id, end.reason, len(end.token_ids)) for end in emissions.finished} == {
        ("a", "error", 3), ("b", "error", 3), ("c", "error", 3), ("late", "error", 0)
    }  # fmt: skip
    fresh.check_invariants()
    assert (fresh.num_running, fresh.num_waiting, fresh.cache.pool.counts().live) == (0, 0, 0)
    assert fresh.stats.steps == 3


def test_misuse_is_loud_and_changes_nothing():
    """J 71."""
    world = World(usable=8)
    world.add("a", 10)
    with pytest.raises(DuplicateRequest):
        world.add("a", 10)
    with pytest.raises(RequestRejected, match="empty"):
        world.add("none", 0)
    plan = world.schedule()
    with pytest.raises(InvalidCallOrder):
        world.scheduler.schedule()
    with pytest.raises(InvalidCallOrder):
        world.scheduler.apply(plan, Result(plan.step_id + 1, np.ones(1, np.int32), np.ones(1, np.int32)))
    with pytest.raises(InvalidCallOrder, match="one token was due"):
        world.scheduler.apply(plan, Result(plan.step_id, np.zeros(1, np.int32), np.empty(0, np.int32)))
    world.finish(plan)
    world.complete()


@pytest.mark.parametrize("bad", [{"max_seqs": 0}, {"max_step_tokens": 0}, {"max_model_len": 0}, {"max_chunk_tokens": 0}])
def test_limits_are_checked(bad):
    good = {"max_seqs": 4, "max_step_tokens": 64, "max_model_len": 100}
    with pytest.raises(ValueError, match=next(iter(bad)).split("_")[1]):
        Limits(**(good | bad))


def test_arrays_of_a_plan_are_not_written_again():
    world = World(usable=20, block_size=4, max_chunk_tokens=5)
    for i in range(6):
        world.add(f"r{i}", 7 + i, max_new=15, arrival=float(i))
    kept = []
    while world.scheduler.has_work:
        plan = world.schedule()
        kept.append((plan, pickle.dumps(plan)))
        world.finish(plan)
    assert all(pickle.dumps(plan) == before for plan, before in kept)


def test_an_idle_scheduler_plans_nothing():
    scheduler = Scheduler(CacheManager(RowTables(BlockAllocator(4), 16, 2, 64)), Limits(2, 64, 64))
    plan = scheduler.schedule()
    assert len(plan.rows) == 0
    assert scheduler.apply(plan, Result(plan.step_id, plan.rows, plan.rows)).finished == ()
    assert Failure(0, "x").index == 0


def test_only_ends_of_its_own_teach_the_forecast():
    world = World(64, block_size=4, max_seqs=1)
    for name in "ab":
        world.add(name, 10, max_new=9)
    world.step()
    state, forecast = world.scheduler.state, world.scheduler.state.forecast
    state.end(state.by_id["b"], "error", "broke")
    assert forecast._num_ended == 0
    state.end(state.by_id["a"], "stop")
    assert forecast._num_ended == 1


def test_a_failure_of_all_keeps_the_ends_that_were_not_reported():
    world = World(64, block_size=4, max_seqs=1)
    for name in "ab":
        world.add(name, 10, max_new=9)
    world.step()
    state = world.scheduler.state
    state.end(state.by_id["b"], "aborted")
    told = {end.request_id: (end.reason, end.error, len(end.token_ids)) for end in state.failed("broke")}
    assert told == {"b": ("aborted", None, 0), "a": ("error", "broke", 1)}
    assert len(state.by_id) == 1 and len(state.finished) == 1, "nothing changed"
