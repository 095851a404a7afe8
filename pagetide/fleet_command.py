"""`pagetide fleet`: start, look at, change and end a fleet of engines."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .serve import check_engines, check_libraries

EXAMPLE = """\
fleet.yaml:
  model: demo
  workers: 4
  front_ends: 1
  port: 8000
  engine:
    kv_memory: 64MiB
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand `fleet` to `commands`."""
    from .common.settings import add_flags, settings_of
    from .fleet.config import FleetConfig

    parser: argparse.ArgumentParser = commands.add_parser(
        "fleet",
        help="run several engines behind one queue",
        description="Run a fleet on Ray: workers with one engine each, a queue that keeps every accepted request, and HTTP "
        "front ends.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    start = actions.add_parser("start", help="start a fleet, on this machine or on a running Ray cluster")
    start.add_argument(
        "--config", type=Path, metavar="FILE", required=True, help="settings in YAML (see docs/fleet.md); flags override them"
    )
    start_flags = {name: settings_of(FleetConfig)[name] for name in ("workers", "port")}
    add_flags(start, start_flags)
    start.set_defaults(run=_start)
    status = _action(actions, "status", "show the queue and the workers", _status)
    status.add_argument("--json", action="store_true", help="print JSON")
    drain = _action(actions, "drain", "move a worker's requests to others, then stop it", _drain)
    drain.add_argument("worker", metavar="WORKER", help="name of the worker, as `status` shows it")
    add = _action(actions, "add", "start more workers", _add)
    add.add_argument("count", type=int, nargs="?", default=1, metavar="N", help="number of workers to add (default 1)")
    cancel = _action(actions, "cancel", "cancel the unfinished requests that match all given filters", _cancel)
    cancel.add_argument("response", metavar="ID", nargs="?", help="id of the response, e.g. cmpl-5f...")
    cancel.add_argument("--key", metavar="NAME", help='name of the API key; "" for requests without one')
    cancel.add_argument("--older-than", type=float, metavar="SECONDS", help="accepted at least this long ago")
    stop = _action(actions, "stop", "stop a fleet", _stop)
    stop.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="SECONDS", help="how long running requests may finish (default 30)"
    )
    return parser


def _action(actions: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text)
    add_address(parser)
    parser.set_defaults(run=run)
    return parser


def add_address(parser: argparse._ActionsContainer) -> None:
    """Add the options that name a running fleet."""
    parser.add_argument("--address", default="local", metavar="ADDRESS", help="address of the Ray cluster (default: local)")
    parser.add_argument("--name", default="fleet", metavar="NAME", help="name of the fleet (default fleet)")


def fleet_errors() -> tuple[type[Exception], ...]:
    """The errors of a fleet that a command reports in one line."""
    check_libraries("pagetide fleet")
    from .fleet.config import FleetConfigInvalid
    from .fleet.errors import FleetError
    from .fleet.links import QueueUnavailable
    from .fleet.messages import StaleEpoch

    return FleetConfigInvalid, FleetError, QueueUnavailable, StaleEpoch


def _reported(error: Exception) -> int:
    print(f"pagetide: {error}", file=sys.stderr)
    return 2


def _start(args: argparse.Namespace) -> int:
    errors: tuple[type[Exception], ...] = fleet_errors()
    from .fleet.actors import start_fleet
    from .fleet.config import DEFAULT_NAME, LOCAL, FleetConfig
    from .server.config import ModelOptions
    from .server.run import CannotServe

    errors += (CannotServe,)
    try:
        config = FleetConfig.read(args.config, {"workers": args.workers, "port": args.port})
        if config.address == LOCAL:  # elsewhere the model is on the workers' machines
            check_engines([ModelOptions(config.model, config.model, config.engine)])
        print(
            f"starting {config.workers} worker{'s' * (config.workers != 1)} of {config.model} ...", file=sys.stderr, flush=True
        )
        fleet = start_fleet(config)
    except errors as error:
        return _reported(error)
    for url in fleet.urls:
        print(f"serving {config.model} at {url}")
    named = "" if config.name == DEFAULT_NAME else f" --name {config.name}"
    named += "" if config.address == LOCAL else f" --address {config.address}"
    print(f"the journal is {config.journal}\n  pagetide fleet status{named}\n  pagetide fleet stop{named}", flush=True)
    return 0


def _call(args: argparse.Namespace, method: str, *arguments: Any) -> Any:
    """The result of a call to the queue."""
    from .fleet.cluster import RayLink, connect

    link = RayLink(connect(args.address, args.name))
    return asyncio.run(getattr(link, method)(*arguments))


def _status(args: argparse.Namespace) -> int:
    errors = fleet_errors()
    try:
        status: Mapping[str, Any] = _call(args, "status")
    except errors as error:
        return _reported(error)
    if args.json:
        shown = {name: value for name, value in status.items() if name not in ("stats", "fleet_metrics")}
        print(json.dumps(shown, indent=2))
    else:
        print(describe(status))
    return 0


def describe(status: Mapping[str, Any]) -> str:
    """The state of a fleet as text: the queue, and a row for each worker."""
    queue, journal = status["queue"], status["journal"]
    lines = [
        f"model      {status['model'] or 'no worker is ready yet'}",
        f"queue      {queue['waiting']:,} waiting, {queue['running']:,} running, {queue['ended']:,} ended "
        f"({queue['failed']:,} with an error), {queue['requeued']:,} moved from lost workers",
        f"journal    {journal['path']}" + (f": {journal['fault']}" if journal["fault"] else ""),
        "",
        f"{'worker':<12} {'state':<9} {'requests':>8} {'sequences':>9} {'blocks':>15} {'cached':>8}  device",
    ]
    ready = {worker["name"] for worker in status["workers"]}
    for worker in status["workers"]:
        blocks = worker["blocks"]
        used = f"{blocks['usable'] - blocks['free']:,}/{blocks['limit']:,}"
        lines.append(
            f"{worker['name']:<12} {worker['state']:<9} {worker['requests']:>8,} {worker['sequences']:>9,} {used:>15} "
            f"{worker['cached_blocks']:>8,}  {worker['device']}"
        )
    lines += [
        f"{name:<12} starting  {status['errors'].get(name, '')}".rstrip()
        for name in status.get("kept", ())
        if name not in ready
    ]
    if tenants := status.get("tenants"):
        lines += ["", f"{'key':<24} {'unfinished':>10} {'waiting':>8} {'oldest':>9}"]
        lines += [
            f"{name or '(none)':<24} {one['unfinished']:>10,} {one['waiting']:>8,} {one['oldest_s']:>7,.0f} s"
            for name, one in sorted(tenants.items(), key=lambda item: -item[1]["unfinished"])
        ]
    return "\n".join(lines)


def _cancel(args: argparse.Namespace) -> int:
    errors = fleet_errors()
    if args.response is None and args.key is None and args.older_than is None:
        return _reported(ValueError("cancel needs the ID of a response, --key NAME or --older-than SECONDS"))
    if not 0 <= (older_s := args.older_than or 0.0) < 1e9:
        return _reported(ValueError(f"--older-than must be from 0 to 1e9 seconds, got {older_s:g}"))
    try:
        count = _call(args, "cancel", args.response, args.key, older_s, "the request was cancelled by the fleet's operator")
    except errors as error:
        return _reported(error)
    if count is None:
        return _reported(ValueError(f"there is no request {args.response!r:.80}, or its result has expired"))
    print(f"{count:,} request{'s' * (count != 1)} cancelled")
    return 0


def _drain(args: argparse.Namespace) -> int:
    errors = fleet_errors()
    try:
        _call(args, "drain", args.worker)
    except errors as error:
        return _reported(error)
    print(f"draining {args.worker}: its requests move to other workers, then it stops")
    return 0


def _add(args: argparse.Namespace) -> int:
    errors = fleet_errors()
    if args.count < 1:
        return _reported(ValueError(f"cannot add {args.count} workers: N must be at least 1"))
    try:
        names = _call(args, "add", args.count)
    except errors as error:
        return _reported(error)
    print(f"starting {', '.join(names)}")
    return 0


def _stop(args: argparse.Namespace) -> int:
    errors = fleet_errors()
    from .fleet.actors import stop_fleet

    try:
        stop_fleet(args.name, args.address, args.drain_timeout)
    except errors as error:
        return _reported(error)
    print(f"fleet {args.name!r} stopped; unfinished requests stay in its journal")
    return 0
