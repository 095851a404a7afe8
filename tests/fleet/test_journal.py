"""The journal: what was acknowledged survives a kill; one queue at a time; a full disk; a bounded file."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagetide.fleet import journal as journal_module
from pagetide.fleet.journal import Journal, JournalChanges, JournalError, JournalWriter
from pagetide.fleet.messages import NewRequest, encode, encode_record
from pagetide.fleet.queue_server import QueueOptions, QueueServer
from pagetide.server.messages import Piece
from tests.fleet_stand_ins import new_request, until

WRITER = """
import asyncio, itertools, sys
from pathlib import Path
from pagetide.fleet.journal import Journal, JournalWriter
from tests.fleet_stand_ins import new_request, until

async def one(writer, number, places):
    for position in range(places):
        is_last = position == places - 1
        await writer.commit(
            [(number, new_request(f"r{number}"))] if not position else [],
            [(number, position, b"%d %d" % (number, position) * 50)],
            [number] if is_last else [],
        )
        print(number, position, int(is_last), flush=True)

async def main():
    journal = Journal(Path(sys.argv[1]))
    writer = JournalWriter(journal)
    print("ready", flush=True)
    first = journal.next_number
    await asyncio.gather(*(run(writer, first + i) for i in range(8)))

async def run(writer, first):
    for number in itertools.count(first, 8):
        await one(writer, number, 1 + number % 4)

asyncio.run(main())
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.sqlite"


def changes(*requests: NewRequest, first: int = 1, **more: Any) -> JournalChanges:
    rows = [(number, one.request_id, encode(one), one.tenant) for number, one in enumerate(requests, first)]
    return JournalChanges(rows, **more)


