"""The identity for which a self-check result is valid: the device, its driver, and the versions of everything that runs on it.

Imports torch only to query a device.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ...version import __version__

# Distributions with code that runs on the device or calls its driver.
DISTRIBUTIONS = ("torch", "triton", "cuda-bindings", "flash-attn", "flash-attn-3")
_DRIVER = Path("/proc/driver/nvidia/version")
_ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("allocator", "cache", "engine")  # the folders of the checked code


def cuda_devices() -> list[dict[str, Any]]:
    """The CUDA devices that torch sees: names, capabilities, sizes. Raises ImportError or OSError if torch is broken."""
    import torch

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        has = torch.cuda.get_device_properties(index)
        capability = f"{has.major}.{has.minor}"
        found.append({"device": f"cuda:{index}", "name": has.name, "capability": capability, "total_bytes": has.total_memory})
    return found


def torch_build() -> dict[str, Any]:
    """Torch's CUDA version (None: a build for CPUs), and its number of threads. Raises as `cuda_devices` does."""
    import torch

    return {"cuda": torch.version.cuda, "threads": torch.get_num_threads(), "sees_cuda": torch.cuda.is_available()}


def identity_of(index: int) -> dict[str, Any]:
    """The identity of CUDA device `index`, as torch counts. Plain data; takes no device memory."""
    import torch

    has = torch.cuda.get_device_properties(index)
    return {
        "device": str(getattr(has, "uuid", f"{has.name} {index}")),
        "name": has.name,
        "capability": f"{has.major}.{has.minor}",
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "versions": versions(DISTRIBUTIONS),
        "python": platform.python_version(),
        "pagetide": __version__,
        "sources": _digest(),
    }


def driver_version(file: Path = _DRIVER) -> str | None:
    """The version of NVIDIA's driver according to the kernel; None if unavailable (under WSL, for example)."""
    try:
        found = re.search(r"\b\d+(\.\d+)+\b", file.read_text())
    except OSError:
        return None
    return found.group() if found else None


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """The installed version of each distribution; None if it is missing. Imports none of them."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


@cache
def _digest() -> str:
    """A digest of the checked code, so that changed code is checked again."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
