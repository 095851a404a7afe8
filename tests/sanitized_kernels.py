"""The tests of the native kernels with address and undefined-behaviour sanitisers.

    python tests/sanitized_kernels.py [FOLDER]

Builds the library once more, into FOLDER (default build/sanitized), and runs the tests of kernels with it, for all instruction
sets of this processor, and those of everything that packs weights for them: quantized at load, read from checkpoints in every
form, decoded from GGUF files, experts. It ends at the first fault. Python itself has no sanitisers, so the library of the
address sanitiser is loaded before everything else. Leaks are not looked for: torch and Python keep memory until the end. Needs
GCC with its sanitisers, and skips the tests without.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
WITHOUT_KERNELS = ("test_other_processors.py", "test_without_compiler.py")
KERNEL_TESTS = [
    str(file)
    for folder in ("tests/native", "tests/deep/native")
    for file in sorted((REPOSITORY / folder).glob("test_*.py"))
    if file.name not in WITHOUT_KERNELS
]
PACKING_TESTS = [
    str(REPOSITORY / "tests/engine" / file)
    for file in (
        "attention/test_decoder_layers.py",
        "layers/test_quantized_linears.py",
        "loading/gguf/test_weights.py",
        "loading/test_stored_model.py",
    )
]
BUILD = REPOSITORY / "native" / "build.py"


def preloaded_libraries() -> str | None:
    """The files of GCC's address sanitiser, and of the C++ library, whose exceptions it watches; None if they are not there."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [next(filter(shutil.which, ("c++", "g++", "clang++")), "none")]
    if shutil.which(compiler[0]) is None:
        return None
    found = []
    for name in ("libasan.so", "libstdc++.so.6"):
        run = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        found.append(run.stdout.strip())
    return " ".join(found) if all(Path(file).is_absolute() for file in found) else None


def environment(library: Path, preloaded: str) -> dict[str, str]:
    """The environment of a process that uses the sanitised `library`."""
    return os.environ | {
        "LD_PRELOAD": preloaded,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PAGETIDE_NATIVE_LIBRARY": str(library),
        "OMP_NUM_THREADS": "1",
    }


def main(folder: Path) -> int:
    """Returns the exit status of the tests; 0 if the library cannot be built here."""
    preloaded = preloaded_libraries()
    if preloaded is None:
        print("native kernels with sanitisers: skipped, as there is no GCC with libasan")
        return 0
    spec = importlib.util.spec_from_file_location("native_build", BUILD)
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    library = folder.resolve() / "_kernels.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    build.build(library, sanitize=True)
    # A sanitiser ends the process at the first fault: its message must not lie in a file of pytest's then.
    tests = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--capture=sys",
        *KERNEL_TESTS,
        *PACKING_TESTS,
    ]
    return subprocess.run(tests, cwd=REPOSITORY, env=environment(library, preloaded)).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "build" / "sanitized"))
