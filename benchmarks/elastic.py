"""How fast an engine's memory goes back and comes, beside the bare cost of the same bytes, and what breathing costs.

    python -m benchmarks.elastic [--json FILE] [--rounds 7] [--only free,half,...] [--seed 0]

Three processes: this one, which orders and measures; `vram-monitor serve` with its broker on a test device of 6 GiB; and
an engine pinned to a core of its own (elastic_engine.py), with the demo model, extents of 32 MiB of host memory, and one
thread for arithmetic.

A recall is timed from the order, sent to the broker as `vram-monitor recall` sends it, until the engine's resident set, as
the kernel tells it to another process, is 1 GiB smaller; it is looked at every 0.1 ms. But for 16 MiB, since other memory
of the process comes and goes too; after compaction but for 64 MiB, since torch's staging of copies stays in the heap.

Real: broker, lease, keeper thread, preemption, compaction, mapping and unmapping. In `free`, `half` and `live` nobody
makes steps; in `free-decode` the demo model decodes 8 sequences. In the other two under decode, and to fill pools, a
stand-in for the model samples the same token always and takes 5 ms a step, since the CPU cannot decode 1 GiB of context
in any such time. While recalls are measured the pool does not grow by itself.

    free   1 GiB of extents without a live block       bare: unmapping 1 GiB
    cached 1 GiB full of blocks that only the prefix cache holds   bare: unmapping 1 GiB
    half   2 GiB of extents, every other row ended     bare: copying 0.5 GiB block by block, and unmapping 1 GiB
    live   1 GiB full of running rows                  bare: unmapping 1 GiB

The bare cost is measured in the engine's process, on an arena of its own, just before each recall. A ratio is that of the
medians over the rounds. `cached` has an engine of its own; in the others nothing is cached.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks import elastic_engine
from benchmarks.arguments import whole
from benchmarks.figures import Figure, report
from pagetide.allocator import wire
from pagetide.allocator.broker_client import Channel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from monitors import MonitorProcess, wait_until

GIB, MIB = 1 << 30, 1 << 20
MOVED_BYTES = GIB
STEP_S = 0.005  # of the stand-in for the model
WARM_S = 0.3
LOOK_S = 0.0001
DEADLINE_S = 10.0
IDLE_S = 0.3
KINDS = {
    "free": "free blocks", "cached": "cached blocks", "half": "half-live blocks (compaction)",
    "live": "live blocks (preempted)",
}  # fmt: skip
BUT_FOR_BYTES = {"free": 16 * MIB, "cached": 16 * MIB, "half": 64 * MIB, "live": 16 * MIB}
TARGETS = {"free": 1.3, "cached": 1.3, "half": 2.0, "live": None}
PARTS = (*KINDS, *(f"{kind}-decode" for kind in KINDS), "growth", "speed", "idle")
POOLS = ("fixed", "elastic")
Samples = list[float]


class Engine:
    """An engine's process. `call` runs a method of its `Rig`."""

    def __init__(self, directory: Path, arguments: dict[str, Any]) -> None:
        self._pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        cores = sorted(os.sched_getaffinity(0))
        core = cores[0] if len(cores) > 1 else None
        self.process = multiprocessing.get_context("spawn").Process(
            target=elastic_engine.serve, args=(theirs, core, arguments)
        )
        self.process.start()
        self._memory = psutil.Process(self.process.pid)
        self._socket = next(path for path in directory.iterdir() if path.is_socket())
        self.first = self._pipe.recv()
        self.extent_bytes: int = self.first["extent_bytes"]

    def call(self, method: str, *given: Any) -> Any:
        self._pipe.send((method, given))
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def resident_bytes(self) -> int:
        return int(self._memory.memory_info().rss)

    def recall(self, num_bytes: int, but_for_bytes: int) -> tuple[float, float]:
        """(when it was ordered, seconds until the memory was back, but for so much). Raises TimeoutError."""
        target = self.resident_bytes - num_bytes + but_for_bytes
        channel = Channel(self._socket)
        time.sleep(0.02)  # the broker has greeted
        try:
            began = time.perf_counter()
            channel.send(wire.RecallBytes(self.first["name"], num_bytes))
            while (resident := self.resident_bytes) > target:
                if time.perf_counter() - began > DEADLINE_S:
                    raise TimeoutError(
                        f"{resident - target:,} bytes were not back after {DEADLINE_S:g} s; the engine: {self.call('state')}"
                    )
                time.sleep(LOOK_S)
            took = time.perf_counter() - began
            channel.wait(time.monotonic() + DEADLINE_S, wire.Recalling)
            return began, took
        finally:
            channel.close()

    def close(self) -> None:
        self._pipe.send(None)
        self.process.join()


