"""Prefixes that are computed once: what is found, shared, kept and evicted, as the scheduler uses it. Block ids are exact."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import World, continuation

from pagetide.cache.eviction import Lru
from pagetide.cache.manager import CacheManager
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.scheduler.request import Sampling
from pagetide.scheduler.scheduler import Scheduler


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


# ---- what is found (scenarios B) ------------------------------------------------------------------


@pytest.mark.parametrize("first_runs_on", [True, False])
def test_full_blocks_only(first_runs_on: bool) -> None:
    """B 10."""
    world = cached()
    a = tokens(55)
    world.add("a", a, max_new=40 if first_runs_on else 1)
    if first_runs_on:
        world.step()
    else:
        world.run()
    used = world.used
    world.add("b", np.append(a[:48], tokens(5, seed=1)), max_new=20)
    plan = world.schedule()
    assert hits(world) == 48
    computed = {
        int(row): (int(start), int(length))
        for row, start, length in zip(plan.rows, plan.starts, plan.lengths, strict=True)
    }
    assert (48, 5) in computed.values(), "5 are computed"
    assert world.used == used + (1 if first_runs_on else 4)
    world.finish(plan)
    world.run()
    world.check_outputs()
    world.check_empty()


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
    world.run()
    world.check_outputs()
    world.check_empty()


def test_at_least_one_token_is_computed() -> None:
    """B 11."""
    world = cached()
    prompt = tokens(49)
    assert alone(world, "a", prompt[:48]) == 0
    assert alone(world, "b", prompt[:48]) == 32
    assert alone(world, "c", prompt) == 48
    world.check_outputs()


def test_position_matters() -> None:
    """B 12."""
    world = cached()
    x, y, z = tokens(16), tokens(16, 1), tokens(16, 2)
    tail = np.array([1], np.int32)
    assert alone(world, "xx", np.concatenate((x, x, tail))) == 0
    assert world.cache.index.num_nodes == 2
    assert alone(world, "yx", np.concatenate((y, x, tail))) == 0
    assert alone(world, "xz", np.concatenate((x, z, tail))) == 16
    world.check_outputs()


def test_eviction_order() -> None:
    """B 14, by least recently used: the deepest of the oldest chain goes first, and a chain in use stays."""
    world = World(10, caching=True)
    world.cache = CacheManager(11, 16, 256, 4096, hasher=PrefixHasher(16, b"s"), eviction=Lru)
    world.scheduler = Scheduler(world.cache, world.scheduler.limits)
    a, b = tokens(49), tokens(49, 1)
    assert [alone(world, "a1", a), alone(world, "b1", b), alone(world, "a2", a)] == [0, 0, 48]
    counts = world.cache.pool.counts()
    assert (counts.cached, counts.free) == (6, 4)
    assert alone(world, "c", tokens(96, 2)) == 0
    cache = world.cache
    assert cache.lookup(cache.chain(a, None), 48).num_tokens == 48
    assert cache.lookup(cache.chain(b, None), 48).num_tokens == 16
    world.check_outputs()


def test_only_what_is_written_is_found() -> None:
    """B 16: a prompt in the middle of its chunks."""
    world = cached(max_chunk_tokens=32)
    prompt = tokens(97)
    world.add("a", prompt, max_new=3)
    world.step()
    world.add("b", prompt, max_new=3)
    world.step()
    assert hits(world) == 32
    world.run()
    world.check_outputs()
    world.check_empty()


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
            [
                (p.starts.tolist(), p.lengths.tolist(), [t.blocks.tolist() for t in p.tables])
                for p in world.plans[num_before:]
            ]
        )
        world.check_outputs()
    assert plans[0] == plans[1] == plans[2]
    assert [lengths for _, lengths, _ in plans[0]][:4] == [[48], [48], [34], [1]]


def test_a_second_turn_finds_what_was_generated() -> None:
    """B 19: generated tokens are cached too, the last one excepted, which was never computed."""
    world = cached()
    first = tokens(40)
    assert alone(world, "turn 1", first, max_new=30) == 0
    said = np.array(continuation(first, Sampling(30)), np.int32)
    assert alone(world, "turn 2", np.concatenate((first, said, tokens(20, 5)))) == 64
    world.check_outputs()


def test_caching_off() -> None:
    """B 20."""
    world = World(64)
    prompt = tokens(65)
    for name in "ab":
        world.add(name, prompt, max_new=2)
        world.run()
        assert world.cache.pool.counts().free == 64
    stats = world.scheduler.stats
    assert (stats.prefix_lookups.number, stats.prefix_lookups.tokens, stats.prefix_lookups.hit_tokens) == (0, 0, 0)


def test_a_reset_leaves_who_runs_alone() -> None:
    """B 21."""
    world = cached()
    prompt = tokens(65)
    world.add("a", prompt, max_new=40)
    world.step()
    world.cache.reset()
    world.scheduler.check_invariants()
    assert alone(world, "b", prompt) == 0
    world.run()
    assert alone(world, "c", prompt) == 64, "what b computed"
    world.cache.reset()
    assert alone(world, "d", prompt) == 0
    world.check_outputs()
    world.check_empty()


# ---- preemption, aborts, faults, the pool's size ---------------------------------------------------


def test_who_was_preempted_computes_only_what_was_evicted() -> None:
    """C 25 with a cache: the younger one goes, and comes back to most of what it had."""
    world = World(8, block_size=4, caching=True)
    world.add("a", 16, max_new=8, arrival=0.0)
    world.add("b", 16, max_new=8, arrival=1.0)
    while not world.scheduler.stats.preemptions:
        world.step()
    assert world.scheduler.waiting_ids == ["b"]
    world.run()
    stats = world.scheduler.stats
    assert stats.preemptions == 1 and 0 < stats.recomputed_tokens < 16
    world.check_outputs()
    world.check_empty()


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
    assert stats.preemptions == 1
    assert new == (2, 32, 0), "none of the prompts was there before"
    assert resumed == (1, 17, 16 - stats.recomputed_tokens), "b is back, with a token more"
    assert [world.finished[name].num_cached_tokens for name in "ab"] == [0, 0], (
        "what it computed itself is no cached token"
    )


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


def test_sharing_survives_an_abort() -> None:
    """H 61."""
    world = cached()
    prompt = tokens(65)
    world.add("a", prompt, max_new=40)
    world.step()
    world.add("b", prompt, max_new=40)
    world.step()
    world.scheduler.abort("a")
    world.run()
    assert world.finished["b"].token_ids.tolist() == continuation(prompt, Sampling(40))
    assert alone(world, "c", prompt) == 64


def test_what_a_failed_chunk_was_to_write_is_not_found() -> None:
    world = cached()
    prompt = tokens(65)
    world.runner.fail.add("a")
    world.add("a", prompt, max_new=4)
    world.run()
    assert world.finished["a"].reason == "error"
    assert alone(world, "b", prompt) == 0


def test_a_long_shared_prefix_counts_once_for_admission() -> None:
    """100 requests behind one prefix of 50 blocks, in a pool that would hold two of them without sharing."""
    world = World(160, block_size=4, caching=True, forecast=True)
    prefix = tokens(200)
    assert alone(world, "first", np.append(prefix, 1).astype(np.int32)) == 0
    for i in range(40):
        world.add(f"r{i}", np.concatenate((prefix, tokens(3, seed=i + 1))), max_new=3)
    world.step()
    assert world.scheduler.num_running >= 30
    world.run()
    assert world.scheduler.stats.preemptions == 0
    world.check_outputs()


def test_cached_blocks_make_room_before_anybody_is_preempted() -> None:
    world = cached(20)
    for i in range(3):
        alone(world, f"old{i}", tokens(81, seed=i))
    assert world.cache.pool.counts().cached == 15
    world.add("a", 200, max_new=60)
    world.run()
    assert world.scheduler.stats.preemptions == 0
    world.check_outputs()


def test_giving_back_moves_what_is_cached_while_holes_suffice_and_evicts_it_where_not() -> None:
    world = World(31, block_size=4, blocks_per_extent=4, caching=True)
    prompts = [tokens(33, seed=i) for i in range(3)]
    for i, prompt in enumerate(prompts):
        alone(world, f"r{i}", prompt)
    assert world.cache.pool.counts().cached == 24
    assert world.scheduler.pool.give_back(1) == 1
    world.step()
    assert [alone(world, f"a{i}", prompt) for i, prompt in enumerate(prompts)] == [32, 32, 32], "all were moved"
    assert world.scheduler.pool.idle_extents == 6
    assert world.scheduler.pool.give_back(4) == 4
    world.step()
    assert world.cache.pool.counts().mapped == 11
    found = [alone(world, f"b{i}", prompt) for i, prompt in enumerate(prompts)]
    assert 0 < sum(found) < 96
    world.scheduler.pool.grow(5)
    world.step()
    world.check_outputs()
    world.check_empty()


def test_the_manager_refuses_what_it_cannot_cache() -> None:
    with pytest.raises(ValueError, match="hasher's"):
        CacheManager(9, 4, 2, 64, hasher=PrefixHasher(16))
