"""Places and tree of nodes: what is refused, and damage. test_prefix_index_life.py has all that is right."""

from __future__ import annotations

import numpy as np
import pytest
from prefix_fakes import ids

from pagetide.allocator.errors import BlockMisuse
from pagetide.cache.node_places import NodePlaces
from pagetide.cache.prefix_tree import PrefixTree


def places() -> NodePlaces:
    """Nodes 0, 1 and 2 lie in places 7, 3 and 5; node 3 lies elsewhere."""
    made = NodePlaces("slots", 9, 6)
    made.put(ids(0, 1, 2), ids(7, 3, 5))
    made.of_node[3] = -1
    made.check_invariants(ids(0, 1, 2))
    return made


@pytest.mark.parametrize(
    ("call", "args", "message"),
    [
        ("nodes_in", ([4],), "not all of slots 4 can be found"),
        ("nodes_in", ([5, 5],), "named twice"),
        ("check_free", (ids(4, 3),), "slots that can be found already, or are named twice, hold nothing new: 3"),
        ("check_free", (ids(4, 4),), "named twice"),
        ("move", ([7], [3]), "already"),
        ("move", ([7, 7], [1, 2]), "moves once"),
        ("move", ([7, 5], [1, 1]), "named twice"),
    ],
)
def test_wrong_calls_change_nothing(call: str, args: tuple, message: str) -> None:
    made = places()
    with pytest.raises(BlockMisuse, match=message):
        getattr(made, call)(*args)
    made.check_invariants(ids(0, 1, 2))
    assert made.of_node[:4].tolist() == [7, 3, 5, -1]


def test_places_that_name_other_nodes_are_noticed() -> None:
    made = places()
    with pytest.raises(AssertionError, match="not there"):
        made.check_invariants(ids(0, 1))
    made.node_at[7] = 1
    with pytest.raises(AssertionError, match="another node"):
        made.check_invariants(ids(0, 1, 2))


@pytest.mark.parametrize(("links", "message"), [("depths", "one deeper"), ("parents", "do not match")])
def test_wrong_links_of_the_tree_are_noticed(links: str, message: str) -> None:
    tree = PrefixTree(8)
    for parent, nodes in ((None, ids(0, 1, 2, 3)), (1, ids(4, 5)), (None, ids(6))):
        tree.add_chain(parent, nodes)
    tree.check_invariants(np.arange(7))
    getattr(tree, links)[6] = 1 if links == "depths" else 0
    if links == "parents":
        tree.depths[6] = 1
    with pytest.raises(AssertionError, match=message):
        tree.check_invariants(np.arange(7))
