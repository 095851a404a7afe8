"""Frames and messages: every message there and back, every kind of nonsense refused with a sentence, any pieces."""

from __future__ import annotations

import contextlib
import json
import math
import random
import struct
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagetide.allocator import wire
from pagetide.allocator.errors import InvalidLease, LeaseRefused, MinimumsExceedCapacity, ProtocolViolation

REGISTER = wire.RegisterMessage("chat", "GPU-1", 1 << 30, None, 1.5, -3, 2 << 20, 0)
VIEW = wire.LeaseView(
    1, "chat", 77, "ann", "GPU-1", 0, 5, 1.0, 0, 4, 3, {"weights": 2, "kv": 1}, 1, None, "recalling", 2, 40
)  # fmt: skip
SAMPLES: list[wire.Message] = [
    wire.HelloMessage(1),
    REGISTER,
    wire.AskMessage(5, 100),
    wire.ReportMessage({"kv": 1}, 0),
    wire.UnmappedMessage(7, wire.OrderGeneration(1, 2)),
    wire.LowerMinMessage(4),
    wire.WithdrawMessage(1, wire.OrderGeneration(1, 6)),
    wire.ReleaseMessage(),
    wire.ListLeasesMessage(),
    wire.SetLimitMessage("chat", 5),
    wire.RecallBytesMessage("77", 5),
    wire.ReserveMessage("GPU-1", 9),
    wire.WelcomeMessage(1, 2, 3),
    wire.RegisteredMessage(1, wire.OrderGeneration(2**53, 3), 0),
    wire.GrantMessage(1, wire.OrderGeneration(1, 4), 10),
    wire.RecallMessage(1, wire.OrderGeneration(1, 5), 0, 1000),
    wire.LimitMessage(1, 5, wire.OrderGeneration(1, 7)),
    wire.RefusedMessage("unknown", "no engine 'ä'"),
    VIEW,
    wire.DoneMessage(),
    wire.LimitSetMessage(5, 1),
    wire.RecallingMessage(4, 100),
    wire.ReservedMessage(9),
]


def payload(**content: Any) -> bytes:
    return json.dumps(content).encode()


def test_the_names_on_the_wire_are_those_of_version_2() -> None:
    names = [wire.to_frame(message)[4:].split(b'"')[3].decode() for message in SAMPLES]
    assert sorted(names) == [
        "ask", "done", "grant", "hello", "lease_view", "limit", "limit_set", "list_leases", "lower_min", "recall",
        "recall_bytes", "recalling", "refused", "register", "registered", "release", "report", "reserve", "reserved",
        "set_limit", "unmapped", "welcome", "withdraw",
    ]  # fmt: skip


def test_every_message_is_among_the_samples() -> None:
    assert {type(message) for message in SAMPLES} == {*get_args(wire.FromClient), *get_args(wire.FromBroker)}


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message: wire.Message) -> None:
    frame = wire.to_frame(message)
    assert struct.unpack(">I", frame[:4]) == (len(frame) - 4,)
    assert wire.from_payload(frame[4:]) == message


@given(st.randoms(use_true_random=False))
def test_frames_may_come_in_any_pieces(pieces: random.Random) -> None:
    stream = b"".join(wire.to_frame(message) for message in SAMPLES)
    decoder, found, at = wire.FrameDecoder(), list[wire.Message](), 0
    while at < len(stream):
        size = pieces.choice([1, 2, 3, 7, 100, 1000])
        found += decoder.feed(stream[at : at + size])
        at += size
    assert found == SAMPLES
    assert not decoder.has_part


def test_a_part_of_a_frame_is_noticed() -> None:
    decoder = wire.FrameDecoder()
    assert list(decoder.feed(wire.to_frame(wire.DoneMessage()) + b"\0")) == [wire.DoneMessage()]
    assert decoder.has_part


@pytest.mark.parametrize("length", [wire.MAX_PAYLOAD_BYTES + 1, 1 << 30, 2**32 - 1])
def test_a_length_beyond_the_bound_is_refused_before_a_byte_of_it_came(length: int) -> None:
    decoder = wire.FrameDecoder()
    frames = decoder.feed(wire.to_frame(wire.DoneMessage()) + struct.pack(">I", length))
    assert next(frames) == wire.DoneMessage()
    with pytest.raises(ProtocolViolation, match=f"at most 65,536 bytes, not {length:,}"):
        next(frames)


