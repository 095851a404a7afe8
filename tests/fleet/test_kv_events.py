"""Events of the prefix cache over ZeroMQ, read over real sockets by a subscriber like vLLM's example, with vLLM's structs."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from fakes import World
from families import tiny
from prefix_fakes import EventCopy, blocks_of
from random_walk import walk

from pagetide import AsyncLLM, SamplingParams
from pagetide.cache.cache_events import CacheEventLog, CacheEvents, StoredBlock
from pagetide.fleet import kv_events
from pagetide.fleet.kv_event_format import PublishedBlocks, batch
from pagetide.fleet.kv_events import CurveKeys, KvEventPublisher, KvEventsError, endpoint_of_rank, publish_changes

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: pip install pagetide[ray]")
from zmq.auth import create_certificates, load_certificate  # noqa: E402
from zmq.utils.monitor import recv_monitor_message  # noqa: E402

FREE = "tcp://127.0.0.1:*"
PATIENCE_MS = 20_000


# ---- the structs of vLLM's vllm/distributed/kv_events.py, field by field ----------------------------------------------


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


def as_array(kind: Any, num_fields: int) -> Any:
    """The struct of vLLM before 0.24, when each event was an array of its tag and fewer fields."""
    kept = msgspec.structs.fields(kind)[:num_fields]
    fields = [(one.name, one.type) if one.required else (one.name, one.type, one.default) for one in kept]
    return msgspec.defstruct(kind.__name__, fields, array_like=True, omit_defaults=True, tag=kind.__name__)


DECODERS = {
    "map": batch_of(BlockStored | BlockRemoved | AllBlocksCleared),
    "array": batch_of(as_array(BlockStored, 8) | as_array(BlockRemoved, 2) | as_array(AllBlocksCleared, 0)),
}


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


class Subscriber:
    """Follows a publisher by vLLM's protocol: a gap in the sequence numbers is filled by the replay socket."""

    def __init__(self, publisher: KvEventPublisher, context: Any, **curve: bytes) -> None:
        self.cache = Cache()
        self.last = -1
        self.ranks: set[int | None] = set()
        self.num_replayed = 0
        self.sub, self.dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for one, endpoint in ((self.sub, publisher.endpoint), (self.dealer, publisher.replay_endpoint)):
            one.linger = 0
            for name, key in curve.items():
                setattr(one, f"curve_{name}", key)
            one.connect(endpoint)
        self.sub.subscribe(b"")

    def join(self, publisher: KvEventPublisher) -> None:
        """Wait until the publisher knows of the subscription: batches that come before are missed."""
        for n in range(2000):
            publisher.publish(CacheEvents([block(1 << 40 | n)]))
            if self.sub.poll(10):
                return
        raise AssertionError("no batch came")

    def read(self, upto: int) -> None:
        """Follow until the batch numbered `upto`."""
        while self.last < upto:
            assert self.sub.poll(PATIENCE_MS), f"nothing comes after {self.last}"
            topic, number, payload = self.sub.recv_multipart()
            assert topic == b""
            if int.from_bytes(number, "big") > self.last + 1:
                self.replay()
            self.take(number, payload)

    def take(self, number: bytes, payload: bytes) -> None:
        if int.from_bytes(number, "big") > self.last:
            decoded = DECODERS["map"].decode(payload)
            self.last = int.from_bytes(number, "big")
            self.ranks.add(decoded.data_parallel_rank)
            self.cache.apply(decoded.events)

    def replay(self, request: bytes | None = None) -> list[tuple[int, Any]]:
        """Ask for what is missing, and apply it. Returns the numbers and batches of the answer."""
        answers = ask(self.dealer, (self.last + 1).to_bytes(8, "big") if request is None else request)
        for number, payload in answers:
            self.take(number, payload)
            self.num_replayed += 1
        return [(int.from_bytes(number, "big"), DECODERS["map"].decode(payload)) for number, payload in answers]


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


def block(digest: int, parent: int | None = None, on_host: bool = False, **more: Any) -> StoredBlock:
    """A block with a digest that has this number as its first word."""
    tokens = (digest & 0xFFFF, 2, 3, 70_000)
    return StoredBlock(digest << 64 | 5, None if parent is None else parent << 64 | 5, tokens, on_host, **more)


def published(publisher: KvEventPublisher) -> int:
    """The number of the last published batch, once all changes are published."""
    while publisher._queue:
        publisher._sockets.wake()
    return int.from_bytes(ask_for_end(publisher), "big")


def ask_for_end(publisher: KvEventPublisher) -> bytes:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(publisher.replay_endpoint)
        ((number, _),) = ask(dealer, b"snapshot")
        return number


