"""monitor/poller.py: a scripted source, real threads, and the record as its readers see it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from monitors import wait_until

from pagetide.monitor import record_layout as layout
from pagetide.monitor.errors import DeviceUnreadable, NoSuchDevice, RecordError, SourceUnavailable
from pagetide.monitor.log_throttle import QUIET_NS
from pagetide.monitor.poller import HISTORY_SAMPLES, Poller, select
from pagetide.monitor.record import MAX_DEVICES, RecordReader, RecordWriter
from pagetide.monitor.snapshot import DetailReading, DeviceInfo, DeviceKind, MemoryReading, ProcessUse

GIB = 1 << 30
A, B = (DeviceInfo(f"GPU-{name}", str(i), DeviceKind.GPU, f"Card {name}") for i, name in enumerate("ab"))


class Scripted:
    """A source that says what the test wants it to say."""

    name = "scripted"

    def __init__(self, *infos: DeviceInfo) -> None:
        self.infos: tuple[DeviceInfo, ...] | Exception = infos
        self.answers: dict[str, MemoryReading | Exception] = {
            info.uuid: MemoryReading(4 * GIB, 3 * GIB) for info in infos
        }
        self.details: dict[str, DetailReading | Exception] = {}
        self.gates: dict[str, threading.Event] = {}
        self.asked = 0  # for memory
        self.closed = 0

    def scan(self) -> tuple[DeviceInfo, ...]:
        if isinstance(self.infos, Exception):
            raise self.infos
        return self.infos

    def memory(self, device: DeviceInfo) -> MemoryReading:
        self.asked += 1
        if gate := self.gates.get(device.uuid):
            gate.wait(60)
        answer = self.answers[device.uuid]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def detail(self, device: DeviceInfo) -> DetailReading:
        answer = self.details.get(device.uuid, DetailReading())
        if isinstance(answer, Exception):
            raise answer
        return answer

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
    source: Scripted,
    devices: tuple[str, ...] = (),
    *,
    interval_s: float = 0.002,
    detail_interval_s: float = 0.005,
    clock: Callable[[], int] = time.monotonic_ns,
) -> Iterator[tuple[Poller, RecordReader]]:
    with RecordWriter.private(source=source.name) as writer, RecordReader.of(writer) as reader:
        poller = Poller(
            source, writer, interval_s=interval_s, detail_interval_s=detail_interval_s, devices=devices, clock=clock
        )
        try:
            poller.start()
            yield poller, reader
        finally:
            for gate in source.gates.values():
                gate.set()
            poller.stop()


def test_what_the_source_says_is_in_the_record() -> None:
    source = Scripted(A, B)
    process = ProcessUse(17, GIB, user="me", command="train --fast")
    source.details[A.uuid] = DetailReading(0.5, 61.0, 300.0, 700.0, (process,))
    with polling(source) as (_, reader):
        assert reader.devices() == (A, B)
        wait_until(lambda: reader.memory(A.uuid).used_bytes == GIB and reader.detail(A.uuid).history[-1:] == (GIB,))
        memory = reader.memory(A.uuid)
        assert (memory.total_bytes, memory.free_bytes, memory.error, memory.failures) == (4 * GIB, 3 * GIB, None, 0)
        assert memory.interval_ns == 2_000_000
        detail = reader.detail(A.uuid)
        assert detail.reading == source.details[A.uuid]
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
        wait_until(lambda: len(caplog.records) > 1)
    told = [record.getMessage() for record in caplog.records]
    assert sum("device 0 (GPU-a) cannot be read: GPU is lost" in line for line in told) == 1
    assert sum("device 0 (GPU-a) answers again" in line for line in told) == 1


def test_a_fault_in_a_source_is_one_devices_error(caplog: pytest.LogCaptureFixture) -> None:
    source = Scripted(A, B)
    source.answers[A.uuid] = ZeroDivisionError("oops")
    source.details[B.uuid] = ZeroDivisionError("again")
    with polling(source) as (_, reader):
        wait_until(
            lambda: reader.memory(A.uuid).error and reader.detail(B.uuid).error and reader.memory(B.uuid).used_bytes
        )
        assert reader.memory(A.uuid).error == "ZeroDivisionError: oops"
        assert reader.detail(B.uuid).error == "ZeroDivisionError: again"
        polls = reader.memory(A.uuid).polls
        wait_until(lambda: reader.memory(A.uuid).polls > polls + 5)
    assert sum("oops" in (record.exc_text or "") for record in caplog.records) == 1
    assert sum("again" in (record.exc_text or "") for record in caplog.records) == 1


def test_one_that_flaps_is_told_once_in_ten_seconds_and_how_often(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    source, clock = Scripted(A), Clock()

    def turn(times: int) -> None:
        for number in range(times):
            failures = reader.memory(A.uuid).failures
            source.answers[A.uuid] = MemoryReading(GIB, number) if number % 2 else DeviceUnreadable("no answer")
            wait_until(lambda number=number: reader.memory(A.uuid).free_bytes == number or (  # type: ignore[misc]
                number % 2 == 0 and reader.memory(A.uuid).failures > failures  # noqa: B023
            ))  # fmt: skip

    with polling(source, clock=clock) as (_, reader):
        wait_until(lambda: reader.memory(A.uuid).used_bytes)
        turn(41)
        assert len(caplog.records) == 1
        clock.ahead_ns += QUIET_NS
        wait_until(lambda: len(caplog.records) > 1)
        polls = reader.memory(A.uuid).polls
        clock.ahead_ns += QUIET_NS
        wait_until(lambda: reader.memory(A.uuid).polls > polls + 20)
    assert [record.getMessage() for record in caplog.records] == [
        "device 0 (GPU-a) cannot be read: no answer",
        "device 0 (GPU-a) cannot be read: no answer (it changed 40 times in the last 10 s)",
    ]


def test_numbers_that_no_record_holds_are_one_devices_error(caplog: pytest.LogCaptureFixture) -> None:
    source, clock = Scripted(A, B), Clock()
    source.answers[A.uuid] = MemoryReading(100_000_000 << 40, 100_000_000 << 40)
    source.details[A.uuid] = DetailReading(utilization=object())  # type: ignore[arg-type]
    with polling(source, clock=clock) as (_, reader):
        wait_until(lambda: reader.memory(A.uuid).failures > 5 and reader.detail(A.uuid).error)
        memory = reader.memory(A.uuid)
        assert (memory.total_bytes, memory.free_bytes, memory.polls) == (None, None, memory.failures)
        assert str(memory.error).startswith(
            "the record holds no negative numbers, nor any of more than 64 bits: total_bytes"
        )
        assert "not JSON serializable" in str(reader.detail(A.uuid).error)
        clock.ahead_ns += QUIET_NS
        polls = reader.memory(B.uuid).polls
        wait_until(lambda: reader.memory(B.uuid).polls > polls + 5 and reader.detail(B.uuid).at_ns)
        source.answers[A.uuid] = MemoryReading(4 * GIB, GIB)
        source.details[A.uuid] = DetailReading(0.5)
        wait_until(lambda: reader.memory(A.uuid).used_bytes == 3 * GIB)
        wait_until(lambda: reader.detail(A.uuid).reading.utilization == 0.5)
    told = [record.getMessage() for record in caplog.records]
    assert sum("more than 64 bits: total_bytes, free_bytes" in line for line in told) == 1
    assert sum("the processes of device 0" in line for line in told) == 1


def test_one_that_hangs_grows_stale_while_the_other_goes_on() -> None:
    source = Scripted(A, B)
    with polling(source) as (_, reader):
        wait_until(lambda: reader.memory(A.uuid).used_bytes and reader.memory(B.uuid).used_bytes)
        source.gates[A.uuid] = threading.Event()
        wait_until(lambda: reader.memory(A.uuid).is_stale())
        polls = reader.memory(B.uuid).polls
        wait_until(lambda: reader.memory(B.uuid).polls > polls + 20)
        assert reader.memory(A.uuid).is_stale()
        source.gates.pop(A.uuid).set()
        wait_until(lambda: not reader.memory(A.uuid).is_stale())


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


@pytest.mark.parametrize("trouble", ["too many", "full"])
def test_devices_that_the_record_cannot_take_leave_those_that_were_there(
    trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pagetide.monitor.poller.SCAN_INTERVAL_S", 0.01)
    caplog.set_level(logging.INFO)
    source = Scripted(A, B)
    more = MAX_DEVICES if trouble == "too many" else 1
    others = tuple(DeviceInfo(f"MIG-{number}", f"0:{number}", DeviceKind.MIG) for number in range(more))
    source.answers |= {info.uuid: MemoryReading(GIB, 0) for info in others}
    refused = threading.Event()
    with polling(source) as (poller, reader):
        set_devices = poller._writer.set_devices

        def full(infos: Sequence[DeviceInfo]) -> None:
            if trouble == "full" and not refused.is_set():
                raise RecordError("cannot make room in the record: No space left on device")
            set_devices(infos)

        monkeypatch.setattr(poller._writer, "set_devices", full)
        source.infos = (B, *others, A)
        wait_until(lambda: caplog.records)
        with pytest.raises(RecordError, match=r"room"):
            poller.change(interval_s=0.5, detail_interval_s=0.5, devices=())
        polls = reader.memory(A.uuid).polls
        wait_until(lambda: reader.memory(A.uuid).polls > polls + 20 and not reader.memory(B.uuid).is_stale())
        assert reader.devices() == (A, B)
        assert reader.memory(A.uuid).interval_ns == 2_000_000
        refused.set()
        source.infos = (B, others[0], A)
        wait_until(lambda: reader.devices() == source.infos)
        wait_until(lambda: reader.memory(others[0].uuid).used_bytes == GIB)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("the devices changed, but those of before are watched on:")


def test_more_devices_than_a_record_takes_are_the_callers_error_at_the_start() -> None:
    infos = [DeviceInfo(f"MIG-{number}", f"0:{number}", DeviceKind.MIG) for number in range(MAX_DEVICES + 1)]
    with pytest.raises(RecordError, match=f"room for {MAX_DEVICES} devices"), polling(Scripted(*infos)):
        pass


def test_shorter_intervals_begin_at_once() -> None:
    source = Scripted(A)
    with polling(source, interval_s=3600, detail_interval_s=3600) as (poller, reader):
        wait_until(lambda: reader.memory(A.uuid).polls == 1 and reader.detail(A.uuid).at_ns)
        asked_ns = reader.detail(A.uuid).at_ns
        poller.change(interval_s=0.002, detail_interval_s=0.005, devices=())
        wait_until(lambda: reader.memory(A.uuid).polls > 5 and reader.detail(A.uuid).at_ns > asked_ns)
        record = reader._record
        assert record is not None

        def beat_interval_ns() -> int:
            words = record.words()
            assert words is not None
            return words[layout.BEAT_INTERVAL_NS]

        wait_until(lambda: beat_interval_ns() == 2 * 2_000_000)


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
        ("WARNING", "the file of the record was removed; another was laid in its place"),
        ("INFO", "the file of the record is as it was written again"),
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
    with pytest.raises(
        NoSuchDevice, match=r"no device 7, x; those that exist: 0 \(Card a, GPU-a\), 1 \(Card b, GPU-b\)"
    ):
        select((A, B), ("7", "0", "x"))
    with pytest.raises(NoSuchDevice, match="those that exist: none"):
        select((), ("0",))


def test_a_source_that_gives_nothing_at_the_start_is_the_callers_error() -> None:
    source = Scripted()
    source.infos = SourceUnavailable("no driver")
    with pytest.raises(SourceUnavailable, match="no driver"), polling(source):
        pass
    assert source.closed == 1


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
