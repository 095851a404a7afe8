"""Owners of processes: the names in cgroups as runtimes make them, and sums of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from snapshots import sample_device, sample_lease

from pagetide.common.units import GIB
from pagetide.monitor import owners
from pagetide.monitor.owners import OwnerKind, charge, owner_text, owner_uses, owners_in
from pagetide.monitor.snapshot import Device, LeaseUse, ProcessUse

HEX = "4f5a9d0c1b2e" + "7" * 52
UID = "1b2c3d4e-5f60-7182-93a4-b5c6d7e8f901"
SLICE = f"kubepods-burstable-pod{UID.replace('-', '_')}.slice"


@pytest.mark.parametrize(
    ("cgroup", "container", "pod", "unit"),
    [
        (None, None, None, None),
        ("/", None, None, None),
        (f"/system.slice/docker-{HEX}.scope", HEX[:12], None, None),
        (f"/docker/{HEX}", HEX[:12], None, None),
        (f"/../../docker/{HEX}/init", HEX[:12], None, None),
        (f"/machine.slice/libpod-{HEX}.scope/container", HEX[:12], None, None),
        (f"/machine.slice/libpod-conmon-{HEX}.scope", None, None, f"libpod-conmon-{HEX}.scope"),
        (f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{HEX}.scope", HEX[:12], None, "user@1000.service"),
        (f"/kubepods.slice/kubepods-burstable.slice/{SLICE}/cri-containerd-{HEX}.scope", HEX[:12], UID, None),
        (f"/kubepods/besteffort/pod{UID}/{HEX}", HEX[:12], UID, None),
        (f"/kubepods/pod{'ab' * 16}/crio-{HEX}", HEX[:12], "ab" * 16, None),
        (f"/system.slice/containerd.service/{SLICE}:cri-containerd:{HEX}", HEX[:12], UID, "containerd.service"),
        (f"/system.slice/docker-{HEX}.scope/system.slice/nginx.service", HEX[:12], None, "nginx.service"),
        ("/lxc.payload.web/init.scope", "web", None, "init.scope"),
        ("/lxc/web", "web", None, None),
        ("/machine.slice/machine-deb12.scope/payload", "deb12", None, None),
        ("/system.slice/vllm.service", None, None, "vllm.service"),
        ("/user.slice/user-1000.slice/session-3.scope", None, None, "session-3.scope"),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/jupyter.service", None, None, "jupyter.service"),
        (f"/{HEX[:-1]}/pods/podcast", None, None, None),
    ],
)
def test_names_in_the_path_of_a_cgroup(cgroup: str | None, container: str | None, pod: str | None, unit: str | None) -> None:
    found = owners_in(cgroup)
    assert {kind: named.name for kind, named in found.items()} == {
        kind: name
        for kind, name in ((OwnerKind.CONTAINER, container), (OwnerKind.POD, pod), (OwnerKind.UNIT, unit))
        if name is not None
    }
    assert all(cgroup is not None and cgroup.startswith(named.path) for named in found.values())
    assert owner_text(cgroup) == (container or unit or pod)


def device(processes: tuple[ProcessUse, ...] | None) -> Device:
    made = sample_device(0)
    return replace(made, detail=replace(made.detail, reading=replace(made.detail.reading, processes=processes)))


def sums(found: Device, *leases: LeaseUse, others: tuple[Device, ...] = ()) -> dict[tuple[str, str], tuple[int, int, int, int]]:
    return {
        (owner.kind.value, owner.name): (owner.num_processes, owner.used_bytes // GIB, owner.unknown, owner.idle_bytes // GIB)
        for owner in owner_uses(found, leases, others, idle_after_s=600)
    }


def test_each_kind_of_owner_is_summed_by_itself() -> None:
    pod = f"/kubepods/pod{UID}"
    uses = (
        ProcessUse(1, 3 * GIB, user="ann", cgroup=f"{pod}/{HEX}", idle_seconds=599.0),
        ProcessUse(2, 4 * GIB, user="bob", cgroup=f"{pod}/{HEX}", idle_seconds=600.0),
        ProcessUse(3, 5 * GIB, user="ann", cgroup=f"{pod}/{HEX[::-1]}"),
        ProcessUse(4, None, user="ann", cgroup="/system.slice/a.service", idle_seconds=1e6),
        ProcessUse(5, 6 * GIB),
    )
    assert sums(device(uses)) == {
        ("container", HEX[:12]): (2, 7, 0, 4),
        ("container", HEX[::-1][:12]): (1, 5, 0, 0),
        ("pod", UID): (3, 12, 0, 4),
        ("unit", "a.service"): (1, 0, 1, 0),
        ("user", "ann"): (3, 8, 1, 0),
        ("user", "bob"): (1, 4, 0, 4),
    }


def test_units_of_one_name_are_charged_together_and_nested_ones_once(monkeypatch: pytest.MonkeyPatch) -> None:
    charges = {"/user-1/nb.service": 5, "/user-2/nb.service": 7, "/user-2/nb.service/nb.service": 6}
    monkeypatch.setattr(owners, "charged_bytes", charges.get)
    uses = [ProcessUse(pid, GIB, cgroup=path) for pid, path in enumerate([*charges, "/gone/nb.service", "/gone/b.service"])]
    found = owner_uses(device(tuple(uses)), ())
    charge(found)
    assert {owner.name: owner.charged_bytes for owner in found} == {"nb.service": 12, "b.service": None}


def test_leases_stand_for_processes_that_the_driver_does_not_name() -> None:
    """The host knows the cgroup of such a process."""
    lease = replace(
        sample_lease("chat", 7, sample_device(0).info.uuid, 40, held=6, weights=1, kv=1, free=0, minimum=1), user="ann"
    )
    host = device((ProcessUse(7, GIB, "host", "ann", cgroup=f"/docker/{HEX}"),))
    expected = {("container", HEX[:12]): (1, 6, 0, 0), ("user", "ann"): (1, 6, 0, 0)}
    assert sums(device(None), lease, others=(host,)) == expected
    assert sums(device((ProcessUse(7, None, user="ann", cgroup=f"/docker/{HEX}"),)), lease) == expected, "memory is hidden"
    elsewhere = replace(lease, device_uuid="another")
    assert sums(device(None), elsewhere, others=(host,)) == {}
    known = ProcessUse(7, 8 * GIB, user="ann")
    assert sums(device((known,)), lease) == {("user", "ann"): (1, 8, 0, 0)}, "the driver's figure goes first"
