"""Prefixes that are computed once: what is found, shared, kept and evicted, as the scheduler uses it. Block ids are exact."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import World


def tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 900, length).astype(np.int32)


def cached(usable: int = 64, **more) -> World:
    return World(usable, caching=True, **more)


def hits(world: World) -> int:
    return world.scheduler.stats.prefix_lookups.hit_tokens


def alone(world: World, name: str, prompt: np.ndarray, max_new: int = 1, **more) -> int:
    """Run a request to its end. Returns the tokens that it found."""
    before = hits(world)
    world.add(name, prompt, max_new, **more)
    world.run()
    return hits(world) - before


@pytest.mark.parametrize(("usable", "admitted"), [(13, False), (14, True)])
def test_what_is_shared_is_forecast_once(usable: int, admitted: bool) -> None:
    """Each comes to 12 blocks, and they have 10 in common: together 14, where nobody knows yet how long outputs are."""
    world = cached(usable, forecast=True)
    prompt = tokens(160)
    world.add("a", np.append(prompt, tokens(1, seed=1)), max_new=31)
    world.step()
    world.add("b", np.append(prompt, tokens(1, seed=2)), max_new=31)
    world.step()
    assert (world.scheduler.num_running == 2) == admitted
    world.complete()


def test_at_least_one_token_is_computed() -> None:
    """B 11."""
    world = cached()
    prompt = tokens(49)
    assert alone(world, "a", prompt[:48]) == 0
    assert alone(world, "b", prompt[:48]) == 32
    assert alone(world, "c", prompt) == 48
    world.check_outputs()


def test_duplicates_do_not_leak() -> None:
    """B 17: eight at once, of which seven take the first one's blocks as soon as these are computed."""
    world = cached(80)
    prompt = tokens(130)
    for i in range(8):
        world.add(f"r{i}", prompt, max_new=5)
    world.step()
    assert hits(world) == 0, "in the same step nobody reads what another writes"
    assert world.used == 8 + 8, "one copy of each block of the prefix, and a block of its own for each"
    world.run()
    assert world.cache.pool.counts().cached == 8
    world.cache.reset()
    assert world.cache.pool.counts().free == 80
    world.check_outputs()


def test_isolation_by_salt() -> None:
    """B 18."""
    world = cached()
    prompt = tokens(65)
    assert alone(world, "a", prompt, salt=b"one") == 0
    assert alone(world, "b", prompt, salt=b"two") == 0
    assert alone(world, "c", prompt) == 0
    assert [alone(world, f"again {salt!r}", prompt, salt=salt) for salt in (b"one", b"two", None)] == [64, 64, 64]
    world.check_outputs()


def test_what_others_computed_under_another_salt_shows_in_nothing() -> None:
    """The steps of a request to its end, their chunks and blocks, are those of a pool where nobody was before."""
    prompt, plans = tokens(130), []
    for before in (None, b"tenant", b"another"):
        world = cached(max_chunk_tokens=48)
        alone(world, "before", tokens(130, 7) if before is None else prompt, salt=before)
        num_before = len(world.plans)
        assert alone(world, "mine", prompt, max_new=20, salt=b"mine") == 0
        plans.append(
            [(p.starts.tolist(), p.lengths.tolist(), [t.blocks.tolist() for t in p.tables]) for p in world.plans[num_before:]]
        )
        world.check_outputs()
    assert plans[0] == plans[1] == plans[2]
    assert [lengths for _, lengths, _ in plans[0]][:4] == [[48], [48], [34], [1]]


