"""Frames and messages: every kind as it was recorded, every kind of nonsense refused with a sentence, any pieces."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import struct
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetide.allocator import wire
from pagetide.allocator.errors import InvalidLease, LeaseRefused, MinimumsExceedCapacity, ProtocolViolation
from pagetide.common.frames import frame

# Every kind of frame as a broker and an engine of protocol 5 writes it: recorded between processes of two commits, `withdraw`,
# `refused` and those about reservations written after them. A change that breaks a test of these needs a new protocol version.
RECORDED = [
    '{"type":"hello","protocol":5}',
    (
        '{"type":"register","name":"demo-71","device_uuid":"HOST-1","min_bytes":752374784,"max_bytes":9424291'
        '84,"weight":1.0,"priority":0,"granule_bytes":6553600,"held_bytes":443682816}'
    ),
    '{"type":"report","held":{"weights":31998976,"other":531237888},"free_bytes":0,"kept_bytes":13107200,"num_waiting":3,"reused":true}',
    '{"type":"lower_min","min_bytes":663543808}',
    '{"type":"unmapped","held_bytes":742187008,"generation":[39528,1]}',
    '{"type":"ask","target_bytes":722526208,"expires_ms":1000,"waiting_ms":250,"keep_bytes":735633408}',
    '{"type":"list_leases"}',
    '{"type":"recall_bytes","engine":"demo-71","num_bytes":31457280}',
    '{"type":"set_limit","engine":"demo-71","max_bytes":838860800}',
    (
        '{"type":"reserve","device_uuid":"HOST-1","num_bytes":20971520,"name":"train.py","priority":-1,"duration'
        '_ms":7200000,"wait_ms":60000,"pid":71,"renewed":false}'
    ),
    '{"type":"resize","num_bytes":31457280,"wait_ms":0}',
    '{"type":"end_reservation","reservation_id":7}',
    '{"type":"list_reservations"}',
    '{"type":"release"}',
    '{"type":"welcome","protocol":5,"epoch":39528,"pid":55}',
    '{"type":"registered","lease_id":1,"generation":[39528,1],"granted_bytes":752374784}',
    '{"type":"grant","lease_id":1,"generation":[39528,2],"granted_bytes":722526208}',
    (
        '{"type":"lease_view","lease_id":1,"name":"demo-71","pid":71,"user":"root","device_uuid":"HOST-1","mi'
        'n_bytes":663543808,"max_bytes":942429184,"weight":1.0,"priority":0,"granted_bytes":853598208,"held_b'
        'ytes":794615808,"held":{"weights":31998976,"other":611884032,"kv":150732800},"free_bytes":6553600,"a'
        'sked_bytes":null,"state":"ok","recall_target_bytes":null,"recall_age_ms":null,"kept_bytes":6553600,'
        '"num_waiting":3,"lacking_ms":250}'
    ),
    '{"type":"done"}',
    '{"type":"recall","lease_id":1,"generation":[39528,12],"target_bytes":763158528,"deadline_ms":1000,"spares_requests":true}',
    '{"type":"recalling","target_bytes":763158528,"deadline_ms":1000}',
    '{"type":"limit","lease_id":1,"max_bytes":838860800,"generation":[39528,13]}',
    '{"type":"limit_set","max_bytes":838860800,"over_bytes":0}',
    '{"type":"reserved","num_bytes":20971520,"reservation_id":7,"left_ms":null}',
    '{"type":"queued","reservation_id":7,"reason":"20.00 MiB of host are not free yet"}',
    '{"type":"reservation_ended","reason":"its time is over"}',
    (
        '{"type":"reservation_view","reservation_id":7,"name":"train.py","pid":71,"user":"root","device_uuid":"HOST-1'
        '","held_bytes":20971520,"wanted_bytes":31457280,"priority":-1,"waiting_ms":250,"left_ms":7199000}'
    ),
    '{"type":"withdraw","lease_id":1,"generation":[39528,14]}',
    (
        '{"type":"refused","code":"refused","message":"\'demo-71\' holds 814.28 MiB, and 814.28 MiB is its mini'
        'mum: there is nothing to recall"}'
    ),
]
SAMPLES: list[wire.Message] = [
    *(wire.from_payload(text.encode()) for text in RECORDED),
    wire.RegisteredMessage(1, wire.OrderGeneration(2**53, 3), 0),
    wire.RefusedMessage("unknown", "no engine 'ä'"),
    wire.LeaseView(1, "chat", 77, "ann", "GPU-1", 0, 5, 1.0, 0, 4, 3, {"weights": 2, "kv": 1}, 1, None, "recalling", 2, 40),
]


def payload(**content: Any) -> bytes:
    return json.dumps(content).encode()


def test_there_is_a_recorded_frame_of_every_kind() -> None:
    assert {json.loads(text)["type"] for text in RECORDED} == set(wire._KINDS)
    assert {type(message) for message in SAMPLES} == {*get_args(wire.FromClient), *get_args(wire.FromBroker)}
    assert wire.PROTOCOL == 8


def test_a_recorded_frame_is_read_and_would_be_sent_the_same() -> None:
    for text, message in zip(RECORDED, SAMPLES, strict=False):
        assert wire.to_frame(message) == frame(text.encode())


def test_a_message_comes_out_as_it_went_in() -> None:
    for message in SAMPLES[len(RECORDED) :]:
        assert wire.from_payload(wire.to_frame(message)[8:]) == message


@given(st.lists(st.sampled_from([1, 2, 3, 7, 100, 1000]), min_size=1))
def test_frames_may_come_in_any_pieces(sizes: list[int]) -> None:
    stream = io.BytesIO(b"".join(wire.to_frame(message) for message in SAMPLES))
    decoder, found = wire.message_reader(), list[wire.Message]()
    for size in itertools.cycle(sizes):
        if not (piece := stream.read(size)):
            break
        found += decoder.feed(piece)
    assert found == SAMPLES
    assert not decoder.has_part


def test_a_part_of_a_frame_is_noticed() -> None:
    decoder = wire.message_reader()
    assert list(decoder.feed(wire.to_frame(wire.DoneMessage()) + b"\0")) == [wire.DoneMessage()]
    assert decoder.has_part


@pytest.mark.parametrize("length", [wire.MAX_PAYLOAD_BYTES + 1, 1 << 30, 2**32 - 1])
def test_a_length_beyond_the_bound_is_refused_before_a_byte_of_it_came(length: int) -> None:
    decoder = wire.message_reader()
    frames = decoder.feed(wire.to_frame(wire.DoneMessage()) + struct.pack("<Q", length))
    assert next(frames) == wire.DoneMessage()
    with pytest.raises(ProtocolViolation, match=f"a frame of {length:,} bytes, and 65,536 are the most"):
        next(frames)


ASK = {"type": "ask", "target_bytes": 5, "expires_ms": 100, "waiting_ms": 0, "keep_bytes": 0}
REPORT = {"type": "report", "held": {}, "free_bytes": 0, "kept_bytes": 0, "num_waiting": 0, "reused": True}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"{", "not JSON"),
        (b"[" * 60_000, "not JSON"),
        (b'{"type":"ask","target_bytes":NaN,"expires_ms":1}', "NaN is not a JSON number"),
        (b'{"type":"ask","target_bytes":' + b"9" * 5000 + b',"expires_ms":1}', "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'"ask"', "must be a JSON object"),
        (payload(target_bytes=1), "the type of a frame must be one of hello, register"),
        (payload(type=["ask"]), "the type of a frame must be one of"),
        (payload(type="asks"), "the type of a frame must be one of"),
        (payload(**ASK, more=1), r"ask has \['more'\] too many and lacks nothing"),
        (payload(**ASK | {"type": "report"}), r"lacks \['free_bytes', 'held', 'kept_bytes', 'num_waiting', 'reused'\]"),
        (payload(**ASK | {"target_bytes": -1}), r"ask.target_bytes must be a whole number between 0 and \d+, got -1"),
        (payload(**ASK | {"target_bytes": 2**62 + 1}), "ask.target_bytes must be"),
        (payload(**ASK | {"target_bytes": 1.0}), "ask.target_bytes must be"),
        (payload(**ASK | {"target_bytes": True}), "ask.target_bytes must be"),
        (payload(**ASK | {"target_bytes": "5"}), "ask.target_bytes must be"),
        (payload(**ASK | {"target_bytes": None}), "ask.target_bytes must be"),
        (payload(**ASK | {"expires_ms": 0}), "ask.expires_ms must be"),
        (payload(type="unmapped", held_bytes=1, generation=[1]), "unmapped.generation must be a pair"),
        (payload(type="unmapped", held_bytes=1, generation=[1, -1]), r"unmapped.generation\[1\] must be"),
        (payload(type="set_limit", engine="", max_bytes=1), "set_limit.engine must be a printable text"),
        (payload(type="set_limit", engine="a\nb", max_bytes=1), "set_limit.engine must be a printable text"),
        (payload(type="set_limit", engine="a" * 129, max_bytes=1), "set_limit.engine must be a printable text"),
        (payload(**REPORT | {"held": []}), "report.held must be an object"),
        (payload(**REPORT | {"held": {"kv": -1}}), "report.held.kv must be"),
        (payload(**REPORT | {"held": {"": 1}}), "a key of report.held must be"),
        (payload(**REPORT | {"held": {str(i): 1 for i in range(33)}}), "at most 8 amounts"),
    ],
    ids=str,
)
def test_nonsense_is_refused_with_a_sentence(content: bytes, sentence: str) -> None:
    with pytest.raises(ProtocolViolation, match=sentence):
        wire.from_payload(content)


def test_a_flag_is_true_or_false() -> None:
    with pytest.raises(ProtocolViolation, match=r"recall.spares_requests must be true or false, got 1"):
        wire.from_payload(
            payload(type="recall", lease_id=1, generation=[1, 7], target_bytes=5, deadline_ms=1, spares_requests=1)
        )


def test_a_payload_at_the_bound_is_read_and_one_above_is_not() -> None:
    content = payload(**ASK)
    assert wire.from_payload(content + b" " * (wire.MAX_PAYLOAD_BYTES - len(content))) == wire.AskMessage(5, 100)
    with pytest.raises(ProtocolViolation, match="at most"):
        wire.from_payload(content + b" " * (wire.MAX_PAYLOAD_BYTES - len(content) + 1))


def test_what_the_other_side_would_refuse_is_not_sent() -> None:
    for message in (wire.AskMessage(-1, 1), wire.SetLimitMessage("", 1), wire.HelloMessage(1.5)):  # type: ignore[arg-type]
        with pytest.raises(ProtocolViolation):
            wire.to_frame(message)


@given(st.binary(max_size=200))
def test_bytes_at_random_are_refused_or_understood_exactly(data: bytes) -> None:
    for content in (data, b'{"type":"ask",' + data):
        framed = frame(content)
        try:
            message = wire.from_payload(content)
        except ProtocolViolation:
            with pytest.raises(ProtocolViolation):
                list(wire.message_reader().feed(framed))
        else:
            assert_understood(message, content)
            assert list(wire.message_reader().feed(framed)) == [message]
    with contextlib.suppress(ProtocolViolation):  # a length at random; nothing else is raised
        list(wire.message_reader().feed(data))


def assert_understood(message: wire.Message, content: bytes) -> None:
    """`message` says what `content` says, and nothing else."""
    assert json.loads(wire.to_frame(message)[8:]) == json.loads(content.decode())


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(SAMPLES), st.data())
def test_one_field_at_random_is_refused_or_understood_exactly(message: wire.Message, data: st.DataObject) -> None:
    content = json.loads(wire.to_frame(message)[8:])
    content[data.draw(st.sampled_from(sorted(content)))] = data.draw(values)
    try:
        understood = wire.from_payload(json.dumps(content).encode())
    except ProtocolViolation:
        return
    assert_understood(understood, json.dumps(content).encode())


def test_a_refusal_comes_out_as_the_same_error() -> None:
    for kind in (LeaseRefused, InvalidLease, MinimumsExceedCapacity):
        error = wire.error_of(wire.refusal(kind("1 GiB, not 2 GiB")))
        assert type(error) is kind
        assert str(error) == "1 GiB, not 2 GiB"
    assert type(wire.error_of(wire.RefusedMessage("of a later version", "no"))) is LeaseRefused
    assert len(wire.to_frame(wire.refusal(LeaseRefused("x" * 9000)))) < wire.MAX_PAYLOAD_BYTES


def test_durations_are_rounded_up_and_bounded() -> None:
    assert [wire.milliseconds(s) for s in (1e-9, 0.001, 0.0011, 2, 1e9)] == [1, 1, 2, 2000, 86_400_000]
    for seconds in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match="more than 0 seconds"):
            wire.milliseconds(seconds)
