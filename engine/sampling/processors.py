"""User-supplied logits processors of single requests. Each sees only its own row, and its errors affect no other."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...scheduler.request import LogitsProcessor, Sampling
from ..errors import Attempt, format_error
from .histories import Histories
from .logits import Bool, Int32, Int64, Rows

log = logging.getLogger(__name__)

Troubles = dict[int, str]  # by row: why it has no token


class Processors:
    """Calls each row's processors in order. An error becomes the trouble of that row."""

    def __init__(self, num_rows: int, histories: Histories, troubles: Troubles) -> None:
        self._asked = np.zeros(num_rows, np.bool_)
        self._processors: dict[int, tuple[LogitsProcessor, ...]] = {}
        self._histories = histories
        self._troubles = troubles

    def admit(self, row: int, sampling: Sampling, token_ids: Int32, num_prompt: int) -> bool:
        """(Re)start `row`. Returns whether it has processors."""
        if not sampling.logits_processors:
            return False
        self._asked[row] = True
        self._processors[row] = sampling.logits_processors
        self._histories.keep(row, token_ids)
        return True

    def release(self, rows: Rows) -> None:
        """Forget `rows`."""
        self._asked[rows] = False
        for row in rows.tolist() if self._processors else ():
            self._processors.pop(row, None)

    def requested(self, rows: Rows, positions: Int64) -> Bool:
        """bool[n]: which of `rows` have processors."""
        return self._asked[rows]

    def apply(self, x: Tensor, places: Int64, rows: Rows) -> None:
        """Call each row's processors with a copy of its scores, and store what they return."""
        for place, row in zip(places.tolist(), rows.tolist(), strict=True):
            try:
                x[place] = self._processed(x[place : place + 1].clone(), row)
            except _ProcessorRefusal as refused:
                log.warning("%s; ending its request", refused, exc_info=refused.__cause__)
                self._troubles.setdefault(row, str(refused))
                x[place] = torch.nan

    def record_tokens(self, rows: Rows, tokens: Int64) -> None:
        """Does nothing: `Sampler` updates the histories."""

    def _processed(self, scores: Tensor, row: int) -> Tensor:
        """float32[vocab] from scores float32[1, vocab]. Raises _ProcessorRefusal."""
        known = self._histories.of(row)
        for processor in self._processors[row]:
            input_ids = torch.tensor(known, device=scores.device)[None]  # a copy per processor, which may write to it
            given: Any = None
            with Attempt() as attempt:
                given = processor(input_ids, scores)
            if (error := attempt.error) is not None:
                raise _ProcessorRefusal(f"the {_name(processor)} raised {format_error(error)}") from error
            if not isinstance(given, Tensor) or given.shape != (1, scores.shape[-1]):
                what = f"scores of shape {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
                raise _ProcessorRefusal(
                    f"the {_name(processor)} returned {what} instead of scores of shape {[1, scores.shape[-1]]}"
                )
            scores = given.detach().to(scores)
            if not bool(torch.isfinite(scores.amax())):
                raise _ProcessorRefusal(
                    f"the {_name(processor)} left no token to choose: its scores hold no finite largest one"
                )
        return scores[0]


class _ProcessorRefusal(Exception):
    """A processor raised, or returned invalid scores. The message names it."""


def _name(processor: LogitsProcessor) -> str:
    return f"logits processor {getattr(processor, '__qualname__', type(processor).__name__)}"
