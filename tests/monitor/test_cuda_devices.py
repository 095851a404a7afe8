from __future__ import annotations

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
C, A, B = (
    gpu(0, "GPU-cafe", "00000000:C1:00.0"),
    gpu(1, "GPU-a11c", "00000000:0A:00.0"),
    gpu(2, "GPU-a22c", "00000001:03:00.0"),
)
ALIKE = (C, A, B, HOST)
SLOW, FAST = gpu(0, "GPU-510", "00000000:01:00.0", "T4"), gpu(1, "GPU-fa5", "00000000:02:00.0", "H100")
MIXED = (SLOW, FAST, HOST)
DEAD = gpu(1, "index-1", None, None)

SPLIT = gpu(0, "GPU-5911", "00000000:01:00.0")
ONE = instance("0:0", "MIG-1111", SPLIT)
TWO = instance("0:1", "MIG-2222", SPLIT)
WHOLE = gpu(1, "GPU-4073", "00000000:02:00.0")
SPLIT_IN_ONE = (SPLIT, ONE, HOST)
SPLIT_IN_TWO = (SPLIT, ONE, TWO, HOST)
SPLIT_BESIDE_WHOLE = (SPLIT, ONE, WHOLE)

PCI_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    "order", [{}, PCI_ORDER, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}], ids=["unset", "pci", "fastest"]
)
@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (None, (A, C, B)),
        ("0", (A,)),
        ("2,0", (B, A)),
        (" 1 , 0 ", (C, A)),
        ("+1,2", (C, B)),
        ("1gpu,2nd", (C, B)),  # as strtol reads
        ("0,2,-1,1", (A, B)),  # the guide's own example
        ("0,3,1", (A,)),
        ("0,x,1", (A,)),
        ("0,,1", (A,)),
        ("0,GPU-cafe", (A,)),  # of another sort than the first
        ("1,1", ()),
        ("0,1,2,1", ()),
        ("", ()),
        ("-1", ()),
        ("-1,0", ()),
        ("1" * 5000, ()),  # more digits than Python reads
        ("0," + "-" + "9" * 5000, (A,)),
        ("0" * 5000 + "1", (C,)),
        ("3", ()),
        ("none", ()),
        ("NoDevFiles", ()),
        ("GPU-cafe", (C,)),
        ("GPU-a22c,GPU-a11c", (B, A)),
        ("GPU-c, GPU-a2", (C, B)),
        ("GPU-a", ()),  # two begin so
        ("GPU-cafe,GPU-a,GPU-a11c", (C,)),
        ("GPU-cafe,GPU-0000,GPU-a11c", (C,)),
        ("GPU-cafe,1", (C,)),
        ("GPU-cafe,GPU-ca", ()),
        ("cafe", ()),
        ("MIG-1111", ()),
        ("HOST-1", ()),
    ],
)
def test_gpus_of_one_model(order: dict[str, str], named: str | None, expected: tuple[DeviceInfo, ...]) -> None:
    environ = order if named is None else order | {"CUDA_VISIBLE_DEVICES": named}
    assert visible_devices(ALIKE, environ) == expected


@pytest.mark.parametrize(
    ("named", "expected"),
    [(None, (SLOW, FAST)), ("1", (FAST,)), ("GPU-fa5,GPU-510", (FAST, SLOW)), ("", ())],
)
def test_gpus_of_several_models_in_pci_order(named: str | None, expected: tuple[DeviceInfo, ...]) -> None:
    assert visible_devices(MIXED, PCI_ORDER | ({} if named is None else {"CUDA_VISIBLE_DEVICES": named})) == expected


