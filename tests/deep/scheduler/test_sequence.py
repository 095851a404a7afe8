"""Statuses that no container of the scheduler agrees with are found, and random walks reach the allowed transitions."""

from __future__ import annotations

import pytest
from fakes import World
from random_walk import VARIANTS, walk
from statuses import PROMPT, beams, moves, of, transitions

from pagetide.scheduler.request import TRANSITIONS, SequenceStatus

S = SequenceStatus


@pytest.fixture
def mixed() -> World:
    """A world with a sequence in each status but NEW and the last two."""
    world = World(64, block_size=4, max_seqs=4, max_step_tokens=16, max_chunk_tokens=4)
    beams(world)
    while of(world, "a").status is not S.PAUSED:
        world.step()
    moves(world, spare=("a.1",))
    world.add("decodes", PROMPT, 9)
    while of(world, "decodes").status is not S.DECODING:
        world.step()
    world.add("deferred", 100, 2)
    world.scheduler.pool.limit_blocks = 20
    world.step()
    for name in ("prefills", "too", "waits"):
        world.add(name, PROMPT, 9)
    world.add("behind", PROMPT, 9, fork_of="prefills")
    world.step()
    expected = {
        "a": S.PAUSED, "a.1": S.WAITING_FOR_MOVE, "decodes": S.DECODING, "deferred": S.DEFERRED, "prefills": S.PREFILLING,
        "too": S.PREFILLING, "waits": S.WAITING, "behind": S.WAITING_FOR_PROMPT,
    }  # fmt: skip
    assert {name: s.status for name, s in world.scheduler.state.by_id.items()} == expected
    return world


@pytest.mark.parametrize("name", ["a", "a.1", "decodes", "deferred", "prefills", "waits", "behind"])
def test_a_status_that_no_container_agrees_with_is_found(mixed: World, name: str) -> None:
    sequence = of(mixed, name)
    right = sequence.status
    mixed.scheduler.check_invariants()
    # A queue of others and a beam without a row differ in the status alone, and in no container.
    for status in set(S) - {right, S.WAITING_FOR_MOVE if name == "behind" else right}:
        sequence._status = status
        with pytest.raises(AssertionError):
            mixed.scheduler.check_invariants()


def test_walks_reach_every_transition_but_those_with_a_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = transitions(monkeypatch)
    for variant in VARIANTS:
        walk(100, variant, events=100, check_every=50, naps="disk" in variant)
    allowed = {(status, after) for status, others in TRANSITIONS.items() for after in others}
    moved = (S.WAITING, S.WAITING_FOR_PROMPT, S.DEFERRED, S.PREFILLING)
    assert allowed - reached <= {(S.DEFERRED, S.WAITING_FOR_PROMPT), *((state, S.WAITING_FOR_MOVE) for state in moved)}
    assert set(TRANSITIONS) == set(S)
