"""Frames and recordings of real engines: they agree with the engine's bookkeeping, and a recording never harms it."""

from __future__ import annotations

import json
import logging
import os
import resource
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cell_oracle import naive_cells
from fakes import World
from frame_state import FrameState

from pagetide import LLM, SamplingParams
from pagetide.common import recording as recording_module
from pagetide.common.recording import FrameRecording, RecordingError
from pagetide.engine.errors import ConfigError
from pagetide.engine.requests import engine_thread
from pagetide.frames import recorder as recorder_module
from pagetide.frames.recorder import EngineRecorder
from pagetide.frames.source import FrameSource, MemoryFigures, PoolFacts
from pagetide.scheduler.request import RequestRejected

SMALL: dict[str, Any] = {"kv_memory": "2MiB", "max_seqs": 4, "max_model_len": 128, "share": False}
GREEDY = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [1, *range(10, 50 + i)], "label": f"req-{i}"} for i in range(6)]


def cells_of(llm: LLM) -> list[int]:
    """The cell of every block of an engine at rest or between steps, by loops."""
    with llm.locked_engine() as engine:
        return naive_cells(engine.core.scheduler)


def test_frames_of_an_engine_step_by_step() -> None:
    with LLM("demo", **SMALL) as llm:
        state, seen = FrameState(), set()
        state.apply(llm.frame())
        assert state.frame["full"] and state.pool["model"] == "demo" and state.pool["max_model_len"] == 128
        labels = {}
        for _ in llm.stream(PROMPTS, GREEDY):
            state.apply(llm.frame())
            assert state.cells.tolist() == cells_of(llm)
            labels |= {entry[1]: entry[2] for entry in state.rows.values()}
            seen |= {cell >> 15 for cell in state.cells.tolist()}
        assert labels == {f"r{i}": f"req-{i}" for i in range(6)}
        assert seen == {0, 1}, "prefixes are shared"
        stats, last = llm.stats(), state.frame
        assert last["stats"]["generated_tokens"] == stats["generated_tokens"] == 6 * 24
        assert last["memory"]["kv"] == stats["kv_bytes"] and last["memory"]["weights"] == stats["weights_bytes"]
        names = ("free", "draining", "live", "cached", "in_flight", "mapped")
        assert last["blocks"][:6] == [stats["blocks"][name] for name in names]
        other = FrameState()
        other.apply(llm.frame(full=True))
        assert (other.cells == state.cells).all() and other.rows == state.rows == {}


def test_the_details_of_a_block() -> None:
    with LLM("demo", **SMALL) as llm:
        stream = llm.stream(PROMPTS[:2], GREEDY)
        next(stream)
        cells = np.array(cells_of(llm))
        (shared, *_) = np.flatnonzero(cells >> 15).tolist()
        found = llm.block(shared, text=True)
        assert found["state"] == "live" and found["tokens"] == [0, 16]
        rows = [(one["id"], one["label"], one["position"]) for one in found["rows"]]
        assert rows == [("r0", "req-0", 0), ("r1", "req-1", 0)]
        assert llm.tokenizer is not None
        assert found["text"] == llm.tokenizer.decode([1, *range(10, 25)], clean_up_tokenization_spaces=False)
        assert llm.block(shared)["text"] is None
        (free, *_) = np.flatnonzero(cells == 1).tolist()
        empty = {"rows": [], "hits": 0, "tokens": None, "text": None}
        assert llm.block(free, text=True) == {"state": "free", **empty}
        assert llm.block(0, text=True) == {"state": "null", **empty}
        stream.outputs()
        cached = llm.block(shared, text=True)
        assert cached == {**found, "state": "cached", "rows": []}
        llm.generate(PROMPTS[0], GREEDY)
        assert llm.block(shared)["hits"] == found["hits"] + 1
        for wrong in (-1, len(cells), "3", True, None):
            with pytest.raises(RequestRejected, match="there is no block"):
                llm.block(wrong)  # type: ignore[arg-type]
        stream = llm.stream({"prompt_token_ids": [1, 5, 6, 7]}, GREEDY)
        next(stream)
        (block,) = np.flatnonzero(np.array(cells_of(llm)) >= 16).tolist()
        assert llm.block(block)["tokens"] == [0, 4], "what is computed of a partly filled block"
        stream.close()
        for label in (3, "x" * 129, ["a"]):
            with pytest.raises(RequestRejected, match="label"):
                llm.generate({"prompt": "the tide", "label": label})


