"""Requests that share a prompt: computed once, its full blocks shared, the partly filled one copied."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import World

from pagetide.scheduler.request import DuplicateRequest, RequestRejected


def forked(world: World, prompt: int | np.ndarray, n: int, max_new: int = 6, **more) -> None:
    """Requests a, b, c, ... of which all but the first are forks of it."""
    world.add("a", prompt, max_new, **more)
    for name in "bcdefgh"[: n - 1]:
        world.add(name, world.requests["a"].prompt_token_ids, max_new, fork_of="a", **more)


def blocks(world: World, name: str) -> list[int]:
    (row,) = (r for r, s in world.scheduler.state.by_row.items() if s.request.request_id == name)
    found: list[int] = world.cache.tables[0].of(row)[0].tolist()
    return found


@pytest.mark.parametrize("caching", [False, True])
def test_full_blocks_are_shared_and_the_partly_filled_one_is_copied(caching: bool) -> None:
    world = World(64, block_size=4, caching=caching)
    forked(world, 10, n=3)
    plan = world.step() and world.plans[-1]
    assert [new.request_id for new in plan.admitted.values()] == ["a"], "the others wait for the prompt"
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (1, 2)
    plan = world.schedule()
    assert [new.request_id for new in plan.admitted.values()] == ["b", "c"]
    a, b, c = (blocks(world, name) for name in "abc")
    assert a[:2] == b[:2] == c[:2] and len({a[2], b[2], c[2]}) == 3
    assert world.cache.pool.references(np.array(a)).tolist() == [3, 3, 1]
    assert plan.copies is not None
    assert (plan.copies.sources.tolist(), plan.copies.targets.tolist()) == ([a[2], a[2]], [b[2], c[2]])
    assert plan.lengths.tolist() == [1, 1, 1] and plan.starts.tolist() == [10, 9, 9], "only the last token is computed again"
    world.finish(plan)
    world.complete()
    assert world.scheduler.stats.forks == 2
    assert world.scheduler.stats.computed_tokens == (10 + 5) + 2 * (1 + 5)


@pytest.mark.parametrize("length", [1, 4, 8, 9])
def test_nothing_is_copied_where_the_last_token_begins_a_block(length: int) -> None:
    world = World(64, block_size=4)
    forked(world, length, n=4)
    world.step()
    plan = world.schedule()
    rest = (length - 1) % 4
    assert (plan.copies is None) == (rest == 0)
    assert world.used == -(-length // 4) + 3 + (length % 4 == 0), "a block each, and one for who is a token ahead"
    world.finish(plan)
    world.complete()


def test_forks_wait_through_every_chunk_of_the_prompt_and_hold_nobody_up() -> None:
    world = World(64, block_size=4, max_step_tokens=6)
    forked(world, 20, n=2)
    world.add("other", 3, 2)
    while "b" not in world.started:
        world.step()
    assert world.started == ["a", "other", "b"]
    world.complete()


@pytest.mark.parametrize("caching", [False, True])
def test_forks_that_end_with_their_first_token_do_not_wait_for_each_other(caching: bool) -> None:
    world = World(64, block_size=4, caching=caching)
    forked(world, 21, n=8, max_new=1)
    world.complete()
    assert world.scheduler.stats.steps == 2, "the first one's, and that of all others"


def test_a_fork_begins_with_the_blocks_of_another_one_where_the_first_has_ended() -> None:
    world = World(64, block_size=4, max_seqs=3)
    world.add("a", 21, 2)
    for name, max_new in zip("bcdefgh", (9, 12, 9, 12, 9, 12, 9), strict=True):
        world.add(name, world.requests["a"].prompt_token_ids, max_new, fork_of="a")
    world.complete()
    assert world.scheduler.stats.forks == 7, "there was always one of them that ran"
    assert world.scheduler.stats.computed_tokens == 22 + 4 * 9 + 3 * 12


@pytest.mark.parametrize("order", [1, -1])
def test_thousands_of_forks_come_and_go(order: int) -> None:
    world = World(64, block_size=4, max_seqs=4)
    world.add("a", 9, 4)
    names = [f"f{i}" for i in range(2000)]
    for name in names:
        world.scheduler.add(replace(world.requests["a"], request_id=name, fork_of="a"))
    for name in names[::order]:
        assert world.scheduler.abort(name)
    plan = world.scheduler.schedule()
    assert len(world.scheduler.apply(plan, world.runner.execute(plan)).finished) == 2000
    assert world.scheduler.num_waiting == 0 and world.scheduler.num_running == 1


@pytest.mark.parametrize("moment", ["waiting", "prefilling", "decoding"])
@pytest.mark.parametrize("n", [2, 4])
def test_the_first_is_aborted_and_the_others_go_on(moment: str, n: int) -> None:
    world = World(64, block_size=4, max_step_tokens=6)
    forked(world, 20, n)
    for _ in range({"waiting": 0, "prefilling": 2, "decoding": 4}[moment]):
        world.step()
    world.scheduler.abort("a")
    world.run()
    assert world.finished["a"].reason == "aborted"
    world.check_outputs(but=("a",))
    world.check_empty()
    if moment == "waiting":
        assert world.scheduler.stats.forks == n - 2, "the second computes the prompt, for the others too"


def test_the_first_fails_and_the_others_try_for_themselves() -> None:
    world = World(64, block_size=4)
    forked(world, 20, n=3)
    world.runner.fail.add("a")
    world.run()
    assert world.finished["a"].reason == "error"
    world.check_outputs(but=("a",))
    assert world.scheduler.stats.forks == 1
    world.check_empty()


def test_a_late_fork_begins_with_what_there_is() -> None:
    world = World(64, block_size=4)
    forked(world, 9, n=1, max_new=12)
    for _ in range(5):
        world.step()
    world.add("late", world.requests["a"].prompt_token_ids, 12, fork_of="a")
    plan = world.schedule()
    assert plan.starts[plan.lengths == 1].tolist() == [13, 8]
    world.finish(plan)
    world.complete()


def test_what_is_no_fork_is_refused() -> None:
    world = World(64, block_size=4)
    forked(world, 9, n=1)
    prompt = world.requests["a"].prompt_token_ids
    with pytest.raises(RequestRejected, match="'b' is to share the prompt of 'x', which is not here"):
        world.add("b", prompt, fork_of="x")
    with pytest.raises(RequestRejected, match="has another prompt or cache_salt"):
        world.add("b", prompt[:-1], fork_of="a")
    with pytest.raises(RequestRejected, match="has another prompt or cache_salt"):
        world.add("b", prompt, fork_of="a", salt=b"tenant")
    with pytest.raises(RequestRejected, match="whose priority is 0, and not 1"):
        world.add("b", prompt, fork_of="a", priority=1)
    with pytest.raises(DuplicateRequest):
        world.add("a", prompt, fork_of="a")
    world.complete()


@pytest.mark.parametrize(("length", "n", "now"), [(13, 4, 7), (5, 8, 9)])
def test_shared_blocks_are_needed_once(length: int, n: int, now: int) -> None:
    """The blocks of now suffice for the one token that each may still get: those in several tables count once."""
    world = World(64, block_size=4)
    forked(world, length, n=n, max_new=2)
    world.step()
    world.schedule()
    assert world.used == now
    assert world.scheduler.pool.running_blocks() == now
