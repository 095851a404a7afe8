"""The index of the disk tier: which full blocks of tokens lie on disk, after which prefix, and in which place.

It is a prefix index (prefix_index.py) with places on disk instead of blocks: tokens, salts and parents are compared, and the
policy that evicts from memory evicts here. Each place has a record, which outlives the process (`record_type`). The hashes are
made with the key of the folder, and a salt is known by a slow keyed digest, so records name no salt. Reasons:
docs/decisions/0076-disk-tier.md.

A place holds what one block table has of a block of tokens. That of the index's first table is the *block*, and is in the tree.
What the tables of another group have, those of a window or of a state, is its *unit* there: a place for each table, written,
found and evicted as one, if the memory had it. A hit ends where every group can go on, as in memory (window_blocks.py). Where
no layer reads all tokens, blocks have no bytes: their places are numbers behind those of the files, and are assigned anew in
each process.

A state is *superseded* once a later one is here behind it, and no other prefix parts there. These are evicted first.

    take                   written                  found
    free ─────────► findable, not whole ─────────► whole ─────────► read, compared with the record's check
      ▲                     │ failed                 │ evicted, or damaged
      └─────────────────────┴────────────────────────┘
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .block_table import Index, Int32
from .digest_table import leading
from .layer_groups import LayerGroup
from .node_places import Ids, as_index
from .prefix_hash import Chain, PrefixHasher
from .prefix_index import PrefixIndex
from .prefix_tree import NONE
from .retention import Retention
from .reuse_density import ReuseDensity
from .window_blocks import first_block_read, num_readable

Records = npt.NDArray[Any]  # of the dtype `record_type`
Seconds = npt.NDArray[np.float64]
MOST_PLACES = 1 << 20  # the index takes some 200 bytes of memory for each
_SALT_ROUNDS = 20_000  # of PBKDF2: some 10 ms, so that salts cannot be guessed by the million
_MOST_SALTS = 4096  # remembered
_EVICTED_SHARE = 64  # of all places, this part is evicted at once
_STATE_SHARE = 8  # a state is written if it spares blocks of at least this part of its size
_LEAST_LATER_S = 1.0  # a hint that ends so little later is not written again


def record_type(block_size: int) -> np.dtype[Any]:
    """The dtype of the record of one place. `check` is over the bytes behind it, `data_check` over the place's bytes.

    `table`: 0 for the block itself, 1 and more for the tables of the other groups, in their order. `until`: the time to which a
    hint retains the block and those before it, in seconds of the system's clock; 0: no hint.
    """
    return np.dtype(
        [
            ("check", "<u4"), ("data_check", "<u4"), ("place", "<u4"), ("depth", "<u4"), ("digest", "<u8", (2,)),
            ("parent", "<u8", (2,)), ("salted", "<u4"), ("table", "<u4"), ("until", "<f8"), ("salt", "u1", (32,)),
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


def joined(parts: Sequence[Records]) -> Records:
    """All of `parts`, of which there is one at least, in one array."""
    filled = [part for part in parts if len(part)]
    return filled[0] if len(filled) == 1 else np.concatenate(parts)  # numpy compares the fields of both for 30 us


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
    def upto(self) -> int:
        """The end of the blocks, if all are read."""
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
        """End `read`. Returns the bytes [n, payload_bytes] of its blocks, as many of the first as were read; with other groups
        of all, and behind them those of each group (`DiskIndex.to_read`), or nothing.
        """
        ...

    def committed(self, chain: Chain, num_blocks: int, retention: Retention | None = None) -> None:
        """The first `num_blocks` blocks of `chain` are findable in memory now; `retention`: a hint for them."""
        ...

    def clear(self) -> None:
        """Forget all blocks."""
        ...


class DiskIndex:
    """The blocks in the places `0 .. num_places - 1` of a disk tier, under the folder's `key`; `groups` are the other groups of
    layers. With `num_nodes` these places are for units alone, and there are so many blocks without bytes.

    The engine's thread alone changes it. The one that writes the files reads `live_records` and `unsettled` meanwhile.
    """

    def __init__(
        self, block_size: int, num_places: int, key: bytes, groups: Sequence[LayerGroup] = (), num_nodes: int = 0
    ) -> None:
        if num_places < 1:
            raise ValueError(f"a disk tier has 1 place or more, got {num_places}")
        self.num_places, self.blocks_have_bytes = num_places, not num_nodes
        capacity = num_places + num_nodes
        self.records: Records = np.zeros(capacity, record_type(block_size))  # by place; of free places undefined
        self.whole = np.zeros(capacity, np.bool_)
        self._key, self._block_size = key, block_size
        self._index = PrefixIndex(PrefixHasher(block_size, key), capacity, ReuseDensity)
        # Descending, as the lowest are taken first: places in files, and, where blocks have no bytes, those of blocks.
        self._free = _unused(np.zeros(capacity, np.bool_), num_places)
        self._salts: dict[bytes, bytes] = {}
        self.groups = tuple(groups)
        self._first_tables = 1 + np.cumsum([0, *(group.num_tables for group in groups)])  # of each group in records
        # Of each group and block: the first place of its unit, or NONE. Of each unit, by that: all its places.
        self._heads = np.full((len(groups), capacity), NONE, np.int32)
        self._units: dict[int, Int32] = {}
        self._owners = np.full(capacity, NONE, np.int32)  # of the places of units: the block they belong to
        self._superseded: dict[int, int] = {}  # first places of units of states, oldest first, and their group's number

    @property
    def num_used(self) -> int:
        """Places in files that hold a block, or are about to."""
        return self.num_places - len(self._free[0])

    @property
    def num_retained(self) -> int:
        """Blocks that hints retain."""
        return self._index.retained.num_nodes

    def have_bytes(self, records: Records) -> npt.NDArray[np.bool_]:
        """Which of `records` have places in files."""
        there: npt.NDArray[np.bool_] = records["place"] < self.num_places
        return there

    def chain(self, tokens: Int32, salt: bytes | None) -> Chain:
        """The chain of `tokens` under `salt`, for the calls of this index."""
        return self._index.hasher.chain(tokens, None if salt is None else self._digest_of(salt))

    def below(self, chain: Chain, num_tokens: int) -> Chain:
        """A chain of the first `num_tokens` tokens of `chain`, or more, for the calls of this index. `chain` keeps it, so that
        each token is hashed once.
        """
        own = chain.below
        if own is None or own.hasher is not self._index.hasher:
            own = chain.below = self.chain(chain.tokens[:num_tokens].copy(), chain.salt)
        own.append(chain.tokens[own.num_tokens : num_tokens])
        return own

    def find(self, chain: Chain, num_blocks: int) -> Int32:
        """The places of the first `num_blocks` blocks of `chain`, as many as are whole and every group can go on behind."""
        places = self._places(chain, num_blocks)
        if not len(places):
            return places
        places = places[: leading(self.whole[places])]
        heads = self._heads[:, places]
        have = zip(self.groups, (heads != NONE) & self.whole[heads], strict=True)
        return places[: num_readable(list(have), self._block_size, len(places))]

    def to_read(self, chain: Chain, first: int, num_blocks: int, most: int) -> tuple[int, Int32]:
        """What a request reads that has the first `first` blocks of `chain`, so as to have more, up to `num_blocks`: the blocks
        that it has then, and at most `most` places: of the blocks, then those of each group, table by table.
        """
        found = self.find(chain, min(num_blocks, first + most))
        while len(found) > first:
            places = [found[first:]] * self.blocks_have_bytes
            for number, begin in enumerate(self.begins(first, len(found))):
                units = [self._units[head] for head in self._heads[number, found[begin:]].tolist()]
                places.append(np.array(units, np.int32).T.ravel())
            if sum(map(len, places)) <= most:
                return len(found), np.concatenate(places)
            found = self.find(chain, len(found) - 1)
        return first, found[:0]

    def begins(self, first: int, upto: int) -> list[int]:
        """Of each other group the first block of which a request reads a unit that has `first` blocks, and then `upto`."""
        ends = np.array([upto])
        return [max(first, int(first_block_read(group, ends, self._block_size)[0])) for group in self.groups]

    def used(self, chain: Chain, num_blocks: int) -> None:
        """Count a use of the first `num_blocks` blocks of `chain`, as far as they are here."""
        hit = self._index.lookup(chain, num_blocks * self._index.hasher.block_size)
        if len(hit.blocks):
            self._index.accept(hit)
            self._index.mark_used(hit.blocks)
            self._index.mark_evictable(hit.blocks)
            for head in self._heads[:, hit.blocks[-1]].tolist():
                self._superseded.pop(head, None)  # until another state follows

    def take(self, chain: Chain, num_blocks: int, most: int = MOST_PLACES) -> Records:
        """Give places to the blocks of `chain` up to `num_blocks` that are not here, at most to `most`, and as many as there is
        room for.

        Less valuable blocks are evicted for them. Returns the records of the new ones, in order, with no check of their bytes.
        """
        known = self._places(chain, num_blocks)
        lacking = min(most, num_blocks - len(known))
        if lacking < 1:
            return self.records[:0]
        self._index.mark_used(known)
        self._make_room(lacking, not self.blocks_have_bytes)
        places = self._take_free(lacking, not self.blocks_have_bytes)
        self._register(chain, known, places)
        self.whole[places] = False
        self.records[places] = self._records_of(chain, len(known), places)
        return self.records[places]

    def take_units(self, chain: Chain, number: int, depths: Index) -> tuple[Records, int]:
        """Give places to the units of group `number` at the blocks `depths` of `chain`, which are here, as many of the first as
        there is room for. Returns their records [units * tables], table by table, and how many units they are.
        """
        path = self._places(chain, int(depths[-1]) + 1 if len(depths) else 0)
        depths = depths[depths < len(path)]
        tables = self.groups[number].num_tables
        self._index.mark_used(path)
        self._make_room(tables * len(depths))
        self._index.mark_evictable(path)
        depths = depths[: len(self._free[0]) // tables]
        places = self._take_free(tables * len(depths)).reshape(tables, -1)
        owners = path[depths]
        self._add_units(number, owners, places)
        for depth in depths.tolist() if self.groups[number].is_state else ():
            self._supersede(number, path[:depth])
        records = np.concatenate([self.records[owners]] * tables)
        records["place"], records["until"] = places.ravel(), 0.0
        records["table"] = np.repeat(np.arange(tables) + self._first_tables[number], len(depths))
        self.whole[places] = False
        self.records[records["place"]] = records
        return records, len(depths)

    def lack_units(self, chain: Chain, number: int, depths: Index) -> npt.NDArray[np.bool_]:
        """Which of the blocks `depths` of `chain` are here and lack a unit of group `number`.

        A state that spares few blocks of tokens behind an earlier one is not lacking, for states are large, nor is one that
        would be superseded.
        """
        path = self._places(chain, int(depths[-1]) + 1 if len(depths) else 0)
        have = self._heads[number, path] != NONE
        depths, lacking = depths[depths < len(path)], np.zeros(len(depths), np.bool_)
        if not self.groups[number].is_state:
            lacking[: len(depths)] = ~have[depths]
            return lacking
        least, last = self.groups[number].num_tables // _STATE_SHARE, NONE
        newest = path[depths[-1]] if len(depths) else NONE
        for i, depth in enumerate(depths.tolist()):
            before = np.flatnonzero(have[:depth])
            last = max(last, int(before[-1]) if len(before) else NONE)
            lacking[i] = not have[depth] and depth - last >= least and not self._is_superseded(number, path[depth], newest)
            last = depth if lacking[i] else last
        return lacking

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
            at = int(record["place"])
            if not self._have_places(record[None])[0]:
                continue
            if record["table"]:
                number = int(np.searchsorted(self._first_tables, record["table"], "right")) - 1
                self._free_places(self._remove_unit(number, int(self._owners[at])))
            else:
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
        self._heads[:] = self._owners[:] = NONE
        self._units.clear()
        self._superseded.clear()
        self._free = _unused(self.whole, self.num_places)

    def load(self, records: Records, now: float = math.inf) -> None:
        """Take in `records` of an earlier process, in the order in which they were written, into the empty index.

        Of several records of a place or a block the last one counts. A block is taken in if all blocks before it are there and
        its hash is that of their tokens. Hints that end after `now` hold on.
        """
        records = sound(records)
        is_block = records["table"] == 0
        nodes = records[is_block & (not self.blocks_have_bytes)]
        records = records[self.have_bytes(records) & (self.blocks_have_bytes | ~is_block)]
        latest = {place: number for number, place in enumerate(records["place"].tolist())}
        records = records[sorted(latest.values())]
        units, records = records[records["table"] > 0], np.concatenate((nodes, records[records["table"] == 0]))
        numbers = np.argsort(records["depth"], kind="stable").tolist()
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
        self._load_units(units)
        self.whole[:] = self._used(np.arange(len(self.whole)))
        self._free = _unused(self.whole, self.num_places)

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
        used = self._used(np.arange(len(self.whole)))
        owned = np.flatnonzero(self._owners != NONE)
        assert not self._index.findable(owned).any(), "a place is of a block and of a unit"
        assert self._index.findable(self._owners[owned]).all(), "a unit of a block that is not there"
        heads = self._heads[self._heads != NONE]
        assert sorted(heads.tolist()) == sorted(self._units), "a unit is lost"
        assert sorted(place for unit in self._units.values() for place in unit.tolist()) == owned.tolist(), (
            "a unit's place is lost"
        )
        free = _unused(used, self.num_places)
        assert list(map(np.ndarray.tolist, self._free)) == list(map(np.ndarray.tolist, free)), (
            "a place is lost, or twice in use"
        )
        blocks = np.flatnonzero(self._index.findable(np.arange(len(used))))
        assert (self.blocks_have_bytes | (blocks >= self.num_places)).all(), "a block that has no bytes has a place in a file"
        assert (owned < self.num_places).all(), "a unit has no place in a file"
        assert all(self.groups[number].is_state and head in self._units for head, number in self._superseded.items())
        assert not self.whole[~used].any(), "a free place is whole"
        assert (self.records["place"][used] == np.flatnonzero(used)).all(), "a record names another place"

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _have_places(self, records: Records) -> npt.NDArray[np.bool_]:
        """Whether the blocks of `records` still have their places."""
        at = records["place"]
        same: npt.NDArray[np.bool_] = (self.records["digest"][at] == records["digest"]).all(axis=1)
        same &= self.records["table"][at] == records["table"]
        return same & self._used(at)

    def _used(self, places: Ids) -> npt.NDArray[np.bool_]:
        """Which of `places` hold a block, or a part of a unit."""
        used: npt.NDArray[np.bool_] = self._index.findable(places) | (self._owners[as_index(places)] != NONE)
        return used

    def _take_free(self, num: int, kind: int = 0) -> Int32:
        """The lowest `num` free places of `_free[kind]`, or as many as there are; they are not free then."""
        free = self._free[kind]
        left = max(0, len(free) - num)
        self._free[kind] = free[:left]
        return free[left:][::-1].copy()

    def _make_room(self, num: int, kind: int = 0) -> None:
        """Evict what is worth least until `num` places of `_free[kind]` are free, or nothing is left that may go."""
        if len(self._free[kind]) >= num:
            return
        wanted = max(num, len(self._free[kind]) + self.num_places // _EVICTED_SHARE)
        passed: list[Int32] = []
        while self._superseded and kind == 0 and wanted > len(self._free[0]) + sum(map(len, passed)):
            head = next(iter(self._superseded))
            number, owner = self._superseded.pop(head), int(self._owners[head])
            if self._is_superseded(number, owner) and not self._index.retained_until(np.array([owner]))[0]:
                passed.append(self._remove_unit(number, owner))
        if passed:
            self._free_places(np.concatenate(passed))
        # Where blocks have no bytes, what is wanted are the units of some of them.
        each = 1 if self.blocks_have_bytes or kind else max(group.num_tables for group in self.groups)
        while (lacking := wanted - len(self._free[kind])) > 0 and len(victims := self._index.victims(-(-lacking // each))):
            self._evict(victims)

    def _is_superseded(self, number: int, block: int, later: int = NONE) -> bool:
        """Whether a state of group `number` at `block` is superseded; `later`: a block that has one, or is to have it."""
        behind = self._index.unbranched_behind(block)
        return bool(((self._heads[number, behind] != NONE) | (behind == later)).any())

    def _supersede(self, number: int, before: Int32) -> None:
        """There is a state of group `number` behind the blocks in `before`, a chain from its root."""
        heads = self._heads[number, before]
        for head in heads[heads != NONE][-1:].tolist():
            self._superseded.setdefault(head, number)

    def _add_units(self, number: int, owners: Int32, places: Int32) -> None:
        """Let `places` [tables, n] be the units of group `number` at the blocks in `owners`."""
        self._heads[number, owners] = places[0]
        self._owners[places] = owners
        self._units.update(zip(places[0].tolist(), places.T.copy(), strict=True))

    def _remove_unit(self, number: int, owner: int) -> Int32:
        """Take the unit of group `number` from the block in `owner`, which has one. Returns its places."""
        head = int(self._heads[number, owner])
        places = self._units.pop(head)
        self._superseded.pop(head, None)
        self._heads[number, owner] = self._owners[places] = NONE
        return places

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
        fresh = path[len(known) :].copy()
        if not self.blocks_have_bytes:
            fresh = fresh[: len(self._free[1])]
            fresh["place"] = self._take_free(len(fresh), 1)
            path = np.concatenate((path[: len(known)], seal(fresh)))
        until = np.maximum.accumulate(path["until"][::-1])[::-1]  # an ancestor is retained as long as what is behind it
        self._register(chain, known, fresh["place"].astype(np.int32), until, now)
        self.records[fresh["place"]] = fresh

    def _load_units(self, records: Records) -> None:
        """Take in the units with a record for each table, of blocks that are here and have none."""
        used = np.flatnonzero(self._index.findable(np.arange(len(self.whole))))
        owners = {self.records["digest"][at].tobytes(): at for at in used.tolist()}
        parts: dict[tuple[int, int], dict[int, int]] = {}
        for at, record in enumerate(records):
            number = int(np.searchsorted(self._first_tables, record["table"], "right")) - 1
            owner = owners.get(record["digest"].tobytes())
            if owner is None or number >= len(self.groups) or (record["tokens"] != self.records["tokens"][owner]).any():
                continue
            parts.setdefault((number, owner), {})[int(record["table"])] = at
        for (number, owner), by_table in parts.items():
            if len(by_table) == self.groups[number].num_tables:
                unit = records[[by_table[table] for table in sorted(by_table)]]
                self._add_units(number, np.array([owner], np.int32), unit["place"].astype(np.int32)[:, None])
                self.records[unit["place"]] = unit
        for number, owner in parts:
            if self.groups[number].is_state and self._heads[number, owner] != NONE:
                self._supersede(number, self._index.path_to(owner)[:-1])

    def _evict(self, places: Int32) -> None:
        freed = self._index.evict(places).blocks.astype(np.int32)
        units = [self._remove_unit(number, owner) for number, owner in self._with_units(freed)]
        self._free_places(np.concatenate((freed, *units)))

    def _with_units(self, owners: Int32) -> list[tuple[int, int]]:
        """Each group, and each of the blocks in `owners` that has a unit of it."""
        numbers, at = np.nonzero(self._heads[:, owners] != NONE)
        return list(zip(numbers.tolist(), owners[at].tolist(), strict=True))

    def _free_places(self, freed: Int32) -> None:
        self.whole[freed] = False
        is_block = freed >= self.num_places
        for kind, of_kind in enumerate((freed[~is_block], freed[is_block])):
            if len(of_kind):
                self._free[kind] = np.sort(np.concatenate((self._free[kind], of_kind.astype(np.int32))))[::-1]

    def _digest_of(self, salt: bytes) -> bytes:
        """The keyed digest by which a salt is known here."""
        digest = self._salts.get(salt)
        if digest is None:
            if len(self._salts) >= _MOST_SALTS:
                self._salts.clear()
            digest = hashlib.pbkdf2_hmac("sha256", salt, self._key, _SALT_ROUNDS)
            self._salts[salt] = digest
        return digest


def _unused(used: npt.NDArray[np.bool_], num_places: int) -> list[Int32]:
    """The places in files that are not `used`, and the others, both descending."""
    free = np.flatnonzero(~used)[::-1].astype(np.int32)
    return [free[free < num_places], free[free >= num_places]]
