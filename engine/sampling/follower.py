"""The sampler's place on the shards of a model that do not sample: they take the tokens of the first one."""

from __future__ import annotations

import numpy as np

from ...scheduler.request import Sampling
from .logits import Bool, Float64, Int32, Int64, Rows
from .transforms import NO_DRAWS, DrawSettings


class TokenFollower:
    """Keeps nothing of any row. See `Sampler`, of which it has what runners call between two samples."""

    def admit(self, row: int, sampling: Sampling, token_ids: Int32, num_prompt: int) -> None:
        """Do nothing."""

    def release(self, rows: Rows) -> None:
        """Do nothing."""

    def record_tokens(self, rows: Rows, tokens: Int32 | Int64) -> None:
        """Do nothing."""

    def plain(self, rows: Rows, positions: Int64) -> bool:
        """False: no row is drawn here."""
        return False

    def settings(self, rows: Rows, positions: Int64) -> DrawSettings:
        """No draws."""
        return NO_DRAWS

    def trouble(self, row: int) -> str | None:
        """None: the first shard knows."""
        return None

    def collect_samples(self, rows: Rows, packed: Float64) -> tuple[Int32, Bool]:
        """(tokens int32[n], none of them bad) from the first shard's tokens int64[n]."""
        return packed.astype(np.int32), np.zeros(len(rows), np.bool_)
