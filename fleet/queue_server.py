"""The queue as a service: journals what it decides, answers pulls and reads, and ends the epochs of workers that hang."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from ..common.on_error import OnError
from .failures import Failures
from .followers import Followers
from .journal import Durability, Journal, JournalError, JournalWriter, StoredRequest
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
    decode_record,
)
from .request_queue import CANCELLED, NewRecord, RequestQueue
from .status import fleet_status
from .worker_table import WorkerEntry

log = logging.getLogger(__name__)

PULL_S = 0.25  # a pull without orders is answered after so long
READ_S = 2.0  # a read without records is answered after so long
# A front end that reads nothing for so long is forgotten; its requests go on
GONE_S = 30.0
FORGET_EVERY_S = 5.0
_Boots = Annotated[int, Meta(ge=0, lt=1 << 31)]  # starts of the queue: the upper bits of epochs
UNREAD = "no client has read the request"
UNKNOWN = "there is no such request, or its result has expired"
CONFLICT = "the request of this id has another body: repeat the body, or use another idempotency key"


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """Settings of the queue.

    Attributes:
        journal: The file.
        durability: See `journal`.
        hang_s: A worker that says nothing for so long has its requests taken away.
        keep_s, most_kept: How long, and how many, ended requests can still be read.
        unread_s: An unfinished request that no front end follows for so long is cancelled.
        shares: Weights of tenants.
        hold_s: See `RequestQueue`.
        start_id: Of the fleet's start. Under another one the workers are those of the settings again, and the model may be
            another if nothing is unfinished.
    """

    journal: Path
    durability: Durability = "process"
    hang_s: float = 5.0
    keep_s: float = 600.0
    unread_s: float = 3600.0
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
        with OnError(journal.close), journal.reading():
            self._restore(journal)
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
        boots = (journal.fact("boots", _Boots) or 0) + 1
        journal.set_fact("boots", boots)  # epochs of an earlier start are stale for ever
        options = self.options
        unfinished = journal.unfinished()
        # A fleet that starts, and not a queue that is started again.
        if journal.fact("start_id", str) != options.start_id:
            for name in ("workers", "drained", *(() if unfinished else ("model",))):
                journal.forget_fact(name)
            journal.set_fact("start_id", options.start_id)
        self.queue = RequestQueue(options.shares, options.hold_s, None, boots << 32, journal.next_number)
        self.queue.workers.model = journal.fact("model", FleetModel)
        self.queue.drained.update(journal.fact("drained", list[str]) or ())
        failures, now = dict(journal.fact("failures", list[tuple[int, Failures]]) or ()), journal.now()
        for one in unfinished:
            age_s = max(now - one.request.created, 0.0) if one.request.created else 0.0
            with journal.decoding(f"request {one.number}"):
                entry = self.queue.restore(one.number, one.request, one.records, self._clock() - age_s)
            entry.failures = failures.get(one.number, entry.failures)
            self._followers.add(one.number, one.records)

    def start(self) -> None:
        """Begin to look for hanging workers and to forget ended requests."""
        if self.num_recovered:
            log.info("resuming %d unfinished requests from the journal", self.num_recovered)
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
        max_seqs = sum(worker.max_seqs for worker in self.queue.workers)
        return None if model is None else FleetInfo(model, self.secret, max_seqs)

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
        self._match()
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
        stored = await self._whole(self.writer.find(request_id))
        if (entry := self.queue.find(request_id)) is not None:  # it has come meanwhile
            return entry.number, entry.request
        if stored is None:
            return None
        self._followers.add(stored.number, stored.records, is_complete=True)
        return stored.number, stored.request

    async def _whole(self, finding: Awaitable[StoredRequest | None]) -> StoredRequest | None:
        """A request of the journal. None, too, for one that is damaged, which the log tells: others go on."""
        try:
            stored = await finding
            if stored is not None:
                with self.writer.journal.decoding(f"request {stored.number}"):
                    for data in stored.records:
                        decode_record(data)
            return stored
        except JournalError as error:
            log.error("%s", error)
            return None

    async def read(self, front: str, positions: Mapping[int, int] | None = None) -> Deliveries:
        """New records of the requests that a front end follows; waits for some.

        `positions` are said after a new start of the queue: the records that it has of each request that it follows.
        """
        unknown = []
        for number, position in {**self._followers.returned(front), **(positions or {})}.items():
            if number not in self._followers:
                stored = await self._whole(self.writer.find_number(number))
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
            await self._cancel(numbers)

    async def cancel(self, response_id: str | None, tenant: str | None, older_s: float, why: str) -> int | None:
        """End the unfinished requests of a response, of a tenant, and accepted `older_s` ago or before. None is any.

        Returns how many there were, once their ends are in the journal. None: this tenant has had no such response.
        """
        before = self._clock() - older_s
        numbers = self.queue.tenants.numbers(response_id, tenant)
        numbers = [number for number in numbers if self.queue.entries[number].accepted_at <= before]
        if not numbers and response_id is not None:  # it may have ended: its first prompt has the number 0
            found = [one for name in (response_id, f"{response_id}.0") if (one := await self._find(name)) is not None]
            if not any(tenant in (None, request.tenant) for _, request in found):
                return None
        await self._cancel(numbers, why)
        return len(numbers)

    async def _cancel(self, numbers: Sequence[int], why: str = CANCELLED) -> None:
        ended = [record for number in numbers if (record := self.queue.cancel(number, why)) is not None]
        await self._record(ended)
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
        self._keep_failures()
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
        if report.faults:
            self._keep_failures()
        await self._record(new)
        if report.released or report.state is not None or any(record.ends for record in new):
            self.queue.move_from_draining()
        self._match()

    async def cache(self, worker: str, epoch: int, changes: CacheChanges) -> None:
        """The whole prefix cache of a worker. Raises StaleEpoch."""
        self.queue.workers.get(worker, epoch).take_cache(changes)

    def lose(self, worker: str, why: str) -> None:
        """Give the requests of a worker that has died or hangs to others."""
        if (entry := self.queue.workers.find(worker)) is None:
            return
        failed = self.queue.lose(worker, why)
        moved = len(entry.running) - len(failed)
        log.warning("the worker %s %s: %d requests go on elsewhere, %d fail", worker, why, moved, len(failed))
        self._keep_failures()
        self._keep(self._record(failed))
        self._wake(worker)
        self._match()

    def drain(self, worker: str) -> WorkerEntry:
        """Hand over what a worker runs, and let it end. Raises StaleEpoch."""
        entry = self.queue.drain(worker)
        self._keep(self.writer.set_fact("drained", sorted(self.queue.drained)))
        self._match()
        return entry

    # -- state ---------------------------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """The fleet's state and counters, as plain data."""
        return fleet_status(self.queue, self.writer, self._followers, self._clock())

    # -- inside ------------------------------------------------------------------------------------------------------

    def _match(self, was_held: bool = False) -> None:
        """Assign what waits, and wake the pulls of all workers with orders."""
        if was_held:
            self._held = None
        _, ended, held = self.queue.match(self._clock())
        for worker in self.queue.workers:
            if worker.has_orders:
                self._wake(worker.name)
        if ended:
            self._keep(self._record(ended))
        if held and self._held is None:
            self._held = asyncio.get_running_loop().call_later(self.options.hold_s, self._match, True)

    def _wake(self, worker: str) -> None:
        if (changed := self._pulls.get(worker)) is not None:
            changed.set()

    def _keep_failures(self) -> None:
        self.writer.commit(facts=[("failures", self.queue.failures())])

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
                unread_s = self.options.unread_s
                await self._cancel(self._followers.unread(unread_s), f"{UNREAD} for {unread_s:,g} s: it was cancelled")
                await self.writer.forget(self.writer.journal.now() - self.options.keep_s, self.options.most_kept)

    def _keep(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _secret(journal: Journal) -> bytes:
    """The key of the prefix hashes that the fleet's processes share (0034-prefix-hash-secret)."""
    if known := journal.fact("secret", bytes):
        return known
    secret = secrets.token_bytes(32)
    journal.set_fact("secret", secret)
    return secret
