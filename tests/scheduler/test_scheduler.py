"""How the scheduler behaves, by the numbers: order, budgets, chunks, preemption, limits, aborts."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from fakes import World, continuation

from pagetide.cache.manager import CacheManager
from pagetide.scheduler.errors import DuplicateRequest, InvalidCallOrder, PromptTooLong, RequestRejected
from pagetide.scheduler.plan import Failure, Result
from pagetide.scheduler.request import Request, Sampling
from pagetide.scheduler.scheduler import Limits, Scheduler

# -- blocks (scenarios A) ----------------------------------------------------------------------------------------------


def test_blocks_grow_by_need():
    world = World(usable=64)
    world.add("a", 50, max_new=40)
    world.step()
    assert world.used == 4
    while world.scheduler.rows.computed[0] < 64:
        world.step()
        assert world.used == 4
    world.step()
    assert world.used == 5
    world.run()
    assert world.used == 0
    world.check_outputs()


def test_a_sequence_holds_the_blocks_of_its_entries():
    """ceil((prompt + generated - 1) / block_size) after every step, whatever the lengths."""
    world = World(usable=64, block_size=4)
    world.add("a", 6, max_new=20)
    for generated in range(1, 20):
        world.step()
        assert world.used == -(-(6 + generated - 1) // 4)


# -- order and budgets (E) ---------------------------------------------------------------------------------------------


def test_start_order_is_arrival_order():
    world = World(usable=64, max_seqs=4)
    for i in range(10):
        world.add(f"r{i}", 20, max_new=3 + i % 4, arrival=float(i))
    world.run()
    assert world.started == [f"r{i}" for i in range(10)]
    world.check_outputs()


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


def test_budgets_hold_for_2000_steps():
    world = World(usable=120, max_seqs=12, max_step_tokens=96)
    rng = np.random.default_rng(44)
    for n in range(2000):
        if world.scheduler.num_waiting < 8:
            length, new = int(rng.integers(1, 200)), int(rng.integers(1, 30))
            world.add(f"r{n}", length, max_new=new, arrival=float(n), priority=int(rng.integers(3)))
        decoding = set(world.scheduler._running.decoding.tolist())
        preempted = world.scheduler.stats.preemptions
        plan = world.schedule()
        assert plan.num_tokens <= 96
        assert world.scheduler.num_running <= 12
        assert len(plan.rows) > 0, "an idle step"
        if world.scheduler.stats.preemptions == preempted:
            assert decoding <= set(plan.rows.tolist()), "a decode was left out"
        world.finish(plan)
    world.run()
    world.check_outputs()
    world.check_empty()


@pytest.mark.parametrize(("waiting", "length", "admitted"), [(5, 32, 4), (3, 48, 2)])
def test_cumulative_fit(waiting, length, admitted):
    world = World(usable=8)
    for i in range(waiting):
        world.add(f"r{i}", length, max_new=1)
    assert len(world.schedule().admitted) == admitted


# -- chunks (F) --------------------------------------------------------------------------------------------------------


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


def test_no_token_before_the_prompt_is_done():
    world = World(usable=8, max_chunk_tokens=7, max_seqs=2)
    world.add("a", 50, max_new=1)
    for _ in range(7):
        assert world.step().tokens == []
    emissions = world.step()
    assert len(emissions.tokens) == 1
    assert emissions.finished[0].reason == "length"
    world.check_empty()
    world.check_outputs()


def test_decodes_go_on_beside_a_long_prompt():
    world = World(usable=1000, max_step_tokens=64)
    for i in range(8):
        world.add(f"d{i}", 5, max_new=400)
    world.step()
    world.step()
    world.add("long", 50 * 56, max_new=1)
    for _ in range(50):
        emissions = world.step()
        assert {f"d{i}" for i in range(8)} <= set(emissions.request_ids)
    assert "long" in world.finished


# -- preemption (C) ----------------------------------------------------------------------------------------------------


def test_the_younger_is_the_victim():
    world = World(usable=8)
    world.add("a", 50, max_new=60, arrival=0.0)
    world.add("b", 50, max_new=60, arrival=1.0)
    world.add("c", 10, max_new=5, arrival=2.0)  # does not fit yet
    while world.scheduler.stats.preemptions == 0:
        world.step()
    assert world.scheduler.stats.preemptions == 1
    assert world.scheduler.waiting_ids == ["b", "c"]
    assert world.used == 5, "a has its block in the same step"
    generated = len(world.emitted["b"])
    assert generated > 0
    world.run()
    assert len(world.finished["b"].token_ids) == 60
    assert world.finished["b"].num_preemptions >= 1
    world.check_outputs()
    world.check_empty()


def test_a_lower_priority_is_the_victim_even_if_older():
    world = World(usable=8)
    world.add("old", 50, max_new=60, arrival=0.0, priority=1)
    world.add("young", 50, max_new=60, arrival=1.0, priority=0)
    while world.scheduler.stats.preemptions == 0:
        world.step()
    assert world.scheduler.waiting_ids == ["old"]


def test_same_output_under_pressure():
    """C 28: in 40 % of what all need together."""
    lengths = [(5 + i % 9, 30 - i % 5) for i in range(24)]
    world = World(int(0.4 * sum(-(-(prompt + new - 1) // 4) for prompt, new in lengths)), block_size=4)
    for i, (prompt, new) in enumerate(lengths):
        world.add(f"r{i}", prompt, max_new=new, arrival=float(i))
    world.run()
    assert world.scheduler.stats.preemptions > 0
    assert world.scheduler.stats.recomputed_tokens > 0
    world.check_outputs()
    world.check_empty()


@pytest.mark.parametrize(
    "max_new", [512, *(pytest.param(n, marks=pytest.mark.stress) for n in (400, 10**4, 2**31 - 1))]
)
def test_no_storm_of_requests_that_run_to_the_context(max_new):
    """The forecast counts what a request can really come to, not what it was allowed."""
    world = World(usable=400, max_model_len=512, max_seqs=200, max_step_tokens=4096, forecast=True)
    for i in range(100):
        world.add(f"r{i}", 100 + i % 40, max_new=max_new, arrival=float(i))
    world.run()
    often = [end.num_preemptions for end in world.finished.values()]
    assert max(often) <= 5
    assert sum(n > 1 for n in often) <= 10
    assert world.scheduler.stats.recomputed_tokens < 0.2 * world.scheduler.stats.computed_tokens
    world.check_empty()


# -- limits (G) --------------------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_with_numbers():
    world = World(usable=4)
    with pytest.raises(PromptTooLong, match=r"65 tokens need 5 blocks .* has 4"):
        world.add("big", 65)
    assert not world.scheduler.has_work
    world.add("small", 10, max_new=2)
    world.run()
    world.check_outputs()


@pytest.mark.parametrize(("length", "served"), [(63, True), (64, True), (65, False)])
def test_edge_of_the_pool(length, served):
    world = World(usable=4)
    if not served:
        with pytest.raises(PromptTooLong):
            world.add("a", length, max_new=1)
        return
    world.add("a", length, max_new=1)
    world.run()
    assert len(world.finished["a"].token_ids) == 1
    assert world.scheduler.stats.preemptions == 0


def test_outgrows_the_pool():
    world = World(usable=4)
    world.add("a", 56, max_new=24)
    world.run()
    end = world.finished["a"]
    assert (end.reason, len(end.token_ids)) == ("length", 9)
    roomy = World(usable=5)
    roomy.add("a", 56, max_new=24)
    roomy.run()
    assert len(roomy.finished["a"].token_ids) == 24
    roomy.check_outputs()


def test_context_limit_cuts_and_exactly_equal_works():
    world = World(usable=20, max_model_len=64)
    world.add("cut", 60, max_new=10)
    world.add("equal", 60, max_new=4)
    with pytest.raises(PromptTooLong, match="may have 63 at most"):
        world.add("full", 64)
    world.run()
    assert len(world.finished["cut"].token_ids) == len(world.finished["equal"].token_ids) == 4
    assert world.finished["cut"].reason == "length"


@pytest.mark.parametrize("total", [47, 48, 49, 64])
@pytest.mark.parametrize("kind", ["stop", "length"])
def test_ends_hold_at_block_borders(total, kind):
    world = World(usable=8)
    prompt = world.prompt(40)
    tokens = continuation(prompt, Sampling(total - 40))
    sampling = Sampling(total - 40 + 5 * (kind == "stop"), stop_token_ids=(tokens[-1],) if kind == "stop" else ())
    if kind == "stop" and tokens[-1] in tokens[:-1]:
        pytest.skip("the chosen stop id comes earlier in this sequence")
    world.scheduler.add(Request("a", prompt, sampling))
    world.run()
    assert world.finished["a"].token_ids.tolist() == tokens
    assert world.finished["a"].reason == kind
    world.check_empty()


def test_min_new_tokens_keeps_a_stop_id_from_ending():
    world = World(usable=8)
    prompt = world.prompt(20)
    third = continuation(prompt, Sampling(3))[2]
    for least, expected in [(3, 3), (4, 10)]:
        world.scheduler.add(Request(f"m{least}", prompt, Sampling(10, least, stop_token_ids=(third,))))
        world.run()
        assert len(world.finished[f"m{least}"].token_ids) == expected


def test_another_rows_stop_id_does_not_end_mine():
    world = World(usable=8)
    prompt = world.prompt(20)
    tokens = continuation(prompt, Sampling(10))
    world.scheduler.add(Request("mine", prompt, Sampling(10)))
    world.scheduler.add(Request("other", prompt, Sampling(10, stop_token_ids=(tokens[2], 5_000))))
    world.run()
    assert world.finished["mine"].token_ids.tolist() == tokens
    assert world.finished["other"].token_ids.tolist() == tokens[:3]


# -- aborts (H) --------------------------------------------------------------------------------------------------------


def test_abort_is_idempotent():
    world = World(usable=20)
    world.add("a", 10, max_new=2)
    assert world.scheduler.abort("nobody") is False
    assert world.scheduler.abort("a") is True
    assert world.scheduler.abort("a") is False
    world.run()
    assert world.scheduler.abort("a") is False
    assert [e.reason for e in world.finished.values()] == ["aborted"]


# -- errors (J) --------------------------------------------------------------------------------------------------------


def test_a_failed_chunk_ends_its_request_alone():
    world = World(usable=40)
    for name in "abc":
        world.add(name, 20, max_new=12)
    for _ in range(6):
        world.step()
    world.runner.fail.add("b")
    world.run()
    assert (world.finished["b"].reason, world.finished["b"].error) == ("error", "planted")
    assert len(world.finished["b"].token_ids) == 6
    world.check_outputs(but=("b",))
    world.check_empty()


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
    world.run()
    world.check_outputs()


@pytest.mark.parametrize(
    "bad", [{"max_seqs": 0}, {"max_step_tokens": 0}, {"max_model_len": 0}, {"max_chunk_tokens": 0}]
)
def test_limits_are_checked(bad):
    good = {"max_seqs": 4, "max_step_tokens": 64, "max_model_len": 100}
    with pytest.raises(ValueError, match=next(iter(bad)).split("_")[1]):
        Limits(**(good | bad))


def test_no_more_run_than_a_step_has_tokens():
    world = World(usable=64, max_seqs=9, max_step_tokens=4)
    for i in range(9):
        world.add(f"r{i}", 6, max_new=4, arrival=float(i))
    while world.scheduler.has_work:
        plan = world.schedule()
        assert plan.num_tokens <= 4
        world.finish(plan)
    world.check_outputs()


def test_pool_sizes_are_checked():
    with pytest.raises(ValueError, match="at least 2 blocks"):
        CacheManager(1, 16, 1, 16)
    with pytest.raises(ValueError, match="block_size"):
        CacheManager(8, 0, 1, 16)


# -- plans are data ----------------------------------------------------------------------------------------------------


def test_plans_and_results_cross_a_process_border():
    """A runner that sees only pickled plans, and answers with pickled results, gives the same tokens."""
    world = World(usable=20, block_size=4, max_chunk_tokens=5)
    execute = world.runner.execute
    world.runner.execute = lambda plan: pickle.loads(pickle.dumps(execute(pickle.loads(pickle.dumps(plan)))))
    for i in range(6):
        world.add(f"r{i}", 7 + i, max_new=15, arrival=float(i))
    world.run()
    assert world.scheduler.stats.preemptions > 0
    world.check_outputs()


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
    scheduler = Scheduler(CacheManager(4, 16, 2, 64), Limits(2, 64, 64))
    plan = scheduler.schedule()
    assert len(plan.rows) == 0
    assert scheduler.apply(plan, Result(plan.step_id, plan.rows, plan.rows)).finished == ()
    assert Failure(0, "x").index == 0
