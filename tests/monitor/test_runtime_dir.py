"""monitor/runtime_dir.py: where a monitor lives, who may look, and locks that die with their holder."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pagetide.monitor.errors import ConfigInvalid
from pagetide.monitor.runtime_dir import MACHINE_DIR, FileLock, RuntimeDir, own_dir, readable_dirs


def test_the_variable_goes_first_and_alone() -> None:
    environ = {"PAGETIDE_RUNTIME_DIR": "/x/y", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert own_dir(environ).path == Path("/x/y")
    assert readable_dirs(environ) == (RuntimeDir(Path("/x/y")),)


@pytest.mark.parametrize("named", ["here", "./a/b", "~/run"])
def test_a_relative_path_in_the_variable_is_refused(named: str) -> None:
    for read in (own_dir, readable_dirs):
        with pytest.raises(ConfigInvalid, match=r"^PAGETIDE_RUNTIME_DIR must be an absolute path, got ") as refused:
            read({"PAGETIDE_RUNTIME_DIR": named})
        assert str(refused.value).endswith(f"; set it to {Path(named).absolute()}, or unset it")


def test_then_the_users_runtime_directory_after_the_machines(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert own_dir(environ).path == tmp_path / "pagetide"
    assert [directory.path for directory in readable_dirs(environ)] == [MACHINE_DIR, tmp_path / "pagetide"]


def test_without_either_it_is_one_of_the_users_own() -> None:
    path = own_dir({}).path
    assert str(os.getuid()) in str(path) and path.is_absolute()


def test_a_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    directory = RuntimeDir(tmp_path / "a" / "b").prepare()
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert directory.prepare() == directory  # again


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a directory to any group")
def test_a_directory_for_a_group_can_be_read_by_it(tmp_path: Path) -> None:
    import grp

    group = grp.getgrall()[-1]
    directory = RuntimeDir(tmp_path / "shared").prepare(group=group.gr_name)
    found = directory.path.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o750, group.gr_gid)


def test_unsafe_and_unusable_directories_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigInvalid, match="is no directory"):
        RuntimeDir(tmp_path / "file").prepare()
    with pytest.raises(ConfigInvalid, match=r"cannot be used: (File exists|Not a directory)"):
        RuntimeDir(tmp_path / "file" / "below").prepare()
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigInvalid, match="is no directory"):
        RuntimeDir(tmp_path / "link").prepare()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigInvalid, match="writable by others"):
        RuntimeDir(tmp_path / "open").prepare()
    with pytest.raises(ConfigInvalid, match="no group 'no such group'"):
        RuntimeDir(tmp_path / "g").prepare(group="no such group")


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user's directory")
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, -1)
    with pytest.raises(ConfigInvalid, match="belongs to user 12345, not to 0"):
        RuntimeDir(tmp_path / "theirs").prepare()


def test_locks_exclude_and_share(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    a, b, c = FileLock(path), FileLock(path), FileLock(path)
    assert a.try_shared() and b.try_shared() and not c.try_exclusive()
    a.close()
    assert not c.try_exclusive()
    b.close()
    assert c.try_exclusive()
    late = FileLock(path)
    assert not late.try_shared() and not late.wait_shared(0.02)
    c.close()
    c.close()
    assert late.wait_shared(0.02)
    late.close()
    with pytest.raises(ValueError, match="closed"):
        late.try_shared()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_lock_goes_with_its_process_and_not_to_its_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; from pathlib import Path; from pagetide.monitor.runtime_dir import FileLock\n"
        "lock = FileLock(Path(sys.argv[1])); print(lock.try_exclusive(), flush=True)\n"
        "child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == "True\n"
    child = int(holder.stdout.readline())
    lock = FileLock(tmp_path / "lock")
    assert not lock.try_exclusive()
    holder.kill()
    holder.wait()
    try:
        assert lock.try_exclusive()
    finally:
        os.kill(child, 9)
        lock.close()
        holder.stdin.close()
        holder.stdout.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user's directory")
def test_anothers_runtime_directory_is_not_ours(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    assert own_dir({"XDG_RUNTIME_DIR": str(tmp_path)}).path != tmp_path / "pagetide"
    os.chown(tmp_path, 0, -1)
    assert own_dir({"XDG_RUNTIME_DIR": str(tmp_path)}).path == tmp_path / "pagetide"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a directory to any group")
def test_a_private_directory_with_files_is_not_opened_to_a_group(tmp_path: Path) -> None:
    import grp

    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "mine" / "diary").write_text("")
    with pytest.raises(ConfigInvalid, match="is not empty"):
        RuntimeDir(tmp_path / "mine").prepare(group=grp.getgrall()[-1].gr_name)
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o700


def test_a_forked_child_lets_go_of_its_parents_lock(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    assert lock.try_exclusive()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # lives until the parent closes its end
        os._exit(0)
    lock.close()
    other = FileLock(tmp_path / "lock")
    try:
        assert other.wait_exclusive(30)
    finally:
        other.close()
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)
