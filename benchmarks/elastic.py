"""The speed of growing and shrinking an engine's pool, compared with mapping and copying the same bytes alone.

    python -m benchmarks.elastic [--json FILE] [--rounds 7] [--only free,half,...] [--moved 1GiB] [--seed 0]

Three processes: this one, which orders and measures; `vram-monitor serve` with its broker on a test device of 6 GiB; and
an engine pinned to a core of its own (elastic_engine.py), with the demo model, extents of 32 MiB of host memory, and one
thread for arithmetic.

A recall is timed from the order, sent to the broker as `vram-monitor recall` sends it, until the engine's resident set, as
the kernel tells it to another process, is 1 GiB smaller; it is looked at every 0.1 ms. But for 16 MiB, since other memory
of the process comes and goes too; after compaction but for 64 MiB, since torch's staging of copies stays in the heap.

Real: broker, lease, keeper thread, preemption, compaction, mapping and unmapping. In `free`, `half` and `live` no steps
run; in `free-decode` the demo model decodes 8 sequences. In the other two under decode, and to fill pools, a stand-in for
the model always samples the same token and takes 5 ms a step, since the CPU cannot decode 1 GiB of context that fast. The
pool does not grow by itself while a recall is measured: before the recall it has its maximum size, and after a recall the
broker grants nothing for two seconds.

    free   1 GiB of extents without a live block       bare: unmapping 1 GiB
    cached 1 GiB full of blocks that only the prefix cache holds   bare: unmapping 1 GiB
    half   2 GiB of extents, every other row ended     bare: copying 0.5 GiB block by block, and unmapping 1 GiB
    live   1 GiB full of running rows                  bare: unmapping 1 GiB

The bare cost is measured in the engine's process, on an arena of its own, just before each recall. A ratio is that of the
medians over the rounds. `cached`, `half` and `idle` have engines of their own; only in `cached` something is cached. With
`--moved` recalls, growth and pools are of another size; what 1 GiB is above is that size then.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks import elastic_engine
from benchmarks.arguments import size, whole
from benchmarks.figures import Figure, report
from benchmarks.processes import Worker
from pagetide.allocator import wire
from pagetide.allocator.broker_client import Channel
from pagetide.allocator.lease_policy import Rules
from pagetide.monitor.units import GIB, MIB
from pagetide.pressure import PrivateDevice

CAPACITY_BYTES = 6 * GIB  # of the test device
STEP_S = 0.005  # of the stand-in for the model
WARM_S = 0.3
LOOK_S = 0.0001
DEADLINE_S = 10.0
IDLE_S = 0.3
ROUNDS = 7
SPEED_ROUNDS = 11  # of the comparison of speeds, unless --rounds says something else
SPEED_BYTES = 256 * MIB  # of the pools compared
KINDS = {
    "free": "free blocks", "cached": "cached blocks", "half": "half-live blocks (compaction)",
    "live": "live blocks (preempted)",
}  # fmt: skip
BUT_FOR_BYTES = {"free": 16 * MIB, "cached": 16 * MIB, "half": 64 * MIB, "live": 16 * MIB}  # at most half of a recall
TARGETS = {"free": 1.3, "cached": 1.3, "half": 2.0, "live": None}
PARTS = (*KINDS, *(f"{kind}-decode" for kind in KINDS), "growth", "speed", "idle")
POOLS = ("fixed", "elastic")
Samples = list[float]


class EngineProcess:
    """An engine's process. `call` runs a method of its `Rig`."""

    def __init__(self, worker: Worker, socket: Path, moved_bytes: int) -> None:
        self._worker = worker
        self._socket = socket
        self._memory = psutil.Process(worker.pid)
        self.first = worker.receive()
        self.extent_bytes: int = self.first["extent_bytes"]
        self.moved_extents = moved_bytes // self.extent_bytes

    def call(self, method: str, *given: Any) -> Any:
        self._worker.send((method, given))
        answer = self._worker.receive()
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def amount(self) -> str:
        """What is recalled at a time."""
        num_bytes = self.moved_extents * self.extent_bytes
        return f"{num_bytes / GIB:g} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:g} MiB"

    @property
    def resident_bytes(self) -> int:
        return int(self._memory.memory_info().rss)

    def recall(self, but_for_bytes: int) -> tuple[float, float]:
        """(when it was ordered, seconds until the memory was back, but for so much). Raises TimeoutError."""
        num_bytes = self.moved_extents * self.extent_bytes
        target = self.resident_bytes - num_bytes + min(but_for_bytes, num_bytes // 2)
        channel = Channel(self._socket)
        time.sleep(0.02)  # the broker has greeted
        try:
            began = time.perf_counter()
            channel.send(wire.RecallBytesMessage(self.first["name"], num_bytes))
            while (resident := self.resident_bytes) > target:
                if time.perf_counter() - began > DEADLINE_S:
                    raise TimeoutError(
                        f"{resident - target:,} bytes were not back after {DEADLINE_S:g} s; the engine: {self.call('state')}"
                    )
                time.sleep(LOOK_S)
            took = time.perf_counter() - began
            channel.wait(time.monotonic() + DEADLINE_S, wire.RecallingMessage)
            return began, took
        finally:
            channel.close()


@contextmanager
def engine(device: PrivateDevice, moved_bytes: int, max_bytes: int, **arguments: Any) -> Iterator[EngineProcess]:
    """Start a process with an engine; its pool holds at most `max_bytes`."""
    arguments = {"max_bytes": max_bytes, "min_bytes": moved_bytes // 16, **arguments}
    with Worker(elastic_engine.serve, arguments, core=0) as worker:
        yield EngineProcess(worker, device.socket, moved_bytes)


def bare_seconds(rig: EngineProcess, kind: str) -> float:
    """The bare cost of what a recall of this kind does."""
    copied = rig.moved_extents * rig.first["blocks_per_extent"] // 2 if kind == "half" else 0
    cost = rig.call("bare", rig.moved_extents, copied)
    return float(cost["copy"] + cost["unmap"])


def shape(rig: EngineProcess, kind: str) -> None:
    """The pool at its largest: 5/4 of what is recalled of it, or 9/4 where half of each extent stays live."""
    rig.call("forget")
    if kind == "free":
        rig.call("resize_to", rig.first["most_extents"])
    else:
        rig.call("fill", 2 if kind == "half" else 1)
    if kind == "cached":
        rig.call("clear")


def idle_recalls(rig: EngineProcess, kind: str, rounds: int) -> tuple[Samples, Samples]:
    """Measure recalls while no steps run. Returns (seconds of each recall, seconds of its bare cost)."""
    took, bare = [], []
    for _ in range(rounds):
        shape(rig, kind)
        bare.append(bare_seconds(rig, kind))
        time.sleep(0.2)
        took.append(rig.recall(BUT_FOR_BYTES[kind])[1])
        rig.call("clear")
    return took, bare


def busy_recalls(rig: EngineProcess, kind: str, rounds: int) -> tuple[Samples, Samples, Samples, Samples]:
    """As `idle_recalls` under decode, and the seconds of the steps within a recall and of the others."""
    took, bare, within, outside = Samples(), Samples(), Samples(), Samples()
    for _ in range(rounds):
        shape(rig, kind)
        bare.append(bare_seconds(rig, kind))
        light = kind in ("free", "cached")
        rig.call("computing", light, STEP_S)
        rig.call("decode", 8 if light else 0, 32)
        time.sleep(WARM_S if light else 0.03)
        began, seconds = rig.recall(BUT_FOR_BYTES[kind])
        time.sleep(0.3)
        steps = rig.call("rest")
        rig.call("computing", False)
        rig.call("clear")
        took.append(seconds)
        for start, end in steps[1:]:
            (within if end > began and start < began + seconds else outside).append(end - start)
    return took, bare, within, outside


def growths(rig: EngineProcess, rounds: int) -> tuple[Samples, Samples]:
    """(seconds in which an idle engine takes 1 GiB that it is granted, bare seconds of mapping as much)."""
    rig.call("resize_to", rig.first["most_extents"])
    took, bare = [], []
    for _ in range(rounds):
        rig.call(
            "regrow", rig.moved_extents
        )  # what a virtual machine's host has lent to others meanwhile is slow, once
        bare.append(rig.call("bare", rig.moved_extents, 0)["map"])
        took.append(rig.call("regrow", rig.moved_extents))
    return took, bare


def idle_ratios(rig: EngineProcess, rounds: int) -> tuple[Samples, Samples]:
    """What an engine that grew by 1 GiB, and has nothing to do any more, holds against what it held before it did:
    (resident sets, extents of the pool against its minimum).
    """
    least = rig.first["min_extents"]
    residents, pools = [], []
    for i in range(rounds + 1):
        before = rig.resident_bytes
        rig.call("fill")
        rig.call("clear")
        deadline = time.monotonic() + DEADLINE_S
        while (extents := rig.call("state")["extents"]) > least:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{extents - least} idle extents were not given back within {DEADLINE_S:g} s")
            time.sleep(0.01)
        if i:  # the first time code is loaded
            residents.append(rig.resident_bytes / before)
            pools.append(extents / least)
    return residents, pools


def speeds(rounds: int, new_tokens: int) -> list[tuple[float, float]]:
    """Output tokens a second of (a fixed pool, an elastic one), in turns."""
    with Worker(elastic_engine.serve_comparison, rounds, SPEED_BYTES, new_tokens, core=0) as worker:
        pairs: list[tuple[float, float]] = worker.receive()
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


def recall_figures(rig: EngineProcess, kinds: list[str], parts: list[str], rounds: int) -> list[Figure]:
    figures = []
    for kind in kinds:
        what = KINDS[kind]
        if kind in parts:
            took, bare = idle_recalls(rig, kind, rounds)
            figures += [
                ratio(f"recall of {rig.amount} of {what}, idle / bare", took, bare, TARGETS[kind]),
                milliseconds("... recall", took), milliseconds("... bare", bare),
            ]  # fmt: skip
        if f"{kind}-decode" in parts:
            took, bare, within, outside = busy_recalls(rig, kind, rounds)
            quiet, busy = percentile(outside, 0.99), percentile(within, 0.99)
            figures += [
                ratio(f"recall of {rig.amount} of {what}, under decode / bare", took, bare, 3.0),
                milliseconds("... recall", took), milliseconds("... bare", bare),
                Figure("... p99 of the steps within a recall / of the others", busy / quiet, "x", 2.0),
                milliseconds("... steps within a recall, p99", within, busy),
                milliseconds("... steps otherwise, p99", sorted(outside)[:: max(1, len(outside) // 200)], quiet),
                milliseconds("... steps otherwise, median", [], statistics.median(outside)),
            ]  # fmt: skip
    return figures


def growth_figures(rig: EngineProcess, rounds: int) -> list[Figure]:
    took, bare = growths(rig, rounds)
    return [
        ratio(f"growth by {rig.amount}, idle / bare mapping", took, bare, 1.3),
        milliseconds("... growth", took), milliseconds("... bare", bare),
    ]  # fmt: skip


def idle_figures(rig: EngineProcess, rounds: int) -> list[Figure]:
    residents, pools = idle_ratios(rig, rounds)
    return [
        median(f"idle memory, resident / before it grew by {rig.amount}", residents, "x", 1.05),
        median("idle memory, pool / its minimum", pools, "x", 1.05),
    ]


def speed_figures(rounds: int, new_tokens: int) -> list[Figure]:
    pairs = speeds(rounds, new_tokens)
    fixed, elastic = (median(f"... {name}", [p[i] for p in pairs], "tokens/s") for i, name in enumerate(POOLS))
    relative = [elastic / fixed for fixed, elastic in pairs]
    return [
        median("tokens/s, elastic pool at rest / fixed pool", relative, "x", 0.98, "higher"),
        fixed, elastic,
    ]  # fmt: skip


def figures_of(
    device: PrivateDevice, parts: list[str], moved: int, rounds: int | None, new_tokens: int
) -> list[Figure]:
    """The figures of these parts; an engine serves those that want the same pool."""
    each = rounds or ROUNDS
    figures: list[Figure] = []

    def kinds_in(*kinds: str) -> list[str]:
        return [kind for kind in kinds if kind in parts or f"{kind}-decode" in parts]

    if kinds := kinds_in("cached"):
        with engine(device, moved, moved * 5 // 4, caching=True) as rig:
            figures += recall_figures(rig, kinds, parts, each)
    if (kinds := kinds_in("free", "live")) or "growth" in parts:
        with engine(device, moved, moved * 5 // 4) as rig:
            figures += recall_figures(rig, kinds, parts, each)
            figures += growth_figures(rig, each) if "growth" in parts else []
    if kinds := kinds_in("half"):
        with engine(device, moved, moved * 9 // 4) as rig:
            figures += recall_figures(rig, kinds, parts, each)
    if "idle" in parts:
        with engine(device, moved, moved * 17 // 16, idle_s=IDLE_S) as rig:
            figures += idle_figures(rig, each)
    if "speed" in parts:
        figures += speed_figures(rounds or SPEED_ROUNDS, new_tokens)
    return figures


def parts_of(text: str) -> list[str]:
    """Names of parts, with commas between them."""
    parts = text.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return parts


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument(
        "--rounds", type=whole, help=f"default: {ROUNDS}, and {SPEED_ROUNDS} of the comparison of speeds"
    )
    parser.add_argument("--only", type=parts_of, default=",".join(PARTS), metavar="PARTS", help="some of %(default)s")
    parser.add_argument(
        "--moved", type=size, default=GIB, metavar="SIZE", help="what is recalled at a time (default 1GiB)"
    )
    parser.add_argument(
        "--new-tokens",
        type=whole,
        default=128,
        help="of each sequence in the comparison of speeds (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    with PrivateDevice(CAPACITY_BYTES, Rules.of(CAPACITY_BYTES).headroom_bytes) as device, device.here():
        figures = figures_of(device, args.only, args.moved, args.rounds, args.new_tokens)
    report("elastic: recalls, growth, and what breathing costs", figures, args.seed, args.json)


if __name__ == "__main__":
    main()
