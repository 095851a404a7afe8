"""Statuses of the sequences in a `World`: beams that a test moves, and a record of all transitions."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import World

from pagetide.scheduler.outcome import BeamMove
from pagetide.scheduler.request import Request, Sampling, Sequence, SequenceStatus

PROMPT = np.arange(10, dtype=np.int32)
Pairs = set[tuple[SequenceStatus, SequenceStatus]]


def of(world: World, name: str) -> Sequence:
    return world.scheduler.state.by_id[name]


def beams(world: World) -> None:
    """Requests "a" and "a.1" whose tokens are chosen outside."""
    for request in Request("a", PROMPT, Sampling(8, num_candidates=4)).forked(2):
        world.scheduler.add(request)


def moves(world: World, *moves: tuple[str, str], spare: tuple[str, ...] = ()) -> None:
    world.scheduler.apply_beam_moves([BeamMove(name, source, 5) for name, source in moves], spare)
    world.scheduler.check_invariants()


def transitions(monkeypatch: pytest.MonkeyPatch) -> Pairs:
    """Those that sequences make from now on."""
    reached: Pairs = set()
    set_status = Sequence.set_status

    def record(sequence: Sequence, status: SequenceStatus) -> None:
        before = sequence.status
        set_status(sequence, status)
        reached.add((before, status))

    monkeypatch.setattr(Sequence, "set_status", record)
    return reached
