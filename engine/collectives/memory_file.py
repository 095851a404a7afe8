"""Memory files without a name: shared with child processes by their descriptors, gone with the last process that has one
open.
"""

from __future__ import annotations

import os
import tempfile


def create_memory(name: str, num_bytes: int) -> int:
    """The descriptor of a new file of zeros. `name` is only a label."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp()
        os.unlink(path)
    os.ftruncate(fd, num_bytes)
    return fd
