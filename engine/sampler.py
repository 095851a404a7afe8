"""Turns logits into tokens: penalties, filters and the draw, each paid for only by the rows that ask for it.

The treatments come in the order of transformers' `generate` and give its distributions: repetition penalty, minimum
length, temperature, top-k, top-p, min-p. The draw is ours: one uniform number per (seed, sample index, position), then
the inverse of the cumulative distribution in the order of the vocabulary. So a token depends on its own row of logits
and on its own request alone, not on neighbours, order, or what was drawn before; and two nearly equal logits that
change places under rounding move the result only if the number falls into the gap between them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..scheduler.request import Sampling

Rows = npt.NDArray[np.integer]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
Best = tuple[Int64, Float32]  # each row's largest logit: its id (ties: the lowest), and its value

_BLOCK = 128  # elements summed at once when a distribution is inverted
_CPU_CHUNK = 1 << 19  # logits treated at once per thread: they and their copies stay in the core's cache
_GPU_CHUNK = 1 << 25  # logits treated at once: bounds the temporaries to a few times 128 MiB
_COLDEST = 1e-6  # lower temperatures act as this one, so that logits / temperature stays finite
_LARGEST = float(np.finfo(np.float32).max)
_NO_SLOT = -1

_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_PHILOX_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


class Sampler:
    """Sampling settings of the running rows, and the draw of their next tokens. Not safe for concurrent use.

    Args:
        num_rows: Rows there can be; row ids are below it.
        vocab_size: Width of the logits.
        device: Where the logits live.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._seed = np.zeros(num_rows, np.uint64)
        self._index = np.zeros(num_rows, np.uint64)
        self._temperature = np.zeros(num_rows, np.float32)  # 0: greedy
        self._top_k = np.zeros(num_rows, np.int64)  # 0: off
        self._top_p = np.ones(num_rows, np.float64)  # 1: off; else as `_share_for` gives it
        self._min_p = np.zeros(num_rows, np.float32)  # 0: off
        self._penalty = np.ones(num_rows, np.float32)
        self._held_until = np.zeros(num_rows, np.int64)  # position from which on the stop ids are allowed
        self._stop_ids: dict[int, Int64] = {}  # only of rows with a minimum length
        self._slot = np.full(num_rows, _NO_SLOT, np.int64)  # place in `_seen`, of rows with a penalty
        self._free_slots: list[int] = []
        self._seen = torch.empty((0, vocab_size), dtype=torch.bool, device=self._device)  # [slots, vocab]

    def admit(self, row: int, sampling: Sampling, token_ids: Int32, num_prompt: int) -> None:
        """(Re)start `row`, whose tokens so far are `token_ids` [known]: its prompt, then what was generated before."""
        self.release(np.array([row]))
        self._seed[row] = sampling.seed
        self._index[row] = sampling.index
        self._temperature[row] = min(max(sampling.temperature, _COLDEST), _LARGEST) if sampling.temperature > 0 else 0.0
        self._top_k[row] = sampling.top_k if sampling.top_k < self._vocab_size else 0
        self._top_p[row] = _share_for(sampling.top_p) if sampling.top_p < 1 else 1.0
        self._min_p[row] = sampling.min_p
        stops = np.array([i for i in sampling.stop_token_ids if i < self._vocab_size], np.int64)
        if sampling.min_new_tokens > 0 and stops.size:
            self._stop_ids[row] = stops
            self._held_until[row] = num_prompt + sampling.min_new_tokens
        if sampling.repetition_penalty != 1.0:
            self._penalty[row] = min(sampling.repetition_penalty, _LARGEST)
            self._slot[row] = slot = self._take_slot()
            known = torch.from_numpy(token_ids[token_ids < self._vocab_size].astype(np.int64)).to(self._device)
            self._seen[slot] = False
            self._seen[slot, known] = True

    def release(self, rows: Rows) -> None:
        """Forget `rows`: back to plain greedy. Rows that were never admitted are fine."""
        self._temperature[rows] = 0.0
        self._held_until[rows] = 0
        slots = self._slot[rows]
        self._free_slots.extend(slots[slots != _NO_SLOT].tolist())
        self._slot[rows] = _NO_SLOT
        for row in rows.tolist() if self._stop_ids else ():
            self._stop_ids.pop(row, None)
        if self._free_slots and len(self._free_slots) == len(self._seen):
            self._free_slots = []
            self._seen = self._seen.new_empty((0, self._vocab_size))

    def sample(self, rows: Rows, positions: Int64, logits: Tensor) -> tuple[Int32, Bool | None]:
        """Draw the next token of each row. Mutates the rows' histories; may overwrite `logits`.

        Args:
            rows: int[n], admitted rows, none twice.
            positions: int64[n], the index in its sequence (prompt included) that each new token will have.
            logits: float[n, vocab] of any float type; the arithmetic is in float32.

        Returns:
            tokens int32[n], and bool[n] telling the rows that have none, because their logits hold a NaN or a +inf or
            only -inf, or overflow under penalty or temperature (their token is 0); or None if all are well. A bad row
            changes nothing for the others.
        """
        tokens, top = _argmax(logits)
        bad = ~np.isfinite(top)
        special = (self._temperature[rows] > 0) | (self._slot[rows] != _NO_SLOT) | (positions < self._held_until[rows])
        if special.any():
            noise = uniform(self._seed[rows], self._index[rows], positions)
            for part, x in _chunks(logits, np.flatnonzero(special & ~bad)):
                best = (tokens[part], top[part])
                tokens[part], bad[part] = self._treat(x, rows[part], positions[part], best, noise[part])
        any_bad = bool(bad.any())
        if any_bad:
            tokens[bad] = 0
        self._remember(rows, tokens, ~bad)
        return tokens.astype(np.int32), bad if any_bad else None

    def distribution(self, rows: Rows, positions: Int64, logits: Tensor) -> Tensor:
        """float32[n, vocab]: the probabilities that `sample` draws from; greedy rows are one-hot. Read-only, not fast.

        The logits must be such that `sample` finds no bad row.
        """
        x = logits.detach().float().clone()
        tokens, _ = self._prepare(x, rows, positions, _argmax(x))
        result = torch.nn.functional.one_hot(_index(tokens, x), self._vocab_size).float()
        sampled = np.flatnonzero(self._temperature[rows] > 0)
        if sampled.size:
            weights = self._weights(x[_index(sampled, x)], rows[sampled])[:, : self._vocab_size]
            result[_index(sampled, x)] = weights / weights.sum(-1, keepdim=True, dtype=torch.float64).float()
        return result

    def _treat(self, x: Tensor, rows: Rows, positions: Int64, best: Best, noise: Float64) -> tuple[Int64, Bool]:
        """(tokens, bad) of rows that are not plainly greedy; `best` is their untreated argmax. Overwrites `x`."""
        tokens, top = self._prepare(x, rows, positions, best)
        temperature = self._temperature[rows]
        with np.errstate(over="ignore"):
            bad = ~np.isfinite(top / np.where(temperature > 0, temperature, np.float32(1)))
        sampled = np.flatnonzero((temperature > 0) & ~bad)
        if sampled.size:
            whole = sampled.size == len(rows)
            weights = self._weights(x if whole else x[_index(sampled, x)], rows[sampled])
            tokens[sampled] = _draw(weights, torch.from_numpy(noise[sampled]).to(x.device))
        return tokens, bad

    def _prepare(self, x: Tensor, rows: Rows, positions: Int64, best: Best) -> Best:
        """Penalty and minimum length, in place in `x` [m, vocab]. Returns the argmax then; it was `best` before."""
        penalised = np.flatnonzero(self._slot[rows] != _NO_SLOT)
        held = np.flatnonzero(positions < self._held_until[rows])
        if penalised.size:
            self._penalise(x, rows, penalised)
            best = _argmax(x)
        return self._hold(x, rows, held) if held.size else best

    def _penalise(self, x: Tensor, rows: Rows, penalised: Int64) -> None:
        """Repetition penalty (Keskar et al., CTRL, 2019): positive logits are divided, negative ones multiplied."""
        places, ids = self._seen[_index(self._slot[rows[penalised]], x)].nonzero(as_tuple=True)
        penalty = torch.from_numpy(self._penalty[rows[penalised]]).to(x.device)[places]
        of_row = _index(penalised, x)[places]
        values = x[of_row, ids]
        x[of_row, ids] = torch.where(values < 0, values * penalty, values / penalty)

    def _hold(self, x: Tensor, rows: Rows, held: Int64) -> Best:
        """Take the stop ids out of the `held` rows of `x`, unless nothing else is left. Returns the argmax then."""
        stops = [self._stop_ids[row] for row in rows[held].tolist()]
        of_row = _index(np.repeat(held, [s.size for s in stops]), x)
        ids = _index(np.concatenate(stops), x)
        values = x[of_row, ids]
        x[of_row, ids] = -torch.inf
        best = _argmax(x)
        lost = np.isneginf(best[1])
        if not lost.any():
            return best
        again = torch.from_numpy(lost).to(x.device)[of_row]
        x[of_row[again], ids[again]] = values[again]
        return _argmax(x)

    def _weights(self, x: Tensor, rows: Rows) -> Tensor:
        """Temperature and filters. Returns float32[m, vocab, padded to blocks], 0 where filtered. Overwrites `x`."""
        temperature = self._temperature[rows]
        if (temperature != 1).any():
            x.div_(torch.from_numpy(temperature).to(x.device)[:, None])
        weights = torch.softmax(x, -1)
        top_k, top_p, min_p = self._top_k[rows], self._top_p[rows], self._min_p[rows]
        cut = np.flatnonzero((top_k > 0) | (top_p < 1))
        if cut.size == len(rows):
            weights.mul_(_cut(x, top_k, top_p))
        elif cut.size:
            index = _index(cut, x)
            weights[index] = weights[index] * _cut(x[index], top_k[cut], top_p[cut])
        if (min_p > 0).any():
            least = torch.from_numpy(min_p).to(x.device)[:, None] * weights.amax(-1, keepdim=True)
            weights.mul_(weights.clone().ge_(least))
        return _padded(weights)

    def _take_slot(self) -> int:
        if not self._free_slots:
            old = len(self._seen)
            grown = self._seen.new_empty((max(1, 2 * old), self._vocab_size))
            grown[:old] = self._seen
            self._seen = grown
            self._free_slots = list(range(len(grown) - 1, old - 1, -1))
        return self._free_slots.pop()

    def _remember(self, rows: Rows, tokens: Int64, well: Bool) -> None:
        """Add each row's new token to its history, if the row keeps one."""
        slots = self._slot[rows]
        used = well & (slots != _NO_SLOT)
        if used.any():
            self._seen[_index(slots[used], self._seen), _index(tokens[used], self._seen)] = True


