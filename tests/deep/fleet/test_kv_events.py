"""Events of the prefix cache over ZeroMQ, read over real sockets by a subscriber like vLLM's example, with vLLM's structs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from families import tiny
from kv_event_structs import DECODER, FREE, NO_ZMQ, PATIENCE_MS, Cache, ask, block, expected, published
from prefix_fakes import EventCopy, blocks_of

from pagetide import AsyncLLM, SamplingParams
from pagetide.cache.cache_events import CacheEvents, StoredBlock
from pagetide.fleet.kv_events import CurveKeys, KvEventPublisher, KvEventsError

zmq = pytest.importorskip("zmq", reason=NO_ZMQ)
from zmq.auth import create_certificates, load_certificate  # noqa: E402
from zmq.utils.monitor import recv_monitor_message  # noqa: E402


class Subscriber:
    """Follows a publisher by vLLM's protocol: a gap in the sequence numbers is filled by the replay socket."""

    def __init__(self, publisher: KvEventPublisher, context: Any, watched: int = 0, **curve: bytes) -> None:
        """With `watched`: keep monitors of these events of the sockets."""
        self.cache = Cache()
        self.last = -1
        self.ranks: set[int | None] = set()
        self.num_replayed = 0
        self.monitors: list[Any] = []
        self.sub, self.dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for one, endpoint in ((self.sub, publisher.endpoint), (self.dealer, publisher.replay_endpoint)):
            one.linger = 0
            for name, key in curve.items():
                setattr(one, f"curve_{name}", key)
            if watched:
                self.monitors.append(one.get_monitor_socket(watched))
            one.connect(endpoint)
        self.sub.subscribe(b"")

    def join(self, publisher: KvEventPublisher) -> None:
        """Wait until the publisher knows of the subscription: batches that come before are missed."""
        for n in range(6000):
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
            decoded = DECODER.decode(payload)
            self.last = int.from_bytes(number, "big")
            self.ranks.add(decoded.data_parallel_rank)
            self.cache.apply(decoded.events)

    def replay(self, request: bytes | None = None) -> list[tuple[int, Any]]:
        """Ask for what is missing, and apply it. Returns the numbers and batches of the answer."""
        answers = ask(self.dealer, (self.last + 1).to_bytes(8, "big") if request is None else request)
        for number, payload in answers:
            self.take(number, payload)
            self.num_replayed += 1
        return [(int.from_bytes(number, "big"), DECODER.decode(payload)) for number, payload in answers]


