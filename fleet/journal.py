"""The journal of a queue: accepted requests and their recorded output, in SQLite.

What survives (`durability`):

    process   the queue's process may be killed at any moment: a commit is in the operating system's memory (WAL,
              synchronous=NORMAL). After a loss of power the last commits may be missing; the file is whole.
    power     a commit is on the disk before a client sees it (synchronous=FULL).

Why SQLite: docs/decisions/0054-fleet.md. The file and its folder are readable by their owner alone: they contain prompts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec

from ..common.on_error import OnError
from .messages import NewRequest, decode, encode

log = logging.getLogger(__name__)

Durability = Literal["process", "power"]
# Given up when the disk is full, so that running requests can be recorded to their end
RESERVE_BYTES = 16 << 20
SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    number INTEGER PRIMARY KEY, request_id TEXT UNIQUE NOT NULL, ended_at REAL, data BLOB NOT NULL,
    tenant TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS records (
    number INTEGER, position INTEGER, data BLOB NOT NULL, PRIMARY KEY (number, position)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS unfinished ON requests (number) WHERE ended_at IS NULL;
CREATE INDEX IF NOT EXISTS ended ON requests (ended_at) WHERE ended_at IS NOT NULL;
"""
VERSION = 1
FORGOTTEN_AT_ONCE = 2000  # requests that one transaction deletes
_ORPHANS = "DELETE FROM records WHERE number NOT IN (SELECT number FROM requests)"
_SELECT = "SELECT number, data FROM requests"
_OLDEST = "SELECT number FROM requests WHERE ended_at < ?"
# The places of the tenants' ended requests, the newest of each first, so that the tenants with most lose what is beyond.
_BEYOND = (
    "SELECT number FROM (SELECT number, row_number() OVER (PARTITION BY tenant ORDER BY ended_at DESC, number DESC) AS place "
    "FROM requests WHERE ended_at IS NOT NULL ORDER BY place, number DESC LIMIT -1 OFFSET ?)"
)

_MOST_TIME = float(1 << 40)  # in seconds since 1970
_MOST_NUMBER = 1 << 62  # of a request: SQLite's integers have 63 bits
_DAMAGED = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)  # ValueError: no UTF-8

Value = TypeVar("Value")


class JournalError(Exception):
    """The journal cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request in the journal, with its records in order."""

    number: int
    request: NewRequest
    records: list[bytes]