@contextmanager
def engine(directory: Path, **arguments: Any) -> Iterator[Engine]:
    running = Engine(directory, arguments)
    try:
        yield running
    finally:
        running.close()


def bare_seconds(rig: Engine, kind: str) -> float:
    """The bare cost of what a recall of this kind does."""
    extents = MOVED_BYTES // rig.extent_bytes
    copied = extents * rig.call("state")["blocks_per_extent"] // 2 if kind == "half" else 0
    cost = rig.call("bare", extents, copied)
    return float(cost["copy"] + cost["unmap"])


def shape(rig: Engine, kind: str) -> None:
    """A pool of which 1 GiB of `kind` can go: 1.25 GiB of it, or 2.25 GiB where half of each extent stays live."""
    extents = MOVED_BYTES // rig.extent_bytes * (2 if kind == "half" else 1) + 8
    rig.call("growing", False)
    rig.call("forget")
    rig.call("resize_to", extents)
    blocks = (extents - 1) * rig.call("state")["blocks_per_extent"]
    if kind != "free":
        rig.call("fill", blocks, 2 if kind == "half" else 1)
    if kind == "cached":
        rig.call("clear")


def idle_recalls(rig: Engine, kind: str, rounds: int) -> tuple[Samples, Samples]:
    """(seconds of each recall, bare seconds beside it); nobody makes steps."""
    took, bare = [], []
    for _ in range(rounds):
        shape(rig, kind)
        bare.append(bare_seconds(rig, kind))
        time.sleep(0.2)
        took.append(rig.recall(MOVED_BYTES, BUT_FOR_BYTES[kind])[1])
        rig.call("clear")
    return took, bare


def busy_recalls(rig: Engine, kind: str, rounds: int) -> tuple[Samples, Samples, Samples, Samples]:
    """As `idle_recalls` under decode, and the seconds of the steps within a recall and of the others."""
    took, bare, within, outside = Samples(), Samples(), Samples(), Samples()
    for _ in range(rounds):
        shape(rig, kind)
        bare.append(bare_seconds(rig, kind))
        light = kind in ("free", "cached")
        rig.call("computing", light, STEP_S)
        rig.call("decode", 8 if light else 0, 32)
        time.sleep(WARM_S if light else 0.03)
        began, seconds = rig.recall(MOVED_BYTES, BUT_FOR_BYTES[kind])
        time.sleep(0.3)
        steps = rig.call("rest")
        rig.call("computing", False)
        rig.call("clear")
        took.append(seconds)
        for start, end in steps[1:]:
            (within if end > began and start < began + seconds else outside).append(end - start)
    return took, bare, within, outside


def growths(rig: Engine, rounds: int) -> tuple[Samples, Samples]:
    """(seconds in which an idle engine takes 1 GiB that it is granted, bare seconds of mapping as much)."""
    extents = MOVED_BYTES // rig.extent_bytes
    rig.call("resize_to", extents + 8)
    took, bare = [], []
    for _ in range(rounds):
        rig.call("regrow", extents)  # memory that a virtual machine's host has lent to others meanwhile is slow, once
        bare.append(rig.call("bare", extents, 0)["map"])
        took.append(rig.call("regrow", extents))
    return took, bare


