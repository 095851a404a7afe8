"""Frames agree with the bookkeeping: decoded, they equal an oracle that loops over tables, references and pins."""

from __future__ import annotations

import binascii
import json
import math
import struct

import numpy as np
import pytest
from fakes import World
from frame_state import FrameState
from frame_watcher import Watcher, source_of
from hypothesis import given
from hypothesis import strategies as st
from random_walk import PAIRWISE, walk

from pagetide.allocator.pool_view import BlockState
from pagetide.frames.cells import FIRST_ROW, apply_changes, encode_changes
from pagetide.frames.source import MOST_WAITING, encode
from pagetide.scheduler.request import Request, Sampling


@pytest.mark.parametrize("variant", PAIRWISE)
def test_frames_say_what_the_books_say(variant: str) -> None:
    watcher = Watcher()
    watcher.check_ends(walk(7, variant, events=40, look=watcher))


def test_a_late_reader_reaches_the_same_state_from_any_full_frame() -> None:
    watcher = Watcher(1)
    walk(1, "elastic-host-ahead-sound-full", events=200, look=watcher)
    starts = [i for i, line in enumerate(watcher.frames) if json.loads(line)["full"]]
    assert len(starts) > 3
    for start in starts:
        late = FrameState()
        for line in watcher.frames[start:]:
            late.apply(line)
        assert late.cells.tolist() == watcher.state.cells.tolist() and late.rows == watcher.state.rows
        assert late.decisions.keys() == watcher.state.decisions.keys() and late.frame == watcher.state.frame


def test_labels_text_and_ends() -> None:
    world = World(usable=8, block_size=4, max_seqs=2)
    plain, texts = source_of(world), source_of(world, text=True)
    request = Request("r0", np.arange(1, 6, dtype=np.int32), Sampling(2), label="req-1", arrival=990.0)
    world.scheduler.add(request)
    world.scheduler.add(Request("r1", np.arange(1, 6, dtype=np.int32), Sampling(2), 1, 998.5, label="req-2"))
    frame = plain.take()
    assert frame["waiting"] == [2, [["r0", "req-1", 5, 2, 0, 10.0, 0, "waiting"], ["r1", "req-2", 5, 2, 1, 1.5, 0, "waiting"]]]
    assert frame["pool"] == {
        "num_blocks": 9, "blocks_per_extent": 9, "block_size": 4, "block_bytes": 4096, "model": "demo", "max_model_len": 64
    }  # fmt: skip
    texts.take()
    world.requests = {"r0": request}
    plan = world.schedule()
    assert plain.take()["rows"][0] == [0, "r0", "req-1", 5, 7, 0, 4990.0, 0]
    assert texts.take()["rows"][0] == [0, "r0", "req-1", 5, 7, 0, 4990.0, 0, [1, 2, 3, 4, 5]]
    world.finish(plan)
    world.run()
    tokens = world.finished["r0"].token_ids.tolist()
    assert plain.take()["ended"][0] == ["r0", "req-1", "length", 2, None]
    assert texts.take()["ended"][0] == ["r0", "req-1", "length", 2, None, tokens]
    assert plain.take()["ended"] == [], "an end is told once"
    assert plain.take(full=True)["ended"] == []


def test_a_fault_of_the_engine_gives_a_full_frame() -> None:
    world = World(usable=8, block_size=4, max_seqs=2)
    world.add("r0", 5)
    source, state = source_of(world), FrameState()
    state.apply(encode(source.take()))
    world.schedule()
    state.apply(encode(source.take()))
    assert state.rows
    world.scheduler, _ = world.scheduler.rebuilt("a fault")
    assert not source.is_current
    frame = source.take()
    assert frame["full"] and frame["ended"] == [["r0", "", "error", 0, "a fault"]]
    state.apply(encode(frame))
    assert not state.rows and state.cells.tolist() == [5, *[1] * 8]


def test_only_the_first_of_many_that_wait_are_listed() -> None:
    world = World(usable=8, block_size=4, max_seqs=1)
    for i in range(MOST_WAITING + 50):
        world.add(f"r{i}", 2, arrival=float(-i))
    total, listed = source_of(world).take()["waiting"]
    assert total == MOST_WAITING + 50
    assert [entry[0] for entry in listed] == [f"r{i}" for i in range(total - 1, 49, -1)]


def test_numbers_that_json_lacks_are_null() -> None:
    world = World(usable=8, block_size=4, max_seqs=1)
    world.scheduler.decisions.preempted(1, "r0", 0, 2, 3, None, math.inf)
    (decision,) = json.loads(encode(source_of(world).take()))["decisions"]
    assert decision["compute_s"] is None and decision["n"] == 1


def test_decisions_that_merge_keep_their_number() -> None:
    world = World(usable=8, block_size=4, max_seqs=1)
    log, source, state = world.scheduler.decisions, source_of(world), FrameState()
    log.returned(1, "r0", 4, 4)
    log.gave_up(2, 1, 0, 0.5, 0.5, (0.1, 0.2))
    state.apply(encode(source.take()))
    log.gave_up(3, 1, 2, 0.5, 0.5, (0.1, 0.2))
    frame = source.take()
    assert [(d["n"], d["step"], d["demoted"], d["evicted"]) for d in frame["decisions"]] == [(2, 3, 2, 2)]
    state.apply(encode(frame))
    log.returned(4, "r1", 4, 4)
    state.apply(encode(source.take()))
    assert [(n, d["step"]) for n, d in state.decisions.items()] == [(1, 1), (2, 3), (3, 4)]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.data())
def test_runs_carry_any_change(before: list[int], data: st.DataObject) -> None:
    after = data.draw(st.lists(st.integers(0, 3), min_size=len(before), max_size=len(before)))
    old, new = np.array(before, np.uint16), np.array(after, np.uint16)
    text = encode_changes(new, old)
    runs = list(struct.iter_unpack("<IHH", binascii.a2b_base64(text)))
    spelled = {first + i: value for first, length, value in runs for i in range(length + 1)}
    assert spelled == {i: b for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b}
    assert sum(length + 1 for _, length, _ in runs) == len(spelled), "runs overlap"
    apply_changes(text, old)
    assert old.tolist() == after


def test_a_long_run_is_split() -> None:
    cells, old = np.full(200_000, 3, np.uint16), np.zeros(200_000, np.uint16)
    cells[:5] = cells[150_000] = 0
    text = encode_changes(cells, old)
    assert list(struct.iter_unpack("<IHH", binascii.a2b_base64(text))) == [
        (5, 65_535, 3), (65_541, 65_535, 3), (131_077, 150_000 - 131_077 - 1, 3), (150_001, 49_998, 3)
    ]  # fmt: skip
    apply_changes(text, old)
    assert (old == cells).all()


def test_states_are_no_rows() -> None:
    assert max(BlockState) < FIRST_ROW


def test_an_encoded_frame_is_json_also_with_a_lone_surrogate() -> None:
    world = World(usable=8, block_size=4, max_seqs=2)
    world.scheduler.add(Request("r0", np.arange(1, 6, dtype=np.int32), Sampling(2), label="Gezeiten \u00e4 \U0001f30a <b>"))
    world.schedule()
    frame = source_of(world).take()
    assert json.loads(encode(frame)) == frame
    frame["ended"] = [["r1", "", "error", 0, "no file \udcff"]]
    assert json.loads(encode(frame)) == frame
