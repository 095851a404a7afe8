"""Which of the monitor's devices CUDA shows a process, and which device a UUID or a PCI address names."""

from __future__ import annotations

from typing import Any

import pytest

from pagetide.monitor.cuda_devices import find_device, visible_devices
from pagetide.monitor.errors import NoSuchDevice
from pagetide.monitor.snapshot import DeviceInfo, DeviceKind


def gpu(index: int, uuid: str, pci_id: str | None, name: str | None = "H100") -> DeviceInfo:
    return DeviceInfo(uuid, str(index), DeviceKind.GPU, name, pci_id)


def instance(index: str, uuid: str, parent: DeviceInfo) -> DeviceInfo:
    return DeviceInfo(uuid, index, DeviceKind.MIG, "H100 MIG 1g.10gb", parent.pci_id, parent.uuid)


HOST = DeviceInfo("HOST-1", "host", DeviceKind.HOST, "this machine")
# NVML counts as it likes here, so that every confusion of the two orders shows.
C, A = gpu(0, "GPU-cafe", "00000000:C1:00.0"), gpu(1, "GPU-a11c", "00000000:0A:00.0")
B = gpu(2, "GPU-a22c", "00000001:03:00.0")
ALIKE = (C, A, B, HOST)
SLOW, FAST = gpu(0, "GPU-510", "00000000:01:00.0", "T4"), gpu(1, "GPU-fa5", "00000000:02:00.0", "H100")
MIXED = (SLOW, FAST, HOST)
DEAD = gpu(1, "index-1", None, None)

SPLIT = gpu(0, "GPU-5911", "00000000:01:00.0")
ONE, TWO = instance("0:0", "MIG-1111", SPLIT), instance("0:1", "MIG-2222", SPLIT)
WHOLE = gpu(1, "GPU-4073", "00000000:02:00.0")
SPLIT_IN_ONE = (SPLIT, ONE, HOST)
SPLIT_IN_TWO = (SPLIT, ONE, TWO, HOST)
SPLIT_BESIDE_WHOLE = (SPLIT, ONE, WHOLE)

PCI_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_gpus_of_one_model() -> None:
    for expected, texts in {
        (A, C, B): (None,),
        (A,): (
            "0", "0,3,1", "0,x,1", "0,,1", "0," + "-" + "9" * 5000,
            "0,GPU-cafe",  # of another sort than the first
        ),
        (A, B): ("0,2,-1,1",),  # the guide's own example
        (B, A): ("2,0", "GPU-a22c,GPU-a11c"),
        (C, A): (" 1 , 0 ",),
        (C, B): ("+1,2", "1gpu,2nd", "GPU-c, GPU-a2"),  # as strtol reads; by how they begin
        (C,): ("0" * 5000 + "1", "GPU-cafe", "GPU-cafe,GPU-a,GPU-a11c", "GPU-cafe,GPU-0000,GPU-a11c", "GPU-cafe,1"),
        (): (
            "1,1", "0,1,2,1", "", "-1,0", "3", "none", "NoDevFiles", "GPU-cafe,GPU-ca", "cafe", "MIG-1111", "HOST-1",
            "1" * 5000,  # more digits than Python reads
            "GPU-a",  # two begin so
        ),
    }.items():  # fmt: skip
        for named in texts:
            for order in ({}, PCI_ORDER, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}):
                environ = order if named is None else order | {"CUDA_VISIBLE_DEVICES": named}
                assert visible_devices(ALIKE, environ) == expected, named


