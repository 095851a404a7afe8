"""The broker's Unix socket: replaces the socket of a killed broker, and supports paths of any length."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from ..common.on_error import OnError

_LONGEST_ADDRESS = 107  # size of sun_path without the final zero (unix(7))
_BACKLOG = 512


def listen(path: Path, *, gid: int | None = None) -> socket.socket:
    """Create a listening socket at `path`, for its owner alone, or for the group `gid` too.

    The socket gets its final name only after its permissions are set, and replaces the name that a dead broker left.
    The caller holds the directory's lock, so that no two brokers do this at once. Raises OSError.
    """
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.unlink(missing_ok=True)  # left by a broker killed at this point
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with OnError(sock.close, lambda: unfinished.unlink(missing_ok=True)):
        sock.setblocking(False)
        with _address(unfinished) as address:
            sock.bind(address)  # refuses connections until listen()
        if gid is not None:
            os.chown(unfinished, -1, gid)
        unfinished.chmod(0o600 if gid is None else 0o660)
        sock.listen(_BACKLOG)
        unfinished.replace(path)
    return sock


def connect(path: Path) -> socket.socket:
    """A connected, non-blocking socket. Raises OSError (no listener, not permitted), BlockingIOError (backlog full)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with OnError(sock.close):
        sock.setblocking(False)
        with _address(path) as address:
            sock.connect(address)  # Unix sockets connect at once or fail
    return sock


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """`path` as an address; a long path goes through its directory's descriptor."""
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
