"""The index of the disk tier: which full blocks of tokens lie on disk, after which prefix, and in which place.

It is a prefix index (prefix_index.py) with places on disk instead of blocks: tokens, salts and parents are compared, and the
policy that evicts from memory evicts here. Each place has a record, which outlives the process (`record_type`). The hashes are
made with the key of the folder, and a salt is known by a slow keyed digest, so records name no salt. Reasons:
docs/decisions/0076-disk-tier.md.

    take                   written                  found
    free ─────────► findable, not whole ─────────► whole ─────────► read, compared with the record's check
      ▲                     │ failed                 │ evicted, or damaged
      └─────────────────────┴────────────────────────┘
"""

from __future__ import annotations

import hashlib
import math
import zlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .block_table import Int32
from .digest_table import leading
from .prefix_hash import Chain, PrefixHasher
from .prefix_index import PrefixIndex
from .retention import Retention
from .reuse_density import ReuseDensity

Records = npt.NDArray[Any]  # of the dtype `record_type`
Seconds = npt.NDArray[np.float64]
MOST_PLACES = 1 << 20  # the index takes some 200 bytes of memory for each
_SALT_ROUNDS = 20_000  # of PBKDF2: some 10 ms, so that salts cannot be guessed by the million
_MOST_SALTS = 4096  # remembered
_EVICTED_SHARE = 64  # of all places, this part is evicted at once
_LEAST_LATER_S = 1.0  # a hint that ends so little later is not written again


def record_type(block_size: int) -> np.dtype[Any]:
    """The dtype of the record of one block. `check` is over the bytes behind it, `data_check` over the block's bytes.

    `until`: the time to which a hint retains the block and those before it, in seconds of the system's clock; 0: no hint.
    """
    return np.dtype(
        [
            ("check", "<u4"), ("data_check", "<u4"), ("place", "<u4"), ("depth", "<u4"), ("digest", "<u8", (2,)),
            ("parent", "<u8", (2,)), ("salted", "<u4"), ("until", "<f8"), ("salt", "u1", (32,)),
            ("tokens", "<i4", (block_size,)),
        ]
    )  # fmt: skip


def seal(records: Records) -> Records:
    """Set the checks of `records`, and return them."""
    for record in records:
        record["check"] = zlib.crc32(record.tobytes()[4:])
    return records


def sound(records: Records) -> Records:
    """Those of `records` that are as they were written."""
    size = records.dtype.itemsize
    raw = memoryview(records.tobytes())
    checks = [zlib.crc32(raw[at + 4 : at + size]) for at in range(0, len(raw), size)]
    found: Records = records[records["check"] == np.array(checks, np.uint32)]
    return found


class PrefixRead(Protocol):
    """Blocks of a sequence that are being read from disk."""

    @property
    def chain(self) -> Chain:
        """The sequence's tokens."""
        ...

    @property
    def first(self) -> int:
        """The first of the blocks."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether all is read that will be."""
        ...

    @property
    def seconds(self) -> float:
        """That it took, without the time in which others were read."""
        ...

    @property
    def why(self) -> str:
        """Why not all was read; empty if all was."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until it is over, at most so long."""
        ...

    def stop(self) -> None:
        """End it soon: its blocks are not needed. No effect once it is over."""
        ...


class KeptPrefixes(Protocol):
    """The disk tier, as the scheduler and the cache know it."""

    def begin(self, chain: Chain, num_found: int, most_tokens: int, tokens_per_s: float) -> PrefixRead | None:
        """Begin to read the blocks of `chain` behind its first `num_found` tokens, up to `most_tokens`.

        None if there are none; a read of none if computing them, `tokens_per_s`, takes less time.
        """
        ...

    def finish(self, read: Any) -> npt.NDArray[np.uint8]:
        """End `read`. Returns the bytes of its first blocks [n, payload_bytes], as many as were read."""
        ...

    def committed(self, chain: Chain, num_blocks: int, retention: Retention | None = None) -> None:
        """The first `num_blocks` blocks of `chain` are findable in memory now; `retention`: a hint for them."""
        ...

    def clear(self) -> None:
        """Forget all blocks."""
        ...


