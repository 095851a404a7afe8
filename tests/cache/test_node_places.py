"""Which node lies in which place: puts, moves and removals, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from pagetide.allocator.errors import BlockMisuse
from pagetide.cache.node_places import NodePlaces, as_index


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def places() -> NodePlaces:
    """Nodes 0, 1 and 2 lie in places 7, 3 and 5; node 3 lies elsewhere."""
    made = NodePlaces("slots", 9, 6)
    made.put(ids(0, 1, 2), ids(7, 3, 5))
    made.of_node[3] = -1
    made.check_invariants(ids(0, 1, 2))
    return made


def test_nodes_are_found_by_their_place_and_places_by_their_node() -> None:
    made = places()
    assert made.nodes_in([5, 7]).tolist() == [2, 0]
    assert made.of_node[:4].tolist() == [7, 3, 5, -1]
    assert made.have(ids(3, 1)).tolist() == [False, True]
    assert made.used.tolist() == [3, 5, 7]
    assert made.nodes_in([]).tolist() == [] and as_index([2]).dtype == np.int64


def test_a_removed_node_leaves_its_place_free() -> None:
    made = places()
    assert made.remove(ids(2, 0)).tolist() == [5, 7]
    made.check_invariants(ids(1))
    assert (made.used.tolist(), made.have(ids(0, 1, 2)).tolist()) == ([3], [False, True, False])
    made.check_free(ids(5, 7))
    made.put(ids(3), ids(5))
    made.check_invariants(ids(1, 3))


def test_a_move_takes_nodes_along_and_ignores_empty_places() -> None:
    made = places()
    made.move([7, 4, 5], [1, 2, 8])
    made.check_invariants(ids(0, 1, 2))
    assert made.of_node[:3].tolist() == [1, 3, 8]


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
