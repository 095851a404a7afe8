"""Makes frames: a frame is the bookkeeping at a step border, full, or as the difference to the source's last frame.

    {"v": 1, "seq": 17, "time": 1795465254.123, "step": 991, "full": true,
     "pool": {"num_blocks", "blocks_per_extent", "block_size", "block_bytes", "model", "max_model_len"},
     "cells": runs of the changed cells (cells.py); full: of all that are not 0
     "blocks": [free, draining, live, cached, in_flight, mapped, limit],
     "left": [row, ...]            rows given up since the last frame; apply before "rows"
     "rows": [[row, id, label, prompt_tokens, limit_tokens, priority, arrival_time, cached_tokens], ...]
                                   assigned since; full: all. cached_tokens: of the prompt, at its first admission
     "running": [[row, status, known, computed, blocks, preemptions], ...]                  all rows with a sequence
     "waiting": [total, [[id, label, known, needed_blocks, priority, waited_s, preemptions, status], ...]]
     "ended": [[id, label, reason, tokens_generated, error], ...]                           since the last frame
     "decisions": [{"n", "label", ...}, ...]   made or changed since; full: all that are kept
     "stats": {...}, "host": [used, total] or null, "memory": {...}}

"pool" is in full frames only. With `text`, an entry of "rows" has the prompt's token ids as a ninth element, and one
of "ended" the output's token ids as a sixth. docs/page.md has the whole form.
"""

from __future__ import annotations

import heapq
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..cache.block_table import Index
from ..scheduler.outcome import Decision
from ..scheduler.request import Sequence, SequenceStatus
from ..scheduler.scheduler import Scheduler
from ..scheduler.state import SchedulerState
from ..scheduler.waiting import age
from .cells import CellReader, encode_changes

VERSION = 1
MOST_WAITING = 200  # listed; all are counted

Frame = dict[str, Any]
_INFINITE = (math.inf, -math.inf)
_DEPENDENT = (SequenceStatus.WAITING_FOR_PROMPT, SequenceStatus.WAITING_FOR_MOVE)
_COUNTERS = (
    "computed_tokens", "generated_tokens", "recomputed_tokens", "preemptions", "prompt_tokens", "cached_prompt_tokens",
    "demoted_blocks", "promoted_blocks", "moved_blocks", "forks",
)  # fmt: skip


class RowStatus(IntEnum):
    """What the sequence of a row does."""

    PREFILLING = 0
    DECODING = 1
    PAUSED = 2
    FINISHING = 3


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What does not change of an engine's pool, for full frames. `block_bytes` is 0 if blocks have no memory."""

    model: str
    block_bytes: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """The memory of an engine at one moment: the content of a frame's "memory", and the recalls so far."""

    content: dict[str, Any]
    recalls: int = 0
    recalled_bytes: int = 0