def test_gpus_of_several_models_need_pci_order_or_uuids() -> None:
    for named, expected in ((None, (SLOW, FAST)), ("1", (FAST,)), ("GPU-fa5,GPU-510", (FAST, SLOW)), ("", ())):
        environ = PCI_ORDER | ({} if named is None else {"CUDA_VISIBLE_DEVICES": named})
        assert visible_devices(MIXED, environ) == expected
    assert visible_devices(MIXED, {"CUDA_VISIBLE_DEVICES": "GPU-fa5,GPU-510"}) == (FAST, SLOW)
    assert visible_devices((A, DEAD), {"CUDA_VISIBLE_DEVICES": "GPU-a11c"}) == (A,)
    for environ in ({}, {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_DEVICE_ORDER": "pci_bus_id"}):
        for infos in (MIXED, (A, DEAD)):
            with pytest.raises(NoSuchDevice, match="CUDA_DEVICE_ORDER=PCI_BUS_ID, or name UUIDs"):
                visible_devices(infos, environ)
    with pytest.raises(NoSuchDevice, match=r"not every GPU reports its PCI id .*index-1"):
        visible_devices((A, DEAD), PCI_ORDER)


def test_one_gpu_is_device_0_whatever_it_is_and_none_is_no_device() -> None:
    assert visible_devices((DEAD, HOST), {}) == (DEAD,)
    assert visible_devices((HOST,), {}) == visible_devices((), {"CUDA_VISIBLE_DEVICES": "0"}) == ()


def test_mig() -> None:
    for infos, named, expected in (
        (SPLIT_IN_ONE, None, (ONE,)), (SPLIT_IN_ONE, "0", (ONE,)), (SPLIT_IN_ONE, "GPU-5911", (ONE,)),
        (SPLIT_IN_TWO, "MIG-2222", (TWO,)), (SPLIT_IN_TWO, "MIG-2222,MIG-1111", (TWO, ONE)),
        (SPLIT_IN_TWO, "MIG-2222,MIG-3333,MIG-1111", (TWO,)), (SPLIT_IN_TWO, "MIG-2222,MIG-2222", ()),
        (SPLIT_BESIDE_WHOLE, "1", (WHOLE,)), (SPLIT_BESIDE_WHOLE, "0", (ONE,)),
        (SPLIT_BESIDE_WHOLE, "GPU-4073", (WHOLE,)),
    ):  # fmt: skip
        environ = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
        assert visible_devices(infos, environ) == expected, named


def test_what_depends_on_the_driver_is_refused() -> None:
    for infos, named, says in (
        (SPLIT_IN_TWO, None, r"which MIG instances of 0 .*by their UUIDs: .*MIG-1111.*MIG-2222"),
        (SPLIT_IN_TWO, "GPU-5911", "which MIG instances"),
        (SPLIT_BESIDE_WHOLE, None, "either whole GPUs or MIG instances"),
        (SPLIT_BESIDE_WHOLE, "GPU-4073,MIG-1111", "either whole GPUs or MIG instances"),
        (SPLIT_IN_TWO, "MIG-GPU-5911/7/0", "only the driver knows; name the MIG instance"),
    ):
        with pytest.raises(NoSuchDevice, match=says):
            visible_devices(infos, {} if named is None else {"CUDA_VISIBLE_DEVICES": named})


OLD = instance("0:0", "MIG-GPU-5911/7/0", SPLIT)  # as drivers before R470 name instances


def test_a_device_is_found_by_its_uuid_or_its_pci_address_however_they_are_written() -> None:
    assert visible_devices((SPLIT, OLD, TWO), {"CUDA_VISIBLE_DEVICES": "MIG-GPU-5911/7/0"}) == (OLD,)
    assert all(find_device(ALIKE, uuid=uuid) is A for uuid in ("GPU-a11c", "a11c", "A11C", "gpu-A11C"))
    assert find_device(SPLIT_IN_TWO, uuid="2222") is TWO
    for pci_id in ("00000001:03:00.0", "0001:03:00.0", "1:3:0.0", "1:3:0", (1, 3, 0)):
        assert find_device(ALIKE, pci_id=pci_id) is B
    assert find_device(ALIKE, pci_id="0000:c1:00.0") is find_device(ALIKE, pci_id="C1:00.0") is C
    assert find_device(ALIKE, uuid="cafe", pci_id=(1, 3, 0)) is C
    assert find_device(ALIKE, uuid="unknown", pci_id=(1, 3, 0)) is B


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    asked: list[tuple[dict[str, Any], str]] = [
        ({"uuid": "GPU-0000"}, "no device has the UUID GPU-0000; there are 0"),
        ({"pci_id": "00:1f.0"}, "no device has the PCI id 00:1f.0; there are 0"),
        ({"pci_id": "nonsense"}, "no device has the PCI id nonsense"),
        ({"uuid": "beef", "pci_id": (0, 1, 2)}, r"the UUID beef or the PCI id \(0, 1, 2\)"),
    ]
    for names, says in asked:
        with pytest.raises(NoSuchDevice, match=says) as refusal:
            find_device((*ALIKE, DEAD), **names)
        assert all(info.uuid in str(refusal.value) for info in (*ALIKE, DEAD))
    with pytest.raises(NoSuchDevice, match="there are none"):
        find_device((), uuid="GPU-0000")
    with pytest.raises(NoSuchDevice, match=r"00000000:01:00\.0 is split .*MIG-1111.*MIG-2222"):
        find_device(SPLIT_IN_TWO, pci_id=(0, 1, 0))
