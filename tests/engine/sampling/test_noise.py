"""The random numbers: known answers, and that they are spread as they should be."""

from __future__ import annotations

import numpy as np

from pagetide.engine.sampling.noise import gumbel, philox, uniform


def test_philox_known_answers() -> None:
    """The vectors of Random123's kat_vectors for philox4x32-10."""
    ones = 0xFFFFFFFF
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    inputs = np.array([[0] * 6, [ones] * 6, pi], np.uint64).T
    got = philox(inputs[:4], inputs[4:])
    assert [[f"{word:08x}" for word in column] for column in got.T.tolist()] == [
        ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"],
        ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"],
        ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"],
    ]


def test_uniform_known_answers() -> None:
    """A stored seed must give the same tokens in every later version."""
    seeds = np.array([0, 1, 2**64 - 1, 0x299F31D0A4093822, 7, 7, 7], np.uint64)
    indices = np.array([0, 0, 0, 0, 0, 1, 0], np.uint64)
    positions = np.array([0, 0, 2**40 + 3, 5, 1, 1, 2], np.int64)
    got = uniform(seeds, indices, positions)
    first = (0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)  # of the known answer above
    assert got[0] == first / 2**53
    assert [value.hex() for value in got.tolist()] == KNOWN_UNIFORM
    assert got.tolist() == [float(uniform(seeds[[i]], indices[[i]], positions[[i]])[0]) for i in range(7)]


KNOWN_UNIFORM = [
    "0x1.989fa370b4e2cp-2", "0x1.c7d00cf94283ap-1", "0x1.5aa7dfcf999f6p-1", "0x1.f87c959f11ae0p-4",
    "0x1.a0ba3a65cbde0p-2", "0x1.c6524bf663c1bp-1", "0x1.8e23c0453f700p-8",
]  # fmt: skip


def test_gumbel_known_answers() -> None:
    """A stored seed must give the same beams in every later version."""
    got = gumbel(2**64 - 1, 3, 2**40 + 5, np.array([0, 7, 150_000]))
    assert [value.hex() for value in got.tolist()] == KNOWN_GUMBEL
    assert gumbel(2**64 - 1, 3, 2**40 + 5, np.array([7]))[0] == got[1]  # of each token alone
    for other in ((0, 3, 2**40 + 5), (2**64 - 1, 4, 2**40 + 5), (2**64 - 1, 3, 5), (2**64 - 1, 3, 2**40 + 6)):
        assert gumbel(*other, np.array([7]))[0] != got[1]


KNOWN_GUMBEL = ["0x1.5941ed1b450c3p-2", "-0x1.ff06bf09b81d1p-2", "0x1.61edcc6d75912p+1"]