class FrameSource:
    """Makes the frames of one engine for one reader: each is the difference to the one before. Not thread-safe.

    Args:
        scheduler: Returns the present scheduler; a fault replaces it. Each frame is made between two of its calls.
        memory: The engine's memory now; cheap.
        clock: Seconds, as the arrivals of the requests.
        wall: Seconds since 1970.
        text: Put the token ids of prompts and outputs into the frames.
    """

    def __init__(
        self,
        scheduler: Callable[[], Scheduler],
        facts: PoolFacts,
        memory: Callable[[], MemoryFigures],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        text: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._facts = facts
        self._memory = memory
        self._clock = clock
        self._wall = wall
        self._text = text
        self._of: Scheduler | None = None  # that of the last frame
        self._seq = 0
        self._reader = CellReader(0)
        self._assigned: Index = np.empty(0, np.int64)
        self._seated: dict[int, Sequence] = {}
        self._order: Index = np.empty(0, np.int64)  # rows with a sequence, served last first
        self._preemptions: Index = np.empty(0, np.int64)  # of each row
        self._num_decisions = 0
        self._num_ends = 0
        self._progress: tuple[int, ...] = ()

    def take(self, full: bool = False) -> Frame:
        """The next frame, as plain data for `encode`. The first one, and one after a fault of the engine, is full."""
        scheduler = self._scheduler()
        if full or scheduler is not self._of:
            self._forget(scheduler)
            full = True
        state, stats, memory = scheduler.state, scheduler.stats, self._memory()
        pool, self._seq = scheduler.cache.pool, self._seq + 1
        frame: Frame = {"v": VERSION, "seq": self._seq, "time": round(self._wall(), 3), "step": stats.steps, "full": full}
        if full:
            frame["pool"] = {
                "num_blocks": pool.num_blocks,
                "blocks_per_extent": pool.blocks_per_extent,
                "block_size": scheduler.cache.block_size,
                "block_bytes": self._facts.block_bytes,
                "model": self._facts.model,
                "max_model_len": self._facts.max_model_len,
            }
        left, rows = self._changed_rows(state)
        frame["cells"] = encode_changes(*self._reader.read(state, self._order))
        frame["blocks"] = [*pool.counts(), scheduler.pool.limit_blocks]
        frame["left"], frame["rows"] = left, rows
        frame["running"] = self._running(state)
        frame["waiting"] = self._waiting(state)
        frame["decisions"] = self._new_decisions(scheduler)  # before the ends: they name requests
        frame["ended"] = self._new_ends(scheduler)
        frame["stats"] = {
            **{name: getattr(stats, name) for name in _COUNTERS},
            "recalls": memory.recalls,
            "recalled_bytes": memory.recalled_bytes,
        }
        host = scheduler.cache.host
        frame["host"] = [host.num_used, host.num_slots] if host.capacity else None
        frame["memory"] = memory.content
        self._progress = _progress(scheduler)
        return frame

    @property
    def is_current(self) -> bool:
        """Whether no step ran and no request came or ended since the last frame."""
        return self._of is not None and self._progress == _progress(self._scheduler())

    def _forget(self, scheduler: Scheduler) -> None:
        """Begin anew: the next frame is full. Ends that a frame has told are not told again."""
        num_rows = len(scheduler.rows.assigned)
        if self._of is None:
            self._num_ends = scheduler.ends.number
        self._of = scheduler
        self._reader = CellReader(scheduler.cache.pool.num_blocks)
        self._assigned = np.zeros(num_rows, np.int64)
        self._preemptions = np.zeros(num_rows, np.int64)
        self._seated = {}
        self._order = np.empty(0, np.int64)
        self._num_decisions = 0

    def _changed_rows(self, state: SchedulerState) -> tuple[list[int], list[list[Any]]]:
        """The rows given up and the rows assigned since the last frame. Updates the order of the rows."""
        now = state.rows.assigned
        changed = np.flatnonzero(now != self._assigned)
        if not len(changed):
            return [], []
        left = changed[self._assigned[changed] > 0].tolist()
        fresh = changed[now[changed] > 0].tolist()
        for row in left:
            del self._seated[row]
        entries = []
        to_wall = self._wall() - self._clock()
        for row in fresh:
            sequence = sequence_in(state, row)
            assert sequence is not None, "a row was assigned to no sequence"
            self._seated[row] = sequence
            self._preemptions[row] = sequence.preemptions  # it changes only without a row
            entries.append(self._row(row, sequence, int(state.rows.limit[row]), to_wall))
        self._assigned[changed] = now[changed]
        order = sorted(self._seated, key=lambda row: self._seated[row].key, reverse=True)
        self._order = np.array(order, np.int64)
        return left, entries

    def _row(self, row: int, sequence: Sequence, limit: int, to_wall: float) -> list[Any]:
        request = sequence.request
        entry = [
            row,
            request.request_id,
            request.label,
            len(request.prompt_token_ids),
            limit,
            request.priority,
            round(request.arrival + to_wall, 3),
            0 if sequence.leader else sequence.root.num_cached_tokens,
        ]
        if self._text:
            entry.append(request.prompt_token_ids.tolist())
        return entry

    def _running(self, state: SchedulerState) -> list[list[int]]:
        rows = np.flatnonzero(self._assigned)
        table = np.empty((len(rows), 6), np.int64)
        table[:, 0] = rows
        table[:, 1] = row_statuses(state)[rows]
        table[:, 2] = state.rows.known[rows]
        table[:, 3] = state.rows.computed[rows]
        table[:, 4] = state.cache.row_tables.held_blocks(rows)
        table[:, 5] = self._preemptions[rows]
        entries: list[list[int]] = table.tolist()
        return entries

    def _waiting(self, state: SchedulerState) -> list[Any]:
        now, blocks_for = self._clock(), state.cache.blocks_for
        entries = [
            [
                s.request.request_id,
                s.request.label,
                len(s.tokens),
                blocks_for(len(s.tokens)),
                s.request.priority,
                round(max(0.0, now - s.request.arrival), 1),
                s.preemptions,
                s.status.value,
            ]
            for s in first_waiting(state, MOST_WAITING)
        ]
        return [state.num_waiting, entries]

    def _new_decisions(self, scheduler: Scheduler) -> list[Decision]:
        log, since = scheduler.decisions, self._num_decisions
        if log.num_changes == since:
            return []
        self._num_decisions = log.num_changes
        return with_labels(scheduler, log.since(since))

    def _new_ends(self, scheduler: Scheduler) -> list[list[Any]]:
        if scheduler.ends.number == self._num_ends:
            return []
        entries = []
        for request, finished in scheduler.ends.since(self._num_ends):
            entry = [finished.request_id, request.label, finished.reason, len(finished.token_ids), finished.error]
            entries.append([*entry, finished.token_ids.tolist()] if self._text else entry)
        self._num_ends = scheduler.ends.number
        return entries


def sequence_in(state: SchedulerState, row: int) -> Sequence | None:
    """The sequence of `row`, also while it finishes; None if the row is free."""
    return state.by_row.get(row) or state.finishing.get(row)


def row_statuses(state: SchedulerState) -> npt.NDArray[np.uint8]:
    """The `RowStatus` of each row [num_rows]; that of a free row is undefined."""
    statuses = np.zeros(len(state.rows.assigned), np.uint8)
    statuses[state.decoding] = RowStatus.DECODING
    if state.paused:
        statuses[list(state.paused)] = RowStatus.PAUSED
    if state.finishing:
        statuses[list(state.finishing)] = RowStatus.FINISHING
    return statuses


def first_waiting(state: SchedulerState, most: int) -> list[Sequence]:
    """The first `most` sequences without a row, in the order of service; last those that wait for another one."""
    waiting = state.waiting
    first = waiting.queue[:most]
    if others := waiting.deferred + waiting.reading:
        first = heapq.nsmallest(most, first + others, key=age)
    if state.num_dependent and len(first) < most:
        dependent = (s for s in state.by_id.values() if s.status in _DEPENDENT)
        first += islice(dependent, min(state.num_dependent, most - len(first)))
    return first


def with_labels(scheduler: Scheduler, decisions: Iterable[tuple[int, Decision]]) -> list[Decision]:
    """Numbered decisions as plain data: each with "n", its number, and "label", its request's; "" where it is forgotten."""
    ended = {request.request_id: request.label for request, _ in scheduler.ends.since(0)}
    told = []
    for number, decision in decisions:
        name = decision.get("request_id", "")
        sequence = scheduler.state.by_id.get(name)
        label = ended.get(name, "") if sequence is None else sequence.request.label
        finite = {key: None if value in _INFINITE else value for key, value in decision.items()}  # for JSON
        told.append({"n": number, "label": label, **finite})
    return told


def _progress(scheduler: Scheduler) -> tuple[int, ...]:
    """Numbers that change with every step, and with every request that comes or ends."""
    ends, waiting = scheduler.ends.number, scheduler.num_waiting
    return id(scheduler), scheduler.stats.steps, ends, waiting + scheduler.num_running, scheduler.pool.limit_blocks


def encode(frame: Frame) -> bytes:
    """A frame as a line of JSON in UTF-8, without a newline."""
    try:
        return msgspec.json.encode(frame)
    except UnicodeEncodeError:  # a lone surrogate in an error's text, which the standard library escapes
        return json.dumps(frame, separators=(",", ":"), check_circular=False).encode("ascii")