@pytest.fixture
def context() -> Iterator[Any]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def publish() -> Iterator[Callable[..., KvEventPublisher]]:
    made: list[KvEventPublisher] = []

    def make(**options: Any) -> KvEventPublisher:
        options.setdefault("rank", 3)
        made.append(KvEventPublisher(FREE, FREE, **options))
        made[-1].publish(CacheEvents(cleared=True))
        return made[-1]

    yield make
    for one in made:
        one.close()


# ---- the form -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["map", "array"])
def test_vllms_structs_decode_the_events(form: Any) -> None:
    blocks = PublishedBlocks()
    salted = [block(7, salt=b"tenant"), block(8, 7)]
    changes = CacheEvents([block(1), block(2, 1), block(3, 2, on_host=True), *salted], cleared=True)
    payload = msgspec.msgpack.encode(batch(1.5, blocks.apply(changes), 3, form))
    decoded = DECODERS[form].decode(payload)
    assert (decoded.ts, decoded.data_parallel_rank) == (1.5, 3)
    cleared, chain, on_host, other = decoded.events
    assert type(cleared).__name__ == "AllBlocksCleared"
    assert (chain.block_hashes, chain.parent_block_hash, chain.block_size) == ([1, 2], None, 4)
    assert chain.token_ids == [1, 2, 3, 70_000, 2, 2, 3, 70_000]
    assert (chain.lora_id, chain.medium, chain.lora_name, chain.extra_keys) == (None, "GPU", None, None)
    assert (on_host.block_hashes, on_host.parent_block_hash, on_host.medium) == ([3], 2, "CPU")
    assert (other.block_hashes, other.extra_keys) == ([7, 8], [("tenant",), None])
    moved = CacheEvents([replace(block(3, 2)), replace(block(2, 1))], removed=[block(8).digest, block(99).digest])
    gone, there = DECODERS[form].decode(msgspec.msgpack.encode(batch(2.0, blocks.apply(moved), 3, form))).events[:2]
    assert (gone.block_hashes, gone.medium) == ([8], "GPU") and (there.block_hashes, there.medium) == ([3], "CPU")


