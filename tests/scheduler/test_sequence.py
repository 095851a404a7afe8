"""The status of a sequence: each allowed transition in a real scenario, the others refused, and containers that agree."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from fakes import World

from pagetide.scheduler.outcome import BeamMove
from pagetide.scheduler.request import Request, Sampling
from pagetide.scheduler.sequence import TRANSITIONS, Sequence, SequenceStatus

S = SequenceStatus
PROMPT = np.arange(10, dtype=np.int32)
Pairs = set[tuple[SequenceStatus, SequenceStatus]]


def of(world: World, name: str) -> Sequence:
    return world.scheduler._sequences.by_id[name]


def beams(world: World, n: int = 2) -> None:
    """Requests "a", "a.1", ... whose tokens are chosen outside."""
    for request in Request("a", PROMPT, Sampling(8, num_candidates=4)).forked(n):
        world.scheduler.add(request)


def moves(world: World, *moves: tuple[str, str], spare: tuple[str, ...] = ()) -> None:
    world.scheduler.apply_beam_moves([BeamMove(name, source, 5) for name, source in moves], spare)
    world.scheduler.check_invariants()


def runs_to_its_end() -> None:
    world = World(64, block_size=4)
    world.add("a", PROMPT, 3)
    world.run()


def shares_a_prompt() -> None:
    world = World(64, block_size=4)
    world.add("a", PROMPT, 3)
    world.add("f", PROMPT, 3, fork_of="a")
    world.run()


def is_aborted_while_it_waits() -> None:
    world = World(64, block_size=4)
    world.add("a", PROMPT, 3)
    world.add("f", PROMPT, 3, fork_of="a")
    world.abort("f")
    world.step()
    world.scheduler.pool.limit_blocks = 1
    for name in ("a", "queued", "deferred"):
        if name != "a":
            world.add(name, PROMPT, 3)
        if name == "deferred":
            world.step()
        world.abort(name)
        world.step()


def is_deferred_until_the_limit_is_raised() -> None:
    world = World(64, block_size=4)
    world.scheduler.pool.limit_blocks = 1
    world.add("a", PROMPT, 3)
    world.step()
    world.scheduler.pool.limit_blocks = 64
    world.run()


def is_preempted() -> None:
    """A lone sequence holds 5 of 15 blocks, and 3 of 4 extents are to be idle."""
    world = World(15, block_size=4, blocks_per_extent=4, max_chunk_tokens=4)
    world.add("a", 20, 3)
    for status in (S.PREFILLING, S.DECODING):
        world.step()
        while of(world, "a").status is not status:
            world.step()
        world.scheduler.pool.make_idle(3)
        world.scheduler.check_invariants()
        assert of(world, "a").status is S.WAITING
        world.step()
    world.run()


def waits_for_the_prompt_of_a_preempted_leader() -> None:
    world = World(64, block_size=4, max_seqs=2)
    world.add("a", PROMPT, 9)
    world.add("b", PROMPT, 9)
    world.step()
    world.add("f", PROMPT, 9, fork_of="a")
    world.scheduler._preemption.preempt([of(world, "a"), of(world, "b")])
    world.abort("b")
    world.step()
    world.run()


def waits_deferred_for_the_prompt_of_another_leader() -> None:
    world = World(64, block_size=4, max_seqs=2)
    world.add("a", PROMPT, 9)
    world.add("f", PROMPT, 9, fork_of="a")
    world.step()
    world.step()
    world.add("g", PROMPT, 9, fork_of="f")
    world.scheduler._preemption.preempt([of(world, "a")])
    world.scheduler.pool.limit_blocks = 1
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


def is_aborted_while_it_runs() -> None:
    world = World(64, block_size=4, max_chunk_tokens=4)
    for steps in (1, 4):
        world.add(f"a{steps}", PROMPT, 9)
        for _ in range(steps):
            world.step()
        world.abort(f"a{steps}")
        world.step()


def ends_while_a_pending_plan_refers_to_its_row() -> None:
    for fails in (True, False):
        world = World(64, block_size=4, ahead=True)
        world.add("a", PROMPT, 9)
        if fails:
            world.runner.fail.add("a")
        else:
            world.step()
            plan = world.due()
            world.go_ahead()
            world.abort("a")
            world.finish(plan)
        world.run()


SCENARIOS: dict[Callable[[], None], Pairs] = {
    runs_to_its_end: {
        (S.NEW, S.WAITING), (S.WAITING, S.PREFILLING), (S.PREFILLING, S.DECODING), (S.DECODING, S.FINISHED),
    },
    shares_a_prompt: {(S.NEW, S.WAITING_FOR_PROMPT), (S.WAITING_FOR_PROMPT, S.WAITING)},
    is_aborted_while_it_waits: {
        (S.WAITING_FOR_PROMPT, S.FINISHED), (S.WAITING, S.FINISHED), (S.DEFERRED, S.FINISHED),
    },
    is_deferred_until_the_limit_is_raised: {(S.WAITING, S.DEFERRED), (S.DEFERRED, S.WAITING)},
    is_preempted: {(S.PREFILLING, S.WAITING), (S.DECODING, S.WAITING)},
    waits_for_the_prompt_of_a_preempted_leader: {(S.WAITING, S.WAITING_FOR_PROMPT)},
    waits_deferred_for_the_prompt_of_another_leader: {(S.DEFERRED, S.WAITING_FOR_PROMPT)},
    is_moved_before_its_admission: {
        (S.PREFILLING, S.PAUSED), (S.WAITING, S.WAITING_FOR_MOVE), (S.WAITING_FOR_MOVE, S.WAITING),
        (S.PAUSED, S.DECODING), (S.DECODING, S.PAUSED), (S.PAUSED, S.FINISHED),
    },
    is_spare: {
        *((state, S.WAITING_FOR_MOVE) for state in (S.WAITING_FOR_PROMPT, S.DEFERRED, S.PREFILLING, S.PAUSED)),
        (S.WAITING_FOR_MOVE, S.FINISHED),
    },
    is_aborted_while_it_runs: {(S.PREFILLING, S.FINISHED), (S.DECODING, S.FINISHED)},
    ends_while_a_pending_plan_refers_to_its_row: {
        (S.PREFILLING, S.FINISHING), (S.DECODING, S.FINISHING), (S.FINISHING, S.FINISHED),
    },
}  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_scenario_reaches_its_transitions(scenario: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    reached: Pairs = set()
    set_status = Sequence.set_status

    def record(sequence: Sequence, status: SequenceStatus) -> None:
        before = sequence.status
        set_status(sequence, status)
        reached.add((before, status))

    monkeypatch.setattr(Sequence, "set_status", record)
    scenario()
    assert SCENARIOS[scenario] <= reached


def test_the_scenarios_cover_every_allowed_transition() -> None:
    allowed = {(status, after) for status, others in TRANSITIONS.items() for after in others}
    assert set().union(*SCENARIOS.values()) == allowed
    assert set(TRANSITIONS) == set(S)


def in_status(status: SequenceStatus) -> Sequence:
    sequence = Sequence(Request("r", PROMPT, Sampling(4)), 0, None)
    sequence._status = status
    return sequence


@pytest.mark.parametrize(("before", "after"), list(product(S, S)), ids=lambda status: status.name)
def test_only_allowed_transitions_are_possible(before: SequenceStatus, after: SequenceStatus) -> None:
    sequence = in_status(before)
    if after in TRANSITIONS[before]:
        sequence.set_status(after)
        assert sequence.status is after
        return
    with pytest.raises(RuntimeError, match=f"request 'r' cannot change from '{before.value}' to '{after.value}'"):
        sequence.set_status(after)
    assert sequence.status is before


def test_what_a_status_means() -> None:
    running = {status for status in S if in_status(status).is_running}
    assert running == {S.PREFILLING, S.DECODING, S.PAUSED}
    assert {status for status in S if in_status(status).is_computed} == running - {S.PREFILLING}
    assert {status for status in S if in_status(status).has_ended} == {S.FINISHING, S.FINISHED}


@pytest.fixture
def mixed() -> World:
    """A world with a sequence in each status but NEW and the last two."""
    world = World(64, block_size=4, max_seqs=4, max_step_tokens=16, max_chunk_tokens=4)
    beams(world, 2)
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
    assert {name: s.status for name, s in world.scheduler._sequences.by_id.items()} == expected
    return world


@pytest.mark.parametrize("name", ["a", "a.1", "decodes", "deferred", "prefills", "waits", "behind"])
@pytest.mark.parametrize("status", S, ids=lambda status: status.name)
def test_a_status_that_no_container_agrees_with_is_found(mixed: World, name: str, status: SequenceStatus) -> None:
    sequence = of(mixed, name)
    if status is sequence.status:
        mixed.scheduler.check_invariants()
        return
    sequence._status = status
    # A queue of others and a beam without a row differ in the status alone, and in no container.
    if (name, status) == ("behind", S.WAITING_FOR_MOVE):
        return
    with pytest.raises(AssertionError):
        mixed.scheduler.check_invariants()
