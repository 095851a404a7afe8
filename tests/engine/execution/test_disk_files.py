"""The files of the disk tier: what is read is what was written, whatever happened to the files."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagetide.cache.retention import Retention
from pagetide.engine.errors import ConfigError
from pagetide.engine.execution import disk_files
from pagetide.engine.execution.disk_files import BlockKind, DiskFiles, FolderUnusable, clear_folder, folder_bytes, folders

KIND = BlockKind("model", 1000, 4)
CAP = 64 << 10


def opened(folder: Path, most_bytes: int = CAP, kind: BlockKind = KIND, secret: bytes | None = None) -> DiskFiles:
    return DiskFiles(folder, most_bytes, kind, secret)


def block(number: int) -> np.ndarray:
    """The bytes of the block that is named so."""
    return np.random.default_rng(number).integers(0, 256, 1000).astype(np.uint8)


def write(files: DiskFiles, *path: int) -> None:
    chain = files.index.chain(np.repeat(np.array(path, np.int32), 4), None)
    records = files.index.take(chain, len(path))
    data = np.array([block(path[int(record["depth"])]) for record in records]).reshape(-1, 1000)
    files.index.written(files.write(records, data))


def read(files: DiskFiles, *path: int, goes_on: Callable[[int], bool] = lambda _: True) -> int:
    """The blocks that are read of `path`: each is the one that was written."""
    chain = files.index.chain(np.repeat(np.array(path, np.int32), 4), None)
    records = files.index.records[files.index.find(chain, len(path))]
    out = np.empty((len(records), 1000), np.uint8)
    num = files.read(records, out, goes_on)
    assert all((out[i] == block(path[i])).all() for i in range(num))
    return num


def test_blocks_outlive_the_process_within_the_cap_and_belong_to_one_user(tmp_path: Path) -> None:
    folder = tmp_path / "kv" / "one"
    files = opened(folder)
    for start in range(0, 150, 3):
        write(files, start, start + 1, start + 2)
        files.tidy()
        assert folder_bytes(folder) <= CAP
        assert read(files, start, start + 1, start + 2) == 3
    kept = [start for start in range(0, 150, 3) if read(files, start, start + 1, start + 2) == 3]
    with pytest.raises(FolderUnusable, match="another engine uses"):
        opened(folder)
    with pytest.raises(FolderUnusable, match="another engine uses"):
        clear_folder(folder)
    files.close()
    again = opened(folder)
    assert 10 < len(kept) < 50
    assert [start for start in range(0, 150, 3) if read(again, start, start + 1, start + 2) == 3] == kept
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert read(again, kept[0], kept[0] + 1, kept[0] + 2, goes_on=lambda num: False) == 0
    again.close()
    assert folders(tmp_path / "kv") == [folder]
    assert clear_folder(folder) > 0
    assert not folder.exists()


def test_a_flood_of_hints_keeps_the_index_short_even_if_it_cannot_be_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise OSError(errno.EIO, "planted")

    files = opened(tmp_path / "one")
    write(files, 1, 2)
    chain = files.index.chain(np.repeat(np.array([1, 2], np.int32), 4), None)
    most = 4096 + (2 * files.index.num_places + 2) * files.index.records.itemsize
    for number in range(5 * files.index.num_places):
        with suppress(OSError):
            files.note(files.index.retain(chain, 2, Retention(60.0), 1e10 + 2 * number))
        assert (tmp_path / "one" / "index").stat().st_size <= most
        if number == 3 * files.index.num_places:
            monkeypatch.setattr(files, "_rewrite", fails)
    files.close()
    again = opened(tmp_path / "one")
    assert (again.index.num_retained, read(again, 1, 2)) == (2, 2)
    again.close()


def test_an_index_that_is_written_anew_has_the_blocks_that_are_not_settled_yet(tmp_path: Path) -> None:
    files, length, rewritten = opened(tmp_path / "one"), 0, 0
    for start in range(0, 300, 3):
        chain = files.index.chain(np.repeat(np.arange(start, start + 3, dtype=np.int32), 4), None)
        records = files.write(files.index.take(chain, 3), np.array([block(start + i) for i in range(3)]))
        files.tidy()
        before, length = length, (files.folder / "index").stat().st_size
        if length < before:
            rewritten += 1
            files.close()
            files = opened(tmp_path / "one")
            assert read(files, start, start + 1, start + 2) == 3
            continue
        files.index.written(records)
    assert rewritten > 1
    assert len(files.index.unsettled(records)) == 0
    files.close()


def test_what_was_cleared_is_not_found_again_though_the_index_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    files = opened(tmp_path / "one")
    write(files, 1, 2)
    files.index.clear()
    monkeypatch.setattr(files, "_rewrite", full)
    with pytest.raises(OSError, match="no space left"):
        files.rewrite()
    write(files, 3)
    files.close()
    again = opened(tmp_path / "one")
    assert (read(again, 1, 2), read(again, 3)) == (0, 1)
    again.close()


def test_no_damage_of_a_file_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    seen = set()
    for turn in range(24):
        folder = tmp_path / str(turn)
        files = opened(folder)
        write(files, 1, 2, 3, 4)
        write(files, 1, 2, 5)
        files.close()
        path = folder / ("index", "0000.kv")[turn % 2]
        raw = bytearray(path.read_bytes())
        if turn % 4 < 2:
            raw[int(rng.integers(len(raw)))] ^= 1 << int(rng.integers(8))
        else:
            raw = raw[: int(rng.integers(len(raw)))]
        path.write_bytes(raw)
        again = opened(folder)
        seen.add(read(again, 1, 2, 3, 4))
        write(again, 1, 2, 5)
        read(again, 1, 2, 5)
        again.index.check_invariants()
        again.close()
    assert seen >= {0, 4}


@pytest.mark.parametrize("kind", [BlockKind("other", 1000, 4), BlockKind("model", 1004, 4), BlockKind("model", 1000, 8)])
def test_blocks_of_another_kind_are_dropped(tmp_path: Path, kind: BlockKind) -> None:
    files = opened(tmp_path / "one")
    write(files, 1, 2)
    files.close()
    opened(tmp_path / "one", kind=kind).close()
    again = opened(tmp_path / "one")
    assert again.index.num_used == 0
    assert not list(again.folder.glob("*.kv"))
    again.close()


def test_a_secret_is_not_in_the_folder_and_without_it_nothing_is_found(tmp_path: Path) -> None:
    files = opened(tmp_path / "one", secret=b"sixteen bytes or more")
    write(files, 1, 2)
    files.close()
    assert all(b"sixteen bytes" not in file.read_bytes() for file in files.folder.iterdir())
    same = opened(tmp_path / "one", secret=b"sixteen bytes or more")
    assert read(same, 1, 2) == 2
    same.close()
    other = opened(tmp_path / "one", secret=b"another secret there")
    assert read(other, 1, 2) == 0
    other.close()


def test_a_full_disk_leaves_whole_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = opened(tmp_path / "one")
    write(files, 1, 2)
    left = 1700

    def pwrite(file: int, data: memoryview, offset: int) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "no space left on device")
        num = min(left, len(data))
        left -= num
        return real(file, data[:num], offset)

    real = os.pwrite
    monkeypatch.setattr(disk_files.os, "pwrite", pwrite)
    for room in (0, 1700, 2000, 2100):
        left = room
        with pytest.raises(OSError, match="no space"):
            write(files, 8, 9)
        files.index.forget(files.index.records[2:4])
    monkeypatch.undo()
    files.close()
    again = opened(tmp_path / "one")
    assert (read(again, 1, 2), read(again, 8, 9)) == (2, 0)
    write(again, 8, 9)
    assert read(again, 8, 9) == 2
    again.close()


def test_a_tier_of_another_size_keeps_the_blocks_that_have_room(tmp_path: Path) -> None:
    starts = range(0, 120, 3)
    files = opened(tmp_path / "one")
    for start in starts:
        write(files, start, start + 1, start + 2)
    files.close()
    kept = []
    for most_bytes in (CAP, 4 * CAP, CAP // 2, 4 * CAP, 1024 * CAP):
        files = opened(tmp_path / "one", most_bytes)
        kept.append(sum(read(files, start, start + 1, start + 2) for start in starts))
        files.index.check_invariants()
        assert folder_bytes(tmp_path / "one") <= most_bytes
        files.close()
    assert kept[0] == kept[1] > kept[2] > 0
    assert kept[2:] == [kept[2], kept[2], 0]


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir(0o700)
    for name in ("x.kv", "12.kv", "9999.kv"):
        (tmp_path / "one" / name).write_text("there")
    opened(tmp_path / "one").close()
    opened(tmp_path / "one").close()
    assert sorted(file.name for file in (tmp_path / "one").glob("*.kv")) == ["12.kv", "x.kv"]


def test_no_files_of_others_are_cleared(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    for name in ("index", "lock", "0000.kv"):
        (tmp_path / ".git" / name).write_bytes(b"DIRC\0\0\0\2")
    files = opened(tmp_path / "one")
    write(files, 1, 2)
    files.close()
    (tmp_path / "one" / "notes.kv").write_text("mine")
    assert folders(tmp_path) == [tmp_path / "one"]
    with pytest.raises(FolderUnusable, match="no folder of a disk tier"):
        clear_folder(tmp_path / ".git")
    clear_folder(tmp_path / "one")
    assert sorted(file.name for file in (tmp_path / ".git").iterdir()) == ["0000.kv", "index", "lock"]
    assert [file.name for file in (tmp_path / "one").iterdir()] == ["notes.kv"]


def test_folders_of_others_and_sizes_too_small_are_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(FolderUnusable, match="others can write"):
        opened(tmp_path / "open")
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderUnusable, match="cannot be used"):
        opened(tmp_path / "file")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "index").symlink_to(tmp_path / "file")
    with pytest.raises(FolderUnusable, match="cannot be used"):
        opened(tmp_path / "linked")
    with pytest.raises(ConfigError, match="hold no block"):
        opened(tmp_path / "small", 9000)


def test_a_folder_that_is_cleared_while_it_is_locked_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of a file that is gone keeps no later engine out."""
    opened(tmp_path / "one").close()
    lock = disk_files.fcntl.flock

    def late(file: int, operation: int) -> None:
        monkeypatch.setattr(disk_files.fcntl, "flock", lock)
        clear_folder(tmp_path / "one")
        lock(file, operation)

    monkeypatch.setattr(disk_files.fcntl, "flock", late)
    with pytest.raises(FolderUnusable, match="cleared in this moment"):
        opened(tmp_path / "one")
    opened(tmp_path / "one").close()