@pytest.mark.parametrize("environ", [{}, {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_DEVICE_ORDER": "pci_bus_id"}])
@pytest.mark.parametrize("infos", [MIXED, (A, DEAD)], ids=["models differ", "model not known"])
def test_an_index_among_several_models_is_refused(infos: tuple[DeviceInfo, ...], environ: dict[str, str]) -> None:
    with pytest.raises(NoSuchDevice, match="CUDA_DEVICE_ORDER=PCI_BUS_ID, or name UUIDs"):
        visible_devices(infos, environ)


def test_uuids_need_no_order() -> None:
    assert visible_devices(MIXED, {"CUDA_VISIBLE_DEVICES": "GPU-fa5,GPU-510"}) == (FAST, SLOW)
    assert visible_devices((A, DEAD), {"CUDA_VISIBLE_DEVICES": "GPU-a11c"}) == (A,)


def test_a_gpu_that_does_not_tell_its_place_makes_every_index_unknown() -> None:
    with pytest.raises(NoSuchDevice, match=r"not every GPU reports its PCI id .*index-1"):
        visible_devices((A, DEAD), PCI_ORDER)


def test_one_gpu_is_device_0_whatever_it_is() -> None:
    assert visible_devices((DEAD, HOST), {}) == (DEAD,)


def test_no_gpu_is_no_device() -> None:
    assert visible_devices((HOST,), {}) == visible_devices((), {"CUDA_VISIBLE_DEVICES": "0"}) == ()


@pytest.mark.parametrize(
    ("infos", "named", "expected"),
    [
        (SPLIT_IN_ONE, None, (ONE,)),
        (SPLIT_IN_ONE, "0", (ONE,)),
        (SPLIT_IN_ONE, "GPU-5911", (ONE,)),
        (SPLIT_IN_ONE, "MIG-1111", (ONE,)),
        (SPLIT_IN_TWO, "MIG-2222", (TWO,)),
        (SPLIT_IN_TWO, "MIG-2222,MIG-1111", (TWO, ONE)),
        (SPLIT_IN_TWO, "MIG-2222,MIG-3333,MIG-1111", (TWO,)),
        (SPLIT_IN_TWO, "MIG-2222,MIG-2222", ()),
        (SPLIT_BESIDE_WHOLE, "1", (WHOLE,)),
        (SPLIT_BESIDE_WHOLE, "0", (ONE,)),
        (SPLIT_BESIDE_WHOLE, "GPU-4073", (WHOLE,)),
    ],
)
def test_mig(infos: tuple[DeviceInfo, ...], named: str | None, expected: tuple[DeviceInfo, ...]) -> None:
    assert visible_devices(infos, {} if named is None else {"CUDA_VISIBLE_DEVICES": named}) == expected


@pytest.mark.parametrize(
    ("infos", "named", "says"),
    [
        (SPLIT_IN_TWO, None, r"which MIG instances of 0 .*by their UUIDs: .*MIG-1111.*MIG-2222"),
        (SPLIT_IN_TWO, "GPU-5911", "which MIG instances"),
        (SPLIT_BESIDE_WHOLE, None, "either whole GPUs or MIG instances"),
        (SPLIT_BESIDE_WHOLE, "GPU-4073,MIG-1111", "either whole GPUs or MIG instances"),
        (SPLIT_IN_TWO, "MIG-GPU-5911/7/0", "only the driver knows; name the MIG instance"),
    ],
)
def test_what_depends_on_the_driver_is_refused(infos: tuple[DeviceInfo, ...], named: str | None, says: str) -> None:
    with pytest.raises(NoSuchDevice, match=says):
        visible_devices(infos, {} if named is None else {"CUDA_VISIBLE_DEVICES": named})


def test_drivers_before_r470_name_instances_by_numbers() -> None:
    old = instance("0:0", "MIG-GPU-5911/7/0", SPLIT)
    assert visible_devices((SPLIT, old, TWO), {"CUDA_VISIBLE_DEVICES": "MIG-GPU-5911/7/0"}) == (old,)


@pytest.mark.parametrize("uuid", ["GPU-a11c", "a11c", "A11C", "gpu-A11C"])
def test_a_uuid_is_found_as_torch_writes_it(uuid: str) -> None:
    assert find_device(ALIKE, uuid=uuid) is A
    assert find_device(SPLIT_IN_TWO, uuid="2222") is TWO


@pytest.mark.parametrize("pci_id", ["00000001:03:00.0", "0001:03:00.0", "1:3:0.0", "1:3:0", (1, 3, 0)])
def test_a_pci_address_is_found_however_it_is_written(pci_id: str | tuple[int, int, int]) -> None:
    assert find_device(ALIKE, pci_id=pci_id) is B


def test_letters_of_a_pci_address_have_no_case_and_a_domain_may_be_left_out() -> None:
    assert find_device(ALIKE, pci_id="0000:c1:00.0") is find_device(ALIKE, pci_id="C1:00.0") is C


def test_the_uuid_goes_first_and_the_pci_address_helps_out() -> None:
    assert find_device(ALIKE, uuid="cafe", pci_id=(1, 3, 0)) is C
    assert find_device(ALIKE, uuid="unknown", pci_id=(1, 3, 0)) is B


def test_a_pci_address_does_not_tell_instances_apart() -> None:
    with pytest.raises(NoSuchDevice, match=r"00000000:01:00\.0 is split .*MIG-1111.*MIG-2222"):
        find_device(SPLIT_IN_TWO, pci_id=(0, 1, 0))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"uuid": "GPU-0000"}, "no device has the UUID GPU-0000; there are 0"),
        ({"pci_id": "00:1f.0"}, "no device has the PCI id 00:1f.0; there are 0"),
        ({"pci_id": "nonsense"}, "no device has the PCI id nonsense"),
        ({"uuid": "beef", "pci_id": (0, 1, 2)}, r"the UUID beef or the PCI id \(0, 1, 2\)"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(asked: dict[str, str], says: str) -> None:
    with pytest.raises(NoSuchDevice, match=says) as refusal:
        find_device((*ALIKE, DEAD), **asked)
    assert all(info.uuid in str(refusal.value) for info in (*ALIKE, DEAD))


def test_where_there_are_no_devices_the_refusal_says_so() -> None:
    with pytest.raises(NoSuchDevice, match="there are none"):
        find_device((), uuid="GPU-0000")
