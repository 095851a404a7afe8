"""Memory files without a name: shared with child processes by their descriptors, gone with the last process that has one
open.
"""

from __future__ import annotations

import fcntl
import os
import tempfile


def create_memory(name: str, num_bytes: int) -> int:
    """The descriptor of a new file of zeros. `name` is only a label."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp()
        os.unlink(path)
    if fd <= 2:  # a program without its standard streams: in a child these numbers are others
        low, fd = fd, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
        os.close(low)
    os.ftruncate(fd, num_bytes)
    return fd