def uniform(seeds: UInt64, indices: UInt64, positions: Int64) -> Float64:
    """float64[n] in [0, 1) with 53 random bits: a pure function of each (seed, sample index, position).

    Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011), with the key (seed's low and
    high half) and the counter (position's low and high half, index, 0). The number is the upper 27 bits of the first
    word and the upper 26 bits of the second.
    """
    seeds, positions = np.asarray(seeds, np.uint64), np.asarray(positions).astype(np.uint64)
    words = np.asarray(indices, np.uint64) & _LOW
    counter = np.stack((positions & _LOW, positions >> _HALF, words, np.zeros_like(words)))
    first, second, _, _ = philox(counter, np.stack((seeds & _LOW, seeds >> _HALF)))
    high, low = first >> np.uint64(5), second >> np.uint64(6)
    return (high.astype(np.float64) * 2.0**26 + low.astype(np.float64)) * 2.0**-53


def philox(counter: UInt64, key: UInt64) -> UInt64:
    """Philox4x32-10 of counters uint64[4, n] and keys uint64[2, n], each a 32-bit word; returns uint64[4, n]."""
    even, odd = counter[0::2], counter[1::2]  # words 0 and 2, words 1 and 3
    for _ in range(_PHILOX_ROUNDS):
        products = even * _PHILOX_MULTIPLIERS
        even, odd = (products >> _HALF)[::-1] ^ odd ^ key, (products & _LOW)[::-1]
        key = (key + _PHILOX_WEYL) & _LOW
    return np.stack((even[0], odd[0], even[1], odd[1]))