def start_writer(path: Path) -> subprocess.Popen[str]:
    root = str(Path(__file__).resolve().parents[2])
    environ = {**os.environ, "PYTHONPATH": root}
    process = subprocess.Popen([sys.executable, "-P", "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, env=environ)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def acknowledged_of(process: subprocess.Popen[str], lines: int) -> list[tuple[int, int, int]]:
    """What a writer acknowledged until it is killed, `lines` lines after its beginning."""
    assert process.stdout is not None
    found = [process.stdout.readline() for _ in range(lines)]
    process.send_signal(signal.SIGKILL)
    found += process.stdout.readlines()
    process.wait()
    process.stdout.close()
    whole = [line.split() for line in found if line.endswith("\n")]
    return [(int(number), int(position), int(ended)) for number, position, ended in whole]


def test_all_that_was_acknowledged_is_there_after_kills_in_order_and_nothing_half(path: Path) -> None:
    rng = random.Random(7)
    acknowledged: list[tuple[int, int, int]] = []
    for _ in range(3):
        acknowledged += acknowledged_of(start_writer(path), rng.randrange(1, 150))
        journal = Journal(path)
        unfinished = {one.number for one in journal.unfinished()}
        for number, position, ended in acknowledged:
            stored = journal.find_number(number)
            assert stored is not None, "an acknowledged request is lost"
            assert stored.request == new_request(f"r{number}")
            assert stored.records == [b"%d %d" % (number, place) * 50 for place in range(len(stored.records))]
            assert len(stored.records) > position, "an acknowledged record is lost"
            assert not ended or number not in unfinished
            assert (number in unfinished) == (len(stored.records) < 1 + number % 4), "half of a commit is there"
        assert journal.next_number > max(number for number, _, _ in acknowledged)
        journal.close()
    assert len(acknowledged) > 50


def test_the_files_are_the_owners_alone_while_open_and_after_a_kill(path: Path) -> None:
    old = os.umask(0)
    try:
        journal = Journal(path)
    finally:
        os.umask(old)
    journal.commit(changes(new_request("r")))
    files = list(path.parent.iterdir())
    assert {file.name for file in files} >= {"journal.sqlite", "journal.sqlite-wal", "journal.reserve"}
    assert [file for file in files if file.stat().st_mode & 0o077] == []
    assert path.parent.stat().st_mode & 0o777 == 0o700
    journal.close()
    path.chmod(0o644)  # restored from a backup, for example
    process = start_writer(path)
    files = list(path.parent.iterdir())
    acknowledged_of(process, 3)
    assert [file for file in files if file.stat().st_mode & 0o077] == []


def test_another_queue_cannot_open_it_meanwhile_and_can_afterwards(path: Path) -> None:
    journal = Journal(path)
    with pytest.raises(JournalError, match=r"journal\.sqlite is in use by another queue: stop that one first"):
        Journal(path)
    journal.commit(changes(new_request("r")))
    journal.close()
    process = start_writer(path)
    with pytest.raises(JournalError, match="is in use by another queue"):
        Journal(path)
    acknowledged_of(process, 1)
    Journal(path).close()


def test_a_file_that_is_no_journal_is_refused_and_stays_as_it_is(path: Path) -> None:
    path.parent.mkdir(parents=True)
    for content in (b"no database " * 1000, b"SQLite format 3\0" + b"\xff" * 8000):
        path.write_bytes(content)
        with pytest.raises(JournalError, match=r"journal\.sqlite cannot be opened: file is not a database"):
            Journal(path)
        assert path.read_bytes() == content


def test_a_damaged_journal_is_refused_by_name(path: Path) -> None:
    journal = Journal(path)
    journal.commit(changes(*(new_request(f"r{i}", prompt=500) for i in range(200))))
    journal.close()
    data = bytearray(path.read_bytes())
    data[8192:] = os.urandom(len(data) - 8192)
    path.write_bytes(data)

    def read() -> None:
        journal = Journal(path)
        with journal.reading():
            journal.unfinished()

    with pytest.raises(JournalError, match=r"journal\.sqlite cannot be opened: "):
        read()


@pytest.mark.parametrize(
    ("statement", "value", "said"),
    [
        ("UPDATE facts SET value = ? WHERE name = 'boots'", encode(1 << 40), "'boots' cannot be read (ValidationError: "),
        ("INSERT INTO facts VALUES ('last_number', ?)", encode((1 << 63) - 1), "its last number cannot be read (ValueError: "),
        ("INSERT INTO facts VALUES ('drained', ?)", encode([["w"]]), "'drained' cannot be read (ValidationError: Expected"),
        ("UPDATE facts SET value = ? WHERE name = 'secret'", "text", "'secret' cannot be read (TypeError: "),
        ("UPDATE requests SET data = ?", b"\x92\xa2\xff\xff\x80", "request 1 cannot be read (UnicodeDecodeError: "),
        ("UPDATE requests SET data = ?", encode(["r1", {}]), "request 1 cannot be read (ValidationError: its handover has no"),
        ("INSERT INTO records VALUES (1, 1, ?)", b"\x82\xa4type", "request 1 cannot be read (DecodeError: Input"),
        ("INSERT INTO records VALUES (1, 1, ?)", encode_record(Piece(1, -3, "x", [5])), "a record is of continuation -3, and"),
    ],
)
def test_a_damaged_row_is_told_by_its_name(path: Path, statement: str, value: object, said: str) -> None:
    async def open_once() -> None:
        await QueueServer(QueueOptions(path)).close()

    asyncio.run(open_once())
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("INSERT INTO requests (number, request_id, data) VALUES (1, 'r1', ?)", (encode(new_request("r1")),))
    assert database.execute(statement, (value,)).rowcount == 1
    database.close()
    with pytest.raises(JournalError, match=re.escape(f"the journal {path} is damaged: ") + ".*" + re.escape(said)):
        asyncio.run(open_once())


def test_another_version_is_refused_with_both_versions(path: Path) -> None:
    for version in (None, 2, "1"):
        journal = Journal(path)
        journal.set_fact("version", version)
        journal.close()
        if version is not None:
            with pytest.raises(JournalError, match=f"has version {version!r}, and this release reads 1"):
                Journal(path)
            path.unlink()


def test_what_is_no_file_is_refused_and_a_linked_folder_is_not(tmp_path: Path) -> None:
    (tmp_path / "folder.sqlite").mkdir()
    with pytest.raises(JournalError, match=r"folder\.sqlite cannot be opened: .*[Ii]s a directory"):
        Journal(tmp_path / "folder.sqlite")
    (victim := tmp_path / "victim").write_text("text")
    victim.chmod(0o644)
    (link := tmp_path / "journal.sqlite").symlink_to(victim)
    with pytest.raises(JournalError, match="is a symbolic link"):
        Journal(link)
    assert victim.stat().st_mode & 0o777 == 0o644
    with pytest.raises(JournalError, match=r"journal\.sqlite cannot be opened: "):
        Journal(victim / "journal.sqlite")
    (folder := tmp_path / "folder").mkdir()
    (folder / "journal.reserve").symlink_to(victim)
    (tmp_path / "linked").symlink_to(folder)
    Journal(tmp_path / "linked" / "journal.sqlite").close()
    assert victim.read_text() == "text"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_writable_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(JournalError, match="Permission denied"):
        Journal(tmp_path / "journal.sqlite")
    tmp_path.chmod(0o700)


def test_unfinished_requests_are_never_forgotten(path: Path) -> None:
    journal = Journal(path)
    journal.commit(changes(*(new_request(f"r{i}") for i in range(1, 6)), ended=[2, 4, 5]))
    assert journal.forget(0.0, 1) == 2
    assert [journal.find_number(number) is not None for number in range(1, 6)] == [True, False, True, False, True]
    assert journal.forget(time.time() + 1.0, 9) == 1 and [one.number for one in journal.unfinished()] == [1, 3]
    journal.close()


def test_a_commit_that_is_repeated_changes_nothing(path: Path) -> None:
    journal = Journal(path)
    both = changes(new_request("r"), records=[(1, 0, b"a"), (1, 1, b"b")])
    assert journal.commit(both) == set() and journal.commit(both) == set()
    (stored,) = journal.unfinished()
    assert stored.records == [b"a", b"b"]
    journal.close()


def test_records_without_their_request_are_not_found_again_under_a_number_that_is_given_anew(path: Path) -> None:
    journal = Journal(path)
    journal.commit(JournalChanges(records=[(1, 0, b"of a refused request")]))
    journal.close()
    journal = Journal(path)
    assert journal.next_number == 1
    journal.commit(changes(new_request("r")))
    (stored,) = journal.unfinished()
    assert stored.records == []
    journal.close()


def limit_pages(journal: Journal, more: int | None) -> None:
    """Let the file grow by so many pages and no more: a full disk."""
    pages = journal._database.execute("PRAGMA page_count").fetchone()[0]
    journal._database.execute(f"PRAGMA max_page_count={1 << 30 if more is None else pages + more}").fetchone()


@pytest.fixture(autouse=True)
def _quick_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JournalWriter, "RETRY_S", 0.01)


@asynccontextmanager
async def closing(path: Path) -> AsyncIterator[JournalWriter]:
    writer = JournalWriter(Journal(path))
    yield writer
    await writer.close()


@pytest.fixture
def writer(path: Path) -> AbstractAsyncContextManager[JournalWriter]:
    return closing(path)


async def until_written(writer: JournalWriter) -> None:
    await until(lambda: writer.fault is None and not writer.num_unwritten)


async def test_with_a_full_disk_requests_are_refused_records_kept_and_written_in_order_later(
    writer: JournalWriter, path: Path
) -> None:
    journal = writer.journal
    assert await writer.commit([(1, new_request("r1"))]) == set()
    limit_pages(journal, 0)
    big = [(1, position, bytes(3000)) for position in range(20)]
    assert await writer.commit([(2, new_request("r2"))], big[:10], [2]) == {2}
    assert writer.fault is not None and "database or disk is full" in writer.fault and str(path) not in writer.fault
    assert await writer.commit([(3, new_request("r3"))]) == {3}
    assert await writer.commit((), big[10:], [1], [("workers", ["w"])]) == set()
    assert writer.num_unwritten
    assert await writer.find("r2") is None
    limit_pages(journal, None)
    await until_written(writer)
    stored = await writer.find("r1")
    assert stored is not None and stored.records == [data for _, _, data in big]
    assert await writer.fact("workers", list) == ["w"]
    assert await writer.find("r2") is None and await writer.find("r3") is None
    assert await writer.commit([(2, new_request("r2"))]) == set(), "a refused request may come again"


async def test_the_reserve_lets_commits_through_and_the_fault_lasts_until_it_is_there_again(
    writer: JournalWriter, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = writer.journal
    give = journal.give_reserve

    def give_and_grow() -> None:
        give()
        limit_pages(journal, None)

    with monkeypatch.context() as patch:
        patch.setattr(journal, "give_reserve", give_and_grow)
        patch.setattr(journal, "keep_reserve", lambda: False)
        limit_pages(journal, 0)
        assert await writer.commit([(1, new_request("r1", prompt=9000))]) == set(), "it is written, and so accepted"
        assert writer.fault is not None and writer.num_unwritten == 0
        assert not path.with_suffix(".reserve").exists()
    await until_written(writer)
    assert path.with_suffix(".reserve").stat().st_size == 16 << 20
    assert await writer.find("r1") is not None


async def test_a_request_id_in_use_is_no_full_disk_and_concerns_its_request_alone(writer: JournalWriter) -> None:
    await writer.commit([(1, new_request("r"))])
    first, second = await asyncio.gather(
        writer.commit([(2, new_request("r")), (3, new_request("s"))], [(1, 0, b"a")]), writer.commit([(4, new_request("t"))])
    )
    assert (first, second) == ({2}, set())
    assert writer.fault is None and writer.num_unwritten == 0
    stored = await writer.find("r")
    assert stored is not None and (stored.number, stored.records) == (1, [b"a"])
    assert [one.number for one in writer.journal.unfinished()] == [1, 3, 4]


async def test_forgetting_on_a_full_disk_leaves_a_journal_that_can_be_written(writer: JournalWriter) -> None:
    journal = writer.journal
    await writer.commit([(1, new_request("r"))], ended=[1])

    def fail(action: int, *_: object) -> int:
        return sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_DELETE else sqlite3.SQLITE_OK

    journal._database.set_authorizer(fail)
    await writer.forget(time.time() + 1.0, 10)
    journal._database.set_authorizer(None)
    assert await writer.find("r") is not None
    assert await writer.commit([(2, new_request("s"))]) == set() and writer.fault is None
    await writer.forget(time.time() + 1.0, 10)
    assert await writer.find("r") is None


async def test_forgetting_goes_on_until_nothing_is_too_old(writer: JournalWriter) -> None:
    await writer.commit([(i, new_request(f"r{i}")) for i in range(1, 5002)], ended=range(1, 5001))
    await writer.forget(time.time() + 1.0, 10)
    assert [one.number for one in writer.journal.unfinished()] == [5001]
    assert await writer.find_number(5000) is None


async def test_what_cannot_be_encoded_raises_for_its_caller_and_the_writer_goes_on(writer: JournalWriter) -> None:
    request = new_request("r")
    request.handover["sampling"]["seed"] = 1 << 70
    with pytest.raises(OverflowError):
        await writer.commit([(1, request)])
    assert await writer.commit([(2, new_request("s"))]) == set() and writer.fault is None


async def test_an_unexpected_error_of_a_commit_is_a_fault_and_does_not_stop_the_writer(
    writer: JournalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = writer.journal

    def broken(_: JournalChanges) -> set[int]:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "commit", broken)
        await writer.commit(records=[(1, 0, b"a")])
        assert writer.fault is not None and "no memory" in writer.fault
    await until_written(writer)


async def test_a_closed_writer_tries_nothing_more(writer: JournalWriter, path: Path) -> None:
    journal = writer.journal
    limit_pages(journal, 0)
    await writer.commit(records=[(1, position, bytes(3000)) for position in range(10)])
    await writer.close()
    assert writer._retry is None or writer._retry.cancelled()
    Journal(path).close()


def test_ended_requests_are_kept_for_their_time_whatever_the_systems_clock_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = {"time": 1e9, "monotonic": 0.0}
    clock = SimpleNamespace(time=lambda: now["time"], monotonic=lambda: now["monotonic"])
    monkeypatch.setattr(journal_module, "time", clock)
    journal = Journal(tmp_path / "journal.sqlite")
    # While it is open, and while it is closed.
    for number, jump in enumerate((86_400.0, -86_400.0, -86_400.0, -1e6), 1):
        journal.commit(JournalChanges([(number, f"r{number}", encode(new_request("r")), "")], ended=[number]))
        now["time"] += jump
        if number > 2:
            journal.close()
            journal = Journal(tmp_path / "journal.sqlite")
        for passed_s, forgotten in ((599.0, 0), (2.0, 1)):
            now["monotonic"] += passed_s
            assert journal.forget(journal.now() - 600.0, 100) == forgotten
    journal.close()


def test_a_tenant_with_many_results_displaces_none_of_a_tenant_with_few(path: Path) -> None:
    journal = Journal(path)
    tenants = ["modest", *["greedy"] * 20, "modest", *["other"] * 5]
    requests = [new_request(f"r{number}", tenant=tenant) for number, tenant in enumerate(tenants, 1)]
    journal.commit(changes(*requests, ended=list(range(1, 28))))
    assert journal.forget(0.0, 12) == 15
    assert [number for number in range(1, 28) if journal.find_number(number)] == [1, *range(17, 22), *range(22, 28)]
    journal.close()