def test_the_exact_messages(context: Any, publish: Callable[..., KvEventPublisher]) -> None:
    publisher = publish(topic="kv-events", clock=lambda: 12.5)
    sub = context.socket(zmq.SUB)
    sub.connect(publisher.endpoint)
    sub.subscribe(b"kv-events")
    for n in range(2000):
        publisher.publish(CacheEvents([block(100 + n)]))
        if sub.poll(10):
            break
    topic, number, payload = sub.recv_multipart()
    hashes = [99 + int.from_bytes(number, "big")]  # the first batch cleared
    stored = {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": [*hashes, 2, 3, 70_000],
        "block_size": 4, "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    assert topic == b"kv-events" and len(number) == 8
    assert msgspec.msgpack.decode(payload) == [12.5, [stored], 3]


@pytest.mark.parametrize("variant", ["elastic-host-ahead-faulty-groups", "fixed-prefixes-alternate-faulty-full"])
def test_a_consumer_of_the_batches_has_the_findable_blocks(variant: str) -> None:
    """Of schedulers' random walks, at every step; and one that begins with a snapshot has them too."""
    for seed in range(2):
        blocks, consumer = PublishedBlocks(), Cache()

        def look(world: World, blocks: PublishedBlocks = blocks, consumer: Cache = consumer) -> None:
            index = world.cache.index
            if index.events is None:
                index.events = CacheEventLog()
                consumer.apply(decoded(blocks.apply(CacheEvents([*index.snapshot().blocks()], cleared=True))))
            consumer.apply(decoded(blocks.apply(index.events.take().events())))
            late = Cache()
            late.apply(decoded(blocks.snapshot()))
            assert consumer.blocks == late.blocks == expected(blocks_of(index))

        def decoded(events: Any) -> list[Any]:
            return DECODERS["map"].decode(msgspec.msgpack.encode(batch(0.0, events, None, "map"))).events

        walk(seed, variant, 120, look=look)


# ---- sockets ------------------------------------------------------------------------------------------------------------


def test_a_subscriber_follows_and_fills_its_gaps(context: Any, publish: Callable[..., KvEventPublisher]) -> None:
    publisher = publish()
    subscriber = Subscriber(publisher, context)
    subscriber.join(publisher)
    publisher.publish(CacheEvents([block(1), block(2, 1), block(3, 2)]))
    last = published(publisher)
    subscriber.read(last)  # what came before it joined is replayed
    assert subscriber.num_replayed >= 1 and subscriber.ranks == {3}
    state = subscriber.cache.blocks
    assert [state[n][:2] for n in (1, 2, 3)] == [("GPU", None), ("GPU", 1), ("GPU", 2)]
    for n in range(4, 20):
        publisher.publish(CacheEvents([block(n, n - 1)], removed=[block(n + 1000).digest]))
    for _ in range(5):  # the subscriber loses these
        assert subscriber.sub.poll(PATIENCE_MS) and subscriber.sub.recv_multipart()
    subscriber.num_replayed = 0
    subscriber.read(last + 16)
    assert subscriber.num_replayed >= 6 and {*range(1, 20)} <= subscriber.cache.blocks.keys()
    publisher.publish(CacheEvents([block(30)], cleared=True))
    subscriber.read(last + 17)
    assert subscriber.cache.blocks.keys() == {30}
    publisher.publish(CacheEvents([block(30)], removed=[block(31).digest]))  # known already: no batch
    publisher.publish(CacheEvents(removed=[block(30).digest]))
    subscriber.read(last + 18)
    assert not subscriber.cache.blocks


def test_a_req_socket_as_in_vllms_example_gets_the_batch_that_it_missed(
    context: Any, publish: Callable[..., KvEventPublisher]
) -> None:
    publisher = publish()
    for n in range(5):
        publisher.publish(CacheEvents([block(n)]))
    published(publisher)
    req = context.socket(zmq.REQ)
    req.connect(publisher.replay_endpoint)
    for n in (2, 4):
        req.send(n.to_bytes(8, "big"))
        assert req.poll(PATIENCE_MS)
        number, payload = req.recv_multipart()
        assert int.from_bytes(number, "big") == n
        assert DECODERS["map"].decode(payload).events[0].block_hashes == [n - 1]


def test_late_subscribers_get_a_snapshot(context: Any, publish: Callable[..., KvEventPublisher]) -> None:
    """Where they ask for it, where the batches that they ask for are not kept, and where the publisher is another one."""
    publisher = publish(most_kept=4)
    publisher.publish(CacheEvents([block(n, n - 1 if n % 10 else None) for n in range(100)]))
    publisher.publish(CacheEvents([block(n, n - 1, on_host=True) for n in range(95, 100)]))
    for n in range(5):
        publisher.publish(CacheEvents(removed=[block(10 * n + 9).digest]))
    last = published(publisher)
    assert last == 7
    remaining = expected({one.digest: one for one in map(block, range(100))}).keys() - {9, 19, 29, 39, 49}
    for request in (b"snapshot", bytes(8), (3).to_bytes(8, "big"), (99).to_bytes(8, "big")):
        subscriber = Subscriber(publisher, context)
        ((number, answer),) = subscriber.replay(request)
        assert number == last and type(answer.events[0]).__name__ == "AllBlocksCleared"
        assert subscriber.cache.blocks.keys() == remaining
        assert {digest for digest, one in subscriber.cache.blocks.items() if one[0] == "CPU"} == {*range(95, 100)}
        assert len(answer.events) == 12, "an event for each stretch of a chain"
    subscriber = Subscriber(publisher, context)
    kept = ask(subscriber.dealer, (last - 3).to_bytes(8, "big"))
    assert [int.from_bytes(number, "big") for number, _ in kept] == [4, 5, 6, 7]
    assert ask(subscriber.dealer, (last + 1).to_bytes(8, "big")) == []
    subscriber.join(publisher)  # it goes on with the next batch
    assert int.from_bytes(subscriber.sub.recv_multipart()[1], "big") > last


def test_before_anything_is_published_there_is_nothing(context: Any) -> None:
    publisher = KvEventPublisher(FREE, FREE)
    try:
        subscriber = Subscriber(publisher, context)
        assert subscriber.replay(b"snapshot") == subscriber.replay(bytes(8)) == []
    finally:
        publisher.close()


def test_requests_that_are_none_are_ignored(context: Any, publish: Callable[..., KvEventPublisher]) -> None:
    publisher = publish()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(publisher.replay_endpoint)
    for frames in ([b""], [b"", b"short"], [b"x", bytes(8)], [bytes(8)], [b"", bytes(8), b""], [b"", bytes(500)]):
        dealer.send_multipart(frames)
    ((number, _),) = ask(dealer, b"snapshot")  # of this one alone
    assert number == bytes(8)


def test_a_slow_subscriber_costs_no_memory(context: Any, publish: Callable[..., KvEventPublisher]) -> None:
    """240 MB are published to a subscriber that reads nothing; it finds its way back by a snapshot."""
    publisher = publish(high_water_mark=8, most_kept=8)
    context.set(zmq.SOCKET_LIMIT, 8)
    slow = Subscriber(publisher, context)
    slow.join(publisher)
    chain = [StoredBlock(n << 64, (n - 1) << 64 if n else None, (60_000,) * 64) for n in range(200)]
    before = psutil.Process().memory_info().rss
    most = 0
    for n in range(3000):
        publisher.publish(CacheEvents(chain) if n % 2 else CacheEvents(removed=[one.digest for one in chain]))
        publisher.publish(CacheEvents([block(1 << 50 | n)]))
        if n % 100 == 99:
            last = published(publisher)
            most = max(most, psutil.Process().memory_info().rss - before)
    assert most < 60 << 20, f"{most >> 20} MiB"
    publisher.publish(CacheEvents([block(77)]))
    last = published(publisher)
    num_read = 0
    while slow.sub.poll(100):
        slow.sub.recv_multipart()
        num_read += 1
    assert num_read < last, "all of them were held somewhere"
    slow.replay(b"snapshot")
    assert slow.last == last and 77 in slow.cache.blocks and 199 in slow.cache.blocks


# ---- the queue ----------------------------------------------------------------------------------------------------------


def test_lost_changes_make_a_snapshot_necessary(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = KvEventPublisher(FREE, FREE)
    try:
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
    finally:
        publisher.close()
    publisher.close()
    with pytest.raises(KvEventsError, match="has ended: make a new one"):
        publisher.publish(CacheEvents([block(1)]))


def test_a_broken_publisher_says_so(publish: Callable[..., KvEventPublisher], caplog: pytest.LogCaptureFixture) -> None:
    publisher = publish()
    publisher.publish(CacheEvents([replace(block(1), tokens=("x",))]))  # type: ignore[arg-type]
    publisher._thread.join(20)
    with pytest.raises(KvEventsError) as caught:
        publisher.publish(CacheEvents([block(2)]))
    assert isinstance(caught.value.__cause__, TypeError) and "the publisher of KV events broke" in caplog.text


def test_an_engines_cache_is_known_outside(context: Any, tmp_path: Path) -> None:
    """From AsyncLLM to a subscriber, on one event loop, while requests run and blocks are evicted."""
    tiny("llama").save_pretrained(tmp_path)
    copy = EventCopy()

    async def main() -> None:
        async with AsyncLLM(tmp_path, device="cpu", kv_memory=1 << 18, kv_events=True) as llm:
            publisher = KvEventPublisher(FREE, FREE)
            subscriber = Subscriber(publisher, context)
            prompts = [[n + 1] * (20 + 7 * n) for n in range(20)]
            running = asyncio.create_task(llm.generate(prompts, SamplingParams(max_new_tokens=40)))
            while not running.done():
                copy.apply(await publish_changes(llm, publisher))
                await asyncio.sleep(0)
            await running
            copy.apply(await publish_changes(llm, publisher))
            index = llm._manager.open().core.scheduler.cache.index
            assert copy.blocks == blocks_of(index) and len(copy.blocks) > 20
            subscriber.last = -1
            await asyncio.to_thread(published, publisher)
            await asyncio.to_thread(subscriber.replay)
            assert subscriber.cache.blocks == expected(copy.blocks)
            index.events._most = 1
            await llm.generate([[99] * 60], SamplingParams(max_new_tokens=2))
            changes = await publish_changes(llm, publisher)  # too many for the log: a snapshot
            assert changes.cleared and not changes.lost
            await asyncio.to_thread(published, publisher)
            await asyncio.to_thread(subscriber.replay)
            assert subscriber.cache.blocks == expected(blocks_of(index))
            await asyncio.to_thread(publisher.close)

    asyncio.run(main())


# ---- addresses and keys -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.1:5557", "tcp://[::]:5557", "tcp://eth0:5557"]
)
def test_beyond_this_machine_there_have_to_be_keys(endpoint: str) -> None:
    for both in ((endpoint, FREE), (FREE, endpoint)):
        with pytest.raises(KvEventsError, match="hold the tokens of prompts: give CURVE keys"):
            KvEventPublisher(*both)
    kv_events.check_address(endpoint, has_keys=True)


def test_addresses(context: Any, tmp_path: Path) -> None:
    for local in ("tcp://127.0.0.1:1", "tcp://127.9.9.9:1", "tcp://[::1]:1", "tcp://localhost:1", "ipc:///run/x"):
        kv_events.check_address(local, has_keys=False)
    for bad in ("5557", "udp://127.0.0.1:1", "inproc://x", "tcp:/127.0.0.1:1"):
        with pytest.raises(KvEventsError, match="are published at tcp://ADDRESS:PORT or ipc://FILE"):
            kv_events.check_address(bad, has_keys=True)
    assert endpoint_of_rank("tcp://127.0.0.1:5557", 3) == "tcp://127.0.0.1:5560"
    with pytest.raises(KvEventsError, match="has no port to count from"):
        endpoint_of_rank(FREE, 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(KvEventsError, match=r"cannot listen on tcp://127.0.0.1:\d+ .* name another address"):
            KvEventPublisher(FREE, f"tcp://127.0.0.1:{taken.getsockname()[1]}")
    publisher = KvEventPublisher(f"ipc://{tmp_path}/events", None)
    assert (publisher.endpoint, publisher.replay_endpoint) == (f"ipc://{tmp_path}/events", "")
    publisher.close()


def test_without_pyzmq_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(KvEventsError, match=r"pip install 'pagetide\[ray\]'"):
        KvEventPublisher(FREE, FREE)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, tuple[bytes, bytes]]:
    """Certificates of a server, a client that is known and one that is not; that of the known one in the folder "known"."""
    (tmp_path / "known").mkdir()
    found = {}
    for name in ("server", "client", "stranger"):
        public, secret = create_certificates(tmp_path, name)
        found[name] = load_certificate(secret)
        Path(secret).chmod(0o600)
        if name == "client":
            Path(public).rename(tmp_path / "known" / "client.key")
    return found


@pytest.mark.parametrize("as_folder", [True, False])
def test_only_known_keys_read(
    context: Any, tmp_path: Path, keys: dict[str, tuple[bytes, bytes]], as_folder: bool
) -> None:
    clients = str(tmp_path / "known") if as_folder else [keys["client"][0].decode()]
    publisher = KvEventPublisher(FREE, FREE, curve=CurveKeys(tmp_path / "server.key_secret", clients))
    publisher.publish(CacheEvents(cleared=True))
    try:

        def curve(name: str, server: str = "server") -> dict[str, bytes]:
            public, secret = keys[name]
            return {"publickey": public, "secretkey": secret, "serverkey": keys[server][0]}

        refused = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        refused |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
        others = []
        for given in (curve("stranger"), curve("client", server="stranger"), {}):
            one = Subscriber(publisher, context)
            for connected in (one.sub, one.dealer):
                connected.close()
            one.sub, one.dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
            monitors = []
            for made, endpoint in ((one.sub, publisher.endpoint), (one.dealer, publisher.replay_endpoint)):
                for name, key in given.items():
                    setattr(made, f"curve_{name}", key)
                made.linger = 0
                monitors.append(made.get_monitor_socket(refused))
                made.connect(endpoint)
            one.sub.subscribe(b"")
            one.dealer.send_multipart([b"", b"snapshot"])
            others.append((one, monitors))
        known = Subscriber(publisher, context, **curve("client"))
        known.join(publisher)
        assert known.replay(b"snapshot") and known.cache.blocks
        for _, monitors in others:
            for monitor in monitors:
                assert monitor.poll(PATIENCE_MS), "not refused"
                recv_monitor_message(monitor)
        for n in range(20):
            publisher.publish(CacheEvents([block(n)]))
        known.read(known.last + 20)
        for one, _ in others:
            assert not one.sub.poll(0) and not one.dealer.poll(0)
    finally:
        publisher.close()


def test_keys_that_are_none_are_refused(tmp_path: Path, keys: Any, caplog: pytest.LogCaptureFixture) -> None:
    secret, client = tmp_path / "server.key_secret", keys["client"][0].decode()
    (tmp_path / "empty").mkdir()
    for curve, message in (
        (CurveKeys(tmp_path / "none", [client]), "is no certificate of KV events"),
        (CurveKeys(tmp_path / "server.key", [client]), "has no secret key: name the file that ends in .key_secret"),
        (CurveKeys(secret, []), "no client may read the KV events"),
        (CurveKeys(secret, tmp_path / "empty"), "no client may read the KV events"),
        (CurveKeys(secret, str(tmp_path / "nowhere")), "is no folder of public keys"),
        (CurveKeys(secret, ["short"]), "has 40 characters of Z85"),
        (CurveKeys(secret, [client[:-1] + "~"]), "has 40 characters of Z85"),
    ):
        with pytest.raises(KvEventsError, match=message):
            KvEventPublisher(FREE, FREE, curve=curve)
    secret.chmod(0o644)
    KvEventPublisher(FREE, FREE, curve=CurveKeys(secret, [client])).close()
    assert "can be read by others than its owner (-rw-r--r--)" in caplog.text
