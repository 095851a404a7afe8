"""Snapshots with leases: whose processes they name, and what becomes of them as plain data."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from snapshots import dead, host_device, sample_device, sample_lease, sample_leases, sample_snapshot, snapshot_of

from pagetide.monitor.snapshot import Device, LeaseUse
from pagetide.monitor.units import GIB


def engines(device: Device) -> dict[int, str | None]:
    return {use.pid: use.engine for use in device.detail.reading.processes or ()}


def lease_on(device: Device, pid: int, engine: str) -> LeaseUse:
    return sample_lease(engine, pid, device.info.uuid, 8, held=8)


def test_processes_get_the_names_of_the_leases_on_their_device() -> None:
    gpu, other, host = sample_device(0), sample_device(1), host_device()
    assert (engines(gpu)[41877], engines(host)[41877]) == (None, None)
    leases = [lease_on(gpu, 41877, "tide"), lease_on(other, 40988, "new-name"), lease_on(gpu, 999_999, "elsewhere")]
    snapshot = snapshot_of(gpu, other, host).with_leases(leases)
    assert snapshot.leases == tuple(leases)
    named, renamed, untouched = snapshot.devices
    assert engines(named) == engines(gpu) | {41877: "tide"}
    assert engines(renamed) == engines(other) | {40988: "new-name"}
    assert untouched == host


def test_all_else_stays_as_it_was() -> None:
    gpu = sample_device(0)
    before = snapshot_of(gpu, dead(sample_device(1)))
    after = before.with_leases([lease_on(gpu, 41877, "tide")])
    assert replace(after, devices=before.devices, leases=()) == before
    assert after.devices[0].memory == gpu.memory
    assert after.devices[1] == before.devices[1]  # of which nothing is told about processes


def test_without_leases_it_is_the_same_and_newer_leases_replace_older_ones() -> None:
    snapshot = sample_snapshot(2)
    assert snapshot.with_leases([]) == snapshot
    assert snapshot.with_leases(sample_leases()).with_leases(sample_leases(1)).leases == sample_leases(1)


def test_leases_are_plain_data_that_json_keeps() -> None:
    (recalled, _) = leases = sample_leases(1)
    told = sample_snapshot(1).with_leases(leases).to_dict()["leases"]
    assert json.loads(json.dumps(told)) == told
    assert told[0] == {
        "engine": "embed-small",
        "pid": 43210,
        "user": "ada",
        "device_uuid": recalled.device_uuid,
        "min_bytes": 4 * GIB,
        "max_bytes": 32 * GIB,
        "weight": 1.0,
        "priority": 0,
        "granted_bytes": 24 * GIB,
        "held_bytes": 18 * GIB,
        "held_by_class": dict(recalled.held_by_class),
        "free_bytes": int(11.5 * GIB),
        "asked_bytes": None,
        "state": "recalling",
        "recall_target_bytes": int(8.5 * GIB),
        "recall_age_seconds": 0.34,
    }
    assert [LeaseUse(**lease) for lease in told] == list(leases)
    assert sample_snapshot(1).to_dict()["leases"] == []


def parts(held_bytes: int, **reported: int) -> dict[str, int]:
    return replace(sample_leases(1)[0], held_bytes=held_bytes, held_by_class=reported).held_parts()


def test_what_is_held_is_divided_by_the_report() -> None:
    assert parts(10, weights=4, kv=3, other=3) == {"weights": 4, "kv": 3, "other": 3}
    assert parts(10, weights=4, kv=3, graphs=2, other=1) == {"weights": 4, "kv": 3, "other": 3}
    assert parts(10) == {"weights": 0, "kv": 0, "other": 10}  # nothing is reported yet
    assert parts(12, weights=4, kv=3, other=3) == {"weights": 4, "kv": 3, "other": 5}  # more than at the last report
    assert parts(5, weights=4, kv=3, other=3) == {"weights": 4, "kv": 1, "other": 0}  # less


@given(st.integers(0, 1 << 62), st.dictionaries(st.sampled_from(["weights", "kv", "other"]), st.integers(0, 1 << 62)))
def test_the_parts_are_always_the_whole(held_bytes: int, reported: dict[str, int]) -> None:
    divided = parts(held_bytes, **reported)
    assert sum(divided.values()) == held_bytes
    assert min(divided.values()) >= 0
