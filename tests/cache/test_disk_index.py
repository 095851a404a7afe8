"""The disk tier's index: against a dict, and records that were damaged, cut, repeated or mixed up."""

from __future__ import annotations

import numpy as np
import pytest

from pagetide.cache.disk_index import DiskIndex, Records, seal, sound
from pagetide.cache.layer_groups import LayerGroup, state_group
from pagetide.cache.prefix_hash import PrefixHasher
from pagetide.cache.retention import Retention

SIZE, KEY = 4, b"k" * 32


def tokens(*blocks: int) -> np.ndarray:
    """Blocks of tokens, each named by a number."""
    return np.repeat(np.array(blocks, np.int32), SIZE)


def put(index: DiskIndex, *blocks: int, salt: bytes | None = None) -> Records:
    """Write a chain's blocks, the bytes of which are named by a check. Returns the new records."""
    records = index.take(index.chain(tokens(*blocks), salt), len(blocks))
    records["data_check"] = 7 + records["place"]
    index.written(seal(records))
    return records


def found(index: DiskIndex, *blocks: int, salt: bytes | None = None) -> list[int]:
    return index.find(index.chain(tokens(*blocks), salt), len(blocks)).tolist()


def test_it_finds_what_a_dict_of_prefixes_finds_and_evicts_to_stay_within_its_places() -> None:
    rng = np.random.default_rng(5)
    index, known = DiskIndex(SIZE, 24, KEY), {}
    for turn in range(100):
        path, salt = tuple(rng.integers(0, 3, rng.integers(1, 7)).tolist()), (None, b"a", b"b")[rng.integers(3)]
        new = put(index, *path, salt=salt)
        for record in new:
            known[int(record["place"])] = salt, path[: record["depth"] + 1]
        index.check_invariants()
        places = found(index, *path, salt=salt)
        assert [known[place] for place in places] == [(salt, path[: i + 1]) for i in range(len(path))]
        index.used(index.chain(tokens(*path), salt), 2)
        if turn % 10:
            continue
        again = DiskIndex(SIZE, 24, KEY)
        again.load(index.live_records())
        again.check_invariants()
        assert found(again, *path, salt=salt) == places
    assert index.num_used == 24
    assert len({known[place] for place in range(24)}) == 24