def test_decisions_of_a_request() -> None:
    with LLM("demo", **{**SMALL, "kv_memory": "1MiB"}) as llm:
        distinct = [{**one, "prompt_token_ids": [i, *one["prompt_token_ids"]]} for i, one in enumerate(PROMPTS)]
        llm.generate(distinct, GREEDY)
        every = llm.explain()
        assert every and [d["n"] for d in every] == sorted({d["n"] for d in every})
        for i in range(6):
            of_it = [d for d in every if d.get("request_id") == f"r{i}" or f"r{i}" in d.get("passed", ())]
            assert llm.explain(f"r{i}") == of_it
            assert [d for d in llm.explain(f"req-{i}") if d not in of_it] == []
        assert llm.explain("nobody") == []


def test_a_recording_is_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "INTERVAL_S", 0.001)
    live: list[bytes] = []
    taken = recorder_module.encode

    def kept(frame: dict[str, Any]) -> bytes:
        live.append(taken(frame))
        return live[-1]

    monkeypatch.setattr(recorder_module, "encode", kept)
    with LLM("demo", record=tmp_path / "run", **SMALL) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o600
    with FrameRecording(tmp_path / "run") as recording:
        frames = [frame.line for frame in recording.frames()]
        assert recording.header["model"] == "demo" and recording.header["text"] is False
    assert frames == live and len(frames) > 3
    state, ended = FrameState(), []
    for line in frames:
        state.apply(line)
        ended += state.frame["ended"]
    assert sorted(ended) == [[f"r{i}", f"req-{i}", "length", 24, None] for i in range(6)]
    assert state.frame["stats"]["generated_tokens"] == 144 and not state.rows
    text = b"\n".join(frames)
    assert all(str(output.completions[0].token_ids)[1:30].replace(" ", "").encode() not in text for output in outputs)


def test_a_recording_with_text_has_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "INTERVAL_S", 0.001)
    with LLM("demo", record=str(tmp_path / "run"), record_text=True, **SMALL) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    frames = [json.loads(frame.line) for frame in frames_of(tmp_path / "run")]
    ended = {entry[0]: entry[5] for frame in frames for entry in frame["ended"]}
    assert ended == {f"r{i}": output.completions[0].token_ids for i, output in enumerate(outputs)}
    prompts = {entry[1]: entry[8] for frame in frames for entry in frame["rows"]}
    assert prompts and all(prompts[f"r{i}"] == PROMPTS[i]["prompt_token_ids"] for i in range(6) if f"r{i}" in prompts)


def test_a_path_that_cannot_be_is_refused_and_another_file_not_touched(tmp_path: Path) -> None:
    for path in ("", 3, b"x", "/no/such/folder/run", "/"):
        with pytest.raises(ConfigError, match="record"):
            LLM("demo", record=path, **SMALL)
    (tmp_path / "notes").write_text("precious")
    with pytest.raises(ConfigError, match="not a recording"):
        LLM("demo", record=tmp_path / "notes", **SMALL)
    assert (tmp_path / "notes").read_text() == "precious"


def frames_of(path: Path) -> list[Any]:
    with FrameRecording(path) as recording:
        return list(recording.frames())


def state_of(path: Path) -> FrameState:
    """What a recording says at its end."""
    state = FrameState()
    for frame in frames_of(path):
        state.apply(frame.line)
    return state


class Still:
    """A source whose engine is at hand, so that a recorder's turns are taken one by one. It records into `path`."""

    def __init__(self, path: Path, **more: Any) -> None:
        self.path = path
        self.world = World(usable=40, block_size=4, max_seqs=4)
        self.now = 0.0
        facts, memory = PoolFacts("demo", 64, 64), MemoryFigures({})
        self.source = FrameSource(
            lambda: self.world.scheduler, facts, lambda: memory, clock=lambda: self.now, wall=lambda: 100 + self.now
        )
        header = {"model": "demo", "version": "0", "began": 100.0, "text": False, "interval_s": 0.1}
        self.recorder = EngineRecorder(str(path), self.source, header, clock=lambda: self.now, **more)

    def life(self, seconds: float) -> None:
        """Turns, eight a second, each after a step."""
        for _ in range(int(seconds * 8)):
            self.now += 0.125
            if not self.world.scheduler.has_work:
                self.world.add(f"r{self.now:.1f}", 9)
            self.world.step()
            self.recorder.turn(lambda make: make())


