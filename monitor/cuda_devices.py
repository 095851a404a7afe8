"""Maps CUDA devices to devices of the monitor. NVML orders by PCI id, CUDA by speed, and the environment changes that.

Sources: "CUDA Environment Variables" in NVIDIA's CUDA programming guide, "CUDA Device Enumeration" in the MIG user
guide, and for what they leave open (text after a number, duplicates, lists of both kinds) `_parse_visible_devices` of
torch.cuda, which follows CUDA's behaviour. What cannot be known outside of CUDA is refused, not guessed:

- an index among GPUs of several models, unless CUDA_DEVICE_ORDER=PCI_BUS_ID: by default CUDA puts the fastest first;
- a GPU with several MIG instances that is not named by an instance's UUID: before R570 CUDA takes the first, since then
  one of each GPU instance; and before R570 CUDA shows no other GPU beside an instance.

Several MIG UUIDs are all visible since R570. Before it only the first is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .errors import NoSuchDevice
from .snapshot import DeviceInfo, DeviceKind

PciNumbers = tuple[int, int, int]  # domain, bus, device

_INDEX = re.compile(r"([+-]?)0*([0-9]+)")  # CUDA parses it like C's strtol, and ignores what follows
_MOST_DIGITS = 9
_PCI_ID = re.compile(r"(?:([0-9a-f]+):)?([0-9a-f]+):([0-9a-f]+)(?:\.[0-7])?", re.IGNORECASE)
_INSTANCE_BY_NUMBERS = re.compile(r"MIG-GPU-[^/]*/\d+/\d+")


def visible_devices(infos: Sequence[DeviceInfo], environ: Mapping[str, str]) -> tuple[DeviceInfo, ...]:
    """The devices that a process with this environment sees through CUDA, CUDA device 0 first.

    Honours CUDA_VISIBLE_DEVICES (indices, UUIDs, prefixes of UUIDs, MIG UUIDs; the list ends at the first entry that
    names no device; a device named twice leaves none) and CUDA_DEVICE_ORDER. Raises NoSuchDevice if the answer cannot
    be known outside of CUDA.
    """
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        chosen: Sequence[DeviceInfo] = _in_cuda_order(infos, environ)
    else:
        entries = [entry.strip() for entry in named.split(",")]
        chosen = _by_index(entries, infos, environ) if _INDEX.match(entries[0]) else _by_uuid(entries, infos)
    if len({info.uuid for info in chosen}) < len(chosen):
        return ()
    return _with_instances(chosen, infos)


def find_device(infos: Sequence[DeviceInfo], *, uuid: str | None = None, pci_id: str | PciNumbers | None = None) -> DeviceInfo:
    """The device with this UUID, or else at this PCI address.

    Accepts torch's properties of a CUDA device: a UUID with or without "GPU-" or "MIG-", in any case; "0000:3b:00.0",
    or the numbers (domain, bus, device). A PCI address does not distinguish the MIG instances of a GPU. Raises
    NoSuchDevice.
    """
    if uuid is not None:
        for info in infos:
            if _bare(info.uuid) == _bare(uuid):
                return info
    if pci_id is not None:
        wanted = _pci_numbers(pci_id) if isinstance(pci_id, str) else pci_id
        there = [info for info in infos if wanted is not None and _pci_numbers(info.pci_id) == wanted]
        if len(there) == 1:
            return there[0]
        if there:
            raise NoSuchDevice(
                f"the GPU at {there[0].pci_id} is split into MIG instances; name one by its UUID: {_names(there)}"
            )
    asked = [f"the UUID {uuid}"] * (uuid is not None) + [f"the PCI id {pci_id}"] * (pci_id is not None)
    raise NoSuchDevice(f"no device has {' or '.join(asked) or 'no name at all'}; there are {_names(infos)}")


def _in_cuda_order(infos: Sequence[DeviceInfo], environ: Mapping[str, str]) -> list[DeviceInfo]:
    """The GPUs in CUDA's order when all are visible."""
    gpus = [info for info in infos if info.kind is DeviceKind.GPU]
    if len(gpus) < 2:
        return gpus
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and (gpus[0].name is None or len({gpu.name for gpu in gpus}) > 1):
        raise NoSuchDevice(
            f"the GPUs are not all known to be of one model ({_names(gpus)}), and CUDA's order, "
            "fastest first, is known to CUDA alone; set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name UUIDs in CUDA_VISIBLE_DEVICES"
        )
    places = [(numbers, gpu) for gpu in gpus if (numbers := _pci_numbers(gpu.pci_id)) is not None]
    if len(places) < len(gpus):
        raise NoSuchDevice(
            f"not every GPU reports its PCI id ({_names(gpus)}), so their order in CUDA is not known; "
            "name UUIDs in CUDA_VISIBLE_DEVICES"
        )
    return [gpu for _, gpu in sorted(places, key=lambda place: place[0])]


