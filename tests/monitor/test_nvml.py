from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pynvml
import pytest
from monitors import wait_until
from nvml_standin import COMPILER, GIB, Gpu, NvmlStandin, Process, instance

from pagetide.monitor.errors import DeviceUnreadable, SourceUnavailable
from pagetide.monitor.host_memory import host_memory
from pagetide.monitor.snapshot import DetailReading, DeviceInfo, DeviceKind, MemoryReading, ProcessUse
from pagetide.monitor.sources.nvml import NvmlSource

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the stand-in of the driver library needs a C compiler")

A = Gpu("GPU-aaaa", "00000000:C1:00.0", "NVIDIA H100", free_bytes=60 * GIB)
B = Gpu("GPU-bbbb", "00000000:0A:00.0", "NVIDIA H200", free_bytes=50 * GIB)
INFO_A = DeviceInfo("GPU-aaaa", "0", DeviceKind.GPU, "NVIDIA H100", "00000000:C1:00.0")
INFO_B = DeviceInfo("GPU-bbbb", "1", DeviceKind.GPU, "NVIDIA H200", "00000000:0A:00.0")
READ_A, READ_B = MemoryReading(80 * GIB, 60 * GIB), MemoryReading(80 * GIB, 50 * GIB)

SPLIT = Gpu(
    "GPU-cccc", "00000000:3B:00.0", "NVIDIA A100",
    errors={"nvmlDeviceGetMemoryInfo_v2": pynvml.NVML_ERROR_NO_PERMISSION},
    mig=[instance("MIG-1", free_bytes=3 * GIB), None, instance("MIG-3", free_bytes=4 * GIB)],
)  # fmt: skip
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


# --- devices and their memory


def test_nothing_is_loaded_before_the_first_scan(nvml: NvmlStandin, source: NvmlSource) -> None:
    assert "no device GPU-aaaa" in str(unreadable(source.memory, INFO_A))
    source.close()
    assert nvml.calls("nvmlInitWithFlags") == nvml.calls("nvmlShutdown") == 0


def test_devices_come_in_the_order_of_nvml_which_is_not_that_of_cuda(source: NvmlSource) -> None:
    assert source.scan() == (INFO_A, INFO_B)
    assert (source.memory(INFO_A), source.memory(INFO_B)) == (READ_A, READ_B)


def test_a_change_shows_in_the_next_answer(nvml: NvmlStandin, source: NvmlSource) -> None:
    source.scan()
    nvml.update("1", free_bytes=0)
    assert source.memory(INFO_B) == MemoryReading(80 * GIB, 0)
    assert source.memory(INFO_A) == READ_A