class DiskIndex:
    """The blocks in the places `0 .. num_places - 1` of a disk tier, under the folder's `key`.

    The engine's thread alone changes it. The one that writes the files reads `live_records` and `unsettled` meanwhile.
    """

    def __init__(self, block_size: int, num_places: int, key: bytes) -> None:
        if num_places < 1:
            raise ValueError(f"a disk tier has 1 place or more, got {num_places}")
        self.num_places = num_places
        self.records: Records = np.zeros(num_places, record_type(block_size))  # by place; of free places undefined
        self.whole = np.zeros(num_places, np.bool_)
        self._key = key
        self._index = PrefixIndex(PrefixHasher(block_size, key), num_places, ReuseDensity)
        self._free = np.arange(num_places - 1, -1, -1, dtype=np.int32)  # descending: the lowest places are taken first
        self._salts: dict[bytes, bytes] = {}

    @property
    def num_used(self) -> int:
        """Places that hold a block, or are about to."""
        return self.num_places - len(self._free)

    @property
    def num_retained(self) -> int:
        """Blocks that hints retain."""
        return self._index.retained.num_nodes

    def chain(self, tokens: Int32, salt: bytes | None) -> Chain:
        """The chain of `tokens` under `salt`, for the calls of this index."""
        return self._index.hasher.chain(tokens, None if salt is None else self._digest_of(salt))

    def find(self, chain: Chain, num_blocks: int) -> Int32:
        """The places of the first `num_blocks` blocks of `chain`, as many as are whole."""
        places = self._places(chain, num_blocks)
        return places[: leading(self.whole[places])]

    def num_known(self, chain: Chain, num_blocks: int) -> int:
        """How many of the first `num_blocks` blocks of `chain` are here, whole or about to be written."""
        return len(self._places(chain, num_blocks))

    def used(self, chain: Chain, num_blocks: int) -> None:
        """Count a use of the first `num_blocks` blocks of `chain`, as far as they are here."""
        hit = self._index.lookup(chain, num_blocks * self._index.hasher.block_size)
        if len(hit.blocks):
            self._index.accept(hit)
            self._index.mark_used(hit.blocks)
            self._index.mark_evictable(hit.blocks)

    def take(self, chain: Chain, num_blocks: int) -> Records:
        """Give places to the blocks of `chain` up to `num_blocks` that are not here, as many as there is room for.

        Less valuable blocks are evicted for them. Returns the records of the new ones, in order, with no check of their bytes.
        """
        known = self._places(chain, num_blocks)
        self._index.mark_used(known)
        lacking = num_blocks - len(known)
        if lacking > len(self._free):
            victims = self._index.victims(max(lacking - len(self._free), self.num_places // _EVICTED_SHARE))
            self._evict(victims)
        places = self._free[len(self._free) - min(lacking, len(self._free)) :][::-1].copy()
        self._free = self._free[: len(self._free) - len(places)]
        self._register(chain, known, places)
        self.whole[places] = False
        self.records[places] = self._records_of(chain, len(known), places)
        return self.records[places]

    def written(self, records: Records) -> None:
        """The blocks of `records` are whole on disk, unless other blocks have their places by now."""
        records = records[self._have_places(records)]
        self.records[records["place"]] = records
        self.whole[records["place"]] = True

    def unsettled(self, records: Records) -> Records:
        """Those of `records` that have their places, and are not told to be `written` yet."""
        found: Records = records[self._have_places(records) & ~self.whole[records["place"]]]
        return found

    def forget(self, records: Records) -> None:
        """Forget the blocks of `records`, and what lies behind them, unless other blocks have their places by now."""
        for record in records:
            at = record["place"]
            if self._index.findable(np.array([at]))[0] and (self.records["digest"][at] == record["digest"]).all():
                self._evict(np.array([at], np.int32))

    def retain(self, chain: Chain, num_blocks: int, retention: Retention, now: float) -> Records:
        """Retain the first `num_blocks` blocks of `chain` as a hint says. `now`: see `record_type`, also in other calls.

        Returns what is to be written so that a later process knows: a record of the last whole one of these blocks, or none if
        one that says so is written. Those of blocks that are not whole yet have it.
        """
        if retention.num_tokens is not None:
            num_blocks = min(num_blocks, retention.num_tokens // self._index.hasher.block_size)
        places = self._places(chain, num_blocks)
        if not len(places):
            return self.records[:0]
        self._index.mark_used(places)
        self._index.retain(places, retention, now)
        self._index.mark_evictable(places)
        until, whole = self._index.retained_until(places), self.whole[places]
        self.records["until"][places[~whole]] = until[~whole]
        last = places[whole & (until > 0)][-1:]
        last = last[self._index.retained_until(last) > self.records["until"][last] + _LEAST_LATER_S]
        self.records["until"][last] = self._index.retained_until(last)
        self.records[last] = seal(self.records[last])
        return self.records[last]

    def expire(self, now: float) -> None:
        """End the hints that are over."""
        self._index.retained.expire(now)

    def clear(self) -> None:
        """Forget everything."""
        self._index.reset()
        self.whole[:] = False
        self._free = np.arange(self.num_places - 1, -1, -1, dtype=np.int32)

    def load(self, records: Records, now: float = math.inf) -> None:
        """Take in `records` of an earlier process, in the order in which they were written, into the empty index.

        Of several records of a place or a block the last one counts. A block is taken in if all blocks before it are there and
        its hash is that of their tokens. Hints that end after `now` hold on.
        """
        records = sound(records)
        records = records[records["place"] < self.num_places]
        latest = {place: number for number, place in enumerate(records["place"].tolist())}
        numbers = sorted(latest.values(), key=lambda number: int(records["depth"][number]))
        known: dict[bytes, int] = {}
        parents: dict[int, int] = {}
        for number in numbers:
            record = records[number]
            parent = known.get(record["parent"].tobytes())
            if record["depth"] and (parent is None or records["depth"][parent] + 1 != record["depth"]):
                continue
            known[record["digest"].tobytes()] = number
            if record["depth"]:
                assert parent is not None
                parents[number] = parent
        leaves = sorted(set(known.values()) - set(parents.values()))
        for leaf in leaves:
            path = [leaf]
            while path[-1] in parents:
                path.append(parents[path[-1]])
            self._load_path(records[path[::-1]], now)
        used = self._index.findable(np.arange(self.num_places))
        self.whole[:] = used
        self._free = np.flatnonzero(~used)[::-1].astype(np.int32)

    def live_records(self) -> Records:
        """The records of all whole blocks, ancestors first, with the hints of now."""
        records = self.records[self.whole]
        until = self._index.retained_until(records["place"])
        later = until > records["until"]
        records["until"][later] = until[later]
        records[later] = seal(records[later])
        return records[np.argsort(records["depth"], kind="stable")]

    def check_invariants(self) -> None:
        """Check that each place is free or findable, and each record that of its block. Raises AssertionError."""
        self._index.check_invariants()
        used = self._index.findable(np.arange(self.num_places))
        assert sorted(self._free.tolist()) == np.flatnonzero(~used).tolist(), "a place is lost, or twice in use"
        assert not self.whole[~used].any(), "a free place is whole"
        assert (self.records["place"][used] == np.flatnonzero(used)).all(), "a record names another place"

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _have_places(self, records: Records) -> npt.NDArray[np.bool_]:
        """Whether the blocks of `records` still have their places."""
        at = records["place"]
        same: npt.NDArray[np.bool_] = (self.records["digest"][at] == records["digest"]).all(axis=1)
        return same & self._index.findable(at)

    def _places(self, chain: Chain, num_blocks: int) -> Int32:
        hit = self._index.lookup(chain, num_blocks * self._index.hasher.block_size)
        return hit.blocks.astype(np.int32)

    def _register(self, chain: Chain, known: Int32, places: Int32, until: Seconds | None = None, now: float = 0.0) -> None:
        """Register `places` behind the `known` ones, which are marked as used; `until`: what hints say of each of both."""
        blocks = np.concatenate((known, places))
        self._index.register(chain, blocks, len(known))
        for end in () if until is None else np.unique(until[until > now]):
            self._index.retain(blocks[: np.count_nonzero(until >= end)], Retention(float(end) - now), now)
        self._index.mark_evictable(blocks)

    def _records_of(self, chain: Chain, first: int, places: Int32) -> Records:
        upto = first + len(places)
        records = np.zeros(len(places), self.records.dtype)
        digests = chain.digests(upto)
        records["place"], records["depth"] = places, np.arange(first, upto)
        records["digest"] = digests[first:]
        records["parent"][max(0, 1 - first) :] = digests[max(0, first - 1) : upto - 1]
        records["tokens"] = chain.blocks(upto)[first:]
        if chain.salt is not None:
            records["salted"] = 1
            records["salt"] = np.frombuffer(chain.salt, np.uint8)
        return records

    def _load_path(self, path: Records, now: float) -> None:
        """Register the blocks of `path`, from a root on, as far as they are true."""
        salt = path[0]["salt"].tobytes() if path[0]["salted"] else None
        chain = self._index.hasher.chain(path["tokens"].ravel(), salt)
        path = path[: leading((chain.digests(len(path)) == path["digest"]).all(axis=1))]
        known = self._places(chain, len(path))
        self._index.mark_used(known)
        fresh = path[len(known) :]
        until = np.maximum.accumulate(path["until"][::-1])[::-1]  # an ancestor is retained as long as what is behind it
        self._register(chain, known, fresh["place"].astype(np.int32), until, now)
        self.records[fresh["place"]] = fresh

    def _evict(self, places: Int32) -> None:
        freed = self._index.evict(places).blocks
        self.whole[freed] = False
        self._free = np.sort(np.concatenate((self._free, freed.astype(np.int32))))[::-1]

    def _digest_of(self, salt: bytes) -> bytes:
        """The keyed digest by which a salt is known here."""
        digest = self._salts.get(salt)
        if digest is None:
            if len(self._salts) >= _MOST_SALTS:
                self._salts.clear()
            digest = hashlib.pbkdf2_hmac("sha256", salt, self._key, _SALT_ROUNDS)
            self._salts[salt] = digest
        return digest
