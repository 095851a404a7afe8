"""Runs the tests in two tiers, and holds the quick one to a budget of CPU seconds.

    python .ci/tiers.py quick [pytest's arguments]     make test
    python .ci/tiers.py all                            make test-all

quick: everything but tests/deep, first the files that need no torch, in processes that never load it, then the others.
all: the quick tier within its budget; tests/deep, and properties of the quick tier with more examples; then kernels and engines
once more as on a processor that has AVX2 alone (unless this one has), and once without native kernels.

A test that fails is run once more, alone; one that passes then is named as unstable, and is a defect that does not stop others.

CPU seconds are counted with all children and daemons: this process adopts what leaves its parent (PR_SET_CHILD_SUBREAPER,
prctl(2)) and sums what wait4(2) says of each. They are divided by the pace of the machine: the processes of tests time a loop
every few seconds (cpu_meter.py). Elsewhere than on Linux nothing is counted.
"""

from __future__ import annotations

import collections
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import cpu_meter

ROOT = Path(__file__).resolve().parents[1]
METER = ROOT / "build" / "cpu_seconds"

# The budget of the quick tier in CPU seconds of the reference machine: 480 in all.
BUDGET_S = {
    "engine": 170,
    "scheduler, api, frames": 60,
    "server": 60,
    "cache, allocator, common, native, structure": 80,
    "monitor": 30,
    "fleet": 25,
    "front, examples": 20,
    "benchmarks": 5,
    "start-up": 30,
}
# pytest's exit statuses
FAILED, NO_TESTS = 1, 5
JOBS = ["-n", os.environ.get("JOBS", "2"), "--dist", "loadgroup"]
NOT_QUICK = [f"--ignore=tests/{folder}" for folder in ("deep", "gpu", "stress")]
QUICK = ["-m", "not gpu and not stress", *NOT_QUICK]
DEEP = ["-m", "not gpu and not stress", "--ignore=tests/gpu", "--ignore=tests/stress", "--tier=deep"]
_OF_ENGINES = (
    "attention", "collectives", "cpu", "execution", "loading", "sampling", "test_equality.py", "test_kv_cache_dtype.py",
    "test_windows.py",
)  # fmt: skip
KERNELS_AND_ENGINES = [
    path
    for tier in ("tests", "tests/deep")
    for path in (f"{tier}/native", *(f"{tier}/engine/{name}" for name in _OF_ENGINES))
    if (ROOT / path).exists()
]
# oneDNN's and torch's kernels, and the library's own, as if the processor had AVX2 and no AVX-512.
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "PAGETIDE_NATIVE": "avx2"}


@dataclass
class Spent:
    """What the runs took. `run` adds to it."""

    cpu_s: float = 0.0
    wall_s: float = 0.0


def pace() -> float:
    """How much longer this machine has taken for the same work than the reference machine, on average."""
    return statistics.mean(cpu_meter.loops(METER) or [cpu_meter.REFERENCE_LOOP_S]) / cpu_meter.REFERENCE_LOOP_S


def _adopt() -> None:
    """From now on, processes whose parent has ended become children of this one."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def run(arguments: Sequence[str], spent: Spent, environ: Mapping[str, str] | None = None) -> int:
    """Tests side by side, then what failed of them alone. Returns pytest's exit status."""
    status = _pytest([*JOBS, *arguments], spent, environ)
    if status == FAILED:
        print("\nwhat failed is run once more, alone", flush=True)
        status = _pytest(["--last-failed", "--maxfail=1", "-rp", *arguments], spent, environ)
        if status == 0:
            print("UNSTABLE: the tests named above failed beside others and passed alone", flush=True)
    return status


def _pytest(arguments: Sequence[str], spent: Spent, environ: Mapping[str, str] | None) -> int:
    """A run of pytest. Returns its exit status."""
    began = time.monotonic()
    variables = {"PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1", "CPU_METER": str(METER)}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "cpu_meter", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | variables | (environ or {}))
    status = None
    while status is None:
        pid, code, used = os.wait4(-1, 0)
        spent.cpu_s += used.ru_utime + used.ru_stime
        if pid == process.pid:
            status = process.returncode = os.waitstatus_to_exitcode(code)
    spent.cpu_s += _left_behind(within_s=10)
    spent.wall_s += time.monotonic() - began
    return status


