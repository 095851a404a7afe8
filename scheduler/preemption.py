"""Preemption: which sequences lose their blocks where blocks are short, how many of them, and how they wait.

A preempted sequence loses its row and blocks, keeps its tokens, and waits at its old place in the queue. Decodes, chunks of
prompts, admissions and recalls that lack blocks preempt by `preempt_until` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from ..cache.block_table import Index, Int32
from .forecast import Float
from .request import Sequence, SequenceStatus
from .state import SchedulerState


def by_worth(state: SchedulerState, sequences: Iterable[Sequence]) -> list[Sequence]:
    """Running `sequences` in the order of their worth; the last one is preempted first.

    The victim has, in this order: the lowest priority, no earlier preemption, the lowest cost per block to swap or
    recompute (whichever is cheaper), the latest place in order.
    """
    running = sorted(sequences)
    if not state.cache.host.capacity or state.cost is None:
        return running
    won, _, seconds = _at_stake(state, running)
    per_block = np.full(len(running), np.inf)
    np.divide(np.minimum(*seconds), won, out=per_block, where=won > 0)
    priority = np.array([s.request.priority for s in running])
    spared = np.array([s.preemptions == 0 for s in running])
    return [running[i] for i in np.lexsort((np.arange(len(running)), -per_block, spared, priority))]


def preempt_until(state: SchedulerState, attempt: Callable[[], int], among: Mapping[int, Sequence], *, spared: int = 0) -> int:
    """Preempt sequences of `among` (`state.by_row` or `state.paused`) until `attempt` succeeds, or only `spared` are left.

    `attempt` tries what blocks are needed for, and returns how many it still lacks at least; 0 or less: it succeeded. It is
    called first, and after each preemption. Returns what it returned last. Preempts no more sequences than are needed.
    """
    tables = state.cache.row_tables
    while (lacking := attempt()) > 0 and len(among) > spared:
        victims = by_worth(state, among.values())[spared:][::-1]
        # A victim frees what it holds at most, less what it shares, and needs no next block itself.
        freed = np.cumsum(tables.held_blocks(np.array([s.row for s in victims])) + tables.num_tables)
        preempt(state, victims[: int(np.searchsorted(freed, lacking)) + 1])
    return lacking


def preempt(state: SchedulerState, victims: list[Sequence]) -> None:
    """Preempt `victims`: they lose rows and blocks, keep their tokens and wait at their old places in the queue.

    Beams that wait for a move do not return before it. After other victims `SchedulerState.admits` is false for a step.
    """
    state.stats.preemptions += len(victims)
    state.has_preempted |= any(victim.status is not SequenceStatus.PAUSED for victim in victims)
    _explain(state, victims)
    for sequence in victims:
        sequence.preemptions += 1
    _requeue(state, victims, keep_tails=True)


def recompute(state: SchedulerState, blocks: Int32) -> None:
    """Requeue sequences that hold one of `blocks` (of unknown contents); drop the blocks from the prefix cache."""
    rows = state.cache.row_tables.rows_with(blocks).tolist()
    if rows:
        _requeue(state, [state.by_row[row] for row in rows], computed=False)
    state.cache.forget(blocks)


def _requeue(state: SchedulerState, sequences: list[Sequence], computed: bool = True, keep_tails: bool = False) -> None:
    """Take rows and blocks back; the sequences wait at their old places. `computed` blocks stay findable."""
    for sequence in sequences:
        sequence.refusal = 0
        sequence.computed = int(state.rows.computed[sequence.row])
        state.stats.recomputed_tokens += sequence.computed  # reduced on readmission by what is found
    state.leave(sequences, computed, keep_tails)
    state.waiting.look_again()
    for sequence in sequences:
        if sequence.status is SequenceStatus.PAUSED:
            state.waiting.wait_for_move(sequence)
        else:
            state.waiting.add(sequence)


def _at_stake(state: SchedulerState, sequences: list[Sequence]) -> tuple[Index, Index, tuple[Float, Float]]:
    """What preempting each sequence wins and loses: blocks that no other row has, the tokens computed in them, and
    the seconds to swap and to compute those tokens.
    """
    assert state.cost is not None
    rows = np.array([s.row for s in sequences], np.int64)
    won = state.cache.row_tables.sole_blocks(rows)
    tokens = state.cache.row_tables.sole_tokens(rows, state.rows.computed[rows])
    swap_s = np.multiply(state.cache.row_tables.blocks_for_each(tokens), state.cost.swap_s(1), dtype=float)
    return won, tokens, (swap_s, np.multiply(tokens, state.cost.compute_s(1), dtype=float))


def _explain(state: SchedulerState, victims: list[Sequence]) -> None:
    """Record what preempting `victims` wins and loses; of more than 64 only the last 64."""
    if state.cost is None:
        return
    victims = victims[-64:]
    won, tokens, (swap_s, compute_s) = _at_stake(state, victims)
    host = state.cache.host
    slots = host.num_slots if host.demotes else 0
    for i, victim in enumerate(victims):
        request = victim.request
        state.decisions.preempted(
            state.stats.steps,
            request.request_id,
            request.priority,
            int(won[i]),
            int(tokens[i]),
            float(swap_s[i]) if slots >= won[i] else None,
            float(compute_s[i]),
        )
