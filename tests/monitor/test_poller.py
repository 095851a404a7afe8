"""The poller: a scripted source, real threads, and the record as its readers see it. Sources together, and by their names.

poll_workers.py: members that hang until let go. log_throttle.py, at times that the test says. trend.py against what is known
exactly, against a naive regression, and under any numbers.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from monitors import wait_until

from pagetide.monitor import record_layout as layout
from pagetide.monitor.device_frames import DeviceRecorder
from pagetide.monitor.errors import ConfigInvalid, DeviceUnreadable, NoSuchDevice, RecordError, SourceUnavailable
from pagetide.monitor.log_throttle import MAX_CAUSES, QUIET_CAUSE_NS, QUIET_NS, LogThrottle, Occurrences
from pagetide.monitor.poll_workers import QUICK_ANSWERS_TO_RETURN, PollWorkers, next_due_ns
from pagetide.monitor.poller import HISTORY_SAMPLES, Poller, select
from pagetide.monitor.record import MAX_DEVICES, RecordReader, RecordWriter
from pagetide.monitor.snapshot import DetailReading, DeviceInfo, DeviceKind, MemoryReading, ProcessUse, Snapshot
from pagetide.monitor.sources import Source
from pagetide.monitor.sources.combined import CombinedSource, open_source
from pagetide.monitor.trend import Trend

GIB = 1 << 30
A, B = (DeviceInfo(f"GPU-{name}", str(i), DeviceKind.GPU, f"Card {name}") for i, name in enumerate("ab"))


def answered(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


class Scripted:
    def __init__(self, *infos: DeviceInfo, name: str = "scripted") -> None:
        self.name = name
        self.infos: tuple[DeviceInfo, ...] | Exception = infos
        reading = MemoryReading(4 * GIB, 3 * GIB)
        self.answers: dict[str, MemoryReading | Exception] = {info.uuid: reading for info in infos}
        self.details: dict[str, DetailReading | Exception] = {}
        self.gates: dict[str, threading.Event] = {}
        self.asked = 0  # for memory
        self.closed = 0

    def scan(self) -> tuple[DeviceInfo, ...]:
        return answered(self.infos)

    def memory(self, device: DeviceInfo) -> MemoryReading:
        self.asked += 1
        if gate := self.gates.get(device.uuid):
            gate.wait(60)
        return answered(self.answers[device.uuid])

    def detail(self, device: DeviceInfo) -> DetailReading:
        return answered(self.details.get(device.uuid, DetailReading()))

    def close(self) -> None:
        self.closed += 1


class Clock:
    """The monotonic clock, and as much later as a test says."""

    def __init__(self) -> None:
        self.ahead_ns = 0

    def __call__(self) -> int:
        return time.monotonic_ns() + self.ahead_ns


@contextmanager
def polling(
    source: Scripted, interval_s: float = 0.002, detail_interval_s: float = 0.005, **options: Any
) -> Iterator[tuple[Poller, RecordReader]]:
    with RecordWriter.private(source=source.name) as writer, RecordReader.of(writer) as reader:
        poller = Poller(source, writer, interval_s=interval_s, detail_interval_s=detail_interval_s, **options)
        try:
            poller.start()
            yield poller, reader
        finally:
            for gate in source.gates.values():
                gate.set()
            poller.stop()


def test_what_the_source_says_is_in_the_record() -> None:
    source, process = Scripted(A, B), ProcessUse(17, GIB, user="me", command="train --fast")
    source.details[A.uuid] = DetailReading(0.5, 61.0, 300.0, 700.0, (process,))
    with polling(source) as (_, reader):
        assert reader.devices() == (A, B)
        wait_until(lambda: reader.memory(A.uuid).used_bytes == GIB and reader.detail(A.uuid).history[-1:] == (GIB,))
        memory = reader.memory(A.uuid)
        assert (memory.total_bytes, memory.free_bytes, memory.error, memory.failures) == (4 * GIB, 3 * GIB, None, 0)
        assert memory.interval_ns == 2_000_000 and reader.detail(A.uuid).reading == source.details[A.uuid]
        wait_until(lambda: len(reader.detail(A.uuid).history) == HISTORY_SAMPLES)
        assert reader.is_live()
    assert source.closed == 1


def test_one_device_that_fails_hides_no_other_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    source, clock = Scripted(A, B), Clock()
    with polling(source, clock=clock) as (_, reader):
        wait_until(lambda: reader.memory(A.uuid).used_bytes)
        source.answers[A.uuid] = DeviceUnreadable("GPU is lost", lost=True)
        wait_until(lambda: reader.memory(A.uuid).error)
        lost = reader.memory(A.uuid)
        assert (lost.total_bytes, lost.free_bytes, lost.used_bytes, lost.error) == (None, None, None, "GPU is lost")
        polls = reader.memory(B.uuid).polls
        wait_until(lambda: reader.memory(B.uuid).polls > polls + 5 and reader.memory(A.uuid).failures > 5)
        assert reader.memory(B.uuid).error is None and reader.memory(B.uuid).failures == 0
        source.answers[A.uuid] = MemoryReading(4 * GIB, GIB)
        wait_until(lambda: reader.memory(A.uuid).used_bytes == 3 * GIB)
        failures = reader.memory(A.uuid).failures
        assert 5 < failures < reader.memory(A.uuid).polls
        clock.ahead_ns += QUIET_NS
        wait_until(lambda: "answers again" in caplog.text)
    told = [record.getMessage() for record in caplog.records]
    assert sum("device 0 (GPU-a) cannot be read: GPU is lost" in line for line in told) == 1
    assert sum("device 0 (GPU-a) answers again" in line for line in told) == 1


def test_faults_and_numbers_that_no_record_holds_are_one_devices_error(caplog: pytest.LogCaptureFixture) -> None:
    source, clock = Scripted(A, B), Clock()
    source.answers[A.uuid] = MemoryReading(100_000_000 << 40, 100_000_000 << 40)
    source.details[A.uuid] = DetailReading(utilization=object())  # type: ignore[arg-type]
    source.details[B.uuid] = ZeroDivisionError("again")
    with polling(source, clock=clock) as (_, reader):
        wait_until(lambda: reader.memory(A.uuid).failures > 5 and reader.detail(A.uuid).error)
        memory = reader.memory(A.uuid)
        assert (memory.total_bytes, memory.free_bytes, memory.polls) == (None, None, memory.failures)
        said = "the record holds no negative numbers, nor any of more than 64 bits: total_bytes"
        assert str(memory.error).startswith(said)
        assert "not JSON serializable" in str(reader.detail(A.uuid).error)
        clock.ahead_ns += QUIET_NS
        polls = reader.memory(B.uuid).polls
        wait_until(lambda: reader.memory(B.uuid).polls > polls + 5 and reader.detail(B.uuid).error)
        assert reader.detail(B.uuid).error == "ZeroDivisionError: again"
        source.answers[A.uuid] = ZeroDivisionError("oops")
        wait_until(lambda: reader.memory(A.uuid).error == "ZeroDivisionError: oops")
        polls = reader.memory(A.uuid).polls
        wait_until(lambda: reader.memory(A.uuid).polls > polls + 5)
        source.answers[A.uuid], source.details[A.uuid] = MemoryReading(4 * GIB, GIB), DetailReading(0.5)
        wait_until(lambda: reader.memory(A.uuid).used_bytes == 3 * GIB)
        wait_until(lambda: reader.detail(A.uuid).reading.utilization == 0.5)
    told = [record.getMessage() for record in caplog.records]
    assert sum("more than 64 bits: total_bytes, free_bytes" in line for line in told) == 1
    assert sum("the processes of device 0" in line for line in told) == 1
    for fault in ("oops", "again"):
        assert sum(fault in (record.exc_text or "") for record in caplog.records) == 1


def test_devices_come_and_go_and_their_counters_never_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagetide.monitor.poller.SCAN_INTERVAL_S", 0.01)
    source = Scripted(A, B)
    with polling(source) as (_, reader):
        wait_until(lambda: reader.memory(A.uuid).polls > 10)
        before = reader.memory(A.uuid).polls
        source.infos = (B,)
        wait_until(lambda: reader.devices() == (B,))
        with pytest.raises(NoSuchDevice, match="GPU-b"):
            reader.memory(A.uuid)
        source.infos = SourceUnavailable("the driver is gone")
        polls = reader.memory(B.uuid).polls
        wait_until(lambda: reader.memory(B.uuid).polls > polls + 5)
        assert reader.devices() == (B,)
        source.infos = (B, A)
        wait_until(lambda: reader.devices() == (B, A))
        wait_until(lambda: reader.memory(A.uuid).at_ns)
        assert reader.memory(A.uuid).polls > before


def test_devices_that_the_record_cannot_take(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("pagetide.monitor.poller.SCAN_INTERVAL_S", 0.01)
    caplog.set_level(logging.INFO)
    source = Scripted(A, B)
    others = tuple(DeviceInfo(f"MIG-{number}", f"0:{number}", DeviceKind.MIG) for number in range(MAX_DEVICES))
    source.answers |= {info.uuid: MemoryReading(GIB, 0) for info in others}
    with polling(source) as (poller, reader):
        source.infos = (B, *others, A)
        wait_until(lambda: caplog.records)
        with pytest.raises(RecordError, match=r"room"):
            poller.change(interval_s=0.5, detail_interval_s=0.5, devices=())
        polls = reader.memory(A.uuid).polls
        wait_until(lambda: reader.memory(A.uuid).polls > polls + 20 and not reader.memory(B.uuid).is_stale())
        assert reader.devices() == (A, B)
        assert reader.memory(A.uuid).interval_ns == 2_000_000
        source.infos = (B, others[0], A)
        wait_until(lambda: reader.devices() == source.infos)
        wait_until(lambda: reader.memory(others[0].uuid).used_bytes == GIB)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("the devices changed; still watching the previous ones:")


def test_shorter_intervals_begin_at_once() -> None:
    source = Scripted(A)
    with polling(source, interval_s=3600, detail_interval_s=3600) as (poller, reader):
        wait_until(lambda: reader.memory(A.uuid).polls == 1 and reader.detail(A.uuid).at_ns)
        asked_ns = reader.detail(A.uuid).at_ns
        poller.change(interval_s=0.002, detail_interval_s=0.005, devices=())
        wait_until(lambda: reader.memory(A.uuid).polls > 5 and reader.detail(A.uuid).at_ns > asked_ns)
        wait_until(lambda: reader._record.words()[layout.BEAT_INTERVAL_NS] == 2 * 2_000_000)


def test_a_harmed_record_is_laid_anew_within_a_second_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagetide.monitor.poller.LONGEST_BEAT_S", 0.002)  # in place of a second
    caplog.set_level(logging.INFO)
    path, clock = tmp_path / "record", Clock()
    with RecordWriter.create(path, source="scripted") as writer:
        poller = Poller(Scripted(A), writer, interval_s=3600, detail_interval_s=3600, clock=clock)
        try:
            poller.start()
            for _ in range(3):
                path.unlink()
                wait_until(path.exists)
            clock.ahead_ns += QUIET_NS
            wait_until(lambda: len(caplog.records) > 1)
            path.rename(path.with_name("moved"))
            path.touch()
            clock.ahead_ns += QUIET_NS
            wait_until(lambda: len(caplog.records) > 2)
            path.unlink()
            wait_until(path.exists)
        finally:
            poller.stop()
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert told[:2] == [
        ("WARNING", "the record's file was removed; it was replaced"),
        ("INFO", "the record's file is intact again"),
    ]
    assert told[2][0] == "WARNING" and "another file lies at" in told[2][1]
    assert len(told) == 3


def test_only_the_devices_that_were_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagetide.monitor.poller.SCAN_INTERVAL_S", 0.01)
    source = Scripted(A, B)
    with polling(source, devices=("1",)) as (poller, reader):
        assert reader.devices() == (B,)
        wait_until(lambda: reader.memory(B.uuid).polls > 20)
        assert reader.devices() == (B,)
        poller.change(interval_s=0.001, detail_interval_s=0.004, devices=(A.uuid,))
        wait_until(lambda: reader.devices() == (A,) and reader.memory(A.uuid).interval_ns == 1_000_000)
        with pytest.raises(NoSuchDevice):
            poller.change(interval_s=0.5, detail_interval_s=0.5, devices=("7",))
        wait_until(lambda: reader.memory(A.uuid).polls > 5)
        assert reader.memory(A.uuid).interval_ns == 1_000_000


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    there = r"no device 7, x; those that exist: 0 \(Card a, GPU-a\), 1 \(Card b, GPU-b\)"
    with pytest.raises(NoSuchDevice, match=there):
        select((A, B), ("7", "0", "x"))
    with pytest.raises(NoSuchDevice, match="those that exist: none"):
        select((), ("0",))


def test_a_driver_that_is_inside_a_call_is_not_shut_down() -> None:
    source = Scripted(A)
    gate = source.gates[A.uuid] = threading.Event()
    with RecordWriter.private(source="scripted") as writer:
        poller = Poller(source, writer, interval_s=0.002)
        poller.start()
        wait_until(lambda: source.asked)
        poller.stop(timeout_s=0.05)
        assert source.closed == 0
        gate.set()
        poller.stop(timeout_s=30)
        assert source.closed == 1


def test_what_fails_at_the_start_is_the_callers_error() -> None:
    source = Scripted()
    source.infos = SourceUnavailable("no driver")
    with pytest.raises(SourceUnavailable, match="no driver"), polling(source):
        pass
    assert source.closed == 1
    infos = [DeviceInfo(f"MIG-{number}", f"0:{number}", DeviceKind.MIG) for number in range(MAX_DEVICES + 1)]
    with pytest.raises(RecordError, match=f"room for {MAX_DEVICES} devices"), polling(Scripted(*infos)):
        pass


def scripted(name: str, *uuids: str, reason: str | None = None) -> Scripted:
    """A source of GPUs of these uuids, which tells their places; without a driver as long as there is a reason."""
    infos = [DeviceInfo(uuid, str(place), DeviceKind.GPU) for place, uuid in enumerate(uuids)]
    source = Scripted(*infos, name=name)
    source.answers = {uuid: MemoryReading(100, place) for place, uuid in enumerate(uuids)}
    source.details = {uuid: DetailReading(utilization=place / 10) for place, uuid in enumerate(uuids)}
    source.infos = SourceUnavailable(reason) if reason else source.infos
    return source


def uuids(source: Source) -> list[str]:
    return [info.uuid for info in source.scan()]


def test_devices_of_all_in_order_each_asked_by_its_own() -> None:
    first, second = scripted("nvml", "GPU-a", "GPU-b"), scripted("host", "HOST-c")
    source = CombinedSource([first, second])
    assert source.name == "nvml+host"
    infos = source.scan()
    assert [info.uuid for info in infos] == ["GPU-a", "GPU-b", "HOST-c"]
    assert [source.memory(info).free_bytes for info in infos] == [0, 1, 0]
    assert [source.detail(info).utilization for info in infos] == [0, 0.1, 0]
    assert source.unavailable == {}
    first.infos = scripted("nvml", "GPU-a").infos  # the other one leaves, and is nobody's
    source.scan()
    for ask in (source.memory, source.detail):
        with pytest.raises(DeviceUnreadable, match=r"none of nvml\+host has a device GPU-b now") as refusal:
            ask(infos[1])
        assert refusal.value.lost


def test_one_that_is_not_available_hides_nobody_and_comes_later(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first, second = scripted("nvml", "GPU-a", reason="no driver"), scripted("host", "HOST-c")
    source = CombinedSource([first, second])
    for _ in range(3):
        assert uuids(source) == ["HOST-c"]
        assert source.unavailable == {"nvml": "no driver"}
    first.infos = SourceUnavailable("no permission")
    source.scan()
    first.infos = scripted("nvml", "GPU-a").infos
    assert uuids(source) == ["GPU-a", "HOST-c"]
    assert source.unavailable == {}
    assert caplog.messages == [
        "nvml is not available: no driver",
        "nvml is not available: no permission",
        "nvml is available now",
    ]


def test_devices_that_are_lost_with_their_source_are_seen_to_be_lost() -> None:
    first, second = scripted("nvml", "GPU-a"), scripted("host", "HOST-c")
    source = CombinedSource([first, second])
    gpu, host = source.scan()
    first.infos = SourceUnavailable("driver unloaded")
    first.answers["GPU-a"] = DeviceUnreadable("driver unloaded", lost=True)
    assert source.scan() == (gpu, host)
    assert source.unavailable == {"nvml": "driver unloaded"}
    with pytest.raises(DeviceUnreadable, match="driver unloaded"):
        source.memory(gpu)
    assert source.memory(host) == MemoryReading(100, 0)


def test_without_any_source_every_reason_is_told() -> None:
    source = CombinedSource([scripted("nvml", reason="no driver"), scripted("host", reason="no memory")])
    with pytest.raises(SourceUnavailable, match=r"^nvml: no driver; host: no memory$"):
        source.scan()
    assert source.unavailable == {"nvml": "no driver", "host": "no memory"}


def test_closing_closes_all_whatever_one_says() -> None:
    class Stubborn(Scripted):
        def close(self) -> None:
            super().close()
            raise OSError("no")

    fakes = Scripted(), Stubborn(), Scripted()
    source = CombinedSource(fakes)
    with pytest.raises(OSError, match="no"):
        source.close()
    assert [fake.closed for fake in fakes] == [1, 1, 1]


def test_auto_is_the_gpus_and_the_host_for_which_a_test_device_may_stand() -> None:
    with closing(open_source("auto")) as source:
        assert source.name == "nvml+host"
        *gpus, host = source.scan()
        assert (host.index, host.kind) == ("host", DeviceKind.HOST)
        assert all(device.kind is not DeviceKind.HOST for device in gpus)
    for spec in ("auto", "host"):
        with closing(open_source(spec, capacity_bytes=2 << 30, members=[os.getpid()])) as source:
            device = source.scan()[-1]
            assert source.memory(device).total_bytes == 2 << 30
            assert [use.pid for use in source.detail(device).processes or ()] == [os.getpid()]


def test_named_sources_and_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a:b.jsonl.gz"
    DeviceRecorder(path, Snapshot(1, "host", 1, 1, ())).close()
    for spec in ("nvml", "host", f"replay:{path}"):
        with closing(open_source(spec)) as source:
            assert source.name == spec
    refused: list[tuple[str, dict[str, Any], str]] = [
        *(
            (spec, {}, f"^unknown source {spec!r}; known are auto, nvml, host and replay:FILE$")
            for spec in ("", "cuda", "Host", "host:", "nvml:0", "replay", "replay=x")
        ),
        *(
            (spec, options, f"test device of host memory; the source {spec} has none")
            for spec in ("nvml", "replay:x")
            for options in ({"capacity_bytes": 1 << 30}, {"members": [1]})
        ),
        ("replay:", {}, "replay: needs the file to play"),
        ("auto", {"members": [os.getpid()]}, "name its size too"),
    ]
    for spec, options, said in refused:
        with pytest.raises(ConfigInvalid, match=said):
            open_source(spec, **options)


MS = 1_000_000


class Asked:
    """Counts who was asked; hangs those that shall hang; notes who was asked twice at the same time."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.gates: dict[str, threading.Event] = {}
        self.at_once: set[str] = set()
        self.twice: list[str] = []

    def __call__(self, member: str) -> None:
        if member in self.at_once:
            self.twice.append(member)
        self.at_once.add(member)
        if gate := self.gates.get(member):
            gate.wait(60)
        self.counts[member] += 1
        self.at_once.discard(member)


