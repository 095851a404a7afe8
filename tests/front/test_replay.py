"""`pagetide replay`: a recording becomes a trace that follows the rules of the trace event format, and says what happened."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from fakes import World
from frame_watcher import source_of
from random_walk import walk

from pagetide.cli import main
from pagetide.common.recording import FrameWriter
from pagetide.frames.source import FrameSource, encode

STATES = {
    "waiting", "preempted", "prefilling", "decoding", "paused", "finishing", "deferred", "waiting for prompt",
    "waiting for move", "between frames",
}  # fmt: skip


class Recorded:
    """Records a walk: a frame at each look, a tenth of a second after the one before."""

    def __init__(self, path: Path) -> None:
        self.now = 50.0
        self.frames: list[dict[str, Any]] = []
        self._source: FrameSource | None = None
        self._file = path.open("ab")
        began = {"model": "demo", "began": 1000.0 + self.now}
        self._writer = FrameWriter(self._file.write, "engine", began, num_bytes=self._file.tell())

    def __call__(self, world: World) -> None:
        if self._source is None:
            self._source = source_of(world, clock=lambda: self.now, wall=lambda: 1000.0 + self.now)
        self.now += 0.1
        frame = self._source.take(full=len(self.frames) % 50 == 0)
        self.frames.append(frame)
        self._writer.put(encode(frame), frame["time"], frame["full"])

    def close(self) -> None:
        self._writer.close()
        self._file.close()


def trace_of(path: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The events that the command writes, after a check that they keep to the rules of the format."""
    out = path.with_suffix(".json")
    assert main(["replay", str(path), "--perfetto", str(out)]) == 0
    trace = json.loads(out.read_text("utf-8"))
    events: list[dict[str, Any]] = trace["traceEvents"]
    assert f"{len(events):,} events" in capsys.readouterr().out and trace["displayTimeUnit"] in ("ms", "ns")
    for event in events:
        kind = event["ph"]
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert kind in "MXCi" and len(kind) == 1
        if kind == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name") and len(event["args"]) == 1
            continue
        assert isinstance(event["ts"], int) and event["ts"] >= 0
        if kind == "X":
            assert isinstance(event["dur"], int) and event["dur"] >= 0
        if kind == "C":
            assert event["args"] and all(isinstance(value, int | float) for value in event["args"].values())
        if kind == "i":
            assert event["s"] in ("g", "p", "t")
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for track in slices.values():  # slices of a thread are nested or apart; here apart, and in order
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(track))
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert set(slices) <= named
    return events


@pytest.mark.parametrize("variant", ["elastic-host-alternate-sound-full", "fixed-bare-ahead-faulty-full"])
def test_a_trace_says_what_the_frames_say(variant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = Recorded(tmp_path / "run")
    world = walk(3, variant, events=250, check_every=2, look=recorded)
    recorded(world)
    recorded.close()
    events, frames = trace_of(tmp_path / "run", capsys), recorded.frames
    titles = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(titles.values()) == sorted({*world.requests, *world.family_of} & set(titles.values()))
    ends = {(titles[e["tid"]], e["name"].removeprefix("ended: ")) for e in events if e["name"].startswith("ended")}
    assert ends == {(entry[0], entry[2]) for frame in frames for entry in frame["ended"]}
    assert {e["name"] for e in events if e["ph"] == "X"} <= STATES
    # A request that has a row in a frame is in a slice of that state from this frame on.
    slices = {(titles[e["tid"]], e["ts"], e["name"]) for e in events if e["ph"] == "X"}
    id_in, before = {}, {}
    num_starts = 0
    for frame in frames:
        id_in = {} if frame["full"] else {row: name for row, name in id_in.items() if row not in frame["left"]}
        id_in |= {entry[0]: entry[1] for entry in frame["rows"]}
        named = ("prefilling", "decoding", "paused", "finishing")
        states = {id_in[row]: named[status] for row, status, *_ in frame["running"]}
        for name, state in states.items():
            if before.get(name) != state:
                num_starts += 1
                assert (name, round((frame["time"] - 1050.1) * 1e6), state) in slices, (name, state)
        before = states
    assert num_starts > 20
    blocks = [list(e["args"].values()) for e in events if e["name"] == "blocks"]
    assert blocks == [frame["blocks"][:5] for frame in frames]
    told = [(e["args"]["n"], e["args"]["what"]) for e in events if e.get("cat") == "decision"]
    expected = [(d["n"], d["what"]) for f in frames for d in f["decisions"] if not f["full"] or f["seq"] == 1]
    assert told == expected and told


def test_two_runs_in_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        recorded = Recorded(tmp_path / "run")
        world = World(usable=8, block_size=4, max_seqs=2)
        world.look = recorded
        world.add("r0", 5, 3)
        world.run()
        recorded.close()
    events = trace_of(tmp_path / "run", capsys)
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["r0", "r0"]
    assert len([e for e in events if e["name"] == "ended: length"]) == 2


def test_what_cannot_be_read_or_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").write_text("hello")
    assert main(["replay", str(tmp_path / "notes"), "--perfetto", str(tmp_path / "out")]) == 2
    assert "not a recording" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none"), "--perfetto", str(tmp_path / "out")]) == 2
    assert f"{tmp_path / 'none'}: No such file or directory; check the path" in capsys.readouterr().err
    recorded = Recorded(tmp_path / "run")
    recorded.close()
    assert main(["replay", str(tmp_path / "run"), "--perfetto", str(tmp_path / "no" / "out")]) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "run"]