@dataclass(slots=True)
class JournalChanges:
    """What one commit writes.

    Attributes:
        requests: Number, id, encoded request and tenant of new ones.
        records: Number, position and data.
        ended: Numbers of requests that have ended.
        facts: Names and values.
    """

    requests: list[tuple[int, str, bytes, str]] = field(default_factory=list)
    records: list[tuple[int, int, bytes]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    facts: list[tuple[str, bytes]] = field(default_factory=list)

    def __iadd__(self, other: JournalChanges) -> JournalChanges:
        self.requests += other.requests
        self.records += other.records
        self.ended += other.ended
        self.facts += other.facts
        return self

    def __len__(self) -> int:
        return len(self.requests) + len(self.records) + len(self.ended) + len(self.facts)


class Journal:
    """The journal file. For one thread at a time.

    Raises JournalError if the file cannot be opened, is of another version, or is held by another queue.
    """

    def __init__(self, path: Path, durability: Durability = "process") -> None:
        self.path = path
        self._reserve = path.with_suffix(".reserve")
        if path.is_symlink():
            raise JournalError(f"the journal {path} is a symbolic link: name the file itself, or a folder")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
            path.chmod(0o600)
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=0.5)
        except (OSError, sqlite3.Error) as error:
            raise JournalError(f"the journal {path} cannot be opened: {error}") from error
        with OnError(self._database.close):
            self._open(durability)
        self.keep_reserve()

    def _open(self, durability: Durability) -> None:
        with self.reading():
            self._database.executescript(
                "PRAGMA auto_vacuum=INCREMENTAL; PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; "
                f"PRAGMA synchronous={'FULL' if durability == 'power' else 'NORMAL'}; PRAGMA journal_size_limit=67108864;"
                "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB);"
            )
            version = self.fact("version", object)
            if version is not None and version != VERSION:
                raise JournalError(f"the journal {self.path} has version {version!r}, and this release reads {VERSION}")
            self._database.executescript(SCHEMA)
            self._database.execute(_ORPHANS)  # of requests that were refused: their numbers are given again
            (last_end,) = self._database.execute("SELECT max(ended_at) FROM requests").fetchone()
            with self.decoding("the time of an end"):
                self._began = max(time.time(), min(float(last_end or 0.0), _MOST_TIME)) - time.monotonic()
            self.set_fact("version", VERSION)

    def now(self) -> float:
        """Seconds since 1970 by a clock without jumps, so that ended requests are kept for as long as was said.

        It begins with the system's clock when the file is opened, or at the newest end in the file if that is later.
        """
        return self._began + time.monotonic()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Errors of the file inside, as JournalError."""
        try:
            yield
        except sqlite3.Error as error:
            if "locked" in str(error):
                raise JournalError(f"the journal {self.path} is in use by another queue: stop that one first") from error
            raise JournalError(f"the journal {self.path} cannot be opened: {error}") from error

    # -- facts -------------------------------------------------------------------------------------------------------

    def fact(self, name: str, kind: type[Value]) -> Value | None:
        """A stored value of this type; None if it is not there. Raises JournalError for one of another type."""
        row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        with self.decoding(f"{name!r:.40}"):
            return None if row is None else decode(row[0], kind)

    def set_fact(self, name: str, value: object) -> None:
        """Store a value."""
        self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, encode(value)))

    def forget_fact(self, name: str) -> None:
        """Delete a stored value."""
        self._database.execute("DELETE FROM facts WHERE name = ?", (name,))

    # -- requests ----------------------------------------------------------------------------------------------------

    def commit(self, changes: JournalChanges) -> set[int]:
        """Write `changes`, all or nothing. Repeating a commit changes nothing. Raises sqlite3.Error.

        Returns the numbers of requests that are not written, since the journal has another request of the same id.
        """
        with self._transaction() as database:
            repeated = self._insert(changes.requests)
            database.executemany("INSERT OR IGNORE INTO records VALUES (?, ?, ?)", changes.records)
            now = self.now()
            database.executemany(
                "UPDATE requests SET ended_at = ? WHERE number = ?", ((now, number) for number in changes.ended)
            )
            database.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", changes.facts)
        return repeated

    def _insert(self, requests: Sequence[tuple[int, str, bytes, str]]) -> set[int]:
        insert = "INSERT OR IGNORE INTO requests (number, request_id, data, tenant) VALUES (?, ?, ?, ?)"
        if not requests or self._database.executemany(insert, requests).rowcount == len(requests):
            return set()
        find = "SELECT number FROM requests WHERE request_id = ?"
        rows = ((number, self._database.execute(find, (request_id,)).fetchone()) for number, request_id, *_ in requests)
        return {number for number, row in rows if row != (number,)}

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._database.execute("BEGIN")
        with OnError(self._roll_back):
            yield self._database
            self._database.execute("COMMIT")

    def _roll_back(self) -> None:
        with suppress(sqlite3.Error):  # it may have been rolled back already
            self._database.execute("ROLLBACK")

    def unfinished(self) -> list[StoredRequest]:
        """All requests that have not ended, in order. Raises JournalError for one that cannot be read, as do the others."""
        rows = self._database.execute(f"{_SELECT} WHERE ended_at IS NULL ORDER BY number").fetchall()
        return [self._stored(row) for row in rows]

    def find(self, request_id: str) -> StoredRequest | None:
        """The request of this id, ended or not."""
        row = self._database.execute(f"{_SELECT} WHERE request_id = ?", (request_id,)).fetchone()
        return None if row is None else self._stored(row)

    def find_number(self, number: int) -> StoredRequest | None:
        """The request of this number, ended or not."""
        row = self._database.execute(f"{_SELECT} WHERE number = ?", (number,)).fetchone()
        return None if row is None else self._stored(row)

    def _stored(self, row: tuple[int, bytes]) -> StoredRequest:
        number, data = row
        with self.decoding(f"request {number}"):
            return StoredRequest(number, decode(data, NewRequest), self._records(number))

    @contextmanager
    def decoding(self, what: str) -> Iterator[None]:
        """Raise JournalError for a row that holds something else than it should."""
        try:
            yield
        except _DAMAGED as error:
            raise JournalError(
                f"the journal {self.path} is damaged: {what} cannot be read ({type(error).__name__}: {error}); move the file "
                "away to begin with an empty one, or put a copy of it back"
            ) from error

    @property
    def next_number(self) -> int:
        """A number that no request has."""
        most: int | None
        (most,) = self._database.execute("SELECT max(number) FROM requests").fetchone()
        number = max(most or 0, self.fact("last_number", int) or 0) + 1
        with self.decoding("its last number"):
            if not 1 <= number <= _MOST_NUMBER:
                raise ValueError(f"{number} is not the number of a request")
        return number

    def forget(self, ended_before: float, most_kept: int) -> int:
        """Delete requests that ended before this time, and those beyond `most_kept`: FORGOTTEN_AT_ONCE at most.

        Beyond `most_kept` the oldest of the tenants that have most are deleted: no tenant displaces the results of one that
        has fewer. Returns how many. Raises sqlite3.Error.
        """
        (num_ended,) = self._database.execute("SELECT count(*) FROM requests WHERE ended_at IS NOT NULL").fetchone()
        query, values = (_OLDEST, [ended_before])
        if num_ended > most_kept:
            query, values = f"{_OLDEST} UNION {_BEYOND}", [ended_before, most_kept]
        query += " ORDER BY number LIMIT ?"
        numbers = self._database.execute(query, (*values, FORGOTTEN_AT_ONCE)).fetchall()
        if not numbers:
            return 0
        last = encode(self.next_number - 1)
        with self._transaction() as database:
            database.execute("INSERT OR REPLACE INTO facts VALUES ('last_number', ?)", (last,))
            database.executemany("DELETE FROM records WHERE number = ?", numbers)
            database.executemany("DELETE FROM requests WHERE number = ?", numbers)
        self._database.execute("PRAGMA incremental_vacuum(1024)").fetchall()
        return len(numbers)

    def _records(self, number: int) -> list[bytes]:
        query = "SELECT data FROM records WHERE number = ? ORDER BY position"
        return [data for (data,) in self._database.execute(query, (number,))]

    # -- a full disk -------------------------------------------------------------------------------------------------

    def keep_reserve(self) -> bool:
        """Occupy RESERVE_BYTES of the disk. Returns False if there is no room for them."""
        try:
            descriptor = os.open(self._reserve, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
            finally:
                os.close(descriptor)
        except OSError:
            self.give_reserve()
            return False
        return True

    def give_reserve(self) -> None:
        """Free the reserved bytes."""
        with suppress(OSError):
            self._reserve.unlink()

    def close(self) -> None:
        """Close the file, with all commits in it."""
        self._database.close()
        self.give_reserve()


_Waiter: TypeAlias = tuple[asyncio.Future[set[int]], set[int]]  # and the numbers of its new requests


class JournalWriter:
    """Commits changes in a thread of its own: all that have come during a commit share the next one.

    When a commit fails, the reserve of the disk is given up and the commit repeated. `fault` says why while new requests have
    to be refused. New requests that cannot be written are dropped, since they are refused; other changes are kept in memory
    and written later.
    """

    RETRY_S = 1.0

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.fault: str | None = None
        self.num_commits = 0
        self._lock = threading.Lock()  # of the journal
        self._pending = JournalChanges()
        self._waiters: list[_Waiter] = []
        self._unwritten = JournalChanges()
        self._running = False
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._is_closed = False

    def commit(
        self,
        requests: Iterable[tuple[int, NewRequest]] = (),
        records: Iterable[tuple[int, int, bytes]] = (),
        ended: Iterable[int] = (),
        facts: Iterable[tuple[str, object]] = (),
    ) -> asyncio.Future[set[int]]:
        """Add these changes to the next commit. The result comes once they are written, or, under a fault, kept in memory.

        The result is the numbers of new requests that are not in the journal and will not be: under a fault, or since their
        ids are in use. They have to be refused.
        """
        new = [(number, one.request_id, encode(one), one.tenant) for number, one in requests]
        self._pending += JournalChanges(new, list(records), list(ended), [(name, encode(value)) for name, value in facts])
        done: asyncio.Future[set[int]] = self._loop.create_future()
        self._waiters.append((done, {number for number, *_ in new}))
        self._start()
        return done

    async def find(self, request_id: str) -> StoredRequest | None:
        """See `Journal.find`."""
        return await self._locked(lambda: self.journal.find(request_id))

    async def find_number(self, number: int) -> StoredRequest | None:
        """See `Journal.find_number`."""
        return await self._locked(lambda: self.journal.find_number(number))

    async def forget(self, ended_before: float, most_kept: int) -> None:
        """See `Journal.forget`; without its limit. Under a fault the rest is forgotten later."""
        with suppress(sqlite3.Error):
            while await self._locked(lambda: self.journal.forget(ended_before, most_kept)) == FORGOTTEN_AT_ONCE:
                pass

    async def fact(self, name: str, kind: type[Value]) -> Value | None:
        """See `Journal.fact`."""
        return await self._locked(lambda: self.journal.fact(name, kind))

    async def set_fact(self, name: str, value: object) -> None:
        """Store a value; under a fault it is kept in memory."""
        await self.commit(facts=[(name, value)])

    async def close(self) -> None:
        """Write what is left, and close the journal."""
        await self.commit()
        self._is_closed = True
        if self._retry is not None:
            self._retry.cancel()
        if self.num_unwritten:
            log.error("%d changes could not be written to the journal: %s", self.num_unwritten, self.fault)
        await self._locked(self.journal.close)

    @property
    def num_unwritten(self) -> int:
        """JournalChanges that are in memory alone."""
        return len(self._unwritten)

    async def _locked(self, work: Callable[[], Value]) -> Value:
        def run() -> Value:
            with self._lock:
                return work()

        return await asyncio.to_thread(run)

    def _start(self) -> None:
        if self._running:
            return
        self._running = True
        waiters, self._waiters = self._waiters, []
        self._unwritten += self._pending
        self._pending, changes = JournalChanges(), self._unwritten
        self._loop.run_in_executor(None, self._write, changes).add_done_callback(
            lambda done: self._written(*done.result(), waiters)
        )

    def _write(self, changes: JournalChanges) -> tuple[str | None, set[int] | None]:
        """Write `changes`. Returns why the disk does not take more, and the result of `Journal.commit`; None: not written."""
        with self._lock:
            try:
                repeated = self.journal.commit(changes)
                return (None if self.fault is None else self._recover()), repeated
            except Exception as error:
                fault = f"the fleet's journal cannot be written ({error})"
            self.journal.give_reserve()
            try:
                return fault, self.journal.commit(changes)
            except Exception:
                return fault, None

    def _recover(self) -> str | None:
        return None if self.journal.keep_reserve() else self.fault

    def _written(self, fault: str | None, repeated: set[int] | None, waiters: list[_Waiter]) -> None:
        self._running = False
        self.num_commits += 1
        if repeated is None:
            repeated = {number for number, *_ in self._unwritten.requests}
            self._unwritten.requests = []
        else:
            self._unwritten = JournalChanges()
        if fault is not None and self.fault is None:
            log.error("%s: %s; new requests are refused until it can, running ones continue", self.journal.path, fault)
        elif fault is None and self.fault is not None:
            log.warning("the journal can be written again")
        self.fault = fault
        for done, numbers in waiters:
            if not done.done():
                done.set_result(numbers & repeated)
        if self._waiters:
            self._start()
        elif self.fault is not None and self._retry is None and not self._is_closed:
            self._retry = self._loop.call_later(self.RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self._start()
