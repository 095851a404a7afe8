"""The parts of a run and their report: each part is in a process of its own, so that one that fails or hangs loses only its own
figures. Figures with their targets are written as JSON with raw samples, and as a Markdown table.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from benchmarks.figures import Figure, machine, versions
from benchmarks.processes import Worker

NOT_YET = "not run on a device yet"


@dataclass(frozen=True)
class Bound:
    """A figure that must hold, and the part that measures it."""

    name: str
    target: float
    unit: str
    better: Literal["lower", "higher"]
    part: str


BOUNDS = {
    "rows": Bound("decode, many sequences: pagetide / generate_batch", 1.5, "x", "higher", "peer"),
    "rows_share": Bound("decode, many sequences: share of what the bandwidth allows", 0.7, "x", "higher", "decode"),
    "one_share": Bound("decode, one sequence: share of what the bandwidth allows", 0.75, "x", "higher", "decode"),
    "first_token": Bound("time to first token: pagetide / generate_batch", 1.0, "x", "lower", "peer"),
    "attention": Bound("paged decode attention alone, best kernel: share of the bandwidth", 0.8, "x", "higher", "attention"),
    "swap_out": Bound("swap out, the model's blocks: share of one large pinned copy", 0.85, "x", "higher", "swap"),
    "swap_in": Bound("swap in, the model's blocks: share of one large pinned copy", 0.85, "x", "higher", "swap"),
    "recall_free": Bound("recall of free blocks", 10.0, "ms", "lower", "recall"),
    "recall_live": Bound("recall of live blocks / their copy", 1.3, "x", "lower", "recall"),
    "resizing": Bound("p99 of steps while the pool is resized / without", 2.0, "x", "lower", "recall"),
    "failures": Bound("failures of the engine and of an external process beside it", 0.0, "count", "lower", "memory"),
    "held": Bound("share of what was free, less headroom, that the engine holds", 0.9, "x", "higher", "memory"),
    "wake_first": Bound("first token right after waking / awake", 1.3, "x", "lower", "sleep"),
    "faults": Bound("faults of engines beside a process that fills the device, under recalls", 0.0, "count", "lower", "stress"),
}


@dataclass(frozen=True)
class Unmeasured:
    """A figure that there is not, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Note:
    """Lines for people, such as the kernels that a step spends its time in."""

    title: str
    lines: tuple[str, ...]


Item = Figure | Unmeasured | Note


def bounded(key: str, value: float, samples: Sequence[float] = ()) -> Figure:
    """The figure of a bound."""
    bound = BOUNDS[key]
    return Figure(bound.name, value, bound.unit, bound.target, bound.better, list(samples))


def unmeasured(key: str, reason: str) -> Unmeasured:
    """The figure of a bound, which could not be measured."""
    return Unmeasured(BOUNDS[key].name, reason)


