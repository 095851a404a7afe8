"""`pagetide ps`, `load`, `sleep`, `wake`, `stop`: the models of a running server."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

_WAIT_S = 600.0  # for a model to be loaded
_TEXTS = {
    "load": "load a model of a running server",
    "sleep": "free the memory of a model; its process stays",
    "wake": "wake a model up",
    "stop": "end the process of a model; a request loads it again",
}
_PATHS = {"load": "/wake_up", "sleep": "/sleep", "wake": "/wake_up", "stop": "/unload"}


def add_parsers(commands: Any) -> list[argparse.ArgumentParser]:
    """Add the subcommands to `commands`."""
    ps = commands.add_parser("ps", help="list the loaded models of a running server", description="List the loaded models.")
    ps.add_argument("--json", action="store_true", help="print JSON")
    ps.set_defaults(run=_ps)
    parsers = [ps]
    for name, text in _TEXTS.items():
        one = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}. Needs an admin key.")
        one.add_argument("name", metavar="MODEL", help="name of the model in requests")
        if name == "sleep":
            one.add_argument("--level", type=int, choices=(1, 2), default=1, help="as vLLM's (default 1)")
        one.set_defaults(run=_change, action=name)
        parsers.append(one)
    for one in parsers:
        one.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (default %(default)s)")
    return parsers


def _ask(url: str, path: str, post: bool) -> Any:
    """The server's answer as JSON, None without one; with the key in PAGETIDE_ADMIN_KEY or PAGETIDE_API_KEY.

    Raises ValueError with the server's words.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--url must begin with http:// or https://, got {url!r:.80}")
    named = os.environ.get("PAGETIDE_ADMIN_KEY") or os.environ.get("PAGETIDE_API_KEY", "").partition(",")[0]
    headers = {"Authorization": f"Bearer {named.strip()}"} if named else {}
    request = Request(url.rstrip("/") + path, method="POST" if post else "GET", headers=headers)
    try:
        with urlopen(request, timeout=_WAIT_S) as answer:
            body = answer.read()
    except HTTPError as error:
        try:
            message = json.loads(error.read())["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"status {error.code}"
        raise ValueError(f"{url}: {message}") from error
    except URLError as error:
        raise ValueError(f"{url} does not answer: {error.reason}; name the server by --url") from error
    return json.loads(body) if body else None


def _change(args: argparse.Namespace) -> int:
    query = {"model": args.name} | ({"level": args.level} if args.action == "sleep" else {})
    _ask(args.url, f"{_PATHS[args.action]}?{urlencode(query)}", True)
    return 0


def _ps(args: argparse.Namespace) -> int:
    found = _ask(args.url, "/running", False)["running"]
    if args.json:
        print(json.dumps(found))
        return 0
    rows = [("MODEL", "STATE", "WEIGHTS", "REQUESTS", "WAITING", "UNLOADED IN"), *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    from .common.units import format_bytes, format_seconds

    state = f"{one['state']} (level {one['sleep_level']})" if one["sleep_level"] else one["state"]
    left = "never" if one["expires_in_s"] is None else format_seconds(one["expires_in_s"])
    return one["model"], state, format_bytes(one["weights_bytes"]), str(one["running"]), str(one["waiting"]), left
