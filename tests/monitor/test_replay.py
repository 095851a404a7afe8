"""Recordings: what is read back is what was fed, at every time; every torn or wrong file gives a sentence."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetide.monitor.errors import ConfigInvalid, DeviceUnreadable, MonitorError
from pagetide.monitor.recording import HEARTBEAT_S, IMPOSSIBLE, STALE, RecordedState, RecordingWriter, read_recording
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
    with RecordingWriter(path, snapshots[0], **options) as writer:
        for each in snapshots[1:]:
            writer.write(each)
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def some(path: Path) -> Path:
    """A small recording with every kind of line."""
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
    head = {"format": "pagetide-recording", "version": 1, "source": "nvml+host", "interval_s": 0.02}
    assert lines(some(tmp_path / "r")) == [
        head | {"devices": [a, c]},
        {"at_s": 0.0, "uuid": "GPU-a", "total_bytes": 1000, "free_bytes": 600},
        {"at_s": 0.0, "uuid": "GPU-a", "detail": whole},
        {"at_s": 0.0, "uuid": "HOST-c", "total_bytes": 1000, "free_bytes": 600},
        {"at_s": 0.02, "uuid": "GPU-a", "total_bytes": 1000, "free_bytes": 500},
        {"at_s": 0.04, "uuid": "GPU-a", "error": "GPU is lost"},
        {"at_s": 0.04, "uuid": "GPU-a", "detail_error": "lost"},
        {"at_s": 0.06, "devices": [a, b]},
        {"at_s": 0.06, "uuid": "GPU-a", "total_bytes": 1000, "free_bytes": 600},
        {"at_s": 0.06, "uuid": "GPU-a", "detail": whole | {"utilization": 0.75}},
        {"at_s": 0.06, "uuid": "MIG-b", "total_bytes": None, "free_bytes": 600},
        {"at_s": 0.1, "uuid": "GPU-a", "detail": {"utilization": 0.5}},
    ]  # fmt: skip


def test_a_quiet_recording_tells_that_it_goes_on_and_how_long_it_was(tmp_path: Path) -> None:
    times = [BEGAN_NS + step * 400 * MS for step in range(8)]
    path = record(tmp_path / "r", [snapshot(at, device(INFOS[0], at)) for at in times])
    assert [line["at_s"] for line in lines(path)[1:]] == [0.0, 1.2, 2.4, 2.8]
    assert HEARTBEAT_S == 1.0
    assert read_recording(path).duration_s == 2.8


def test_details_are_written_no_more_often_than_asked(tmp_path: Path) -> None:
    times = [BEGAN_NS + step * 250 * MS for step in range(9)]
    details = [replace(DETAIL, power_watts=float(step)) for step in range(9)]
    path = record(
        tmp_path / "r",
        [snapshot(at, device(INFOS[0], at, detail=detail)) for at, detail in zip(times, details, strict=True)],
    )
    assert [(line["at_s"], line["detail"]["power_watts"]) for line in lines(path) if "detail" in line] == [
        (0.0, 0.0), (1.0, 4.0), (2.0, 8.0),
    ]  # fmt: skip


def test_what_was_written_is_in_the_file_before_the_end_and_comes_in_order(tmp_path: Path) -> None:
    path = tmp_path / "r"
    with RecordingWriter(path, snapshot(BEGAN_NS, device(INFOS[0], BEGAN_NS))) as writer:
        for step in range(1, 5):
            at = BEGAN_NS + step * 20 * MS
            writer.write(snapshot(at, device(INFOS[0], at, free=step)))
            assert read_recording(path).state("GPU-a", step * 0.02).memory == MemoryReading(1000, step)
        with pytest.raises(ValueError, match="cannot follow"):
            writer.write(snapshot(BEGAN_NS + 4))


def test_a_recording_of_no_devices(tmp_path: Path) -> None:
    recording = read_recording(record(tmp_path / "none", [snapshot(BEGAN_NS)]))
    assert (recording.devices, recording.interval_s, recording.at(0)) == ((), None, {})


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_told_and_nothing_is_overwritten(tmp_path: Path) -> None:
    first, later_ns = snapshot(BEGAN_NS, device(INFOS[0], BEGAN_NS)), BEGAN_NS + 2_000 * MS
    writer = RecordingWriter(tmp_path / "r", first)
    with open("/dev/full", "w") as full:
        os.dup2(full.fileno(), writer._file.fileno())
    with pytest.raises(MonitorError, match="r ends at second 0: No space left on device"):
        writer.write(snapshot(later_ns, device(INFOS[0], later_ns, free=1)))
    writer.close()
    before = (tmp_path / "r").read_bytes()
    with pytest.raises(ConfigInvalid, match="r already exists and is not overwritten; name a new file"):
        RecordingWriter(tmp_path / "r", first)
    assert (tmp_path / "r").read_bytes() == before
    assert read_recording(tmp_path / "r").at(0)["GPU-a"].memory == MemoryReading(1000, 600)
    with pytest.raises(ConfigInvalid, match=r"cannot record to .*: No such file or directory"):
        RecordingWriter(tmp_path / "no folder" / "r", first)


amounts = st.one_of(st.none(), st.integers(0, 1 << 40))
texts = st.one_of(st.none(), st.text(max_size=5))
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
        at_ns += draw(st.integers(0, 3_000 * MS))
    return snapshots


def naive(snapshots: Sequence[Snapshot], at_ns: int) -> dict[str, RecordedState]:
    """What is known at that time: of each device that was there last, the last that was said of it."""
    states: dict[str, RecordedState] = {}
    present: tuple[str, ...] = ()
    for each in snapshots:
        if each.at_ns > at_ns:
            break
        present = tuple(device.info.uuid for device in each.devices)
        for told in each.devices:
            state = states.get(told.info.uuid, RecordedState())
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


@given(lives(), st.lists(st.integers(0, 24_000 * MS), max_size=8))
def test_what_is_read_is_what_was_fed_at_every_time(snapshots: list[Snapshot], times: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = record(Path(folder, "r"), snapshots, detail_interval_s=0)
        recording = read_recording(path)
        now_ns = BEGAN_NS
        source = ReplaySource(path, clock=lambda: now_ns)
        source.scan()
    last_ns = snapshots[-1].at_ns
    assert recording.duration_s == (last_ns - BEGAN_NS) / 1e9
    for now_ns in [*(each.at_ns for each in snapshots), *(BEGAN_NS + time for time in sorted(times))]:
        expected = naive(snapshots, now_ns)
        assert recording.at((now_ns - BEGAN_NS) / 1e9) == expected
        infos = source.scan()
        assert [info.uuid for info in infos] == list(expected)
        for info in infos:
            assert replayed(source, info) == (shown(expected[info.uuid]) if now_ns <= last_ns else ENDED)


ENDED = RecordedState(memory_error="ended", detail_error="ended")


def shown(state: RecordedState) -> RecordedState:
    """The state as a source tells it: what is neither known nor failed is an answer without figures."""
    memory = state.memory if state.memory or state.memory_error else MemoryReading(None, None)
    detail = state.detail if state.detail or state.detail_error else DetailReading()
    return replace(state, memory=memory, detail=detail)


def replayed(source: ReplaySource, info: DeviceInfo) -> RecordedState:
    told: dict[str, Any] = {}
    for name, ask in (("memory", source.memory), ("detail", source.detail)):
        try:
            told[name] = ask(info)
        except DeviceUnreadable as error:
            told[f"{name}_error"] = "ended" if "the recording ended" in str(error) else str(error)
    return RecordedState(**told)


def test_a_recording_tells_what_it_is_of(tmp_path: Path) -> None:
    recording, (a, b, c) = read_recording(some(tmp_path / "r")), INFOS
    assert (recording.source, recording.interval_s, recording.duration_s) == ("nvml+host", 0.02, 0.1)
    assert recording.devices == (a, c, b)
    assert [recording.devices_at(t) for t in (0, 0.05, 0.06, 99)] == [(a, c), (a, c), (a, b), (a, b)]
    with pytest.raises(KeyError):
        recording.state("GPU-z", 0)


def test_every_truncation_is_a_shorter_recording_or_a_sentence(tmp_path: Path) -> None:
    path = some(tmp_path / "whole")
    content = path.read_bytes()
    cut = tmp_path / "it's cut"
    ends = [position + 1 for position, byte in enumerate(content) if byte == ord("\n")]
    whole = read_recording(path)
    for length in range(len(content)):
        cut.write_bytes(content[:length])
        complete = [end for end in ends if end <= length + 1]  # a line is whole without its line break, too
        if length == 0 or not complete or length - complete[-1] > 0:
            with pytest.raises(ConfigInvalid) as refusal:
                read_recording(cut)
            message = str(refusal.value)
            assert str(cut) in message
            if length > len(b'{"format":"pagetide-recording"') and complete:
                assert f"line {len(complete) + 1}, is cut short" in message
                rescue = message.partition("is whole: ")[2].removesuffix(" > rescued.jsonl")
                assert shlex.split(rescue) == ["head", "-n", str(len(complete)), str(cut)]
                cut.write_bytes(b"".join(content.splitlines(keepends=True)[: len(complete)]))
        if length and complete:
            recording = read_recording(cut)
            assert recording.duration_s <= whole.duration_s
            before = recording.duration_s - 1e-9  # several lines may tell of the last instant
            assert recording.at(before) == whole.at(before)


HEAD = '{"format":"pagetide-recording"'


def test_what_is_no_recording(tmp_path: Path) -> None:
    none, path = "is not a recording of vram-monitor", tmp_path / "r"
    for content, said in {
        "": "is empty, not a recording",
        "\n": f"{none}; `vram-monitor record FILE` makes one",
        **dict.fromkeys(("hello\n", "[" * 100_000, "\x00\x01" * 10, '["pagetide-recording"]\n'), none),
        '{"format":"asciicast","version":1}\n': none,
        HEAD + ',"vers': "line 1, is cut short: nothing was recorded yet",
        HEAD + ',"version":2}\n': "is of version 2, but this pagetide reads version 1",
        HEAD + "}\n": "is of version None, but this",
        HEAD + ',"version":1}\n': "line 1, has None where a text should stand",
        HEAD + ',"version":1,"source":"host"}\n': "line 1, has devices that are not a list",
    }.items():
        path.write_text(content)
        with pytest.raises(ConfigInvalid) as refusal:
            read_recording(path)
        assert said in str(refusal.value) and str(path) in str(refusal.value)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "gone", "gone cannot be read: No such file"), (tmp_path, "be read: Is a directory")):
        with pytest.raises(ConfigInvalid, match=said):
            ReplaySource(path)


GPU, DEVICE = '"at_s":0.1,"uuid":"GPU-a"', '"uuid":"x","index":"0"'


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = some(tmp_path / "r")
    whole, content = len(lines(path)), path.read_bytes()
    for line, said in (
        ("", "is not JSON"),
        ("\xff", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"at_s":NaN}', "is not JSON: NaN is not a JSON number"),
        ("17", "is not JSON object"),
        ("{}", "needs at_s, a number of seconds, but has None"),
        ('{"at_s":true}', "needs at_s, a number of seconds, but has True"),
        ('{"at_s":1e400}', "needs at_s, a number of seconds, but has inf"),
        ('{"at_s":0.05}', "goes back in time: second 0.05 after second 0.1"),
        ('{"at_s":-1}', "needs at_s"),
        ('{"at_s":0.1,"free_bytes":1}', "has free_bytes but no uuid"),
        ('{"at_s":0.1,"uuid":"GPU-z","error":"x"}', "names a device that no line introduced: 'GPU-z'"),
        ('{"at_s":0.1,"uuid":[],"error":"x"}', "names a device that no line introduced: []"),
        (f"{{{GPU}}}", "must have total_bytes and free_bytes, or error, or detail, or detail_error, but has nothing"),
        (f'{{{GPU},"free_bytes":1}}', "but has free_bytes"),
        (f'{{{GPU},"error":null}}', "has None where a text should stand"),
        (f'{{{GPU},"total_bytes":true,"free_bytes":1}}', "has a wrong kind of total_bytes: True"),
        (f'{{{GPU},"total_bytes":1.5,"free_bytes":1}}', "has a wrong kind of total_bytes: 1.5"),
        (f'{{{GPU},"total_bytes":5,"free_bytes":-1}}', "has free_bytes that no memory has: -1"),
        (f'{{{GPU},"total_bytes":5,"free_bytes":6}}', "has more free bytes than there are: 6 of 5"),
        (f'{{{GPU},"total_bytes":{1 << 63},"free_bytes":1}}', "has total_bytes that no memory has"),
        (f'{{{GPU},"detail":7}}', "has 7 where DetailReading should stand"),
        (f'{{{GPU},"detail":{{"load":7}}}}', "has a DetailReading that lacks, or should not have: load"),
        (f'{{{GPU},"detail":{{"utilization":"high"}}}}', "has a wrong kind of utilization: 'high'"),
        (f'{{{GPU},"detail":{{"processes":7}}}}', "has processes that are not a list: 7"),
        (f'{{{GPU},"detail":{{"processes":[{{"pid":1}}]}}}}', "has a ProcessUse that lacks, or should not have: used"),
        ('{"at_s":0.1,"devices":7}', "has devices that are not a list"),
        (f'{{"at_s":0.1,"devices":[{{{DEVICE},"kind":"tpu"}}]}}', "unknown kind 'tpu'; known are gpu, mig, host"),
        (f'{{"at_s":0.1,"devices":[{{{DEVICE},"kind":"gpu"}},{{{DEVICE},"kind":"gpu"}}]}}', "names a device twice"),
    ):
        path.write_bytes(content + line.encode("latin-1") + b'\n{"at_s":9.0}\n')
        with pytest.raises(ConfigInvalid) as refusal:
            read_recording(path)
        assert str(refusal.value).startswith(f"the recording {path}, line {whole + 1}, ")
        assert said in str(refusal.value)
        assert str(refusal.value).endswith(f"; what stands before it is whole: head -n {whole} {path} > rescued.jsonl")


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
    now_ns += 40 * MS + 1
    for ask in (source.memory, source.detail):
        with pytest.raises(DeviceUnreadable, match=r"the recording ended, 0\.1 s after it began") as refusal:
            ask(a)
        assert refusal.value.lost
    source.close()
    source.close()