def device_of(name: str) -> dict[str, Any]:
    """The device in general words. Loads torch; CUDA is started."""
    import torch

    if name == "cpu":
        return {"device": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        driver = ""
    return {
        "device": properties.name, "memory_bytes": properties.total_memory, "driver": driver or None,
        "cuda": torch.version.cuda, "multiprocessors": properties.multi_processor_count,
    }  # fmt: skip


@dataclass
class PartResult:
    """What a part of a run gave. Its items grow while it runs."""

    name: str
    items: list[Item]
    device: dict[str, Any]
    seed: int
    took_s: float = 0.0
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """In the form of the other benchmarks' results."""
        return {
            "figures": [asdict(f) | {"meets": f.meets} for f in self.items if isinstance(f, Figure)],
            "unmeasured": [asdict(u) for u in self.items if isinstance(u, Unmeasured)],
            "notes": [asdict(n) for n in self.items if isinstance(n, Note)],
            "machine": machine() | self.device,
            "versions": versions(),
            "seed": self.seed,
            "took_s": round(self.took_s, 1),
            "error": self.error,
            "at": time.strftime("%Y-%m-%d"),
        }


def read(path: Path) -> dict[str, Any]:
    """The results of earlier runs, by part; nothing where there are none."""
    return json.loads(path.read_text()) if path.exists() else {}


def write(results: Mapping[str, Any], directory: Path) -> None:
    """`gpu.json` and `gpu.md`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in (("gpu.json", json.dumps(results, indent=1) + "\n"), ("gpu.md", markdown(results))):
        half = directory / f"{name}.new"
        half.write_text(text)
        half.replace(directory / name)  # atomic: an interrupted run leaves a whole file


def markdown(results: Mapping[str, Any]) -> str:
    """All bounds, measured or not, then what else was measured, part by part."""
    lines = ["# On a GPU", "", "Written by `make gpu`; what the figures mean stands in docs/gpu.md.", ""]
    lines += ["| figure | bound | measured | holds |", "|---|--:|--:|:-:|"]
    lines += [_bound_line(bound, results.get(bound.part)) for bound in BOUNDS.values()]
    for name, part in results.items():
        lines += ["", f"## {name}", "", _where(part), ""]
        held = {bound.name for bound in BOUNDS.values()}
        rows = [f"| {f['name']} | {_number(f)} |" for f in part["figures"] if f["name"] not in held]
        rows += [f"| {u['name']} | unmeasured: {_cell(u['reason'])} |" for u in part["unmeasured"] if u["name"] not in held]
        lines += ["| figure | measured |", "|---|--:|", *rows] if rows else []
        for note in part["notes"]:
            lines += ["", note["title"], "", "```", *note["lines"], "```"]
    return "\n".join(lines) + "\n"


def _bound_line(bound: Bound, part: Mapping[str, Any] | None) -> str:
    sign = "≤" if bound.better == "lower" else "≥"
    row = f"| {bound.name} | {sign} {bound.target:g} {bound.unit} "
    figure = next((f for f in part["figures"] if f["name"] == bound.name), None) if part else None
    if figure is not None:
        return row + f"| {_number(figure)} | {'yes' if figure['meets'] else 'no'} |"
    why = NOT_YET
    if part:
        why = next((u["reason"] for u in part["unmeasured"] if u["name"] == bound.name), None) or part["error"] or why
    return row + f"| unmeasured: {_cell(why)} | |"


def _where(part: Mapping[str, Any]) -> str:
    names = ", ".join(f"{name} {version}" for name, version in part["versions"].items())
    where = f"{part['machine'].get('device')}, {names}; seed {part['seed']}, {part['took_s']:g} s, {part['at']}."
    return where + (f" Ended early: {part['error']}" if part["error"] else "")


def _number(figure: Mapping[str, Any]) -> str:
    value = figure["value"]
    return f"{value:,.0f} {figure['unit']}" if abs(value) >= 1000 else f"{value:.4g} {figure['unit']}"


def _cell(text: str) -> str:
    """On one line, without what ends a cell."""
    return " ".join(text.replace("|", "/").split())[:300]


START_S = 60.0  # in which a process has loaded torch and says what the device is
GRACE_S = 5.0  # beyond a time box, before the process is ended


@dataclass(frozen=True)
class Spec:
    """A part: where it is, its time box on a GPU, and what has to be measured before it in the same run."""

    name: str
    module: str
    box_s: float
    needs: tuple[str, ...] = ()
    function: str = "measure"


SPECS = (  # by value: where the time is short, the last ones are left out
    Spec("bandwidth", "benchmarks.gpu.bandwidth", 25),
    Spec("decode", "benchmarks.gpu.decode", 75, ("bandwidth",)),
    Spec("attention", "benchmarks.gpu.attention", 80, ("bandwidth",)),
    Spec("peer", "benchmarks.gpu.peer", 100, ("bandwidth", "decode")),
    Spec("recall", "benchmarks.gpu.recall", 70, ("bandwidth",)),
    Spec("swap", "benchmarks.gpu.swap", 45, ("bandwidth",)),
    Spec("sleep", "benchmarks.gpu.sleeping", 75, ("bandwidth",)),
    Spec("memory", "benchmarks.gpu.memory", 75),
    Spec("quantized", "benchmarks.gpu.quantized", 40),
    Spec("stress", "benchmarks.gpu.stress", 75),
)
BY_NAME = {spec.name: spec for spec in SPECS}


def with_needs(names: Iterable[str]) -> list[Spec]:
    """The named parts and those that they need, in the order of `SPECS`. Raises KeyError for a name that is none."""
    wanted: set[str] = set()
    todo = list(names)
    while todo:
        spec = BY_NAME[todo.pop()]
        wanted.add(spec.name)
        todo += [name for name in spec.needs if name not in wanted]
    return [spec for spec in SPECS if spec.name in wanted]


def items_of(spec: Spec, bench: Any) -> Iterator[Item]:
    """What a part yields, here and now."""
    for item in getattr(importlib.import_module(spec.module), spec.function)(bench):
        if isinstance(item, Figure):
            bench.known[item.name] = item.value
        yield item


def serve(pipe: Connection, args: argparse.Namespace, folder: str) -> None:
    """The process: part after part in, items out, then None or what went wrong, and whether the device still works."""
    from .bench import REAL, TINY, Bench, DeviceClock

    bench = Bench(
        DeviceClock(args.device), TINY if args.tiny else REAL, folder, args.seed, args.seconds, args.attention,
        args.overlap, args.cuda_graphs,
    )  # fmt: skip
    try:
        pipe.send(device_of(args.device))
    except Exception as problem:
        pipe.send(f"{type(problem).__name__}: {problem}")
        return
    while True:
        try:
            spec, box_s, bench.known = pipe.recv()
        except EOFError:
            return
        bench.ends_at = time.monotonic() + box_s
        error = None
        try:
            for item in items_of(spec, bench):
                pipe.send(item)
        except Exception as problem:
            traceback.print_exc()
            error = f"{type(problem).__name__}: {problem}"
        pipe.send((error, error is None or _works(bench)))


def _works(bench: Any) -> bool:
    try:
        bench.clean()
        bench.clock.synchronize()
    except Exception:
        return False
    return True


class PartRunner:
    """Runs parts one after the other, in a process that is started anew when it broke. Use as a context manager.

    `folder` is for the model.
    """

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        self._args, self._folder = args, folder
        self._worker: Worker | None = None
        self.device: dict[str, Any] = {}

    def run(self, spec: Spec, box_s: float, known: dict[str, float]) -> Iterator[PartResult]:
        """The part as it grows: what there is after each item, and at its end. It raises nothing of its own."""
        part = PartResult(spec.name, [], self.device, self._args.seed)
        began = time.monotonic()
        try:
            worker = self._worker or self._start()
            part.device = self.device
            worker.send((spec, box_s, known))
            deadline = time.monotonic() + box_s + GRACE_S
            while True:
                if not worker.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"it took longer than its {box_s:.0f} s")
                message = worker.receive()
                part.took_s = time.monotonic() - began
                if isinstance(message, tuple):
                    part.error, works = message
                    if not works:
                        self.close()
                    break
                part.items.append(message)
                yield part
        except OSError as problem:
            self.close()
            what = "its process ended" if isinstance(problem, ChildProcessError) else str(problem)
            part.error, part.took_s = what, time.monotonic() - began
        yield part

    def _start(self) -> Worker:
        self._worker = Worker(serve, self._args, self._folder)
        if not self._worker.poll(START_S):
            raise TimeoutError(f"the measuring process was not ready after {START_S:g} s")
        answer = self._worker.receive()
        if isinstance(answer, str):
            raise OSError(f"the device {self._args.device} does not work here: {answer}")
        self.device = answer
        return self._worker

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def __enter__(self) -> PartRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
