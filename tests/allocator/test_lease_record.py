"""The record of a lease: bounds that hold for an instant between two readings, however often they moved meanwhile."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetide.allocator.lease_record import RECORD_BYTES, HeldBounds, LeaseRecordWriter, RecordOwner, Sums, bounds_between

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create")


def ends(held_bytes: int = 0) -> tuple[RecordOwner, LeaseRecordWriter]:
    owner = RecordOwner(held_bytes)
    return owner, LeaseRecordWriter(owner.take_fd())


def test_a_new_record_says_what_it_was_made_with() -> None:
    owner, _ = ends(50)
    assert bounds_between(owner.read(), owner.read()) == HeldBounds(50, 50)
    assert bounds_between(Sums(), owner.read()) == HeldBounds(0, 50)  # of the time before it nothing is known


@given(st.integers(0, 50), st.lists(st.tuples(st.booleans(), st.integers(0, 100)), max_size=20), st.data())
def test_what_was_held_at_any_instant_is_within_the_bounds(
    start: int, moves: list[tuple[bool, int]], data: st.DataObject
) -> None:
    owner, writer = ends(start)
    history = [(owner.read(), start, start)]  # readings, with what was held at least and at most at that instant
    held = start
    for finishes, target in moves:
        writer.set(min(held, target), max(held, target))
        history.append((owner.read(), min(held, target), max(held, target)))
        held = target if finishes else held  # an arena that fails has rolled back
        writer.set(held, held)
        history.append((owner.read(), held, held))
    first = data.draw(st.integers(0, len(history) - 1))
    last = data.draw(st.integers(first, len(history) - 1))
    bounds = bounds_between(history[first][0], history[last][0])
    for _, low, high in history[first : last + 1]:
        assert bounds.lower_bytes <= low <= high <= bounds.upper_bytes


def test_nonsense_in_a_record_gives_bounds_all_the_same() -> None:
    assert bounds_between(Sums(0, 2**64 - 1, 0, 0), Sums(5, 0, 0, 2**64 - 1)) == HeldBounds(0, 0)
    assert bounds_between(Sums(0, 0, 2**64 - 1, 0), Sums(7, 0, 0, 0)) == HeldBounds(7, 7)


def test_the_size_of_a_record_cannot_be_changed_by_its_engine() -> None:
    """Else a read by the broker would be its death by SIGBUS."""
    owner = RecordOwner()
    fd = owner.take_fd()
    try:
        for size in (0, RECORD_BYTES - 1, RECORD_BYTES + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)
    assert owner.read() == Sums()


@pytest.mark.parametrize(
    ("kind", "num_bytes", "said"),
    [
        ("small", 0, "can be cut short"),
        ("memory", RECORD_BYTES, "can be cut short"),
        ("file", RECORD_BYTES, "Invalid argument"),
    ],
)
def test_a_descriptor_that_could_be_cut_short_is_refused_and_closed(
    kind: str, num_bytes: int, said: str, tmp_path: Path
) -> None:
    """Its engine would end by SIGBUS, whoever cuts it."""
    if kind != "file":
        fd = os.memfd_create(kind, os.MFD_ALLOW_SEALING if kind == "memory" else os.MFD_CLOEXEC)
    else:
        fd = os.open(tmp_path / "record", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, num_bytes)
    with pytest.raises((OSError, ValueError), match=said):
        LeaseRecordWriter(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_the_sums_lie_where_the_picture_says() -> None:
    owner = RecordOwner()
    fd = owner.take_fd()
    memory = mmap.mmap(fd, RECORD_BYTES)
    LeaseRecordWriter(fd).set(3, 9)
    assert list((ctypes.c_uint64 * 4).from_buffer(memory)) == [9, 0, 3, 0]
