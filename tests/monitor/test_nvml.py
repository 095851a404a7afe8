"""NVML's devices through the real pynvml and a stand-in of the driver: memory, load, processes, MIG, and all that fails."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pynvml
import pytest
from monitors import wait_until
from nvml_standin import COMPILER, GIB, Gpu, NvmlStandin, Process, instance

from pagetide.common.host_memory import host_memory
from pagetide.monitor.errors import DeviceUnreadable, SourceUnavailable
from pagetide.monitor.snapshot import DetailReading, DeviceInfo, DeviceKind, MemoryReading, ProcessUse
from pagetide.monitor.sources.nvml import NvmlSource
from pagetide.monitor.sources.process_facts import cgroup_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the stand-in of the driver library needs a C compiler")

A = Gpu("GPU-aaaa", "00000000:C1:00.0", "NVIDIA H100", free_bytes=60 * GIB)
B = Gpu("GPU-bbbb", "00000000:0A:00.0", "NVIDIA H200", free_bytes=50 * GIB)
INFO_A = DeviceInfo("GPU-aaaa", "0", DeviceKind.GPU, "NVIDIA H100", "00000000:C1:00.0")
INFO_B = DeviceInfo("GPU-bbbb", "1", DeviceKind.GPU, "NVIDIA H200", "00000000:0A:00.0")
READ_A, READ_B = MemoryReading(80 * GIB, 60 * GIB), MemoryReading(80 * GIB, 50 * GIB)

SPLIT = Gpu(
    "GPU-cccc",
    "00000000:3B:00.0",
    "NVIDIA A100",
    errors={"nvmlDeviceGetMemoryInfo_v2": pynvml.NVML_ERROR_NO_PERMISSION},
    mig=[instance("MIG-1", free_bytes=3 * GIB), None, instance("MIG-3", free_bytes=4 * GIB)],
)
INFO_SPLIT = DeviceInfo("GPU-cccc", "0", DeviceKind.GPU, "NVIDIA A100", "00000000:3B:00.0")
INFO_MIG_1, INFO_MIG_3 = (
    DeviceInfo(uuid, index, DeviceKind.MIG, "Stand-in A100 MIG 1g.10gb", "00000000:3B:00.0", "GPU-cccc")
    for uuid, index in (("MIG-1", "0:0"), ("MIG-3", "0:2"))
)

NOBODY = 4_194_305  # above the kernel's largest pid
LOST, UNKNOWN = pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNKNOWN


@pytest.fixture
def nvml(tmp_path: Path) -> Iterator[NvmlStandin]:
    with NvmlStandin(tmp_path) as nvml, nvml.in_process():
        nvml.devices = [A, B]
        yield nvml


def proc_of(directory: Path, namespace: str) -> Path:
    """A /proc whose pid namespace is `namespace`."""
    (directory / "self" / "ns").mkdir(parents=True)
    (directory / "self" / "ns" / "pid").symlink_to(namespace)
    return directory


@pytest.fixture
def source(nvml: NvmlStandin, tmp_path: Path) -> Iterator[NvmlSource]:
    """Outside of any container, wherever the tests run."""
    source = NvmlSource(proc=proc_of(tmp_path / "proc", "pid:[4026531836]"))
    yield source
    source.close()


def unreadable(call: Callable[[DeviceInfo], object], info: DeviceInfo) -> DeviceUnreadable:
    with pytest.raises(DeviceUnreadable) as refusal:
        call(info)
    return refusal.value


def test_devices_come_in_the_order_of_nvml_which_is_not_that_of_cuda(nvml: NvmlStandin, source: NvmlSource) -> None:
    assert source.scan() == (INFO_A, INFO_B)
    assert (source.memory(INFO_A), source.memory(INFO_B)) == (READ_A, READ_B)
    nvml.update("1", free_bytes=0)
    nvml.update("0", reserved_bytes=GIB)  # the driver's, which is used memory
    assert (source.memory(INFO_A), source.memory(INFO_B)) == (READ_A, MemoryReading(80 * GIB, 0))


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH"])
def test_an_old_driver_is_asked_for_the_old_structure(nvml: NvmlStandin, source: NvmlSource, code: str) -> None:
    source.scan()
    nvml.update("0", error=pynvml.NVML_ERROR_INVALID_ARGUMENT)
    assert "Invalid Argument" in str(unreadable(source.memory, INFO_A))
    nvml.update("0", error=0)
    assert source.memory(INFO_A) == READ_A
    calls = nvml.calls("nvmlDeviceGetMemoryInfo_v2", "0"), nvml.calls("nvmlDeviceGetMemoryInfo", "0")
    assert calls == (2, 1), "an argument that is invalid to both does not make the driver an old one"
    nvml.errors = {"nvmlDeviceGetMemoryInfo_v2": getattr(pynvml, f"NVML_ERROR_{code}")}
    assert [source.memory(INFO_A), source.memory(INFO_B), source.memory(INFO_A)] == [READ_A, READ_B, READ_A]
    assert nvml.calls("nvmlDeviceGetMemoryInfo_v2", "0") + nvml.calls("nvmlDeviceGetMemoryInfo_v2", "1") == 3


def test_a_chip_of_unified_memory_has_the_memory_of_the_host_less_a_floor_for_the_system(
    nvml: NvmlStandin, source: NvmlSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.update("1", total_bytes=None)
    assert source.scan() == (INFO_A, INFO_B)
    reading, host = source.memory(INFO_B), host_memory()
    # a cgroup's limit, where that is less than the machine has
    assert reading.total_bytes == host.total_bytes - min(4 * GIB, host.total_bytes // 4)
    assert reading.free_bytes is not None and 0 < reading.free_bytes < reading.total_bytes
    assert source.memory(INFO_A) == READ_A
    for total, free, seen in ((128, 100, (124, 96)), (128, 3, (124, 0)), (8, 7, (6, 5))):
        monkeypatch.setattr("pagetide.monitor.sources.nvml.host_memory", lambda t=total, f=free: (t * GIB, f * GIB))
        assert source.memory(INFO_B) == MemoryReading(*(part * GIB for part in seen))


def test_a_limit_that_another_library_puts_between_is_the_devices_memory(nvml: NvmlStandin, source: NvmlSource) -> None:
    """HAMi answers with a container's limit, which may change, and with limit - use, which wraps around below 0."""
    source.scan()
    nvml.update("1", total_bytes=10 * GIB, free_bytes=4 * GIB)
    assert source.memory(INFO_B) == MemoryReading(10 * GIB, 4 * GIB)
    nvml.update("1", total_bytes=2 * GIB, free_bytes=2**64 - 4 * GIB)
    assert source.memory(INFO_B) == MemoryReading(2 * GIB, 0)
    nvml.errors = {"nvmlDeviceGetMemoryInfo_v2": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
    assert source.memory(INFO_B) == MemoryReading(2 * GIB, 0)


def test_what_nvml_does_not_say_of_a_device_is_none_or_unreadable(nvml: NvmlStandin, source: NvmlSource) -> None:
    refused = {"nvmlDeviceGetName": UNKNOWN, "nvmlDeviceGetPciInfo_v3": pynvml.NVML_ERROR_NOT_SUPPORTED}
    nvml.update("0", errors=refused)
    assert source.scan()[0] == DeviceInfo("GPU-aaaa", "0", DeviceKind.GPU)
    assert source.memory(INFO_A) == READ_A
    nvml.update("0", errors={"nvmlDeviceGetMemoryInfo_v2": pynvml.NVML_ERROR_NO_PERMISSION})
    refusal = unreadable(source.memory, INFO_A)
    assert str(refusal) == "this user may not read the device (NVML: Insufficient Permissions)" and not refusal.lost


def test_load_is_in_base_units_and_what_is_not_told_is_none(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.update("0", utilization_percent=87, temperature_celsius=61, power_milliwatts=412_345, power_limit_milliwatts=700_000)
    nvml.update("1", utilization_percent=0, temperature_celsius=0, power_milliwatts=0)
    source.scan()
    assert source.detail(INFO_A) == DetailReading(0.87, 61.0, 412.345, 700.0, ())
    assert source.detail(INFO_B) == DetailReading(0.0, 0.0, 0.0, 400.0, ())
    load = ("UtilizationRates", "Temperature", "PowerUsage", "EnforcedPowerLimit")
    lists = ("ComputeRunningProcesses_v3", "GraphicsRunningProcesses_v3")
    for code in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION, UNKNOWN):
        nvml.update("0", errors={f"nvmlDeviceGet{name}": code for name in (*load, *lists)})
        assert source.detail(INFO_A) == DetailReading()
        assert source.memory(INFO_A) == READ_A


def test_processes_are_merged_by_pid(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.update(
        "0",
        compute=[Process(NOBODY, 7 * GIB), Process(NOBODY + 1, None), Process(NOBODY + 2, 0), Process(NOBODY + 4, 6)],
        graphics=[Process(NOBODY, 7 * GIB), Process(NOBODY + 3, GIB), Process(NOBODY + 1, 5), Process(NOBODY + 4)],
    )
    source.scan()
    both = "compute+graphics"
    assert source.detail(INFO_A).processes == (
        ProcessUse(NOBODY, 7 * GIB, both), ProcessUse(NOBODY + 1, 5, both), ProcessUse(NOBODY + 2, 0, "compute"),
        ProcessUse(NOBODY + 4, 6, both), ProcessUse(NOBODY + 3, GIB, "graphics"),
    )  # fmt: skip
    nvml.update("0", compute=[Process(NOBODY + i, i or None) for i in range(64)], graphics=[])
    assert source.detail(INFO_A).processes == tuple(ProcessUse(NOBODY + i, i or None) for i in range(64))


def test_an_old_driver_lists_processes_by_the_older_call(nvml: NvmlStandin, source: NvmlSource) -> None:
    kinds = ("Compute", "Graphics")
    nvml.errors = {f"nvmlDeviceGet{kind}RunningProcesses_v3": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND for kind in kinds}
    nvml.update("0", compute=[Process(NOBODY, 1)], graphics=[Process(NOBODY, 1)])
    source.scan()
    assert source.detail(INFO_A).processes == (ProcessUse(NOBODY, 1, "compute+graphics"),)
    assert source.detail(INFO_B).processes == ()
    assert nvml.calls("nvmlDeviceGetComputeRunningProcesses_v3", "1") == 0


def test_processes_that_may_not_be_seen_are_unknown_and_not_none_at_all(nvml: NvmlStandin, source: NvmlSource) -> None:
    source.scan()
    nvml.update("0", compute=[Process(NOBODY, 1)], graphics=None)
    nvml.update("1", compute=[], graphics=None)
    assert source.detail(INFO_A).processes == (ProcessUse(NOBODY, 1),)
    assert source.detail(INFO_B).processes is None
    for kind in ("Compute", "Graphics"):
        refused = {f"nvmlDeviceGet{kind}RunningProcesses_v3": pynvml.NVML_ERROR_NO_PERMISSION}
        nvml.update("0", compute=[], graphics=[], errors=refused)
        assert source.detail(INFO_A).processes is None


@pytest.fixture
def child() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()  # waits"], stdin=subprocess.PIPE) as process:
        yield process.pid


HOST_PIDS, CONTAINER = "pid:[4026531836]", "pid:[4026532501]"


def test_what_is_said_of_processes_that_may_be_hidden(nvml: NvmlStandin, tmp_path: Path, child: int) -> None:
    """An empty list says that there are none only where none are hidden; a pid of the host's is another process here."""
    known = psutil.Process().username(), f"{sys.executable} -c input()  # waits", None, cgroup_of(child)
    for number, (namespace, driver, if_empty, told) in enumerate(
        [
            (HOST_PIDS, "580.82.07", (), known),
            (HOST_PIDS, "535.113.01", (), known),
            (CONTAINER, "580.82.07", None, known),  # it hides those of other containers
            (CONTAINER, "565.57.01", None, known),
            (CONTAINER, "560.35.03", (), (None, None)),  # it shows the host's
            (None, "580.82.07", None, known),
        ]
    ):
        nvml.driver_version = driver
        nvml.update("0", compute=[Process(child, GIB), Process(NOBODY, 1)])
        source = NvmlSource(proc=proc_of(tmp_path / str(number), namespace) if namespace else tmp_path)
        assert source.scan() == (INFO_A, INFO_B)
        assert source.detail(INFO_A).processes == (ProcessUse(child, GIB, "compute", *told), ProcessUse(NOBODY, 1))
        assert source.detail(INFO_B).processes == if_empty
        source.close()


def test_instances_come_behind_their_gpu_each_with_its_own_and_go(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.devices = [SPLIT, B]
    nvml.update("0:2", compute=[Process(NOBODY, GIB)])
    assert source.scan() == (INFO_SPLIT, INFO_MIG_1, INFO_MIG_3, INFO_B)
    assert source.memory(INFO_MIG_1) == MemoryReading(10 * GIB, 3 * GIB)
    assert source.memory(INFO_MIG_3) == MemoryReading(10 * GIB, 4 * GIB)
    assert source.detail(INFO_MIG_1) == DetailReading(processes=())
    assert source.detail(INFO_MIG_3) == DetailReading(processes=(ProcessUse(NOBODY, GIB),))
    nvml.update("0", mig=[None, None, instance("MIG-3", free_bytes=4 * GIB)])
    assert "Not Found" in str(unreadable(source.memory, INFO_MIG_1))
    assert source.scan() == (INFO_SPLIT, INFO_MIG_3, INFO_B)
    assert "no device MIG-1" in str(unreadable(source.memory, INFO_MIG_1))
    nvml.update("0", mig=[])
    assert source.scan() == (INFO_SPLIT, INFO_B)
    assert "split into MIG instances" in str(unreadable(source.memory, INFO_SPLIT))


def test_a_split_gpu_is_unreadable_and_never_has_the_hosts_memory(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.devices = [SPLIT]
    source.scan()
    refusal = unreadable(source.memory, INFO_SPLIT)
    assert "split into MIG instances" in str(refusal) and "Insufficient Permissions" in str(refusal)
    assert not refusal.lost
    assert source.memory(INFO_MIG_1) == MemoryReading(10 * GIB, 3 * GIB)
    nvml.devices = [Gpu("GPU-cccc", total_bytes=None, mig=[instance("MIG-1", total_bytes=None)])]
    for info in source.scan():
        assert "Not Supported" in str(unreadable(source.memory, info))


def test_a_device_that_dies_is_alone_and_comes_back(nvml: NvmlStandin, source: NvmlSource) -> None:
    source.scan()
    for code, lost, says in (
        (LOST, True, "is lost until it is reset (NVML: GPU is lost)"),
        (pynvml.NVML_ERROR_RESET_REQUIRED, True, "is lost until it is reset (NVML: GPU requires restart)"),
        (UNKNOWN, False, "gave no answer (NVML: Unknown Error)"),
        (pynvml.NVML_ERROR_INVALID_STATE, False, "gave no answer (NVML: an error of the stand-in)"),
    ):
        nvml.update("0", error=code)
        for scanned in (False, True, True):
            if scanned:
                assert source.scan() == (INFO_A, INFO_B)
            refusal = unreadable(source.memory, INFO_A)
            assert (str(refusal), refusal.lost) == (f"the device {says}", lost)
            assert source.memory(INFO_B) == READ_B
            assert source.detail(INFO_B).temperature_celsius == 30
        nvml.update("0", error=0)
        assert source.scan() == (INFO_A, INFO_B)
        assert (source.memory(INFO_A), source.memory(INFO_B)) == (READ_A, READ_B)
    assert (nvml.calls("nvmlInitWithFlags"), nvml.calls("nvmlShutdown")) == (1, 0)


def test_one_that_is_dead_from_the_start_keeps_its_place(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.update("0", error=LOST)
    nameless = DeviceInfo("index-0", "0", DeviceKind.GPU)
    assert source.scan() == source.scan() == (nameless, INFO_B)
    assert unreadable(source.memory, nameless).lost
    assert source.memory(INFO_B) == READ_B
    nvml.update("0", error=0, errors={"nvmlDeviceGetMigMode": LOST})
    assert source.scan() == (DeviceInfo("GPU-aaaa", "0", DeviceKind.GPU), INFO_B), "it tells its uuid"
    nvml.update("0", errors={})
    assert source.scan() == (INFO_A, INFO_B)


def test_a_device_that_dies_during_a_scan_is_alone_in_that(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.devices = [SPLIT, B]
    before = source.scan()
    for last in ("Name", "PciInfo_v3", "MigMode", "MaxMigDeviceCount"):
        nvml.update("0", errors={f"nvmlDeviceGet{last}": LOST})
        assert source.scan() == before
        assert unreadable(source.memory, INFO_SPLIT).lost
        assert source.memory(INFO_B) == READ_B
        nvml.update("0", errors=SPLIT.errors)
        assert source.scan() == before
    assert nvml.calls("nvmlShutdown") == 0


def test_a_dead_gpu_keeps_its_instances_and_is_none_that_moved(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.devices = [SPLIT]
    nvml.update("0:0", errors={"nvmlDeviceGetUUID": UNKNOWN})
    nameless = DeviceInfo("index-0:0", "0:0", DeviceKind.MIG, parent_uuid="GPU-cccc")
    assert source.scan() == (INFO_SPLIT, nameless, INFO_MIG_3), "one instance hides no other"
    assert "Unknown Error" in str(unreadable(source.memory, nameless))
    nvml.devices = [SPLIT, B]
    before = source.scan()
    nvml.update("0", errors={"nvmlDeviceGetGraphicsRunningProcesses_v3": LOST})
    assert unreadable(source.detail, INFO_SPLIT).lost
    nvml.update("0", error=LOST, errors={})
    assert source.scan() == source.scan() == before
    for info in (INFO_SPLIT, INFO_MIG_1, INFO_MIG_3):
        assert unreadable(source.memory, info).lost and unreadable(source.detail, info).lost
    nvml.update("0", error=0)
    assert source.scan() == before
    assert source.memory(INFO_MIG_3) == MemoryReading(10 * GIB, 4 * GIB)
    nvml.devices = [A, B]
    source.scan()
    nvml.devices = [Gpu("GPU-dddd", error=LOST), A]  # as after a reload of the driver
    moved = DeviceInfo("GPU-aaaa", "1", DeviceKind.GPU, "NVIDIA H100", "00000000:C1:00.0")
    assert source.scan() == (DeviceInfo("index-0", "0", DeviceKind.GPU), moved)
    assert source.memory(moved) == READ_A


def test_when_every_device_is_dead_nvml_is_begun_anew(nvml: NvmlStandin, source: NvmlSource) -> None:
    source.scan()
    for index in "01":
        nvml.update(index, error=LOST)
    assert source.scan() == (INFO_A, INFO_B)
    assert (nvml.calls("nvmlInitWithFlags"), nvml.calls("nvmlShutdown")) == (2, 1)
    nvml.update("1", error=0)
    assert source.scan() == (INFO_A, INFO_B)
    assert source.memory(INFO_B) == READ_B
    assert unreadable(source.memory, INFO_A).lost
    nvml.driver_loaded = False
    with pytest.raises(SourceUnavailable):
        source.scan()
    nvml.driver_loaded = True
    assert source.scan() == (INFO_A, INFO_B), "the dead one is remembered"


def test_a_driver_that_goes_away_and_comes_back(nvml: NvmlStandin, source: NvmlSource) -> None:
    source.scan()
    nvml.driver_loaded = False
    for call in (source.memory, source.detail):
        for info in (INFO_A, INFO_B):
            refusal = unreadable(call, info)
            assert str(refusal) == "the NVIDIA driver has gone away (NVML: Uninitialized)"
            assert not refusal.lost
    for _ in range(2):
        with pytest.raises(SourceUnavailable, match="driver is not loaded"):
            source.scan()
        assert "gone away" in str(unreadable(source.memory, INFO_A))
    nvml.driver_loaded = True
    assert "gone away" in str(unreadable(source.memory, INFO_A))  # until it is looked for
    for _ in range(2):
        assert source.scan() == (INFO_A, INFO_B)
        assert (source.memory(INFO_A), source.memory(INFO_B)) == (READ_A, READ_B)
        nvml.driver_loaded = False
        nvml.driver_loaded = True  # replaced between two scans


def test_nvml_that_cannot_be_initialised_is_unavailable(nvml: NvmlStandin, source: NvmlSource) -> None:
    mismatch = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    for code, says in ((mismatch, "another version .* restart this process"), (UNKNOWN, r"does not work \(NVML: Unknown")):
        nvml.errors = {"nvmlInitWithFlags": code}
        with pytest.raises(SourceUnavailable, match=says):
            source.scan()
    nvml.errors = {}
    nvml.devices = []
    assert source.scan() == source.scan() == ()
    nvml.devices = [A]
    assert source.scan() == (INFO_A,)
    upgraded = ("nvmlInitWithFlags", "nvmlDeviceGetCount_v2", "nvmlDeviceGetMemoryInfo_v2")
    nvml.errors = dict.fromkeys(upgraded, mismatch)
    assert "gone away" in str(unreadable(source.memory, INFO_A))
    with pytest.raises(SourceUnavailable, match="restart this process"):
        source.scan()


def test_closing_gives_nvml_back_once_and_scanning_takes_it_again(nvml: NvmlStandin, source: NvmlSource) -> None:
    assert "no device GPU-aaaa" in str(unreadable(source.memory, INFO_A))
    source.close()
    assert nvml.calls("nvmlInitWithFlags") == nvml.calls("nvmlShutdown") == 0, "nothing is loaded before the first scan"
    for _ in range(3):
        source.scan()
    assert (nvml.calls("nvmlInitWithFlags"), nvml.calls("nvmlShutdown")) == (1, 0)
    source.close()
    source.close()
    assert (nvml.calls("nvmlInitWithFlags"), nvml.calls("nvmlShutdown")) == (1, 1)
    assert "no device" in str(unreadable(source.memory, INFO_A))
    assert source.scan() == (INFO_A, INFO_B)
    nvml.driver_loaded = False
    source.close()


UNTIL_TOLD_US = 60_000_000  # ended by the test; this long only if somebody waits who should not


def test_a_hanging_call_delays_nobody_and_survives_scans(nvml: NvmlStandin, source: NvmlSource) -> None:
    source.scan()
    slow = dict.fromkeys(("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetTemperature"), UNTIL_TOLD_US)
    nvml.update("0", latencies_us=slow)
    with ThreadPoolExecutor(2) as pool:
        hanging: list[Future[Any]] = [pool.submit(ask, INFO_A) for ask in (source.memory, source.detail)]
        wait_until(lambda: all(nvml.calls(function, "0") for function in slow))
        assert source.memory(INFO_B) == READ_B
        assert source.detail(INFO_B).processes == ()
        assert source.scan() == source.scan() == (INFO_A, INFO_B)
        assert not any(answer.done() for answer in hanging)
        nvml.update("0", latencies_us={})
        answers = [answer.result(60) for answer in hanging]
    assert answers == [READ_A, DetailReading(0.0, 30.0, 60.0, 400.0, ())]


def test_threads_that_ask_while_the_driver_comes_and_goes(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.devices = [A, SPLIT]
    infos, stop = source.scan(), threading.Event()

    def ask(info: DeviceInfo) -> set[tuple[str, int | None]]:
        answers = set()
        while not stop.is_set():
            with suppress(DeviceUnreadable):
                answers.add((info.uuid, source.memory(info).free_bytes))
        return answers

    with ThreadPoolExecutor(len(infos)) as pool:
        asking = [pool.submit(ask, info) for info in infos]
        try:
            for round_ in range(50):
                nvml.driver_loaded = is_there = round_ % 2 == 1
                if is_there:
                    assert source.scan() == infos
                else:
                    with pytest.raises(SourceUnavailable):
                        source.scan()
        finally:
            stop.set()
    readings = set().union(*(answers.result() for answers in asking))
    assert readings <= {("GPU-aaaa", 60 * GIB), ("MIG-1", 3 * GIB), ("MIG-3", 4 * GIB)}


HANDLE, UUID = "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID"


@pytest.fixture
def hasty(nvml: NvmlStandin, tmp_path: Path) -> Iterator[NvmlSource]:
    """A source that takes a device for one that hangs very soon."""
    source = NvmlSource(proc=tmp_path, patience_s=0.02)
    yield source
    for index in range(len(nvml.devices)):
        nvml.update(str(index), latencies_us={})
    wait_until(lambda: not source._hangs())
    source.close()


def test_a_fault_in_a_look_is_not_swallowed(source: NvmlSource, monkeypatch: pytest.MonkeyPatch) -> None:
    source.scan()
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda _handle: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        source.scan()


@pytest.mark.parametrize("function", [HANDLE, UUID, "nvmlDeviceGetName"])
def test_one_that_hangs_from_the_start_is_asked_once(nvml: NvmlStandin, hasty: NvmlSource, function: str) -> None:
    nvml.update("0", latencies_us={function: UNTIL_TOLD_US})
    nameless = DeviceInfo("index-0", "0", DeviceKind.GPU)
    wait_until(lambda: hasty.scan() == (nameless, INFO_B))
    assert hasty.memory(INFO_B) == READ_B
    refusal = unreadable(hasty.memory, nameless)
    assert "has not answered yet" in str(refusal) and not refusal.lost
    for _ in range(5):
        assert hasty.scan()[0] == nameless
    assert (nvml.calls(function, "0"), nvml.calls("nvmlShutdown")) == (1, 0)
    nvml.update("0", latencies_us={})
    wait_until(lambda: hasty.scan() == (INFO_A, INFO_B))
    assert hasty.memory(INFO_A) == READ_A


def test_one_that_hangs_later_stays_as_it_was_known_and_is_read(nvml: NvmlStandin, hasty: NvmlSource) -> None:
    nvml.devices = [SPLIT, B]
    infos = (INFO_SPLIT, INFO_MIG_1, INFO_MIG_3, INFO_B)
    wait_until(lambda: hasty.scan() == infos)
    before = nvml.calls(UUID, "0")
    nvml.update("0", latencies_us={UUID: UNTIL_TOLD_US})
    wait_until(lambda: (hasty.scan() == infos, nvml.calls(UUID, "0") > before)[1])
    for _ in range(3):
        assert hasty.scan() == infos
        assert hasty.memory(INFO_MIG_1) == MemoryReading(10 * GIB, 3 * GIB)
    assert nvml.calls(UUID, "0") == before + 1
    nvml.update("0", error=LOST, latencies_us={})

    def is_lost() -> bool:
        assert hasty.scan() == infos
        try:
            hasty.memory(INFO_MIG_1)
        except DeviceUnreadable as refusal:
            return refusal.lost
        return False

    wait_until(is_lost)


def test_nvml_is_not_begun_anew_while_a_look_hangs_in_it(nvml: NvmlStandin, hasty: NvmlSource) -> None:
    wait_until(lambda: hasty.scan() == (INFO_A, INFO_B))
    nvml.update("0", latencies_us={HANDLE: UNTIL_TOLD_US})
    nvml.update("1", error=LOST)
    begun = nvml.calls(HANDLE, "0")
    wait_until(lambda: (hasty.scan(), nvml.calls(HANDLE, "0") > begun)[1])
    assert hasty.scan() == (INFO_A, INFO_B)
    nvml.errors = {"nvmlDeviceGetCount_v2": UNKNOWN}
    with pytest.raises(SourceUnavailable, match="Unknown Error"):
        hasty.scan()
    hasty.close()
    assert nvml.calls("nvmlShutdown") == 0
    nvml.errors = {}
    nvml.update("0", latencies_us={})
    nvml.update("1", error=0)
    wait_until(lambda: hasty.scan() == (INFO_A, INFO_B))


SCAN = """
import sys
from pagetide.monitor.errors import SourceUnavailable
from pagetide.monitor.sources.nvml import NvmlSource
assert not {"pynvml", "psutil"} & set(sys.modules), "importing the source loads what only some need"
try:
    NvmlSource().scan()
except SourceUnavailable as error:
    print(error)
"""


def test_without_a_driver_library_the_source_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").touch()  # no library at all, and found before any real one
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    said = subprocess.check_output([sys.executable, "-P", "-c", SCAN], env=env, text=True, timeout=120)
    assert "libnvidia-ml.so.1, was not found; install the driver, or watch host memory with --source host" in said


def test_idle_time_is_that_without_a_sample_of_load(nvml: NvmlStandin) -> None:
    source = NvmlSource()
    source.scan()
    processes = [Process(NOBODY, 1), Process(NOBODY + 1, 2)]
    nvml.update("0", compute=processes, samples=[(NOBODY, 1000, 50), (NOBODY + 1, 1000, 0)])

    def idle() -> list[float | None]:
        return [use.idle_seconds for use in source.detail(INFO_A).processes or ()]

    assert idle() == [0.0, 0.0], "counted from the first look"
    busy, still = idle()
    assert busy and still, "nothing new: no sample after the newest one"
    nvml.update("0", samples=[(NOBODY, 1000, 50), (NOBODY, 2000, 1), (NOBODY + 1, 2000, 0)])
    busy, longer = idle()
    assert busy == 0.0 and longer is not None and longer > still
    nvml.update("0", samples=None)  # MIG, and some consumer cards
    assert idle() == [None, None]
    source.close()
