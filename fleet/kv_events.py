"""Publishes the changes of an engine's prefix cache over ZeroMQ in vLLM's form, for routers that can read vLLM's.

    changes ── publish ──► queue ── a thread ──► PUB     [empty topic, sequence number, batch]               to all subscribers
                                      ▲  └─────► ROUTER  [sequence number, batch] ..., [-1, empty]           to one
                                      └───────── ROUTER  [sequence number to begin with, or "snapshot"]      from one

Sequence numbers are 8 bytes, big-endian. A subscriber that missed batches asks the ROUTER socket for those from a number on,
as with vLLM. If they are not kept any more, or it asks for the "snapshot", it gets one batch that clears and stores all
blocks, under the number of the last published batch: it goes on with the next one. A REQ socket reads one message of an
answer; a DEALER socket, which sends an empty frame first, reads all.

Events hold the tokens of prompts and the salts of caches. So a publisher listens on this machine alone, unless it has CURVE
keys (RFC 26 of ZeroMQ): then it talks to clients with known keys, encrypted. docs/fleet.md.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cache.cache_events import CacheEvents
from ..common.error_text import install_command
from ..common.on_error import OnError
from .kv_event_format import PublishedBlocks, batch

if TYPE_CHECKING:
    import zmq
    from zmq.auth.thread import ThreadAuthenticator

log = logging.getLogger(__name__)

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"
DEFAULT_REPLAY_ENDPOINT = "tcp://127.0.0.1:5558"
SNAPSHOT = b"snapshot"
END = (-1).to_bytes(8, "big", signed=True)  # the number of the message that ends an answer
MOST_KEPT_BYTES = 64 << 20  # of batches for replay
MOST_QUEUED_BLOCKS = 65_536  # changes that the thread has not sent yet
_LARGEST_REQUEST = 1024  # bytes; a peer that sends more is disconnected
_LINGER_MS = 200  # at the end, for messages that are on their way
_DOMAIN = "pagetide.kv-events"


class KvEventsError(ValueError):
    """The events cannot be published as asked; the message says what to do."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The keys of a publisher beyond this machine.

    Attributes:
        secret_key_file: The publisher's own certificate, with the secret key, as `zmq.auth.create_certificates` writes it.
        clients: The public keys of the clients that may subscribe: a folder of certificates, or a list of keys in Z85.
    """

    secret_key_file: str | os.PathLike[str]
    clients: str | os.PathLike[str] | Iterable[str]


class KvEventPublisher:
    """Publishes the changes of one prefix cache from the first `publish` to `close`. Its methods never wait for the network.

    Args:
        endpoint: The address of the PUB socket. A port "*" is a free one.
        replay_endpoint: The address of the ROUTER socket; None: no replay and no snapshots.
        curve: The keys, without which both addresses have to be on this machine.
        most_kept: Batches that are kept for replay, of at most 64 MiB together.
        high_water_mark: Messages that wait for a slow subscriber. It misses further ones, and can ask for a replay.

    Raises:
        KvEventsError: an address is not on this machine and there are no keys; an address is in use; pyzmq is not installed.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        replay_endpoint: str | None = DEFAULT_REPLAY_ENDPOINT,
        *,
        curve: CurveKeys | None = None,
        most_kept: int = 10_000,
        high_water_mark: int = 1_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for address in filter(None, (endpoint, replay_endpoint)):
            check_address(address, curve is not None)
        self._clock = clock
        self._blocks = PublishedBlocks()  # of the last batch
        self._kept = _KeptBatches(most_kept)
        self._lock = threading.Lock()
        self._queue: deque[CacheEvents] = deque()
        self._num_queued = 0
        self._needs_snapshot = True
        self._ending: BaseException | bool = False  # an error: what broke the thread
        self._sockets = _Sockets(endpoint, replay_endpoint, curve, high_water_mark, most_kept)
        self._thread = threading.Thread(target=self._run, name="pagetide-kv-events", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """The address of the PUB socket, with its port."""
        return self._sockets.endpoints[0]

    @property
    def replay_endpoint(self) -> str:
        """The address of the ROUTER socket, with its port; empty if there is none."""
        return self._sockets.endpoints[1]

    @property
    def needs_snapshot(self) -> bool:
        """Whether the next changes have to be all blocks, with `cleared`: at the beginning, and after changes were lost.

        Other changes are ignored until then.
        """
        return self._needs_snapshot

    def publish(self, changes: CacheEvents) -> None:
        """Queue `changes` for the subscribers. Thread-safe.

        If more than 65,536 changed blocks wait to be sent, they are dropped, and `needs_snapshot` is set. Raises KvEventsError
        after `close`, and when the publisher broke.
        """
        with self._lock:
            if self._ending:
                cause = self._ending if isinstance(self._ending, BaseException) else None
                raise KvEventsError("this publisher of KV events is closed: create a new one") from cause
            if changes.cleared and not changes.lost:  # what waits is void
                self._queue.clear()
                self._num_queued, self._needs_snapshot = 0, False
            size = len(changes.stored) + len(changes.removed)
            if changes.lost or (self._queue and self._num_queued + size > MOST_QUEUED_BLOCKS):
                self._queue.clear()
                self._num_queued, self._needs_snapshot = 0, True
            if self._needs_snapshot or not changes:
                return
            self._queue.append(changes)
            self._num_queued += size
        self._sockets.wake()

    def close(self) -> None:
        """Send what is queued, end the thread and close the sockets, within some 0.2 s. Idempotent."""
        with self._lock:
            self._ending = self._ending or True
        self._sockets.wake()
        self._thread.join()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                asked = self._sockets.wait()
                with self._lock:
                    queued, ending = list(self._queue), self._ending
                    self._queue.clear()
                    self._num_queued = 0
                for changes in queued:
                    self._send(changes)
                if ending:
                    return
                if asked is not None:
                    self._answer(*asked)
        except BaseException as error:
            log.exception("the publisher of KV events failed")
            with self._lock:
                self._ending = error
        finally:
            self._sockets.close()

    def _send(self, changes: CacheEvents) -> None:
        """Publish one batch, if subscribers do not know all of it."""
        events = self._blocks.apply(changes)
        if events:
            payload = batch(self._clock(), events)
            number = self._kept.add(payload)
            self._sockets.publish([b"", number.to_bytes(8, "big"), payload])

    def _answer(self, client: bytes, request: bytes) -> None:
        """Send the batches that the client asks for, or all blocks instead, and the end."""
        first, upto = int.from_bytes(request, "big"), self._kept.next_number
        if request != SNAPSHOT and self._kept.first_number <= first <= upto:
            answers = self._kept.since(first)
        elif upto:
            answers = [(upto - 1, batch(self._clock(), self._blocks.snapshot()))]
        else:  # nothing was published yet
            answers = []
        for number, payload in answers:
            self._sockets.answer(client, [number.to_bytes(8, "big"), payload])
        self._sockets.answer(client, [END, b""])


class _KeptBatches:
    """The last published batches, numbered from 0: at most `most`, of MOST_KEPT_BYTES together."""

    def __init__(self, most: int) -> None:
        self.next_number = 0
        self._most = most
        self._batches: deque[bytes] = deque()
        self._num_bytes = 0

    @property
    def first_number(self) -> int:
        return self.next_number - len(self._batches)

    def add(self, payload: bytes) -> int:
        """Keep a batch. Returns its number."""
        self._batches.append(payload)
        self._num_bytes += len(payload)
        self.next_number += 1
        while len(self._batches) > self._most or self._num_bytes > MOST_KEPT_BYTES:
            self._num_bytes -= len(self._batches.popleft())
        return self.next_number - 1

    def since(self, number: int) -> list[tuple[int, bytes]]:
        """The batches from `number` on, which is kept or the next one."""
        first = self.first_number
        return [(first + at, self._batches[at]) for at in range(number - first, len(self._batches))]


class _Sockets:
    """The sockets of a publisher and its authenticator. Made by one thread, then used and closed by another, but for `wake`."""

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, curve: CurveKeys | None, high_water_mark: int, most_kept: int
    ) -> None:
        self._zmq: Any = _import_zmq()
        self._context: zmq.Context[Any] = self._zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._pub: Any = None
        self._router: Any = None
        self._woken, self._waker = socket.socketpair()
        with OnError(self.close):
            keys = None if curve is None else self._authenticate(curve)
            self._pub = self._bound(self._zmq.PUB, endpoint, high_water_mark, keys)
            if replay_endpoint is not None:
                # A whole answer fits; of a client that reads nothing further ones are dropped.
                self._router = self._bound(self._zmq.ROUTER, replay_endpoint, most_kept + 2, keys)
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._poller = self._zmq.Poller()
        self._poller.register(self._woken, self._zmq.POLLIN)
        if self._router is not None:
            self._poller.register(self._router, self._zmq.POLLIN)
        both = (self._pub, self._router)
        self.endpoints = ["" if one is None else one.getsockopt_string(self._zmq.LAST_ENDPOINT) for one in both]

    def wake(self) -> None:
        """Let `wait` return. From any thread."""
        try:
            self._waker.send(b"!")
        except BlockingIOError:  # it has been woken often enough
            pass
        except OSError:  # closed
            pass

    def wait(self) -> tuple[bytes, bytes] | None:
        """Wait for `wake` or a request. Returns the client and what it asks for; None without a request, or for a bad one."""
        ready = dict(self._poller.poll())
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
        if self._router is None or self._router not in ready:
            return None
        frames = self._router.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            log.debug("invalid replay request of %d frames: expected an empty frame and 8 bytes", len(frames) - 1)
            return None
        return frames[0], frames[2]

    def publish(self, frames: list[bytes]) -> None:
        """Send to all subscribers but those with too many messages waiting."""
        self._pub.send_multipart(frames)

    def answer(self, client: bytes, frames: list[bytes]) -> None:
        """Send to one client; nothing if it has gone."""
        assert self._router is not None
        self._router.send_multipart([client, b"", *frames])

    def close(self) -> None:
        """Close everything, the authenticator last."""
        for one in (self._pub, self._router):
            if one is not None:
                one.close(linger=_LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        self._woken.close()
        self._waker.close()

    def _bound(self, kind: int, endpoint: str, high_water_mark: int, keys: tuple[bytes, bytes] | None) -> Any:
        made = self._context.socket(kind)
        made.set_hwm(high_water_mark)
        made.maxmsgsize = _LARGEST_REQUEST  # of what is received
        made.ipv6 = "[" in endpoint
        if keys is not None:
            made.curve_publickey, made.curve_secretkey = keys
            made.curve_server = True
            made.zap_domain = _DOMAIN.encode()
            made.setsockopt(self._zmq.ZAP_ENFORCE_DOMAIN, 1)  # no authenticator, no clients
        try:
            made.bind(endpoint)
        except self._zmq.ZMQError as error:
            made.close(linger=0)
            raise KvEventsError(f"cannot listen on {endpoint} for KV events: {error}; name another address") from error
        return made

    def _authenticate(self, curve: CurveKeys) -> tuple[bytes, bytes]:
        """Start to check the keys of clients. Returns the own keys, public and secret."""
        from zmq.auth.thread import ThreadAuthenticator

        public, secret = _own_keys(curve.secret_key_file)
        self._authenticator = ThreadAuthenticator(self._context, log=logging.getLogger(f"{__name__}.auth"))
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, _KnownClients(_client_keys(curve.clients)))
        return public, secret


