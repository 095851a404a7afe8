"""The report of a run: figures with their targets, as JSON with raw samples and as a Markdown table."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from benchmarks.figures import Figure, machine

NOT_YET = "not run on a device yet"
PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "cuda-bindings",
    "numpy",
    "flash-attn",
    "flash-attn-4",
    "flashinfer-python",
)


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
    "breathing": Bound("p99 of steps while the pool breathes / without", 2.0, "x", "lower", "recall"),
    "failures": Bound("failures of the engine and of an external process beside it", 0.0, "count", "lower", "memory"),
    "held": Bound("share of what was free, less headroom, that the engine holds", 0.9, "x", "higher", "memory"),
}  # fmt: skip


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


def versions() -> dict[str, str]:
    """Of the packages that matter; those that are there."""
    import pagetide

    found = {"pagetide": pagetide.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


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
    lines = [
        "# On a GPU",
        "",
        "Written by `make gpu`; what the figures mean stands in [docs/gpu.md](../../docs/gpu.md).",
        "",
    ]
    lines += ["| figure | bound | measured | holds |", "|---|--:|--:|:-:|"]
    lines += [_bound_line(bound, results.get(bound.part)) for bound in BOUNDS.values()]
    for name, part in results.items():
        lines += ["", f"## {name}", "", _where(part), ""]
        held = {bound.name for bound in BOUNDS.values()}
        rows = [f"| {f['name']} | {_number(f)} |" for f in part["figures"] if f["name"] not in held]
        rows += [
            f"| {u['name']} | unmeasured: {_cell(u['reason'])} |" for u in part["unmeasured"] if u["name"] not in held
        ]
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