@contextmanager
def lanes_of(asked: Callable[[str], None]) -> Iterator[tuple[PollWorkers[str], list[str]]]:
    late: list[str] = []
    workers = PollWorkers("test", asked, MS, late=late.append)
    try:
        yield workers, late
    finally:
        workers.stop(10)


def threads() -> int:
    return sum(thread.name == "test" for thread in threading.enumerate())


def test_those_that_hang_go_on_alone_and_come_back() -> None:
    asked = Asked()
    with lanes_of(asked) as (workers, late):
        gates = asked.gates = {name: threading.Event() for name in "bc"}
        workers.set_members(["a", "b", "c"])
        wait_until(lambda: (workers.separate_slow(), sorted(late) == ["b", "c"])[1])
        before = asked.counts.copy()
        wait_until(lambda: asked.counts["a"] > before["a"] + 50)
        assert (asked.counts["b"], asked.counts["c"], threads()) == (before["b"], before["c"], 3)
        workers.separate_slow()
        assert sorted(late) == ["b", "c"], "told once"
        asked.gates = {}
        for gate in gates.values():
            gate.set()
        wait_until(lambda: all(asked.counts[name] > before[name] + QUICK_ANSWERS_TO_RETURN for name in "bc"))
        wait_until(lambda: threads() == 1)
        at = asked.counts["b"]
        wait_until(lambda: asked.counts["b"] > at + 10)
    assert asked.twice == []


