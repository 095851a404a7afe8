"""The output format of all benchmarks: figures with targets, the machine, versions and the seed."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Figure:
    """One measured number. `target` None is a figure for the record."""

    name: str
    value: float
    unit: str
    target: float | None = None
    better: Literal["lower", "higher"] = "lower"
    samples: list[float] = field(default_factory=list)

    @property
    def meets(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.value <= self.target if self.better == "lower" else self.value >= self.target


def machine() -> dict[str, Any]:
    """What the figures were measured on, in general words."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = lines[0] if lines else model
    return {"cpu": model, "cores": os.cpu_count(), "system": platform.system(), "python": platform.python_version()}


def versions() -> dict[str, str]:
    """Versions of the packages that matter."""
    return {name: metadata.version(name) for name in ("pagetide", "torch", "transformers", "numpy")}


def report(title: str, figures: list[Figure], seed: int, json_file: str | None) -> None:
    """Print a table; write JSON to `json_file`, if given."""
    print(f"\n{title}")
    width = max(len(f.name) for f in figures)
    for f in figures:
        sign = "<=" if f.better == "lower" else ">="
        target = "" if f.target is None else f"{sign} {f.target:g} {f.unit}   {'meets' if f.meets else 'MISSES'}"
        print(f"  {f.name:<{width}}  {f.value:>12,.2f} {f.unit:<9} {target}".rstrip())
    if json_file:
        content = {
            "figures": [asdict(f) | {"meets": f.meets} for f in figures],
            "machine": machine(),
            "versions": versions(),
            "seed": seed,
        }
        path = Path(json_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"written to {path}", file=sys.stderr)
