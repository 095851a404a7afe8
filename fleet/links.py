"""How front ends and workers reach the queue: the calls, and the errors of a queue that is away.

`QueueLink` is the one seam to the transport: Ray in a fleet (cluster.py), the `QueueServer` itself in tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from .messages import (
    CacheChanges,
    Deliveries,
    FleetInfo,
    NewRequest,
    Orders,
    Registration,
    Report,
    StaleEpoch,
    Submission,
    WorkerRefused,
    encode,
)


class QueueUnavailable(Exception):
    """The queue cannot be reached now: its process has ended and is being restarted, or the cluster is gone."""


class QueueLink(Protocol):
    """The queue's calls. All raise QueueUnavailable; those of workers StaleEpoch too."""

    async def info(self, wait_s: float = 30.0) -> FleetInfo | None:
        """See `QueueServer.info`."""

    async def submit(self, front: str, requests: Sequence[NewRequest]) -> list[Submission]:
        """See `QueueServer.submit`."""

    async def attach(self, front: str, request_id: str, tenant: str, fingerprint: str) -> Submission:
        """See `QueueServer.attach`."""

    async def read(self, front: str, positions: Mapping[int, int] | None = None) -> Deliveries:
        """See `QueueServer.read`."""

    async def leave(self, front: str, numbers: Sequence[int], cancels: bool) -> None:
        """See `QueueServer.leave`."""

    async def cancel(self, response_id: str | None, tenant: str | None, older_s: float, why: str) -> int | None:
        """See `QueueServer.cancel`."""

    async def status(self) -> dict[str, Any]:
        """See `QueueServer.status`."""

    async def register(self, registration: Registration) -> int:
        """See `QueueServer.register`. Raises WorkerRefused."""

    async def pull(self, worker: str, epoch: int) -> Orders:
        """See `QueueServer.pull`."""

    async def report(self, report: Report) -> None:
        """See `QueueServer.report`."""

    async def cache(self, worker: str, epoch: int, changes: CacheChanges) -> None:
        """See `QueueServer.cache`."""


# The calls by name: the types of their arguments and of their result. What is sent is msgpack.
CALLS: dict[str, tuple[Any, Any]] = {
    "info": (tuple[float], FleetInfo | None),
    "submit": (tuple[str, list[NewRequest]], list[Submission]),
    "attach": (tuple[str, str, str, str], Submission),
    "read": (tuple[str, dict[int, int] | None], Deliveries),
    "leave": (tuple[str, list[int], bool], None),
    "cancel": (tuple[str | None, str | None, float, str], int | None),
    "status": (tuple[()], dict[str, Any]),
    "register": (tuple[Registration], int),
    "pull": (tuple[str, int], Orders),
    "report": (tuple[Report], None),
    "cache": (tuple[str, int, CacheChanges], None),
    "drain": (tuple[str], None),
    "add": (tuple[int], list[str]),
    "stop": (tuple[float], None),
}
_ARGUMENTS = {name: msgspec.msgpack.Decoder(arguments) for name, (arguments, _) in CALLS.items()}
_RESULTS = {name: msgspec.msgpack.Decoder(result) for name, (_, result) in CALLS.items()}
_ANSWER: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(list[msgspec.Raw])
ERRORS: dict[str, type[Exception]] = {one.__name__: one for one in (StaleEpoch, WorkerRefused)}


async def answer_call(target: Any, method: str, data: bytes) -> bytes:
    """Call `method` of `target` with encoded arguments. Returns the encoded result, or one of ERRORS."""
    try:
        result = await getattr(target, method)(*_ARGUMENTS[method].decode(data))
    except tuple(ERRORS.values()) as error:
        return encode(["error", type(error).__name__, str(error)])
    return encode(["result", result])


def result_of(method: str, data: bytes) -> Any:
    """The result in the answer to a call. Raises one of ERRORS."""
    kind, *rest = _ANSWER.decode(data)
    if msgspec.msgpack.decode(kind) == "error":
        name, message = (msgspec.msgpack.decode(one) for one in rest)
        raise ERRORS[name](message)
    return _RESULTS[method].decode(rest[0])
