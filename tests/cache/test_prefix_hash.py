"""Prefix hashes: the formula, chaining, salts, secrets, and how seldom two of a million agree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetide.cache.prefix_hash import LANES, Digests, NullHasher, PrefixHasher

SECRET = b"a seed of these tests"


def digests(tokens: list[int], block_size: int = 4, salt: bytes | None = None, secret: bytes = SECRET) -> list[list[int]]:
    chain = PrefixHasher(block_size, secret).chain(tokens, salt)
    return chain.digests(chain.num_blocks).tolist()


def by_the_formula(hasher: PrefixHasher, tokens: list[int], salt: bytes | None) -> list[list[int]]:
    """What the module's docstring says, in Python's integers."""
    size = hasher.block_size
    keys = hasher.keys(len(tokens) // size + 1).tolist()
    sums = hasher.start(salt).tolist()
    found = []
    for i, token in enumerate(tokens):
        for lane in range(LANES):
            sums[lane] = (sums[lane] + keys[i // size][lane][i % size] * ((token & 0xFFFFFFFF) + 1)) % 2**64
        if i % size == size - 1:
            lanes = [value >> 32 for value in sums]
            found.append([lanes[0] | lanes[1] << 32, lanes[2] | lanes[3] << 32])
    return found


@given(
    tokens=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=60),
    cuts=st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=8),
    size=st.integers(1, 9),
    salt=st.none() | st.binary(max_size=4),
)
def test_pieces_give_what_the_formula_gives(
    tokens: list[int], cuts: list[tuple[int, bool]], size: int, salt: bytes | None
) -> None:
    hasher = PrefixHasher(size, SECRET)
    chain, given_ = hasher.chain((), salt), 0
    for length, asked in cuts:
        chain.append(np.array(tokens[given_ : given_ + length], np.int32))
        given_ = min(given_ + length, len(tokens))
        if asked:
            chain.digests((chain.num_blocks + 1) // 2)
    chain.append(tokens[given_:])
    assert chain.tokens.tolist() == tokens
    assert chain.num_blocks == len(tokens) // size
    assert chain.blocks(chain.num_blocks).ravel().tolist() == tokens[: chain.num_blocks * size]
    assert chain.digests(chain.num_blocks).tolist() == by_the_formula(hasher, tokens, salt)


def test_no_salt_is_like_none_that_can_be_given() -> None:
    salts = [None, b"", b"\0", b"common", b"salted", b"a", b"a\0", b"x" * 1000]
    assert len({tuple(digests([1, 2, 3, 4], salt=salt)[0]) for salt in salts}) == len(salts)
    assert digests([1, 2, 3, 4], salt=b"a") == digests([1, 2, 3, 4], salt=b"a")


def test_hashes_depend_on_the_secret_and_are_random_without_one() -> None:
    tokens = list(range(8))
    assert digests(tokens) == digests(tokens)
    assert digests(tokens) != digests(tokens, secret=b"another one")
    assert PrefixHasher(4).chain(tokens).digests(2).tolist() != PrefixHasher(4).chain(tokens).digests(2).tolist()


GOLDEN = [[3632346021909228736, 3970613251622502845], [10308988630900232186, 290841690112966993]]
GOLDEN_SALTED = [
    [8538383614715514303, 17353436722086821767],
    [3470761747115584189, 11036280317961968258],
    [4840021189163870923, 16998777125439383769],
]


def test_hashes_stay_what_they_are_in_every_process_and_version() -> None:
    assert digests([1, 2, 3, 4, 5, 6, 7, 8]) == GOLDEN
    long = PrefixHasher(4, SECRET).chain(range(20_000), b"salt").digests(5_000)
    assert long[[0, 1, 4_999]].tolist() == GOLDEN_SALTED


def test_keys_do_not_change_as_longer_sequences_come() -> None:
    hasher = PrefixHasher(24, SECRET)
    before = hasher.keys(3)[:3].copy()
    assert (hasher.keys(5_000)[:3] == before).all()
    assert hasher.keys(5_000).shape[1:] == (LANES, 24)
    assert (PrefixHasher(24, SECRET).keys(5_000)[:5_000] == hasher.keys(5_000)[:5_000]).all()


def one_block(tokens: np.ndarray) -> Digests:  # type: ignore[type-arg]
    """The digests of many prefixes of one block each, [n, block_size]."""
    hasher = PrefixHasher(tokens.shape[1], SECRET)
    return hasher.digests((tokens.astype(np.uint64) + np.uint64(1)) @ hasher.keys(1)[0].T + hasher.start(None))


def test_the_short_way_of_the_next_test_is_the_chains() -> None:
    tokens = np.random.default_rng(0).integers(0, 32_000, (50, 16))
    assert one_block(tokens).tolist() == [digests(row, 16)[0] for row in tokens.tolist()]


@pytest.mark.stress
def test_of_a_million_prefixes_no_two_agree_and_lanes_agree_by_chance() -> None:
    size, bits = 16, np.arange(16)
    every = np.arange(1 << 16)[:, None]
    one_hot = np.eye(size, dtype=np.int64)
    families = [
        every >> bits & 1,  # all patterns of two tokens
        (every >> bits & 1) * (2**31 - 1),  # far apart
        (every >> bits & 1) * 2**16 + 7,
        (one_hot[:, None] * np.arange(1, 8001)[None, :, None]).reshape(-1, size),  # one token differs, by little
        (one_hot[:, None] * (np.arange(1, 8001) * 2**18)[None, :, None]).reshape(-1, size),  # and by much
        np.array(list(itertools.permutations(range(9))))[:, [0, 1, 2, 3, 4, 5, 6, 7, 8] + [0] * 7],
    ]
    families.append(np.random.default_rng(0).integers(0, 150_000, (1_000_000 - sum(map(len, families)), size)))
    tokens = np.unique(np.concatenate(families), axis=0)
    n = len(tokens)
    assert n > 990_000
    found = one_block(tokens)
    assert len(np.unique(found.view("V16"))) == n
    for lane in found.view(np.uint32).reshape(n, LANES).T:
        agreeing = n - len(np.unique(lane))  # expected n**2 / 2**33, about 115, as for numbers drawn at random
        assert 60 < agreeing < 180


def test_prefixes_of_one_token_over_and_over_differ_by_length() -> None:
    for token in (0, 1, 2**31 - 1, -1):
        chain = PrefixHasher(1, SECRET).chain(np.full(100_000, token, np.int32))
        assert len(np.unique(chain.digests(100_000).view("V16"))) == 100_000


def test_the_array_a_chain_begins_with_is_never_written_to() -> None:
    prompt = np.arange(10, dtype=np.int32)
    prompt.flags.writeable = False
    chain = PrefixHasher(4, SECRET).chain(prompt[:6])
    for token in range(100):
        chain.append([token])
    assert chain.tokens.tolist() == [*range(6), *range(100)]


def test_the_root_of_a_chain_names_salt_and_first_block() -> None:
    hasher = PrefixHasher(2, SECRET)
    assert hasher.chain([1, 2, 3]).root == (None, np.array([1, 2], np.int32).tobytes())
    assert hasher.chain([1, 2], b"").root != hasher.chain([1, 2]).root


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size"):
        PrefixHasher(0)
    with pytest.raises(ValueError, match="secret"):
        PrefixHasher(4, b"")
    chain = PrefixHasher(4).chain([1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="2 full blocks, there are 1"):
        chain.digests(2)
    with pytest.raises(ValueError, match="shape"):
        PrefixHasher(4).chain(np.zeros((2, 4), np.int32))


def test_chains_of_a_null_hasher_stay_empty() -> None:
    hasher = NullHasher(4)
    chain = hasher.chain(np.arange(20, dtype=np.int32), b"salt")
    chain.append(np.arange(20, dtype=np.int32))
    assert (chain.hasher, chain.num_tokens, chain.num_blocks, chain.tokens.tolist()) == (hasher, 0, 0, [])
    assert len(chain.digests(0)) == 0
