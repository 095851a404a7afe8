"""`pagetide doctor`: what this machine offers an engine, the self-checks of its CUDA devices, and what is wrong."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .common.units import format_bytes
from .machine_report import Problem, machine, torch_report

if TYPE_CHECKING:
    from .engine.self_check.report import CheckReport

_NAME_COLUMNS = 13


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand `doctor` to `commands`, the result of `ArgumentParser.add_subparsers`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="check this machine and the engine on its GPUs",
        description="Show versions, devices, attention kernels, limits, models files, the monitor and its permissions, and "
        "the results of the self-check that the first engine on a CUDA device runs. Each problem comes with a remedy. Exit "
        "status 1 if a part that should work does not.",
    )
    parser.add_argument("--device", metavar="cuda:N", help="check only this device (default: all)")
    parser.add_argument(
        "--run", dest="tries", action="store_true", help="also run the self-check, for parts that were not tried before"
    )
    parser.add_argument("--refresh", action="store_true", help="run the self-check again for all parts")
    parser.add_argument("--json", action="store_true", help="print JSON")
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
    problems: list[Problem] = report["problems"]
    report["torch"] = torch_report(problems, report["driver"]["version"] is not None)
    there: list[dict[str, Any]] = []
    try:
        there = (devices or cuda_devices)() if report["torch"] is not None else []
    except (ImportError, OSError) as error:  # a library that torch needs is missing
        problems.append(Problem("torch", f"cannot be used: {type(error).__name__}: {error}", "install torch anew"))
    examine = check or _self_check
    report["devices"] = [
        one | {"self_check": examine(int(one["device"][5:]), again=refresh, tries=tries or refresh).to_dict()}
        for one in _chosen(device, there)
    ]
    fix = "the engine does not use it; after an update of the driver or a library: pagetide doctor --refresh"
    problems += [
        Problem(one["device"], "a part of the engine failed in the self-check and is switched off", fix)
        for one in report["devices"]
        if one["self_check"]["state"] == "failed"
    ]
    report["problems"] = [asdict(problem) for problem in sorted(problems, key=lambda problem: not problem.fails)]
    print(json.dumps(report, indent=1) if as_json else "\n".join(describe(report)))
    return int(any(problem.fails for problem in problems))


def _self_check(index: int, *, again: bool, tries: bool) -> CheckReport:
    from .engine.self_check.check import self_check  # imports torch

    return self_check(index, again=again, tries=tries)


def _chosen(device: str | None, there: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if device is None:
        return list(there)
    named = re.fullmatch(r"cuda(:\d+)?", device)
    chosen = [one for one in there if named and one["device"] == f"cuda{named[1] or ':0'}"]
    if not chosen:
        seen = ", ".join(one["device"] for one in there) or "no CUDA device"
        raise ValueError(f"--device {device}: only CUDA devices are checked, and torch sees {seen}")
    return chosen


# ---- as text ------------------------------------------------------------------------------------


def describe(report: dict[str, Any]) -> Iterator[str]:
    """The report as lines of text, with what is wrong at the end."""
    yield f"pagetide {report['pagetide']}, Python {report['python']}, {report['system']}"
    there = [f"{name} {version}" for name, version in report["versions"].items() if version is not None]
    yield _row("versions", ", ".join(there))
    yield from _devices(report)
    for name, extra in report["extras"].items():
        yield _row(f"[{name}]", f"{'installed' if extra['installed'] else 'not installed'}: {extra['for']}")
    yield from _host(report)
    yield from _monitor(report["monitor"])
    for file in report["models_files"]:
        names = "not readable" if file["error"] else ", ".join(file["names"]) or "no names"
        yield _row("models", f"{names}: {file['file']} ({file['role']})")
    for one in report["devices"]:
        yield from _checked(one)
    yield ""
    if not report["problems"]:
        yield "no problems"
    for problem in report["problems"]:
        yield f"{'problem' if problem['fails'] else 'note'}: {problem['part']}: {problem['what']}"
        yield f"  to do: {problem['fix']}"


def _devices(report: dict[str, Any]) -> Iterator[str]:
    driver, torch = report["driver"], report["torch"]
    nvml = "" if driver["nvml_devices"] is None else f"; NVML sees {driver['nvml_devices']} device(s)"
    yield _row("driver", f"NVIDIA {driver['version']}{nvml}" if driver["version"] else "no NVIDIA driver found")
    if torch is None:
        return
    yield _row("torch", f"built for {'CUDA ' + torch['cuda'] if torch['cuda'] else 'CPUs'}, threads: {torch['threads']}")
    for one in report["devices"]:
        yield _row(one["device"], f"{one['name']}, capability {one['capability']}, {format_bytes(one['total_bytes'])}")
    if not report["devices"]:
        yield _row("cuda", "torch sees no CUDA device")
    loads = [name for name, kernel in torch["attention"].items() if kernel["loads"]]
    missing = [name for name in torch["attention"] if name not in loads]
    others = f"; not installed: {', '.join(missing)}" if missing else ""
    yield _row("attention", f"{', '.join(loads)}{others}")
    yield from _quantized(torch["quantized"])


def _quantized(found: dict[str, Any]) -> Iterator[str]:
    formats, of_a_row = ", ".join(found["formats"]), found["product_ms"]
    if not of_a_row:
        yield _row("quantized", f"{formats}: read, and become the model's type; no native kernels multiply them as they are")
        return
    yield _row("quantized", f"{formats}: on the CPU multiplied as they are, by {found['instructions']}")
    times = ", ".join(f"{form} {ms:.2g} ms" for form, ms in of_a_row.items())
    yield _row("", f"one row times {found['size']} by {found['size']} weights, measured now: {times}")
    rates = ", ".join(f"{form} {rate / 1e9:.3g}" for form, rate in found["bytes_per_s"].items())
    yield _row("", f"GB/s of weights out of memory, which pagetide plan estimates by: {rates}")


def _host(report: dict[str, Any]) -> Iterator[str]:
    host, threads, limits = report["host"], report["threads"], report["limits"]
    limited = f", by the cgroup {host['limited_by_cgroup']}" if host["limited_by_cgroup"] else ""
    yield _row("host", f"{format_bytes(host['total_bytes'])} of memory{limited}; {format_bytes(host['free_bytes'])} free")
    quota = "" if threads["cgroup_cores"] is None else f", {threads['cgroup_cores']:g} of them by the cgroup's quota"
    variables = [f"{name}={value}" for name, value in threads["variables"].items()]
    yield _row("threads", f"{threads['cores']} cores{quota}; {', '.join(variables) or 'OMP_NUM_THREADS is not set'}")
    files, locked = limits["open_files"]["soft"], limits["locked_bytes"]["soft"]
    may_open = "any number" if files is None else f"{files:,}"
    may_lock = "any amount" if locked is None else format_bytes(locked)
    yield _row("limits", f"open files: {may_open}; locked memory: {may_lock}")


def _monitor(monitor: dict[str, Any]) -> Iterator[str]:
    if monitor["pid"] is None:
        yield _row("monitor", f"none runs, an engine starts one, in {monitor['runtime_dir']}")
    else:
        leases = "" if monitor["leases"] is None else f"; {monitor['leases']} lease(s), protocol {monitor['protocol']}"
        yield _row("monitor", f"process {monitor['pid']} watches {monitor['source']}, in {monitor['runtime_dir']}{leases}")
    for one in monitor["directories"]:
        if one["exists"]:
            yield _row("", f"{one['path']}: {one['mode']}, owner {one['owner']}, group {one['group']}")


def _checked(device: dict[str, Any]) -> Iterator[str]:
    from .engine.self_check.report import FAILED, NOT_RUN, PARTS, without

    found = device["self_check"]
    yield ""
    if found["state"] == NOT_RUN:
        yield f"self-check of {device['device']}: not run yet; the first engine there does, or pagetide doctor --run"
        return
    yield f"self-check of {device['device']}: {found['state']}" + (f", kept in {found['file']}" if found["file"] else "")
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