@pytest.fixture
def still(tmp_path: Path) -> Still:
    return Still(tmp_path / "run")


def test_a_file_that_another_engine_records_into_is_refused(still: Still) -> None:
    pytest.importorskip("fcntl")
    still.life(5)
    before = still.path.read_bytes()
    with pytest.raises(RecordingError, match="another engine records into"):
        Still(still.path)
    assert still.path.read_bytes() == before
    still.recorder.close()
    Still(still.path).recorder.close()


def test_full_frames_come_every_ten_seconds_and_idle_ones_seldom(still: Still) -> None:
    still.life(25)
    for _ in range(80):  # nothing happens for ten seconds
        still.now += 0.125
        still.recorder.turn(lambda make: make())
    still.recorder.close()
    frames = frames_of(still.path)
    assert [frame.time_s for frame in frames if frame.full] == [100.125, 110.125, 120.125, 130.125]
    busy, idle = [f for f in frames if f.time_s <= 125], [f for f in frames if f.time_s > 125]
    assert len(busy) == 200 and [f.time_s - 125 for f in idle] == [2, 4, 5.125, 7.125, 9.125]
    assert {json.loads(frame.line)["cells"] for frame in idle if not frame.full} == {""}


def test_large_full_frames_come_seldom(still: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "FULL_BYTES_PER_S", 10)
    still.life(60)
    still.recorder.close()
    fulls = [frame.time_s for frame in frames_of(still.path) if frame.full]
    assert len(fulls) < 4 and fulls[0] == 100.125


def test_a_full_disk_ends_the_recording_and_nothing_else(still: Still, caplog: pytest.LogCaptureFixture) -> None:
    still.life(5)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING):
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(still.path) + 100, limits[1]))
        try:
            still.life(20)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (record,) = caplog.records
    assert record.getMessage().split(" ends: ")[0] == f"the recording {still.path}"
    assert not still.recorder.is_open and not still.recorder.turn(lambda make: make())
    still.recorder.close()
    assert len(frames_of(still.path)) > 30  # flushed once a second


def test_at_its_size_a_recording_ends_with_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    still = Still(tmp_path / "run", most_bytes=2000)
    with caplog.at_level(logging.WARNING):
        still.life(30)
    (record,) = caplog.records
    assert "has reached its" in record.getMessage() and not still.recorder.is_open
    assert os.path.getsize(still.path) < 3000
    state_of(still.path)


def test_a_slow_file_delays_frames_and_loses_no_change(still: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def slow(file: int, data: bytes) -> int:  # steps go on meanwhile, and a write takes a part only
        for _ in range(3):
            still.world.step() if still.world.scheduler.has_work else None
        return write(file, data[:100])

    with monkeypatch.context() as patch:
        patch.setattr(recorder_module.os, "write", slow)
        still.life(10)
    still.recorder.close(still.recorder.last())
    state = state_of(still.path)
    full = FrameState()
    full.apply(still.source.take(full=True))
    assert state.cells.tolist() == full.cells.tolist() and state.rows == full.rows


def test_no_more_is_recorded_once_the_engine_is_closed(still: Still) -> None:
    assert not still.recorder.turn(lambda make: None)
    still.recorder.close()
    still.recorder.close()
    with FrameRecording(still.path) as recording:
        assert list(recording.frames()) == [] and recording.ended == recording.began == 100.0


def test_a_fault_of_a_frame_ends_the_recording_and_nothing_else(
    still: Still, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    still.life(1)

    def broken(full: bool = False) -> dict[str, Any]:
        raise RuntimeError("planted")

    monkeypatch.setattr(still.source, "take", broken)
    with caplog.at_level(logging.WARNING):
        still.life(1)
        assert still.recorder.last() is None
    assert [record.getMessage().split(" ends: ")[1] for record in caplog.records] == ["RuntimeError: planted"]
    still.recorder.close()
