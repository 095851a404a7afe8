"""Prefix hashes: 128 bits for each full block of tokens and all tokens before it, under a salt.

Multilinear hashing (Lemire and Kaser 2014, "Strongly universal string hashing is fast"; after Carter and Wegman). There
are four lanes. Lane l has a random 64-bit key for every position of a sequence, and

    sum[l] = start[l](salt) + key[l, 0] * (token_0 + 1) + key[l, 1] * (token_1 + 1) + ...    modulo 2**64

The digest is the upper 32 bits of each lane. Under an unknown secret, two given prefixes that differ, in a token, in
length or in salt, agree with a probability of 2**-128. docs/decisions/0017-prefix-index.md says why this is used and
not one digest per block.

Security: the hash is keyed and linear, not one-way. An attacker with the secret, or with the digests of chosen prompts,
can construct prompts with equal digests, and can test whether a digest belongs to a guessed prompt. `PrefixIndex`
compares tokens, so a collision there costs hits and never gives a wrong one. A router that compares digests alone can
be misled. Therefore the secret is random by default. A secret that several processes share is a key: it is never logged
or shown (docs/decisions/0034-prefix-hash-secret.md).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .block_table import Int32

Digests = npt.NDArray[np.uint64]  # [n, 2]: 128 bits for each of n prefixes
Root = tuple[bytes | None, bytes]
LANES = 4
_Scalar = TypeVar("_Scalar", np.int32, np.uint64)
_STRETCH = 4096  # positions per call of SHAKE: 128 KiB of keys, 0.2 ms
_UPPER = np.uint64(32)
_ONE = np.uint64(1)


class PrefixHasher:
    """The keys of one hash space: equal secret and block size give equal hashes of equal tokens under equal salts.

    This holds in every process and release. The model is not part of the hash. `secret` is any number of bytes; None
    draws a random one. Keys are made as longer sequences come, 32 bytes a position. Not thread-safe. Raises ValueError
    for an empty secret.
    """

    def __init__(self, block_size: int, secret: bytes | None = None) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, got {block_size}")
        if secret is not None and not secret:
            raise ValueError("the secret of the prefix hashes is empty; give some bytes, or None for a random one")
        self.block_size = block_size
        self._secret = hashlib.blake2b(secrets.token_bytes(32) if secret is None else secret, digest_size=32).digest()
        self._keys = np.empty((0, LANES, block_size), np.uint64)
        self._common = self._start(b"common")

    def chain(self, tokens: Sequence[int] | Int32 = (), salt: bytes | None = None) -> Chain:
        """The hash chain of a sequence that begins with `tokens` (int32), under `salt` (None: the common hash space)."""
        return Chain(self, tokens, salt)

    def start(self, salt: bytes | None) -> Digests:
        """The sums of an empty prefix. Without a salt: those of the common space."""
        return self._common if salt is None else self._start(b"salted" + salt)

    def keys(self, num_blocks: int) -> Digests:
        """The keys [blocks, lanes, block_size] of at least the first `num_blocks` blocks."""
        if num_blocks > len(self._keys):
            positions = max(num_blocks, 2 * len(self._keys)) * self.block_size
            stretches = (self._stretch(number) for number in range(-(-positions // _STRETCH)))
            keys = np.frombuffer(b"".join(stretches), "<u8").astype(np.uint64, copy=False)  # [positions * lanes]
            blocks = len(keys) // (LANES * self.block_size)
            whole = keys[: blocks * LANES * self.block_size].reshape(blocks, self.block_size, LANES)
            self._keys = np.ascontiguousarray(whole.transpose(0, 2, 1))
        return self._keys

    def digests(self, sums: Digests) -> Digests:
        """The 128-bit digests [n, 2] of `sums` [n, lanes]."""
        return (sums >> _UPPER).astype(np.uint32).view(np.uint64)

    def _start(self, name: bytes) -> Digests:
        digest = hashlib.blake2b(name, key=self._secret, digest_size=8 * LANES).digest()
        return np.frombuffer(digest, "<u8").astype(np.uint64, copy=False)

    def _stretch(self, number: int) -> bytes:
        return hashlib.shake_128(self._secret + number.to_bytes(8, "little")).digest(8 * LANES * _STRETCH)


class Chain:
    """The tokens of one sequence and the hashes of its full blocks, each computed once, on demand.

    Grows with `append`. An array passed as the initial tokens is not copied: it must not be written to any more. `below` is a
    chain of the first of these tokens in another hash space (`DiskIndex.below`).
    """

    __slots__ = ("_digests", "_num_hashed", "_sums", "_tokens", "below", "hasher", "num_tokens", "salt")

    def __init__(self, hasher: PrefixHasher, tokens: Sequence[int] | Int32, salt: bytes | None) -> None:
        self.hasher = hasher
        self.salt = salt
        self._tokens = np.asarray(tokens, np.int32)  # after the first `append` that needs room, a larger copy
        if self._tokens.ndim != 1:
            raise ValueError(f"tokens are a list of ids, got an array of shape {self._tokens.shape}")
        self.num_tokens = len(self._tokens)
        self.below: Chain | None = None
        self._digests = np.empty((0, 2), np.uint64)  # of the first `_num_hashed` blocks, with spare room
        self._num_hashed = 0
        self._sums = hasher.start(salt)  # after the last hashed block

    @property
    def tokens(self) -> Int32:
        """All tokens: a view, valid until the next `append`."""
        return self._tokens[: self.num_tokens]

    @property
    def num_blocks(self) -> int:
        """The number of full blocks."""
        return self.num_tokens // self.hasher.block_size

    @property
    def root(self) -> Root:
        """The salt and the first full block's tokens, unhashed: compared exactly."""
        return self.salt, self._tokens[: self.hasher.block_size].tobytes()

    def append(self, tokens: Sequence[int] | Int32) -> None:
        """Append `tokens`."""
        upto = self.num_tokens + len(tokens)
        if upto > len(self._tokens):
            self._tokens = _with_room(self._tokens, self.num_tokens, upto)
        self._tokens[self.num_tokens : upto] = tokens
        self.num_tokens = upto

    def blocks(self, num_blocks: int) -> Int32:
        """The tokens [num_blocks, block_size] of the first full blocks: a view, valid until the next `append`."""
        size = self.hasher.block_size
        return self._tokens[: num_blocks * size].reshape(num_blocks, size)

    def digests(self, num_blocks: int) -> Digests:
        """The hashes [num_blocks, 2] of the first full blocks, each covering all tokens before it."""
        if num_blocks > self._num_hashed:
            if num_blocks > self.num_blocks:
                raise ValueError(f"asked for the hashes of {num_blocks} full blocks, there are {self.num_blocks}")
            self._hash(num_blocks)
        return self._digests[:num_blocks]

    def _hash(self, upto: int) -> None:
        """Hash the blocks from `_num_hashed` to `upto`."""
        first, keys = self._num_hashed, self.hasher.keys(upto)
        # Ids as unsigned integers plus one: 1 .. 2**32. So every token changes the sum, whatever its id.
        terms = self.blocks(upto)[first:].view(np.uint32).astype(np.uint64)
        terms += _ONE
        sums = np.einsum("bj,blj->bl", terms, keys[first:upto])
        sums[0] += self._sums
        np.add.accumulate(sums, axis=0, out=sums)
        if upto > len(self._digests):
            self._digests = _with_room(self._digests, first, self.num_blocks)
        self._digests[first:upto] = self.hasher.digests(sums)
        self._num_hashed, self._sums = upto, sums[-1].copy()


class NullHasher(PrefixHasher):
    """Hashes nothing: each of its chains is one that stays empty. For a cache without prefixes."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._empty = _EmptyChain(self, (), None)

    def chain(self, tokens: Sequence[int] | Int32 = (), salt: bytes | None = None) -> Chain:
        return self._empty


class _EmptyChain(Chain):
    """A chain that keeps no tokens."""

    __slots__ = ()

    def append(self, tokens: Sequence[int] | Int32) -> None:
        """Does nothing."""


def _with_room(array: npt.NDArray[_Scalar], used: int, needed: int) -> npt.NDArray[_Scalar]:
    """A copy of the first `used` entries with room for `needed`, and for at least half as many again as before."""
    larger = np.empty((max(needed, len(array) * 3 // 2), *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger
