"""The status of a sequence: rare transitions in real scenarios, and those that are not allowed refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from fakes import World
from statuses import PROMPT, Pairs, beams, moves, of, transitions

from pagetide.scheduler.preemption import preempt
from pagetide.scheduler.request import TRANSITIONS, Request, Sampling, Sequence, SequenceStatus

S = SequenceStatus


def waits_deferred_for_the_prompt_of_another_leader() -> None:
    world = World(64, block_size=4, max_seqs=2)
    world.add("a", PROMPT, 9)
    world.add("f", PROMPT, 9, fork_of="a")
    world.step()
    world.step()
    world.add("g", PROMPT, 9, fork_of="f")
    preempt(world.scheduler.state, [of(world, "a")])
    world.scheduler.pool.limit_blocks = 1
    world.step()
    world.step()
    assert of(world, "g").status is S.DEFERRED
    world.abort("f")
    world.step()
    assert of(world, "g").leader is of(world, "a")
    world.scheduler.pool.limit_blocks = 64
    world.run()


def is_moved_before_its_admission() -> None:
    world = World(64, block_size=4)
    beams(world)
    world.step()
    moves(world, ("a", "a"), ("a.1", "a"))
    world.step()
    world.step()
    moves(world, ("a", "a.1"), ("a.1", "a.1"))
    world.step()
    for name in ("a", "a.1"):
        world.scheduler.withdraw(name)
    world.run()


def is_spare() -> None:
    """In each state in which a beam may be spare."""
    for state in (S.WAITING_FOR_PROMPT, S.DEFERRED, S.PREFILLING, S.PAUSED):
        world = World(64, block_size=4, max_chunk_tokens=4 if state is S.PREFILLING else None)
        beams(world)
        name = "a.1" if state is S.WAITING_FOR_PROMPT else "a"
        if state is S.DEFERRED:
            world.scheduler.pool.limit_blocks = 1
        if state is not S.WAITING_FOR_PROMPT:
            world.step()
        assert of(world, name).status is state
        moves(world, spare=(name,))
        world.abort("a")
        world.abort("a.1")
        world.step()
        world.check_empty()


# What random walks do not reach: tests/deep says that these are all.
SCENARIOS: dict[Callable[[], None], Pairs] = {
    waits_deferred_for_the_prompt_of_another_leader: {(S.DEFERRED, S.WAITING_FOR_PROMPT)},
    is_moved_before_its_admission: {
        (S.PREFILLING, S.PAUSED), (S.WAITING, S.WAITING_FOR_MOVE), (S.WAITING_FOR_MOVE, S.WAITING),
        (S.PAUSED, S.DECODING), (S.DECODING, S.PAUSED), (S.PAUSED, S.FINISHED),
    },
    is_spare: {
        *((state, S.WAITING_FOR_MOVE) for state in (S.WAITING_FOR_PROMPT, S.DEFERRED, S.PREFILLING, S.PAUSED)),
        (S.WAITING_FOR_MOVE, S.FINISHED),
    },
}  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_scenario_reaches_its_transitions(scenario: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    reached = transitions(monkeypatch)
    scenario()
    assert SCENARIOS[scenario] <= reached


def in_status(status: SequenceStatus) -> Sequence:
    sequence = Sequence(Request("r", PROMPT, Sampling(4)), 0, None)
    sequence._status = status
    return sequence


def test_only_allowed_transitions_are_possible() -> None:
    for before, after in product(S, S):
        sequence = in_status(before)
        if after in TRANSITIONS[before]:
            sequence.set_status(after)
            assert sequence.status is after
            continue
        with pytest.raises(RuntimeError, match=f"request 'r' cannot change from '{before.value}' to '{after.value}'"):
            sequence.set_status(after)
        assert sequence.status is before
