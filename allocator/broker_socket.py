"""The broker's address: a Unix socket in a directory, taken over from a broker that was killed, of any length of path."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_LONGEST_ADDRESS = 107  # bytes of sun_path, less the final zero (unix(7))
_BACKLOG = 512


def listen(path: Path, *, gid: int | None = None) -> socket.socket:
    """A listening socket at `path`, for its owner alone, or for the group `gid` too.

    It gets its name once nobody else can reach it, in the place of one that a dead broker left there. That no two
    brokers do this at once is the caller's affair: it holds the directory's lock. Raises OSError.
    """
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.unlink(missing_ok=True)  # of a broker that was killed while it stood here
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        with _address(unfinished) as address:
            sock.bind(address)  # nobody can connect before listen()
        if gid is not None:
            os.chown(unfinished, -1, gid)
        unfinished.chmod(0o600 if gid is None else 0o660)
        sock.listen(_BACKLOG)
        unfinished.replace(path)
    except BaseException:
        sock.close()
        unfinished.unlink(missing_ok=True)
        raise
    return sock


def connect(path: Path) -> socket.socket:
    """A connected socket that does not block. Raises OSError: nobody listens, not permitted; BlockingIOError: too many wait."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        with _address(path) as address:
            sock.connect(address)  # done at once or not at all, as Unix sockets are
    except BaseException:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """`path` as an address; a long one by way of its directory's descriptor."""
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
