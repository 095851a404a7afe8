"""A step that is planned while the one before it is out: when that can be, what it says, and what becomes of who ends then."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import VOCAB, World, continuation
from hypothesis import given
from hypothesis import strategies as st

from pagetide.cache.block_table import BlockCopies, joined
from pagetide.scheduler.plan import Failure, InvalidCallOrder, Plan
from pagetide.scheduler.request import Sampling

PROMPT = np.arange(100, 110, dtype=np.int32)
ALONE = continuation(PROMPT, Sampling(20))


def world_of(num: int = 2, max_new: int = 8, usable: int = 64, **more) -> World:
    """`num` requests, named a, b, c and on, of which nothing is planned."""
    world = World(usable, block_size=4, **more)
    for i in range(num):
        world.add("abcdefgh"[i], PROMPT + i, max_new)
    return world


def plain(plan: Plan | None) -> list[object]:
    """A plan as lists."""
    assert plan is not None
    entries = [(update.rows.tolist(), update.columns.tolist(), update.blocks.tolist()) for update in plan.tables]
    arrays = [getattr(plan, name).tolist() for name in ("rows", "starts", "lengths", "samples", "released")]
    return [plan.step_id, *arrays, entries, [new.request_id for new in plan.admitted.values()]]


def test_it_is_the_plan_that_would_have_been_made() -> None:
    """Prompts of all lengths, which begin to decode in several steps, where nobody ends."""
    made = []
    for ahead in (False, True):
        world = World(400, block_size=4, max_seqs=6, max_step_tokens=40, ahead=ahead)
        for i in range(6):
            world.add(f"r{i}", 5 + 7 * i, 40)
        for _ in range(30):
            world.step()
        made.append([plain(plan) for plan in world.plans[:30]])
    assert made[0] == made[1]
    assert [plan.step_id for plan in world.planned_ahead] == list(range(4, 31)), "from when all prompts are whole"


def decoding(**more) -> World:
    """a and b lack one token each."""
    world = world_of(2, **more)
    world.finish(world.schedule())
    return world


def a_prompt_is_not_whole() -> tuple[World, Plan]:
    world = decoding(max_chunk_tokens=20)
    world.add("long", 30, 4)
    return world, world.schedule()


def somebody_can_be_seated() -> tuple[World, Plan]:
    world = decoding()
    plan = world.schedule()
    world.add("late", 5, 4)
    return world, plan


def somebody_is_to_be_ended() -> tuple[World, Plan]:
    world = decoding()
    plan = world.schedule()
    world.abort("a")
    return world, plan


def tokens_are_chosen_by_somebody_else() -> tuple[World, Plan]:
    world = decoding()
    world.add_family("beam", 5, 2, 6)
    return world, world.schedule()


def forks_wait_for_the_prompt() -> tuple[World, Plan]:
    world = World(64, block_size=4)
    world.add("a", PROMPT, 8)
    world.add("b", PROMPT, 8, fork_of="a")
    return world, world.schedule()


def memory_moves() -> tuple[World, Plan]:
    world = decoding(usable=63, blocks_per_extent=8, num_mapped=2)
    world.scheduler.pool.grow(1)
    plan = world.schedule()
    assert plan.resize
    return world, plan


def blocks_are_short() -> tuple[World, Plan]:
    """Three each, and both need a fourth one for the thirteenth token."""
    world = decoding(usable=7)
    world.finish(world.schedule())
    plan = world.schedule()
    assert world.cache.pool.available == 1
    return world, plan


def all_have_their_last_token() -> tuple[World, Plan]:
    world = world_of(2, max_new=2)
    world.finish(world.schedule())
    return world, world.schedule()


@pytest.mark.parametrize(
    "case",
    [
        a_prompt_is_not_whole, somebody_can_be_seated, somebody_is_to_be_ended, tokens_are_chosen_by_somebody_else,
        forks_wait_for_the_prompt, memory_moves, blocks_are_short, all_have_their_last_token,
    ],
)  # fmt: skip
def test_there_is_none_and_nothing_changes_where(case) -> None:
    lives = []
    for asks in (False, True):
        world, plan = case()
        if asks:
            assert world.go_ahead() is None
        world.finish(plan)
        world.run()
        world.check_empty()
        lives.append(([plain(plan) for plan in world.plans], world.scheduler.stats))
    assert lives[0] == lives[1]


def test_there_is_none_while_somebody_is_held() -> None:
    world = decoding()
    world.add_family("beam", 5, 2, 6)
    names = world.family_of["beam"].names
    world.family_of.clear()  # nobody chooses
    for _ in range(2):
        world.finish(world.schedule())
    plan = world.schedule()
    assert (len(plan.rows), world.scheduler.num_running) == (2, 4)
    assert world.go_ahead() is None
    for name in names:
        world.abort(name)
    world.scheduler.apply(plan, world.runner.execute(plan))
    assert world.schedule() and world.go_ahead() is not None


def test_who_waits_without_a_seat_holds_nobody_up() -> None:
    world = decoding(max_seqs=2)
    plan = world.schedule()
    world.add("late", 5, 4)
    assert world.go_ahead() is not None
    world.finish(plan)
    world.complete()


PLAIN: dict[str, object] = {
    "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "seed": 3, "index": 2, "stop_token_ids": (1, 2),
}  # fmt: skip
OF_THE_HOST: dict[str, object] = {
    "repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": -0.5, "bad_words": ((1, 2),),
    "logit_bias": ((1, 2.0),), "logits_processors": (len,), "constraint": ("regex", "a+"), "logprobs": 0,
    "prompt_logprobs": 0, "num_candidates": 4,
}  # fmt: skip


def test_every_setting_says_from_when_it_can_be() -> None:
    counts = {"max_new_tokens": 8, "min_new_tokens": 3}
    names = {*PLAIN, *OF_THE_HOST, *counts}
    assert names == set(Sampling.__dataclass_fields__), "a setting that nobody thought of"
    assert Sampling(**{**counts, **PLAIN}).ahead_from == 3
    assert Sampling(8, 3).ahead_from == 0, "no token is kept from being sampled"
    assert Sampling(8, **PLAIN).ahead_from == 0
    for name, value in OF_THE_HOST.items():
        assert Sampling(8, **{**PLAIN, name: value}).ahead_from is None, name


@pytest.mark.parametrize("name", [name for name in OF_THE_HOST if name != "num_candidates"])
def test_one_row_that_needs_the_host_is_enough(name: str) -> None:
    world = World(64)
    world.add("a", PROMPT, 8)
    world.add("b", PROMPT, 8, **{name: OF_THE_HOST[name]})
    for _ in range(3):
        plan = world.schedule()
        assert world.go_ahead() is None
        world.finish(plan)
    world.abort("b")
    world.schedule()
    assert world.go_ahead() is not None


def test_a_least_length_holds_until_it_is_reached() -> None:
    """The fourth token is the first one that may be a stop id: it can be drawn without the third one known."""
    world = World(64)
    world.add("a", PROMPT, 8, min_new_tokens=3, stop_token_ids=(VOCAB,))
    behind = []
    for _ in range(4):
        plan = world.due()
        behind.append(world.go_ahead())
        world.finish(plan)
    assert [plan is not None for plan in behind] == [False, False, True, True]
    assert behind[2] is not None and behind[2].starts.tolist() == [12]


def test_one_plan_is_out_and_results_come_in_order() -> None:
    world = world_of(2)
    scheduler = world.scheduler
    with pytest.raises(InvalidCallOrder):
        scheduler.schedule_ahead()
    first = world.schedule()
    behind = world.go_ahead()
    assert behind is not None
    for call in (scheduler.schedule_ahead, scheduler.schedule, lambda: scheduler.withdraw("a"), lambda: scheduler.pool.grow(0)):
        with pytest.raises(InvalidCallOrder):
            call()
    results = [step.wait() for step in world.begun]
    for plan, result in ((behind, results[1]), (first, results[1]), (behind, results[0])):
        with pytest.raises(InvalidCallOrder):
            scheduler.apply(plan, result)
    world.finish(first)
    for call in (scheduler.schedule, lambda: scheduler.withdraw("a"), lambda: scheduler.apply_beam_moves([])):
        with pytest.raises(InvalidCallOrder):
            call()
    world.complete()


def test_what_swaps_has_none_behind_it() -> None:
    """What was computed for others leaves the device for a block of who goes on, in a plan ahead."""
    world = World(8, block_size=4, caching=True, host_slots=8)
    world.add("old", PROMPT, 6)
    world.run()
    world.add("a", PROMPT + 50, 20)
    while world.scheduler.has_work:
        plan = world.due()
        assert not (world.go_ahead() and plan.moves_memory)
        world.finish(plan)
    assert sum(plan.swaps is not None for plan in world.planned_ahead) == 3
    assert world.scheduler.stats.demoted_blocks == 3
    world.check_outputs()
    world.check_empty()


def stopping(**more) -> World:
    """a ends with its third token, and has a row in the plan behind the one that gives it; b goes on."""
    world = World(64, block_size=4, max_seqs=2, **more)
    world.add("a", PROMPT, 12, stop_token_ids=(ALONE[2],))
    world.add("b", PROMPT + 1, 12)
    for _ in range(2):
        plan = world.due()
        assert world.go_ahead() is not None
        world.finish(plan)
    return world


def test_who_stops_is_told_and_keeps_row_and_blocks_until_no_plan_names_them() -> None:
    world = stopping()
    scheduler = world.scheduler
    world.add("c", PROMPT + 2, 3)
    third = world.due()
    fourth = world.go_ahead()
    used = world.used
    assert fourth is not None and fourth.rows.tolist() == [0, 1]
    emissions = world.finish(third)
    assert [(end.request_id, end.reason, end.token_ids.tolist()) for end in emissions.finished] == [("a", "stop", ALONE[:3])]
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.rows.num_free) == (1, 1, 0)
    assert world.used == used
    assert not scheduler.abort("a")
    assert world.go_ahead() is None, "a row is free when the result is in"
    emissions = world.finish(fourth)
    assert emissions.request_ids == ["b"] and not emissions.finished
    plan = world.schedule()
    assert plan.released.tolist() == [0] and [(row, new.request_id) for row, new in plan.admitted.items()] == [(0, "c")]
    world.finish(plan)
    world.complete()


def test_it_does_not_starve_while_a_result_is_due() -> None:
    world = World(64, block_size=4)
    world.scheduler.pool.limit_blocks = 8
    world.add("a", PROMPT, 12, stop_token_ids=(ALONE[0],))
    world.add("long", 60, 4)
    plan = world.schedule()
    assert world.go_ahead() is not None
    assert world.finish(plan).finished
    assert not world.scheduler.starving
    world.finish(world.due())
    assert world.scheduler.starving


def test_its_id_is_free_at_once() -> None:
    world = stopping()
    plan = world.due()
    world.go_ahead()
    world.finish(plan)
    assert world.finished.pop("a") and world.emitted.pop("a")
    world.add("a", PROMPT, 5)
    world.complete()


@pytest.mark.parametrize("ahead", [False, True])
def test_what_it_computed_can_be_found(ahead: bool) -> None:
    """10 of the prompt and 2 generated; with the stop id behind them more than that is not known to be right."""
    world = World(64, block_size=4, caching=True, ahead=ahead)
    world.add("a", PROMPT, 12, stop_token_ids=(ALONE[2],))
    world.run()
    assert len(world.planned_ahead) == (3 if ahead else 0)
    world.add("b", np.append(PROMPT, np.array(ALONE[:8], np.int32)), 2)
    world.run()
    assert world.scheduler.stats.prefix_lookups.hit_tokens == 12


@pytest.mark.parametrize("ahead", [False, True])
def test_a_failure_ends_it_and_nothing_of_it_is_found(ahead: bool) -> None:
    """Both plans fail for it; it is told once."""
    world = World(64, block_size=4, caching=True, ahead=ahead)
    world.add("a", PROMPT, 12)
    world.add("b", PROMPT + 1, 12)
    world.runner.fail.add("a")
    world.run()
    assert (world.finished["a"].reason, world.finished["a"].token_ids.tolist()) == ("error", [])
    assert (world.num_left > 0) == ahead
    world.check_outputs(but=("a",))
    world.add("c", PROMPT, 2)
    world.run()
    assert world.scheduler.stats.prefix_lookups.hit_tokens == 0
    world.check_empty()


def test_a_failure_of_the_plan_behind_alone() -> None:
    world = decoding()
    plan = world.schedule()
    behind = world.go_ahead()
    world.finish(plan)
    assert behind is not None
    result = world.begun[0].wait()
    world.begun[0].result = replace(
        result, counts=np.array([0, 1]), tokens=result.tokens[1:], failures=(Failure(0, "planted"),)
    )
    emissions = world.finish(behind)
    assert [(end.request_id, end.reason, len(end.token_ids)) for end in emissions.finished] == [("a", "error", 2)]
    world.complete(but=("a",))


def test_who_is_aborted_gets_the_token_of_the_step_and_none_of_the_one_behind() -> None:
    world = decoding()
    plan = world.schedule()
    assert world.go_ahead() is not None
    assert world.abort("a") and not world.abort("a")
    emissions = world.finish(plan)
    assert "a" in emissions.request_ids and emissions.finished[0].token_ids.tolist() == ALONE[:2]
    assert world.go_ahead() is not None
    assert world.finish(world.due()).request_ids == ["b"]
    world.complete(but=("a",))


def test_a_scheduler_that_breaks_meanwhile_tells_every_end_once() -> None:
    world = stopping()
    plan = world.due()
    assert world.go_ahead() is not None
    assert [end.request_id for end in world.finish(plan).finished] == ["a"]
    world.add("c", PROMPT + 2, 3)
    world.abort("c")
    fresh, emissions = world.scheduler.rebuilt("TypeError: broke")
    told = {end.request_id: (end.reason, len(end.token_ids)) for end in emissions.finished}
    assert told == {"b": ("error", 3), "c": ("error", 0)}
    assert not fresh.has_work and fresh.rows.num_free == 2
    fresh.check_invariants()


@given(seed=st.integers(0, 2**32))
def test_tokens_and_ends_are_the_same_as_without(seed: int) -> None:
    ends = []
    for ahead in (False, True):
        rng = np.random.default_rng(seed)
        world = World(
            2000, block_size=int(rng.choice([1, 3, 16])), max_seqs=int(rng.integers(1, 9)),
            max_step_tokens=int(rng.choice([20, 300])), caching=bool(rng.random() < 0.5), ahead=ahead,
        )  # fmt: skip
        world.rng = rng
        for i in range(int(rng.integers(1, 14))):
            world.add(
                f"r{i}", int(rng.integers(1, 60)), int(rng.integers(1, 40)), min_new_tokens=int(rng.integers(0, 4)),
                stop_token_ids=tuple(rng.integers(0, VOCAB, int(rng.integers(0, 60))).tolist()),
            )  # fmt: skip
            for _ in range(int(rng.integers(0, 6))):
                world.step()
        world.complete()
        ends.append({name: (end.reason, end.token_ids.tolist()) for name, end in world.finished.items()})
    assert ends[0] == ends[1]


def test_copies_are_joined_in_order() -> None:
    a, b = (BlockCopies(np.array([i], np.int32), np.array([i + 5], np.int32)) for i in (1, 2))
    assert joined([]) is None and joined([a]) is a
    both = joined([a, b])
    assert both is not None and (both.sources.tolist(), both.targets.tolist()) == ([1, 2], [6, 7])