def _share_for(top_p: float) -> float:
    """The running sum, as a share, that a nucleus has to exceed: half a float32 step below `top_p`.

    So that ten tokens of a tenth each fill a nucleus of 0.9 with nine of them, whatever the last bits say.
    """
    above = np.float32(top_p)
    below = np.nextafter(above, np.float32(-1))
    return (float(above) + float(below)) / 2


def _argmax(logits: Tensor) -> Best:
    """(ids int64[n], values float32[n]) of the largest in each row; ties: the lowest id; a NaN is largest."""
    if logits.device.type != "cpu":
        top, ids = logits.max(-1)
        both = torch.stack((top.double(), ids.double())).cpu().numpy()  # one transfer
        return both[1].astype(np.int64), both[0].astype(np.float32)
    ids_, tops = np.empty(len(logits), np.int64), np.empty(len(logits), np.float32)
    for part, x in _chunks(logits, np.arange(len(logits))):  # numpy's argmax is ten times faster than torch's on a CPU
        ids_[part] = best = x.numpy().argmax(-1)
        tops[part] = x.numpy()[np.arange(len(best)), best]
    return ids_, tops


def _chunks(logits: Tensor, chosen: Int64) -> Iterator[tuple[Int64, Tensor]]:
    """Some of the chosen rows (ascending) at a time: their places in `logits`, and float32[m, vocab], view or copy."""
    limit = _CPU_CHUNK * torch.get_num_threads() if logits.device.type == "cpu" else _GPU_CHUNK
    size = max(1, limit // max(1, logits.shape[-1]))
    for start in range(0, len(chosen), size):
        part = chosen[start : start + size]
        first, last = int(part[0]), int(part[-1])
        consecutive = last - first + 1 == len(part)
        x = logits[first : last + 1] if consecutive else logits[_index(part, logits)]
        yield part, x.detach().float().contiguous()


def _cut(x: Tensor, top_k: Int64, top_p: Float64) -> Tensor:
    """float32[m, vocab]: 1 for tokens that top-k and top-p keep, else 0. Overwrites and returns `x`.

    Both read the largest logits in descending order: all of them for a row without top-k, else k and one more. What is
    computed for a row must not depend on how many were sorted for its neighbours: hence exponentials that no sum has
    scaled, in blocks counted from the largest.
    """
    vocab_size = x.shape[-1]
    by_k = top_k > 0
    count = vocab_size if not by_k.all() else min(vocab_size, int(top_k.max()) + 1)
    top = _largest(x, count)  # [m, count]
    places = torch.arange(len(x), device=x.device)
    last = _index(np.maximum(top_k, 1) - 1, x)
    floor = torch.where(torch.from_numpy(by_k).to(x.device), top[places, last], -torch.inf)
    if not (top_p < 1).any():
        return x.ge_(floor[:, None])
    if count < vocab_size and bool((top[places, last] == top[places, last + 1]).any()):
        top = _largest(x, vocab_size)  # more than k tie for the k-th place: they all count
    weights = (top - top[:, :1]).exp_()
    if by_k.any():
        weights.mul_(top.clone().ge_(floor[:, None]))
    weights = _padded(weights)
    ends = _invert(weights, torch.from_numpy(top_p).to(x.device)).clamp_(max=top.shape[-1] - 1)
    border = top[places, ends]  # the token that crosses top_p is kept
    border = torch.where(torch.from_numpy(top_p < 1).to(x.device), border, -torch.inf)
    after = top[places, (ends + 1).clamp_(max=top.shape[-1] - 1)]
    split = (after == border) & (ends + 1 < top.shape[-1]) & (border > -torch.inf)
    for row in split.nonzero().flatten().tolist():
        keep = int(ends[row]) + 1 - int((top[row] > border[row]).sum())
        tied = (x[row] == border[row]).nonzero().flatten()
        x[row, tied[keep:]] = -torch.inf  # the lowest ids stay, as with argmax; transformers' unstable sort takes any
    return x.ge_(torch.maximum(floor, border)[:, None])


def _largest(x: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row, descending: float32[m, count]. Read-only."""
    if x.device.type != "cpu":
        return x.topk(count).values if count < x.shape[-1] else x.sort(descending=True).values
    values = np.negative(x.numpy())  # numpy sorts values with vector instructions, torch values and indices without
    if count < x.shape[-1]:
        values.partition(count - 1, axis=-1)
        values = values[:, :count].copy()
    values.sort(axis=-1)
    return torch.from_numpy(np.negative(values, out=values))


def _draw(weights: Tensor, noise: Tensor) -> Int64:
    """int64[m]: inverts each row's distribution at `noise` (float64[m] in [0, 1)); never a token of weight 0."""
    ids = _invert(weights, noise)
    lost = weights.gather(1, ids[:, None])[:, 0] <= 0
    if bool(lost.any()):  # parallel sums can step at a weight of 0, by their last bit
        ids[lost] = weights[lost].argmax(-1)
    return np.asarray(ids.cpu().numpy(), np.int64)


def _invert(weights: Tensor, shares: Tensor) -> Tensor:
    """int64[m]: where the running sum of each row first exceeds its share of the row's total.

    In two levels, blocks and elements in a block: little is summed one by one, in float64, and the rest in trees.

    Args:
        weights: float32[m, blocks * _BLOCK], none negative.
        shares: float64[m], below 1.
    """
    blocks = weights.view(len(weights), -1, _BLOCK)
    ends = blocks.sum(-1).double().cumsum(-1)  # [m, blocks]
    targets = shares[:, None] * ends[:, -1:]  # [m, 1]
    block = torch.searchsorted(ends, targets, right=True).clamp_(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
    within = blocks[torch.arange(len(weights), device=weights.device), block[:, 0]].double().cumsum(-1)  # [m, _BLOCK]
    place = torch.searchsorted(within, targets - before, right=True)
    last = torch.searchsorted(within, within[:, -1:].contiguous())  # the last element that is not 0
    return (block * _BLOCK + torch.minimum(place, last))[:, 0]


def _padded(weights: Tensor) -> Tensor:
    """`weights` [m, n], with zeros up to a whole number of blocks."""
    missing = -weights.shape[-1] % _BLOCK
    return torch.nn.functional.pad(weights, (0, missing)) if missing else weights


def _index(values: npt.NDArray[np.integer], like: Tensor) -> Tensor:
    """int64 index tensor on the device of `like`."""
    return torch.from_numpy(np.asarray(values, np.int64)).to(like.device)
