"""The output file of `pagetide run`: complete records in order; a killed run resumes where it stopped.

    OUT.part               records so far; the last may be torn, and is cut off when a run resumes
    OUT.unfinished.jsonl   what is known of the lines after these: records that wait for their turn, and unfinished requests
    OUT.run.json           the settings that determine the records; the counts, once all are there
    OUT                    all records: the partial file under its final name

The writer holds a lock on the partial file (flock), which ends with the process. Each step is on disk before the next
begins: the settings before the first record, the last record before the file gets its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..common.on_error import OnError
from ..engine.errors import ConfigError

log = logging.getLogger(__name__)

Settings = dict[str, Any]
SYNC_EVERY_S = 5.0  # a machine failure loses at most the records of this time
SAVE_EVERY_S = 5.0  # and a killed process what was generated of unfinished lines in this time
# That saving these may take: what is generated of many long lines is saved less often
MOST_OF_TIME = 0.02


def files_of(output: Path) -> tuple[Path, ...]:
    """All files that a run into `output` writes."""
    beside = (".part", ".run.json", ".run.json.new", ".unfinished.jsonl", ".unfinished.jsonl.new")
    return (output, *(output.with_name(output.name + ending) for ending in beside))


class InUse(OSError):
    """Another run is writing this output."""


class Output:
    """One output file, from its first record to its final name. A context manager: the lock ends with it."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        _, self.part, self.about, _, self.unfinished, _ = files_of(path)
        self._clock = clock
        self._file: BinaryIO | None = None
        self._synced_at = clock()
        self._save_at = clock() + SAVE_EVERY_S

    def finished(self, settings: Settings) -> dict[str, int] | None:
        """The counts of a complete output made with `settings`; None if there is none. Read-only."""
        if not self.path.exists() or self.part.exists():
            return None
        about = self._read_about()
        counts: dict[str, int] | None = about.get("counts") if about.get("settings") == settings else None
        return counts

    def begin(self, settings: Settings, *, restart: bool, overwrite: bool) -> bool:
        """Open and lock the partial file, new or existing. The output itself is not touched.

        Returns whether an earlier run with these settings was stopped, and this one resumes it.

        Raises:
            ConfigError: There is an output already, or a partial one made with other settings.
            InUse: Another run is writing it.
            OSError: The folder cannot be written to.
        """
        if self.path.is_dir():
            raise ConfigError(f"the output {self.path} is a folder: name a file in it")
        if self.path.exists() and not overwrite:
            begun = self._read_about().get("settings")
            made = f", made with other settings ({difference})" if (difference := _difference(begun, settings)) else ""
            raise ConfigError(
                f"{self.path} already exists{made}: name another output, or use --overwrite to replace it once all records "
                "are complete"
            )
        resumes = self.part.exists() and not restart
        file = self._locked()
        with OnError(file.close):
            if resumes and (file.seek(0, os.SEEK_END) or self.unfinished.exists()):
                self._refuse_others(settings)
            elif not resumes or self._read_about().get("settings") != settings:
                resumes = False
                self.unfinished.unlink(missing_ok=True)
                file.truncate(0)
                os.fsync(file.fileno())  # old records must not come back under new settings
                self._write_about({"settings": settings, "counts": None})
        file.seek(0)
        self._file = file
        return resumes

    def recover(self, is_next: Callable[[dict[str, Any]], bool]) -> Iterator[dict[str, Any]]:
        """Yield the existing records one by one; after the last, the file is ready for the next one.

        `is_next` says whether a record follows those before. A torn or unexpected record is cut off with all that
        follows: a machine failure may leave anything there.
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
        """Append a record. It survives the process at once, and a machine failure after at most SYNC_EVERY_S."""
        file, data = self._open(), memoryview(_encoded(record))
        try:
            while data:
                data = data[file.write(data) :]
            if self._clock() - self._synced_at >= SYNC_EVERY_S:
                os.fsync(file.fileno())
                self._synced_at = self._clock()
        except OSError as error:
            message = f"{error.strerror}; make room and start the run again, it goes on where it is"
            raise OSError(error.errno, message, str(self.part)) from error

    def saved(self) -> Iterator[dict[str, Any]]:
        """What the last `save` of an earlier run has kept."""
        try:
            with self.unfinished.open("rb") as reader:
                yield from filter(None, map(_whole_record, reader))
        except FileNotFoundError:
            return

    @property
    def save_is_due(self) -> bool:
        """Whether it is time for `save`."""
        return self._clock() >= self._save_at

    def save(self, make: Callable[[], Iterable[dict[str, Any]] | None]) -> None:
        """Keep what `make` tells of unfinished lines, instead of what was kept before, unless it is None.

        It saves time, but the run can do without: what the disk does not take is logged.
        """
        began = self._clock()
        try:
            if (entries := make()) is not None:
                self._replace(self.unfinished, b"".join(map(_encoded, entries)))
        except OSError as error:
            log.warning("%s: what is generated of unfinished lines is not saved: %s", self.unfinished, error)
        now = self._clock()
        self._save_at = now + max(SAVE_EVERY_S, (now - began) / MOST_OF_TIME)

    def finish(self, settings: Settings, counts: dict[str, int]) -> None:
        """Give the complete file its final name."""
        os.fsync(self._open().fileno())
        self._write_about({"settings": settings, "counts": counts})
        os.replace(self.part, self.path)
        self.unfinished.unlink(missing_ok=True)
        _sync_folder(self.path)

    def close(self) -> None:
        """Release the lock. Written records stay. Idempotent."""
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
            with OnError(file.close):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Before this lock, another run may have renamed the file to the output.
                if not self.part.exists() or not os.path.samestat(os.stat(self.part), os.fstat(file.fileno())):
                    raise BlockingIOError
        except BlockingIOError:
            raise InUse(f"another run is writing {self.part}: wait for its end, or give another output") from None
        return file

    def _refuse_others(self, settings: Settings) -> None:
        begun = self._read_about().get("settings")
        if begun == settings:
            return
        if not isinstance(begun, dict):
            raise ConfigError(
                f"{self.part} exists, but its settings are unknown: {self.about} is missing or damaged; --restart starts over"
            )
        raise ConfigError(
            f"{self.part} was started with other settings: {_difference(begun, settings)}; resume with the same, or start "
            "over with --restart"
        )

    def _read_about(self) -> dict[str, Any]:
        try:
            about = json.loads(self.about.read_bytes())
        except (FileNotFoundError, ValueError, RecursionError):
            return {}
        return about if isinstance(about, dict) else {}

    def _write_about(self, about: dict[str, Any]) -> None:
        text = json.dumps(about, indent=1, ensure_ascii=False) + "\n"
        self._replace(self.about, text.encode("utf-8", "backslashreplace"))

    @staticmethod
    def _replace(path: Path, content: bytes) -> None:
        """Write a file atomically, and sync it to disk."""
        new = path.with_name(path.name + ".new")
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        _sync_folder(path)


def _opened(path: Path) -> BinaryIO:
    """Open for reading and writing, created if missing, unbuffered: a record is one write."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)


def _difference(begun: object, now: Settings) -> str:
    """The first settings that differ, as in "seed was 1 and is 2"; "" if none differ or the old ones are unknown."""
    if not isinstance(begun, dict):
        return ""
    said: list[str] = []
    for name in sorted({*begun, *now}):
        was, is_now = begun.get(name), now.get(name)
        if was != is_now:
            digest = name in ("input", "model files")  # a digest means nothing to the user
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
    """A record as UTF-8; text that UTF-8 cannot encode (half of a surrogate pair) is written as escapes."""
    try:
        return (json.dumps(record, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(record) + "\n").encode()


def _sync_folder(path: Path) -> None:
    """Make a new name durable. Not every file system supports it."""
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(folder)
    finally:
        os.close(folder)