def test_who_left_is_asked_no_more_even_after_it_hung() -> None:
    asked = Asked()
    with lanes_of(asked) as (workers, late):
        gate = asked.gates["a"] = threading.Event()
        workers.set_members(["a", "b"])
        wait_until(lambda: (workers.separate_slow(), late == ["a"])[1])
        workers.set_members(["b", "c"])
        wait_until(lambda: asked.counts["c"] > 5)
        gate.set()
        wait_until(lambda: threads() == 1)
        assert asked.counts["a"] == 1


def test_no_member_is_asked_twice_at_once_whatever_hangs() -> None:
    rng, asked = random.Random(7), Asked()
    with lanes_of(asked) as (workers, _):
        for _ in range(30):
            slow = rng.choice("abcd")
            gate = asked.gates[slow] = threading.Event()
            workers.set_members(rng.sample("abcd", rng.randint(1, 4)))
            workers.separate_slow()
            before = sum(asked.counts.values())
            wait_until(lambda before=before: asked.at_once or sum(asked.counts.values()) > before)
            workers.separate_slow()
            del asked.gates[slow]
            gate.set()
    assert asked.twice == []


def test_what_asking_raises_ends_no_lane_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    asked = Asked()

    def fail_for_a(member: str) -> None:
        asked(member)
        if member == "a":
            raise ZeroDivisionError("oops")

    with lanes_of(fail_for_a) as (workers, late):
        workers.set_members(["a", "b"])
        wait_until(lambda: all(asked.counts[name] > 20 for name in "ab"))
        assert threads() == 1
        assert max(asked.counts.values()) - min(asked.counts.values()) <= 1
    assert late == [] and threads() == 0
    (told,) = caplog.records
    assert told.getMessage() == "polling test failed; trying again" and "oops" in (told.exc_text or "")


