"""Reservations over HTTP: the monitor's process asks its broker for clients that keep no connection.

    GET    /reservations      all of them
    POST   /reservations      {"size": "8GiB", "time": "2h"}, and of "device", "name", "priority", "wait", "pid" what is wanted
    GET    /reservations/7    one of them
    PATCH  /reservations/7    {"size": "12GiB"}, and "wait" if wanted
    DELETE /reservations/7    its end, also of one that was made elsewhere: the token has the rights of the monitor's user

An answer comes within `ANSWER_WITHIN_S`: 201 or 200 once the bytes are free, 202 while the reservation still waits (look again
with GET), 409 with what holds the bytes if its wait is over. Every reservation has a time, and ends with the process `pid` if
one is named, so that a client that dies keeps nothing.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..common.units import parse_bytes, parse_seconds
from ..monitor.errors import NoSuchDevice
from ..monitor.snapshot import DeviceInfo
from .broker_client import BrokerClient
from .errors import BrokerUnavailable, LeaseClosed, LeaseError, MemoryNotFree, ProtocolMismatch
from .reservation import Reservation, choose_device, reservation_uses

MAX_RESERVATIONS = 64
ANSWER_WITHIN_S = 7.0  # the server ends a connection after 10 s
DEFAULT_WAIT_S = 5.0

_ONE = re.compile(r"/reservations/(\d{1,18})", re.ASCII)
_NEW = {"size", "time", "device", "name", "priority", "wait", "pid"}
_CHANGE = {"size", "wait"}

Answer = tuple[int, object]


class _Unanswerable(Exception):
    """A request that gets this status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class ReservationService:
    """Answers requests about reservations. Thread-safe."""

    def __init__(self, socket_path: Path, devices: Callable[[], Sequence[DeviceInfo]]) -> None:
        """`socket_path` is the broker's; `devices` are those that it leases."""
        self._path, self._devices = socket_path, devices
        self._lock = threading.Lock()
        self._held: list[Reservation] = []

    def answer(self, method: str, path: str, body: Mapping[str, Any]) -> Answer:
        """The status and the JSON value for a request; `path` begins with /reservations. `body` is {} without one."""
        one = _ONE.fullmatch(path)
        self._prune()
        try:
            match method, path, one:
                case "GET", "/reservations", _:
                    return 200, self._rows()
                case "POST", "/reservations", _:
                    return self._reserve(body)
                case "GET", _, re.Match():
                    return 200, self._row(int(one[1]))
                case "PATCH", _, re.Match():
                    return self._resize(self._find(int(one[1])), body)
                case "DELETE", _, re.Match():
                    self._end(int(one[1]))
                    return 200, {"id": int(one[1]), "state": "ended"}
            raise _Unanswerable(404, "reservations are at /reservations and /reservations/ID")
        except _Unanswerable as error:
            return error.status, {"error": str(error)}
        except MemoryNotFree as error:
            return 409, {"error": str(error), "reservations": self._rows()}
        except (BrokerUnavailable, ProtocolMismatch) as error:
            return 503, {"error": str(error)}
        except LeaseClosed as error:
            return 404, {"error": str(error)}
        except (LeaseError, NoSuchDevice, ValueError) as error:
            return 400, {"error": str(error)}

    def close(self) -> None:
        """End all reservations that were made here. Idempotent."""
        with self._lock:
            held, self._held = self._held, []
        for reservation in held:
            reservation.close()

    # ---- internal -------------------------------------------------------------------------------

    def _reserve(self, body: Mapping[str, Any]) -> Answer:
        _check_fields(body, _NEW, needed={"size", "time"})
        info = choose_device(self._devices(), None if body.get("device") is None else str(body["device"]))
        num_bytes, wait_s = parse_bytes(body["size"]), parse_seconds(body.get("wait", DEFAULT_WAIT_S))
        duration_s = parse_seconds(body["time"])
        with self._lock:
            if len(self._held) >= MAX_RESERVATIONS:
                raise _Unanswerable(429, f"{MAX_RESERVATIONS} reservations were made over HTTP, which is the limit; end some")
            reservation = Reservation.ask(
                self._path, info.uuid, num_bytes,
                name=body.get("name", "HTTP"), priority=body.get("priority", 0), duration_s=duration_s, wait_s=wait_s,
                pid=body.get("pid", 0),
            )  # fmt: skip
            self._held.append(reservation)
        return self._answered(reservation, 201)

    def _resize(self, reservation: Reservation, body: Mapping[str, Any]) -> Answer:
        _check_fields(body, _CHANGE, needed={"size"})
        if not reservation.kept:
            raise _Unanswerable(409, "the reservation still waits for its memory; end it, and reserve another size")
        reservation.ask_size(body["size"], parse_seconds(body.get("wait", DEFAULT_WAIT_S)))
        return self._answered(reservation, 200)

    def _end(self, reservation_id: int) -> None:
        self._row(reservation_id)
        BrokerClient(self._path).end_reservation(reservation_id)
        self._prune()

    def _answered(self, reservation: Reservation, status: int) -> Answer:
        """The answer once the broker has said what becomes of a reservation, or 202 in time. Raises its refusal."""
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while waits := reservation.look():
            if time.monotonic() > deadline:
                break
        return (202, self._row(reservation.reservation_id) | {"reason": reservation.queued}) if waits else (
            status, self._row(reservation.reservation_id)
        )  # fmt: skip

    def _prune(self) -> None:
        """Forget the reservations that have ended, or were refused."""
        with self._lock:
            for reservation in self._held:
                reservation.poll()
            gone = [one for one in self._held if one.ended or one.fileno() is None]
            self._held = [one for one in self._held if one not in gone]
        for reservation in gone:
            reservation.close()

    def _find(self, reservation_id: int) -> Reservation:
        with self._lock:
            for reservation in self._held:
                if reservation.reservation_id == reservation_id:
                    return reservation
        raise _Unanswerable(404, f"no reservation {reservation_id} was made over HTTP; it may have ended")

    def _rows(self) -> list[dict[str, Any]]:
        return [asdict(use) for use in reservation_uses(BrokerClient(self._path).reservations())]

    def _row(self, reservation_id: int) -> dict[str, Any]:
        for row in self._rows():
            if row["id"] == reservation_id:
                return row
        raise _Unanswerable(404, f"there is no reservation {reservation_id}; it may have ended")


def _check_fields(body: Mapping[str, Any], known: set[str], needed: set[str]) -> None:
    """Raises ValueError for a missing or unknown field, or one that has another type."""
    if missing := sorted(needed - body.keys()):
        raise ValueError(f'the body lacks {", ".join(missing)}; it is an object such as {{"size": "8GiB", "time": "2h"}}')
    if unknown := sorted(body.keys() - known):
        raise ValueError(f"there is no field {', '.join(unknown)[:200]}; those that exist: {', '.join(sorted(known))}")
