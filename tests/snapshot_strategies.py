"""Hypothesis strategies for snapshots that hold anything: odd names, unknown and huge numbers."""

from __future__ import annotations

from hypothesis import strategies as st
from snapshots import AT_NS, SECOND_NS

from pagetide.monitor import snapshot

TEXT = st.text(st.characters(), max_size=40)
NAME = st.none() | TEXT
AMOUNT = st.integers(0, 1 << 62)
BYTES = st.none() | AMOUNT
NUMBER = st.none() | st.floats()
WHEN = st.integers(0, 2 * AT_NS)
INTERVAL = st.integers(0, 10 * SECOND_NS)
COUNT, PID = st.integers(0, 9), st.integers(0, 1 << 22)
UUID = st.sampled_from(["GPU-a", "GPU-b", "GPU-c", "MIG-a", "HOST"])
PROCESS = st.builds(snapshot.ProcessUse, PID, BYTES, kind=TEXT, user=NAME, command=NAME, engine=NAME)
PROCESSES = st.none() | st.lists(PROCESS, max_size=6).map(tuple)
READING = st.builds(snapshot.DetailReading, NUMBER, NUMBER, NUMBER, NUMBER, PROCESSES)
INFO = st.builds(snapshot.DeviceInfo, UUID, TEXT, st.sampled_from(snapshot.DeviceKind), name=NAME, parent_uuid=st.none() | UUID)
MEMORY = st.builds(snapshot.DeviceMemory, WHEN, INTERVAL, BYTES, BYTES, NUMBER, polls=COUNT, failures=COUNT, error=NAME)
DETAIL = st.builds(snapshot.DeviceDetail, WHEN, INTERVAL, READING, history=st.lists(BYTES, max_size=40).map(tuple), error=NAME)
DEVICE = st.builds(snapshot.Device, INFO, MEMORY, DETAIL)
LEASE = st.builds(
    snapshot.LeaseUse, engine=TEXT, pid=PID, user=TEXT, device_uuid=UUID, min_bytes=AMOUNT, max_bytes=BYTES,
    weight=st.floats(0.001, 1000), priority=st.integers(-1000, 1000), granted_bytes=AMOUNT, held_bytes=AMOUNT,
    held_by_class=st.dictionaries(st.sampled_from(["weights", "kv", "other"]) | TEXT, AMOUNT, max_size=4),
    spare_bytes=AMOUNT, asked_bytes=BYTES, state=st.sampled_from(["ok", "loading", "recalling", "overdue", "reaping"]) | TEXT,
    recall_target_bytes=BYTES, recall_age_seconds=st.none() | st.floats(0, 1e9),
)  # fmt: skip
RESERVATION = st.builds(
    snapshot.ReservationUse, id=COUNT, name=TEXT, pid=PID, user=TEXT, device_uuid=UUID, state=TEXT, held_bytes=AMOUNT,
    wanted_bytes=AMOUNT, priority=st.integers(-1000, 1000), place=st.none() | COUNT,
    waiting_seconds=st.none() | st.floats(0, 1e9), left_seconds=st.none() | st.floats(0, 1e9),
)  # fmt: skip
SNAPSHOT = st.builds(
    snapshot.Snapshot, at_ns=st.just(AT_NS), source=TEXT, monitor_pid=PID, started_ns=WHEN,
    devices=st.lists(DEVICE, max_size=5).map(tuple), leases=st.lists(LEASE, max_size=5).map(tuple),
    leases_error=NAME, silent_ns=BYTES, reservations=st.lists(RESERVATION, max_size=5).map(tuple),
)  # fmt: skip
