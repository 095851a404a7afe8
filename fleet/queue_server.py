"""The queue as a service: journals what it decides, answers pulls and reads, and ends the epochs of workers that hang."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from .followers import Followers
from .journal import Durability, Journal, JournalWriter
from .messages import (
    CacheChanges,
    Deliveries,
    FleetInfo,
    FleetModel,
    NewRequest,
    Orders,
    Registration,
    Report,
    Submission,
    WorkerRefused,
)  # fmt: skip
from .request_queue import NewRecord, RequestQueue
from .status import fleet_status
from .worker_table import WorkerEntry

log = logging.getLogger(__name__)

PULL_S = 0.25  # a pull without orders is answered after so long
READ_S = 2.0  # a read without records is answered after so long
GONE_S = 30.0  # a front end that reads nothing for so long is forgotten; its requests go on
FORGET_EVERY_S = 5.0
UNKNOWN = "there is no such request, or it ended so long ago that it was forgotten"
CONFLICT = "the request of this id has another body: repeat the body, or use another idempotency key"


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """Settings of the queue.

    Attributes:
        journal: The file.
        durability: See `journal`.
        hang_s: A worker that says nothing for so long has its requests taken away.
        keep_s, most_kept: How long, and how many, ended requests can still be read.
        shares: Weights of tenants.
        hold_s: See `RequestQueue`.
        start_id: Of the fleet's start. Under another one the workers are those of the settings again, and the model may be
            another if nothing is unfinished.
    """

    journal: Path
    durability: Durability = "process"
    hang_s: float = 5.0
    keep_s: float = 600.0
    most_kept: int = 20_000
    shares: Mapping[str, float] = field(default_factory=dict)
    hold_s: float = 0.005
    start_id: str = ""


class QueueServer:
    """Serves front ends and workers. Make it on its event loop, then `start` it.

    Raises JournalError.
    """

    def __init__(self, options: QueueOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options
        self._clock = clock
        self._followers = Followers(clock, lambda: self.writer.fault is None)
        journal = Journal(options.journal, options.durability)
        try:
            with journal.reading():
                self._restore(journal)
        except BaseException:
            journal.close()
            raise
        self.num_recovered = len(self.queue.entries)
        self.writer = JournalWriter(journal)
        self._pulls: dict[str, asyncio.Event] = {}
        self._held: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self._model_known = asyncio.Event()
        if self.queue.workers.model is not None:
            self._model_known.set()

    def _restore(self, journal: Journal) -> None:
        self.secret = _secret(journal)
        boots = int(journal.fact("boots") or 0) + 1  # type: ignore[call-overload]
        journal.set_fact("boots", boots)  # epochs of an earlier start are stale for ever
        options = self.options
        unfinished = journal.unfinished()
        if journal.fact("start_id") != options.start_id:  # a fleet that starts, and not a queue that is started again
            for name in ("workers", "drained", *(() if unfinished else ("model",))):
                journal.forget_fact(name)
            journal.set_fact("start_id", options.start_id)
        self.queue = RequestQueue(options.shares, options.hold_s, None, boots << 32, journal.next_number)
        stored = journal.fact("model")
        self.queue.workers.model = None if stored is None else msgspec.convert(stored, FleetModel)
        drained = journal.fact("drained")
        self.queue.drained.update(drained if isinstance(drained, list) else ())
        for one in unfinished:
            self.queue.restore(one.number, one.request, one.records, self._clock())
            self._followers.add(one.number, one.records)

    def start(self) -> None:
        """Begin to look for hanging workers and to forget ended requests."""
        if self.num_recovered:
            log.info("the journal has %d unfinished requests: they go on", self.num_recovered)
        self._keep(self._watch())

    async def close(self) -> None:
        """Stop, with everything in the journal."""
        if self._held is not None:
            self._held.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.writer.close()

    # -- front ends --------------------------------------------------------------------------------------------------

    async def info(self, wait_s: float = 30.0) -> FleetInfo | None:
        """What a front end needs to know. None if no worker has come within `wait_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._model_known.wait()
        model = self.queue.workers.model
        return None if model is None else FleetInfo(model, self.secret, self.max_seqs)

    @property
    def max_seqs(self) -> int:
        """Sequences that the workers can run at the same time."""
        return sum(worker.max_seqs for worker in self.queue.workers)

    async def submit(self, front: str, requests: Sequence[NewRequest]) -> list[Submission]:
        """Accept requests, or attach to those that are known by their id. Returns once they are in the journal."""
        answers: list[Submission] = []
        accepted: list[tuple[int, NewRequest]] = []
        commits: list[asyncio.Future[set[int]]] = []
        for request in requests:
            if request.may_exist and accepted:  # while the journal is searched, others may attach to these
                commits.append(self.writer.commit(accepted))
                accepted = []
            is_here = self.queue.find(request.request_id) is not None
            known = await self._find(request.request_id) if request.may_exist or is_here else None
            if known is not None:
                answers.append(self._attach(front, *known, request))
            elif self.writer.fault is not None:
                answers.append(Submission(kind="unavailable", error=self.writer.fault))
            else:
                answers.append(self.queue.submit(request, self._clock()))
                if (number := answers[-1].number) is not None:
                    accepted.append((number, request))
                    self._followers.add(number)
                    self._followers.follow(front, number)
        if any(answer.number is not None for answer in answers):
            commits.append(self.writer.commit(accepted))
            missing = set().union(*[await one for one in commits])
            for place, answer in enumerate(answers):
                if answer.number in missing:
                    answers[place] = await self._withdraw(front, answer.number, requests[place])
                elif answer.request is not None:
                    answers[place] = await self._confirmed(answer)
            self._match()
        return answers

    async def _confirmed(self, attached: Submission) -> Submission:
        """The answer to an attachment, once what was accepted before it is journaled: it may have been withdrawn."""
        assert attached.number is not None and attached.request is not None
        if attached.number in self._followers or await self._find(attached.request.request_id) is not None:
            return attached
        return Submission(kind="unavailable", error=self.writer.fault or UNKNOWN)

    async def _withdraw(self, front: str, number: int, request: NewRequest) -> Submission:
        """The answer to a request that is not in the journal: the disk is full since its commit, or its id is in use."""
        self.queue.withdraw(number)
        self._followers.withdraw(number)
        self._wake_ordered()
        if (fault := self.writer.fault) is not None:
            return Submission(kind="unavailable", error=fault)
        known = await self._find(request.request_id)
        return Submission(kind="not_found", error=UNKNOWN) if known is None else self._attach(front, *known, request)

    async def attach(self, front: str, request_id: str, tenant: str, fingerprint: str) -> Submission:
        """Follow a known request of this tenant and body from its first record."""
        known = await self._find(request_id)
        if known is not None and known[1].tenant == tenant and known[1].fingerprint != fingerprint:
            return Submission(kind="conflict", error=CONFLICT)
        if known is None or known[1].tenant != tenant:
            return Submission(kind="not_found", error=UNKNOWN)
        self._followers.follow(front, known[0])
        await self.writer.commit()  # it may have been accepted just now
        return await self._confirmed(Submission(known[0], request=known[1]))

    def _attach(self, front: str, number: int, known: NewRequest, again: NewRequest) -> Submission:
        if known.tenant != again.tenant:
            return Submission(kind="not_found", error=UNKNOWN)
        if known.fingerprint != again.fingerprint:
            return Submission(kind="conflict", error=CONFLICT)
        self._followers.follow(front, number)
        return Submission(number, request=known)

    async def _find(self, request_id: str) -> tuple[int, NewRequest] | None:
        """A request of this id, ended or not. Its output can be followed."""
        if (entry := self.queue.find(request_id)) is not None:
            return entry.number, entry.request
        stored = await self.writer.find(request_id)
        if (entry := self.queue.find(request_id)) is not None:  # it has come meanwhile
            return entry.number, entry.request
        if stored is None:
            return None
        self._followers.add(stored.number, stored.records, is_complete=True)
        return stored.number, stored.request

    async def read(self, front: str, positions: Mapping[int, int] | None = None) -> Deliveries:
        """New records of the requests that a front end follows; waits for some.

        `positions` are said after a new start of the queue: the records that it has of each request that it follows.
        """
        unknown = []
        for number, position in {**self._followers.returned(front), **(positions or {})}.items():
            if number not in self._followers:
                stored = await self.writer.find_number(number)
                if stored is None:
                    unknown.append(number)
                    continue
                self._followers.add(number, stored.records, is_complete=True)
            self._followers.follow(front, number, position)
        return Deliveries(await self._followers.read(front, 0.0 if unknown else READ_S), unknown)

    async def leave(self, front: str, numbers: Sequence[int], cancels: bool) -> None:
        """A front end follows these requests no longer; with `cancels` they end."""
        self._followers.leave(front, numbers)
        if cancels:
            ended = [record for number in numbers if (record := self.queue.cancel(number)) is not None]
            await self._record(ended)
            self._wake_ordered()
            self._match()

    # -- workers -----------------------------------------------------------------------------------------------------

    async def register(self, registration: Registration) -> int:
        """A new epoch for a worker that has loaded its model. Raises WorkerRefused."""
        known = self.queue.workers.model
        if known is not None and (difference := known.difference(registration.model)) is not None:
            raise WorkerRefused(
                f"the worker {registration.worker} has {difference} of the fleet's model {known.name}: all workers of a fleet "
                "serve one model in one form; give it the fleet's settings, or start another fleet"
            )
        worker = self.queue.register(registration, self._clock())
        self._wake(worker.name)
        if known is None:
            await self.writer.set_fact("model", registration.model)
        self.queue.workers.model = registration.model if known is None else known
        self._model_known.set()
        log.info("the worker %s is ready under the epoch %d", worker.name, worker.epoch & 0xFFFFFFFF)
        self.queue.move_from_draining()
        self._match()
        return worker.epoch

    async def pull(self, worker: str, epoch: int) -> Orders:
        """Orders for a worker; waits for some. Raises StaleEpoch."""
        entry = self.queue.workers.get(worker, epoch)
        entry.seen_at = self._clock()
        if not entry.has_orders:
            self._match()
        if not entry.has_orders:
            changed = self._pulls.setdefault(worker, asyncio.Event())
            changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(PULL_S):
                    await changed.wait()
        entry = self.queue.workers.get(worker, epoch)
        entry.seen_at = self._clock()
        return entry.take_orders()

    async def report(self, report: Report) -> None:
        """Record what a worker computed. Returns once it is in the journal. Raises StaleEpoch."""
        new = self.queue.append(report, self._clock())
        await self._record(new)
        if self.queue.num_waiting:
            self._match()
        if report.released or report.state is not None or any(record.ends for record in new):
            self.queue.move_from_draining()
        self._wake_ordered()

    async def cache(self, worker: str, epoch: int, changes: CacheChanges) -> None:
        """The whole prefix cache of a worker. Raises StaleEpoch."""
        self.queue.workers.get(worker, epoch).take_cache(changes)

    def lose(self, worker: str, why: str) -> None:
        """Give the requests of a worker that has died or hangs to others."""
        if self.queue.workers.find(worker) is None:
            return
        numbers = self.queue.lose(worker)
        log.warning("the worker %s %s: %d requests go on elsewhere", worker, why, len(numbers))
        self._wake(worker)
        self._match()

    def drain(self, worker: str) -> WorkerEntry:
        """Hand over what a worker runs, and let it end. Raises StaleEpoch."""
        entry = self.queue.drain(worker)
        self._keep(self.writer.set_fact("drained", sorted(self.queue.drained)))
        self._wake_ordered()
        return entry

    # -- state ---------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The fleet's state and counters, as plain data."""
        return fleet_status(self.queue, self.writer, self._followers, self._clock())

    # -- inside ------------------------------------------------------------------------------------------------------

    def _match(self) -> None:
        changed, ended, held = self.queue.match(self._clock())
        for name in changed:
            self._wake(name)
        if ended:
            self._keep(self._record(ended))
        if held and self._held is None:
            self._held = asyncio.get_running_loop().call_later(self.options.hold_s, self._match_held)

    def _match_held(self) -> None:
        self._held = None
        self._match()

    def _wake_ordered(self) -> None:
        for name in self.queue.worker_orders():
            self._wake(name)

    def _wake(self, worker: str) -> None:
        if (changed := self._pulls.get(worker)) is not None:
            changed.set()

    async def _record(self, new: Sequence[NewRecord]) -> None:
        """Journal records, then show them to front ends."""
        if not new:
            return
        await self.writer.commit(
            records=[(record.number, record.position, record.data) for record in new],
            ended=[record.number for record in new if record.ends],
        )
        for record in new:
            self._followers.show(record.number, record.data, record.ends)

    async def _watch(self) -> None:
        """End the epochs of workers that say nothing, and forget what has ended long ago."""
        forgotten_at = self._clock()
        while True:
            await asyncio.sleep(min(0.25, self.options.hang_s / 8))
            now = self._clock()
            for worker in [one for one in self.queue.workers if now - one.seen_at > self.options.hang_s]:
                self.lose(worker.name, f"has said nothing for {self.options.hang_s:g} s")
            if now - forgotten_at > FORGET_EVERY_S:
                forgotten_at = now
                self._followers.forget(GONE_S, self.options.keep_s)
                await self.writer.forget(time.time() - self.options.keep_s, self.options.most_kept)

    def _keep(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _secret(journal: Journal) -> bytes:
    """The key of the prefix hashes that the fleet's processes share (0034-prefix-hash-secret)."""
    known = journal.fact("secret")
    if isinstance(known, bytes):
        return known
    secret = secrets.token_bytes(32)
    journal.set_fact("secret", secret)
    return secret
