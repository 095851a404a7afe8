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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from .messages import NewRequest, decode, encode

log = logging.getLogger(__name__)

Durability = Literal["process", "power"]
RESERVE_BYTES = 16 << 20  # given up when the disk is full, so that running requests can be recorded to their end
SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB);
CREATE TABLE IF NOT EXISTS requests (
    number INTEGER PRIMARY KEY, request_id TEXT UNIQUE NOT NULL, data BLOB NOT NULL, ended_at REAL);
CREATE TABLE IF NOT EXISTS records (
    number INTEGER, position INTEGER, data BLOB NOT NULL, PRIMARY KEY (number, position)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS unfinished ON requests (number) WHERE ended_at IS NULL;
"""
VERSION = 1
_SELECT = "SELECT number, data FROM requests"

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
class Changes:
    """What one commit writes: new requests, records of (number, position, data), and the numbers of ended requests."""

    requests: list[tuple[int, NewRequest]]
    records: list[tuple[int, int, bytes]]
    ended: list[int]

    def __iadd__(self, other: Changes) -> Changes:
        self.requests += other.requests
        self.records += other.records
        self.ended += other.ended
        return self


class Journal:
    """The journal file. For one thread at a time.

    Raises JournalError if the file cannot be opened, is of another version, or is held by another queue.
    """

    def __init__(self, path: Path, durability: Durability = "process") -> None:
        self.path = path
        self._reserve = path.with_suffix(".reserve")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            path.chmod(0o600)
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=0.5)
            self._database.executescript(
                "PRAGMA auto_vacuum=INCREMENTAL; PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; "
                f"PRAGMA synchronous={'FULL' if durability == 'power' else 'NORMAL'}; PRAGMA journal_size_limit=67108864;"
                + SCHEMA
            )
            version = self.fact("version")
        except (OSError, sqlite3.Error) as error:
            raise JournalError(f"the journal {path} cannot be opened: {error}") from error
        if version is not None and version != VERSION:
            raise JournalError(f"the journal {path} has version {version!r}, and this release reads {VERSION}")
        self.set_fact("version", VERSION)
        self.keep_reserve()

    # -- facts -------------------------------------------------------------------------------------------------------

    def fact(self, name: str) -> object:
        """A stored value; None if it is not there."""
        row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else decode(row[0], object)

    def set_fact(self, name: str, value: object) -> None:
        """Store a value."""
        self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, encode(value)))

    # -- requests ----------------------------------------------------------------------------------------------------

    def commit(self, changes: Changes) -> None:
        """Write `changes`, all or nothing. Raises sqlite3.Error."""
        database = self._database
        database.execute("BEGIN")
        try:
            if changes.requests:
                rows = ((number, one.request_id, encode(one)) for number, one in changes.requests)
                database.executemany("INSERT INTO requests VALUES (?, ?, ?, NULL)", rows)
            if changes.records:
                database.executemany("INSERT INTO records VALUES (?, ?, ?)", changes.records)
            if changes.ended:
                now = time.time()
                ended = ((now, number) for number in changes.ended)
                database.executemany("UPDATE requests SET ended_at = ? WHERE number = ?", ended)
            database.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                database.execute("ROLLBACK")
            raise

    def unfinished(self) -> list[StoredRequest]:
        """All requests that have not ended, in order."""
        rows = self._database.execute(f"{_SELECT} WHERE ended_at IS NULL ORDER BY number").fetchall()
        return [StoredRequest(number, decode(data, NewRequest), self._records(number)) for number, data in rows]

    def find(self, request_id: str) -> StoredRequest | None:
        """The request of this id, ended or not."""
        return self._stored(self._database.execute(f"{_SELECT} WHERE request_id = ?", (request_id,)).fetchone())

    def find_number(self, number: int) -> StoredRequest | None:
        """The request of this number, ended or not."""
        return self._stored(self._database.execute(f"{_SELECT} WHERE number = ?", (number,)).fetchone())

    def _stored(self, row: tuple[int, bytes] | None) -> StoredRequest | None:
        return None if row is None else StoredRequest(row[0], decode(row[1], NewRequest), self._records(row[0]))

    @property
    def next_number(self) -> int:
        """A number that no request has."""
        most: int | None
        (most,) = self._database.execute("SELECT max(number) FROM requests").fetchone()
        last = self.fact("last_number")
        return max(most or 0, last if isinstance(last, int) else 0) + 1

    def forget(self, ended_before: float, most_kept: int) -> int:
        """Delete requests that ended before this time, and the oldest beyond `most_kept`. Returns how many."""
        query = (
            "SELECT number FROM requests WHERE ended_at < ?1 OR (ended_at IS NOT NULL AND number NOT IN "
            "(SELECT number FROM requests WHERE ended_at IS NOT NULL ORDER BY number DESC LIMIT ?2)) LIMIT 2000"
        )
        numbers = self._database.execute(query, (ended_before, most_kept)).fetchall()
        if not numbers:
            return 0
        with suppress(sqlite3.Error):
            self.set_fact("last_number", self.next_number - 1)
            self._database.execute("BEGIN")
            self._database.executemany("DELETE FROM records WHERE number = ?", numbers)
            self._database.executemany("DELETE FROM requests WHERE number = ?", numbers)
            self._database.execute("COMMIT")
            self._database.execute("PRAGMA incremental_vacuum(1024)").fetchall()
        return len(numbers)

    def _records(self, number: int) -> list[bytes]:
        query = "SELECT data FROM records WHERE number = ? ORDER BY position"
        return [data for (data,) in self._database.execute(query, (number,))]

    # -- a full disk -------------------------------------------------------------------------------------------------

    def keep_reserve(self) -> bool:
        """Occupy RESERVE_BYTES of the disk. Returns False if there is no room for them."""
        try:
            descriptor = os.open(self._reserve, os.O_CREAT | os.O_RDWR, 0o600)
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


class JournalWriter:
    """Commits changes in a thread of its own: all that have come during a commit share the next one.

    When a commit fails, the reserve of the disk is given up and the commit repeated. `fault` says why while new requests have
    to be refused; changes that cannot be written at all are kept in memory and written later.
    """

    RETRY_S = 1.0

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.fault: str | None = None
        self.num_commits = 0
        self._lock = threading.Lock()  # of the journal
        self._pending = Changes([], [], [])
        self._waiters: list[asyncio.Future[None]] = []
        self._unwritten = Changes([], [], [])
        self._running = False
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None

    async def commit(
        self,
        requests: Sequence[tuple[int, NewRequest]] = (),
        records: Iterable[tuple[int, int, bytes]] = (),
        ended: Iterable[int] = (),
    ) -> None:
        """Return once these changes are written, or, under a fault, are kept in memory."""
        self._pending += Changes(list(requests), list(records), list(ended))
        done: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(done)
        self._start()
        await done

    async def find(self, request_id: str) -> StoredRequest | None:
        """See `Journal.find`."""
        return await self._locked(lambda: self.journal.find(request_id))

    async def find_number(self, number: int) -> StoredRequest | None:
        """See `Journal.find_number`."""
        return await self._locked(lambda: self.journal.find_number(number))

    async def forget(self, ended_before: float, most_kept: int) -> int:
        """See `Journal.forget`."""
        return await self._locked(lambda: self.journal.forget(ended_before, most_kept))

    async def fact(self, name: str) -> object:
        """See `Journal.fact`."""
        return await self._locked(lambda: self.journal.fact(name))

    async def set_fact(self, name: str, value: object) -> None:
        """See `Journal.set_fact`."""
        await self._locked(lambda: self.journal.set_fact(name, value))

    @property
    def num_unwritten(self) -> int:
        """Changes that are in memory alone."""
        kept = self._unwritten
        return len(kept.requests) + len(kept.records) + len(kept.ended)

    async def _locked(self, work: Callable[[], Value]) -> Value:
        def run() -> Value:
            with self._lock:
                return work()

        return await asyncio.to_thread(run)

    def _start(self) -> None:
        if not self._running and (self._waiters or self.num_unwritten):
            self._running = True
            changes, self._pending = self._pending, Changes([], [], [])
            waiters, self._waiters = self._waiters, []
            self._unwritten += changes
            changes, self._unwritten = self._unwritten, Changes([], [], [])
            self._loop.run_in_executor(None, self._write, changes).add_done_callback(
                lambda done: self._written(done.result(), changes, waiters)
            )

    def _write(self, changes: Changes) -> str | None:
        """Write `changes`. Returns why the disk does not take more; the text begins with "!" if they are not written."""
        with self._lock:
            try:
                self.journal.commit(changes)
                return None if self.fault is None else self._recover()
            except sqlite3.Error as error:
                fault = f"the journal {self.journal.path} cannot be written: {error}"
            self.journal.give_reserve()
            try:
                self.journal.commit(changes)
            except sqlite3.Error:
                return "!" + fault
            return fault

    def _recover(self) -> str | None:
        return None if self.journal.keep_reserve() else self.fault

    def _written(self, fault: str | None, changes: Changes, waiters: list[asyncio.Future[None]]) -> None:
        self._running = False
        self.num_commits += 1
        if fault is not None and fault.startswith("!"):
            fault = fault[1:]
            changes += self._unwritten
            self._unwritten = changes
        if fault is not None and self.fault is None:
            log.error("%s; new requests are refused until there is room, running ones go on", fault)
        elif fault is None and self.fault is not None:
            log.warning("the journal is written again")
        self.fault = fault
        for one in waiters:
            if not one.done():
                one.set_result(None)
        if self._waiters:
            self._start()
        elif self.fault is not None and self._retry is None:
            self._retry = self._loop.call_later(self.RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        if not self._running:
            self._running = True
            changes, self._unwritten = self._unwritten, Changes([], [], [])
            self._loop.run_in_executor(None, self._write, changes).add_done_callback(
                lambda done: self._written(done.result(), changes, [])
            )
