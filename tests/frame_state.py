"""Reads frames: the state that the frames of one source lead to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from pagetide.frames.cells import Cells, apply_changes

MOST_DECISIONS = 64


class FrameState:
    """What is known after the frames so far. The first frame must be full.

    Attributes:
        frame: The last frame, as it came.
        cells: [num_blocks].
        pool: Of the last full frame.
        rows: The entries of the frames' "rows", by row: the rows that have a sequence now.
        decisions: The last 64, by number, oldest first.
    """

    def __init__(self) -> None:
        self.frame: Mapping[str, Any] = {}
        self.cells: Cells = np.empty(0, np.uint16)
        self.pool: Mapping[str, Any] = {}
        self.rows: dict[int, list[Any]] = {}
        self.decisions: dict[int, dict[str, Any]] = {}

    def apply(self, frame: bytes | str | Mapping[str, Any]) -> None:
        """Take in the next frame."""
        data: Mapping[str, Any] = json.loads(frame) if isinstance(frame, bytes | str) else frame
        assert data["v"] == 1
        if data["full"]:
            self.pool = data["pool"]
            self.cells = np.zeros(self.pool["num_blocks"], np.uint16)
            self.rows, self.decisions = {}, {}
        assert self.pool, "the first frame is a difference"
        apply_changes(data["cells"], self.cells)
        for row in data["left"]:
            del self.rows[row]
        self.rows.update((entry[0], entry) for entry in data["rows"])
        for decision in data["decisions"]:
            self.decisions[decision["n"]] = decision
        for number in list(self.decisions)[: max(0, len(self.decisions) - MOST_DECISIONS)]:
            del self.decisions[number]
        self.frame = data
