"""`pagetide doctor`: lists what this machine offers an engine, and the self-check results of its CUDA devices."""

from __future__ import annotations

import argparse
import json
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .engine.self_check.report import CheckReport

# The optional dependencies (extras of pyproject.toml) that an engine uses, each with the module that shows it is
# installed.
EXTRAS = {
    "cuda": ("cuda.bindings", "an elastic KV pool on CUDA, and pinned host memory for swaps"),
    "triton": ("triton", "attention on CUDA, and with it CUDA graphs"),
    "flash": ("flash_attn", "attention by flash-attn"),
    "flashinfer": ("flashinfer", "attention by FlashInfer"),
    "constrained": ("llguidance", "output by a JSON schema, a regular expression or a grammar"),
}
_DISTRIBUTIONS = ("torch", "transformers", "numpy", "nvidia-ml-py", "triton", "cuda-bindings", "llguidance")
_NAME_COLUMNS = 13


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand `doctor` to `commands`, the result of `ArgumentParser.add_subparsers`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor", help="what this machine has, and what of the engine works on its GPUs",
        description="Versions, devices, extras and the monitor, and what the self-check found that the first engine on a CUDA "
        "device makes. Status 1 where a part of the engine is switched off, or torch cannot be imported.",
    )  # fmt: skip
    parser.add_argument("--device", metavar="cuda:N", help="check this device alone (default: all)")
    parser.add_argument(
        "--run",
        dest="tries",
        action="store_true",
        help="try the parts that no earlier check has tried, as an engine does",
    )
    parser.add_argument("--refresh", action="store_true", help="try all parts, whatever is known of them")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=lambda args: main(args.device, args.tries, args.refresh, args.json))
    return parser


def main(
    device: str | None,
    tries: bool,
    refresh: bool,
    as_json: bool,
    *,
    devices: Callable[[], list[dict[str, Any]]] | None = None,
    check: Callable[..., CheckReport] | None = None,
) -> int:
    """Examine and print. Returns the exit status: 1 if something does not work. Raises ValueError.

    Args:
        devices: Returns the CUDA devices, in the form of `cuda_devices`.
        check: Replaces `self_check`.
    """
    from .engine.self_check.identity import cuda_devices

    report = machine()
    try:
        there = (devices or cuda_devices)()
    except (ImportError, OSError) as error:  # a library that torch needs is missing
        there, report["torch_error"] = [], f"{type(error).__name__}: {error}"
    from .engine.self_check.check import self_check

    check = check or self_check
    report["devices"] = [
        one | {"self_check": check(int(one["device"][5:]), again=refresh, tries=tries or refresh).to_dict()}
        for one in _chosen(device, there)
    ]
    print(json.dumps(report, indent=1) if as_json else "\n".join(describe(report)))
    off = any(one["self_check"]["state"] == "failed" for one in report["devices"])
    return int(off or report["torch_error"] is not None)


def machine() -> dict[str, Any]:
    """Everything but the CUDA devices, as plain data."""
    from .engine.self_check.cache import cache_dir
    from .engine.self_check.identity import driver_version, versions
    from .monitor.host_memory import host_memory
    from .monitor.runtime_dir import readable_dirs
    from .monitor.watching import find_live

    directories = readable_dirs()
    live = find_live(directories)
    memory = host_memory()
    monitor: dict[str, Any] = {"runtime_dir": str(directories[-1].path), "pid": None, "source": None}
    if live is not None:
        directory, reader = live
        monitor = {"runtime_dir": str(directory.path), "pid": reader.monitor_pid, "source": reader.source}
        reader.close()
    return {
        "pagetide": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": versions(_DISTRIBUTIONS),
        "driver": driver_version(),
        "torch_error": None,
        "host": {"total_bytes": memory.total_bytes, "free_bytes": memory.free_bytes},
        "extras": {name: {"installed": _is_there(module), "for": what} for name, (module, what) in EXTRAS.items()},
        "monitor": monitor,
        "self_checks": str(cache_dir()),
    }


def _chosen(device: str | None, there: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if device is None:
        return list(there)
    named = re.fullmatch(r"cuda(:\d+)?", device)
    chosen = [one for one in there if named and one["device"] == f"cuda{named[1] or ':0'}"]
    if not chosen:
        seen = ", ".join(one["device"] for one in there) or "no CUDA device"
        raise ValueError(f"--device {device}: only CUDA devices are checked, and torch sees {seen}")
    return chosen


def _is_there(module: str) -> bool:
    """Whether a module can be found. Imports at most its parent packages."""
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


# ---- as text ------------------------------------------------------------------------------------


def describe(report: dict[str, Any]) -> Iterator[str]:
    """The results of `machine` and the checks, as lines of text."""
    from .monitor.units import format_bytes

    yield f"pagetide {report['pagetide']}, Python {report['python']}, {report['system']}"
    there = [f"{name} {version}" for name, version in report["versions"].items() if version is not None]
    yield _row("versions", ", ".join(there))
    if report["torch_error"] is not None:
        yield _row("torch", f"cannot be imported: {report['torch_error']}")
    yield _row("driver", f"NVIDIA {report['driver']}" if report["driver"] else "no NVIDIA driver is seen")
    host = report["host"]
    yield _row("host", f"{format_bytes(host['total_bytes'])} of memory, {format_bytes(host['free_bytes'])} free")
    for one in report["devices"]:
        yield _row(one["device"], f"{one['name']}, capability {one['capability']}, {format_bytes(one['total_bytes'])}")
    if not report["devices"] and report["torch_error"] is None:
        hint = ", though there is a driver: is this a torch with CUDA?" if report["driver"] else ""
        yield _row("cuda", f"torch sees no CUDA device{hint}")
    for name, extra in report["extras"].items():
        yield _row(f"[{name}]", f"{'installed' if extra['installed'] else 'not installed'}: {extra['for']}")
    monitor = report["monitor"]
    runs = (
        f"process {monitor['pid']} watches {monitor['source']}" if monitor["pid"] else "none runs, an engine starts one"
    )
    yield _row("monitor", f"{runs}, in {monitor['runtime_dir']}")
    for one in report["devices"]:
        yield from _checked(one)


def _checked(device: dict[str, Any]) -> Iterator[str]:
    from .engine.self_check.report import FAILED, NOT_RUN, PARTS, without

    found = device["self_check"]
    yield ""
    if found["state"] == NOT_RUN:
        yield f"self-check of {device['device']}: not run yet; the first engine there does, or pagetide doctor --run"
        return
    yield f"self-check of {device['device']}: {found['state']}" + (
        f", kept in {found['file']}" if found["file"] else ""
    )
    for part in PARTS:
        outcome = found["parts"].get(part)
        if outcome is None:
            yield f"  {part:<{_NAME_COLUMNS}}  not tried yet"
            continue
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(outcome["at"]))
        yield f"  {part:<{_NAME_COLUMNS}}  {outcome['state']:<7}  {outcome['seconds']:6.2f} s  {when}" + (
            f"  {outcome['reason']}" if outcome["reason"] else ""
        )
        if outcome["state"] == FAILED:
            yield f"  {'':<{_NAME_COLUMNS}}  without it {without(part)}"


def _row(name: str, text: str) -> str:
    return f"{name:<{_NAME_COLUMNS}}  {text}"
