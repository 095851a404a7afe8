"""Patterns of configurations and the names that they match, within bounds of time and memory.

Python's `re` takes exponential time for some patterns, and keeps all threads waiting meanwhile. Those that cannot are matched
here, and the others in a process of their own, which this file is as a script. It imports nothing of this package there.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path

_MOST_S = 5.0  # of processor time
_MOST_BYTES = 1 << 30  # of addresses
_MOST_CHARS = 1000
_REPEATS = re.compile(r"[*+{]")


def matches(patterns: Sequence[str], names: Sequence[str]) -> dict[str, set[str]]:
    """The names that begin with a match of each pattern. Raises re.error for an invalid pattern, ValueError for one that takes
    too long.
    """
    plain = [one for one in patterns if _is_quick(one)]
    found = {one: {name for name in names if re.match(one, name)} for one in plain}
    others = [one for one in dict.fromkeys(patterns) if one not in found]
    return found | _in_a_process(others, names) if others else found


def _is_quick(pattern: str) -> bool:
    """Whether matching takes at most quadratic time: nothing is repeated more than twice, and no group is."""
    return len(pattern) <= _MOST_CHARS and ")" not in pattern and len(_REPEATS.findall(pattern)) <= 2


def _in_a_process(patterns: Sequence[str], names: Sequence[str]) -> dict[str, set[str]]:
    from ...common.child_process import ChildProcess

    until, answer = time.monotonic() + 2 * _MOST_S, b""  # other processes may have the processor
    try:
        with ChildProcess((str(Path(__file__)),), captures=True) as child:
            child.socket.settimeout(2 * _MOST_S)
            child.socket.sendall(json.dumps([patterns, names]).encode())
            child.socket.shutdown(socket.SHUT_WR)
            while part := child.socket.recv(1 << 16):
                answer += part
                child.socket.settimeout(max(0.01, until - time.monotonic()))
    except OSError as error:  # a time-out, too
        raise ValueError(f"its patterns cannot be matched ({error or type(error).__name__}): {_quoted(patterns)}") from error
    if not answer:
        raise ValueError(f"its patterns take more than {_MOST_S:g} s or too much memory: {_quoted(patterns)}")
    found = json.loads(answer)
    if isinstance(found, str):
        raise re.error(found)
    return {one: {names[at] for at in places} for one, places in zip(patterns, found, strict=True)}


def _quoted(patterns: Sequence[str]) -> str:
    return f"{', '.join(patterns)!r:.200}"


def _serve() -> None:
    """Read patterns and names from the standard input, which is a socket, and answer with the places of names."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(_MOST_S), int(_MOST_S)))
    with socket.socket(fileno=0) as end, end.makefile("rwb") as stream:
        patterns, names = json.loads(stream.read())
        try:
            made = [re.compile(one) for one in patterns]
            found: object = [[at for at, name in enumerate(names) if one.match(name)] for one in made]
        except re.error as error:
            found = str(error)
        stream.write(json.dumps(found).encode())


if __name__ == "__main__":
    _serve()
