"""The scheduler's arrays, one row per running sequence, so that a step over all takes a handful of vector operations."""

from __future__ import annotations

import numpy as np

from ..cache.block_table import Index, Int32
from .plan import Bool
from .request import Sampling

_NEVER = np.iinfo(np.int64).max


class Rows:
    """Arrays for up to `num_rows` running sequences. The scheduler mutates them; values of a free row are undefined.

    tokens    [num_rows, max_tokens]  prompt and sampled ids; only the part that sequences reached uses memory
    known     known tokens;  computed  tokens with K and V in the cache
    prompt    tokens of the user's prompt;  limit  `known` at which the sequence ends by length
    ahead_from  `known` from which on a step may be planned before the newest token is known (`Sampling.ahead_from`)
    steered   whether its tokens are chosen outside (beams);  request_ids  the id of its request
    assigned  the running number of the row's assignment, from 1 on; 0: the row is free
    """

    def __init__(self, num_rows: int, max_tokens: int) -> None:
        self.tokens = np.zeros((num_rows, max_tokens), np.int32)
        self._flat = self.tokens.reshape(-1)
        self.known = np.zeros(num_rows, np.int64)
        self.computed = np.zeros(num_rows, np.int64)
        self.prompt = np.zeros(num_rows, np.int64)
        self.limit = np.zeros(num_rows, np.int64)
        self.ahead_from = np.zeros(num_rows, np.int64)
        self.steered = np.zeros(num_rows, np.bool_)
        self.request_ids = np.empty(num_rows, object)
        self.assigned = np.zeros(num_rows, np.int64)
        self._num_assigned = 0
        self._free = list(range(num_rows - 1, -1, -1))
        self._may_stop = np.zeros(1, np.bool_)  # by token id; the last entry, never a stop, stands for all ids beyond

    @property
    def num_free(self) -> int:
        """Number of free rows."""
        return len(self._free)

    def assign(self, request_id: str, token_ids: Int32, num_prompt: int, sampling: Sampling) -> int:
        """Put a sequence with no computed tokens into a free row. Returns the row."""
        row = self._free.pop()
        known = len(token_ids)
        self.tokens[row, :known] = token_ids
        self.known[row] = known
        self.computed[row] = 0
        self.prompt[row] = num_prompt
        self.limit[row] = self.limit_of(num_prompt, sampling)
        least = sampling.ahead_from
        self.ahead_from[row] = _NEVER if least is None else num_prompt + least
        self.steered[row] = sampling.num_candidates > 0
        self.request_ids[row] = request_id
        self._num_assigned += 1
        self.assigned[row] = self._num_assigned
        self._may_stop = _with(self._may_stop, sampling.stop_token_ids)
        return row

    def append(self, rows: Index, tokens: Int32) -> Index:
        """Append one token to each of `rows`. Returns their numbers of known tokens."""
        known = self.known[rows]
        self._flat[rows * self.tokens.shape[1] + known] = tokens  # takes half the time of indexing by row and column
        known += 1
        self.known[rows] = known
        return known

    def may_stop(self, tokens: Int32) -> Bool:
        """Which of `tokens` are a stop id of any sequence so far; check the sequence's own ids afterwards."""
        return self._may_stop.take(tokens, mode="clip")

    def limit_of(self, num_prompt: int, sampling: Sampling) -> int:
        """Tokens, prompt included, at which a sequence ends by length."""
        return min(num_prompt + sampling.max_new_tokens, self.tokens.shape[1])

    def free(self, row: int) -> None:
        """Free `row`."""
        self.request_ids[row] = None
        self.assigned[row] = 0
        self._free.append(row)


def _with(table: Bool, ids: tuple[int, ...]) -> Bool:
    """`table` with `ids` set, grown as needed."""
    beyond = max(ids, default=-1) + 2
    if beyond > len(table):
        table = np.append(table, np.zeros(beyond - len(table), np.bool_))
    table[list(ids)] = True
    return table
