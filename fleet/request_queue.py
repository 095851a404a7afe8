"""The queue's state and decisions, without input and output: the requests, the worker of each, and what is recorded.

    submit               match                 append (end)
    nothing ───► waiting ───────► assigned ──────────────► ended
                    ▲                │ worker dies, hangs, hands back
                    └────────────────┘ with its recorded tokens

The recorded output is the truth, and a worker a cache of it: a request goes on anywhere from its last recorded token. A request
that gets no further on three workers ends with an error (failures.py). The caller writes what a method returns to the journal,
and shows clients a record only after that.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..scheduler.forecast import LengthForecast
from ..server.messages import Failed, Piece, RequestEnd
from .failures import Failures
from .messages import Assignment, NewRequest, Record, Registration, Report, Submission, decode_record, encode_record
from .output_log import OutputLog
from .routing import RequestNeed, Weights, Why, route
from .tenants import TenantUse
from .waiting import MOST_WAITING, WaitingOrder
from .worker_table import WorkerEntry, WorkerLoad, WorkerTable

MOST_PASSED = 32  # requests that may go before one for which there is no room
LOOK_AHEAD = 64  # waiting requests that are tried for a worker
CANCELLED = "the request was cancelled by its client"


@dataclass(slots=True, eq=False)
class Entry:
    """One accepted request that has not ended. `RequestQueue` changes it.

    Attributes:
        worker: That it is assigned to.
        num_passed: How often another request went before it.
        held_since: When a better worker than the free ones was seen first.
        failures: Workers that died under it, and engines that failed on it.
    """

    number: int
    request: NewRequest
    log: OutputLog
    accepted_at: float
    worker: str | None = None
    num_passed: int = 0
    held_since: float | None = None
    failures: Failures = field(default_factory=Failures)


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A record for the journal: the `position`-th of request `number`."""

    number: int
    position: int
    data: bytes
    ends: bool


@dataclass(slots=True)
class QueueCounters:
    """What has happened since the start."""

    accepted: int = 0
    refused: int = 0
    ended: int = 0
    failed: int = 0
    cancelled: int = 0
    requeued: int = 0
    returned: int = 0
    faults: int = 0
    assigned: int = 0
    recorded_tokens: int = 0
    hit_blocks: int = 0
    prompt_blocks: int = 0
    workers_lost: int = 0
    repeated_reports: int = 0
    reasons: dict[str, int] = field(default_factory=dict)  # of routing


