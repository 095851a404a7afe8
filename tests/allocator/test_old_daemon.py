"""An old daemon and a new engine, or the reverse: every kind of frame as a broker and an engine of protocol 2 wrote it.

The frames were recorded between processes of two commits, `withdraw` and `refused` written after them. A change that
breaks one of these tests needs a new protocol version.
"""

from __future__ import annotations

import json

import pytest

from pagetide.allocator import wire

FROM_CLIENTS = [
    '{"type":"hello","protocol":2}',
    (
        '{"type":"register","name":"demo-71","device_uuid":"HOST-1","min_bytes":752374784,"max_bytes":9424291'
        '84,"weight":1.0,"priority":0,"granule_bytes":6553600,"held_bytes":443682816}'
    ),
    '{"type":"report","held":{"weights":31998976,"other":531237888},"free_bytes":0}',
    '{"type":"lower_min","min_bytes":663543808}',
    '{"type":"unmapped","held_bytes":742187008,"generation":[39528,1]}',
    '{"type":"ask","target_bytes":722526208,"expires_ms":1000}',
    '{"type":"list_leases"}',
    '{"type":"recall_bytes","engine":"demo-71","num_bytes":31457280}',
    '{"type":"set_limit","engine":"demo-71","max_bytes":838860800}',
    '{"type":"reserve","device_uuid":"HOST-1","num_bytes":20971520}',
    '{"type":"release"}',
]
FROM_BROKERS = [
    '{"type":"welcome","protocol":2,"epoch":39528,"pid":55}',
    '{"type":"registered","lease_id":1,"generation":[39528,1],"granted_bytes":752374784}',
    '{"type":"grant","lease_id":1,"generation":[39528,2],"granted_bytes":722526208}',
    (
        '{"type":"lease_view","lease_id":1,"name":"demo-71","pid":71,"user":"root","device_uuid":"HOST-1","mi'
        'n_bytes":663543808,"max_bytes":942429184,"weight":1.0,"priority":0,"granted_bytes":853598208,"held_b'
        'ytes":794615808,"held":{"weights":31998976,"other":611884032,"kv":150732800},"free_bytes":6553600,"a'
        'sked_bytes":null,"state":"ok","recall_target_bytes":null,"recall_age_ms":null}'
    ),
    '{"type":"done"}',
    '{"type":"recall","lease_id":1,"generation":[39528,12],"target_bytes":763158528,"deadline_ms":1000}',
    '{"type":"recalling","target_bytes":763158528,"deadline_ms":1000}',
    '{"type":"limit","lease_id":1,"max_bytes":838860800,"generation":[39528,13]}',
    '{"type":"limit_set","max_bytes":838860800,"over_bytes":0}',
    '{"type":"reserved","num_bytes":20971520}',
    '{"type":"withdraw","lease_id":1,"generation":[39528,14]}',
    (
        '{"type":"refused","code":"refused","message":"\'demo-71\' holds 814.28 MiB, and 814.28 MiB is its mini'
        'mum: there is nothing to recall"}'
    ),
]


@pytest.mark.parametrize("payload", FROM_CLIENTS + FROM_BROKERS, ids=lambda payload: json.loads(payload)["type"])
def test_a_recorded_frame_is_read_and_would_be_sent_the_same(payload: str) -> None:
    message = wire.from_payload(payload.encode())
    assert wire.to_frame(message)[4:] == payload.encode()


def test_there_is_a_frame_of_every_kind() -> None:
    recorded = {json.loads(payload)["type"] for payload in FROM_CLIENTS + FROM_BROKERS}
    assert recorded == set(wire._KINDS)
    assert wire.PROTOCOL == 2