def test_the_reserve_of_the_driver_is_used_memory(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.update("0", reserved_bytes=GIB)
    source.scan()
    assert source.memory(INFO_A) == READ_A


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH"])
def test_an_old_driver_is_asked_for_the_old_structure_from_then_on(
    nvml: NvmlStandin, source: NvmlSource, code: str
) -> None:
    nvml.errors = {"nvmlDeviceGetMemoryInfo_v2": getattr(pynvml, f"NVML_ERROR_{code}")}
    source.scan()
    assert [source.memory(INFO_A), source.memory(INFO_B), source.memory(INFO_A)] == [READ_A, READ_B, READ_A]
    assert nvml.calls("nvmlDeviceGetMemoryInfo_v2", "0") + nvml.calls("nvmlDeviceGetMemoryInfo_v2", "1") == 1


def test_an_argument_that_is_invalid_to_both_does_not_make_the_driver_an_old_one(
    nvml: NvmlStandin, source: NvmlSource
) -> None:
    source.scan()
    nvml.update("0", error=pynvml.NVML_ERROR_INVALID_ARGUMENT)
    assert "Invalid Argument" in str(unreadable(source.memory, INFO_A))
    nvml.update("0", error=0)
    assert source.memory(INFO_A) == READ_A
    assert (nvml.calls("nvmlDeviceGetMemoryInfo_v2", "0"), nvml.calls("nvmlDeviceGetMemoryInfo", "0")) == (2, 1)


def test_a_chip_of_unified_memory_has_the_memory_of_the_host(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.update("1", total_bytes=None)
    assert source.scan() == (INFO_A, INFO_B)
    reading = source.memory(INFO_B)
    assert reading.total_bytes == host_memory().total_bytes  # a cgroup's limit, where that is less than the machine has
    assert reading.free_bytes is not None and 0 < reading.free_bytes < reading.total_bytes
    assert source.memory(INFO_A) == READ_A


def test_memory_without_permission_is_unreadable_and_says_so(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.update("0", errors={"nvmlDeviceGetMemoryInfo_v2": pynvml.NVML_ERROR_NO_PERMISSION})
    source.scan()
    refusal = unreadable(source.memory, INFO_A)
    assert str(refusal) == "this user may not read the device (NVML: Insufficient Permissions)"
    assert not refusal.lost


def test_what_nvml_does_not_say_of_a_device_is_none(nvml: NvmlStandin, source: NvmlSource) -> None:
    refused = {"nvmlDeviceGetName": UNKNOWN, "nvmlDeviceGetPciInfo_v3": pynvml.NVML_ERROR_NOT_SUPPORTED}
    nvml.update("0", errors=refused)
    assert source.scan()[0] == DeviceInfo("GPU-aaaa", "0", DeviceKind.GPU)
    assert source.memory(INFO_A) == READ_A


# --- load and processes


def test_load_in_base_units(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.update(
        "0", utilization_percent=87, temperature_celsius=61, power_milliwatts=412_345, power_limit_milliwatts=700_000
    )
    nvml.update("1", utilization_percent=0, temperature_celsius=0, power_milliwatts=0)
    source.scan()
    assert source.detail(INFO_A) == DetailReading(0.87, 61.0, 412.345, 700.0, ())
    assert source.detail(INFO_B) == DetailReading(0.0, 0.0, 0.0, 400.0, ())


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION, UNKNOWN])
def test_load_that_is_not_told_is_none_and_never_0(nvml: NvmlStandin, source: NvmlSource, code: int) -> None:
    load = ("UtilizationRates", "Temperature", "PowerUsage", "EnforcedPowerLimit")
    lists = ("ComputeRunningProcesses_v3", "GraphicsRunningProcesses_v3")
    nvml.update("0", errors={f"nvmlDeviceGet{name}": code for name in (*load, *lists)})
    source.scan()
    assert source.detail(INFO_A) == DetailReading()
    assert source.memory(INFO_A) == READ_A


def test_processes_are_merged_by_pid(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.update(
        "0",
        compute=[Process(NOBODY, 7 * GIB), Process(NOBODY + 1, None), Process(NOBODY + 2, 0), Process(NOBODY + 4, 6)],
        graphics=[Process(NOBODY, 7 * GIB), Process(NOBODY + 3, GIB), Process(NOBODY + 1, 5), Process(NOBODY + 4)],
    )
    source.scan()
    assert source.detail(INFO_A).processes == (
        ProcessUse(NOBODY, 7 * GIB, "compute+graphics"),
        ProcessUse(NOBODY + 1, 5, "compute+graphics"),
        ProcessUse(NOBODY + 2, 0, "compute"),
        ProcessUse(NOBODY + 4, 6, "compute+graphics"),
        ProcessUse(NOBODY + 3, GIB, "graphics"),
    )


def test_memory_of_a_process_that_is_not_told_is_none(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.update("0", compute=[Process(NOBODY)])
    source.scan()
    assert source.detail(INFO_A).processes == (ProcessUse(NOBODY, None),)


def test_more_processes_than_expected_are_all_told(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.update("0", compute=[Process(NOBODY + i, i) for i in range(64)])
    source.scan()
    assert source.detail(INFO_A).processes == tuple(ProcessUse(NOBODY + i, i) for i in range(64))


def test_an_old_driver_lists_processes_by_the_older_call(nvml: NvmlStandin, source: NvmlSource) -> None:
    kinds = ("Compute", "Graphics")
    nvml.errors = {f"nvmlDeviceGet{kind}RunningProcesses_v3": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND for kind in kinds}
    nvml.update("0", compute=[Process(NOBODY, 1)], graphics=[Process(NOBODY, 1)])
    source.scan()
    assert source.detail(INFO_A).processes == (ProcessUse(NOBODY, 1, "compute+graphics"),)
    assert source.detail(INFO_B).processes == ()
    assert nvml.calls("nvmlDeviceGetComputeRunningProcesses_v3", "1") == 0


def test_compute_processes_of_a_card_without_graphics(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.update("0", compute=[Process(NOBODY, 1)], graphics=None)
    nvml.update("1", compute=[], graphics=None)
    source.scan()
    assert source.detail(INFO_A).processes == (ProcessUse(NOBODY, 1),)
    assert source.detail(INFO_B).processes is None


def test_processes_that_may_not_be_seen_are_unknown_and_not_none_at_all(nvml: NvmlStandin, source: NvmlSource) -> None:
    refused = pynvml.NVML_ERROR_NO_PERMISSION
    nvml.update("0", errors=dict.fromkeys(("nvmlDeviceGetComputeRunningProcesses_v3",), refused))
    nvml.update("1", errors=dict.fromkeys(("nvmlDeviceGetGraphicsRunningProcesses_v3",), refused))
    source.scan()
    assert source.detail(INFO_A).processes is None
    assert source.detail(INFO_B).processes is None


@pytest.mark.parametrize(
    ("namespace", "driver", "processes"),
    [
        ("pid:[4026531836]", "580.82.07", ()),
        ("pid:[4026531836]", "535.113.01", ()),
        ("pid:[4026532501]", "580.82.07", None),  # it hides those of other containers
        ("pid:[4026532501]", "565.57.01", None),
        ("pid:[4026532501]", "560.35.03", ()),  # it shows the host's
        (None, "580.82.07", None),
    ],
)
def test_an_empty_list_says_that_there_are_none_only_where_none_are_hidden(
    nvml: NvmlStandin, tmp_path: Path, namespace: str | None, driver: str, processes: tuple[()] | None
) -> None:
    nvml.driver_version = driver
    source = NvmlSource(proc=proc_of(tmp_path / "proc", namespace) if namespace else tmp_path)
    source.scan()
    assert source.detail(INFO_A).processes == processes
    source.close()


@pytest.fixture
def child() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()  # waits"], stdin=subprocess.PIPE) as process:
        yield process.pid


@pytest.mark.parametrize(
    ("namespace", "driver", "is_ours"),
    [
        ("pid:[4026531836]", "535.113.01", True),
        ("pid:[4026531836]", "580.82.07", True),
        ("pid:[4026532501]", "580.82.07", True),
        ("pid:[4026532501]", "535.113.01", False),  # a pid of the host's: here it is another process
    ],
)
def test_user_and_command_of_a_process_that_is_seen_from_here(
    nvml: NvmlStandin, tmp_path: Path, child: int, namespace: str, driver: str, is_ours: bool
) -> None:
    nvml.driver_version = driver
    nvml.update("0", compute=[Process(child, GIB), Process(NOBODY, 1)])
    source = NvmlSource(proc=proc_of(tmp_path / "proc", namespace))
    source.scan()
    user, command = psutil.Process().username(), f"{sys.executable} -c input()  # waits"
    assert source.detail(INFO_A).processes == (
        ProcessUse(child, GIB, "compute", *((user, command) if is_ours else (None, None))),
        ProcessUse(NOBODY, 1),
    )
    source.close()


# --- MIG


def test_instances_stand_behind_their_gpu_each_with_its_own_memory_and_processes(
    nvml: NvmlStandin, source: NvmlSource
) -> None:
    nvml.devices = [SPLIT, B]
    nvml.update("0:2", compute=[Process(NOBODY, GIB)])
    assert source.scan() == (INFO_SPLIT, INFO_MIG_1, INFO_MIG_3, INFO_B)
    assert source.memory(INFO_MIG_1) == MemoryReading(10 * GIB, 3 * GIB)
    assert source.memory(INFO_MIG_3) == MemoryReading(10 * GIB, 4 * GIB)
    assert source.detail(INFO_MIG_1) == DetailReading(processes=())
    assert source.detail(INFO_MIG_3) == DetailReading(processes=(ProcessUse(NOBODY, GIB),))


def test_a_split_gpu_that_only_root_may_read_is_unreadable_beside_its_instances(
    nvml: NvmlStandin, source: NvmlSource
) -> None:
    nvml.devices = [SPLIT]
    source.scan()
    refusal = unreadable(source.memory, INFO_SPLIT)
    assert "split into MIG instances" in str(refusal) and "Insufficient Permissions" in str(refusal)
    assert not refusal.lost
    assert source.memory(INFO_MIG_1) == MemoryReading(10 * GIB, 3 * GIB)


def test_a_split_gpu_never_has_the_memory_of_the_host(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.devices = [Gpu("GPU-cccc", total_bytes=None, mig=[instance("MIG-1", total_bytes=None)])]
    parent, instance_ = source.scan()
    assert "Not Supported" in str(unreadable(source.memory, parent))
    assert "Not Supported" in str(unreadable(source.memory, instance_))


def test_instances_come_and_go(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.devices = [SPLIT]
    source.scan()
    nvml.update("0", mig=[None, None, instance("MIG-3", free_bytes=4 * GIB)])
    assert "Not Found" in str(unreadable(source.memory, INFO_MIG_1))
    assert source.scan() == (INFO_SPLIT, INFO_MIG_3)
    assert "no device MIG-1" in str(unreadable(source.memory, INFO_MIG_1))
    nvml.update("0", mig=[])
    assert source.scan() == (INFO_SPLIT,)
    assert "split into MIG instances" in str(unreadable(source.memory, INFO_SPLIT))


def test_an_instance_that_cannot_be_looked_at_does_not_hide_the_others(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.devices = [SPLIT]
    nvml.update("0:0", errors={"nvmlDeviceGetUUID": UNKNOWN})
    infos = source.scan()
    assert infos == (INFO_SPLIT, DeviceInfo("index-0:0", "0:0", DeviceKind.MIG, parent_uuid="GPU-cccc"), INFO_MIG_3)
    assert "Unknown Error" in str(unreadable(source.memory, infos[1]))


# --- dead devices


@pytest.mark.parametrize(
    ("code", "lost", "says"),
    [
        (LOST, True, "the device is lost until it is reset (NVML: GPU is lost)"),
        (pynvml.NVML_ERROR_RESET_REQUIRED, True, "the device is lost until it is reset (NVML: GPU requires restart)"),
        (UNKNOWN, False, "the device gave no answer (NVML: Unknown Error)"),
        (pynvml.NVML_ERROR_INVALID_STATE, False, "the device gave no answer (NVML: an error of the stand-in)"),
    ],
)
def test_a_device_that_dies_leaves_the_other_alone_and_comes_back(
    nvml: NvmlStandin, source: NvmlSource, code: int, lost: bool, says: str
) -> None:
    source.scan()
    nvml.update("0", error=code)
    for scanned in (False, True, True):
        if scanned:
            assert source.scan() == (INFO_A, INFO_B)
        refusal = unreadable(source.memory, INFO_A)
        assert (str(refusal), refusal.lost) == (says, lost)
        assert source.memory(INFO_B) == READ_B
        assert source.detail(INFO_B).temperature_celsius == 30
    nvml.update("0", error=0)
    assert source.scan() == (INFO_A, INFO_B)
    assert (source.memory(INFO_A), source.memory(INFO_B)) == (READ_A, READ_B)
    assert (nvml.calls("nvmlInitWithFlags"), nvml.calls("nvmlShutdown")) == (1, 0)


def test_load_of_a_lost_device_is_unreadable_and_not_unknown(nvml: NvmlStandin, source: NvmlSource) -> None:
    source.scan()
    nvml.update("0", errors={"nvmlDeviceGetGraphicsRunningProcesses_v3": LOST})
    assert unreadable(source.detail, INFO_A).lost
    nvml.update("0", error=LOST)
    source.scan()
    assert unreadable(source.detail, INFO_A).lost


def test_a_device_that_is_dead_from_the_start_keeps_its_place_without_a_name(
    nvml: NvmlStandin, source: NvmlSource
) -> None:
    nvml.update("0", error=LOST)
    nameless = DeviceInfo("index-0", "0", DeviceKind.GPU)
    assert source.scan() == source.scan() == (nameless, INFO_B)
    assert unreadable(source.memory, nameless).lost
    assert source.memory(INFO_B) == READ_B
    nvml.update("0", error=0)
    assert source.scan() == (INFO_A, INFO_B)


@pytest.mark.parametrize("last", ["Name", "PciInfo_v3", "MigMode", "MaxMigDeviceCount"])
def test_a_device_that_dies_during_a_scan_is_alone_in_that(nvml: NvmlStandin, source: NvmlSource, last: str) -> None:
    nvml.devices = [SPLIT, B]
    before = source.scan()
    nvml.update("0", errors={f"nvmlDeviceGet{last}": LOST})
    assert source.scan() == before
    assert unreadable(source.memory, INFO_SPLIT).lost
    assert source.memory(INFO_B) == READ_B
    assert nvml.calls("nvmlShutdown") == 0


def test_a_dead_device_that_still_tells_its_uuid_has_it(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.update("0", errors={"nvmlDeviceGetMigMode": LOST})
    assert source.scan() == (DeviceInfo("GPU-aaaa", "0", DeviceKind.GPU), INFO_B)
    nvml.update("0", errors={})
    assert source.scan() == (INFO_A, INFO_B)
    nvml.update("0", errors={"nvmlDeviceGetMigMode": LOST})
    assert source.scan() == (INFO_A, INFO_B)


def test_the_instances_of_a_dead_gpu_stay_listed(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.devices = [SPLIT, B]
    before = source.scan()
    nvml.update("0", error=LOST)
    assert source.scan() == source.scan() == before
    for info in (INFO_SPLIT, INFO_MIG_1, INFO_MIG_3):
        assert unreadable(source.memory, info).lost
    nvml.update("0", error=0)
    assert source.scan() == before
    assert source.memory(INFO_MIG_3) == MemoryReading(10 * GIB, 4 * GIB)


def test_a_dead_device_is_not_taken_for_one_that_moved(nvml: NvmlStandin, source: NvmlSource) -> None:
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


# --- the driver as a whole


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
    assert source.scan() == (INFO_A, INFO_B)
    assert (source.memory(INFO_A), source.memory(INFO_B)) == (READ_A, READ_B)


def test_a_driver_that_was_replaced_between_two_scans(nvml: NvmlStandin, source: NvmlSource) -> None:
    source.scan()
    nvml.driver_loaded = False
    nvml.driver_loaded = True
    assert source.scan() == (INFO_A, INFO_B)
    assert source.memory(INFO_A) == READ_A


def test_a_device_that_dies_while_the_driver_is_away_is_remembered(nvml: NvmlStandin, source: NvmlSource) -> None:
    source.scan()
    nvml.driver_loaded = False
    with pytest.raises(SourceUnavailable):
        source.scan()
    nvml.update("0", error=LOST)
    nvml.driver_loaded = True
    assert source.scan() == (INFO_A, INFO_B)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "another version .* restart this process"),
        (pynvml.NVML_ERROR_UNKNOWN, r"does not work \(NVML: Unknown Error\)"),
    ],
)
def test_nvml_that_cannot_be_initialised_is_unavailable(
    nvml: NvmlStandin, source: NvmlSource, code: int, says: str
) -> None:
    nvml.errors = {"nvmlInitWithFlags": code}
    with pytest.raises(SourceUnavailable, match=says):
        source.scan()
    nvml.errors = {}
    assert source.scan() == (INFO_A, INFO_B)


def test_a_driver_upgraded_under_a_running_process(nvml: NvmlStandin, source: NvmlSource) -> None:
    source.scan()
    mismatch = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    nvml.errors = dict.fromkeys(("nvmlInitWithFlags", "nvmlDeviceGetCount_v2", "nvmlDeviceGetMemoryInfo_v2"), mismatch)
    assert "gone away" in str(unreadable(source.memory, INFO_A))
    with pytest.raises(SourceUnavailable, match="restart this process"):
        source.scan()


def test_a_machine_without_gpus_has_no_devices(nvml: NvmlStandin, source: NvmlSource) -> None:
    nvml.devices = []
    assert source.scan() == source.scan() == ()
    nvml.devices = [A]
    assert source.scan() == (INFO_A,)


def test_closing_gives_nvml_back_once_and_scanning_takes_it_again(nvml: NvmlStandin, source: NvmlSource) -> None:
    source.scan()
    source.close()
    source.close()
    assert (nvml.calls("nvmlInitWithFlags"), nvml.calls("nvmlShutdown")) == (1, 1)
    assert "no device" in str(unreadable(source.memory, INFO_A))
    assert source.scan() == (INFO_A, INFO_B)
    nvml.driver_loaded = False
    source.close()


def test_scanning_does_not_begin_anew_while_it_works(nvml: NvmlStandin, source: NvmlSource) -> None:
    for _ in range(3):
        source.scan()
    assert (nvml.calls("nvmlInitWithFlags"), nvml.calls("nvmlShutdown")) == (1, 0)


# --- slow answers, several threads

UNTIL_TOLD_US = 60_000_000  # ended by the test; this long only if somebody waits who should not


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    answers: list[object] = []

    def answer() -> None:
        try:
            answers.append(call())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return thread, answers


def test_a_device_that_hangs_keeps_nobody_waiting_and_its_answer_survives_scans(
    nvml: NvmlStandin, source: NvmlSource
) -> None:
    source.scan()
    slow = dict.fromkeys(("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetTemperature"), UNTIL_TOLD_US)
    nvml.update("0", latencies_us=slow)
    hanging = [in_thread(lambda: source.memory(INFO_A)), in_thread(lambda: source.detail(INFO_A))]
    while not all(nvml.calls(function, "0") for function in slow):
        assert all(thread.is_alive() for thread, _ in hanging)
    assert source.memory(INFO_B) == READ_B
    assert source.detail(INFO_B).processes == ()
    assert source.scan() == source.scan() == (INFO_A, INFO_B)
    assert all(thread.is_alive() and not answers for thread, answers in hanging)
    nvml.update("0", latencies_us={})
    for thread, _ in hanging:
        thread.join(timeout=60)
    assert hanging[0][1] == [READ_A]
    assert hanging[1][1] == [DetailReading(0.0, 30.0, 60.0, 400.0, ())]


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


@pytest.mark.parametrize("function", [HANDLE, UUID, "nvmlDeviceGetName"])
def test_one_that_hangs_from_the_start_hides_no_other_and_is_asked_once(
    nvml: NvmlStandin, hasty: NvmlSource, function: str
) -> None:
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


def test_one_that_hangs_at_a_later_scan_stays_as_it_was_known_and_is_read_on(
    nvml: NvmlStandin, hasty: NvmlSource
) -> None:
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


def test_a_fault_in_a_look_is_not_swallowed(source: NvmlSource, monkeypatch: pytest.MonkeyPatch) -> None:
    source.scan()
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda _handle: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        source.scan()


def test_a_device_that_is_lost_during_a_call(nvml: NvmlStandin, source: NvmlSource) -> None:
    source.scan()
    nvml.update("0", latency_us=UNTIL_TOLD_US)
    thread, answers = in_thread(lambda: source.memory(INFO_A))
    while not nvml.calls("nvmlDeviceGetMemoryInfo_v2", "0"):
        assert thread.is_alive()
    nvml.update("0", error=LOST, latency_us=0)
    thread.join(timeout=60)
    assert isinstance(answers[0], DeviceUnreadable) and answers[0].lost


@pytest.mark.parametrize("rounds", [50, pytest.param(200, marks=pytest.mark.stress)])
def test_threads_that_ask_while_the_driver_comes_and_goes_get_answers_or_reasons(
    nvml: NvmlStandin, source: NvmlSource, rounds: int
) -> None:
    nvml.devices = [A, SPLIT]
    infos = source.scan()
    stop = threading.Event()
    seen: list[tuple[DeviceInfo, MemoryReading | str]] = []

    def ask(info: DeviceInfo) -> None:
        answers = set()
        while not stop.is_set():
            try:
                answers.add(source.memory(info))
            except DeviceUnreadable:
                answers.add("unreadable")
        seen.extend((info, answer) for answer in answers)

    threads = [threading.Thread(target=ask, args=(info,)) for info in infos]
    for thread in threads:
        thread.start()
    for round_ in range(rounds):
        nvml.driver_loaded = round_ % 2 == 1
        if nvml.driver_loaded:
            assert source.scan() == infos
        else:
            with pytest.raises(SourceUnavailable):
                source.scan()
    stop.set()
    for thread in threads:
        thread.join(timeout=60)
    free = {"GPU-aaaa": 60 * GIB, "MIG-1": 3 * GIB, "MIG-3": 4 * GIB}
    readings = {(info.uuid, answer.free_bytes) for info, answer in seen if isinstance(answer, MemoryReading)}
    assert readings <= set(free.items())


# --- the library is found by the dynamic loader, in processes of their own

SCAN = """
import sys
from pagetide.monitor.errors import SourceUnavailable
from pagetide.monitor.sources.nvml import NvmlSource
assert not {"pynvml", "psutil"} & set(sys.modules), "importing the source loads what only some need"
source = NvmlSource()
try:
    for info in source.scan():
        print(info.index, info.uuid, source.memory(info).free_bytes)
except SourceUnavailable as error:
    print(error)
source.close()
"""


def scan_in_child(env: dict[str, str]) -> str:
    child = subprocess.run([sys.executable, "-P", "-c", SCAN], env=env, capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_a_child_loads_the_driver_library_by_its_name(nvml: NvmlStandin) -> None:
    assert scan_in_child(nvml.env()) == f"0 GPU-aaaa {60 * GIB}\n1 GPU-bbbb {50 * GIB}\n"


def test_without_a_driver_library_the_source_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").touch()  # no library at all, and found before any real one
    said = scan_in_child({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert "libnvidia-ml.so.1, was not found; install the driver, or watch host memory with --source host" in said
