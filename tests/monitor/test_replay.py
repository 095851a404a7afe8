"""Recordings of devices: what is played is what was fed, at every time; wrong files give a sentence."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetide.common.recording import FrameRecording, FrameWriter, RecordingError
from pagetide.monitor.device_frames import HEARTBEAT_S, IMPOSSIBLE, STALE, DeviceRecorder
from pagetide.monitor.errors import ConfigInvalid, DeviceUnreadable, MonitorError
from pagetide.monitor.snapshot import (
    DetailReading,
    Device,
    DeviceDetail,
    DeviceInfo,
    DeviceKind,
    DeviceMemory,
    MemoryReading,
    ProcessUse,
    Snapshot,
)
from pagetide.monitor.sources.replay import ReplaySource

MS = 1_000_000
BEGAN_NS = 7_000_000_000_123
INTERVAL_NS = 20 * MS
INFOS = (
    DeviceInfo("GPU-a", "0", DeviceKind.GPU, "A card", "00000000:3B:00.0"),
    DeviceInfo("MIG-b", "0:1", DeviceKind.MIG, "A slice \N{GREEK SMALL LETTER MU}", None, "GPU-a"),
    DeviceInfo("HOST-c", "host", DeviceKind.HOST),
)
DETAIL = DetailReading(0.5, 61.0, 250.0, 700.0, (ProcessUse(17, 4096, "compute", "ada", "python x.py"),))


def device(
    info: DeviceInfo, at_ns: int, *, total: int | None = 1000, free: int | None = 600, error: str | None = None,
    age_ns: int = 0, detail: DetailReading | None = None, detail_error: str | None = None,
) -> Device:  # fmt: skip
    """A device as a snapshot of `at_ns` shows it; without `detail` and `detail_error` it was not asked for detail yet."""
    asked = detail is not None or detail_error is not None
    return Device(
        info,
        DeviceMemory(at_ns - age_ns, INTERVAL_NS, total, free, None, 1, 0, error),
        DeviceDetail(at_ns if asked else 0, 1000 * MS, detail or DetailReading(), (), detail_error),
    )


def snapshot(at_ns: int, *devices: Device) -> Snapshot:
    return Snapshot(at_ns, "nvml+host", 17, BEGAN_NS, devices)


def record(path: Path, snapshots: Sequence[Snapshot], **options: Any) -> Path:
    with DeviceRecorder(path, snapshots[0], **options) as recorder:
        for each in snapshots[1:]:
            recorder.write(each)
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    """The frames of a recording without what did not change; "time" is in seconds since the first."""
    with FrameRecording(path, "devices") as recording:
        found = [json.loads(frame.line) for frame in recording.frames()]
    assert all(frame["full"] is (number == 0) for number, frame in enumerate(found))
    began = found[0]["time"]
    told = [{name: value for name, value in frame.items() if value and name != "full"} for frame in found]
    return [frame | {"time": round(frame["time"] - began, 6)} for frame in told]


def some(path: Path) -> Path:
    """A small recording with every kind of change."""
    at = [BEGAN_NS + step * 20 * MS for step in range(6)]
    a, b, c = INFOS
    mig, high = device(b, at[3], total=None), replace(DETAIL, utilization=0.75)
    snapshots = [
        snapshot(at[0], device(a, at[0], detail=DETAIL), device(c, at[0])),
        snapshot(at[1], device(a, at[1], free=500, detail=DETAIL), device(c, at[1])),
        snapshot(at[2], device(a, at[2], error="GPU is lost", detail_error="lost"), device(c, at[2])),
        snapshot(at[3], device(a, at[3], detail=high), mig),
        snapshot(at[4], device(a, at[4], detail=high), mig),
        snapshot(at[5], device(a, at[5], detail=DETAIL), mig),
    ]
    return record(path, snapshots, detail_interval_s=0)


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    a, b, c = (asdict(info) for info in INFOS)
    whole = asdict(DETAIL) | {"processes": [asdict(use) for use in DETAIL.processes or ()]}
    memory = {"total_bytes": 1000, "free_bytes": 600}
    assert lines(some(tmp_path / "r")) == [
        {"time": 0, "devices": [a, c], "memory": {"GPU-a": memory, "HOST-c": memory}, "detail": {"GPU-a": whole}},
        {"time": 0.02, "memory": {"GPU-a": memory | {"free_bytes": 500}}},
        {"time": 0.04, "memory": {"GPU-a": "GPU is lost"}, "detail": {"GPU-a": "lost"}},
        {
            "time": 0.06,
            "devices": [a, b],
            "memory": {"GPU-a": memory, "MIG-b": memory | {"total_bytes": None}},
            "detail": {"GPU-a": whole | {"utilization": 0.75}},
        },
        {"time": 0.1, "detail": {"GPU-a": whole}},
    ]
    with FrameRecording(tmp_path / "r", "devices") as recording:
        told = {"of": "devices", "source": "nvml+host", "interval_s": 0.02}
        assert told.items() <= recording.header.items()


def test_a_quiet_recording_tells_that_it_goes_on_and_how_long_it_was(tmp_path: Path) -> None:
    times = [BEGAN_NS + step * 400 * MS for step in range(8)]
    path = record(tmp_path / "r", [snapshot(at, device(INFOS[0], at)) for at in times])
    assert [line["time"] for line in lines(path)] == [0.0, 1.2, 2.4, 2.8]
    assert HEARTBEAT_S == 1.0


def test_all_is_told_again_every_ten_seconds(tmp_path: Path) -> None:
    times = [BEGAN_NS + step * 5_000 * MS for step in range(5)]
    path = record(tmp_path / "r", [snapshot(at, device(INFOS[0], at, detail=DETAIL)) for at in times])
    with FrameRecording(path, "devices") as recording:
        frames = [json.loads(frame.line) for frame in recording.frames()]
    assert [frame["full"] for frame in frames] == [True, False, True, False, True]
    assert [{**frame, "time": 0} for frame in frames[::2]] == [{**frames[0], "time": 0}] * 3


def test_details_are_written_no_more_often_than_asked(tmp_path: Path) -> None:
    times = [BEGAN_NS + step * 250 * MS for step in range(9)]
    details = [replace(DETAIL, power_watts=float(step)) for step in range(9)]
    path = record(
        tmp_path / "r", [snapshot(at, device(INFOS[0], at, detail=detail)) for at, detail in zip(times, details, strict=True)]
    )
    told = [(line["time"], line["detail"]["GPU-a"]["power_watts"]) for line in lines(path) if "detail" in line]
    assert told == [(0.0, 0.0), (1.0, 4.0), (2.0, 8.0)]


def test_a_killed_recorder_leaves_all_but_the_last_second(tmp_path: Path) -> None:
    path = tmp_path / "r"
    recorder = DeviceRecorder(path, snapshot(BEGAN_NS, device(INFOS[0], BEGAN_NS)))
    for step in range(1, 126):
        at = BEGAN_NS + step * 20 * MS
        recorder.write(snapshot(at, device(INFOS[0], at, free=step)))
    left = lines(path)
    assert [line["time"] for line in left[1:]] == [round(0.02 * step, 6) for step in range(1, 101)]
    with pytest.raises(ValueError, match="cannot follow"):
        recorder.write(snapshot(BEGAN_NS + 4))
    recorder.close()
    recorder.close()
    assert len(lines(path)) == 126


def test_a_recording_of_no_devices(tmp_path: Path) -> None:
    source = ReplaySource(record(tmp_path / "none", [snapshot(BEGAN_NS)]))
    assert source.scan() == ()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_told_and_nothing_is_overwritten(tmp_path: Path) -> None:
    first, later_ns = snapshot(BEGAN_NS, device(INFOS[0], BEGAN_NS)), BEGAN_NS + 2_000 * MS
    recorder = DeviceRecorder(tmp_path / "r", first)
    assert recorder._file is not None
    with open("/dev/full", "w") as full:
        os.dup2(full.fileno(), recorder._file)
    with pytest.raises(MonitorError, match="r ends at second 0: No space left on device"):
        recorder.write(snapshot(later_ns, device(INFOS[0], later_ns, free=1)))
    recorder.close()
    before = (tmp_path / "r").read_bytes()
    with pytest.raises(ConfigInvalid, match="r already exists and is not overwritten; name a new file"):
        DeviceRecorder(tmp_path / "r", first)
    assert (tmp_path / "r").read_bytes() == before
    assert [line["memory"] for line in lines(tmp_path / "r")] == [{"GPU-a": {"total_bytes": 1000, "free_bytes": 600}}]
    with pytest.raises(ConfigInvalid, match=r"cannot record to .*: No such file or directory"):
        DeviceRecorder(tmp_path / "no folder" / "r", first)


@dataclass(frozen=True)
class State:
    """What is known of a device; all None: nothing yet."""

    memory: MemoryReading | None = None
    memory_error: str | None = None
    detail: DetailReading | None = None
    detail_error: str | None = None


amounts = st.one_of(st.none(), st.integers(0, 1 << 40))
texts = st.one_of(st.none(), st.text(max_size=5), st.just("odd \udcff"))
shares = st.one_of(st.none(), st.floats(0, 1000), st.integers(0, 9))
uses = st.builds(ProcessUse, st.integers(1, 9), amounts, user=texts, command=texts, engine=texts)
lists = st.one_of(st.none(), st.lists(uses, max_size=2).map(tuple))
details = st.builds(DetailReading, utilization=shares, power_watts=shares, processes=lists)
errors = st.one_of(st.none(), st.sampled_from(["GPU is lost", "no answer"]))


@st.composite
def lives(draw: st.DrawFn) -> list[Snapshot]:
    """What a recorder may be fed: devices that come and go, fail, grow stale and change, one snapshot after the other."""
    snapshots, at_ns = [], BEGAN_NS
    for _ in range(draw(st.integers(1, 8))):
        present = draw(st.lists(st.sampled_from(INFOS), unique=True))
        devices = [
            device(
                info, at_ns, total=draw(amounts), free=draw(amounts), error=draw(errors),
                age_ns=draw(st.sampled_from([0, 0, 30 * MS, 90 * MS, at_ns])),
                detail=draw(st.one_of(st.none(), details)), detail_error=draw(errors),
            )
            for info in present
        ]  # fmt: skip
        snapshots.append(snapshot(at_ns, *devices))
        at_ns += draw(st.integers(0, 3_000)) * MS
    return snapshots


def naive(snapshots: Sequence[Snapshot], at_ns: int) -> dict[str, State]:
    """What is known at that time: of each device that was there last, the last that was said of it."""
    states: dict[str, State] = {}
    present: tuple[str, ...] = ()
    for each in snapshots:
        if each.at_ns > at_ns:
            break
        present = tuple(device.info.uuid for device in each.devices)
        for told in each.devices:
            state = states.get(told.info.uuid, State())
            memory, detail = told.memory, told.detail
            if memory.at_ns and (memory.error or memory.is_stale(each.at_ns)):
                state = replace(state, memory=None, memory_error=memory.error or STALE)
            elif memory.at_ns and memory.used_bytes is not None and memory.used_bytes < 0:
                state = replace(state, memory=None, memory_error=IMPOSSIBLE)
            elif memory.at_ns:
                state = replace(state, memory=MemoryReading(memory.total_bytes, memory.free_bytes), memory_error=None)
            if detail.at_ns and detail.error:
                state = replace(state, detail=None, detail_error=detail.error)
            elif detail.at_ns:
                state = replace(state, detail=detail.reading, detail_error=None)
            states[told.info.uuid] = state
    return {uuid: states[uuid] for uuid in present}


@given(lives(), st.lists(st.integers(0, 24_000), max_size=8))
def test_what_is_played_is_what_was_fed_at_every_time(snapshots: list[Snapshot], times_ms: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = record(Path(folder, "r"), snapshots, detail_interval_s=0)
        now_ns = BEGAN_NS
        source = ReplaySource(path, clock=lambda: now_ns)
        source.scan()
    last_ns = snapshots[-1].at_ns
    for now_ns in sorted([*(each.at_ns for each in snapshots), *(BEGAN_NS + time * MS for time in times_ms)]):
        expected = naive(snapshots, now_ns)
        infos = source.scan()
        assert [info.uuid for info in infos] == list(expected)
        for info in infos:
            assert replayed(source, info) == (shown(expected[info.uuid]) if now_ns <= last_ns else ENDED)


ENDED = State(memory_error="ended", detail_error="ended")


def shown(state: State) -> State:
    """The state as a source tells it: what is neither known nor failed is an answer without figures."""
    memory = state.memory if state.memory or state.memory_error else MemoryReading(None, None)
    detail = state.detail if state.detail or state.detail_error else DetailReading()
    return replace(state, memory=memory, detail=detail)


def replayed(source: ReplaySource, info: DeviceInfo) -> State:
    told: dict[str, Any] = {}
    for name, ask in (("memory", source.memory), ("detail", source.detail)):
        try:
            told[name] = ask(info)
        except DeviceUnreadable as error:
            told[f"{name}_error"] = "ended" if "the recording ended" in str(error) else str(error)
    return State(**told)


def test_every_truncation_is_a_shorter_recording_or_a_sentence(tmp_path: Path) -> None:
    path = some(tmp_path / "whole")
    content, whole, seen = path.read_bytes(), lines(path), set()
    cut = tmp_path / "cut"
    for length in range(0, len(content), 7):
        cut.write_bytes(content[:length])
        try:
            with FrameRecording(cut, "devices") as recording:
                number = len(list(recording.frames()))
        except RecordingError:
            with pytest.raises(ConfigInvalid, match="cut"):
                ReplaySource(cut)
            continue
        ReplaySource(cut).close()
        assert not number or lines(cut) == whole[:number]
        seen.add(number)
    assert 0 in seen and max(seen) >= 3


def test_what_cannot_be_played(tmp_path: Path) -> None:
    for content in (b"", b"hello\n", b'{"format":"asciicast","version":1}\n'):
        (tmp_path / "r").write_bytes(content)
        with pytest.raises(ConfigInvalid, match=r"r is not a recording of pagetide; `vram-monitor record FILE` makes"):
            ReplaySource(tmp_path / "r")
    for path, said in ((tmp_path / "gone", "gone cannot be read: No such file"), (tmp_path, "be read: Is a directory")):
        with pytest.raises(ConfigInvalid, match=said):
            ReplaySource(path)
    with (tmp_path / "engine").open("wb") as file:
        FrameWriter(file.write, "engine", {"began": 1.0}).close()
    with pytest.raises(ConfigInvalid, match=r"is a recording of 'engine', not of 'devices': `pagetide replay .*engine`"):
        ReplaySource(tmp_path / "engine")


DEVICE = '{"uuid":"x","index":"0","kind":"gpu"}'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('"devices":7', "Expected `array | null`"),
        ('"devices":[{"uuid":"x","index":"0","kind":"tpu"}]', "Invalid enum value 'tpu'"),
        ('"devices":[{"uuid":"x"}]', "missing required field `index`"),
        (f'"devices":[{DEVICE},{DEVICE}]', "a device is named twice"),
        ('"memory":{"x":{"total_bytes":5}}', "missing required field `free_bytes`"),
        ('"memory":{"x":{"total_bytes":true,"free_bytes":1}}', "Expected `int | null`, got `bool`"),
        ('"memory":{"x":{"total_bytes":5,"free_bytes":-1}}', "-1 bytes free of 5"),
        ('"memory":{"x":{"total_bytes":5,"free_bytes":6}}', "6 bytes free of 5"),
        (f'"memory":{{"x":{{"total_bytes":{1 << 63},"free_bytes":1}}}}', "bytes free of"),
        ('"memory":{"x":null}', "Expected `str | object`"),
        ('"detail":{"x":{"utilization":"high"}}', "Expected `float | null`, got `str`"),
        ('"detail":{"x":{"processes":[{"pid":1}]}}', "missing required field `used_bytes`"),
        ('"detail":{"x":{"processes":[{"pid":1,"used_bytes":-1}]}}', "a process uses -1 bytes"),
    ],
)
def test_a_wrong_frame_is_told(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "r"
    with path.open("wb") as file:
        writer = FrameWriter(file.write, "devices", {"began": 100.0})
        writer.put(b'{"time":100.0,"full":true}', 100.0, True)
        writer.put(f'{{"time":100.5,"full":false,{content}}}'.encode(), 100.5, False)
        writer.close()
    with pytest.raises(ConfigInvalid) as refusal:
        ReplaySource(path)
    assert str(refusal.value).startswith(f"{path} has an invalid frame at second 0.500: ")
    assert said in str(refusal.value)


def test_it_plays_in_real_time_from_the_first_scan_to_its_end(tmp_path: Path) -> None:
    path, now_ns = some(tmp_path / "r"), 5
    source, (a, b, c) = ReplaySource(path, clock=lambda: now_ns), INFOS
    assert source.name == f"replay:{path}"
    now_ns = 1_000_000_000
    assert source.scan() == (a, c)
    now_ns += 60 * MS
    assert source.scan() == (a, b)
    with pytest.raises(DeviceUnreadable, match=r"it was not there at second 0\.1 of the recording") as refusal:
        source.memory(c)
    assert refusal.value.lost
    now_ns += 41 * MS
    for ask in (source.memory, source.detail):
        with pytest.raises(DeviceUnreadable, match=r"the recording ended, 0\.1 s after it began") as refusal:
            ask(a)
        assert refusal.value.lost
    source.close()
    source.close()