def idle_ratios(rig: Engine, rounds: int) -> tuple[Samples, Samples]:
    """What an engine that grew by 1 GiB, and has nothing to do any more, holds against what it held before it did:
    (resident sets, extents of the pool against its minimum).
    """
    least = rig.first["min_extents"]
    residents, pools = [], []
    for i in range(rounds + 1):
        rig.call("idle_after", elastic_engine.FOR_EVER)
        rig.call("resize_to", least)
        before = rig.resident_bytes
        rig.call("resize_to", least + MOVED_BYTES // rig.extent_bytes)
        rig.call("fill", MOVED_BYTES // rig.extent_bytes * rig.first["blocks_per_extent"], 1)
        rig.call("clear")
        rig.call("idle_after", IDLE_S)
        wait_until(lambda: rig.call("state")["extents"] <= least, "giving back when idle")
        if i:  # the first time code is loaded
            residents.append(rig.resident_bytes / before)
            pools.append(rig.call("state")["extents"] / least)
    return residents, pools


def speeds(rounds: int) -> list[tuple[float, float]]:
    """Output tokens a second of (a fixed pool, an elastic one), in turns."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    core = sorted(os.sched_getaffinity(0))[0] if len(os.sched_getaffinity(0)) > 1 else None
    process = spawn.Process(
        target=elastic_engine.serve_comparison, args=(theirs, core, {"rounds": rounds, "size": "256MiB"})
    )
    process.start()
    pairs: list[tuple[float, float]] = mine.recv()
    process.join()
    return pairs


def percentile(samples: Samples, share: float) -> float:
    """The sample below which `share` of them lie."""
    return sorted(samples)[min(len(samples) - 1, int(share * len(samples)))]


def milliseconds(name: str, samples: Samples, value: float | None = None) -> Figure:
    """For the record: the median, or `value`."""
    shown = statistics.median(samples) if value is None else value
    return Figure(name, 1e3 * shown, "ms", samples=[round(1e3 * s, 3) for s in samples])


def median(
    name: str, samples: Samples, unit: str, target: float | None = None, better: Literal["lower", "higher"] = "lower"
) -> Figure:
    """The median of `samples`."""
    return Figure(name, statistics.median(samples), unit, target, better, [round(s, 4) for s in samples])


def ratio(name: str, over: Samples, under: Samples, target: float | None) -> Figure:
    """The ratio of the medians, and those within rounds."""
    within = [round(a / b, 3) for a, b in zip(over, under, strict=True)]
    return Figure(name, statistics.median(over) / statistics.median(under), "x", target, samples=within)


def recall_figures(rig: Engine, kinds: list[str], parts: list[str], rounds: int) -> list[Figure]:
    figures = []
    for kind in kinds:
        what = KINDS[kind]
        if kind in parts:
            took, bare = idle_recalls(rig, kind, rounds)
            figures += [
                ratio(f"recall of 1 GiB of {what}, idle / bare", took, bare, TARGETS[kind]),
                milliseconds("... recall", took), milliseconds("... bare", bare),
            ]  # fmt: skip
        if f"{kind}-decode" in parts:
            took, bare, within, outside = busy_recalls(rig, kind, rounds)
            quiet, busy = percentile(outside, 0.99), percentile(within, 0.99)
            figures += [
                ratio(f"recall of 1 GiB of {what}, under decode / bare", took, bare, 3.0),
                milliseconds("... recall", took), milliseconds("... bare", bare),
                Figure("... p99 of the steps within a recall / of the others", busy / quiet, "x", 2.0),
                milliseconds("... steps within a recall, p99", within, busy),
                milliseconds("... steps otherwise, p99", sorted(outside)[:: max(1, len(outside) // 200)], quiet),
                milliseconds("... steps otherwise, median", [], statistics.median(outside)),
            ]  # fmt: skip
    return figures


def growth_figures(rig: Engine, rounds: int) -> list[Figure]:
    took, bare = growths(rig, rounds)
    return [
        ratio("growth by 1 GiB, idle / bare mapping", took, bare, 1.3),
        milliseconds("... growth", took), milliseconds("... bare", bare),
    ]  # fmt: skip


def idle_figures(rig: Engine, rounds: int) -> list[Figure]:
    residents, pools = idle_ratios(rig, rounds)
    return [
        median("idle memory, resident / before it grew by 1 GiB", residents, "x", 1.05),
        median("idle memory, pool / its minimum", pools, "x", 1.05),
    ]


def speed_figures(rounds: int) -> list[Figure]:
    pairs = speeds(rounds)
    fixed, elastic = (median(f"... {name}", [p[i] for p in pairs], "tokens/s") for i, name in enumerate(POOLS))
    relative = [elastic / fixed for fixed, elastic in pairs]
    return [
        median("tokens/s, elastic pool at rest / fixed pool", relative, "x", 0.98, "higher"),
        fixed, elastic,
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rounds", type=whole, default=7)
    parser.add_argument("--only", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    parts, rounds = args.only.split(","), args.rounds
    os.environ["OMP_NUM_THREADS"] = "1"
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "run"
        os.environ["PAGETIDE_RUNTIME_DIR"] = str(directory)
        with MonitorProcess(directory, "--capacity", "6GiB"):
            if set(parts) & {"cached", "cached-decode"}:
                with engine(directory, max_kv="2560MiB", caching=True) as rig:
                    figures += recall_figures(rig, ["cached"], parts, rounds)
            if set(parts) - {"speed", "cached", "cached-decode"}:
                with engine(directory, max_kv="2560MiB") as rig:
                    figures += recall_figures(rig, [kind for kind in KINDS if kind != "cached"], parts, rounds)
                    figures += growth_figures(rig, rounds) if "growth" in parts else []
                    figures += idle_figures(rig, rounds) if "idle" in parts else []
            if "speed" in parts:
                figures += speed_figures(max(rounds, 11))
    report("elastic: recalls, growth, and what breathing costs", figures, args.seed, args.json)


if __name__ == "__main__":
    main()
