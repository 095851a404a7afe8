"""Events of the prefix cache in vLLM's form: its structs decode them, and a consumer of them knows the findable blocks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fakes import World
from kv_event_structs import DECODER, FREE, Cache, ask, block, expected, published
from prefix_fakes import blocks_of
from random_walk import walk

from pagetide.cache.cache_events import CacheEventLog, CacheEvents
from pagetide.fleet import kv_events
from pagetide.fleet.kv_event_format import PublishedBlocks, batch
from pagetide.fleet.kv_events import KvEventPublisher, KvEventsError, check_address


def test_the_sockets_tell_a_request_from_a_wake_up(context: Any) -> None:
    """First: without it the others hang."""
    sockets = kv_events._Sockets(FREE, FREE, None, 8, 8)
    sockets._router.rcvtimeo = 1000  # what has not come is not read
    sockets.wake()
    assert sockets.wait() is None
    dealer = context.socket(sockets._zmq.DEALER)
    dealer.connect(sockets.endpoints[1])
    for bad in ([b""], [b"", b"short"], [b"x", bytes(8)], [bytes(8)], [b"", bytes(8), b""], [b"", bytes(500)]):
        dealer.send_multipart(bad)
        assert sockets.wait() is None, bad
    dealer.send_multipart([b"", b"snapshot"])
    (_, request) = sockets.wait() or (b"", b"none")
    assert request == b"snapshot"
    sockets.close()


def test_vllms_structs_decode_the_events() -> None:
    blocks = PublishedBlocks()
    salted = [block(7, salt=b"tenant"), block(8, 7)]
    changes = CacheEvents([block(1), block(2, 1), block(3, 2, on_host=True), *salted], cleared=True)
    payload = batch(1.5, blocks.apply(changes))
    decoded = DECODER.decode(payload)
    assert (decoded.ts, decoded.data_parallel_rank) == (1.5, 0)
    cleared, chain, on_host, other = decoded.events
    assert type(cleared).__name__ == "AllBlocksCleared"
    assert (chain.block_hashes, chain.parent_block_hash, chain.block_size) == ([1, 2], None, 4)
    assert chain.token_ids == [1, 2, 3, 70_000, 2, 2, 3, 70_000]
    assert (chain.lora_id, chain.medium, chain.lora_name, chain.extra_keys) == (None, "GPU", None, None)
    assert (on_host.block_hashes, on_host.parent_block_hash, on_host.medium) == ([3], 2, "CPU")
    assert (other.block_hashes, other.extra_keys) == ([7, 8], [("tenant",), None])
    moved = CacheEvents([replace(block(3, 2)), replace(block(2, 1))], removed=[block(8).digest, block(99).digest])
    gone, there = DECODER.decode(batch(2.0, blocks.apply(moved))).events[:2]
    assert (gone.block_hashes, gone.medium) == ([8], "GPU") and (there.block_hashes, there.medium) == ([3], "CPU")


@pytest.mark.parametrize("variant", ["elastic-host-ahead-faulty-groups", "fixed-prefixes-alternate-faulty-full"])
def test_a_consumer_of_the_batches_has_the_findable_blocks(variant: str) -> None:
    """Of schedulers' random walks, at every step; and one that begins with a snapshot has them too."""
    blocks, consumer = PublishedBlocks(), Cache()

    def look(world: World) -> None:
        index = world.cache.index
        if index.events is None:
            index.events = CacheEventLog()
            consumer.apply(decoded(blocks.apply(CacheEvents([*index.snapshot().blocks()], cleared=True))))
        consumer.apply(decoded(blocks.apply(index.events.take().events())))
        late = Cache()
        late.apply(decoded(blocks.snapshot()))
        assert consumer.blocks == late.blocks == expected(blocks_of(index))

    def decoded(events: Any) -> list[Any]:
        return DECODER.decode(batch(0.0, events)).events

    walk(0, variant, 80, look=look)


def test_addresses_beyond_this_machine_need_keys() -> None:
    for endpoint in ("tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.1:5557", "tcp://[::]:5557", "tcp://eth0:5557"):
        for both in ((endpoint, FREE), (FREE, endpoint)):
            with pytest.raises(KvEventsError, match="hold the tokens of prompts: give CURVE keys"):
                KvEventPublisher(*both)
        check_address(endpoint, has_keys=True)
    for local in ("tcp://127.0.0.1:1", "tcp://127.9.9.9:1", "tcp://[::1]:1", "tcp://localhost:1", "ipc:///run/x"):
        check_address(local, has_keys=False)
    for bad in ("5557", "udp://127.0.0.1:1", "inproc://x", "tcp:/127.0.0.1:1"):
        with pytest.raises(KvEventsError, match="are published at tcp://ADDRESS:PORT or ipc://FILE"):
            check_address(bad, has_keys=True)


def test_without_pyzmq_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(KvEventsError, match=r"pip install -e '/.*\[ray\]'"):
        KvEventPublisher(FREE, FREE)


def test_lost_changes_make_a_snapshot_necessary(
    publish: Callable[..., KvEventPublisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = publish(begins=False)
    assert publisher.needs_snapshot
    publisher.publish(CacheEvents([block(1)]))  # ignored
    assert publisher.needs_snapshot
    publisher.publish(CacheEvents([block(2)], cleared=True))
    assert not publisher.needs_snapshot
    publisher.publish(CacheEvents(lost=True))
    publisher.publish(CacheEvents([block(3)]))
    assert publisher.needs_snapshot
    publisher.publish(CacheEvents([block(2), block(4)], cleared=True))
    assert not publisher.needs_snapshot
    published(publisher)
    monkeypatch.setattr(kv_events, "MOST_QUEUED_BLOCKS", 10)
    monkeypatch.setattr(publisher._sockets, "wake", lambda: None)  # the thread sleeps
    publisher.publish(CacheEvents([block(n) for n in range(20)]))  # alone: it is taken
    assert not publisher.needs_snapshot and publisher._num_queued == 20
    publisher.publish(CacheEvents([block(30)]))
    assert publisher.needs_snapshot and not publisher._queue
    publisher.publish(CacheEvents([block(5)], cleared=True))
    assert not publisher.needs_snapshot and publisher._num_queued == 1
    monkeypatch.undo()
    published(publisher)
    assert [*publisher._blocks._blocks] == [5]
    publisher.close()
    with pytest.raises(KvEventsError, match="is closed: create a new one"):
        publisher.publish(CacheEvents([block(1)]))


def test_changes_wake_the_thread(publish: Callable[..., KvEventPublisher], monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, sent = publish(begins=False), threading.Event()
    monkeypatch.setattr(publisher, "_send", lambda changes: sent.set())
    publisher.publish(CacheEvents(cleared=True))
    assert sent.wait(20)


def test_nothing_is_there_at_first(context: Any, publish: Callable[..., KvEventPublisher]) -> None:
    publisher = publish(begins=False)
    dealer = context.socket(publisher._sockets._zmq.DEALER)
    dealer.connect(publisher.replay_endpoint)
    assert ask(dealer, b"snapshot") == ask(dealer, bytes(8)) == []
