"""uvicorn's HTTP protocol with limits on the head of a request, and on the times in which it arrives and its response is read.

A response may come before its request has arrived: a refusal, for one. The connection then ends with it, gently: closing a
socket with unread data resets the connection, and a reset can overtake the response. So the server says that it sends no more,
and drops what still comes until the client closes, for LINGER_S at most (RFC 9112, 9.6).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .choices import json_encode
from .errors import ApiError
from .streams import ARRIVED, LEFT

log = logging.getLogger(__name__)

MOST_HEAD_BYTES = 64 << 10
MOST_FIELDS = 128  # headers and trailers of a request
# A connection has this long for the head of a request, and this long once its response is sent for the rest
HEAD_S = 30.0
# A client that reads less than STALL_BYTES in this time, while more waits for it, is cut off
STALL_S = 60.0
STALL_BYTES = 64 << 10
_BODY_SHARE = 8  # bytes that chunks of one byte each need beside the body
LINGER_S = 2.0
MOST_LINGERING = 128  # connections at the same time; further ones are closed at once


class _HeadTooLarge(Exception):
    """The head or the trailers of a request are too large."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. uvicorn limits neither the bytes before and after a body nor their time, nor that of a response."""

    lingering: ClassVar[set[BoundedHttpProtocol]] = set()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._extra_bytes = 0  # of this request beside its body
        self._field_bytes = self._num_fields = 0  # of its headers and trailers
        self._arriving = True  # the next request, or the rest of one
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._last_error: ApiError | None = None  # to be sent once the requests before it are answered
        self._answering: RequestResponseCycle | None = None  # `cycle` is the last request, which may wait for this one
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting, and tell the application."""
        self._stop_waiting()
        self._stop_stall()
        self.lingering.discard(self)
        if (answering := self._answering) is not None and not answering.response_complete:
            answering.disconnected = True
            answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse `data`."""
        if self in self.lingering or self._last_error is not None:
            return
        self._extra_bytes += len(data)
        super().data_received(data)
        if self._arriving and self._extra_bytes > MOST_HEAD_BYTES and not self._is_ending:
            self._refuse(_too_large())

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._extra_bytes = self._field_bytes = self._num_fields = 0
        self._arriving = True
        self._wait()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        self._field_bytes += len(name) + len(value)
        self._num_fields += 1
        if self._field_bytes > MOST_HEAD_BYTES or self._num_fields > MOST_FIELDS:
            self._refusal = _too_large()
            raise _HeadTooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head of a request has arrived: its application starts."""
        before = self.cycle
        super().on_headers_complete()
        if (cycle := self.cycle) is not before:
            self.scope[ARRIVED] = lambda: not cycle.more_body  # type: ignore[literal-required]
            self.scope[LEFT] = lambda: (  # type: ignore[literal-required]
                not cycle.response_complete and (cycle.disconnected or self.transport.is_closing())
            )
            if self.scope["http_version"] == "1.0":
                cycle.send = _WithoutChunks(cycle)  # type: ignore[method-assign]
            cycle.transport = _ResponseTransport(cycle.transport, self.end)  # type: ignore[assignment]

    def on_response_complete(self) -> None:
        """A response has been sent: begin to wait for the next request, if the connection stays."""
        if self in self.lingering:
            self.flow.resume_reading()
        else:
            super().on_response_complete()
            if self._last_error is not None and self.cycle.response_complete and not self._is_ending:
                self._refuse(self._last_error)

    def pause_writing(self) -> None:
        """The client does not read what was written: it has STALL_S."""
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        """The client has read most of what was written."""
        self._stop_stall()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """No further request came. What the last response still has to be read is dropped."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

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
        """Answer with `error` unless a response is under way, and close the connection. Earlier requests are answered first."""
        if self.pipeline and self.cycle.more_body:  # it is this request, which has not begun
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._answering  # type: ignore[assignment]
        if self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body:
            self._last_error, self._arriving = error, True
            self._stop_waiting()
            return
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
            if self._stall_timer is None and self.transport.get_write_buffer_size():
                self._watch_stall()
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

    def _watch_stall(self) -> None:
        self._stop_stall()
        self._stall_timer = self.loop.call_later(STALL_S, self._stalled, self.transport.get_write_buffer_size())

    def _stop_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _stalled(self, before_bytes: int) -> None:
        """STALL_S after `before_bytes` were unread."""
        if before_bytes - self.transport.get_write_buffer_size() >= STALL_BYTES:
            self._watch_stall()  # it reads a long response, slowly
            return
        log.warning("a client is cut off: it has read too little of its response for %g s", STALL_S)
        self.transport.abort()

    def _late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait()  # for the response: the application limits the time of its body
        elif not self._is_ending:
            self._refuse(ApiError(408, f"the request did not arrive within {HEAD_S:g} s"))


class _WithoutChunks:
    """The `send` of a request of HTTP/1.0, which has no chunks: a response without a length ends with its connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_length = True

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif not self._has_length:
            self._cycle.expected_content_length = len(message.get("body", b""))  # of this part
        await self._send(message)


class _ResponseTransport:
    """The transport of one request's response; its `close` is that of the connection. What the client left is dropped."""

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        self._transport = transport
        self.is_closing = transport.is_closing
        self.close = end

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():  # uvloop's raises then
            self._transport.write(data)


def _too_large() -> ApiError:
    return ApiError(431, f"the head of a request may have {MOST_HEAD_BYTES:,} bytes and {MOST_FIELDS} headers at most")
