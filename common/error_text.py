"""Texts of errors that several packages need: how a missing library is installed, and what is said of a file."""

from __future__ import annotations

import errno
from pathlib import Path


def install_command(extra: str = "") -> str:
    """The command that installs pagetide, with one of its extras: from a checkout, as no package index has it."""
    root, extras = Path(__file__).resolve().parents[1], f"[{extra}]" if extra else ""
    if (root / "pyproject.toml").is_file():
        return f"pip install -e '{root}{extras}'"
    return f"pip install '.{extras}' in a checkout of pagetide"


def said_of(error: Exception) -> str:
    """The text of an error. A file that the system refuses is named first, with what to do about it."""
    if not isinstance(error, OSError) or error.filename is None or error.filename2 is not None:
        return str(error)
    advice = {
        errno.ENOENT: "; check the path",
        errno.EISDIR: "; name a file in it",
        errno.EACCES: "; allow access to it, or name another",
    }
    return f"{error.filename}: {error.strerror}{advice.get(error.errno or 0, '')}"