def test_a_shorter_interval_wakes_every_lane_and_stopping_too() -> None:
    asked = Asked()
    with lanes_of(asked) as (workers, late):
        gate = asked.gates["b"] = threading.Event()
        workers.set_members(["a", "b"])
        wait_until(lambda: (workers.separate_slow(), late == ["b"])[1])
        workers.set_interval(3600 * 1000 * MS)
        assert workers.interval_ns == 3600 * 1000 * MS
        gate.set()
        del asked.gates["b"]
        wait_until(lambda: not asked.at_once)
        before = asked.counts.copy()
        workers.set_interval(MS)
        wait_until(lambda: all(asked.counts[name] > before[name] + 5 for name in "ab"))
        workers.set_interval(3600 * 1000 * MS)
    assert threads() == 0


@given(due=st.integers(0, 10**12), took=st.integers(0, 10**10), interval=st.integers(1, 10**9))
def test_rounds_keep_the_beat_and_never_come_in_bursts(due: int, took: int, interval: int) -> None:
    following = next_due_ns(due, due + took, interval)
    assert (following - due) % interval == 0
    assert due + took < following <= due + took + interval


def test_what_changes_seldom_is_told_each_time_and_at_once() -> None:
    news = LogThrottle()
    assert news.record(None, 0) == 0
    for number, state in enumerate(["lost", None, "slow", "lost"]):
        assert news.record(state, number * QUIET_NS) == 1
        assert news.record(state, number * QUIET_NS + 1) == 0
        assert news.state == state


