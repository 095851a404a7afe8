"""A machine without a C++ compiler: the build says so and succeeds, and an engine generates by torch's operators."""

from __future__ import annotations

import _ctypes
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pagetide import LLM, SamplingParams, native
from pagetide.native import build

GENERATE = """
import json, logging, sys
logging.basicConfig(level=logging.WARNING, format="%(message)s")
from pagetide import LLM, SamplingParams
for _ in range(2):
    with LLM("demo", device="cpu", dtype="float32", kv_memory="8MiB") as llm:
        outputs = llm.generate(["the sea", "a whale"], SamplingParams(max_new_tokens=8, temperature=0.0), progress=False)
        sampled = llm.generate("the sea", SamplingParams(max_new_tokens=8, top_k=20, top_p=0.9, seed=1), progress=False)
        stats = llm.stats()
print(json.dumps([[o.token_ids for o in outputs], len(sampled[0].token_ids), stats["attention"]]))
"""

ASK = """
import logging
logging.basicConfig(format="%(message)s")
from pagetide import native
print(native.instructions(), native.instructions())
"""


def python(program: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", "-c", program], env=environ, capture_output=True, text=True)


def environment(library: Path) -> dict[str, str]:
    """An environment without programs, and whose library of native kernels is `library`."""
    others = {name: value for name, value in os.environ.items() if name not in ("CXX", "PAGETIDE_NATIVE")}
    return others | {"PATH": "", "PAGETIDE_NATIVE_LIBRARY": str(library), "OMP_NUM_THREADS": "1"}


def test_it_is_built_without_and_generates_and_says_once_what_that_costs(tmp_path: Path) -> None:
    library = tmp_path / "_kernels.so"
    command = [sys.executable, "-P", build.__file__, "--output", str(library)]
    run = subprocess.run(command, env=environment(library), capture_output=True, text=True)
    assert (run.returncode, run.stdout, library.exists()) == (0, "", False)
    why = "there is no C++ compiler: install g++ or clang"
    assert run.stderr == f"native kernels: not built: {why}; torch's operators are used, which are slower\n"

    run = python(GENERATE, environment(library))
    assert run.returncode == 0, run.stderr
    said = [line for line in run.stderr.splitlines() if "native kernels" in line]
    assert len(said) == 1 and "at about half the speed" in said[0] and "install g++ or clang" in said[0]
    with LLM("demo", device="cpu", dtype="float32", kv_memory="8MiB") as llm:
        outputs = llm.generate(["the sea", "a whale"], SamplingParams(max_new_tokens=8, temperature=0.0), progress=False)
    assert run.stdout == f'[{[o.token_ids for o in outputs]}, 8, "torch"]\n'


@pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native kernels are not built")
def test_a_library_of_other_sources_does_not_serve(tmp_path: Path) -> None:
    library, content = tmp_path / "_kernels.so", native.LIBRARY.read_bytes()
    assert content.count(build.sources_digest().encode()) == 1
    library.write_bytes(content.replace(build.sources_digest().encode(), b"0" * 16))
    run = python(ASK, environment(library))
    assert (run.returncode, run.stdout) == (0, "None None\n")
    assert run.stderr.count("were built from other sources") == 1


@pytest.mark.parametrize("kind", ["text", "foreign"])
def test_a_library_that_cannot_be_loaded_is_said_once_too(tmp_path: Path, kind: str) -> None:
    library = tmp_path / "_kernels.so"
    if kind == "text":
        library.write_bytes(b"not a library")
    else:
        library.symlink_to(_ctypes.__file__)  # one that loads
    run = python(ASK, environment(library))
    assert (run.returncode, run.stdout) == (0, "None None\n")
    assert run.stderr.count("native kernels cannot be loaded") == 1


def test_a_value_that_names_no_instruction_set_is_said() -> None:
    run = python(ASK, os.environ | {"PAGETIDE_NATIVE": "off"})
    assert run.returncode == 0 and ("PAGETIDE_NATIVE='off'" in run.stderr) == native.LIBRARY.exists()


def test_a_compiler_that_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-P", build.__file__, "--output", str(tmp_path / "_kernels.so")]
    run = subprocess.run(command, env=os.environ | {"CXX": 'g++ "'}, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (
        0,
        "native kernels: not built: No closing quotation; torch's operators are used, which are slower\n",
    )
