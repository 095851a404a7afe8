"""Bodies of requests: JSON, whatever their content type. Large ones have a bounded number of values, and a thread parses them.

A call of a JSON parser or of pydantic holds the GIL to its end, in whatever thread. What it costs depends on the number of
objects and texts more than on bytes: within these limits one call takes less than 0.1 s, and the loop runs between two calls.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, get_type_hints

import msgspec
from fastapi import HTTPException, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers

from .engine_client import MOST_DEPTH
from .errors import ApiError, invalid
from .requests import from_validation
from .streams import TURN

# A body beyond it is large; others take 1 ms at most, right or wrong
LARGE_BYTES = 4 << 10
# Of a large body:
MOST_VALUES = 5 << 18  # a context of a million token ids, and the rest of its request
MOST_TEXTS = 1 << 16  # names of fields too
MOST_CONTAINERS = 1 << 14  # objects and lists
_GZIP = b"\x1f\x8b"
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # 1 and -1, signed
_OTHERS = bytes(set(range(256)) - set(b"[{]}"))


class BodyRoute(APIRoute):
    """A route with an endpoint that takes its body as the argument `body`, if it has one."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of a request."""
        handle = super().get_route_handler()
        kind = get_type_hints(self.endpoint).get("body")

        async def handle_large(request: Request) -> Response:
            try:
                return await handle(_JsonRequest(request.scope, request.receive, kind))
            except HTTPException as error:
                if isinstance(error.__cause__, ApiError):  # FastAPI replaces what reading a body raises
                    raise error.__cause__ from None
                raise

        return handle_large


class _JsonRequest(Request):
    """A request; if its body is large, it is parsed and validated in a thread."""

    def __init__(self, scope: Any, receive: Any, kind: type[BaseModel] | None) -> None:
        super().__init__(scope, receive)
        self._kind = kind

    @property
    def headers(self) -> Headers:
        """Those of the request, but the content type is JSON: FastAPI parses no other, and curl says another unless told.

        Pages of other origins could send other types without asking first; the guard refuses their Origin.
        """
        others = [(name, value) for name, value in self.scope["headers"] if name != b"content-type"]
        return Headers(raw=[*others, (b"content-type", b"application/json")])

    async def json(self) -> Any:
        """The body as JSON; if it is large, as an object of its class, which FastAPI takes as it is. Raises ApiError."""
        body = await self.body()
        check_encoding(body, self.headers.get("content-encoding", ""))
        if len(body) <= LARGE_BYTES:
            return parse_small(body)
        async with self.scope.get(TURN) or asyncio.Lock():  # keys in turns
            return await asyncio.get_running_loop().run_in_executor(_parsing, parse_large, body, self._kind)


# One thread: two would take the GIL from the loop twice as often.
_parsing = ThreadPoolExecutor(1, "pagetide-bodies")


def check_encoding(body: bytes, encoding: str) -> None:
    """Raise ApiError for a compressed body, with or without the header that says so."""
    if encoding.strip().lower() not in ("", "identity") or body.startswith(_GZIP):
        named = encoding.strip() or "gzip"
        raise ApiError(415, f"the body is compressed ({named!r:.80}), which this server does not accept: send plain JSON")


def parse_small(body: bytes) -> Any:
    """A small body as JSON. Raises ApiError."""
    text = _decoded(body)
    if body.count(b"[") + body.count(b"{") > MOST_DEPTH:
        check_depth(_structure(_plain(body)))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from None


def _decoded(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(
            f"the body is not UTF-8: its byte {error.start:,} is 0x{body[error.start]:02x}; JSON is sent in UTF-8"
        ) from None


def parse_large(body: bytes, kind: type[BaseModel] | None) -> Any:
    """`body` as an object of `kind`; None: as JSON. Raises ApiError."""
    _decoded(body)
    check_depth(_structure(_plain(body)))
    check_counts(body)
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from None
    try:
        return data if kind is None else kind.model_validate(data)
    except ValidationError as error:
        raise from_validation(list(error.errors(include_url=False, include_input=False))) from None


def check_counts(body: bytes) -> None:
    """Raise ApiError if a body has more values than a large one may have. Counts only: it need not be JSON."""
    plain = _plain(body)
    num_texts = plain.count(b'"') // 2
    _check(num_texts, MOST_TEXTS, "texts and names")
    structure = _structure(plain)
    _check(structure.count(b"{") + structure.count(b"["), MOST_CONTAINERS, "objects and lists")
    _check(structure.count(b","), MOST_VALUES, "values")


def check_depth(structure: bytes) -> None:
    """Raise ApiError if what is outside the texts is nested too deeply. Reads as many objects and lists as a body may have."""
    steps = memoryview(structure.translate(_STEPS, _OTHERS)[: 2 * MOST_CONTAINERS + 2]).cast("b")
    if max(accumulate(steps), default=0) > MOST_DEPTH:
        raise invalid(f"the body nests objects and lists too deeply: the limit is {MOST_DEPTH} levels")


def _plain(body: bytes) -> bytes:
    """`body` without escapes: of what is left, every quotation mark begins or ends a text."""
    return body.replace(b"\\\\", b"").replace(b'\\"', b"")


def _structure(plain: bytes) -> bytes:
    """What is outside the texts."""
    return b"".join(plain.split(b'"')[::2])


def _check(count: int, most: int, what: str) -> None:
    if count > most:
        raise invalid(
            f"the body has {count:,} {what}; a body of more than {LARGE_BYTES:,} bytes may have {most:,}: send several requests"
        )