def test_what_flaps_is_told_when_it_was_quiet_for_long_enough_with_the_number_of_changes() -> None:
    news = LogThrottle()
    told = [news.record("lost" if number % 2 == 0 else None, number) for number in range(101)]
    assert told == [1] + [0] * 100
    assert news.record("lost", QUIET_NS - 1) == 0
    assert news.record("lost", QUIET_NS) == 100
    assert [news.record("lost", time) for time in (QUIET_NS + 1, 2 * QUIET_NS, 9 * QUIET_NS)] == [0, 0, 0]
    assert news.record(None, 9 * QUIET_NS + 1) == 1


def test_what_happens_again_and_again_is_told_at_once_and_then_once_a_minute_for_each_cause() -> None:
    occurrences = Occurrences()
    assert [occurrences.record("a", time) for time in range(5)] == [1, 0, 0, 0, 0]
    assert [occurrences.record("b", time) for time in range(3)] == [1, 0, 0]
    assert occurrences.record("a", QUIET_CAUSE_NS - 1) == 0
    assert occurrences.record("a", QUIET_CAUSE_NS) == 6
    assert occurrences.record("a", QUIET_CAUSE_NS + 1) == 0
    assert occurrences.record("b", 5 * QUIET_CAUSE_NS) == 3


def test_many_causes_cost_a_bounded_amount() -> None:
    occurrences = Occurrences()
    for number in range(1000):
        assert occurrences.record(str(number), number) == 1
    assert len(occurrences._causes) == MAX_CAUSES
    assert occurrences.record("999", 1000) == 0
    assert occurrences.record("0", 1000) == 1