def _by_index(entries: Sequence[str], infos: Sequence[DeviceInfo], environ: Mapping[str, str]) -> list[DeviceInfo]:
    gpus = _in_cuda_order(infos, environ)
    chosen = []
    for entry in entries:
        number = _index(entry)
        if number is None or number >= len(gpus):
            break
        chosen.append(gpus[number])
    return chosen


def _index(entry: str) -> int | None:
    """The number at the start of an entry; None without one, or if it is too long for any machine."""
    match = _INDEX.match(entry)
    if match is None or len(match[2]) > _MOST_DIGITS:  # Python refuses to parse thousands of digits
        return None
    number = int(match[2])
    return None if match[1] == "-" and number else number


def _by_uuid(entries: Sequence[str], infos: Sequence[DeviceInfo]) -> list[DeviceInfo]:
    chosen = []
    for entry in entries:
        matches = [info for info in infos if info.uuid.startswith(entry)] if entry.startswith(("GPU-", "MIG-")) else []
        if not matches and _INSTANCE_BY_NUMBERS.fullmatch(entry):
            raise NoSuchDevice(
                f"which device {entry} is, only the driver knows; name the MIG instance in CUDA_VISIBLE_DEVICES by its "
                f"own UUID: there are {_names(infos)}"
            )
        if len(matches) != 1:
            break
        chosen += matches
    return chosen


def _with_instances(chosen: Sequence[DeviceInfo], infos: Sequence[DeviceInfo]) -> tuple[DeviceInfo, ...]:
    """The devices, with each partitioned GPU replaced by its MIG instance."""
    visible = []
    for info in chosen:
        instances = [instance for instance in infos if instance.parent_uuid == info.uuid]
        if len(instances) > 1:
            raise NoSuchDevice(
                f"which MIG instances of {_names([info])} CUDA shows depends on the driver; name them in "
                f"CUDA_VISIBLE_DEVICES by their UUIDs: {_names(instances)}"
            )
        visible += instances or [info]
    if len({info.kind for info in visible}) > 1:
        raise NoSuchDevice(
            f"which of {_names(visible)} CUDA shows depends on the driver; name either whole GPUs or MIG instances in "
            "CUDA_VISIBLE_DEVICES, by their UUIDs"
        )
    return tuple(visible)


def _bare(uuid: str) -> str:
    return uuid.casefold().removeprefix("mig-").removeprefix("gpu-")


def _pci_numbers(pci_id: str | None) -> PciNumbers | None:
    match = _PCI_ID.fullmatch(pci_id) if pci_id else None
    return (int(match[1] or "0", 16), int(match[2], 16), int(match[3], 16)) if match else None


def _names(infos: Sequence[DeviceInfo]) -> str:
    """ "0 (GPU-8a6e..., NVIDIA H200), ..." for a message."""
    return ", ".join(f"{info.index} ({info.uuid}{f', {info.name}' if info.name else ''})" for info in infos) or "none"
