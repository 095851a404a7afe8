"""Frames of a scheduler's random walk, decoded and compared with an oracle that loops over tables, references and pins."""

from __future__ import annotations

from typing import Any

import numpy as np
from cell_oracle import naive_cells, seated
from fakes import World
from frame_state import FrameState

from pagetide.frames.source import FrameSource, MemoryFigures, PoolFacts, encode
from pagetide.scheduler.scheduler import Scheduler

NOW = 1000.0
STATUSES = {"prefilling": 0, "decoding": 1, "paused": 2, "finishing": 3}


def source_of(world: World, **more: Any) -> FrameSource:
    """A source of frames of a world whose clock stands still."""
    facts, memory = PoolFacts("demo", 4096, 64), MemoryFigures({"kv": 7}, 3, 5)
    more = {"clock": lambda: NOW, "wall": lambda: 5000.0, **more}
    return FrameSource(lambda: world.scheduler, facts, lambda: memory, **more)


def naive_running(scheduler: Scheduler) -> list[list[int]]:
    rows, tables = scheduler.rows, scheduler.cache.tables
    return [
        [
            row, STATUSES[sequence.status.value], int(rows.known[row]), int(rows.computed[row]),
            sum(table.of(row).size for table in tables), sequence.preemptions,
        ]
        for row, sequence in sorted(seated(scheduler).items())
    ]  # fmt: skip


def naive_waiting(scheduler: Scheduler) -> tuple[int, list[str], set[str]]:
    """How many wait; the ids of those that wait for a row, in order; the ids of those that wait for another one."""
    waiting = [s for s in scheduler.state.by_id.values() if s.status.value.startswith(("waiting", "deferred", "reading"))]
    ready = [s for s in waiting if s.status.value in ("waiting", "deferred", "reading")]
    ready.sort(key=lambda s: (s.request.arrival + 30 * s.request.priority, s.request.priority, s.request.arrival, s.number))
    names = [s.request.request_id for s in ready]
    return len(waiting), names, {s.request.request_id for s in waiting} - set(names)


class Watcher:
    """Takes a frame at each look of a walk, decodes it, and compares all of it with the bookkeeping."""

    def __init__(self, seed: int = 0) -> None:
        self.source: FrameSource | None = None
        self._before: set[str] = set()  # what had ended by the first frame
        self.state = FrameState()
        self.ended: list[list[Any]] = []
        self.kinds: set[int] = set()  # of cells
        self.frames: list[bytes] = []
        self._rng = np.random.default_rng(seed)

    def __call__(self, world: World) -> None:
        if self.source is None:
            self.source = source_of(world)
        if self._rng.random() < 0.3:  # some step borders are not looked at
            return
        if not self.frames:
            self._before = {request.request_id for request, _ in world.scheduler.ends.since(0)}
        line = encode(self.source.take(full=bool(self._rng.random() < 0.1)))
        self.frames.append(line)
        self.state.apply(line)
        scheduler, frame = world.scheduler, self.state.frame
        assert self.state.cells.tolist() == naive_cells(scheduler)
        assert frame["running"] == naive_running(scheduler)
        assert frame["blocks"] == [*scheduler.cache.pool.counts(), scheduler.pool.limit_blocks]
        self._check_rows(scheduler)
        total, names, dependent = naive_waiting(scheduler)
        listed = [entry[0] for entry in frame["waiting"][1]]
        assert frame["waiting"][0] == total == len(listed)
        assert listed[: len(names)] == names and set(listed[len(names) :]) == dependent
        assert frame["step"] == scheduler.stats.steps
        assert frame["stats"]["generated_tokens"] == scheduler.stats.generated_tokens
        assert list(self.state.decisions.values())[-64:] == [
            {"n": n, "label": "", **told} for n, told in enumerate(scheduler.explain(), min(self.state.decisions, default=1))
        ]
        self.ended += frame["ended"]
        self.kinds |= {cell if cell < 16 else 16 + (cell >> 15) for cell in self.state.cells.tolist()}
        assert self.source.is_current

    def _check_rows(self, scheduler: Scheduler) -> None:
        assert self.state.rows.keys() == seated(scheduler).keys()
        for row, entry in self.state.rows.items():
            sequence = seated(scheduler)[row]
            request, cached = sequence.request, 0 if sequence.leader else sequence.root.num_cached_tokens
            limit = scheduler.limit_of(request)
            arrival = 5000.0 - NOW + request.arrival
            assert entry == [
                row, request.request_id, "", len(request.prompt_token_ids), limit, request.priority, round(arrival, 3), cached
            ]  # fmt: skip

    def check_ends(self, world: World) -> None:
        """After the walk: each end was told as it was."""
        assert self.source is not None
        self.ended += self.source.take()["ended"]  # of the last step
        told = {entry[0]: entry for entry in self.ended}
        for name, end in world.finished.items():
            assert name in self._before or told[name] == [name, "", end.reason, len(end.token_ids), end.error]
