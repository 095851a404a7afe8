"""Engines in forked processes: a child has a copy of the objects, but none of the threads, and locks that stay locked."""

from __future__ import annotations

import os

from ..errors import EngineClosed


class MakerProcess:
    """The process in which it was made."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise EngineClosed in a forked child."""
        if not self.is_current:
            raise EngineClosed(
                f"this engine belongs to process {self._pid}, and {os.getpid()} is a fork of it: a fork has no engine. Make a "
                "new one here, or start processes by spawn instead of fork"
            )