@dataclass(frozen=True, slots=True)
class _KnownClients:
    """Answers pyzmq whether a client's key is one of `keys`."""

    keys: frozenset[bytes]

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self.keys


def check_address(endpoint: str, has_keys: bool) -> None:
    """Raise KvEventsError unless `endpoint` is on this machine, or there are keys."""
    scheme, separator, rest = endpoint.partition("://")
    if not separator or scheme not in ("tcp", "ipc"):
        raise KvEventsError(f"KV events are published at tcp://ADDRESS:PORT or ipc://FILE, not at {endpoint!r}")
    host = rest.rpartition(":")[0].strip("[]")
    if scheme != "tcp" or has_keys or host == "localhost":
        return
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:  # "*", or the name of an interface or a host
        local = False
    if not local:
        raise KvEventsError(
            f"{endpoint} is not an address of this machine alone, and KV events hold the tokens of prompts: give CURVE keys, "
            f"or publish at {DEFAULT_ENDPOINT}"
        )


def _own_keys(name: str | os.PathLike[str]) -> tuple[bytes, bytes]:
    from zmq.auth import load_certificate

    path = Path(name)
    try:
        public, secret = load_certificate(path)
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise KvEventsError(
            f"{path} is not a certificate for KV events: {error}; make one with zmq.auth.create_certificates"
        ) from error
    if secret is None:
        raise KvEventsError(f"{path} has no secret key: name the file that ends in .key_secret")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("the secret key in %s can be read by others than its owner (%s)", path, stat.filemode(mode))
    return public, secret


def _client_keys(clients: str | os.PathLike[str] | Iterable[str]) -> frozenset[bytes]:
    """The public keys in Z85. Raises KvEventsError if there are none, or one is no key."""
    from zmq.auth import load_certificates
    from zmq.utils import z85

    if isinstance(clients, str | os.PathLike):
        try:
            keys = frozenset(load_certificates(Path(clients)))
        except (OSError, ValueError) as error:
            raise KvEventsError(f"{clients} is not a folder of public keys: {error}") from error
    else:
        keys = frozenset(key.encode() for key in clients)
    for key in keys:
        try:
            if len(z85.decode(key)) != 32:
                raise ValueError
        except (ValueError, KeyError, IndexError) as error:
            raise KvEventsError("a public key of a client of KV events has 40 characters of Z85") from error
    if not keys:
        raise KvEventsError("no client may read the KV events: name the public keys of those that may")
    return keys


def _import_zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        raise KvEventsError(f"KV events are published by pyzmq: {install_command('ray')}") from error
    return zmq
