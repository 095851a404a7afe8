"""Files of a kernel in a folder: /proc/meminfo, and memory cgroups of both versions."""

from __future__ import annotations

from pathlib import Path


def write(directory: Path, **files: str) -> None:
    """Files by their names, with "__" for "."."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


def fake(tmp_path: Path, membership: str, available_kib: int = 600) -> tuple[Path, Path]:
    """(proc, cgroups): a machine with that much memory, in which this process is a member of those cgroups."""
    write(tmp_path / "proc" / "self", cgroup=membership)
    meminfo = f"MemTotal: {1000:>15} kB\nMemFree:  17 kB\nMemAvailable: {available_kib:>8} kB\nBuffers:  3 kB\n"
    write(tmp_path / "proc", meminfo=meminfo)
    return tmp_path / "proc", tmp_path / "cgroup"


def v2(directory: Path, limit: str, use: int, inactive: int = 0) -> None:
    stat = f"anon 4\nfile 99\nactive_file 5\ninactive_file {inactive}\nworkingset_refault_file 7\n"
    write(directory, memory__max=f"{limit}\n", memory__current=f"{use}\n", memory__stat=stat)


def v1(directory: Path, limit: int, use: int, inactive: int = 0) -> None:
    stat = f"inactive_file 1\nhierarchical_memory_limit 77\ntotal_inactive_file {inactive}\n"
    write(directory, memory__limit_in_bytes=f"{limit}\n", memory__usage_in_bytes=f"{use}\n", memory__stat=stat)