SECOND, TAU_S, MIB = 10**9, 5.0, 1 << 20

Samples = Sequence[tuple[int, int]]


def trends(samples: Samples) -> list[float | None]:
    trend = Trend()
    return [trend.update(at_ns, used) for at_ns, used in samples]


def sampled(used: Callable[[float], float], times_s: Sequence[float]) -> Samples:
    return [(round(at * SECOND), round(used(at))) for at in times_s]


def every(step_s: float, until_s: float) -> list[float]:
    return [step * step_s for step in range(round(until_s / step_s) + 1)]


def irregular(seed: int, until_s: float, longest_s: float) -> list[float]:
    rng, times = random.Random(seed), [0.0]
    while times[-1] < until_s:
        times.append(times[-1] + rng.uniform(0.001, longest_s))
    return times


def naive(samples: Samples) -> float:
    """Weighted least squares over the whole past, with nothing incremental in it."""
    end = samples[-1][0]
    ages = [(end - at_ns) / SECOND / TAU_S for at_ns, _ in samples]
    # a sample stands for the time since the one before, the first for all the time before it
    weights = [math.exp(-ages[0])] + [math.exp(-age) - math.exp(-before) for before, age in pairwise(ages)]
    assert sum(weights) == pytest.approx(1)
    mean_x = sum(w * -a * TAU_S for w, a in zip(weights, ages, strict=True))
    mean_y = sum(w * used for w, (_, used) in zip(weights, samples, strict=True))
    apart = [(w, -a * TAU_S - mean_x, used - mean_y) for w, a, (_, used) in zip(weights, ages, samples, strict=True)]
    cov = sum(w * x * y for w, x, y in apart)
    var_x = sum(w * x * x for w, x, _ in apart)
    var_y = sum(w * y * y for w, _, y in apart)
    explained = cov * cov / (var_x * var_y) if var_y else 0.0
    return cov / var_x * max(0.0, (explained - 0.1) / 0.9)


