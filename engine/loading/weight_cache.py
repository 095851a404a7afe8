"""The disk cache of packed weights: one file per checkpoint, form and processor.

    $XDG_CACHE_HOME/pagetide/weights/KEY.weights     ~/.cache if the variable is not set or not absolute
    $XDG_CACHE_HOME/pagetide/weights/digests.json    SHA-256 of checkpoint files by path, size and times

A key is a digest of the checkpoint's content, of what the engine computes with it, and of VERSION. A file is written beside its
place and renamed once it is complete, so several processes may write and read. The least recently used files are deleted to
keep the folder below PAGETIDE_CACHE_SIZE (default 20 GiB; 0 keeps nothing), and a file that is not whole is deleted when it is
read. Nothing here is needed: where the folder cannot be written, weights are quantized and packed at each start. Weights that
are not quantized, of which a file is a second copy, are kept only where that variable is set.

A file is a line of JSON, and the arrays it lists, each aligned to 64 bytes. Arrays stay mapped, so engines share them. Packed
weights lie one behind another, in the order of the layers: those that are merged there need no copy.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import mmap
import os
import re
import stat
import tempfile
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO

import torch
import transformers

from ... import native
from ...common.checked_file import open_checked, read_checked
from ...common.state_dir import keep_json, user_dir
from ...common.units import GIB, format_bytes, parse_bytes
from ..collectives.group import ALONE, ShardGroup
from ..errors import ConfigError
from ..layers import GROUP, Quantization
from ..layers.linears import PackedWeight, native_bytes
from ..layers.quantization import SCALES
from .checkpoint import Checkpoint

log = logging.getLogger(__name__)

VERSION = 5  # of files, of layouts and of the numbers in them: what is computed otherwise needs another one
VARIABLE = "PAGETIDE_CACHE_SIZE"
DEFAULT_MOST_BYTES = 20 * GIB
_ALIGNMENT = 64
_MOST_READERS = 8  # threads
_MOST_HEADER_BYTES = 64 << 20
_MOST_DIGESTS = 1000
_ABANDONED_S = 3600.0  # age of half a file: its writer must be gone
_TODAY_S = 86_400.0
_OWN_NAME = re.compile(r"[0-9a-f]{32}\.weights|([0-9a-f]{32}|digests)\w*\.tmp")  # of files that may be deleted
_ARRAYS = ("packed", "scales", "in_scales")  # in the order of a file
_PLAIN = {str(one): one for one in (torch.float32, torch.bfloat16, torch.float16)}


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of the cache. Does not create it. It is relative if there is no home directory."""
    return user_dir("cache", environ) / "weights"


def most_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """The bound of the folder's size. Raises ConfigError for a variable that is no size."""
    text = environ.get(VARIABLE, "").strip()
    try:
        return 0 if text == "0" else parse_bytes(text) if text else DEFAULT_MOST_BYTES
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: {error}; or 0, which keeps nothing") from error


@dataclass(frozen=True, slots=True)
class CacheFile:
    """A file in the folder."""

    path: Path
    num_bytes: int
    used_s: float  # Unix time


