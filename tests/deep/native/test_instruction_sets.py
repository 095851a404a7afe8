"""The quick tests of kernels with each instruction set that this processor has besides the one that it uses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagetide import native

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="the native kernels are not built")


@pytest.mark.parametrize("instructions", ["avx2", "avx512", "avx512_bf16"])
def test_other_instruction_sets(instructions):
    environ = os.environ | {"PAGETIDE_NATIVE": instructions}
    check = "from pagetide import native; print(native.instructions())"
    run = subprocess.run([sys.executable, "-P", "-c", check], env=environ, capture_output=True, text=True, check=True)
    if run.stdout.strip() != instructions or native.instructions() == instructions:
        pytest.skip(f"this processor uses {run.stdout.strip()}")
    folder = Path(__file__).parents[2] / "native"
    files = [str(file) for file in folder.glob("test_*.py") if file.name != "test_other_processors.py"]
    files.append(str(folder.parent / "engine" / "attention" / "test_decoder_layers.py"))
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    run = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:]
