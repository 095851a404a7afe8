"""Counter-based random numbers: stateless functions of seed, sample index and position."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .logits import Float64, Int64

UInt64 = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def uniform(seeds: UInt64, indices: UInt64, positions: Int64) -> Float64:
    """float64[n] in [0, 1) with 53 random bits: a pure function of each (seed, sample index, position).

    Philox4x32-10 (Salmon et al., SC 2011), with the key (seed's low and high half) and the counter (position's low and
    high half, index, 0). The number is the upper 27 bits of the first word and the upper 26 bits of the second.
    """
    seeds, positions = np.asarray(seeds, np.uint64), np.asarray(positions).astype(np.uint64)
    words = np.asarray(indices, np.uint64) & _LOW
    counter = np.stack((positions & _LOW, positions >> _HALF, words, np.zeros_like(words)))
    return _fraction(counter, np.stack((seeds & _LOW, seeds >> _HALF)))


def gumbel(seed: int, sample_index: int, position: int, token_ids: Int64) -> Float64:
    """float64[n] from the standard Gumbel distribution, one per token.

    The k largest of log-probability + noise are k draws without replacement (Kool et al., ICML 2019). As `uniform`,
    with token id + 1 as the counter's last word, so it never repeats a plain draw's number.
    """
    tokens = np.asarray(token_ids).astype(np.uint64)
    counter = np.empty((4, len(tokens)), np.uint64)
    counter[:3] = [[position & 0xFFFFFFFF], [position >> 32], [sample_index & 0xFFFFFFFF]]
    counter[3] = (tokens + np.uint64(1)) & _LOW
    shares = _fraction(counter, np.array([[seed & 0xFFFFFFFF], [seed >> 32]], np.uint64))
    return -np.log(-np.log(np.maximum(shares, 2.0**-54)))


def philox(counter: UInt64, key: UInt64) -> UInt64:
    """Philox4x32-10 of counters uint64[4, n] and keys uint64[2, n], each a 32-bit word; returns uint64[4, n]."""
    even, odd = counter[0::2], counter[1::2]  # words 0 and 2, words 1 and 3
    for round_key in (key + _WEYL) & _LOW:  # [2, n]
        products = even * _MULTIPLIERS
        even, odd = (products >> _HALF)[::-1] ^ odd ^ round_key, (products & _LOW)[::-1]
    return np.stack((even[0], odd[0], even[1], odd[1]))


def _fraction(counter: UInt64, key: UInt64) -> Float64:
    first, second, _, _ = philox(counter, key)
    high, low = first >> np.uint64(5), second >> np.uint64(6)
    return (high.astype(np.float64) * 2.0**26 + low.astype(np.float64)) * 2.0**-53
