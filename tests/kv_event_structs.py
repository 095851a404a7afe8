"""What reads events of the prefix cache: vLLM's structs, what a consumer knows, and a subscriber like vLLM's example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from pagetide.cache.cache_events import CacheEvents, StoredBlock
from pagetide.fleet.kv_events import KvEventPublisher

FREE = "tcp://127.0.0.1:*"
PATIENCE_MS = 60_000
NO_ZMQ = "pyzmq is not installed: pip install pagetide[ray]"


# ---- the structs of vLLM's vllm/distributed/kv_events.py, field by field


def batch_of(events: Any) -> msgspec.msgpack.Decoder[Any]:
    fields = [("ts", float), ("events", list[events]), ("data_parallel_rank", int | None, None)]
    return msgspec.msgpack.Decoder(msgspec.defstruct("KVEventBatch", fields, array_like=True, omit_defaults=True))


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Of vLLM 0.26: each event is a map."""


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


DECODER = batch_of(BlockStored | BlockRemoved | AllBlocksCleared)


class Cache:
    """What a consumer of batches knows: it looks at nothing but hashes and media."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[str, int | None, tuple[int, ...]]] = {}  # medium, parent and tokens

    def apply(self, events: list[Any]) -> None:
        for event in events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.blocks.clear()
            elif kind == "BlockRemoved":
                for digest in event.block_hashes:
                    assert self.blocks.pop(digest)[0] == event.medium, "it lay elsewhere"
            else:
                size, parent = event.block_size, event.parent_block_hash
                assert len(event.token_ids) == size * len(event.block_hashes)
                for at, digest in enumerate(event.block_hashes):
                    assert parent is None or parent in self.blocks, "a block before its parent"
                    assert digest not in self.blocks, "stored twice"
                    self.blocks[digest] = event.medium, parent, tuple(event.token_ids[at * size : (at + 1) * size])
                    parent = digest


def expected(blocks: dict[int, StoredBlock]) -> dict[int, Any]:
    return {
        digest >> 64: ("CPU" if one.on_host else "GPU", None if one.parent is None else one.parent >> 64, one.tokens)
        for digest, one in blocks.items()
    }


def block(digest: int, parent: int | None = None, on_host: bool = False, **more: Any) -> StoredBlock:
    """A block with a digest that has this number as its first word."""
    tokens = (digest & 0xFFFF, 2, 3, 70_000)
    return StoredBlock(digest << 64 | 5, None if parent is None else parent << 64 | 5, tokens, on_host, **more)


def ask(dealer: Any, request: bytes) -> list[tuple[bytes, bytes]]:
    """The messages of an answer up to its end."""
    dealer.send_multipart([b"", request])
    answers = []
    while dealer.poll(PATIENCE_MS):
        empty, number, payload = dealer.recv_multipart()
        assert empty == b""
        if not payload:
            assert number == b"\xff" * 8
            return answers
        answers.append((number, payload))
    raise AssertionError("the answer has no end")


def published(publisher: KvEventPublisher) -> int:
    """The number of the last published batch, once all changes are published."""
    import zmq

    while publisher._queue:
        publisher._sockets.wake()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(publisher.replay_endpoint)
        ((number, _),) = ask(dealer, b"snapshot")
        return int.from_bytes(number, "big")


@pytest.fixture
def context() -> Iterator[Any]:
    zmq = pytest.importorskip("zmq", reason=NO_ZMQ)
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def publish() -> Iterator[Callable[..., KvEventPublisher]]:
    pytest.importorskip("zmq", reason=NO_ZMQ)
    made: list[KvEventPublisher] = []

    def make(begins: bool = True, **options: Any) -> KvEventPublisher:
        made.append(KvEventPublisher(FREE, FREE, **options))
        if begins:
            made[-1].publish(CacheEvents(cleared=True))
        return made[-1]

    yield make
    for one in made:
        one.close()