class WeightCache:
    """The packed weights in a folder. `most`: its bound in bytes, by default the environment's."""

    def __init__(self, folder: Path | None = None, most: int | None = None) -> None:
        self.folder = cache_dir() if folder is None else folder
        self.most_bytes = most_bytes() if most is None else most
        self.keeps_plain = most is not None or bool(os.environ.get(VARIABLE, "").strip())

    def entry(
        self, checkpoint: Checkpoint, quantization: Quantization | None, dtype: torch.dtype, group: ShardGroup = ALONE
    ) -> CacheEntry | None:
        """The entry of these weights, the files of which are to be read afterwards; None if they are not kept (`key`)."""
        try:
            stamps = checkpoint.stamps()
        except OSError:
            return None
        key = self.key(checkpoint, quantization, dtype, group)
        return None if key is None else CacheEntry(self, key, checkpoint, stamps, is_plain=quantization is None)

    def key(
        self, checkpoint: Checkpoint, quantization: Quantization | None, dtype: torch.dtype, group: ShardGroup = ALONE
    ) -> str | None:
        """The key of these weights, or of a shard's; None if they are not kept: a loaded model, a folder that cannot be used,
        weights that are not quantized without a bound that was set for them.

        Reads the checkpoint's files once, and again when they change.
        """
        if not self.most_bytes or checkpoint.spec.loaded is not None or not self.folder.is_absolute():
            return None
        if native.instructions() is None:
            return None
        if quantization is None and (not self.keeps_plain or checkpoint.quantized or checkpoint.weights.gguf):
            return None
        try:
            self._check_owner()
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK) and not any(self.folder.glob("*.weights")):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.folder))
            digests = self.digests(checkpoint)
        except OSError as error:
            log.warning("packed weights are not kept: %s", error)
            return None
        what = [VERSION, transformers.__version__, quantization, str(dtype), native.instructions(), *digests]
        if group.size > 1:
            what.append(f"shard {group.rank} of {group.size}")
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]

    def digests(self, checkpoint: Checkpoint) -> list[str]:
        """SHA-256 of the checkpoint's files, which are read where they have changed. Raises OSError."""
        return [self._digest(path) for path in checkpoint.files]

    def read(self, key: str) -> dict[str, PackedWeight] | None:
        """The weights by their layers' names, or None without a whole file."""
        path = self._path(key)
        try:
            with open_checked(path, "packed weights") as file:
                weights = _read(file)
            with suppress(OSError):  # a file of others, or one that cannot be written
                os.utime(path)
            return weights
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            log.warning("%s is not used, and is deleted if that is possible: %s", path, error)
            with suppress(OSError):
                path.unlink()
            return None
        except (OSError, RuntimeError, MemoryError) as error:  # no memory, descriptors or threads: it may be read another time
            log.warning("%s is not used: %s", path, error)
            return None

    def write(self, key: str, weights: Mapping[str, PackedWeight], *, is_plain: bool = False) -> None:
        """Keep `weights`, and delete others if the folder becomes too large. Logs what goes wrong.

        Weights that are not quantized (`is_plain`) are not kept if that would delete a file that was used today: of models
        that do not fit together each start would write one.
        """
        size = sum(_aligned(part.nbytes) for one in weights.values() for part in one.tensors)
        half = None
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._make_room(size, besides=self._path(key), spares_used=is_plain):
                most = format_bytes(self.most_bytes)
                log.info("packed weights of %s are not kept: %s allows %s in all", format_bytes(size), VARIABLE, most)
                return
            header, arrays = _header(weights)
            descriptor, half = tempfile.mkstemp(prefix=key, suffix=".tmp", dir=self.folder)
            with os.fdopen(descriptor, "wb") as file:
                file.write(header)
                for data in arrays:
                    file.write(data)
                    file.write(bytes(_aligned(len(data)) - len(data)))
                file.flush()
                os.fsync(file.fileno())
            os.replace(half, self._path(key))
            half = None
        except OSError as error:
            log.warning("packed weights are not kept, and are made again at the next start: %s", error)
        finally:
            if half is not None:
                with suppress(OSError):
                    os.unlink(half)

    def unnamed_file(self, num_bytes: int) -> BinaryIO:
        """A file in the folder for this process alone, which is gone with it, whatever ends it.

        Raises OSError, also if the folder may not hold so much, or lies in memory.
        """
        if num_bytes > self.most_bytes or not self.folder.is_absolute():
            raise OSError(errno.EFBIG, f"{VARIABLE} is {self.most_bytes:,} bytes, and {num_bytes:,} are needed")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_owner()
        if _lies_in_memory(self.folder):
            raise OSError(errno.ENODEV, f"{self.folder} lies in memory (tmpfs): set XDG_CACHE_HOME to a folder on a disk")
        self._make_room(num_bytes)
        return tempfile.TemporaryFile(dir=self.folder, buffering=0)  # type: ignore[return-value]

    def files(self) -> list[CacheFile]:
        """The files of weights, also unfinished ones; the least recently used first."""
        found = []
        for path in self.folder.glob("*"):
            if _OWN_NAME.fullmatch(path.name):
                with suppress(OSError):  # another process has deleted it
                    status = path.lstat()
                    if not stat.S_ISDIR(status.st_mode):
                        found.append(CacheFile(path, status.st_size, status.st_mtime))
        return sorted(found, key=lambda file: file.used_s)

    def clear(self) -> int:
        """Delete all files, and nothing else in the folder. Returns the bytes that they had. Engines that use them are not
        affected. Raises OSError.
        """
        files, digests = self.files(), self.folder / "digests.json"
        for path in (*(file.path for file in files), *([digests] if digests.is_file() else [])):
            path.unlink(missing_ok=True)
        return sum(file.num_bytes for file in files)

    def _check_owner(self) -> None:
        """Raise PermissionError for a folder that others can write to: its weights could be anything."""
        with suppress(FileNotFoundError):
            status = self.folder.stat()
            if status.st_uid != _user(status.st_uid) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PermissionError(
                    f"{self.folder} belongs to another user, or others can write to it: make it yours, with mode 0700, or "
                    "set XDG_CACHE_HOME"
                )

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.weights"

    def _make_room(self, num_bytes: int, besides: Path | None = None, spares_used: bool = False) -> bool:
        """Delete abandoned files, and the least recently used ones until `num_bytes` fit, `besides` not counted. Returns
        whether they fit; if not, no other file is deleted. With `spares_used` none is that was used today.
        """
        now, kept = time.time(), []
        for file in self.files():
            if file.path.suffix == ".tmp" and now - file.used_s > _ABANDONED_S:
                file.path.unlink(missing_ok=True)
            elif file.path != besides:
                kept.append(file)
        total = sum(file.num_bytes for file in kept)
        excess = total + num_bytes - self.most_bytes
        out = [one for one in kept if one.path.suffix == ".weights" and not (spares_used and now - one.used_s < _TODAY_S)]
        if excess > sum(file.num_bytes for file in out):
            return False
        for file in out:
            if excess <= 0:
                break
            file.path.unlink(missing_ok=True)
            excess -= file.num_bytes
        return True

    def _digest(self, path: Path) -> str:
        """SHA-256 of a file, remembered until the file changes. Raises OSError."""
        status = path.stat()
        what = [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        identity = hashlib.sha256(json.dumps(what).encode()).hexdigest()
        known = self._known_digests()
        if identity in known:
            return known[identity]
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        self._remember({**known, identity: found})
        return found

    def _known_digests(self) -> dict[str, str]:
        try:
            path = self.folder / "digests.json"
            known = json.loads(read_checked(path, _MOST_HEADER_BYTES, "digests")) if path.is_file() else {}
        except (OSError, ValueError, RecursionError):
            return {}
        usable = isinstance(known, dict) and all(isinstance(digest, str) for digest in known.values())
        return known if usable else {}

    def _remember(self, digests: dict[str, str]) -> None:
        """Keep the newest `digests`. If two processes do so at once, one of them reads a file again later."""
        try:
            keep_json(self.folder / "digests.json", dict(list(digests.items())[-_MOST_DIGESTS:]))
        except OSError as error:
            log.debug("digests of checkpoints are not kept: %s", error)


@dataclass(frozen=True, slots=True, eq=False)
class CacheEntry:
    """The place for a model's packed weights in a cache, found before its files are read."""

    cache: WeightCache
    key: str
    checkpoint: Checkpoint
    stamps: tuple[object, ...]  # of the checkpoint, before the key was made
    is_plain: bool  # not quantized

    def read(self) -> dict[str, PackedWeight]:
        """The weights by their layers' names; nothing without a whole file, or if the checkpoint has changed since."""
        return (self.cache.read(self.key) if self._is_current() else None) or {}

    def write(self, weights: Mapping[str, PackedWeight]) -> None:
        """Keep the weights, unless the checkpoint has changed since."""
        if self._is_current():
            self.cache.write(self.key, weights, is_plain=self.is_plain)

    def _is_current(self) -> bool:
        try:
            return self.checkpoint.stamps() == self.stamps
        except OSError:
            return False


def _header(weights: Mapping[str, PackedWeight]) -> tuple[bytes, list[memoryview]]:
    """The line of JSON, padded, and the arrays in the order of their offsets (from the end of the line)."""
    entries: dict[str, dict[str, Any]] = {
        name: {"type": str(one.type), "n": one.n, "k": one.k, "rows_in_int8": one.rows_in_int8} for name, one in weights.items()
    }
    offset, arrays = 0, []
    for part in _ARRAYS:
        for name, weight in weights.items():
            if (tensor := getattr(weight, part)) is not None:
                data = memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")
                entries[name][part] = {"offset": offset, "shape": list(tensor.shape), "crc32": zlib.crc32(data)}
                arrays.append(data)
                offset += _aligned(len(data))
    text = json.dumps({"weights": entries, "bytes": offset}).encode()
    text = b"%s %08x" % (text, zlib.crc32(text))
    return text.ljust(_aligned(len(text) + 1) - 1) + b"\n", arrays


def _read(file: BinaryIO) -> dict[str, PackedWeight]:
    """The weights of a file, mapped. Raises ValueError, KeyError or TypeError for one that is not whole."""
    line = file.readline(_MOST_HEADER_BYTES)
    text, _, check = line.rstrip().rpartition(b" ")
    if not check or len(check) != 8 or int(check, 16) != zlib.crc32(text):
        raise ValueError("its header is damaged")
    header = json.loads(text)
    if os.fstat(file.fileno()).st_size != len(line) + header["bytes"]:
        raise ValueError("it is not as long as its header says")
    mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    content = torch.frombuffer(mapped, dtype=torch.uint8)[len(line) :]
    entries = header["weights"]
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_READERS)) as threads:  # checking takes most of the time
        return dict(zip(entries, threads.map(_weight, entries, entries.values(), repeat(content)), strict=True))


