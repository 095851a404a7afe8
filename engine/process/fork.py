"""Detection of forked processes: a child has copies of the objects, but no threads, and locks that stay locked."""

from __future__ import annotations

import os

from ..errors import EngineClosed


class MakerProcess:
    """The process that created this object."""

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
