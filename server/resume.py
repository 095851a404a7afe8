"""Durable requests: their ids, and streams that go on behind the last event that their reader has got.

An event of a durable stream has the id `BASE@CREATED/COUNTS`. BASE is the id of the response, and CREATED its `created`: a
request that was forgotten may have begun again under the same Idempotency-Key, with another output. COUNTS has, for each
choice, the number of records that are sent completely, separated by commas: "cmpl-5f...@1764171960/17,16". A record is a
`Piece` of the engine client; the event with the role of a chat's choice counts as one. "17.2": two events of the 18th record
are sent as well. "end": all choices are sent.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from .choices import DONE, event, joined, new_id
from .errors import ApiError, invalid
from .messages import Piece
from .streams import header_value

_KEY = re.compile(r"[!-~]{1,255}")
_COUNTS = r"end|\d{1,9}(?:\.\d{1,9})?(?:,\d{1,9}(?:\.\d{1,9})?)*"
_PLACE = re.compile(rf"((?:chat)?cmpl-[0-9a-f]{{24}})(?:@(\d{{1,12}}))?/({_COUNTS})", re.ASCII)
_END = "end"


@dataclass(frozen=True, slots=True)
class DurableRequest:
    """An HTTP request to a durable engine client: each of its prompts is a durable request.

    Attributes:
        base_id: The id of the response.
        tenant, fingerprint, most_requests, most_sequences: See `messages.Submit`.
        has_key: It has an Idempotency-Key: the client may come back, so its requests go on without it.
        place: COUNTS of its Last-Event-ID; None: it wants the stream from the first event on.
        created: CREATED of its Last-Event-ID; None: not compared.
    """

    base_id: str
    tenant: str
    fingerprint: str
    has_key: bool
    place: str | None
    created: int | None = None
    most_requests: int | None = None
    most_sequences: int | None = None

    @classmethod
    def of(cls, kind: str, headers: list[tuple[bytes, bytes]], tenant: str, body: bytes, streams: bool) -> DurableRequest:
        """The durable request of these headers and body. `kind` is the prefix of its id. Raises ApiError."""
        key, last = header_value(headers, b"idempotency-key"), header_value(headers, b"last-event-id")
        base_id, place, created = new_id(kind), None, None
        if key is not None:
            base_id = keyed_id(kind, tenant, key)
        if last is not None:
            found = _PLACE.fullmatch(last)
            if found is None or not found[1].startswith(f"{kind}-"):
                raise invalid(f"the Last-Event-ID {last!r:.200} is not the id of an event of this endpoint")
            if not streams:
                raise invalid("a Last-Event-ID continues a stream, and the request has no stream: true", "stream")
            if key is not None and found[1] != base_id:
                raise invalid("the Last-Event-ID is not of the request with this Idempotency-Key")
            base_id, place, created = found[1], found[3], None if found[2] is None else int(found[2])
        return cls(base_id, tenant, hashlib.sha256(body).hexdigest(), key is not None, place, created)

    def fields(self, number: int) -> dict[str, Any]:
        """The fields of `messages.Submit` for the prompt of this number."""
        return {
            "durable_id": f"{self.base_id}.{number}",
            "tenant": self.tenant,
            "fingerprint": self.fingerprint,
            "attach": self.place is not None,
            "most_requests": self.most_requests,
            "most_sequences": self.most_sequences,
        }


def keyed_id(kind: str, tenant: str, key: str) -> str:
    """The id of a tenant's response with this Idempotency-Key. `kind` is the prefix. Raises ApiError."""
    if not _KEY.fullmatch(key):
        raise invalid("an Idempotency-Key has 1 to 255 visible ASCII characters")
    return f"{kind}-{hashlib.sha256(json.dumps([tenant, key]).encode()).hexdigest()[:24]}"


class StreamPosition:
    """How far the stream of a response is, and which of its events the reader has already.

    Args:
        durable: None: events have no ids, and the reader has none of them.
        joins: Join records of a choice that came together, where one event is made of them. Without it, each is a portion.

    Raises ApiError if the reader's place is one in a stream with another number of choices.
    """

    def __init__(self, durable: DurableRequest | None, num_choices: int, joins: bool = True) -> None:
        self._durable = durable
        self._joins = joins or durable is None
        self._sent = [0] * num_choices  # records of each choice that are sent, now or before
        self._counts = ["0"] * num_choices  # what the reader has of each choice, as in COUNTS
        self._had: list[tuple[float, int]] = [(0, 0)] * num_choices  # records and further events that the reader has
        place = None if durable is None else durable.place
        if place == _END:
            self._had = [(inf, 0)] * num_choices
        elif place is not None:
            self._counts = place.split(",")
            self._had = [_count(one) for one in self._counts]
            if len(self._had) != num_choices or (joins and any(further for _, further in self._had)):
                raise invalid(f"the Last-Event-ID is not of this request, which has {num_choices:,} choices")
        self._had_all = place == _END
        self._created = 0

    def begin(self, created: int) -> int:
        """Take the `created` of the response, and return it. Raises ApiError if the reader has events of another one."""
        if self._durable is not None and self._durable.created not in (None, created):
            raise ApiError(
                404,
                "the request of this Last-Event-ID was forgotten, and another one began with its Idempotency-Key: send it "
                "without Last-Event-ID to get the whole output of that one",
                code="request_not_found",
            )
        self._created = created
        return created

    def portions(self, first: int, pieces: list[Piece]) -> list[tuple[int, int, Piece]]:
        """Portions of the next pieces of a prompt: the choice, the number of records, and these as one piece.

        Records that the reader has are not joined with others. Make the `events` of all portions before the next call.

        Args:
            first: The prompt's first choice.
        """
        if len(pieces) == 1:
            return [(first + pieces[0].index, 1, pieces[0])]
        groups: dict[tuple[int, int], list[Piece]] = {}
        counts: Counter[int] = Counter()
        for piece in pieces:
            choice = first + piece.index
            counts[choice] += 1
            record = self._sent[choice] + counts[choice]
            portion = int(record > self._had[choice][0]) if self._joins else record
            groups.setdefault((choice, portion), []).append(piece)
        return [(choice, len(several), joined(several)) for (choice, _), several in groups.items()]

    def events(self, choice: int, num_records: int, bodies: list[dict[str, Any]]) -> Iterator[bytes]:
        """The events of the next records of a choice, without those that the reader has."""
        before, (records, further) = self._sent[choice], self._had[choice]
        had = len(bodies) if before < records else further if before == records else 0
        self._sent[choice] += num_records
        for number, body in enumerate(bodies, 1):
            if number > had:
                self._counts[choice] = f"{before}.{number}" if number < len(bodies) else str(self._sent[choice])
                yield self._mark(self._counts) + event(body)

    def last(self, usage: dict[str, Any] | None) -> Iterator[bytes]:
        """The events behind all choices: the usage, if there is one, and the end of the stream."""
        mark = self._mark([_END])
        if usage is not None and not self._had_all:
            yield mark + event(usage)
        yield mark + DONE

    def _mark(self, counts: list[str]) -> bytes:
        """The line with the id of an event."""
        if self._durable is None:
            return b""
        return f"id: {self._durable.base_id}@{self._created}/{','.join(counts)}\n".encode()


def _count(text: str) -> tuple[float, int]:
    records, _, further = text.partition(".")
    return int(records), int(further or 0)
