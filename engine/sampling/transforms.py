"""Sampling transforms: temperature, top-k, top-p and min-p of the rows that draw, as in transformers.

The host prepares the settings as arrays, with flags that select the operations. The operations read nothing from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...scheduler.request import Sampling
from .categorical import draw, padded
from .logits import LARGEST, Bool, Float32, Float64, Int64, Rows, index, on_device, rows_at_once
from .top_k_top_p import cut

Arrays = tuple[npt.NDArray[Any], ...]

_COLDEST = 1e-6  # lower temperatures act as this one: logits / temperature stays finite


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Some drawing rows that are processed together."""

    rows: slice  # of the arrays
    places: slice | None  # of the logits; None: they are not contiguous
    num_sorted: int  # logits per row that top-k and top-p read; 0: neither is on
    warm: bool  # a row has a temperature other than 1
    top_k: bool  # all rows have top-k; else none
    top_p: bool  # a row has top-p; without top-k all or none
    min_p: bool  # a row has min-p


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """The settings of the m of n rows that draw. Plain data on the host.

    Attributes:
        arrays: To be uploaded: places among the n rows int64[m], temperatures float32[m], top-k int64[m], top-p float64[m],
            min-p float32[m] and noise float64[m]. Empty if no row draws.
        parts: The rows in the order of the arrays, grouped by what they request.
    """

    arrays: Arrays
    parts: tuple[RowGroup, ...]


NO_DRAWS = DrawSettings((), ())  # if no row draws