@pytest.mark.parametrize("rate", [1, 1000, 3 * GIB, -GIB // 7])
@pytest.mark.parametrize("times", [every(0.02, 60), every(1, 60), irregular(1, 60, 1.5)], ids=["20 ms", "1 s", "any"])
def test_constant_growth_is_told_exactly_from_the_first_word_on(rate: int, times: list[float]) -> None:
    found = trends(sampled(lambda at: 100 * GIB + rate * at * 1000, times))
    said = [value for value in found if value is not None]
    assert len(said) == sum(at >= TAU_S for at in times)
    assert said == pytest.approx([rate * 1000] * len(said), rel=2e-3)  # bytes are whole
    assert found[: len(found) - len(said)] == [None] * (len(found) - len(said))


def test_a_single_step_counts_little_and_not_for_long_and_a_staircase_is_the_slope_it_climbs() -> None:
    for step in (10 * GIB, -GIB):
        found = trends(sampled(lambda at, step=step: 20 * GIB + (step if at > 20 else 0), every(0.02, 100)))  # type: ignore[misc]
        after = [value for value in found[round(20 / 0.02) + 1 :] if value is not None]
        assert max(abs(value) for value in after) == pytest.approx(0.23 * abs(step) / TAU_S, rel=0.01)
        assert all(value * step >= 0 for value in after)
        assert set(after[round(6 * TAU_S / 0.02) :]) == {0.0}
    for period_s in (0.5, 1, 2, 5):
        found = trends(sampled(lambda at, s=period_s: math.floor(at / s) * s * GIB, every(0.02, 120)))  # type: ignore[misc]
        assert all(value == pytest.approx(GIB, rel=0.2) for value in found[round(60 / 0.02) :])


@given(seed=st.integers(0, 2**32 - 1))
def test_it_agrees_with_a_naive_regression(seed: int) -> None:
    rng, used, samples = random.Random(seed), 50 * GIB, []
    for at in irregular(seed, 30, rng.choice([0.02, 0.5, 4])):
        used += rng.choice([0, 0, rng.randrange(-GIB, 2 * GIB)])
        samples.append((7 * 10**15 + round(at * SECOND), used))
    found = trends(samples)
    for end in range(1, len(samples), 1 + len(samples) // 20):
        if (value := found[end]) is not None:
            assert value == pytest.approx(naive(samples[: end + 1]), rel=1e-6, abs=1e-3)


def test_it_keeps_its_digits_over_years_and_at_any_level() -> None:
    year_ns, trend = 365 * 86400 * SECOND, Trend()
    for step in range(1000):
        value = trend.update(40 * year_ns + step * 20_000_000, 2**63 + step * 20)
    assert value == pytest.approx(1000, rel=1e-9)


def speaking() -> Trend:
    trend = Trend()
    for at_ns, used in sampled(lambda at: at * GIB, every(0.02, 10)):
        value = trend.update(at_ns, used)
    assert value is not None
    return trend


@pytest.mark.parametrize(("at_s", "used"), [(10.02, None), (15.5, 0), (9.9, 0)], ids=["unknown", "quiet", "backwards"])
def test_what_breaks_the_past_off_starts_anew(at_s: float, used: int | None) -> None:
    trend = speaking()
    assert trend.update(round(at_s * SECOND), used) is None
    found = [trend.update(round((at_s + at) * SECOND), round(at * MIB)) for at in every(0.02, 10)]
    assert found[: round(TAU_S / 0.02)] == [None] * round(TAU_S / 0.02)
    assert found[-1] == pytest.approx(MIB, rel=1e-6)  # nothing of the GiB before


def test_reset_forgets_and_a_time_constant_below_one_is_refused() -> None:
    trend = speaking()
    trend.reset()
    assert trend.update(round(10.02 * SECOND), 0) is None
    assert trend.update(round(10.04 * SECOND), GIB) is None
    with pytest.raises(ValueError, match="at least 1 ns, got 0"):
        Trend(0)
    assert speaking().update(10 * SECOND, 10 * GIB) == pytest.approx(GIB, rel=1e-6)  # again, at one instant


@given(st.lists(st.tuples(st.integers(0, 2**63), st.none() | st.integers(0, 2**64 - 1))), st.integers(1, 2**63))
def test_it_is_always_finite(samples: list[tuple[int, int | None]], time_constant_ns: int) -> None:
    trend = Trend(time_constant_ns)
    for at_ns, used in sorted(samples, key=lambda sample: sample[0]) + samples:
        value = trend.update(at_ns, used)
        assert value is None or math.isfinite(value)
