"""The JSON for scripts: its keys, and that it is JSON whatever was measured."""

from __future__ import annotations

import json
from dataclasses import replace

from snapshots import H200_BYTES, dead, sample_device, sample_leases, sample_snapshot, snapshot_of

from pagetide.monitor.snapshot import ProcessUse
from pagetide.monitor.units import GIB
from pagetide.monitor.view.as_json import to_json


def test_it_has_the_keys_that_are_promised() -> None:
    told = json.loads(to_json(sample_snapshot(1)))
    assert list(told) == ["time", "source", "monitor_pid", "devices", "leases", "leases_error"]
    assert (told["source"], told["monitor_pid"]) == ("nvml+host", 4242)
    device = told["devices"][0]
    assert list(device) == [
        "uuid", "index", "kind", "name", "pci_id", "parent_uuid", "memory",
        "utilization", "temperature_celsius", "power_watts", "power_limit_watts", "processes", "detail_error",
    ]  # fmt: skip
    assert list(device["memory"]) == [
        "total_bytes", "used_bytes", "free_bytes", "bytes_per_second", "seconds_until_exhaustion",
        "age_seconds", "stale", "polls", "failures", "error",
    ]  # fmt: skip
    assert list(device["processes"][0]) == ["pid", "used_bytes", "kind", "user", "command", "engine"]
    assert (device["index"], device["kind"], device["memory"]["total_bytes"]) == ("0", "gpu", H200_BYTES)


def test_the_time_is_that_of_the_snapshot() -> None:
    assert json.loads(to_json(replace(sample_snapshot(1), unix_seconds=1_795_000_000.25)))["time"] == 1_795_000_000.25
    assert json.loads(to_json(sample_snapshot(1)))["time"] is None


def test_leases_have_the_keys_that_are_promised() -> None:
    growing, recalled = json.loads(to_json(snapshot_of().with_leases(sample_leases(1)[::-1])))["leases"]
    assert list(growing) == [
        "engine", "pid", "user", "device_uuid", "min_bytes", "max_bytes", "weight", "priority", "granted_bytes",
        "held_bytes", "held_by_class", "free_bytes", "asked_bytes", "state", "recall_target_bytes", "recall_age_seconds",
    ]  # fmt: skip
    assert (growing["engine"], growing["max_bytes"], growing["asked_bytes"]) == ("llama-8b", None, 96 * GIB)
    assert (growing["state"], growing["recall_target_bytes"], growing["recall_age_seconds"]) == ("ok", None, None)
    assert (recalled["state"], recalled["recall_age_seconds"]) == ("recalling", 0.34)
    assert set(recalled["held_by_class"]) == {"weights", "kv", "other"}
    assert sum(recalled["held_by_class"].values()) == recalled["held_bytes"] == 18 * GIB
    assert json.loads(to_json(sample_snapshot(1)))["leases"] == []


def test_leases_that_are_not_known_are_null_and_not_none() -> None:
    told = json.loads(to_json(replace(sample_snapshot(1), leases_error="the broker did not answer")))
    assert (told["leases"], told["leases_error"]) == (None, "the broker did not answer")
    assert json.loads(to_json(sample_snapshot(1)))["leases_error"] is None
    known = replace(sample_snapshot(1), leases_error="the broker did not answer").with_leases([])
    assert json.loads(to_json(known))["leases"] == []


def test_it_is_one_line_unless_it_is_to_be_read() -> None:
    snapshot = sample_snapshot(2)
    assert "\n" not in to_json(snapshot)
    assert json.loads(to_json(snapshot, indent=1)) == json.loads(to_json(snapshot))


def test_what_is_not_known_is_null() -> None:
    device = json.loads(to_json(snapshot_of(dead(sample_device(0)))))["devices"][0]
    assert device["memory"]["used_bytes"] is device["memory"]["bytes_per_second"] is device["processes"] is None
    assert device["memory"]["error"] == device["detail_error"] == "GPU is lost"


def test_numbers_and_text_that_json_does_not_have_are_not_written() -> None:
    device = sample_device(0, bytes_per_second=5e-324)  # a trend that died away
    assert device.memory.seconds_until_exhaustion == float("inf")
    process = ProcessUse(1, None, command="train \udcff\x1b[0m\u202e.py")
    device = replace(
        device, detail=replace(device.detail, reading=replace(device.detail.reading, processes=(process,)))
    )
    text = to_json(snapshot_of(device))
    assert text.isascii() and text.isprintable()
    told = json.loads(text)["devices"][0]
    assert told["memory"]["seconds_until_exhaustion"] is None
    assert told["processes"][0]["command"] == "train ?\x1b[0m\u202e.py"
    lease = replace(sample_leases(1)[0], engine="\udcff", held_by_class={"kv\udcff": 1})
    (told,) = json.loads(to_json(snapshot_of().with_leases([lease])))["leases"]
    assert (told["engine"], told["held_by_class"]) == ("?", {"kv?": 1})
