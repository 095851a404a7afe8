"""The files of the disk tier: one folder for each model, which one engine at a time uses.

    PATH/NAME-DIGEST/lock       locked by the engine that uses the folder
    PATH/NAME-DIGEST/index      a header of 4 KiB, and the records of blocks (cache/disk_index.py), appended as they are written
    PATH/NAME-DIGEST/0000.kv    the bytes of blocks: whole extents of places, each file filled from its beginning

A block is written before its record, and its record has a checksum of its bytes, so a block counts only once it is whole,
whatever instant the process or the machine ends. A record replaces earlier ones of its place. The index is written anew, beside
its place, before it is three times as long as it need be. A folder of another version, model or layout is emptied.

Files are readable by their user alone. What is written is dropped from the page cache, and so is what was read.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...cache.block_table import Int32
from ...cache.digest_table import leading
from ...cache.disk_index import MOST_PLACES, DiskIndex, Records, joined, record_type, seal
from ...cache.layer_groups import LayerGroup
from ...common.state_dir import user_dir
from ...common.units import format_bytes
from ..errors import ConfigError

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

VERSION = 3
FILE_BYTES = 64 << 20  # of one file, an extent of the tier
_HEADER_BYTES = 4096
_PIECE_BYTES = 4 << 20  # read at once, between two looks at the time
_OWN_NAME = re.compile(r"lock|index|index\.tmp|\d{4,}\.kv")
_MOST_FILES = 256  # in a folder that was made for a smaller tier: each takes a descriptor
_INDEX_COPIES = 4  # the old index of up to three times the records, and a new one beside it


def kept_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of the disk tiers of engines that name none. It is relative if there is no home directory."""
    return user_dir("cache", environ) / "kv"


def folder_of(path: Path, name: str, what: str) -> Path:
    """The folder of the model `name`, of which `what` says what its blocks depend on beside its content."""
    digest = hashlib.sha256(f"{name}\0{what}".encode()).hexdigest()[:12]
    return path / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', Path(name).name)[:40]}-{digest}"


class FolderUnusable(OSError):
    """The folder cannot be used. The message says why."""


@dataclass(frozen=True, slots=True)
class BlockKind:
    """What blocks are of: all that their bytes depend on beside their tokens; their size in bytes and in tokens; the groups
    of layers other than the first; and, if only units of these have bytes, how many blocks of tokens are known for a place.
    """

    identity: str
    block_bytes: int
    block_size: int
    groups: tuple[LayerGroup, ...] = ()
    nodes_per_place: int = 0


