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
    """With products of bytes and without: a Cortex-A53 has none."""
    objects, program = [], tmp_path / "check_kernels"
    include = ["-I", str(build.SOURCES), "-static", "-pthread"]
    for name, flags in build.INSTRUCTION_SETS["aarch64"].items():
        objects.append(str(tmp_path / f"{name}.o"))
        isa = [*build.COMMON, "-O2", *flags, f"-DPAGETIDE_ISA={name}", "-c", str(build.SOURCES / "isa.cpp"), "-o", objects[-1]]
        subprocess.run([COMPILER, *include, *isa], check=True)
    sources = [Path(__file__).with_name("check_kernels.cpp"), *(build.SOURCES / f"{name}.cpp" for name in ("kernels", "pool"))]
    whole = [*build.COMMON, "-O2", *map(str, sources), *objects, "-o", str(program)]
    subprocess.run([COMPILER, *include, *whole], check=True)
    for processor, name in (("max", "neon_dot"), ("cortex-a53", "neon")):
        run = subprocess.run([EMULATOR, "-cpu", processor, str(program)], capture_output=True, text=True)
        assert (run.returncode, run.stdout) == (0, f"{name}: products, attention and sampling agree with float64\n"), run
