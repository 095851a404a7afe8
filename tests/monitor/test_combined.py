"""Several sources as one, and the sources by their names."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from pagetide.monitor.errors import ConfigInvalid, DeviceUnreadable, SourceUnavailable
from pagetide.monitor.recording import RecordingWriter
from pagetide.monitor.snapshot import DetailReading, DeviceInfo, DeviceKind, MemoryReading, Snapshot
from pagetide.monitor.sources import Source
from pagetide.monitor.sources.combined import CombinedSource
from pagetide.monitor.sources.opening import open_source


class Fake:
    """A source that is there as long as `reason` is None."""

    def __init__(self, name: str, *uuids: str, reason: str | None = None) -> None:
        self.name = name
        self.reason = reason
        self.uuids = uuids
        self.closed = 0

    def scan(self) -> tuple[DeviceInfo, ...]:
        if self.reason is not None:
            raise SourceUnavailable(self.reason)
        return tuple(DeviceInfo(uuid, str(index), DeviceKind.GPU) for index, uuid in enumerate(self.uuids))

    def memory(self, device: DeviceInfo) -> MemoryReading:
        if self.reason is not None:
            raise DeviceUnreadable(self.reason, lost=True)
        return MemoryReading(100, self.uuids.index(device.uuid))

    def detail(self, device: DeviceInfo) -> DetailReading:
        return DetailReading(utilization=self.uuids.index(device.uuid) / 10)

    def close(self) -> None:
        self.closed += 1


def uuids(source: Source) -> list[str]:
    return [info.uuid for info in source.scan()]


def test_devices_of_all_in_order_each_asked_by_its_own() -> None:
    first, second = Fake("nvml", "GPU-a", "GPU-b"), Fake("host", "HOST-c")
    source = CombinedSource([first, second])
    assert source.name == "nvml+host"
    infos = source.scan()
    assert [info.uuid for info in infos] == ["GPU-a", "GPU-b", "HOST-c"]
    assert [source.memory(info).free_bytes for info in infos] == [0, 1, 0]
    assert [source.detail(info).utilization for info in infos] == [0, 0.1, 0]
    assert source.unavailable == {}


def test_one_that_is_not_available_hides_nobody_and_comes_later(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first, second = Fake("nvml", "GPU-a", reason="no driver"), Fake("host", "HOST-c")
    source = CombinedSource([first, second])
    for _ in range(3):
        assert uuids(source) == ["HOST-c"]
        assert source.unavailable == {"nvml": "no driver"}
    first.reason = "no permission"
    source.scan()
    first.reason = None
    assert uuids(source) == ["GPU-a", "HOST-c"]
    assert source.unavailable == {}
    assert caplog.messages == [
        "nvml is not available: no driver", "nvml is not available: no permission", "nvml is available now",
    ]  # fmt: skip


def test_devices_that_are_lost_with_their_source_are_seen_to_be_lost() -> None:
    first, second = Fake("nvml", "GPU-a"), Fake("host", "HOST-c")
    source = CombinedSource([first, second])
    gpu, host = source.scan()
    first.reason = "driver unloaded"
    assert source.scan() == (gpu, host)
    assert source.unavailable == {"nvml": "driver unloaded"}
    with pytest.raises(DeviceUnreadable, match="driver unloaded"):
        source.memory(gpu)
    assert source.memory(host) == MemoryReading(100, 0)


def test_a_device_that_left_its_source_is_nobodys() -> None:
    first = Fake("nvml", "GPU-a", "GPU-b")
    source = CombinedSource([first, Fake("host")])
    gone = source.scan()[1]
    first.uuids = ("GPU-a",)
    source.scan()
    for ask in (source.memory, source.detail):
        with pytest.raises(DeviceUnreadable, match=r"none of nvml\+host has a device GPU-b now") as refusal:
            ask(gone)
        assert refusal.value.lost


def test_without_any_source_every_reason_is_told() -> None:
    source = CombinedSource([Fake("nvml", reason="no driver"), Fake("host", reason="no memory")])
    with pytest.raises(SourceUnavailable, match=r"^nvml: no driver; host: no memory$"):
        source.scan()
    assert source.unavailable == {"nvml": "no driver", "host": "no memory"}


def test_closing_closes_all_whatever_one_says() -> None:
    class Stubborn(Fake):
        def close(self) -> None:
            super().close()
            raise OSError("no")

    fakes = Fake("a"), Stubborn("b"), Fake("c")
    source = CombinedSource(fakes)
    with pytest.raises(OSError, match="no"):
        source.close()
    assert [fake.closed for fake in fakes] == [1, 1, 1]


# ---- by their names -----------------------------------------------------------------------------


def test_auto_is_the_gpus_and_the_host() -> None:
    source = open_source("auto")
    try:
        assert source.name == "nvml+host"
        devices = source.scan()
        assert (devices[-1].index, devices[-1].kind) == ("host", DeviceKind.HOST)
        assert all(device.kind is not DeviceKind.HOST for device in devices[:-1])
    finally:
        source.close()


def test_named_sources(tmp_path: Path) -> None:
    path = tmp_path / "a:b.jsonl"
    with RecordingWriter(path, Snapshot(1, "host", 1, 1, ())):
        pass
    for spec in ("nvml", "host", f"replay:{path}"):
        source = open_source(spec)
        assert source.name == spec
        source.close()


@pytest.mark.parametrize("spec", ["auto", "host"])
def test_a_test_device_stands_for_the_host(spec: str) -> None:
    source = open_source(spec, capacity_bytes=2 << 30, members=[os.getpid()])
    try:
        device = source.scan()[-1]
        reading = source.memory(device)
        assert reading.total_bytes == 2 << 30
        assert [use.pid for use in source.detail(device).processes or ()] == [os.getpid()]
    finally:
        source.close()


@pytest.mark.parametrize("spec", ["", "cuda", "Host", "host:", "nvml:0", "replay", "replay=x"])
def test_an_unknown_source_is_refused(spec: str) -> None:
    with pytest.raises(ConfigInvalid) as refusal:
        open_source(spec)
    assert str(refusal.value) == f"there is no source {spec!r}; known are auto, nvml, host and replay:FILE"


def test_a_recording_must_be_named() -> None:
    with pytest.raises(ConfigInvalid, match="replay: needs the file to play"):
        open_source("replay:")


@pytest.mark.parametrize("options", [{"capacity_bytes": 1 << 30}, {"members": [1]}])
@pytest.mark.parametrize("spec", ["nvml", "replay:x"])
def test_a_test_device_needs_host_memory(spec: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigInvalid, match=f"test device of host memory; the source {spec} has none"):
        open_source(spec, **options)  # type: ignore[arg-type]


def test_members_need_a_capacity() -> None:
    with pytest.raises(ConfigInvalid, match="name its size too"):
        open_source("auto", members=[os.getpid()])