class DiskFiles:
    """Blocks of one `kind` in at most `most_bytes` of files in `folder`, which is locked until `close`.

    A folder with blocks of another kind is emptied. `secret` is the key of hashes and salts; with None there is a random one in
    the folder.

    Raises FolderUnusable if another engine uses the folder, others can write to it, or it cannot be written; ConfigError if
    `most_bytes` hold no block.
    """

    def __init__(self, folder: Path, most_bytes: int, kind: BlockKind, secret: bytes | None = None) -> None:
        block_bytes = kind.block_bytes
        self.folder, self.block_bytes = folder, block_bytes
        self._dtype = record_type(kind.block_size)
        each = block_bytes + _INDEX_COPIES * self._dtype.itemsize * (1 + kind.nodes_per_place)
        num_places = min(MOST_PLACES // (1 + kind.nodes_per_place), (most_bytes - _HEADER_BYTES * 2) // each)
        if num_places < 1:
            least = format_bytes(each + 2 * _HEADER_BYTES)
            raise ConfigError(f"disk_kv_memory: {most_bytes:,} bytes hold no block: the least that do are {least}")
        self._per_file = max(1, min(FILE_BYTES, most_bytes // 16) // block_bytes)
        self._files: dict[int, int] = {}  # descriptors by number
        self._opening = threading.Lock()
        self._num_records = 0
        self._unsettled: Records = np.zeros(0, self._dtype)  # written, and perhaps not known to the index as whole yet
        self._index_file = -1
        with ExitStack() as undo:
            undo.callback(self.close)
            self._lock = -1
            self._lock = _locked(folder)
            header = {
                "version": VERSION, "identity": kind.identity, "block_bytes": block_bytes, "record_bytes": self._dtype.itemsize,
                "groups": str(kind.groups),
                "keyed": "" if secret is None else hashlib.sha256(b"kept" + secret).hexdigest(),
            }  # fmt: skip
            try:
                key, records = self._open(header, num_places, secret)
                self.index = DiskIndex(kind.block_size, num_places, key, kind.groups, kind.nodes_per_place * num_places)
                self.index.load(records, time.time())
                self._drop_beyond(self.index.live_records())
                self.tidy()
            except OSError as error:
                raise FolderUnusable(f"{folder} cannot be used: {error}") from error
            undo.pop_all()

    def write(self, records: Records, data: Bytes) -> Records:
        """Write the blocks `data` [n, block_bytes] to those places of `records` that are in files, and then the records, which
        are returned with their checks. Raises OSError, with no record written.
        """
        records, own = records.copy(), np.flatnonzero(self.index.have_bytes(records))
        records["data_check"][own] = _checks(records[own], data)
        places = records["place"][own]
        if (np.diff(places.astype(np.int64)) < 0).any():
            order = np.argsort(places, kind="stable")
            places, data = places[order], data[order]
        for first, last in _runs(places, self._per_file):
            number, at = divmod(int(places[first]), self._per_file)
            _write_all(self._file(number), np.ascontiguousarray(data[first:last]).data.cast("B"), at * self.block_bytes)
        self._settle({int(place) // self._per_file for place in places})
        self._append(seal(records))
        self._unsettled = joined((self.index.unsettled(self._unsettled), records))
        return records

    def note(self, records: Records) -> None:
        """Append `records`, which replace those of whole blocks. They are on disk soon, and lost with the machine. Raises
        OSError.
        """
        self.tidy()
        self._append(records)

    def read(self, records: Records, out: Bytes, goes_on: Callable[[int], bool]) -> int:
        """Read the blocks of `records` to `out` [n, block_bytes], in order, while it `goes_on` with the number read so far.

        Returns how many of the first ones are there and as they were written. Raises OSError.
        """
        num = 0
        for first, last in self._pieces(records["place"]):
            if not goes_on(num):
                return num
            number, at = divmod(int(records["place"][first]), self._per_file)
            file, offset = self._file(number), at * self.block_bytes
            got = _read_all(file, out[first:last].data.cast("B"), offset)
            os.posix_fadvise(file, offset, got, os.POSIX_FADV_DONTNEED)
            whole = slice(first, min(last, first + got // self.block_bytes))
            num += leading(_checks(records[whole], out[whole]) == records["data_check"][whole])
            if num < last:
                break
        goes_on(num)
        return num

    def tidy(self) -> None:
        """Write the index anew if it is much longer than it need be. Raises OSError."""
        if self._num_records > 2 * len(self.index.records):
            self._rewrite(self._kept())

    def rewrite(self) -> None:
        """Write the index anew, and free what lies behind the last whole block. Raises OSError, with no record left."""
        records = self._kept()
        try:
            self._rewrite(records)
        except OSError:  # those that are to go may not be found again
            os.ftruncate(self._index_file, _HEADER_BYTES)
            self._num_records = 0
            raise
        self._drop_beyond(records)

    def close(self) -> None:
        """Unlock the folder. Idempotent."""
        for file in (*self._files.values(), self._index_file, self._lock):
            if file >= 0:
                os.close(file)
        self._files, self._index_file, self._lock = {}, -1, -1

    def _open(self, header: dict[str, Any], num_places: int, secret: bytes | None) -> tuple[bytes, Records]:
        """The key of the folder and its records; a folder of others begins anew, and so does one of far too many files.

        An extent stays as long as it was: a tier of another size has more or fewer of them.
        """
        self._index_file = _open_own(self.folder / "index")
        raw = b""
        while piece := os.read(self._index_file, 1 << 24):
            raw += piece
        found = _header(raw[:_HEADER_BYTES])
        key, per_file = found.pop("key", ""), found.pop("per_file", 0)
        is_fit = per_file >= min(self._per_file, -(-num_places // _MOST_FILES))
        if found == header and is_fit and len(raw) >= _HEADER_BYTES:
            self._per_file = per_file
            size = self._dtype.itemsize
            self._num_records = (len(raw) - _HEADER_BYTES) // size
            records = np.frombuffer(raw, self._dtype, self._num_records, _HEADER_BYTES)
            self._header = raw[:_HEADER_BYTES]
            os.ftruncate(self._index_file, _HEADER_BYTES + self._num_records * size)
        else:
            if raw:
                log.info("%s has blocks of another version, model or layout: they are dropped", self.folder)
            for file in self.folder.iterdir():
                if _OWN_NAME.fullmatch(file.name) and file.name not in ("lock", "index"):
                    file.unlink()
            key = secrets.token_hex(32)
            text = json.dumps({**header, "per_file": self._per_file, "key": key}).encode()
            self._header = (b"%s %08x\n" % (text, zlib.crc32(text))).ljust(_HEADER_BYTES, b"\0")
            records = np.zeros(0, self._dtype)
            self._rewrite(records)
        return hashlib.blake2b(
            bytes.fromhex(key), key=b"" if secret is None else hashlib.sha256(secret).digest()
        ).digest(), records

    def _kept(self) -> Records:
        """The records of all blocks that are whole. The index, of another thread, may not know of the last ones yet."""
        unsettled = self.index.unsettled(self._unsettled)  # looked up first, so that none is settled between the two
        return np.concatenate((self.index.live_records(), unsettled))

    def _rewrite(self, records: Records) -> None:
        """Replace the index by one of `records`."""
        path = self.folder / "index.tmp"
        path.unlink(missing_ok=True)
        file = _open_own(path)
        with ExitStack() as undo:
            undo.callback(os.close, file)
            _write_all(file, memoryview(self._header + records.tobytes()), 0)
            os.fsync(file)
            os.replace(path, self.folder / "index")
            undo.pop_all()
        os.close(self._index_file)
        self._index_file, self._num_records = file, len(records)

    def _append(self, records: Records) -> None:
        """Append `records` to the index, all or none."""
        end = _HEADER_BYTES + self._num_records * self._dtype.itemsize
        try:
            _write_all(self._index_file, memoryview(records.tobytes()), end)
        except OSError:
            os.ftruncate(self._index_file, end)
            raise
        self._num_records += len(records)

    def _settle(self, numbers: set[int]) -> None:
        """Let the files be on disk, and in no page of memory."""
        for number in numbers:
            file = self._file(number)
            os.fdatasync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def _file(self, number: int) -> int:
        """The descriptor of a file. Called by the thread that writes and the one that reads."""
        with self._opening:
            if number not in self._files:
                self._files[number] = _open_own(self.folder / f"{number:04d}.kv")
            return self._files[number]

    def _pieces(self, places: Int32) -> Iterator[tuple[int, int]]:
        """Parts of `places` that are adjacent in a file, each of a few MiB at most."""
        most = max(1, _PIECE_BYTES // self.block_bytes)
        for first, last in _runs(places, self._per_file):
            for start in range(first, last, most):
                yield start, min(start + most, last)

    def _drop_beyond(self, records: Records) -> None:
        """Cut the files behind the last place of `records`: of an earlier, larger tier, or of blocks that are not known."""
        end = int((records["place"][self.index.have_bytes(records)] + 1).max(initial=0))
        with suppress(OSError):
            for path in (file for file in self.folder.glob("*.kv") if _OWN_NAME.fullmatch(file.name)):
                most = (end - int(path.stem) * self._per_file) * self.block_bytes
                if most <= 0 and int(path.stem) not in self._files:
                    path.unlink()
                elif path.stat().st_size > most:
                    os.truncate(path, max(0, most))


def folders(path: Path) -> list[Path]:
    """The folders of disk tiers in `path`."""
    if not path.is_dir():
        return []
    return sorted(folder for folder in path.iterdir() if _is_own(folder))


def folder_bytes(folder: Path) -> int:
    """Bytes of the files of a disk tier."""
    return sum(file.stat().st_size for file in folder.iterdir() if _OWN_NAME.fullmatch(file.name))


def clear_folder(folder: Path) -> int:
    """Delete the files of a disk tier that no engine uses, and nothing else. Returns the bytes that they had.

    Raises FolderUnusable if an engine uses it, or it is no disk tier, and OSError.
    """
    if not _is_own(folder):
        raise FolderUnusable(f"{folder} is no folder of a disk tier: the header of its index is not there, or damaged")
    lock = _locked(folder)
    try:
        num_bytes = folder_bytes(folder)
        names = [file for file in folder.iterdir() if _OWN_NAME.fullmatch(file.name)]
        # the index, which tells that the others are of a disk tier, goes after them
        for file in sorted(names, key=lambda file: (file.name in ("index", "lock"), file.name)):
            file.unlink()
    finally:
        os.close(lock)
    with suppress(OSError):  # it has something else
        folder.rmdir()
    return num_bytes


def _is_own(folder: Path) -> bool:
    """Whether `folder` is of a disk tier: others have files called index too."""
    index = folder / "index"
    if folder.is_symlink() or index.is_symlink() or not index.is_file():
        return False
    with suppress(OSError), index.open("rb") as file:
        return bool(_header(file.read(_HEADER_BYTES)))
    return False


def _locked(folder: Path) -> int:
    """The locked lock file of `folder`, which is made if it is missing. Raises FolderUnusable."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise FolderUnusable(
                f"{folder} is no folder of this user's, or others can write to it: its blocks could be anything"
            )
        lock = _open_own(folder / "lock")
    except FolderUnusable:
        raise
    except OSError as error:
        raise FolderUnusable(f"{folder} cannot be used: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise FolderUnusable(f"another engine uses {folder}: give this one another disk_kv_path") from error
    if not os.fstat(lock).st_nlink:
        os.close(lock)
        raise FolderUnusable(f"{folder} was cleared in this moment: start again")
    return lock


def _open_own(path: Path) -> int:
    """A regular file of this user's, made if it is missing, that others cannot read. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{path} is no file of this user's")
        if status.st_mode & 0o077:
            os.fchmod(file, 0o600)
    except OSError:
        os.close(file)
        raise
    return file


def _header(raw: bytes) -> dict[str, Any]:
    """The header of an index; empty if it is damaged."""
    text, _, check = raw.partition(b"\n")[0].rpartition(b" ")
    try:
        if len(check) == 8 and int(check, 16) == zlib.crc32(text):
            return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        pass
    return {}


def _checks(records: Records, data: Bytes) -> npt.NDArray[np.uint32]:
    """The checksums of the bytes of blocks `data` [n, block_bytes], and of what they are."""
    tables = np.ascontiguousarray(records["table"])[:, None]
    keys = np.hstack((np.ascontiguousarray(records["digest"]).view(np.uint8), tables.view(np.uint8)))
    return np.array([zlib.crc32(row, zlib.crc32(key)) for row, key in zip(data, keys, strict=True)], np.uint32)


def _runs(places: Int32, per_file: int) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) of each part of `places` that is adjacent in a file."""
    places = places.astype(np.int64)
    apart = (np.diff(places) != 1) | (np.diff(places // per_file) != 0)
    starts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(places)]
    return ((first, last) for first, last in pairwise(starts) if last > first)


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while len(data):
        num = os.pwrite(file, data, offset)
        data, offset = data[num:], offset + num


def _read_all(file: int, out: memoryview, offset: int) -> int:
    """Fill `out`. Returns the bytes read, fewer where the file ends."""
    got = 0
    while got < len(out):
        num = os.preadv(file, [out[got:]], offset + got)
        if not num:
            break
        got += num
    return got
