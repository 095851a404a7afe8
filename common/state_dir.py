"""The folders of one user's files that outlive processes and restarts of the machine, and files of plain data there."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from .on_error import OnError


def state_dir(environ: Mapping[str, str]) -> Path:
    """$XDG_STATE_HOME/pagetide."""
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "pagetide"


def user_dir(kind: Literal["cache", "config"], environ: Mapping[str, str]) -> Path:
    """$XDG_CACHE_HOME/pagetide, or $XDG_CONFIG_HOME/pagetide. Need not exist. It is relative if there is no home directory."""
    named = environ.get(f"XDG_{kind.upper()}_HOME", "")
    # The XDG base directory specification requires relative paths to be ignored.
    base = Path(named) if os.path.isabs(named) else Path(os.path.expanduser("~")) / f".{kind}"
    return base / "pagetide"


def keep_json(file: Path, content: Any) -> None:
    """Put plain data into `file` in place of what is there, whole for its readers. Raises OSError."""
    if not file.is_absolute():
        raise OSError("there is no home directory, and XDG_CACHE_HOME names no absolute one")
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=file.stem, suffix=".tmp", dir=file.parent)
    half = Path(name)
    with OnError(lambda: half.unlink(missing_ok=True)):
        with os.fdopen(descriptor, "w", encoding="utf-8") as written:
            json.dump(content, written, indent=1)
        half.replace(file)
