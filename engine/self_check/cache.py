"""The cache of self-check results: one small file per device and set of versions.

    $XDG_CACHE_HOME/pagetide/self-check/DIGEST.json     ~/.cache if the variable is not set or not absolute

A file is replaced atomically, so several processes may write: the last result stays. A damaged file, or one of other
versions, is ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...common.state_dir import keep_json, user_dir
from .report import PartOutcome

log = logging.getLogger(__name__)


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of results. Does not create it."""
    return user_dir("cache", environ) / "self-check"


class Cache:
    """The results in a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = cache_dir() if folder is None else folder

    def file(self, identity: Mapping[str, Any]) -> Path:
        """The file for this identity, existing or not."""
        text = json.dumps(identity, sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def read(self, identity: Mapping[str, Any]) -> list[PartOutcome]:
        """The stored outcomes for this identity; none without a readable file."""
        file = self.file(identity)
        try:
            kept = json.loads(file.read_text("utf-8"))
            if kept["identity"] != identity:
                return []
            return [PartOutcome.from_dict(one) for one in kept["outcomes"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.debug("the self-check's result in %s is not used: %r", file, error)
            return []

    def write(self, identity: Mapping[str, Any], outcomes: Iterable[PartOutcome]) -> None:
        """Store these outcomes, replacing earlier ones. Raises OSError."""
        keep_json(self.file(identity), {"identity": identity, "outcomes": [asdict(one) for one in outcomes]})
