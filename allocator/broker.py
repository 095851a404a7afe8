"""The broker: leases device memory to engines over a Unix socket, and recalls it when others need it.

    engines, users ── Connection ──► requests ──► LeaseTable: a DeviceAccount per device ──► orders ──► Connection ──► engines
                                                        ▲
                              every tick: measured memory, and the records of the leases

All lease state comes from the open sockets. After a broker that was killed, or that ended while engines held leases,
its successor gives them a grace period to return before it grants anything.

Everything runs in one event loop. `leases` and `devices` may be called from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ..common.on_error import OnError
from ..monitor.sources.process_facts import user_name
from . import wire
from .broker_connection import Connection, Dropped
from .broker_socket import listen
from .errors import LeaseRefused, NotPermitted
from .lease_account import DeviceView, LeaseAccount
from .lease_table import LeaseTable

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
_PLACES_TO_COME = 32  # closed to new leases and reservations: for commands and returning engines
_MAX_ACCEPTED_AT_ONCE = 32
_IDLE_TICK_S = 1.0


class Broker:
    """Serves the leases of `table` at `socket_path`. The directory's lock ensures one broker per path."""

    def __init__(
        self,
        table: LeaseTable,
        socket_path: Path,
        *,
        gid: int | None = None,
        tick_s: float | None = 0.02,
        pause_s: float = 0.002,
        grace_s: float = 2.0,
    ) -> None:
        """Does nothing before `start`.

        Args:
            gid: A group that may connect too.
            tick_s: Interval between looks at the measurements; None: only when `tick` is called.
            pause_s: Least interval between decisions triggered by messages, to batch them.
            grace_s: How long a successor waits for engines to return.
        """
        self._table, self._clock = table, table.clock
        self._path, self._gid = socket_path, gid
        self._tick_s, self._pause_s, self._grace_s = tick_s, pause_s, grace_s
        self._connections: dict[Connection, None] = {}  # oldest first
        self._pidfds: dict[int, int] = {}  # of the processes of living leases and reservations, by id
        self._listener: socket.socket | None = None
        self._identity: os.stat_result | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._somebody = asyncio.Event()
        self._deciding: asyncio.Handle | None = None
        self._decide_at = 0.0  # earliest time of the next decision, on the loop's clock
        self._accepting = False
        self._logged: set[str] = set()

    def leases(self) -> tuple[wire.LeaseView, ...]:
        """The leases as of the last order or tick. Thread-safe."""
        return self._table.lease_views

    def reservations(self) -> tuple[wire.ReservationView, ...]:
        """The reservations as of the last order or tick. Thread-safe."""
        return self._table.reservation_views

    def devices(self) -> tuple[DeviceView, ...]:
        """The devices with leases or reservations. Thread-safe."""
        return self._table.device_views

    # ---- lifecycle ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen. Raises OSError if the socket cannot be made."""
        succeeds = self._path.is_socket()
        self._listener = listen(self._path, gid=self._gid)
        self._identity = os.stat(self._path)
        if succeeds:
            self._table.decide_from_ns = self._clock() + int(self._grace_s * 1e9)
            log.info(
                "a broker ran here before; its clients have %g s to reconnect. Limits set there are lost: "
                "set them again (vram-monitor limit)",
                self._grace_s,
            )
        self._loop = asyncio.get_running_loop()
        self._resume_accepting()
        if self._tick_s is not None:
            self._ticking = asyncio.create_task(self._tick_forever(self._tick_s))

    async def close(self) -> None:
        """Close every connection. Idempotent.

        The socket's name stays if there are leases or reservations, so that a successor waits for them.
        """
        if self._listener is None:
            return
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking
        if self._deciding is not None:
            self._deciding.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        if not any(connection.needed for connection in self._connections):
            self._remove_name()
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        for number in list(self._pidfds):
            self._unwatch(number)
        self._table.close()

    def _remove_name(self) -> None:
        """Remove the socket's name, unless another broker has taken it."""
        assert self._identity is not None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), self._identity):
                self._path.unlink()

    async def _tick_forever(self, tick_s: float) -> None:
        while True:
            try:
                self.tick()
            except Exception:  # a failed tick must not end all leases
                log.exception("the broker's tick failed; the next one is in %g s", tick_s)
            if self._connections or self._table.leases:
                await asyncio.sleep(tick_s)
                continue
            self._somebody.clear()
            with contextlib.suppress(TimeoutError):  # without clients, long waits save wake-ups
                await asyncio.wait_for(self._somebody.wait(), _IDLE_TICK_S)

    def tick(self) -> None:
        """Check timeouts, measurements and records, and decide. Only in the loop's thread."""
        now_ns = self._clock()
        for connection in list(self._connections):
            connection.check_times(now_ns)
        self._resume_accepting()
        self._table.measure_all()
        self._table.decide_all()
        if self._table.check_times():
            self._decide_soon()
        for number in [number for number in self._pidfds if not self._table.holds(number)]:
            self._unwatch(number)

    def _decide_soon(self) -> None:
        """Decide once the pending messages have been read, so that simultaneous requests are served together."""
        if self._deciding is None:
            if (delay_s := self._decide_at - self._loop.time()) > 0:
                self._deciding = self._loop.call_later(delay_s, self._decide)
            else:
                self._deciding = self._loop.call_soon(self._decide)

    def _decide(self) -> None:
        self._deciding = None
        self._decide_at = self._loop.time() + self._pause_s
        self._table.decide_all()

    # ---- connections ----------------------------------------------------------------------------

    def _resume_accepting(self) -> None:
        if not self._accepting and self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)
            self._accepting = True

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(_MAX_ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._tell_once("accept", "a client cannot be accepted, tried again at the next tick: %s", error)
                self._drop_oldest()
                self._loop.remove_reader(self._listener)
                self._accepting = False
                return
            if len(self._connections) >= MAX_CONNECTIONS:
                self._drop_oldest()
            try:
                connection = Connection(sock, self._clock(), received=self._received, dropped=self._dropped, clock=self._clock)
            except OSError as error:
                sock.close()
                log.debug("a client was gone before it was accepted: %s", error)
                continue
            self._connections[connection] = None
            self._somebody.set()
            if len(self._connections) > MAX_CONNECTIONS:
                connection.drop(Dropped("is one too many", f"{MAX_CONNECTIONS} engines are connected"))

    def _drop_oldest(self) -> None:
        """Drop the oldest idle client of the user with the most idle clients."""
        idle = [connection for connection in self._connections if not connection.needed]
        if idle:
            crowd, _ = Counter(connection.peer.uid for connection in idle).most_common(1)[0]
            oldest = next(connection for connection in idle if connection.peer.uid == crowd)
            oldest.drop(Dropped("is one too many", f"{len(self._connections)} are connected, and it holds nothing"))

    def _dropped(self, connection: Connection, reason: Dropped) -> None:
        del self._connections[connection]
        if reason.kind != "is gone":
            self._tell_once(
                reason.kind,
                "a client that %s was dropped (pid %d, uid %d): %s",
                reason.kind,
                connection.peer.pid,
                connection.peer.uid,
                reason,
            )
        if connection.reservation_id is not None:
            self._table.reservations.end(connection.reservation_id, str(reason))
        if connection.lease_id is not None:
            self._table.end(self._table.leases[connection.lease_id], str(reason), may_return=True)
        self._decide_soon()

    def _tell_once(self, kind: str, message: str, *arguments: object) -> None:
        """Log trouble that any client can cause: the first of each kind as a warning, later ones at debug level."""
        log.log(logging.DEBUG if kind in self._logged else logging.WARNING, message, *arguments)
        self._logged.add(kind)

    def _received(self, connection: Connection, message: wire.Message) -> None:
        """Answer one message. Raises Dropped for a violation of the protocol."""
        if not connection.greeted:
            self._greet(connection, message)
            return
        try:
            self._answer(connection, message)
        except LeaseRefused as error:
            connection.send(wire.refusal(error))
            self._table.refused(connection.peer, message, error)
        except Dropped:
            raise
        except Exception as error:  # a failed answer must not end other leases
            log.exception("a message of pid %d could not be answered", connection.peer.pid)
            raise Dropped("met a fault of the broker", repr(error)) from error
        if not isinstance(message, wire.ReportMessage):  # a report can wait for the tick
            self._decide_soon()

    def _greet(self, connection: Connection, message: wire.Message) -> None:
        if not isinstance(message, wire.HelloMessage):
            raise Dropped("says no hello", f"its first message was {type(message).__name__}")
        connection.greeted = True
        connection.send(wire.WelcomeMessage(wire.PROTOCOL, self._table.epoch, os.getpid()))
        if message.protocol != wire.PROTOCOL:
            raise Dropped("is of another version", f"it speaks {message.protocol}, the broker {wire.PROTOCOL}")

    def _answer(self, connection: Connection, message: wire.Message) -> None:
        match message:
            case wire.RegisterMessage():
                self._register(connection, message)
            case wire.AskMessage():
                self._table.ask(self._lease(connection), message)
            case wire.ReportMessage():
                self._table.report(self._lease(connection), message)
            case wire.UnmappedMessage():
                self._table.unmapped(self._lease(connection), message)
            case wire.LowerMinMessage():
                self._table.lower_min(self._lease(connection), message)
            case wire.ReleaseMessage() if connection.reservation_id is not None:
                self._table.reservations.end(connection.reservation_id, "it was released")
            case wire.ReleaseMessage():
                self._table.end(self._lease(connection), "it was released", may_return=False)
            case wire.ListLeasesMessage() | wire.ListReservationsMessage():
                if self._deciding is not None:  # the answer reflects all earlier messages
                    self._deciding.cancel()
                    self._decide()
                is_leases = isinstance(message, wire.ListLeasesMessage)
                for view in self._table.lease_views if is_leases else self._table.reservations.views():
                    connection.send(view)
                connection.send(wire.DoneMessage())
            case wire.SetLimitMessage(engine, max_bytes):
                connection.send(self._table.limit(self._commanded(connection, engine), max_bytes))
            case wire.RecallBytesMessage(engine, num_bytes):
                connection.send(self._table.recall(self._commanded(connection, engine), num_bytes))
            case wire.ReserveMessage():
                _refuse_second(connection)
                self._check_places(connection)
                self._reserve(connection, message)
            case wire.ResizeMessage():
                if connection.reservation_id is None:
                    raise LeaseRefused("this connection holds no reservation; reserve first")
                self._table.resize(connection.reservation_id, message, connection.peer)
            case wire.EndReservationMessage(reservation_id):
                self._table.reservations.end_by_hand(reservation_id, connection.peer, os.geteuid())
                connection.send(wire.DoneMessage())
            case _:
                raise Dropped("sent a message that only the broker may send", type(message).__name__)

    def _register(self, connection: Connection, request: wire.RegisterMessage) -> None:
        _refuse_second(connection)
        for other in list(self._connections):  # a returning engine may arrive before its old socket's end is noticed
            if other.peer == connection.peer and other is not connection:
                other.check_open()
        self._check_places(connection)
        try:
            pidfd = connection.pidfd()
            with OnError(lambda: None if pidfd is None else os.close(pidfd)):
                lease = self._table.register(connection, request)
        except ProcessLookupError:
            raise Dropped("is gone", "its process has ended") from None
        except OSError as error:
            raise LeaseRefused(f"the broker cannot keep another lease: {error.strerror}") from error
        self._watch(lease.lease_id, pidfd, lambda: self._process_ended(lease))

    def _reserve(self, connection: Connection, request: wire.ReserveMessage) -> None:
        try:
            pidfd = self._pidfd_of(connection, request.pid) if request.pid else connection.pidfd()
            with OnError(lambda: None if pidfd is None else os.close(pidfd)):
                reservation_id = self._table.reserve(connection, request)
        except (ProcessLookupError, FileNotFoundError):
            raise LeaseRefused(f"there is no process {request.pid or connection.peer.pid}; name one that runs") from None
        except OSError as error:
            raise LeaseRefused(f"the broker cannot keep another reservation: {error.strerror}") from error
        self._watch(reservation_id, pidfd, lambda: self._holder_ended(reservation_id))

    def _pidfd_of(self, connection: Connection, pid: int) -> int:
        """A descriptor of another process that a reservation is for. Raises ProcessLookupError, NotPermitted, OSError."""
        pidfd = os.pidfd_open(pid)
        with OnError(lambda: os.close(pidfd)):
            owner = os.stat(f"/proc/{pid}").st_uid
            if connection.peer.uid not in (0, os.geteuid(), owner):
                raise NotPermitted(f"process {pid} is {user_name(owner)}'s; reserve for a process of your own")
        return pidfd

    def _holder_ended(self, reservation_id: int) -> None:
        """End the reservation of a process that has ended: its socket may stay open in a child."""
        self._unwatch(reservation_id)
        if reservation_id in self._table.reservations:
            self._table.reservations.end(reservation_id, "its process has ended")
            self._decide_soon()

    def _watch(self, number: int, pidfd: int | None, ended: Callable[[], None]) -> None:
        """Call `ended` when the process of a lease or a reservation has ended."""
        if pidfd is not None:
            self._pidfds[number] = pidfd
            self._loop.add_reader(pidfd, ended)

    def _check_places(self, comer: Connection) -> None:
        """Raise LeaseRefused if there is no place for another lease or reservation, in all or for this user."""
        holders = [connection.peer.uid for connection in self._connections if connection.needed]
        if self._table.quota is not None:
            uid = comer.peer.uid
            self._table.quota.check_place(uid, user_name(uid), holders.count(uid), self._table.count_ended(uid))
        if len(holders) >= MAX_CONNECTIONS - _PLACES_TO_COME:
            raise LeaseRefused(f"{len(holders)} engines and reservations are connected, which is the limit; end some")

    def _process_ended(self, lease: LeaseAccount) -> None:
        """End the lease of a process that has ended: its socket may stay open in a child."""
        self._unwatch(lease.lease_id)
        if lease.connection is not None:
            lease.connection.drop(Dropped("is gone", "its process has ended"))
        self._table.end(lease, "its process has ended", may_return=False)

    def _unwatch(self, number: int) -> None:
        pidfd = self._pidfds.pop(number)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)

    def _lease(self, connection: Connection) -> LeaseAccount:
        if connection.lease_id is None:
            raise LeaseRefused("this connection holds no lease; register first")
        return self._table.leases[connection.lease_id]

    def _commanded(self, connection: Connection, engine: str) -> LeaseAccount:
        return self._table.find(engine, connection.peer, os.geteuid())


def _refuse_second(connection: Connection) -> None:
    if connection.needed:
        raise LeaseRefused("this connection holds a lease or a reservation already; open another for the next one")


class BrokerThread:
    """A broker with its own loop and thread, for a process that has no loop."""

    def __init__(self, broker: Broker) -> None:
        """Does nothing before `start`."""
        self._broker = broker
        self._thread = threading.Thread(target=self._run, name="broker", daemon=True)
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None

    def start(self) -> None:
        """Return once the broker listens. Raises what `Broker.start` raises."""
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def close(self, timeout_s: float = 5.0) -> None:
        """End the broker. Idempotent."""
        if self._loop is not None and self._ended is not None:
            with contextlib.suppress(RuntimeError):  # the loop has already ended
                self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            if self._started.is_set():
                log.exception("the broker failed")
        finally:
            self._started.set()

    async def _serve(self) -> None:
        await self._broker.start()
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        await self._ended.wait()
        await self._broker.close()
