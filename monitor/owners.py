"""Owners of processes, container, pod, systemd unit and user, and the memory of each owner.

The names come from the path of a process's cgroup, which container runtimes, Kubernetes and systemd build in known ways:

    /system.slice/docker-<id>.scope                 /docker/<id>                      Docker
    /machine.slice/libpod-<id>.scope/container      /lxc.payload.<name>               Podman, LXC
    /kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice/cri-containerd-<id>.scope     Kubernetes
    /user.slice/user-1000.slice/user@1000.service/app.slice/jupyter.service           a user's unit
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ..common.host_memory import CGROUPS
from .snapshot import Device, LeaseUse

IDLE_AFTER_S = 600.0

_CONTAINER = re.compile(
    r"(?!.*conmon-)(?:[a-z-]+-)?([0-9a-f]{64})(?:\.scope)?|.*:(?:cri-containerd|crio|docker):([0-9a-f]{64})"
    r"|lxc\.payload\.(.+)|machine-(.+)\.scope"
)
_POD = re.compile(r".*pod([0-9a-f]{32}|[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})(?:\.slice)?(?::.*)?")
_UNIT = re.compile(r".+\.(?:service|scope|socket|mount|swap)")
_ID_CHARS = 12  # of a container's id, as `docker ps` shows it
# memory.stat: what processes hold, without cached files. Of version 1 "total_" includes the cgroups below.
_CHARGED_V2 = re.compile(r"^(?:anon|shmem) (\d+)$", re.MULTILINE)
_CHARGED_V1 = re.compile(r"^total_(?:rss|shmem) (\d+)$", re.MULTILINE)


class OwnerKind(StrEnum):
    """What owns processes."""

    CONTAINER = "container"
    POD = "pod"
    UNIT = "unit"
    USER = "user"


class NamedCgroup(NamedTuple):
    """The name of an owner, and the path of the cgroup that is its own."""

    name: str
    path: str


@dataclass(slots=True)
class OwnerUse:
    """The memory of an owner's processes on one device. A process counts for its container, its pod, its unit and its user."""

    kind: OwnerKind
    name: str
    num_processes: int = 0
    used_bytes: int = 0  # sum over processes: of host memory, shared pages count for each
    unknown: int = 0  # processes of unknown memory
    idle_bytes: int = 0  # of the used bytes, what was held without use for the asked time
    charged_bytes: int | None = None  # of host memory: what the kernel charges to its cgroups, each page once; None: not read
    paths: set[str] = field(default_factory=set, repr=False)  # of its cgroups: units of two users may have one name


@lru_cache(maxsize=1024)  # the same cgroups recur every second
def owners_in(cgroup: str | None) -> Mapping[OwnerKind, NamedCgroup]:
    """The container, pod and unit that the path of a cgroup names. Of nested ones the innermost counts."""
    found: dict[OwnerKind, NamedCgroup] = {}
    parts = cgroup.split("/") if cgroup else []
    for place, part in enumerate(parts):
        path = "/".join(parts[: place + 1])
        if match := _POD.fullmatch(part):
            found[OwnerKind.POD] = NamedCgroup(match[1].replace("_", "-"), path)
        if match := _CONTAINER.fullmatch(part):
            name = next(group for group in match.groups() if group)
            is_id = match[1] or match[2]
            found[OwnerKind.CONTAINER] = NamedCgroup(name[:_ID_CHARS] if is_id else name, path)
        elif part != "lxc" and place and parts[place - 1] == "lxc":
            found[OwnerKind.CONTAINER] = NamedCgroup(part, path)
        elif _UNIT.fullmatch(part):
            found[OwnerKind.UNIT] = NamedCgroup(part, path)
    return found


def owner_names(cgroup: str | None) -> dict[str, str | None]:
    """The names of the container, pod and unit, for JSON."""
    found = owners_in(cgroup)
    return {kind.value: found[kind].name if kind in found else None for kind in OwnerKind if kind is not OwnerKind.USER}


def owner_text(cgroup: str | None) -> str | None:
    """The owner that a cgroup names, for a column: the container, else the unit, else the pod."""
    found = owners_in(cgroup)
    named = next((found[kind] for kind in (OwnerKind.CONTAINER, OwnerKind.UNIT, OwnerKind.POD) if kind in found), None)
    return None if named is None else named.name


def owner_uses(
    device: Device, leases: Sequence[LeaseUse], others: Sequence[Device] = (), *, idle_after_s: float = IDLE_AFTER_S
) -> list[OwnerUse]:
    """The owners of a device's memory, by kind, the largest first.

    Where the driver names no processes, or hides their memory, leases fill in: their engines' held bytes. `others` are the
    machine's devices, among them the host, which has the names of processes that the driver does not know.
    """
    sums: dict[tuple[OwnerKind, str], OwnerUse] = {}
    for held in _held(device, leases, others):
        for kind, named in held.owners():
            owner = sums.setdefault((kind, named.name), OwnerUse(kind, named.name))
            owner.paths |= {named.path} if named.path else set()
            owner.num_processes += 1
            owner.used_bytes += held.num_bytes or 0
            owner.unknown += held.num_bytes is None
            if held.idle_seconds is not None and held.idle_seconds >= idle_after_s:
                owner.idle_bytes += held.num_bytes or 0
    kinds = list(OwnerKind)
    return sorted(sums.values(), key=lambda owner: (kinds.index(owner.kind), -owner.used_bytes, owner.name))


def charge(owners: Sequence[OwnerUse]) -> None:
    """Read what the kernel charges to the owners' cgroups, as far as this process may."""
    for owner in owners:
        outer = [path for path in owner.paths if not any(path.startswith(f"{other}/") for other in owner.paths)]
        charged = [num_bytes for path in outer if (num_bytes := charged_bytes(path)) is not None]
        owner.charged_bytes = sum(charged) if charged else None


def charged_bytes(path: str, cgroups: Path = CGROUPS) -> int | None:
    """What the kernel charges to a cgroup for what its processes hold, each page once; None if that cannot be read."""
    for root, pattern in ((cgroups, _CHARGED_V2), (cgroups / "memory", _CHARGED_V1)):
        try:
            found = pattern.findall((root / path.lstrip("/") / "memory.stat").read_text())
        except OSError:
            continue
        if found:
            return sum(map(int, found))
    return None


class _Held(NamedTuple):
    """What a process holds of a device."""

    num_bytes: int | None
    user: str | None
    cgroup: str | None
    idle_seconds: float | None = None

    def owners(self) -> Iterator[tuple[OwnerKind, NamedCgroup]]:
        yield from owners_in(self.cgroup).items()
        if self.user is not None:
            yield OwnerKind.USER, NamedCgroup(self.user, "")


def _held(device: Device, leases: Sequence[LeaseUse], others: Sequence[Device]) -> Iterator[_Held]:
    leased: dict[int, int] = {}
    users: dict[int, str] = {}
    for lease in leases:
        if lease.device_uuid == device.info.uuid:
            leased[lease.pid] = leased.get(lease.pid, 0) + lease.held_bytes
            users[lease.pid] = lease.user
    for use in device.detail.reading.processes or ():
        held_bytes = leased.pop(use.pid, None)
        yield _Held(held_bytes if use.used_bytes is None else use.used_bytes, use.user, use.cgroup, use.idle_seconds)
    if leased:
        cgroups = {use.pid: use.cgroup for other in others for use in other.detail.reading.processes or ()}
        for pid, held_bytes in leased.items():
            yield _Held(held_bytes, users[pid], cgroups.get(pid))
