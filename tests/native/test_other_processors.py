"""The kernels for a processor that this machine is not, under qemu, against float64."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pagetide.native import build

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


@pytest.mark.stress
@pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None, reason="needs g++-aarch64-linux-gnu and qemu-user"
)
def test_neon(tmp_path: Path) -> None:
    sources = [build.SOURCES / f"{name}.cpp" for name in ("isa", "kernels", "pool")]
    flags = [*build.COMMON, "-O2", *build.INSTRUCTION_SETS["aarch64"]["neon"], "-DPAGETIDE_ISA=neon"]
    program = tmp_path / "check_kernels"
    check = Path(__file__).with_name("check_kernels.cpp")
    include = ["-I", str(build.SOURCES), "-static", "-pthread"]
    subprocess.run([COMPILER, *flags, *include, str(check), *map(str, sources), "-o", str(program)], check=True)
    run = subprocess.run([EMULATOR, str(program)], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "neon: products, attention and sampling agree with float64\n"), run
