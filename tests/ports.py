"""Ports that no other program is given between their choice and their use."""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import suppress

# Below those that the system gives to programs which ask for any, and above those of Ray's workers.
FIRST, END = 20_000, 32_000
_tried = itertools.count(os.getpid() * 100, 10)  # each process begins elsewhere


def free_ports(count: int = 1) -> int:
    """The first of `count` successive free ports, at most ten; not those of an earlier call."""
    for port in (FIRST + number % (END - FIRST) for number in _tried):
        with suppress(OSError):
            for one in range(port, port + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", one))
            return port
    raise AssertionError