ASK = {"type": "ask", "target_bytes": 5, "expires_ms": 100}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"{", "no JSON"),
        (b"[" * 60_000, "no JSON"),
        (b'{"type":"ask","target_bytes":NaN,"expires_ms":1}', "NaN is no number"),
        (b'{"type":"ask","target_bytes":' + b"9" * 5000 + b',"expires_ms":1}', "no JSON"),
        (b"[]", "must be a JSON object"),
        (b'"ask"', "must be a JSON object"),
        (payload(target_bytes=1), "the type of a frame must be one of hello, register"),
        (payload(type=["ask"]), "the type of a frame must be one of"),
        (payload(type="asks"), "the type of a frame must be one of"),
        (payload(**ASK, more=1), r"ask has \['more'\] too many and lacks nothing"),
        (payload(type="ask", target_bytes=5), r"lacks \['expires_ms'\]"),
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
        (payload(type="report", held=[], free_bytes=0), "report.held must be an object"),
        (payload(type="report", held={"kv": -1}, free_bytes=0), "report.held.kv must be"),
        (payload(type="report", held={"": 1}, free_bytes=0), "a key of report.held must be"),
        (payload(type="report", held={str(i): 1 for i in range(33)}, free_bytes=0), "at most 8 amounts"),
    ],
    ids=str,
)
def test_nonsense_is_refused_with_a_sentence(content: bytes, sentence: str) -> None:
    with pytest.raises(ProtocolViolation, match=sentence):
        wire.from_payload(content)


def test_a_limit_of_version_1_has_no_generation_and_stays_as_it_was() -> None:
    old = {"type": "limit", "lease_id": 1, "max_bytes": 5}
    assert json.loads(wire.to_frame(wire.LimitMessage(1, 5))[4:]) == old
    assert wire.from_payload(payload(**old)) == wire.LimitMessage(1, 5)
    assert wire.from_payload(payload(**old, generation=[1, 7])) == wire.LimitMessage(1, 5, wire.OrderGeneration(1, 7))
    for wrong in (None, [1], 7):
        with pytest.raises(ProtocolViolation, match=r"limit.generation must be a pair"):
            wire.from_payload(payload(**old, generation=wrong))


def test_a_payload_at_the_bound_is_read_and_one_above_is_not() -> None:
    content = payload(**ASK)
    assert wire.from_payload(content + b" " * (wire.MAX_PAYLOAD_BYTES - len(content))) == wire.AskMessage(5, 100)
    with pytest.raises(ProtocolViolation, match="at most"):
        wire.from_payload(content + b" " * (wire.MAX_PAYLOAD_BYTES - len(content) + 1))


def test_what_the_other_side_would_refuse_is_not_sent() -> None:
    for message in (wire.AskMessage(-1, 1), wire.SetLimitMessage("", 1), wire.HelloMessage(1.5)):  # type: ignore[arg-type]
        with pytest.raises(ProtocolViolation):
            wire.to_frame(message)


@settings(max_examples=120)
@given(st.binary(max_size=200))
def test_bytes_at_random_are_refused_or_understood_exactly(data: bytes) -> None:
    for content in (data, b'{"type":"ask",' + data):
        frame = struct.pack(">I", len(content)) + content
        try:
            message = wire.from_payload(content)
        except ProtocolViolation:
            with pytest.raises(ProtocolViolation):
                list(wire.FrameDecoder().feed(frame))
        else:
            assert_understood(message, content)
            assert list(wire.FrameDecoder().feed(frame)) == [message]
    with contextlib.suppress(ProtocolViolation):  # a length at random; nothing else is raised
        list(wire.FrameDecoder().feed(data))


def assert_understood(message: wire.Message, content: bytes) -> None:
    """`message` says what `content` says, and nothing else."""
    assert json.loads(wire.to_frame(message)[4:]) == json.loads(content.decode())


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=120)
@given(st.sampled_from(SAMPLES), st.data())
def test_one_field_at_random_is_refused_or_understood_exactly(message: wire.Message, data: st.DataObject) -> None:
    content = json.loads(wire.to_frame(message)[4:])
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
