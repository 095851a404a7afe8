"""Log-probabilities of given tokens, with their ranks and the most likely tokens, from the model's own logits.

They are computed in float32, before any logits processor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...scheduler.request import Sampling

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

_CPU_CHUNK = 1 << 19  # logits processed at once per thread
_GPU_CHUNK = 1 << 22  # the temporaries take some 20 bytes each: 80 MiB
_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """The result of `score` for m tokens: the token in column 0, then the k most likely, best first. Ties: lower id first.

    `bad` marks lines with logits that hold a NaN, a +inf or only -inf. Their other values are meaningless.
    """

    token_ids: Int32  # [m, 1 + k]
    logprobs: Float32  # never -inf: the lowest float32 instead
    ranks: Int32  # number of tokens at least as likely, from 1
    bad: Bool  # [m]


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens `first .. first + length` of the row at `place` in a query, with `k` most likely tokens each."""

    place: int
    first: int
    length: int
    k: int


class LogprobRequests:
    """The rows that request log-probabilities. Not safe for concurrent use."""

    def __init__(self, num_rows: int) -> None:
        self._has_builtin = np.zeros(num_rows, np.bool_)
        self._asked: dict[int, tuple[Sampling, int]] = {}  # with the prompt's length

    def admit(self, row: int, sampling: Sampling, num_prompt: int) -> None:
        """(Re)start `row`."""
        self._has_builtin[row] = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        if self._has_builtin[row]:
            self._asked[row] = sampling, num_prompt

    def release(self, rows: npt.NDArray[np.integer]) -> None:
        """Forget `rows`. Rows that were never admitted are fine."""
        for row in rows[self._has_builtin[rows]].tolist():
            del self._asked[row]
        self._has_builtin[rows] = False

    def of_prompts(self, rows: Int64, starts: Int64, lengths: Int64) -> list[TokenSpan]:
        """Prompt tokens to score with the logits of positions `starts .. starts + lengths`."""
        found = []
        for place in np.flatnonzero(self._has_builtin[rows]).tolist():
            sampling, num_prompt = self._asked[int(rows[place])]
            first, last = int(starts[place]) + 1, min(int(starts[place] + lengths[place]), num_prompt - 1)
            if sampling.prompt_logprobs is not None and first <= last:
                found.append(TokenSpan(place, first, last - first + 1, sampling.prompt_logprobs))
        return found

    def of_samples(self, rows: Int64, positions: Int64) -> list[TokenSpan]:
        """Tokens to be sampled at `positions` of `rows` that need log-probabilities."""
        found = []
        for place in np.flatnonzero(self._has_builtin[rows]).tolist():
            sampling, _ = self._asked[int(rows[place])]
            if sampling.logprobs is not None:
                found.append(TokenSpan(place, int(positions[place]), 1, sampling.logprobs))
        return found


def score(logits: Tensor, token_ids: npt.NDArray[np.integer], k: int) -> Logprobs:
    """Each token's log-probability and rank, and the `k` most likely tokens. Read-only.

    Args:
        logits: float[m, vocab] of any float type, on any device.
        token_ids: int[m], below vocab.
        k: At most the vocabulary size is returned.
    """
    vocab_size = logits.shape[-1]
    k = min(k, vocab_size)
    limit = _CPU_CHUNK * torch.get_num_threads() if logits.device.type == "cpu" else _GPU_CHUNK
    ids = torch.from_numpy(np.asarray(token_ids, np.int64)).to(logits.device)
    size = max(1, limit // vocab_size)
    lines = [_score(x.float(), own, k) for x, own in zip(logits.split(size), ids.split(size), strict=True)]
    packed = torch.cat(lines).cpu().numpy()  # one transfer
    all_ids, logprobs, ranks, sums = np.split(packed, [1 + k, 2 * (1 + k), 2 * (1 + k) + 1], axis=1)
    return Logprobs(
        all_ids.astype(np.int32), logprobs.astype(np.float32), ranks[:, 0].astype(np.int32), ~np.isfinite(sums[:, 0])
    )


def _score(x: Tensor, ids: Tensor, k: int) -> Tensor:
    """float64[m, 2 * (1 + k) + 2] from logits float32[m, vocab]: ids, log-probabilities, rank, and log of the sum."""
    sums = x.logsumexp(-1, keepdim=True)
    own = x.gather(1, ids[:, None])
    columns = torch.cat((ids[:, None], _most_likely(x, k)), 1)
    logprobs = (x.gather(1, columns) - sums).clamp_(min=_LOWEST)
    ranks = (x >= own).sum(-1, keepdim=True)
    return torch.cat((columns.double(), logprobs.double(), ranks.double(), sums.double()), 1)


def _most_likely(x: Tensor, k: int) -> Tensor:
    """int64[m, k]: the ids of each line's largest logits, descending. Ties: the lower id first.

    It sorts unique keys: the float's bits, made monotonic, above the negated id. `topk` of the floats themselves breaks ties
    arbitrarily, and 16-bit logits often tie.
    """
    if k == 0:
        return torch.empty((len(x), 0), dtype=torch.int64, device=x.device)
    bits = (x + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (bits.long() << 32) - torch.arange(x.shape[1], device=x.device)
    return -keys.topk(k).values & 0xFFFFFFFF
