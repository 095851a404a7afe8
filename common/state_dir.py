"""The folders of one user's files that outlive processes and restarts of the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal


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
