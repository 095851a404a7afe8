"""What is said while the native kernels are built. Compiling itself is in tests/deep/native."""

import re
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from pagetide.native import build


def test_each_compiled_file_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> CompletedProcess[str]:
        commands.append(command)
        Path(command[-1]).touch()
        return CompletedProcess(command, 0)

    monkeypatch.setattr(build.subprocess, "run", run)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setenv("CXX", "compiler")
    build.build(tmp_path / "_kernels.so")
    head, *lines = capsys.readouterr().err.splitlines()
    count = len(commands) - 1  # and the link
    assert head.startswith(f"native kernels: compiling {count} files for neon_dot, neon: about ") and "busy machine" in head
    told = [re.fullmatch(r"native kernels: (\d+) of (\d+) files compiled after \d+ s", line) for line in lines]
    assert [found and found.groups() for found in told] == [(str(i), str(count)) for i in range(1, count + 1)]