def _weight(name: str, entry: dict[str, Any], content: torch.Tensor) -> PackedWeight:
    """A weight within the arrays of a file, uint8 [bytes]."""
    form = entry["type"]
    dtypes = {"packed": torch.uint8, "in_scales": torch.float32}
    if form not in _PLAIN:
        dtypes["scales"] = SCALES[form]
    arrays: dict[str, Any] = {part: _array(name, entry[part], dtypes[part], content) for part in _ARRAYS if part in entry}
    kind, n, k, more = _PLAIN.get(form, form), entry["n"], entry["k"], {}
    if kind == form:
        arrays["scales"]  # each quantized weight has them
        more = {"rows_in_int8": entry["rows_in_int8"], "group": GROUP if form == "int4" else 0}
    if arrays["packed"].numel() != native_bytes(kind, n, k):
        raise ValueError(f"the weights of {name} have another size than the kernels'")
    return PackedWeight(kind, n, k, **arrays, **more)


def _array(name: str, entry: dict[str, Any], dtype: torch.dtype, content: torch.Tensor) -> torch.Tensor:
    data = content[entry["offset"] : entry["offset"] + math.prod(entry["shape"]) * dtype.itemsize]
    if zlib.crc32(data.numpy().data) != entry["crc32"]:
        raise ValueError(f"the weights of {name} are damaged")
    return data.view(dtype).view(entry["shape"])


def _lies_in_memory(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether files in a folder take memory that the system cannot take back."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = [line.split() for line in mounts.read_text().splitlines()] if mounts.exists() else []
    return any(one[2] == number and one[one.index("-", 6) + 1] in ("tmpfs", "ramfs") for one in lines)


def _user(otherwise: int) -> int:
    """This process's user, or `otherwise` where files have no such owners."""
    return os.geteuid() if hasattr(os, "geteuid") else otherwise


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
