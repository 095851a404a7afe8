"""The output format of all benchmarks: figures with targets, the machine, versions and the seed."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

PACKAGES = (
    "pagetide", "torch", "transformers", "triton", "cuda-bindings", "numpy", "flash-attn", "flash-attn-4", "flashinfer-python"
)  # fmt: skip

FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")  # that native kernels differ by


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


def median(
    name: str, samples: Sequence[float], unit: str, target: float | None = None, better: Literal["lower", "higher"] = "lower"
) -> Figure:
    """The median of samples, which are kept."""
    return Figure(name, statistics.median(samples), unit, target, better, [round(sample, 4) for sample in samples])


def median_time(name: str, seconds: Sequence[float], unit: str, target: float | None = None) -> Figure:
    """The median of `seconds`, in `unit`: "us" or "ms"."""
    return median(name, [s * {"us": 1e6, "ms": 1e3}[unit] for s in seconds], unit, target)


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that is not below `share` of them."""
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]


def machine() -> dict[str, Any]:
    """What the figures were measured on, in general words."""
    info = Path("/proc/cpuinfo")
    fields = dict(re.findall(r"^(model name|flags)\s*: (.*)$", info.read_text() if info.exists() else "", re.MULTILINE))
    flags = fields.get("flags", "").split()
    return {
        "cpu": fields.get("model name") or platform.processor(),
        "features": [feature for feature in FEATURES if feature in flags],
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Versions of the packages that matter, of those that are there."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def report(title: str, figures: list[Figure], seed: int, json_file: str | None) -> None:
    """Print a table; write JSON to `json_file`, if given."""
    on = machine()
    print(f"\n{title}\n  on {', '.join([on['cpu'], str(on['cores']) + ' cores', *on['features']])}")
    width = max(len(f.name) for f in figures)
    for f in figures:
        sign = "<=" if f.better == "lower" else ">="
        target = "" if f.target is None else f"{sign} {f.target:g} {f.unit}   {'meets' if f.meets else 'MISSES'}"
        print(f"  {f.name:<{width}}  {f.value:>12,.2f} {f.unit:<9} {target}".rstrip())
    if json_file:
        content = {
            "figures": [asdict(f) | {"meets": f.meets} for f in figures],
            "machine": on,
            "versions": versions(),
            "seed": seed,
        }
        path = Path(json_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"written to {path}", file=sys.stderr)
