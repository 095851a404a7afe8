"""Prompts whose log-probabilities are asked for are computed as a whole, once, and not too much of them in a step (L 80)."""

from __future__ import annotations

import pytest
from fakes import World, fake_logprob
from random_walk import check_scores

from pagetide.scheduler.preemption import preempt
from pagetide.scheduler.state import LEAST_SCORED_TOKENS, Limits


def scored_in(world: World, plan) -> int:
    """Tokens of prompts that the plan's chunks give log-probabilities of."""
    told = 0
    for row, start, length in zip(plan.rows.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True):
        request = world.requests[world.scheduler.rows.request_ids[row]]
        if request.sampling.prompt_logprobs is not None:
            told += max(0, min(start + length, len(request.prompt_token_ids) - 1) - start)
    return told


def run(world: World) -> list[int]:
    """To the end; how many tokens of prompts each step scores."""
    told = []
    while world.scheduler.has_work:
        plan = world.schedule()
        told.append(scored_in(world, plan))
        world.finish(plan)
    world.check_outputs()
    world.check_empty()
    for name, request in world.requests.items():
        check_scores(world, name, request)
    return told


def test_as_many_as_may_run_or_a_few() -> None:
    assert Limits(300, 8192, 9000).max_scored_tokens == 300
    assert Limits(4, 8192, 9000).max_scored_tokens == LEAST_SCORED_TOKENS == 64


def test_a_step_scores_so_much_of_all_prompts_together() -> None:
    """The first has all of it; what is left goes to the next. Who asks for nothing has its whole prompt in a step."""
    world = World(400, 16, max_seqs=4)
    for name, length, asks in (("a", 100, 0), ("b", 60, 0), ("c", 300, None)):
        world.add(name, length, 5, prompt_logprobs=asks)
    assert run(world)[:4] == [64, 64, 30, 0]
    # What is behind the last position of a prompt is none of it: that one is free.
    lengths = [sorted(plan.lengths.tolist()) for plan in world.plans[:4]]
    assert lengths == [[64, 300], [1, 29, 36], [1, 1, 31], [1, 1, 1]]


@pytest.mark.parametrize("host_slots", [0, 8])
def test_what_others_computed_is_not_found_before_it_is_scored(host_slots: int) -> None:
    world = World(40, 4, max_seqs=4, caching=True, host_slots=host_slots)
    prompt = world.prompt(41)
    world.add("first", prompt, 3)
    world.run()
    stats = world.scheduler.stats
    for name, found, more in (("asks", 0, {"prompt_logprobs": 0}), ("not", 40, {}), ("own", 40, {"logprobs": 0})):
        before = stats.prefix_lookups.hit_tokens
        world.add(name, prompt, 3, **more)
        world.run()
        assert stats.prefix_lookups.hit_tokens - before == found, name
    assert (stats.prefix_lookups.number, stats.prefix_lookups.tokens) == (4, 4 * 41)
    assert world.cache.pool.counts().cached == 10, "the same blocks were taken again, and none is held twice"
    run(world)


def test_after_a_preemption_it_finds_again_what_was_scored() -> None:
    """Forced out in the middle of its prompt, and once more behind it."""
    world = World(40, 4, max_seqs=4, max_chunk_tokens=10, caching=True)
    world.add("first", 41, 3)
    world.run()
    world.add("asks", world.requests["first"].prompt_token_ids, 9, prompt_logprobs=0)
    starts = []
    for step in range(9):
        if step in (3, 7):
            preempt(world.scheduler.state, list(world.scheduler.state.by_row.values()))
        plan = world.schedule()
        starts += plan.starts.tolist()
        world.finish(plan)
    assert starts == [0, 10, 20, 28, 38, 41, 42, 40, 44]
    assert world.runner.asks[0][0].prompt_logprobs is None, "what is out is not given again"
    run(world)


def test_a_fork_that_asks_for_itself_computes_the_prompt_itself() -> None:
    world = World(60, 4, max_seqs=4)
    world.add("leader", 21, 3)
    world.add("fork", world.requests["leader"].prompt_token_ids, 3, fork_of="leader", prompt_logprobs=0)
    world.add("other", world.requests["leader"].prompt_token_ids, 3, fork_of="leader")
    run(world)
    assert world.scheduler.stats.forks == 1


def test_a_chunk_that_failed_tells_nothing() -> None:
    world = World(60, 4, max_seqs=4, max_chunk_tokens=10)
    world.add("a", 30, 3, prompt_logprobs=0)
    world.step()
    world.runner.fail.add("a")
    emissions = world.step()
    assert emissions.scores == () and [end.reason for end in emissions.finished] == ["error"]
    tokens = world.requests["a"].prompt_token_ids
    assert world.scored["a"] == {p: pytest.approx(fake_logprob(tokens[:p])) for p in range(1, 11)}


def test_told_by_name_beside_the_end_of_their_request() -> None:
    """The last token's are out with the step that ends it; nobody else has its row by then."""
    world = World(60, 4, max_seqs=1)
    world.add("a", 5, 1, logprobs=0, prompt_logprobs=0)
    world.add("b", 5, 1)
    emissions = world.step()
    assert [end.request_id for end in emissions.finished] == ["a"]
    assert [(name, scores.first, len(scores.ranks)) for name, scores in emissions.scores] == [("a", 1, 4), ("a", 5, 1)]
    assert world.step().scores == ()