class RequestQueue:
    """All requests of a fleet that have not ended. Not thread-safe; the clock is the caller's.

    Attributes:
        drained: Names of workers that were ordered to end.

    Args:
        hold_s: How long a request waits for a better worker than the free ones.
        shares: Weights of tenants.
    """

    def __init__(
        self,
        shares: Mapping[str, float] | None = None,
        hold_s: float = 0.005,
        weights: Weights | None = None,
        last_epoch: int = 0,
        next_number: int = 1,
    ) -> None:
        self.entries: dict[int, Entry] = {}
        self.workers = WorkerTable(last_epoch)
        self.counters = QueueCounters()
        self.lengths = LengthForecast()
        self.tenants = TenantUse()
        self._by_id: dict[str, int] = {}
        self.drained: set[str] = set()
        self._waiting = WaitingOrder(shares)
        self._hold_s = hold_s
        self._weights = weights
        self._next_number = next_number
        self._aside: str | None = None  # the worker that is emptied for a request under suspicion
        self._lost: dict[str, tuple[int, str, str]] = {}  # workers that failed: process, node and reason

    # -- requests ----------------------------------------------------------------------------------------------------

    def find(self, request_id: str) -> Entry | None:
        """The unfinished request of this id."""
        number = self._by_id.get(request_id)
        return None if number is None else self.entries[number]

    def submit(self, request: NewRequest, now: float) -> Submission:
        """Accept a request, or refuse it. Its id is not known yet."""
        if (refusal := self._refusal(request)) is not None:
            self.counters.refused += 1
            return refusal
        number = self._next_number
        self._next_number += 1
        self.restore(number, request, (), now)
        self.counters.accepted += 1
        return Submission(number)

    def restore(self, number: int, request: NewRequest, records: Iterable[bytes], now: float) -> Entry:
        """Add an accepted request with its recorded output."""
        entry = Entry(number, request, OutputLog(request), now)
        for data in records:
            entry.log.append(decode_record(data), data)
        self.entries[number] = entry
        self.tenants.add(number, request)
        self._by_id[request.request_id] = number
        wait = self._waiting.put_back if records else self._waiting.add
        wait(number, request.priority, request.tenant, len(request.prompt_token_ids))
        self._next_number = max(self._next_number, number + 1)
        return entry

    def _refusal(self, request: NewRequest) -> Submission | None:
        num_prompt = len(request.prompt_token_ids)
        if len(self._waiting) >= MOST_WAITING:
            return Submission(kind="unavailable", error=f"{len(self._waiting):,} requests wait already: try again later")
        if error := self.tenants.refusal(request) or self._waiting.refusal(request.tenant, num_prompt):
            return Submission(kind="limited", error=error)
        model = self.workers.model
        if model is None or not len(self.workers):
            return None
        most = max(worker.most_blocks for worker in self.workers)
        needed = self._blocks(num_prompt + 1)
        if needed > most:
            return Submission(
                kind="too_long",
                error=f"the prompt's {num_prompt:,} tokens need {needed:,} blocks of {model.block_size} "
                f"tokens, and the largest pool of a worker may have {most:,}: shorten it, or give the workers more kv_memory",
            )
        return None

    def cancel(self, number: int, why: str = CANCELLED) -> NewRecord | None:
        """End a request that its client has left or cancelled, or another in its place. None if it has ended."""
        entry = self.entries.get(number)
        if entry is None:
            return None
        self.counters.cancelled += 1
        return self._append(entry, Failed(number, "cancelled", why))

    def withdraw(self, number: int) -> None:
        """Forget an accepted request that cannot be journaled: it is refused after all."""
        if (entry := self.entries.get(number)) is not None:
            self._forget(entry, aborts=True)
            self.counters.refused += 1

    # -- workers -----------------------------------------------------------------------------------------------------

    def register(self, registration: Registration, now: float) -> WorkerEntry:
        """Give a worker a new epoch. What it ran before goes back to the queue.

        If it was lost, and is the same process now, it was silent and not dead: it has failed on no request.
        """
        self.lose(registration.worker)
        pid, node, reason = self._lost.pop(registration.worker, (0, "", ""))
        if pid and (pid, node) == (registration.pid, registration.node):
            for entry in self.entries.values():
                entry.failures.forgive(registration.worker, reason)
        worker = self.workers.register(registration, now)
        worker.is_draining = worker.name in self.drained
        self._weights = self._weights or Weights.of(worker.model.block_size)
        return worker

    def lose(self, name: str, reason: str = "") -> list[NewRecord]:
        """Take all requests from a worker. Its epoch ends.

        With a `reason`, such as "has died", it is a failure of each request that the worker was told of, and the records are of
        those that end by it. Without one the worker only begins anew.
        """
        worker = self.workers.remove(name)
        if worker is None:
            return []
        if reason:
            self._lost[name] = worker.pid, worker.node, reason
        new, untold = [], worker.untold
        for number in sorted(worker.running):
            entry = self.entries[number]
            if reason and number not in untold:
                new += self._fail(entry, worker, reason)
            else:
                self._put_back(entry)
        self.counters.workers_lost += 1
        self.counters.requeued += len(worker.running) - len(new)
        return new

    def append(self, report: Report, now: float) -> list[NewRecord]:
        """Record what a worker computed. Raises StaleEpoch, and changes nothing, for a worker that was given up."""
        worker = self.workers.get(report.worker, report.epoch)
        if not worker.take_report(report, now):
            self.counters.repeated_reports += 1
            return []
        new = []
        for data in report.records:
            record = decode_record(data)
            entry = self.entries.get(record.number)
            if entry is None or entry.worker != worker.name:  # cancelled meanwhile
                continue
            new.append(self._append(entry, record, data))
            if entry.log.end is None:
                worker.update(entry.number, self._load(entry, computed=True))
        for number in report.released:
            entry = self.entries.get(number)
            if entry is not None and entry.worker == worker.name:
                worker.remove(number)
                self._put_back(entry)
                self.counters.returned += 1
        for number, error in report.faults.items():
            entry = self.entries.get(number)
            if entry is not None and entry.worker == worker.name:
                self.counters.faults += 1
                new += self._fail(entry, worker, f"failed: {error}")
        if report.state is not None:
            self._order_back(worker)
        return new

    def _fail(self, entry: Entry, worker: WorkerEntry, reason: str) -> list[NewRecord]:
        """Count a failure of a request, which goes on elsewhere. Returns its end if it was the last one."""
        if entry.failures.add(worker.name, reason, entry.log.num_tokens):
            return [self._append(entry, Failed(entry.number, "internal", entry.failures.error))]
        if self.workers.find(worker.name) is worker:
            worker.remove(entry.number)
        self._put_back(entry)
        return []

    def failures(self) -> list[tuple[int, Failures]]:
        """The failures of unfinished requests, by number, for the journal."""
        return [(number, entry.failures) for number, entry in self.entries.items() if entry.failures]

    def _append(self, entry: Entry, record: Record, data: bytes | None = None) -> NewRecord:
        entry.log.append(record, data)
        if isinstance(record, Piece):
            self.counters.recorded_tokens += len(record.token_ids)
            if entry.failures:
                entry.failures.pass_tokens(entry.log.num_tokens, len(entry.log.sequences))
        else:
            self._end(entry, record)
        records = entry.log.records
        return NewRecord(entry.number, len(records) - 1, records[-1], entry.log.end is not None)

    def _forget(self, entry: Entry, aborts: bool = False) -> None:
        if entry.number in self._waiting:
            self._waiting.remove(entry.number)
        if entry.worker is not None and (worker := self.workers.find(entry.worker)) is not None:
            if aborts:
                worker.cancel(entry.number)
            worker.remove(entry.number)
        del self.entries[entry.number]
        del self._by_id[entry.request.request_id]
        self.tenants.remove(entry.number, entry.request)

    def _end(self, entry: Entry, record: RequestEnd | Failed) -> None:
        is_cancelled = isinstance(record, Failed) and record.kind == "cancelled"
        self._forget(entry, aborts=is_cancelled)
        self.counters.ended += 1
        if isinstance(record, Failed):
            self.counters.failed += not is_cancelled
            return
        for output in entry.log.sequences:
            if output.finish_reason is not None:
                self.lengths.observe(len(output.token_ids), entry.request.most_new_tokens)

    def _put_back(self, entry: Entry) -> None:
        entry.worker = entry.held_since = None
        entry.num_passed = 0
        request = entry.request
        self._waiting.put_back(entry.number, request.priority, request.tenant, len(request.prompt_token_ids))

    # -- assignment --------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Waiting requests."""
        return len(self._waiting)

    def match(self, now: float) -> tuple[set[str], list[NewRecord], bool]:
        """Assign waiting requests to workers that can hold them.

        Returns the workers with new orders, records of requests that turned out to be at their end, and whether a request is
        held for a better worker: then call again soon.
        """
        changed = self._set_aside()
        ended: list[NewRecord] = []
        while self._waiting and (found := self._next_match(now)) is not None:
            entry, name, why = found
            if not (handovers := entry.log.handovers()):
                ended.append(self._append(entry, RequestEnd(entry.number, [], 0, num_generated=entry.log.num_tokens)))
                continue
            self.counters.reasons[why] = self.counters.reasons.get(why, 0) + 1
            self._assign(entry, self.workers.get(name), handovers, now)
            changed.add(name)
        held = any(self.entries[number].held_since is not None for number in itertools.islice(self._waiting, LOOK_AHEAD))
        return changed, ended, held

    def _set_aside(self) -> set[str]:
        """Empty a worker for the first waiting request under suspicion, unless one is alone on a worker now.

        Returns the worker with new orders. Other requests are not assigned to it, and those that are there go on elsewhere, the
        more urgent ones at their end. While more urgent requests wait, no worker is emptied.
        """
        waiting = [self.entries[number] for number in itertools.islice(self._waiting, LOOK_AHEAD)]
        entry = next((one for one in waiting if one.failures.is_suspect), None)
        if entry is not None and waiting[0].request.priority < entry.request.priority:
            entry = None
        workers = [worker for worker in self.workers if not worker.is_draining]
        before, self._aside = self._aside, None
        if entry is None or any(map(self._has_suspect, workers)):
            return set()
        needed, failed = self._load(entry, computed=False).blocks, entry.failures.workers
        able = [worker for worker in workers if needed <= worker.most_blocks]
        if not able:
            return set()
        worker = min(able, key=lambda one: (one.name != before, one.name in failed, one.num_sequences, one.name))
        self._aside = worker.name
        urgent = entry.request.priority
        numbers = sorted(worker.running.keys() - worker.releasing)
        numbers = [number for number in numbers if self.entries[number].request.priority >= urgent]
        for number in numbers:
            worker.release(number)
        return {worker.name} if numbers else set()

    def _has_suspect(self, worker: WorkerEntry) -> bool:
        """Whether a request under suspicion runs there."""
        return any(self.entries[number].failures.is_suspect for number in itertools.islice(worker.running, 1))

    def _next_match(self, now: float) -> tuple[Entry, str, str] | None:
        """The next request in order for which a worker has room, and that worker."""
        workers = [worker for worker in self.workers if not worker.is_draining]
        if not any(worker.asks for worker in workers):
            return None
        for number in itertools.islice(self._waiting, LOOK_AHEAD):
            entry = self.entries[number]
            name, why = self._route(entry, workers, now)
            if name is not None:
                self._count_passed(number)
                return entry, name, why
            # Others do not wait for a request that no pool may ever hold, nor for one with a worker set aside.
            if entry.num_passed >= MOST_PASSED and not entry.failures.is_suspect:
                needed = self._load(entry, computed=False).blocks
                if any(needed <= worker.most_blocks for worker in workers):
                    return None
        return None

    def _count_passed(self, number: int) -> None:
        for other in itertools.islice(self._waiting, LOOK_AHEAD):
            if other == number:
                return
            if self.entries[other].held_since is None:
                self.entries[other].num_passed += 1

    def _route(self, entry: Entry, workers: Sequence[WorkerEntry], now: float) -> tuple[str | None, str]:
        if entry.failures.is_suspect:
            workers = [worker for worker in workers if not worker.running]
        else:
            workers = [one for one in workers if one.name != self._aside and not self._has_suspect(one)]
        workers = [worker for worker in workers if worker.name not in entry.failures.workers] or workers
        load = self._load(entry, computed=False)
        may_hold = entry.held_since is None or now - entry.held_since < self._hold_s
        need = RequestNeed(load.blocks, load.forecast_blocks - load.blocks, entry.request.request_id, may_hold)
        digests = entry.request.digests
        views = [worker.view(worker.cached.leading(digests, now) if digests else 0) for worker in workers]
        assert self._weights is not None, "no worker is registered"
        found = route(need, views, self._weights)
        if found.why is not Why.HOLD:
            entry.held_since = None
        elif entry.held_since is None:
            entry.held_since = now
        return found.worker, str(found.why)

    def _assign(self, entry: Entry, worker: WorkerEntry, handovers: list[dict[str, object]], now: float) -> None:
        load, request = self._load(entry, computed=False), entry.request
        work = len(request.prompt_token_ids) + self.lengths.expected(0, request.most_new_tokens) * load.sequences
        self._waiting.remove(entry.number, work)
        entry.worker = worker.name
        if request.digests:
            self.counters.hit_blocks += worker.cached.leading(request.digests, now)
            self.counters.prompt_blocks += len(request.digests)
            worker.cached.expect(request.digests, now + EXPECTED_S)
        worker.add(entry.number, load)
        worker.assign(Assignment(entry.number, handovers, request.request_id))
        self.counters.assigned += 1

    def _load(self, entry: Entry, computed: bool) -> WorkerLoad:
        """What a request takes of a worker; `computed`: it has generated there."""
        request, outputs = entry.request, entry.log.sequences
        prompt, most = len(request.prompt_token_ids), request.most_new_tokens
        sequences = entry.log.num_unfinished
        shared = self._blocks(prompt)
        if request.is_beam_search:
            ahead = sequences * (self._blocks(prompt + most) - shared)
            return WorkerLoad(prompt, sequences, shared, shared + ahead, 0 if computed else shared)
        blocks = forecast = shared
        for one in outputs:
            if one.finish_reason is None:
                generated = len(one.token_ids)
                blocks += self._blocks(prompt + generated) - shared
                forecast += self._blocks(prompt + self.lengths.expected(generated, most)) - shared
        return WorkerLoad(prompt, sequences, blocks, max(blocks, forecast), 0 if computed else blocks)

    def _blocks(self, num_tokens: int) -> int:
        size = self.workers.model.block_size if self.workers.model is not None else 16
        return -(-num_tokens // size)

    # -- requests that move ------------------------------------------------------------------------------------------

    def drain(self, name: str) -> WorkerEntry:
        """Assign nothing more to a worker, and end it. Its requests are ordered back; without another worker they end there.

        A worker of this name that registers again is draining from its beginning. Raises StaleEpoch.
        """
        worker = self.workers.get(name)
        worker.is_draining = True
        self.drained.add(name)
        self.move_from_draining()
        return worker

    def move_from_draining(self) -> set[str]:
        """Order back what runs on draining workers, where there is another worker, and end those on which nothing runs.

        Returns the workers with new orders.
        """
        has_others = any(not worker.is_draining for worker in self.workers)
        changed = set()
        for worker in self.workers:
            if worker.is_draining:
                for number in sorted(worker.running.keys() - worker.releasing) if has_others else ():
                    worker.release(number)
                    changed.add(worker.name)
                if not worker.running:
                    worker.stop()
                    changed.add(worker.name)
        return changed

    def _order_back(self, worker: WorkerEntry) -> None:
        """Order requests back from a worker that was recalled below what it runs, where another one has room.

        The last ones in order go: of the least urgent priority, the youngest first.
        """
        missing = worker.missing_blocks - sum(worker.running[number].blocks for number in worker.releasing)
        if missing <= 0 or len(worker.running) - len(worker.releasing) <= 1:
            return
        others = [one for one in self.workers if one is not worker and not one.is_draining]
        room = {
            one.name: min(view.free_blocks + view.growable_blocks - view.growth_blocks, 1 << 40)
            for one in others
            if (view := one.view(0)).running < view.max_running
        }
        order = sorted((self.entries[number].request.priority, number) for number in worker.running.keys() - worker.releasing)
        for _, number in reversed(order):
            load = worker.running[number]
            place = max(room, key=lambda name: room[name], default=None)
            if missing <= 0 or place is None:
                return
            if room[place] >= load.forecast_blocks:
                room[place] -= load.forecast_blocks
                missing -= load.blocks
                worker.release(number)

    # -- checks ------------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Compare everything derived with what it is derived from. For tests."""
        assert self._by_id == {entry.request.request_id: number for number, entry in self.entries.items()}
        waiting = {number for number, entry in self.entries.items() if entry.worker is None}
        by_tenant: Counter[str] = Counter()
        for entry in self.entries.values():
            by_tenant[entry.request.tenant] += entry.request.num_sequences
        assert self.tenants.to_dict() == by_tenant
        assert waiting == set(self._waiting), "a request that is neither waiting nor assigned"
        assert len(self._waiting) == len(waiting)
        for worker in self.workers:
            numbers = {number for number, entry in self.entries.items() if entry.worker == worker.name}
            assert numbers == set(worker.running), "a worker and the queue differ in what it runs"
            assert worker.releasing <= numbers
            assert worker.num_sequences == sum(load.sequences for load in worker.running.values())
        names = {worker.name for worker in self.workers}
        assert all(entry.worker in names for entry in self.entries.values() if entry.worker is not None)
        for entry in self.entries.values():
            assert entry.log.end is None
            again = OutputLog(entry.request)
            for data in entry.log.records:
                again.append(decode_record(data), data)
            assert again.sequences == entry.log.sequences
            assert all(encode_record(decode_record(data)) == data for data in entry.log.records)


# A prompt that was assigned is counted as cached there for so long, until the worker says so
EXPECTED_S = 30.0