class SamplingTransforms:
    """The transforms of each row's distribution. A row without a temperature does not draw. Not safe for concurrent use.

    `at_hand`: values on `device` can be read without a wait, as on a CPU. Otherwise nothing is read.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, at_hand: bool) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._at_hand = at_hand
        self._temperature = np.zeros(num_rows, np.float32)  # 0: greedy
        self._top_k = np.full(num_rows, vocab_size, np.int64)  # vocabulary size: off
        self._top_p = np.full(num_rows, np.inf)  # inf: off; else as `_share_for` gives it
        self._min_p = np.zeros(num_rows, np.float32)  # 0: off

    def admit(self, row: int, sampling: Sampling) -> None:
        """(Re)start `row`."""
        self._temperature[row] = min(max(sampling.temperature, _COLDEST), LARGEST) if sampling.temperature > 0 else 0.0
        self._top_k[row] = min(sampling.top_k or self._vocab_size, self._vocab_size)
        self._top_p[row] = _share_for(sampling.top_p) if sampling.top_p < 1 else np.inf
        self._min_p[row] = sampling.min_p

    def release(self, rows: Rows) -> None:
        """Reset `rows` to greedy."""
        self._temperature[rows] = 0.0

    def draws(self, rows: Rows) -> Bool:
        """bool[n]: which of `rows` have a temperature."""
        return self._temperature[rows] > 0

    def warmed(self, top: Float32, rows: Rows) -> Float32:
        """float32[n]: each row's largest logit after temperature; unchanged for a row that does not draw."""
        temperature = self._temperature[rows]
        with np.errstate(over="ignore"):
            return np.asarray(top / np.where(temperature > 0, temperature, np.float32(1)), np.float32)

    def settings(self, places: Int64, rows: Rows, noise: Float64) -> DrawSettings:
        """The settings of `rows`, which draw with `noise` [m] and are at `places` [m], ascending, among the logits."""
        temperature, top_k, top_p, min_p = self._asked_of(rows)
        kind = np.where(top_k < self._vocab_size, 1, np.where(top_p < 1, 2, 0))  # sorts k logits, or all, or none
        order = np.argsort(kind, kind="stable")
        arrays = tuple(of[order] for of in (places, temperature, top_k, top_p, min_p, noise))
        ends = np.cumsum(np.bincount(kind, minlength=3)).tolist()
        size = rows_at_once(self._vocab_size, self._device)
        parts = [
            _part(arrays, slice(start, min(start + size, end)), self._vocab_size)
            for first, end in zip([0, *ends], ends, strict=False)
            for start in range(first, end, size)
        ]
        return DrawSettings(arrays, tuple(parts))

    def draw(self, logits: Tensor, settings: DrawSettings, uploaded: Sequence[Tensor]) -> Tensor:
        """int64[m]: tokens of the rows that draw, in the order of `settings`. Otherwise as `weights`."""
        noise = uploaded[5]
        drawn = [draw(self.weights(logits, part, uploaded), noise[part.rows], self._at_hand) for part in settings.parts]
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)

    def weights(self, logits: Tensor, part: RowGroup, uploaded: Sequence[Tensor]) -> Tensor:
        """float32[rows of the part, vocab, padded to blocks]: weights, 0 where filtered. Meaningless if the largest logit after
        temperature is not finite.

        Args:
            logits: float[n, vocab] of any float type; the part's logits may be overwritten.
        """
        places, temperature, top_k, top_p, min_p, _ = (of[part.rows] for of in uploaded)
        x = logits.index_select(0, places) if part.places is None else logits[part.places]
        x = x.detach().float().contiguous()
        if part.warm:
            x.div_(temperature[:, None])
        weights = torch.softmax(x, -1)
        if part.num_sorted:
            by_k, by_p = top_k if part.top_k else None, top_p if part.top_p else None
            weights.mul_(cut(x, part.num_sorted, by_k, by_p, self._at_hand))
        if part.min_p:
            least = min_p[:, None] * weights.amax(-1, keepdim=True)
            weights.mul_(weights.clone().ge_(least))
        return padded(weights)

    def scores(self, x: Tensor, rows: Rows, least: Int64) -> Tensor:
        """float32[m, vocab]: transformed logits of drawing rows, from x [m, vocab]; -inf where filtered. Overwrites `x`.

        Row i keeps at least `least[i]` tokens, as transformers does when it samples beams.
        """
        temperature, top_k, top_p, min_p = self._asked_of(rows)
        x.div_(on_device(temperature, x)[:, None])
        top_k = np.where(top_k < self._vocab_size, np.minimum(np.maximum(top_k, least), self._vocab_size), top_k)
        kept = torch.ones_like(x, dtype=torch.bool)
        by_k = top_k < self._vocab_size
        if (places := np.flatnonzero(by_k)).size:
            ks, ps = on_device(top_k[places], x), on_device(top_p[places], x)
            kept[index(places, x)] = cut(x[index(places, x)], int(top_k[places].max()), ks, ps, self._at_hand) > 0
        if (places := np.flatnonzero(~by_k & (top_p < 1))).size:
            ps = on_device(top_p[places], x)
            kept[index(places, x)] = cut(x[index(places, x)], self._vocab_size, None, ps, self._at_hand) > 0
        if (min_p > 0).any():
            likely = torch.softmax(x, -1)
            kept &= likely >= on_device(min_p, x)[:, None] * likely.amax(-1, keepdim=True)
        for place in np.flatnonzero((top_p < 1) | (min_p > 0)).tolist():
            kept[place, x[place].sort(descending=True, stable=True).indices[: least[place]]] = True
        return x.masked_fill_(~kept, -torch.inf)

    def _asked_of(self, rows: Rows) -> tuple[Float32, Int64, Float64, Float32]:
        """Temperature, top-k, top-p and min-p of `rows`."""
        return self._temperature[rows], self._top_k[rows], self._top_p[rows], self._min_p[rows]


def _part(arrays: Arrays, rows: slice, vocab_size: int) -> RowGroup:
    """The group of drawing rows `rows` of one kind, from their settings' arrays."""
    places, temperature, top_k, top_p, min_p, _ = (of[rows] for of in arrays)
    first, last = int(places[0]), int(places[-1])
    most, by_p = int(top_k.max()), bool((top_p < 1).any())
    return RowGroup(
        rows,
        slice(first, last + 1) if last + 1 - first == len(places) else None,
        num_sorted=most if most < vocab_size or by_p else 0,
        warm=bool((temperature != 1).any()),
        top_k=most < vocab_size,
        top_p=by_p,
        min_p=bool((min_p > 0).any()),
    )


def _share_for(top_p: float) -> float:
    """The cumulative probability that a nucleus must exceed: half a float32 step below `top_p`.

    With it, ten tokens of 0.1 each fill a nucleus of 0.9 with nine, whatever the last bits.
    """
    above = np.float32(top_p)
    below = np.nextafter(above, np.float32(-1))
    return (float(above) + float(below)) / 2
