"""uvicorn's HTTP protocol with limits on the head of a request and on the time in which a request arrives.

A response may come before its request has arrived: a refusal, for one. The connection then ends with it, gently: closing a
socket with unread data resets the connection, and a reset can overtake the response. So the server says that it sends no more,
and drops what still comes until the client closes, for LINGER_S at most (RFC 9112, 9.6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .choices import json_encode
from .errors import ApiError
from .streams import ARRIVED

MOST_HEAD_BYTES = 64 << 10
HEAD_S = (
    30.0  # a connection has this long for the head of a request, and this long once its response is sent for the rest
)
_BODY_SHARE = 8  # bytes that chunks of one byte each need beside the body
LINGER_S = 2.0
MOST_LINGERING = 128  # connections at the same time; further ones are closed at once


class _HeadTooLarge(Exception):
    """The head or the trailers of a request are too large."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. uvicorn limits neither the bytes before and after a body nor their time."""

    lingering: ClassVar[set[BoundedHttpProtocol]] = set()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._extra_bytes = 0  # of this request beside its body
        self._field_bytes = 0  # of its headers and trailers
        self._arriving = True  # the next request, or the rest of one
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        self.lingering.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse `data`."""
        if self in self.lingering:
            return
        self._extra_bytes += len(data)
        super().data_received(data)
        if self._arriving and self._extra_bytes > MOST_HEAD_BYTES and not self._is_ending:
            self._refuse(_too_large())

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._extra_bytes = self._field_bytes = 0
        self._arriving = True
        self._wait()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        self._field_bytes += len(name) + len(value)
        if self._field_bytes > MOST_HEAD_BYTES:
            self._refusal = _too_large()
            raise _HeadTooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head of a request has arrived: its application starts."""
        before = self.cycle
        super().on_headers_complete()
        if (cycle := self.cycle) is not before:
            self.scope[ARRIVED] = lambda: not cycle.more_body  # type: ignore[literal-required]
            cycle.transport = _ResponseTransport(cycle.transport, self.end)  # type: ignore[assignment]

    def on_response_complete(self) -> None:
        """A response has been sent: begin to wait for the next request, if the connection stays."""
        if self in self.lingering:
            self.flow.resume_reading()
        else:
            super().on_response_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._extra_bytes = max(self._extra_bytes - _BODY_SHARE * len(body), 0)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of a request has arrived."""
        self._arriving = False
        self._stop_waiting()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, and a head that is too large."""
        self._refuse(self._refusal or ApiError(400, msg))

    def _refuse(self, error: ApiError) -> None:
        """Answer with `error` unless a response is under way, and close the connection."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = json_encode(error.body)
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode("ascii") + body)
        if self.cycle is not None and not self.cycle.response_complete:  # the application writes no more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.end()

    def end(self) -> None:
        """Close the connection after what was written; if a request has not arrived whole, once the client has read it."""
        if self in self.lingering:
            return
        if not self._arriving or len(self.lingering) >= MOST_LINGERING or self.transport.is_closing():
            self.transport.close()
            return
        self.lingering.add(self)
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # not with TLS: there the response says that it is the last
            self.transport.write_eof()
        self._stop_waiting()
        self._timer = self.loop.call_later(LINGER_S, self.transport.abort)

    @property
    def _is_ending(self) -> bool:
        return self in self.lingering or self.transport.is_closing()

    def _wait(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(HEAD_S, self._late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait()  # for the response: the application limits the time of its body
        elif not self._is_ending:
            self._refuse(ApiError(408, f"the request did not arrive within {HEAD_S:g} s"))


class _ResponseTransport:
    """The transport of one request's response, whose `close` is that of the connection."""

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        self._transport = transport
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = end


def _too_large() -> ApiError:
    return ApiError(431, f"the head of a request may have {MOST_HEAD_BYTES:,} bytes at most")
