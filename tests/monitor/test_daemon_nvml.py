"""The monitor's process over the driver stand-in: the real pynvml, the real daemon, the record as engines read it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from monitors import MonitorProcess, run, wait_until
from nvml_standin import COMPILER, GIB, Gpu, NvmlStandin, Process, instance

from pagetide.monitor.cuda_devices import visible_devices
from pagetide.monitor.record import RecordReader
from pagetide.monitor.snapshot import DeviceKind

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the stand-in of the driver needs a C compiler")

NO_PERMISSION, GPU_IS_LOST = 4, 15
SCANS_OFTEN = """
import sys
from pagetide import vram_monitor
from pagetide.monitor import poller
poller.SCAN_INTERVAL_S = 0.2
sys.exit(vram_monitor.main(sys.argv[1:]))
"""


@pytest.fixture
def nvml(tmp_path: Path) -> Iterator[NvmlStandin]:
    with NvmlStandin(tmp_path) as standin:
        standin.devices = [
            Gpu("GPU-a", "00000000:3B:00.0", free_bytes=60 * GIB, compute=[Process(1, 2 * GIB), Process(77)]),
            Gpu("GPU-b", "00000000:1A:00.0", free_bytes=70 * GIB),
        ]
        yield standin


@pytest.fixture
def reader(tmp_path: Path, nvml: NvmlStandin) -> Iterator[RecordReader]:
    monitor = MonitorProcess(tmp_path / "run", source="nvml", env=nvml.env())
    with monitor, RecordReader.open(monitor.record) as reader:
        yield reader


def test_what_the_driver_says_is_what_engines_read(reader: RecordReader, nvml: NvmlStandin) -> None:
    a = reader.memory("GPU-a")
    assert (a.total_bytes, a.free_bytes, a.used_bytes) == (80 * GIB, 60 * GIB, 20 * GIB)
    wait_until(lambda: reader.detail("GPU-a").at_ns)
    processes = reader.detail("GPU-a").reading.processes
    assert processes is not None and {p.pid: p.used_bytes for p in processes} == {1: 2 * GIB, 77: None}
    nvml.update("1", free_bytes=5 * GIB)
    wait_until(lambda: reader.memory("GPU-b").free_bytes == 5 * GIB)
    in_pci_order = visible_devices(reader.devices(), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert [info.uuid for info in in_pci_order] == ["GPU-b", "GPU-a"]


def test_one_dies_and_the_other_goes_on(reader: RecordReader, nvml: NvmlStandin) -> None:
    nvml.update("0", error=GPU_IS_LOST)
    wait_until(lambda: reader.memory("GPU-a").error)
    lost = reader.memory("GPU-a")
    assert lost.total_bytes is None and lost.free_bytes is None and "lost" in str(lost.error)
    nvml.update("1", free_bytes=7 * GIB)
    wait_until(lambda: reader.memory("GPU-b").free_bytes == 7 * GIB)
    assert [info.uuid for info in reader.devices()] == ["GPU-a", "GPU-b"]
    nvml.update("0", error=0)
    wait_until(lambda: reader.memory("GPU-a").free_bytes == 60 * GIB)


def test_one_that_answers_after_two_seconds_grows_stale_and_holds_nobody_up(
    reader: RecordReader, nvml: NvmlStandin
) -> None:
    nvml.update("0", latency_us=2_000_000)
    wait_until(lambda: reader.memory("GPU-a").is_stale())
    polls = reader.memory("GPU-b").polls
    wait_until(lambda: reader.memory("GPU-b").polls > polls + 20)
    assert reader.memory("GPU-a").is_stale() and reader.memory("GPU-a").free_bytes == 60 * GIB
    assert reader.is_live()
    nvml.update("0", latency_us=0)
    wait_until(lambda: not reader.memory("GPU-a").is_stale())


def test_one_that_hangs_from_the_start_hides_no_other(tmp_path: Path, nvml: NvmlStandin) -> None:
    nvml.update("0", latency_us=600_000_000)
    monitor = MonitorProcess(tmp_path / "hung", source="nvml", env=nvml.env())
    with monitor, RecordReader.open(monitor.record) as reader:
        assert [info.uuid for info in reader.devices()] == ["index-0", "GPU-b"]
        assert reader.memory("GPU-b").free_bytes == 70 * GIB and reader.is_live()
        assert "has not answered yet" in str(reader.memory("index-0").error)
        assert nvml.calls("nvmlDeviceGetHandleByIndex_v2", "0") == 1
        nvml.update("0", latency_us=0)
        wait_until(lambda: [info.uuid for info in reader.devices()] == ["GPU-a", "GPU-b"])
        wait_until(lambda: reader.memory("GPU-a").free_bytes == 60 * GIB)


def test_the_driver_goes_and_comes_back(reader: RecordReader, nvml: NvmlStandin) -> None:
    nvml.driver_loaded = False
    wait_until(lambda: reader.memory("GPU-a").error and reader.memory("GPU-b").error)
    assert reader.is_live()
    nvml.driver_loaded = True
    wait_until(lambda: reader.memory("GPU-a").free_bytes == 60 * GIB and reader.memory("GPU-b").error is None)


def test_mig_instances_stand_beside_their_gpu(tmp_path: Path, nvml: NvmlStandin) -> None:
    parent = Gpu(
        "GPU-m",
        mig=[instance("MIG-x", free_bytes=4 * GIB), instance("MIG-y")],
        errors={"nvmlDeviceGetMemoryInfo_v2": 4},
    )
    nvml.devices = [parent]
    monitor = MonitorProcess(tmp_path / "mig", source="nvml", env=nvml.env())
    with monitor, RecordReader.open(monitor.record) as reader:
        infos = {info.uuid: info for info in reader.devices()}
        assert [infos[uuid].index for uuid in ("GPU-m", "MIG-x", "MIG-y")] == ["0", "0:0", "0:1"]
        assert infos["MIG-x"].kind is DeviceKind.MIG and infos["MIG-x"].parent_uuid == "GPU-m"
        assert "MIG" in str(reader.memory("GPU-m").error)
        assert reader.memory("MIG-x").free_bytes == 4 * GIB


def test_without_a_driver_auto_watches_the_host_and_a_driver_that_comes_is_found(
    tmp_path: Path, nvml: NvmlStandin
) -> None:
    nvml.driver_loaded = False
    monitor = MonitorProcess(tmp_path / "auto", source="auto", env=nvml.env())
    monitor._command[1:4] = ["-P", "-c", SCANS_OFTEN]
    with monitor, RecordReader.open(monitor.record) as reader:
        assert [info.index for info in reader.devices()] == ["host"]
        nvml.driver_loaded = True
        wait_until(lambda: len(reader.devices()) == 3, "the next scan")
        wait_until(lambda: reader.memory("GPU-b").free_bytes == 70 * GIB)


def test_a_driver_that_is_not_loaded_is_a_sentence(tmp_path: Path, nvml: NvmlStandin) -> None:
    nvml.driver_loaded = False
    refused = run("serve", "--source", "nvml", "--runtime-dir", tmp_path / "run", env=nvml.env())
    assert refused.returncode == 2 and "not loaded" in refused.stderr and refused.stderr.count("\n") == 1
