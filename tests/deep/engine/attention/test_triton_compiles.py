"""The Triton kernels compile for an H100 or H200, on any machine: the interpreter takes more than the compiler does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install pagetide[triton]")

PROGRAM = Path(__file__).parents[3] / "triton_compile.py"
SHARED_BYTES = 227 << 10  # of a multiprocessor of an H100


def compiled(which: str, folder: Path) -> list[dict[str, Any]]:
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(PROGRAM), which], env={**environ, "TRITON_CACHE_DIR": str(folder)}, capture_output=True,
        text=True, timeout=900,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert all(kernel["shared_bytes"] <= SHARED_BYTES for kernel in kernels)
    return kernels


def test_one_of_each(tmp_path: Path) -> None:
    kernels = compiled("some", tmp_path)
    names = "decode decode prefill merge write blocks decode prefill write"
    assert [kernel["name"].split()[0] for kernel in kernels] == names.split()
    for kernel in kernels:
        assert not kernel["stack_bytes"], f"{kernel} spills"
    decode, prefill, scaled_decode, scaled_prefill = *kernels[:3:2], *kernels[6:8]
    for kernel in (decode, scaled_decode):
        assert kernel["shared_bytes"] <= SHARED_BYTES // 3, "three programs fit a multiprocessor"
    assert scaled_prefill["shared_bytes"] < prefill["shared_bytes"], "elements of one byte take less room"
    for kernel in (decode, prefill, scaled_decode, scaled_prefill):
        assert kernel["async_copies"] and kernel["products"], "K and V are copied ahead, and multiplied by matrix units"


@pytest.mark.stress
def test_every_tiling(tmp_path: Path) -> None:
    for kernel in compiled("all", tmp_path):
        name = kernel["name"]
        assert not kernel["stack_bytes"] or "512" in name or ("fp32" in name and "stored" in name), f"{kernel} spills"
        assert kernel["async_copies"] or "fp32" in name or not name.startswith(("decode", "prefill")), f"{kernel} waits"
