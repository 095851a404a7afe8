"""Retention hints: what they keep from eviction, for how long, and that they bound no request. The oracle is a naive order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from fakes import World
from hypothesis import given
from hypothesis import strategies as st
from prefix_fakes import OldestFirst, ids

from pagetide.cache.eviction import Lru
from pagetide.cache.prefix_tree import PrefixTree
from pagetide.cache.retention import RetainedPrefixes, Retention
from pagetide.cache.reuse_density import ReuseDensity
from pagetide.scheduler.request import Request, Sampling

BLOCK = 4


def prompt_of(number: int, num_blocks: int = 4) -> list[int]:
    """The tokens of a prompt: a block of its own in front, so that no two share a prefix."""
    return [1000 * number + token for token in range(BLOCK * num_blocks + 1)]


def serve(world: World, number: int, retention: Retention | None = None, num_blocks: int = 4) -> int:
    """Run a prompt to its end. Returns how many of its tokens were cached."""
    name = f"p{number}-{len(world.requests)}"
    tokens = np.array(prompt_of(number, num_blocks), np.int32)
    world.add_request(Request(name, tokens, Sampling(1), retention=retention))
    world.run()
    found = world.finished[name].num_cached_tokens
    assert found is not None
    return found


def serve_often(world: World, numbers: range) -> None:
    """Prompts that come four times in a row: worth more than one that came once or twice."""
    for number in numbers:
        for _ in range(4):
            serve(world, number)


@pytest.mark.parametrize(("retention", "wait_s", "cached"), [(Retention(60.0), 0, 16), (Retention(60.0), 61, 0), (None, 0, 0)])
def test_a_hinted_prefix_outlives_others_until_its_time_is_over(
    retention: Retention | None, wait_s: float, cached: int
) -> None:
    """19 prompts of more worth, in a pool for 8."""
    world = World(32, BLOCK, caching=True, max_model_len=128)
    serve(world, 0, retention)
    assert world.cache.index.retained.num_nodes == (0 if retention is None else 4)
    world.now += wait_s
    serve_often(world, range(1, 20))
    assert world.cache.index.retained.num_nodes == cached // BLOCK
    assert serve(world, 0) == cached


def test_requests_get_what_hints_retain_when_nothing_else_is_left() -> None:
    world = World(32, BLOCK, caching=True, max_model_len=128)
    for number in range(4):
        serve(world, number, Retention(60.0 + number))
    assert world.cache.index.retained.num_nodes == 16
    serve(world, 9, num_blocks=28)  # of 32
    assert world.cache.index.retained.num_nodes == 3
    assert serve(world, 3, num_blocks=4) == 12, "the last time goes last, its end first"


def test_the_bounds_of_an_owner_and_of_all() -> None:
    world = World(32, BLOCK, caching=True, max_model_len=128)
    retained = world.cache.index.retained
    serve(world, 0, Retention(60.0, owner="ann", max_blocks=6))
    serve(world, 1, Retention(60.0, owner="ann", max_blocks=6))
    assert retained.num_nodes == 6, "the first blocks of the second prompt, up to the bound"
    serve(world, 2, Retention(60.0, num_tokens=9, owner="bob"))
    assert retained.num_nodes == 8
    for number in range(3, 8):
        serve(world, number, Retention(60.0, owner="bob"))
    assert retained.num_nodes == 16, "half of the pool"


def test_a_repeated_hint_extends_the_time_and_a_shorter_one_does_not_end_it() -> None:
    world = World(32, BLOCK, caching=True, max_model_len=128)
    serve(world, 0, Retention(60.0))
    serve(world, 0, Retention(5.0))
    world.now += 50.0
    serve(world, 0, Retention(60.0))
    world.now += 50.0
    serve(world, 1)
    assert world.cache.index.retained.num_nodes == 4
    world.cache.reset()
    assert world.cache.index.retained.num_nodes == 0


@pytest.mark.parametrize("inner", [OldestFirst, Lru, ReuseDensity])
@given(st.data())
def test_retained_nodes_go_last_by_their_time_and_no_node_before_its_descendants(inner, data: st.DataObject) -> None:
    tree = PrefixTree(64)
    policy = RetainedPrefixes(tree, inner(tree), 64)
    chains: list[list[int]] = []
    for start in range(0, 40, 5):
        parent = None
        if chains and data.draw(st.booleans()):
            above = data.draw(st.sampled_from(chains))
            parent = data.draw(st.sampled_from(above))
        nodes = list(range(start, start + 5))
        tree.add_chain(parent, ids(*nodes))
        policy.add(ids(*nodes), np.arange(start, start + 5).astype(np.uint64))
        chains.append(nodes)
    until: dict[int, float] = {}
    for nodes in data.draw(st.lists(st.sampled_from(chains), max_size=6)):
        path = tree.path_to(nodes[-1])
        seconds = data.draw(st.sampled_from([1.0, 5.0, 9.0]))
        policy.retain(path, Retention(seconds), 0.0)
        fresh = [node for node in path.tolist() if node not in until][: 32 - len(until)]
        until |= {node: max(until.get(node, 0.0), seconds) for node in path.tolist() if node in until or node in fresh}
    order = np.argsort(tree.depths[:40], kind="stable")
    policy.mark_evictable(order)
    policy.check_invariants(order)
    now = data.draw(st.sampled_from([0.0, 1.0, 6.0, 20.0]))
    policy.expire(now)
    policy.check_invariants(order)
    until = {node: end for node, end in until.items() if end > now}
    victims = policy.victims(40)[:40].tolist()
    assert sorted(victims) == list(range(40))
    assert [node for node in victims if node in until] == victims[40 - len(until) :]
    ends = [until[node] for node in victims[40 - len(until) :]]
    assert ends == sorted(ends)
    places = {node: place for place, node in enumerate(victims)}
    for node in victims:
        parent = int(tree.parents[node])
        assert parent < 0 or places[parent] > places[node]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"seconds": -1}, "seconds must be 0 or more, got -1"),
        ({"seconds": math.nan}, "seconds must be 0 or more, got nan"),
        ({"seconds": "1h"}, "seconds must be 0 or more, got '1h'"),
        ({"seconds": 1, "num_tokens": -5}, r"integers of 0 or more, got \(-5, None\)"),
        ({"seconds": 1, "max_blocks": 2.5}, r"integers of 0 or more, got \(None, 2.5\)"),
        ({"seconds": 1, "owner": ["ann"]}, "owner must be a text"),
    ],
)
def test_a_hint_that_means_nothing_is_refused(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Retention(**values)