def test_of_groups_it_finds_what_lists_of_units_find_and_reads_what_was_written_there() -> None:
    """A window of 9 tokens in two tables, and states in three places, at random blocks of tokens, with bytes or without."""
    groups = (LayerGroup(2, window=9), state_group(3))
    for places, nodes in ((600, 0), (60, 0), (600, 400), (60, 400), (600, 30)):
        rng, index = np.random.default_rng(places), DiskIndex(SIZE, places, KEY, groups, nodes)
        at: dict[int, tuple[object, int]] = {}  # by place: the path to the block, and the table
        units: set[tuple[object, int]] = set()
        for turn in range(60):
            path = tuple(rng.integers(0, 3, rng.integers(1, 7)).tolist())
            put(index, *path)
            chain = index.chain(tokens(*path), None)
            for place, depth in zip(index.records["place"][index._places(chain, 9)].tolist(), range(9), strict=False):
                at[place] = path[: depth + 1], 0
            for number, group in enumerate(groups):
                depths = np.flatnonzero(rng.random(len(path)) < 0.4)
                depths = depths[index.lack_units(chain, number, depths)]
                records, num = index.take_units(chain, number, depths)
                assert len(records) == num * group.num_tables
                if turn % 9 == 8:
                    index.forget(records[:1])
                    records = index.unsettled(records)
                index.written(seal(records))
                for record in records:
                    at[int(record["place"])] = path[: record["depth"] + 1], int(record["table"])
                    units.add((path[: record["depth"] + 1], number))
            index.check_invariants()
            again = index
            if turn % 10 == 9:
                again = DiskIndex(SIZE, places, KEY, groups, nodes)
                again.load(index.live_records())
                again.check_invariants()
                chain = again.chain(tokens(*path), None)
                assert len(again.live_records()) == len(sound(again.live_records())) == len(index.live_records())
            have = [[(path[: i + 1], number) in units for i in range(len(path))] for number in (0, 1)]
            good = [
                n for n in range(len(path) + 1)
                if not n or (all(have[0][max(0, n * SIZE - 8) // SIZE : n]) and have[1][n - 1])
            ]  # fmt: skip
            assert len(again.find(chain, 9)) == good[-1] or places < 600 or 0 < nodes < 400
            first = int(rng.integers(0, 3))
            upto, to_read = again.to_read(chain, first, len(path), 25)
            wanted = [(path[: i + 1], 0) for i in range(first, upto)] if not nodes else []
            begins = [max(first, (upto * SIZE - 8) // SIZE), max(first, upto - 1)]
            for table, begin in zip((1, 2, 3, 4, 5), (begins[0],) * 2 + (begins[1],) * 3, strict=True):
                wanted += [(path[: i + 1], table) for i in range(begin, upto)]
            assert [at[place] for place in to_read.tolist()] == (wanted if upto > first else [])
            assert len(to_read) <= 25
        assert index.num_used <= places


def save(index: DiskIndex, *path: int) -> int:
    """Write a chain's blocks, and the state behind it if it is lacking. Returns the places that it takes."""
    put(index, *path)
    chain, depths = index.chain(tokens(*path), None), np.array([len(path) - 1])
    records, _ = index.take_units(chain, 0, depths[index.lack_units(chain, 0, depths)])
    index.written(seal(records))
    index.check_invariants()
    return len(records)


@pytest.mark.parametrize(("nodes", "retained", "restarts"), [(0, False, False), (0, True, True), (99, False, True)])
def test_states_that_later_ones_follow_go_first_and_are_not_written_again(nodes: int, retained: bool, restarts: bool) -> None:
    """But where prefixes part, and where a hint retains them."""
    index, ends = DiskIndex(SIZE, 40, KEY, (state_group(4),), nodes), (2, 4, 6, 8)
    for end in ends:
        assert save(index, *range(end)) == 4
    assert save(index, 0, 1, 2, 3, 90, 91) == 4
    if retained:
        index.retain(index.chain(tokens(0, 1), None), 2, Retention(1e4), 0.0)
    for number in range(100, 105):
        save(index, number) if nodes else put(index, number, -number)
    assert index.num_used == 40
    if restarts:
        records, index = index.live_records(), DiskIndex(SIZE, 40, KEY, (state_group(4),), nodes)
        index.load(records, 1.0)
        index.check_invariants()
    chain = index.chain(tokens(*range(8)), None)
    for number in (200, 201)[: 1 + (nodes > 0)]:
        assert save(index, number) == 4
    gone = {end for end in ends if len(index.find(chain, end)) < end}
    assert gone == {2, 6} if not retained else (2 not in gone and 6 in gone)
    assert not index.lack_units(chain, 0, np.array([1, 3, 5])).any()


def test_states_are_written_where_they_spare_an_eighth_of_their_size() -> None:
    index = DiskIndex(SIZE, 92, KEY, (state_group(24),))
    for end in (3, 6):  # prefixes part there
        put(index, *range(end), 50)
    put(index, *range(9))
    chain = index.chain(tokens(*range(9)), None)
    depths = np.array([1, 2, 4, 5, 8, 9])
    lacking = index.lack_units(chain, 0, depths)
    assert depths[lacking].tolist() == [2, 5, 8]
    records, num = index.take_units(chain, 0, depths[lacking])
    assert (num, len(records)) == (3, 72)
    index.written(seal(records))
    assert not index.lack_units(chain, 0, depths).any()
    assert len(index.find(chain, 8)) == 6
    index.forget(records[index.records["depth"][records["place"]] == 5][:1])
    assert depths[index.lack_units(chain, 0, depths)].tolist() == [5]
    assert (len(index.find(chain, 8)), len(index.find(chain, 9))) == (3, 9)


def test_a_block_counts_once_it_is_written_and_not_if_another_has_its_place() -> None:
    index = DiskIndex(SIZE, 2, KEY)
    first = index.take(index.chain(tokens(1, 2), None), 2)
    assert found(index, 1, 2) == []
    assert not len(index.take(index.chain(tokens(1, 2), None), 2))
    second = put(index, 3, 4)
    assert set(second["place"].tolist()) == {0, 1}
    index.written(first)
    index.forget(first)
    assert found(index, 3, 4) == second["place"].tolist()
    assert found(index, 1, 2) == []
    index.forget(second[:1])
    assert found(index, 3, 4) == []
    assert index.num_used == 0
    index.check_invariants()


def test_hints_keep_a_prefix_until_they_end() -> None:
    index = DiskIndex(SIZE, 4, KEY)
    put(index, 1, 2)
    index.retain(index.chain(tokens(1, 2), None), 2, Retention(10.0), 0.0)
    for number in range(3, 9):
        put(index, number, 100 + number)
        assert len(found(index, 1, 2)) == 2
    index.expire(11.0)
    for number in range(13, 19):
        put(index, number, 100 + number)
    assert found(index, 1, 2) == []


def test_hints_are_in_records_and_hold_until_their_time_in_the_next_process() -> None:
    index, retention = DiskIndex(SIZE, 16, KEY), Retention(100.0)
    log = [put(index, 1, 2, 3, 4), put(index, 1, 2, 5), put(index, 7, 8)]
    log.append(index.retain(index.chain(tokens(1, 2, 3, 4), None), 3, retention, 1000.0))
    assert (log[-1]["depth"].tolist(), log[-1]["until"].tolist()) == ([2], [1100.0]), "one record for all before it"
    assert not len(index.retain(index.chain(tokens(1, 2, 3), None), 3, retention, 1000.5)), "hardly later"
    chain = index.chain(tokens(9, 10), None)
    fresh = index.take(chain, 2)
    assert not len(index.retain(chain, 2, Retention(60.0), 1000.0)), "not written yet"
    fresh = index.records[fresh["place"]]
    assert fresh["until"].tolist() == [1060.0] * 2
    index.written(seal(fresh))
    log.append(fresh)
    for written in (np.concatenate(log), index.live_records()):
        assert len(sound(written)) == len(written)
        for now, held in ((1001.0, [1, 2, 3, 9, 10]), (1070.0, [1, 2, 3]), (1200.0, [])):
            again = DiskIndex(SIZE, 16, KEY)
            again.load(written, now)
            again.check_invariants()
            kept = again.records["place"][again._index.retained_until(np.arange(16)) > now]
            assert sorted(again.records["tokens"][kept, 0].tolist()) == held
            for number in range(20, 60):
                put(again, number, number)
            assert [len(found(again, *path)) for path in ((1, 2, 3), (9, 10))] == [held.count(3) * 3, held.count(9) * 2]


def test_records_in_any_state_load_as_true_prefixes_or_not_at_all() -> None:
    index = DiskIndex(SIZE, 8, KEY)
    written = np.concatenate([put(index, 1, 2, 3), put(index, 1, 4, salt=b"s")])
    rng = np.random.default_rng(3)
    size = written.dtype.itemsize
    for _ in range(25):
        raw = bytearray(written.tobytes())
        for at in rng.integers(0, len(raw), rng.integers(1, 4)).tolist():
            raw[at] ^= 1 << int(rng.integers(8))
        records = np.frombuffer(bytes(raw[: len(raw) - size * int(rng.integers(2))]), written.dtype)
        again = DiskIndex(SIZE, 8, KEY)
        again.load(np.concatenate([records, records[:1]]))
        again.check_invariants()
        for path, salt, places in (((1, 2, 3), None, written["place"][:3]), ((1, 4), b"s", written["place"][3:])):
            have = found(again, *path, salt=salt)
            assert have == places.tolist()[: len(have)]
    assert len(sound(written)) == 5


def test_what_a_chain_has_below_grows_with_it_and_is_of_one_index() -> None:
    index, other = DiskIndex(SIZE, 8, KEY), DiskIndex(SIZE, 8, KEY[::-1])
    chain = PrefixHasher(SIZE).chain(tokens(1, 2), b"salt")
    own = index.below(chain, SIZE)
    assert own.digests(1).tolist() == index.chain(tokens(1), b"salt").digests(1).tolist()
    chain.append(tokens(3))
    assert index.below(chain, 3 * SIZE) is own
    assert index.below(chain, SIZE) is own
    assert own.digests(3).tolist() == index.chain(tokens(1, 2, 3), b"salt").digests(3).tolist()
    assert other.below(chain, 2 * SIZE).digests(2).tolist() == other.chain(tokens(1, 2), b"salt").digests(2).tolist()


def test_a_later_record_of_a_place_replaces_the_earlier_and_what_was_behind_it() -> None:
    index, other = DiskIndex(SIZE, 8, KEY), DiskIndex(SIZE, 8, KEY)
    log = np.concatenate([put(index, 1, 2, 3), put(other, 9)])
    again = DiskIndex(SIZE, 8, KEY)
    again.load(log)
    assert (found(again, 9), found(again, 1, 2, 3)) == ([0], [])
    assert again.num_used == 1
    again.check_invariants()
    moved = put(again, 5)
    log = np.concatenate([put(other, 8), moved, moved])
    log["place"] = [0, 1, 0]
    again.clear()
    again.load(seal(log))
    assert (found(again, 5), again.num_used) == ([0], 1), "of two records of a block the later one counts"


def test_another_key_or_salt_finds_nothing_and_records_name_no_salt() -> None:
    index = DiskIndex(SIZE, 8, KEY)
    records = put(index, 1, 2, salt=b"a secret salt")
    assert b"a secret salt" not in records.tobytes()
    for salt in (None, b"", b"a secret sal", b"guess", records[0]["salt"].tobytes()):
        assert found(index, 1, 2, salt=salt) == []
    again = DiskIndex(SIZE, 8, b"o" * 32)
    again.load(records)
    assert again.num_used == 0
    index.clear()
    assert found(index, 1, 2, salt=b"a secret salt") == []
    index.check_invariants()
    with pytest.raises(ValueError, match="1 place"):
        DiskIndex(SIZE, 0, KEY)
