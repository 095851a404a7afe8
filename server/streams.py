"""Responses that are streams, and the end of a request whose client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .choices import EVENTS, PART_BYTES, error_event
from .engine_client import Detached, EngineUnavailable, RequestFailed, SlowReader
from .errors import ApiError, from_engine

log = logging.getLogger(__name__)

MOST_WHOLE_BYTES = 1 << 20  # of a JSON body that is sent whole
ARRIVED = "pagetide.arrived"  # in a scope: whether all of the request has arrived
LEFT = "pagetide.left"  # in a scope: whether the client is gone
# In a scope: the lock of its key, for work of which one key has one piece at a time
TURN = "pagetide.turn"

COMMENT = b": the model is being loaded\n\n"
PAUSED = b": the answer goes on\n\n"
QUIET_S = 10.0  # after so long without a byte a stream gets a comment: proxies and clients end silent ones

Value = TypeVar("Value")


class ClientLeft(Exception):
    """The client closed the connection before its response was complete."""


class StreamedResponse(Response):
    """Sends `parts` as they come, each of which is released when it is sent. An error becomes the last part.

    Args:
        held: Closed at the end, however it comes: complete, failed, left or cut off.
        failed: Makes the last part of a response that fails.
    """

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        held: AsyncExitStack,
        failed: Callable[[ApiError], bytes] = error_event,
        media_type: str = EVENTS,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache"}, media_type=media_type)
        del self.headers["content-length"]
        self._parts = parts
        self._held = held
        self._failed = failed
        self._was_sent = False  # something, since `_comment` looked last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_left(self._send_all(send), receive)
        except ClientLeft:
            log.debug("the client left a stream")
        except SlowReader as error:
            log.warning("a stream is cut off: %s", error)
        except Detached:
            log.debug("a stream is closed before its end: its client can continue it elsewhere")
        finally:
            await self._held.aclose()

    async def _send_all(self, send: Send) -> None:
        num_bytes = 0  # since the event loop has turned
        commenting = asyncio.create_task(self._comment(send)) if self.media_type == EVENTS else None
        try:
            async for data in self._parts:
                self._was_sent = True
                await send({"type": "http.response.body", "body": data, "more_body": True})
                if (num_bytes := num_bytes + len(data)) > PART_BYTES:
                    num_bytes = 0
                    await asyncio.sleep(0)
        except Detached:
            raise
        except (ApiError, RequestFailed, EngineUnavailable) as error:
            api_error = error if isinstance(error, ApiError) else from_engine(error)
            await send({"type": "http.response.body", "body": self._failed(api_error), "more_body": True})
        finally:
            if commenting is not None:
                commenting.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _comment(self, send: Send) -> None:
        """Send comments while a stream of events is silent, as that of a suspended request."""
        while True:
            self._was_sent = False
            await asyncio.sleep(QUIET_S)
            if not self._was_sent:
                await send({"type": "http.response.body", "body": PAUSED, "more_body": True})


class AwaitedStream(StreamedResponse):
    """The stream that `making` makes, with comments before it.

    Args:
        failed: Makes the last part if there is no stream to say it.
    """

    def __init__(self, making: asyncio.Task[Response], failed: Callable[[ApiError], bytes]) -> None:
        held = AsyncExitStack()
        held.push_async_callback(self._end)
        super().__init__(self._commented(), held, failed)
        self._making = making

    async def _commented(self) -> AsyncIterator[bytes]:
        while not self._making.done():
            yield COMMENT
            await asyncio.wait({self._making}, timeout=QUIET_S)
        try:
            made = self._making.result()
        except (ApiError, RequestFailed, EngineUnavailable, ClientLeft):
            raise
        except Exception as error:
            log.exception("a stream failed before it was made")
            raise ApiError(500, "the server failed on this request; see its log") from error
        assert isinstance(made, StreamedResponse)
        self._failed = made._failed
        async for part in made._parts:
            yield part

    async def _end(self) -> None:
        await _cut_off(self._making)


async def awaited_stream(making: Coroutine[Any, Any, Response], failed: Callable[[ApiError], bytes]) -> Response:
    """The response that `making` makes; a stream of server-sent events begins with comments after QUIET_S.

    Raises what `making` raises until then; later `failed` makes an event of it.
    """
    task = asyncio.create_task(making)
    try:
        await asyncio.wait({task}, timeout=QUIET_S)
    except asyncio.CancelledError:
        await _cut_off(task)
        raise
    return task.result() if task.done() else AwaitedStream(task, failed)


async def _cut_off(making: asyncio.Task[Response]) -> None:
    """End the making of a response, or close one that is made."""
    making.cancel()
    (made,) = await asyncio.gather(making, return_exceptions=True)
    if isinstance(made, StreamedResponse):
        await made._held.aclose()


async def json_response(parts: AsyncIterator[bytes], receive: Receive, hold: Callable[[], AsyncExitStack]) -> Response:
    """A response of these parts: whole if it is short.

    Args:
        hold: Gives what is to be closed once a long one is sent.

    Raises ClientLeft, and what the first part raises.
    """
    first: list[bytes] = []

    async def begin() -> bool:
        async for part in parts:
            first.append(part)
            if sum(map(len, first)) > MOST_WHOLE_BYTES:
                return False
        return True

    async def every() -> AsyncIterator[bytes]:
        while first:
            yield first.pop(0)
        async for part in parts:
            yield part

    if await unless_left(begin(), receive):
        return Response(b"".join(first), media_type="application/json")
    return StreamedResponse(every(), hold(), media_type="application/json")


async def unless_left(work: Awaitable[Value], receive: Receive) -> Value:
    """The result of `work`, which is cancelled if the client leaves. Raises ClientLeft then.

    The body of the request has been read.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft("the client closed the connection")
        return working.result()
    finally:
        for task in (working, leaving):
            if not task.done():
                task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def has_arrived(scope: Scope) -> bool:
    """Whether all of a request has arrived. True if the protocol does not say."""
    return bool(scope.get(ARRIVED, lambda: True)())


def has_left(scope: Scope) -> bool:
    """Whether the client of a request is gone. False if the protocol does not say."""
    return bool(scope.get(LEFT, lambda: False)())


def header_value(headers: list[tuple[bytes, bytes]], name: bytes) -> str | None:
    """The first header of this name, in lower case; None if there is none."""
    return next((value.decode("latin-1") for key, value in headers if key == name), None)
