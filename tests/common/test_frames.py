"""Frames of messages over a byte stream, cut anywhere."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetide.common.frames import BadFrame, ChannelClosed, FrameReader, PickleChannel, frame

MESSAGES = [{"tide": (1, 2.5, None)}, "", b"\x00" * 300, [ValueError("planted")]]


@given(st.lists(st.integers(1, 40), max_size=30))
def test_messages_survive_any_cut(cuts: list[int]) -> None:
    data = b"".join(frame(pickle.dumps(message)) for message in MESSAGES)
    reader, found = FrameReader(pickle.loads), list[Any]()
    for size in cuts:
        found += reader.feed(data[:size])
        data = data[size:]
    found += reader.feed(data)
    assert found[:3] == MESSAGES[:3] and repr(found[3]) == repr(MESSAGES[3])


def test_other_bytes_are_refused() -> None:
    for data, said in (
        (struct.pack("<Q", 2**63), "a frame of 9,223,372,036,854,775,808 bytes"),
        (b"Compiling... done\n", "Compiling... done"),
        (frame(b"abc"), "UnpicklingError"),
        (frame(b"csys\nno_such_thing\n."), "AttributeError"),
    ):
        with pytest.raises(BadFrame, match=said):
            list(FrameReader(pickle.loads).feed(data))


def test_messages_before_other_bytes_are_received() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(frame(pickle.dumps(1)) + frame(pickle.dumps(2)) + b"Compiling... done\n")
        channel = PickleChannel(ours)
        assert [channel.receive(), channel.receive()] == [1, 2]
        assert channel.poll()
        for act in (channel.receive, channel.received):
            with pytest.raises(BadFrame, match="Compiling"):
                act()


def test_a_channel_carries_what_is_larger_than_its_buffers_from_several_threads() -> None:
    ours, theirs = map(PickleChannel, socket.socketpair())
    large = [bytes([i]) * 3_000_000 for i in range(4)]
    threads = [threading.Thread(target=ours.send, args=(message,)) for message in large]
    for thread in threads:
        thread.start()
    assert sorted(theirs.receive() for _ in large) == large
    for thread in threads:
        thread.join()
    with pytest.raises(TimeoutError):
        theirs.receive(0.0)
    assert not theirs.poll()
    ours.send(1)
    ours.send(2)
    assert theirs.poll(60) and theirs.receive(60) == 1
    assert theirs.poll() and theirs.receive() == 2
    ours.send(3)
    ours.close()
    assert theirs.received() == [3]
    for act in (theirs.receive, theirs.received, lambda: theirs.send("to nobody")):
        with pytest.raises(ChannelClosed):
            act()
    theirs.close()