def lookups(world: World) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Sequences, their tokens, and those of them that were found: of new requests, and of those that had begun."""
    stats = world.scheduler.stats
    new = stats.prefix_lookups.number, stats.prefix_lookups.tokens, stats.prefix_lookups.hit_tokens
    return new, (stats.resumed_lookups.number, stats.resumed_lookups.tokens, stats.resumed_lookups.hit_tokens)


def test_resumed_requests_are_counted_apart_from_new_ones() -> None:
    world = World(8, block_size=4, caching=True)
    world.add("a", 16, max_new=8, arrival=0.0)
    world.add("b", 16, max_new=8, arrival=1.0)
    world.run()
    stats = world.scheduler.stats
    new, resumed = lookups(world)
    assert stats.preemptions == 1 and 0 < stats.recomputed_tokens < 16, "most of it was still there"
    assert new == (2, 32, 0), "none of the prompts was there before"
    assert resumed == (1, 17, 16 - stats.recomputed_tokens), "b is back, with a token more"
    assert [world.finished[name].num_cached_tokens for name in "ab"] == [0, 0], "what it computed itself is no cached token"


def test_a_request_that_had_begun_elsewhere_is_a_resumed_one() -> None:
    world = cached()
    prompt = tokens(40)
    alone(world, "a", prompt, max_new=20)
    world.add("b", prompt, max_new=20, num_generated=10)
    world.run()
    assert lookups(world) == ((1, 40, 0), (1, 50, 48))
    assert world.finished["b"].num_cached_tokens == 40, "of the prompt, whatever else was found"


def test_every_end_says_how_much_of_its_prompt_was_found() -> None:
    world = cached(max_seqs=2)
    prompt = tokens(40)
    alone(world, "a", prompt)
    for name, length in (("b", 40), ("c", 17), ("d", 16)):
        world.add(name, prompt[:length], max_new=5)
    world.add("salted", prompt, salt=b"tenant")
    world.add("never", prompt)
    world.step()
    world.abort("never")
    world.run()
    found = {name: end.num_cached_tokens for name, end in world.finished.items()}
    assert found == {"a": 0, "b": 32, "c": 16, "d": 0, "salted": 0, "never": None}


def test_forks_have_the_number_of_their_family() -> None:
    """The prompt is looked up once; what the others share of it was computed for them as well."""
    world = cached()
    prompt = tokens(50)
    alone(world, "before", prompt[:20])
    world.add("a", prompt, max_new=3)
    for name in "bc":
        world.add(name, prompt, max_new=3, fork_of="a")
    world.run()
    assert {world.finished[name].num_cached_tokens for name in "abc"} == {16}
    assert lookups(world) == ((2, 70, 16), (0, 0, 0)) and world.scheduler.stats.forks == 2


def test_every_end_says_when_it_was_first_admitted() -> None:
    """A preempted request keeps the time, and forks have their family's."""
    world = World(8, block_size=4, max_seqs=3, caching=True)
    world.add("a", 16, max_new=8)
    world.add("b", 16, max_new=8, arrival=1.0)
    world.add("c", 8, max_new=4, arrival=2.0, priority=9)
    world.add("fork", world.requests["c"].prompt_token_ids, max_new=4, arrival=2.0, priority=9, fork_of="c")
    world.add("never", 8, arrival=3.0, priority=9)
    admitted: dict[str, float] = {}
    while world.scheduler.has_work:
        world.now += 1.0
        begun = len(world.started)
        world.step()
        for name in world.started[begun:]:
            admitted.setdefault(name, world.now)
        if "c" in admitted:
            world.abort("never")
    assert world.scheduler.stats.preemptions > 0 and len(world.started) > len(admitted)
    assert admitted["a"] == admitted["b"] == 1.0 < admitted["c"] < admitted.pop("fork")
    found = {name: end.admitted_at for name, end in world.finished.items()}
    assert found == admitted | {"fork": admitted["c"], "never": None}
    stats = world.scheduler.stats
    assert (stats.prompt_tokens, stats.cached_prompt_tokens) == (16 + 16 + 8, 0), "a fork's prompt is its leader's"
    assert stats.generated_tokens == 8 + 8 + 4 + 4 and sum(stats.step_tokens) == stats.steps


def test_a_fork_that_is_left_alone_is_no_new_request() -> None:
    """Its leader ended before it had a row: it finds the prompt where that was computed, and that is no hit of a new prompt."""
    world = cached(max_seqs=1)
    prompt = tokens(50)
    world.add("a", prompt, max_new=1)
    world.add("b", prompt, max_new=3, fork_of="a")
    world.run()
    assert lookups(world) == ((1, 50, 0), (1, 50, 48))
    assert world.finished["b"].num_cached_tokens == 0


def test_a_broken_scheduler_tells_what_was_found_and_hashes_as_before() -> None:
    world = cached()
    prompt = tokens(50)
    alone(world, "a", prompt)
    world.add("b", prompt, max_new=30)
    world.step()
    fresh, told = world.scheduler.rebuilt("broke")
    assert [end.num_cached_tokens for end in told.finished] == [48]
    assert fresh.cache.index.hasher is world.cache.index.hasher, "hashes stay what they are"
