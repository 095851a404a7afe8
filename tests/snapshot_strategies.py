"""Hypothesis strategies for snapshots that hold anything: odd names, unknown and huge numbers."""

from __future__ import annotations

from hypothesis import strategies as st
from snapshots import AT_NS, SECOND_NS

from pagetide.monitor.snapshot import (
    DetailReading,
    Device,
    DeviceDetail,
    DeviceInfo,
    DeviceKind,
    DeviceMemory,
    LeaseUse,
    ProcessUse,
    Snapshot,
)

SHORT_TEXT = st.text(st.characters(), max_size=40)
AMOUNT = st.integers(0, 1 << 62)
BYTES = st.none() | AMOUNT
NUMBER = st.none() | st.floats()
WHEN = st.integers(0, 2 * AT_NS)
PROCESS = st.builds(
    ProcessUse,
    pid=st.integers(0, 1 << 22),
    used_bytes=BYTES,
    kind=SHORT_TEXT,
    user=st.none() | SHORT_TEXT,
    command=st.none() | SHORT_TEXT,
    engine=st.none() | SHORT_TEXT,
)
UUID = st.sampled_from(["GPU-a", "GPU-b", "GPU-c", "MIG-a", "HOST"])
DEVICE = st.builds(
    Device,
    info=st.builds(
        DeviceInfo,
        uuid=UUID,
        index=SHORT_TEXT,
        kind=st.sampled_from(DeviceKind),
        name=st.none() | SHORT_TEXT,
        parent_uuid=st.none() | UUID,
    ),
    memory=st.builds(
        DeviceMemory,
        at_ns=WHEN,
        interval_ns=st.integers(0, 10 * SECOND_NS),
        total_bytes=BYTES,
        free_bytes=BYTES,
        bytes_per_second=NUMBER,
        polls=st.integers(0, 9),
        failures=st.integers(0, 9),
        error=st.none() | SHORT_TEXT,
    ),
    detail=st.builds(
        DeviceDetail,
        at_ns=WHEN,
        interval_ns=st.integers(0, 10 * SECOND_NS),
        reading=st.builds(
            DetailReading,
            utilization=NUMBER,
            temperature_celsius=NUMBER,
            power_watts=NUMBER,
            power_limit_watts=NUMBER,
            processes=st.none() | st.lists(PROCESS, max_size=6).map(tuple),
        ),
        history=st.lists(BYTES, max_size=40).map(tuple),
        error=st.none() | SHORT_TEXT,
    ),
)
LEASE = st.builds(
    LeaseUse,
    engine=SHORT_TEXT,
    pid=st.integers(0, 1 << 22),
    user=SHORT_TEXT,
    device_uuid=UUID,
    min_bytes=AMOUNT,
    max_bytes=BYTES,
    weight=st.floats(0.001, 1000),
    priority=st.integers(-1000, 1000),
    granted_bytes=AMOUNT,
    held_bytes=AMOUNT,
    held_by_class=st.dictionaries(st.sampled_from(["weights", "kv", "other"]) | SHORT_TEXT, AMOUNT, max_size=4),
    free_bytes=AMOUNT,
    asked_bytes=BYTES,
    state=st.sampled_from(["ok", "recalling", "overdue", "reaping"]) | SHORT_TEXT,
    recall_target_bytes=BYTES,
    recall_age_seconds=st.none() | st.floats(0, 1e9),
)
SNAPSHOT = st.builds(
    Snapshot,
    at_ns=st.just(AT_NS),
    source=SHORT_TEXT,
    monitor_pid=st.integers(0, 1 << 22),
    started_ns=WHEN,
    devices=st.lists(DEVICE, max_size=5).map(tuple),
    leases=st.lists(LEASE, max_size=5).map(tuple),
    leases_error=st.none() | SHORT_TEXT,
    silent_ns=st.none() | st.integers(0, 1 << 62),
)
