"""The NVML source on a real driver: `make gpu`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from pagetide.monitor.cuda_devices import find_device, visible_devices
from pagetide.monitor.errors import NoSuchDevice
from pagetide.monitor.snapshot import DeviceInfo, DeviceKind, ProcessUse
from pagetide.monitor.sources.nvml import NvmlSource

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GIB = 1 << 30
OTHERS = 256 << 20  # what processes beside the test may do meanwhile, and the granules of the driver


@pytest.fixture
def source() -> Iterator[NvmlSource]:
    source = NvmlSource()
    yield source
    source.close()


def pci_numbers(properties) -> tuple[int, int, int]:
    return properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id


def devices_of_torch(source: NvmlSource) -> list[DeviceInfo]:
    """CUDA device i at place i."""
    infos = source.scan()
    return [find_device(infos, uuid=str(torch.cuda.get_device_properties(i).uuid)) for i in range(torch.cuda.device_count())]


def used_bytes(source: NvmlSource, info: DeviceInfo) -> int:
    reading = source.memory(info)
    assert reading.total_bytes is not None and reading.free_bytes is not None
    assert 0 <= reading.free_bytes <= reading.total_bytes
    return reading.total_bytes - reading.free_bytes


def test_every_device_tells_who_it_is(source):
    infos = source.scan()
    assert infos == source.scan()
    assert len({info.uuid for info in infos}) == len(infos)
    for info in infos:
        assert info.uuid.startswith("MIG-" if info.kind is DeviceKind.MIG else "GPU-")
        assert info.name and info.pci_id


def test_uuid_and_pci_id_are_those_of_torch(source):
    infos = source.scan()
    for i, info in enumerate(devices_of_torch(source)):
        properties = torch.cuda.get_device_properties(i)
        if info.kind is DeviceKind.GPU:
            assert find_device(infos, pci_id=pci_numbers(properties)) == info
            assert info.name == properties.name
        else:
            with pytest.raises(NoSuchDevice, match="split"):
                find_device(infos, pci_id=pci_numbers(properties))


def test_the_order_is_that_of_cuda(source):
    try:
        visible = visible_devices(source.scan(), os.environ)
    except NoSuchDevice as refusal:
        pytest.skip(f"the order cannot be known here: {refusal}")
    assert list(visible[: torch.cuda.device_count()]) == devices_of_torch(source)


def test_memory_agrees_with_cuda(source):
    for i, info in enumerate(devices_of_torch(source)):
        free, total = torch.cuda.mem_get_info(i)
        reading = source.memory(info)
        tolerance = max(GIB, total * 3 // 100)  # CUDA's total leaves out what the driver keeps
        assert abs(reading.total_bytes - total) <= tolerance
        assert abs(reading.free_bytes - free) <= tolerance


def test_memory_that_is_taken_shows_and_so_does_its_return(source):
    for i, info in enumerate(devices_of_torch(source)):
        device = torch.device("cuda", i)
        torch.ones(1, device=device)  # the context takes memory of its own
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        before = used_bytes(source, info)
        taken = torch.ones(GIB, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        during = used_bytes(source, info)
        assert during - before >= GIB - OTHERS
        assert_shown(source.detail(info).processes, at_least=GIB)
        del taken
        torch.cuda.empty_cache()
        assert during - used_bytes(source, info) >= GIB - OTHERS


def assert_shown(processes: tuple[ProcessUse, ...] | None, *, at_least: int) -> None:
    """This process is listed, unless the driver hides processes here or counts them as the host does."""
    if processes is None:
        return
    assert processes
    for process in processes:
        if process.pid == os.getpid():
            assert process.used_bytes is None or process.used_bytes >= at_least
            assert process.command is None or "pytest" in process.command
            return
    assert os.readlink("/proc/self/ns/pid") != "pid:[4026531836]", "outside of a container our own pid must be listed"


def test_load_is_in_base_units(source):
    for info in devices_of_torch(source):
        detail = source.detail(info)
        assert detail.utilization is None or 0 <= detail.utilization <= 1
        assert detail.temperature_celsius is None or 0 < detail.temperature_celsius < 130
        assert detail.power_watts is None or 0 < detail.power_watts < 5000
        assert detail.power_limit_watts is None or 0 < detail.power_limit_watts < 5000
        if info.kind is DeviceKind.GPU:
            assert detail.temperature_celsius is not None


def test_it_closes_and_opens_again(source):
    before = source.scan()
    source.close()
    source.close()
    assert source.scan() == before
