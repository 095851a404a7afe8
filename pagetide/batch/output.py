"""The output file of `pagetide run`: whole records only, in order, and a run that was killed goes on where it was.

    OUT.part       records so far; the one under work may be torn, and is cut off when a run goes on
    OUT.run.json   what decides what the records say; the counts, once all are there
    OUT            all records: the partial file under its last name

Whoever writes holds a lock on the partial file (flock), which ends with the process. Each step is on the disk before the next
begins: the settings before the first record, the last record before the file gets its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..engine.errors import ConfigError

log = logging.getLogger(__name__)

Settings = dict[str, Any]
SYNC_EVERY_S = 5.0  # of records, a failing machine loses no more


def files_of(output: Path) -> tuple[Path, ...]:
    """All that a run into `output` writes."""
    beside = (".part", ".run.json", ".run.json.new")
    return (output, *(output.with_name(output.name + ending) for ending in beside))


class InUse(OSError):
    """Another run writes this output."""


class Output:
    """One output file, from its first record to its name. Use as a context manager: the lock ends with it."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        _, self.part, self.about, self._new_about = files_of(path)
        self._clock = clock
        self._file: BinaryIO | None = None
        self._synced_at = clock()

    def finished(self, settings: Settings) -> dict[str, int] | None:
        """The counts of a whole output made with `settings`; None if there is none. Read-only."""
        if not self.path.exists() or self.part.exists():
            return None
        about = self._read_about()
        counts: dict[str, int] | None = about.get("counts") if about.get("settings") == settings else None
        return counts

    def begin(self, settings: Settings, *, restart: bool, overwrite: bool) -> None:
        """Open the partial file, a new one or the one that is there, and lock it. Nothing is written to the output itself.

        Raises:
            ConfigError: there is an output already, or a partial one made with other settings.
            InUse: another run writes it.
            OSError: the folder cannot be written to.
        """
        if self.path.is_dir():
            raise ConfigError(f"the output {self.path} is a folder: name a file in it")
        if self.path.exists() and not overwrite:
            begun = self._read_about().get("settings")
            made = f", made with other settings ({difference})" if (difference := _difference(begun, settings)) else ""
            raise ConfigError(
                f"{self.path} is there already{made}: give another output, or --overwrite to have it replaced once all "
                "records are there"
            )
        file = self._locked()
        try:
            if file.seek(0, os.SEEK_END) and not restart:
                self._refuse_others(settings)
            else:
                file.truncate(0)
                os.fsync(file.fileno())  # old records must not come back under new settings
                self._write_about({"settings": settings, "counts": None})
        except BaseException:
            file.close()
            raise
        file.seek(0)
        self._file = file

    def recover(self, is_next: Callable[[dict[str, Any]], bool]) -> Iterator[dict[str, Any]]:
        """The records that are there already, one by one; behind the last, the file is ready for the next.

        `is_next` says whether a record belongs behind those before. What is torn, or does not belong, is cut off with all that
        follows: a machine that failed may leave anything there.
        """
        file, kept = self._open(), 0
        with self.part.open("rb") as reader:
            for raw in reader:
                record = _whole_record(raw)
                if record is None or not is_next(record):
                    break
                yield record
                kept += len(raw)
        cut = file.seek(0, os.SEEK_END) - kept
        if cut:
            log.warning("%s: the last %d bytes are no whole record of this run: cut off", self.part, cut)
        file.truncate(kept)
        file.seek(kept)

    def write(self, record: dict[str, Any]) -> None:
        """Add a record. It survives the process at once, and the machine within SYNC_EVERY_S."""
        file, data = self._open(), memoryview(_encoded(record))
        try:
            while data:
                data = data[file.write(data) :]
            if self._clock() - self._synced_at >= SYNC_EVERY_S:
                os.fsync(file.fileno())
                self._synced_at = self._clock()
        except OSError as error:
            told = f"{error.strerror}; make room and start the run again, it goes on where it is"
            raise OSError(error.errno, told, str(self.part)) from error

    def finish(self, settings: Settings, counts: dict[str, int]) -> None:
        """All records are written: give the file its name."""
        os.fsync(self._open().fileno())
        self._write_about({"settings": settings, "counts": counts})
        os.replace(self.part, self.path)
        _sync_folder(self.path)

    def close(self) -> None:
        """End the lock. What was written stays. Idempotent."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> BinaryIO:
        assert self._file is not None, "begin() comes first"
        return self._file

    def _locked(self) -> BinaryIO:
        file = _opened(self.part)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had the lock may have given the file its name meanwhile: then this is the output.
            if not self.part.exists() or not os.path.samestat(os.stat(self.part), os.fstat(file.fileno())):
                raise BlockingIOError
        except BlockingIOError:
            file.close()
            raise InUse(f"another run is writing {self.part}: wait for its end, or give another output") from None
        except BaseException:
            file.close()
            raise
        return file

    def _refuse_others(self, settings: Settings) -> None:
        begun = self._read_about().get("settings")
        if begun == settings:
            return
        if not isinstance(begun, dict):
            raise ConfigError(
                f"{self.part} is there, but nothing says what made it: {self.about} is missing or broken; --restart "
                "begins anew"
            )
        raise ConfigError(
            f"{self.part} was begun with other settings: {_difference(begun, settings)}; go on with the same, or begin "
            "anew with --restart"
        )

    def _read_about(self) -> dict[str, Any]:
        try:
            about = json.loads(self.about.read_bytes())
        except (FileNotFoundError, ValueError, RecursionError):
            return {}
        return about if isinstance(about, dict) else {}

    def _write_about(self, about: dict[str, Any]) -> None:
        """All or nothing, and on the disk."""
        new = self._new_about
        with new.open("wb") as file:
            file.write((json.dumps(about, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.about)
        _sync_folder(self.about)


def _opened(path: Path) -> BinaryIO:
    """For reading and writing, made if need be, without a buffer: a record is one write."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)


def _difference(begun: object, now: Settings) -> str:
    """The first settings that differ, as in "seed was 1 and is 2"; nothing where none does, or none is known."""
    if not isinstance(begun, dict):
        return ""
    said: list[str] = []
    for name in sorted({*begun, *now}):
        was, is_now = begun.get(name), now.get(name)
        if was != is_now:
            digest = name in ("input", "model files")  # which says nothing to anybody
            said.append(f"the {name} changed" if digest else f"{name} was {_short(was)} and is {_short(is_now)}")
    return ", ".join(said[:3]) + (f", and {len(said) - 3} more" if len(said) > 3 else "")


def _short(value: object) -> str:
    text = "not given" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _whole_record(raw: bytes) -> dict[str, Any] | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _encoded(record: dict[str, Any]) -> bytes:
    """As UTF-8, but for texts that it has no bytes for (half of a surrogate pair): these are written as escapes."""
    try:
        return (json.dumps(record, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(record) + "\n").encode()


def _sync_folder(path: Path) -> None:
    """Make a new name last. Not every file system can."""
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(folder)
    finally:
        os.close(folder)
