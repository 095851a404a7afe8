"""Build the native kernels: `python native/build.py [--sanitize]`.

Compiles each source file with the C++ compiler that CXX names, or the first of c++, g++ and clang++ on the PATH, against
torch's stable ABI, so that one library serves torch 2.10 and later and every Python. Does nothing if the library is newer than
its sources. Says how far it is. Exits with status 0 if it cannot be built, and says why: the library is optional.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "csrc"
LIBRARY = HERE / "_kernels.so"
TARGET_VERSION = "0x020a000000000000"  # of torch: the oldest that the library works with, 2.10
COMMON = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", f"-ffile-prefix-map={SOURCES}=."]
COMMON += ["-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"]
V3 = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2"]
V4 = [*V3, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
V4_BF16 = [*V4, "-mavx512bf16", "-mavx512vnni"]
AMX = ["-mamx-tile", "-mamx-bf16", "-mamx-int8"]
OPTIONAL = {"avx512_amx"}  # compilers before GCC 11 do not know it
INSTRUCTION_SETS: dict[str, dict[str, list[str]]] = {
    "x86_64": {"avx2": V3, "avx512": V4, "avx512_bf16": V4_BF16, "avx512_amx": [*V4_BF16, *AMX]},
    "aarch64": {"neon_dot": ["-march=armv8.2-a+dotprod"], "neon": []},
}
ALIASES = {"AMD64": "x86_64", "arm64": "aarch64"}  # of machines
SANITIZERS = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g"]  # -O3 would take minutes


def sources_digest() -> str:
    """A digest of the sources. The library gives that of its own, so that one which is out of date is noticed."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def obstacle() -> str | None:
    """Why the library cannot be built here, as a clause; None if it can."""
    if _instruction_sets() is None:
        return f"no kernels exist for processors like {platform.machine()}"
    if _compiler() is None:
        return "there is no C++ compiler: install g++ or clang"
    if _torch() is None:
        return "torch is not installed yet, and they need its headers"
    return None


def build(library: Path = LIBRARY, sanitize: bool = False) -> None:
    """Build `library` unless it is newer than its sources. Says on stderr what it compiles, and after each file how far it is.

    Raises OSError or subprocess.CalledProcessError if the compiler fails, and RuntimeError if there is an `obstacle`.
    """
    newest = max(path.stat().st_mtime for path in [*SOURCES.iterdir(), Path(__file__)])
    if library.exists() and library.stat().st_mtime >= newest:
        return
    if (why := obstacle()) is not None:
        raise RuntimeError(why)
    sets, compiler, torch = _instruction_sets(), _compiler(), _torch()
    assert sets is not None and compiler is not None and torch is not None
    sets = {name: extra for name, extra in sets.items() if name not in OPTIONAL or _knows(compiler, extra)}
    objects = library.parent / f"{library.stem}.build.{os.getpid()}"
    objects.mkdir(parents=True)
    try:
        checks = SANITIZERS if sanitize else []
        known = [f"-DWITH_{name}" for name in OPTIONAL & sets.keys()]
        flags = [
            *COMMON,
            *checks,
            *known,
            f"-DTORCH_TARGET_VERSION={TARGET_VERSION}",
            f'-DPAGETIDE_SOURCES="{sources_digest()}"',
            "-isystem",
            str(torch / "include"),
        ]
        jobs = [(SOURCES / "isa.cpp", f"isa_{name}", [f"-DPAGETIDE_ISA={name}", *extra]) for name, extra in sets.items()]
        jobs += [(path, path.stem, []) for path in sorted(SOURCES.glob("*.cpp")) if path.name != "isa.cpp"]
        files = [objects / f"{name}.o" for _, name, _ in jobs]
        commands = [
            [*compiler, *flags, *extra, "-c", str(source), "-o", str(file)]
            for (source, _, extra), file in zip(jobs, files, strict=True)
        ]
        _compile(commands, f"for {', '.join(sets)}")
        linked = objects / library.name
        link = ["-shared", "-pthread", *checks, "-L", str(torch / "lib"), "-ltorch_cpu", "-o", str(linked)]
        subprocess.run([*compiler, *map(str, files), *link], check=True)
        linked.replace(library)
    finally:
        shutil.rmtree(objects, ignore_errors=True)


def _compile(commands: Sequence[Sequence[str]], what: str) -> None:
    """Run the commands side by side, and say how far they are. Raises as `build`."""
    cores, began = os.cpu_count() or 1, time.monotonic()
    expected = "about a minute" if cores > 1 else "about two minutes"  # 45 to 90 s of a core in all
    _say(f"compiling {len(commands)} files {what}: {expected}, longer on a busy machine")
    with ThreadPoolExecutor(cores) as pool:
        running = [pool.submit(subprocess.run, command, check=True) for command in commands]
        for count, done in enumerate(as_completed(running), 1):
            done.result()
            _say(f"{count} of {len(commands)} files compiled after {time.monotonic() - began:.0f} s")


def _say(sentence: str) -> None:
    print(f"native kernels: {sentence}", file=sys.stderr, flush=True)


def try_to_build(library: Path = LIBRARY, sanitize: bool = False) -> None:
    """`build`, but say on stderr why it failed instead of raising."""
    try:
        build(library, sanitize)
    # ValueError: CXX cannot be split.
    except (OSError, RuntimeError, ValueError, subprocess.CalledProcessError) as error:
        _say(f"not built: {error}; torch's operators are used, which are slower")


def _instruction_sets() -> dict[str, list[str]] | None:
    return INSTRUCTION_SETS.get(ALIASES.get(platform.machine(), platform.machine()))


def _compiler() -> list[str] | None:
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    return next(([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


def _knows(compiler: list[str], flags: list[str]) -> bool:
    """Whether the compiler takes `flags`."""
    command = [*compiler, *flags, "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _torch() -> Path | None:
    """Torch's folder, without importing it. An isolated build sees it only as a folder beside where it will install."""
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent if spec and spec.origin else Path(sysconfig.get_path("purelib")) / "torch"
    return folder if (folder / "include" / "torch" / "csrc" / "stable" / "library.h").is_file() else None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build pagetide's native kernels.")
    parser.add_argument("--sanitize", action="store_true", help="with address and undefined-behaviour sanitisers")
    parser.add_argument("--output", type=Path, default=LIBRARY, help="the library's file")
    args = parser.parse_args()
    try_to_build(args.output, args.sanitize)
