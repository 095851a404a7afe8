"""Who is admitted: a forecast of how many blocks the running sequences will come to need.

A request that fits now, but whose neighbours are about to grow, will only push one of them out again. So a request is
admitted when its prompt fits and the pool would also hold the highest point of everybody's expected growth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..cache.block_table import Index

Float = npt.NDArray[np.float64]

_MOST = 2**17  # tokens: longer outputs count as this long


def _steps(dense: int, per_octave: int) -> Index:
    """0, then every `dense` / `per_octave` tokens up to `dense`, then `per_octave` numbers an octave, up to _MOST."""
    numbers = [np.arange(0, dense, dense // per_octave)]
    while dense < _MOST:
        numbers.append(np.arange(dense, 2 * dense, dense // per_octave))
        dense *= 2
    return np.append(np.concatenate(numbers), _MOST)


EDGES = _steps(256, 16)  # of the bins of generated tokens
_TIMES = _steps(32, 8)  # steps from now for which a forecast is made
_NUM_BINS = len(EDGES)  # the last one begins at _MOST
_BIN_OF = (np.searchsorted(EDGES, np.arange(_MOST + 1), side="right") - 1).astype(np.int64)
_WIDTHS = np.append(np.diff(EDGES), _MOST)
# Where in EDGES a sequence in the middle of a bin will be at each time, and how far between that edge and the next.
_THEN = np.minimum((EDGES + np.minimum(_WIDTHS, 2 * _MOST) // 2)[:, None] + _TIMES, _MOST - 1)
_AHEAD = _BIN_OF[_THEN]
_PART = (_THEN - EDGES[_AHEAD]) / _WIDTHS[_AHEAD]


def _bins_of(tokens: Index) -> Index:
    """The bin of each number of generated tokens."""
    bins: Index = _BIN_OF[np.minimum(tokens, _MOST)]
    return bins


@dataclass(frozen=True, slots=True)
class ForecastPeak:
    """The highest point of what some sequences are expected to hold, `in_steps` steps from now: `blocks` is the mean and the
    margin together, rounded up, and no more than if all ran on to the last token they are allowed.
    """

    blocks: int
    expected_blocks: float
    margin_blocks: float
    in_steps: int


class LengthForecast:
    """Learns how long outputs are, and how many blocks those who run will hold at the worst moment to come.

    Lengths are learned as a life table is: of the sequences that reached a bin of lengths, the share that ended in it (Kaplan
    and Meier 1958; the prior as in Susarla and Van Ryzin 1976). Who still runs counts as having come so far, so a start
    where only short ones have ended yet does not look like a world of short ones; and who was cut at its own
    `max_new_tokens` tells nothing of where it would have ended. Before anything is known every length that is allowed is as
    likely as another; that weighs as much as PRIOR_WEIGHT sequences.

    Then, for moments to come, mean and variance of the blocks held if nobody joins. The peak is the highest of mean plus
    `deviations` standard deviations: a margin that is wide where lengths are unknown or differ, and next to none where they
    are alike. All is summed by bins first, so 4,096 sequences cost little more than 256.
    """

    PRIOR_WEIGHT = 4.0

    def __init__(self, deviations: float = 2.0, memory: int = 512) -> None:
        self.deviations = deviations
        self._memory = memory
        self._ended = np.zeros(_NUM_BINS)  # sequences that ended by themselves in a bin
        self._reached = np.zeros(_NUM_BINS)  # ended ones of any kind that reached a bin, less half of those cut in it
        self._weight = 0  # of all sequences in the two; halved, as they are, when it comes to the memory
        self._num_ended = 0

    def observe(self, generated: int, allowed: int) -> None:
        """A sequence ended after `generated` of at most `allowed` tokens: by itself when these are fewer."""
        if self._weight >= self._memory:
            self._ended /= 2
            self._reached /= 2
            self._weight //= 2
        at = int(_bins_of(np.array([generated]))[0])
        self._reached[: at + 1] += 1
        if generated < allowed:
            self._ended[at] += 1
        else:
            self._reached[at] -= 0.5
        self._weight += 1
        self._num_ended += 1

    def survival(self, running: Index, longest: int) -> Float:
        """The share of outputs that is longer than each of EDGES. [len(EDGES) + 1], the last one for any longer one.

        `running` is what those who run have generated, `longest` the most that any output may have. Read-only.
        """
        here = np.bincount(_bins_of(running), minlength=_NUM_BINS)
        # Where far more have ended than run, the ended tell the lengths alone: who runs would only count as endless.
        weight = min(1.0, len(running) / max(1, self._num_ended))
        guess = np.append(np.maximum(1 - EDGES / longest, 0.0), 0.0)
        reached = self._reached + weight * (here[::-1].cumsum()[::-1] - 0.5 * here) + self.PRIOR_WEIGHT * guess[:-1]
        ended = self._ended - self.PRIOR_WEIGHT * np.diff(guess)
        hazard = np.divide(ended, reached, out=np.ones(_NUM_BINS), where=reached > ended)
        return np.concatenate(([1.0], np.cumprod(1 - hazard)))

    def peak(self, known: Index, generated: Index, allowed: Index, block_size: int) -> ForecastPeak:
        """The peak of sequences that know `known` tokens and generated `generated` of at most `allowed`. [n] each, n >= 1.

        Read-only.
        """
        survival = self.survival(generated, int(allowed.max()))
        bins = _bins_of(generated)
        left = np.minimum(allowed - generated, _MOST)
        num_bins, num_times = int(bins.max()) + 1, int(np.searchsorted(_TIMES, left.max())) + 1
        cells = bins * num_times + np.minimum(np.searchsorted(_TIMES, left), num_times - 1)
        # [num_bins, num_times]: of those in a bin who may still run at a time: how many, their tokens, and the squares
        count, tokens, squares = (
            np.bincount(cells, weights, num_bins * num_times).reshape(num_bins, -1)[:, ::-1].cumsum(axis=1)[:, ::-1]
            for weights in (None, known, known * known)
        )
        at, part = _AHEAD[:num_bins, :num_times], _PART[:num_bins, :num_times]
        alive = survival[at] + (survival[at + 1] - survival[at]) * part
        alive /= np.maximum(alive[:, :1], 1e-12)
        more = _TIMES[:num_times] + (block_size - 1) / 2  # blocks are rounded up: half a block on the average
        expected = (alive * (tokens + count * more)).sum(axis=0) / block_size
        spread = squares + 2 * tokens * more + count * more * more
        margin = self.deviations * np.sqrt((alive * (1 - alive) * spread).sum(axis=0)) / block_size
        high = int(np.argmax(expected + margin))
        blocks = int(np.ceil(expected[high] + margin[high]))
        most = int((-(-(known + allowed - generated) // block_size)).sum())
        return ForecastPeak(min(blocks, most), float(expected[high]), float(margin[high]), int(_TIMES[high]))