def test_the_exact_messages(context: Any, publish: Callable[..., KvEventPublisher]) -> None:
    publisher = publish(clock=lambda: 12.5)
    subscriber = Subscriber(publisher, context)
    subscriber.join(publisher)
    topic, number, payload = subscriber.sub.recv_multipart()
    if int.from_bytes(number, "big") == 0:  # it is there before the first batch, which clears
        topic, number, payload = subscriber.sub.recv_multipart()
    hashes = [(1 << 40) + int.from_bytes(number, "big") - 1]  # the first batch cleared
    stored = {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "block_size": 4,
        "token_ids": [hashes[0] & 0xFFFF, 2, 3, 70_000], "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    assert topic == b"" and len(number) == 8
    assert msgspec.msgpack.decode(payload) == [12.5, [stored], 0]


def test_a_subscriber_follows_and_fills_its_gaps(context: Any, publish: Callable[..., KvEventPublisher]) -> None:
    publisher = publish()
    subscriber = Subscriber(publisher, context)
    subscriber.join(publisher)
    publisher.publish(CacheEvents([block(1), block(2, 1), block(3, 2)]))
    last = published(publisher)
    subscriber.read(last)  # what came before it joined, if anything did, is replayed
    assert subscriber.ranks == {0}
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
    for n in (2, 4):
        req = context.socket(zmq.REQ)  # another one: later batches of the first answer may still be on their way
        req.connect(publisher.replay_endpoint)
        req.send(n.to_bytes(8, "big"))
        assert req.poll(PATIENCE_MS)
        number, payload = req.recv_multipart()
        assert int.from_bytes(number, "big") == n
        assert DECODER.decode(payload).events[0].block_hashes == [n - 1]


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


def test_a_broken_publisher_says_so(publish: Callable[..., KvEventPublisher], caplog: pytest.LogCaptureFixture) -> None:
    publisher = publish()
    publisher.publish(CacheEvents([replace(block(1), tokens=("x",))]))  # type: ignore[arg-type]
    publisher._thread.join(60)
    with pytest.raises(KvEventsError) as caught:
        publisher.publish(CacheEvents([block(2)]))
    assert isinstance(caught.value.__cause__, TypeError) and "the publisher of KV events failed" in caplog.text


async def publish_changes(llm: AsyncLLM, publisher: KvEventPublisher) -> CacheEvents:
    """As `FleetWorker` does: changes, or all blocks after changes were lost."""
    changes = await (llm.cache_snapshot() if publisher.needs_snapshot else llm.cache_events())
    if changes.lost:
        changes = await llm.cache_snapshot()
    publisher.publish(changes)
    return changes


async def test_an_engines_cache_is_known_outside(
    context: Any, publish: Callable[..., KvEventPublisher], tmp_path: Path
) -> None:
    """From AsyncLLM to a subscriber, on one event loop, while requests run and blocks are evicted."""
    tiny("llama").save_pretrained(tmp_path)
    copy, publisher = EventCopy(), publish(begins=False)
    async with AsyncLLM(tmp_path, device="cpu", kv_memory=1 << 18, kv_events=True, share=False) as llm:
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


def test_addresses_that_are_taken_and_files(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(KvEventsError, match=r"cannot listen on tcp://127.0.0.1:\d+ .* name another address"):
            KvEventPublisher(FREE, f"tcp://127.0.0.1:{taken.getsockname()[1]}")
    publisher = KvEventPublisher(f"ipc://{tmp_path}/events", None)
    assert (publisher.endpoint, publisher.replay_endpoint) == (f"ipc://{tmp_path}/events", "")
    publisher.close()


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
    context: Any, publish: Callable[..., KvEventPublisher], tmp_path: Path, keys: Any, as_folder: bool
) -> None:
    clients = str(tmp_path / "known") if as_folder else [keys["client"][0].decode()]
    publisher = publish(curve=CurveKeys(tmp_path / "server.key_secret", clients))

    def curve(name: str, server: str = "server") -> dict[str, bytes]:
        public, secret = keys[name]
        return {"publickey": public, "secretkey": secret, "serverkey": keys[server][0]}

    refused = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    refused |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
    wrong: tuple[dict[str, bytes], ...] = (curve("stranger"), curve("client", server="stranger"), {})
    others = [Subscriber(publisher, context, refused, **given) for given in wrong]
    for one in others:
        one.dealer.send_multipart([b"", b"snapshot"])
    known = Subscriber(publisher, context, **curve("client"))
    known.join(publisher)
    assert known.replay(b"snapshot") and known.cache.blocks
    for monitor in [monitor for one in others for monitor in one.monitors]:
        assert monitor.poll(PATIENCE_MS), "not refused"
        recv_monitor_message(monitor)
    for n in range(20):
        publisher.publish(CacheEvents([block(n)]))
    known.read(known.last + 20)
    for one in others:
        assert not one.sub.poll(0) and not one.dealer.poll(0)


def test_keys_that_are_none_are_refused(tmp_path: Path, keys: Any, caplog: pytest.LogCaptureFixture) -> None:
    secret, client = tmp_path / "server.key_secret", keys["client"][0].decode()
    (tmp_path / "empty").mkdir()
    for curve, message in (
        (CurveKeys(tmp_path / "none", [client]), "is not a certificate for KV events"),
        (CurveKeys(tmp_path / "server.key", [client]), "has no secret key: name the file that ends in .key_secret"),
        (CurveKeys(secret, []), "no client may read the KV events"),
        (CurveKeys(secret, tmp_path / "empty"), "no client may read the KV events"),
        (CurveKeys(secret, str(tmp_path / "nowhere")), "is not a folder of public keys"),
        (CurveKeys(secret, ["short"]), "has 40 characters of Z85"),
        (CurveKeys(secret, [client[:-1] + "~"]), "has 40 characters of Z85"),
    ):
        with pytest.raises(KvEventsError, match=message):
            KvEventPublisher(FREE, FREE, curve=curve)
    secret.chmod(0o644)
    KvEventPublisher(FREE, FREE, curve=CurveKeys(secret, [client])).close()
    assert "can be read by others than its owner (-rw-r--r--)" in caplog.text
