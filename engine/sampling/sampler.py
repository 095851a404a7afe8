"""The sampler: applies logits processors in a fixed order, then draws tokens. Rows pay only for what they request.

The processors follow the order of transformers' `generate` and give its distributions: logit bias, repetition penalty,
frequency and presence penalties, bad words, minimum length, the request's own processors, the constraint, temperature, top-k,
top-p, min-p. The draw is pagetide's own: one uniform number per (seed, sample index, position), then the inverse of the
cumulative distribution in vocabulary order. A token therefore depends only on its own logits and request, not on neighbours,
order or earlier draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...scheduler.request import LOGITS_OVERFLOW, NO_TOKEN_LEFT, Sampling
from . import native_sampling
from .builtin_processors import BadWords, BuiltinLogitsProcessor, FrequencyPenalty, LogitBias, MinLength, RepetitionPenalty
from .constraints import Constrained, Constraints
from .histories import Histories
from .logits import (
    Best,
    Bool,
    Float32,
    Float64,
    Int32,
    Int64,
    Rows,
    argmax,
    chunks,
    index,
    largest,
    on_device,
    packed,
    unpacked,
)
from .noise import gumbel, uniform
from .processors import Processors, Troubles
from .transforms import NO_DRAWS, DrawSettings, SamplingTransforms

Candidate = tuple[Int32, Float32, Float32]  # token ids, log-probabilities and keys, each [k]; keys descending


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """Drawn tokens on the device, perhaps not computed yet.

    Attributes:
        tokens: int64[n]; 0 for a row without a token.
        packed: float64[2, n]: all that `Sampler.collect_samples` needs on the host, in one copy.
    """

    tokens: Tensor
    packed: Tensor


class Sampler:
    """Sampling settings of the running rows, and the draw of their next tokens. Not safe for concurrent use.

    `sample` supports everything that rows may request, and waits for the device. Rows that are `plain` get the same tokens
    without a wait in three parts: `settings` on the host, to be uploaded by the caller; `draw`, which only queues; and
    `collect_samples`, once the values are on the host.

    Args:
        vocab_size: Width of the logits.
        constraints: Compiles output constraints; None: no row has one.
        at_hand: Whether device values can be read without a wait; None: only on a CPU.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        constraints: Constraints | None = None,
        *,
        at_hand: bool | None = None,
    ) -> None:
        device = torch.device(device)
        self._at_hand = device.type == "cpu" if at_hand is None else at_hand
        self._native = self._at_hand and native_sampling.serves(device)
        self._seed = np.zeros(num_rows, np.uint64)
        self._index = np.zeros(num_rows, np.uint64)
        self._num_candidates = np.zeros(num_rows, np.int64)
        self._least_kept = np.ones(num_rows, np.int64)  # candidates that the filters always keep
        self._has_builtin = np.zeros(num_rows, np.bool_)  # rows that request a processor
        self._histories = Histories()
        self._troubles: Troubles = {}
        self._constrained = Constrained(num_rows, constraints or Constraints(None, vocab_size), self._troubles)
        self._builtin: tuple[BuiltinLogitsProcessor, ...] = (
            LogitBias(num_rows, vocab_size),
            RepetitionPenalty(num_rows, vocab_size, device),
            FrequencyPenalty(num_rows, vocab_size, device),
            BadWords(num_rows, vocab_size, self._histories),
            MinLength(num_rows, vocab_size),
            Processors(num_rows, self._histories, self._troubles),
            self._constrained,
        )
        self._transforms = SamplingTransforms(num_rows, vocab_size, device, self._at_hand)

    def admit(self, row: int, sampling: Sampling, token_ids: Int32, num_prompt: int) -> None:
        """(Re)start `row` from its tokens so far, `token_ids` [known]: its prompt, then what was generated."""
        self.release(np.array([row]))
        self._seed[row] = sampling.seed
        self._index[row] = sampling.index
        self._num_candidates[row] = sampling.num_candidates
        self._least_kept[row] = max(2, 1 + len(sampling.stop_token_ids))
        self._transforms.admit(row, sampling)
        requests = [processor.admit(row, sampling, token_ids, num_prompt) for processor in self._builtin]
        self._has_builtin[row] = any(requests)

    def release(self, rows: Rows) -> None:
        """Reset `rows` to plain greedy. Rows that were never admitted are fine."""
        self._has_builtin[rows] = False
        self._transforms.release(rows)
        self._histories.drop(rows)
        for processor in self._builtin:
            processor.release(rows)
        for row in rows.tolist() if self._troubles else ():
            self._troubles.pop(row, None)

    def sample(self, rows: Rows, positions: Int64, logits: Tensor) -> tuple[Int32, Bool | None]:
        """Draw the next token of each row. Mutates the rows' histories; may overwrite `logits`.

        Args:
            rows: int[n], admitted rows, each at most once.
            positions: int64[n], the index of each new token in its sequence, prompt included.
            logits: float[n, vocab] of any float type; the arithmetic is in float32.

        Returns:
            tokens int32[n], and bool[n] marking rows without a token (their token is 0), or None if all rows have one. A row
                has none if its logits hold a NaN, a +inf or only -inf, or for the reason that `trouble` gives.
        """
        draws = self._transforms.draws(rows)
        if self._at_hand and not np.count_nonzero(draws | self._has_builtin[rows]):  # the quick way for greedy rows
            tokens, top = argmax(logits)
            if np.count_nonzero(np.isfinite(top)) == len(top):
                return tokens.astype(np.int32), None
        processed = self._processed_rows(rows, positions)
        tokens, top = self._drawn(rows, positions, logits, draws & ~processed)
        bad = ~np.isfinite(top)
        plain = ~(processed | bad)
        bad[plain] = ~self._well(top[plain], rows[plain])
        for part, x in chunks(logits, np.flatnonzero(processed & ~bad)):
            part_rows, at = rows[part], positions[part]
            self._treat(x, part_rows, at)
            tokens[part], top = self._drawn(part_rows, at, x, self._transforms.draws(part_rows))
            bad[part] = ~self._well(top, part_rows)
        if not bad.any():
            self.record_tokens(rows, tokens)
            return tokens.astype(np.int32), None
        self.record_tokens(rows[~bad], tokens[~bad])
        return tokens.astype(np.int32), bad

    def plain(self, rows: Rows, positions: Int64) -> bool:
        """Whether all of `rows` request at most temperature, top-k, top-p and min-p for the tokens at `positions`."""
        return not self._processed_rows(rows, positions).any()

    def settings(self, rows: Rows, positions: Int64) -> DrawSettings:
        """The settings that `draw` needs for `rows`, which are `plain` at `positions`."""
        return self._settings(rows, positions, self._transforms.draws(rows))

    def draw(self, logits: Tensor, settings: DrawSettings, uploaded: Sequence[Tensor]) -> DrawnTokens:
        """Queue the draw of each row's next token on the device. Gives the tokens of `sample` without waiting.

        Args:
            logits: As for `sample`; may be overwritten.
            uploaded: The arrays of `settings` on the device.
        """
        if self._native:
            return DrawnTokens(*native_sampling.sample(logits, uploaded))
        tokens, top = largest(logits, self._at_hand)
        warmed = top
        if settings.parts:
            places, temperature = uploaded[:2]
            tokens = tokens.scatter(0, places, self._transforms.draw(logits, settings, uploaded))
            warmed = top / torch.ones_like(top).scatter_(0, places, temperature)
        tokens = tokens.masked_fill((warmed - warmed).isnan(), 0)  # not finite, in the fewest operations
        return DrawnTokens(tokens, packed(tokens, top))

    def collect_samples(self, rows: Rows, packed: Float64) -> tuple[Int32, Bool]:
        """(tokens int32[n], bool[n] marking rows without one) as of `sample`, for plain `rows` not released since the draw.

        `packed` is the `DrawnTokens.packed` of their draw, on the host.
        """
        tokens, top = unpacked(packed)
        bad = ~np.isfinite(top)
        bad[~bad] = ~self._well(top[~bad], rows[~bad])
        return tokens.astype(np.int32), bad

    def candidates(self, rows: Rows, positions: Int64, logits: Tensor) -> list[Candidate | None]:
        """The best next tokens of each row, best first: its `num_candidates`, or all possible ones.

        The processors run on log-probabilities, as in transformers' beam search. For a row with a temperature, keys are the
        transformed log-probabilities plus Gumbel noise; else they are the log-probabilities. Ties: the lowest id. Histories are
        not changed: the caller chooses and reports by `record_tokens` or another `admit`.

        Returns:
            None for a row that has no candidates: see `sample`.
        """
        found: list[Candidate | None] = [None] * len(rows)
        for part, x in chunks(logits, np.flatnonzero(np.isfinite(argmax(logits)[1]))):
            x = torch.log_softmax(x, -1)
            self._treat(x, rows[part], positions[part])
            well = self._well(argmax(x)[1], rows[part])
            drawn = np.flatnonzero(self._transforms.draws(rows[part]) & well)
            if drawn.size:
                places, drawn_rows = index(drawn, x), rows[part][drawn]
                x[places] = self._transforms.scores(x[places], drawn_rows, self._least_kept[drawn_rows])
            logprobs = x.cpu().numpy()
            for i in np.flatnonzero(well):
                found[part[i]] = self._best(logprobs[i], int(rows[part[i]]), int(positions[part[i]]))
        return found

    def record_tokens(self, rows: Rows, tokens: Int32 | Int64) -> None:
        """Append the chosen `tokens`, int[n], to the histories of `rows`."""
        if not self._has_builtin[rows].any():
            return
        tokens = tokens.astype(np.int64, copy=False)
        self._histories.record_tokens(rows, tokens)
        for processor in self._builtin:
            processor.record_tokens(rows, tokens)

    def trouble(self, row: int) -> str | None:
        """Why `row` has no token, in a sentence, unless its logits are the reason. Valid until the row is released."""
        return self._troubles.get(row)

    def complete(self, rows: Rows) -> Bool | None:
        """bool[n]: rows with complete output under their constraint, so that nothing can follow. None: no row.

        Such a row must end, even without an end id, and whatever its minimum length.
        """
        return self._constrained.complete(rows)

    def _processed_rows(self, rows: Rows, positions: Int64) -> Bool:
        """bool[n]: which of `rows` request any processor."""
        processed = np.zeros(len(rows), np.bool_)
        for processor in self._builtin if self._has_builtin[rows].any() else ():
            processed |= processor.requested(rows, positions)
        return processed

    def _treat(self, x: Tensor, rows: Rows, positions: Int64) -> None:
        """Apply all processors in place to `x` [m, vocab]."""
        for processor in self._builtin if self._has_builtin[rows].any() else ():
            places = np.flatnonzero(processor.requested(rows, positions))
            if places.size:
                processor.apply(x, places, rows[places])

    def _settings(self, rows: Rows, positions: Int64, drawing: Bool) -> DrawSettings:
        """The settings of `rows`; those with `drawing` draw."""
        places = np.flatnonzero(drawing)
        if not places.size:
            return NO_DRAWS
        drawn = rows[places]
        noise = uniform(self._seed[drawn], self._index[drawn], positions[places])
        return self._transforms.settings(places, drawn, noise)

    def _drawn(self, rows: Rows, positions: Int64, logits: Tensor, drawing: Bool) -> Best:
        """(tokens, largest logits) of `rows` on the host; those with `drawing` draw. May overwrite `logits`."""
        settings = self._settings(rows, positions, drawing)
        drawn = self.draw(logits, settings, [on_device(array, logits) for array in settings.arrays])
        return unpacked(drawn.packed.cpu().numpy())

    def _well(self, top: Float32, rows: Rows) -> Bool:
        """bool[m]: which of `rows`, all with finite logits, keep a finite largest logit. Records the trouble of the others."""
        well = np.isfinite(self._transforms.warmed(top, rows))
        for i in np.flatnonzero(~well):
            self._troubles.setdefault(int(rows[i]), NO_TOKEN_LEFT if np.isneginf(top[i]) else LOGITS_OVERFLOW)
        return well

    def _best(self, logprobs: Float32, row: int, position: int) -> Candidate:
        """The candidates of one row, from its processed log-probabilities [vocab]."""
        ids = np.flatnonzero(logprobs > -np.inf)
        keys = logprobs[ids]
        if self._transforms.draws(np.array([row]))[0]:
            noise = gumbel(int(self._seed[row]), int(self._index[row]), position, ids)
            keys = (keys + noise).astype(np.float32)
        k = int(self._num_candidates[row])
        if len(ids) > k:
            near = keys >= np.partition(keys, len(keys) - k)[len(keys) - k]
            ids, keys = ids[near], keys[near]
        order = np.lexsort((ids, -keys))[:k]
        return ids[order].astype(np.int32), logprobs[ids[order]], keys[order]
