"""`pagetide stress` on the device: two engines under pressure beside a process that fills the card, every token compared."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.figures import Figure

from .bench import Bench
from .parts import Item, Note, bounded, unmeasured

LEAST_S, SECONDS = 5.0, 20.0  # of pressure
REST_S = 40.0  # to start the engines, and to serve the same requests undisturbed


def measure(bench: Bench) -> Iterator[Item]:
    """The faults that it found, and its worst times. Raises ChildProcessError if it has no report."""
    if bench.left_s < LEAST_S + REST_S:
        yield unmeasured("faults", f"{bench.left_s:.0f} s were left; it takes at least {LEAST_S + REST_S:.0f} s")
        return
    seconds = max(LEAST_S, min(SECONDS, bench.memory_s, bench.left_s - REST_S))
    command = [sys.executable, "-P", "-m", "pagetide", "stress", "--seconds", f"{seconds:.0f}", "--seed", str(bench.seed)]
    command += ["--device", str(bench.clock.device)]
    timeout_s = bench.left_s if math.isfinite(bench.left_s) else None
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=timeout_s, check=False)
    if not done.stdout:
        raise ChildProcessError(f"pagetide stress ended with status {done.returncode}: {done.stderr.strip()[-1000:]}")
    report = json.loads(done.stdout)
    yield bounded("faults", float(len(report["faults"])))
    waits = {
        "... recalls, the longest": report["recall_s"],
        "... the external process waited for a piece, at most": [report["worst_wait_s"]],
        "... between two tokens of a request, at most": [report["longest_gap_s"]],
    }
    for name, found_s in waits.items():
        if found_s:
            yield Figure(name, 1000 * max(found_s), "ms", samples=[1000 * one for one in found_s])
    counts = ("requests", "tokens", "preemptions", "pieces", "ties")
    told = ", ".join(f"{report[name]:,} {name}" for name in counts) + f", {len(report['recall_s'])} recalls"
    machine = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    yield Note("stress", (f"{report['seconds']:g} s: {told}", machine, *report["faults"]))
