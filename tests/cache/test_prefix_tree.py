"""The tree of nodes: links and depths of chains that are added and removed."""

from __future__ import annotations

import numpy as np
import pytest

from pagetide.cache.prefix_tree import NONE, PrefixTree


def ids(*nodes: int) -> np.ndarray:
    return np.array(nodes, np.int64)


def branching() -> PrefixTree:
    """0 - 1 - 2 - 3, with 4 - 5 behind 1, and 6 alone."""
    tree = PrefixTree(8)
    tree.add_chain(None, ids(0, 1, 2, 3))
    tree.add_chain(1, ids(4, 5))
    tree.add_chain(None, ids(6))
    return tree


def test_a_node_has_its_parent_and_is_one_deeper() -> None:
    tree = branching()
    tree.check_invariants(np.arange(7))
    assert tree.parents_of(np.arange(7)).tolist() == [NONE, 0, 1, 2, 1, 4, NONE]
    assert tree.depths[:7].tolist() == [0, 1, 2, 3, 2, 3, 0]
    assert tree.parents_of(ids()).dtype == np.int64
    assert sorted(tree.children(ids(1)).tolist()) == [2, 4]
    assert sorted(tree.with_descendants(ids(1)).tolist()) == [1, 2, 3, 4, 5]


def test_a_node_that_is_used_again_has_its_new_place() -> None:
    tree = branching()
    assert tree.remove(ids(2, 3, 6)).tolist() == [6], "the roots among them"
    tree.add_chain(5, ids(6, 2))
    tree.check_invariants(ids(0, 1, 4, 5, 6, 2))
    assert tree.depths[[6, 2]].tolist() == [4, 5]
    assert tree.parents_of(ids(6, 2)).tolist() == [5, 6]


@pytest.mark.parametrize(("links", "message"), [("depths", "one deeper"), ("parents", "do not match")])
def test_wrong_links_are_noticed(links: str, message: str) -> None:
    tree = branching()
    getattr(tree, links)[6] = 1 if links == "depths" else 0
    if links == "parents":
        tree.depths[6] = 1
    with pytest.raises(AssertionError, match=message):
        tree.check_invariants(np.arange(7))
