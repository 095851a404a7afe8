"""What the queue knows of its workers: epoch, memory, running requests and cached blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .cached_blocks import CachedBlocks
from .messages import Assignment, CacheChanges, FleetModel, Orders, Registration, Report, StaleEpoch, WorkerState
from .routing import WorkerView


@dataclass(slots=True)
class WorkerLoad:
    """What a running request takes of its worker, in tokens and blocks. `WorkerEntry` keeps the sums."""

    prompt_tokens: int
    sequences: int
    blocks: int  # held now
    forecast_blocks: int  # held at its expected end
    backlog_blocks: int  # of its prompt, as long as it has no token


class WorkerEntry:
    """One worker under its present epoch.

    Attributes:
        running: The load of each assigned request, by number.
        releasing: Requests that were ordered back and have not come yet.
        is_draining: No more requests are assigned.
        seen_at: When it said something last.
    """

    def __init__(self, registration: Registration, epoch: int, now: float) -> None:
        self.name = registration.worker
        self.model: FleetModel = registration.model
        self.max_seqs = registration.max_seqs
        self.step_tokens = registration.step_tokens
        self.pid = registration.pid
        self.node = registration.node
        self.state: WorkerState = registration.state
        self.epoch = epoch
        self.seen_at = now
        self.running: dict[int, WorkerLoad] = {}
        self.releasing: set[int] = set()
        self.cached = CachedBlocks()
        self.is_draining = False
        self.stats: dict[str, Any] = {}
        self.num_assigned = 0
        self._last_report = 0
        self._orders: tuple[list[Assignment], list[int], list[int]] = ([], [], [])
        self._stop = False
        self._sums = WorkerLoad(0, 0, 0, 0, 0)

    # -- load --------------------------------------------------------------------------------------------------------

    def add(self, number: int, load: WorkerLoad) -> None:
        """Count a request that is assigned to it."""
        self.running[number] = load
        self.num_assigned += 1
        self._count(load, 1)

    def remove(self, number: int) -> None:
        """Count a request no longer."""
        load = self.running.pop(number, None)
        self.releasing.discard(number)
        if load is not None:
            self._count(load, -1)

    def update(self, number: int, load: WorkerLoad) -> None:
        """Count a request anew, which has grown."""
        before = self.running[number]
        self.running[number] = load
        self._count(before, -1)
        self._count(load, 1)

    def _count(self, load: WorkerLoad, sign: int) -> None:
        sums = self._sums
        sums.sequences += sign * load.sequences
        sums.blocks += sign * load.blocks
        sums.forecast_blocks += sign * load.forecast_blocks
        sums.backlog_blocks += sign * load.backlog_blocks

    @property
    def num_sequences(self) -> int:
        """Sequences of its requests."""
        return self._sums.sequences

    @property
    def asks(self) -> bool:
        """Whether more work would begin soon: there is a free place, and less than a full step of prompts to compute."""
        backlog_tokens = self._sums.backlog_blocks * self.model.block_size
        return self._sums.sequences < self.max_seqs and backlog_tokens < self.step_tokens

    @property
    def most_blocks(self) -> int:
        """Blocks that its lease may still become; those of all tables of a sequence count as one."""
        return self.state.limit_blocks // self.model.num_tables

    @property
    def missing_blocks(self) -> int:
        """Blocks that its requests hold, beyond what its lease may still become."""
        return self._sums.blocks - self.most_blocks

    def view(self, cached_blocks: int) -> WorkerView:
        """What routing needs to know of it. Blocks of all tables of a sequence count as one."""
        tables, sums, state = self.model.num_tables, self._sums, self.state
        return WorkerView(
            name=self.name,
            cached_blocks=cached_blocks,
            free_blocks=max(0, state.usable_blocks // tables - sums.blocks),
            growable_blocks=max(0, state.limit_blocks // tables - max(state.usable_blocks // tables, sums.blocks)),
            running=sums.sequences,
            max_running=self.max_seqs,
            backlog_blocks=sums.backlog_blocks,
            growth_blocks=sums.forecast_blocks - sums.blocks,
            pulls=self.asks,
            unused_blocks=max(0, state.unused_blocks // tables - sums.backlog_blocks),
        )

    # -- messages ----------------------------------------------------------------------------------------------------

    def take_report(self, report: Report, now: float) -> bool:
        """Take in what a report says of the worker. Returns False for a report that was taken before."""
        self.seen_at = now
        if report.sequence <= self._last_report:
            return False
        self._last_report = report.sequence
        if report.state is not None:
            self.state = report.state
            self.stats = report.state.stats or self.stats
        if report.cache is not None:
            self.take_cache(report.cache)
        return True

    def take_cache(self, changes: CacheChanges) -> None:
        """Follow the changes of its prefix cache."""
        self.cached.apply(changes.stored, changes.removed, changes.cleared)

    def assign(self, assignment: Assignment) -> None:
        """Order it to run a request."""
        self._orders[0].append(assignment)

    def cancel(self, number: int) -> None:
        """Order it to abort a request."""
        self._orders[1].append(number)

    def release(self, number: int) -> None:
        """Order it to hand a request back."""
        self.releasing.add(number)
        self._orders[2].append(number)

    def stop(self) -> None:
        """Order it to end."""
        self._stop = True

    @property
    def untold(self) -> set[int]:
        """Requests that are assigned to it in orders that it has not pulled."""
        return {assignment.number for assignment in self._orders[0]}

    @property
    def has_orders(self) -> bool:
        """Whether there is something to answer its pull with."""
        return self._stop or any(self._orders)

    def take_orders(self) -> Orders:
        """The orders since the last call."""
        orders = Orders(*self._orders, stop=self._stop)
        self._orders = ([], [], [])
        return orders


@dataclass(slots=True)
class WorkerTable:
    """The registered workers by name. Epochs grow from `last_epoch`."""

    last_epoch: int = 0
    model: FleetModel | None = None
    _entries: dict[str, WorkerEntry] = field(default_factory=dict)

    def __iter__(self) -> Iterator[WorkerEntry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def register(self, registration: Registration, now: float) -> WorkerEntry:
        """A worker under a new epoch, without load. Raises StaleEpoch while the same name is registered."""
        assert registration.worker not in self._entries
        self.last_epoch += 1
        entry = self._entries[registration.worker] = WorkerEntry(registration, self.last_epoch, now)
        self.model = self.model or registration.model
        return entry

    def get(self, name: str, epoch: int | None = None) -> WorkerEntry:
        """The worker of this name and epoch. Raises StaleEpoch."""
        entry = self._entries.get(name)
        if entry is None or (epoch is not None and entry.epoch != epoch):
            raise StaleEpoch(f"the worker {name} is not registered under the epoch {epoch}: it has to register again")
        return entry

    def find(self, name: str) -> WorkerEntry | None:
        """The worker of this name, if it is registered."""
        return self._entries.get(name)

    def remove(self, name: str) -> WorkerEntry | None:
        """Forget a worker. What it says later is stale."""
        return self._entries.pop(name, None)