def _left_behind(within_s: float) -> float:
    """CPU seconds of the adopted processes that end within so many seconds."""
    cpu_s, until = 0.0, time.monotonic() + within_s
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            pid, _, used = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                time.sleep(0.1)
            cpu_s += (used.ru_utime + used.ru_stime) if pid else 0.0
    return cpu_s


def shares(tests: Sequence[tuple[str, float]], cpu_s: float) -> dict[str, float]:
    """CPU seconds by the rows of the budget. What no test took is start-up: interpreters, imports, collection, daemons."""
    row_of = {folder: row for row in BUDGET_S for folder in row.split(", ")}
    sums: dict[str, float] = collections.Counter(dict.fromkeys(BUDGET_S, 0.0))
    for name, seconds in tests:
        folder = name.split("/")[1]
        sums[row_of.get(folder, folder)] += seconds
    sums["start-up"] = max(cpu_s - sum(seconds for _, seconds in tests), 0.0)
    return sums


def report(spent: Spent) -> bool:
    """Print what the quick tier took. Returns whether that is within the budget."""
    tests, budget_s, slower = cpu_meter.read(METER), sum(BUDGET_S.values()), pace()
    cpu_s = spent.cpu_s - sum(cpu_meter.loops(METER))
    total_s = cpu_s / slower
    print(f"\n{len(tests)} tests in {spent.wall_s:.0f} s; CPU seconds by the pace of this machine ({slower:.2f}):")
    for row, seconds in shares(tests, cpu_s).items():
        seconds /= slower
        over = "  above its share" if seconds > BUDGET_S.get(row, 0) else ""
        print(f"  {row:36} {seconds:6.1f} of {BUDGET_S.get(row, 0):3}{over}")
    print(f"  {'all':36} {total_s:6.1f} of {budget_s:3}{'  ABOVE THE BUDGET' if total_s > budget_s else ''}")
    print("the most expensive tests:")
    for name, seconds in sorted(tests, key=lambda test: -test[1])[:10]:
        print(f"  {seconds / slower:6.1f}  {name}")
    return total_s <= budget_s


def quick(arguments: Sequence[str]) -> tuple[int, bool]:
    """The quick tier. Returns the exit status of its tests, and whether they were within the budget."""
    shutil.rmtree(METER, ignore_errors=True)
    spent = Spent()
    statuses = {run([*QUICK, f"--torch={torch}", *arguments], spent) for torch in ("without", "with")}
    if arguments and statuses != {NO_TESTS}:  # what was asked for may be in one of the two alone
        statuses -= {NO_TESTS}
    return max(statuses), report(spent) if sys.platform == "linux" else True


def has_avx512(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor has AVX-512; True where the system does not say."""
    return not cpuinfo.exists() or "avx512f" in cpuinfo.read_text("utf-8").split()


def failed() -> list[str]:
    """The tests that failed when they were last run, by pytest's own record."""
    try:
        return list(json.loads((ROOT / ".pytest_cache/v/cache/lastfailed").read_text("utf-8")))
    except FileNotFoundError:
        return []


def everything() -> int:
    """Both tiers. Returns an exit status; the last lines, which a long output is cut to, name all that failed."""
    shutil.rmtree(ROOT / ".pytest_cache", ignore_errors=True)
    (status, within), spent = quick([]), Spent()
    found = dict.fromkeys(failed(), "in the quick tier") if status else {}
    kernels = ["-m", "not gpu and not stress", *KERNELS_AND_ENGINES]
    for title, arguments, environ in (
        ("in the deep tier", [*DEEP, "--hypothesis-profile=deep"], {}),
        *([("with AVX2 alone", kernels, AVX2)] if has_avx512() else []),
        ("without native kernels", kernels, {"PAGETIDE_NATIVE": "0"}),
    ):
        print(f"\ntests {title}", flush=True)
        ended = run(arguments, spent, environ)
        found = (dict.fromkeys(failed(), title) if ended else {}) | found
        status |= ended
    print(f"\nthe deep tier took {spent.wall_s:.0f} s, and {spent.cpu_s / pace():.0f} CPU seconds")
    if not within:
        print("the quick tier is above its budget, which .ci/tiers.py has")
    for test, title in found.items():
        print(f"FAILED {title}: {test}")
    return int(bool(status) or not within)


def main() -> int:
    _adopt()
    tier, *arguments = sys.argv[1:]
    return everything() if tier == "all" else quick(arguments)[0]


if __name__ == "__main__":
    sys.exit(main())
