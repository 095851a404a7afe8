"""JSON bodies of requests: large ones have a bounded number of values and are parsed beside the event loop.

A call of a JSON parser or of pydantic holds the GIL to its end, in whatever thread. What it costs depends on the number of
objects and texts more than on bytes: within these limits one call takes less than 0.1 s, and the loop runs between two calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_type_hints

import msgspec
from fastapi import HTTPException, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from .errors import ApiError, invalid
from .requests import from_validation

LARGE_BYTES = 64 << 10  # a body beyond it is large; others take 10 ms at most
# Of a large body:
MOST_VALUES = 5 << 18  # a context of a million token ids, and the rest of its request
MOST_TEXTS = 1 << 16  # names of fields too
MOST_CONTAINERS = 1 << 14  # objects and lists


class BodyRoute(APIRoute):
    """A route whose endpoint takes its body as the argument `body`, if it has one."""

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
    """A request whose large body is parsed and validated in a thread."""

    def __init__(self, scope: Any, receive: Any, kind: type[BaseModel] | None) -> None:
        super().__init__(scope, receive)
        self._kind = kind

    async def json(self) -> Any:
        """The body as JSON; if it is large, as an object of its class, which FastAPI takes as it is. Raises ApiError."""
        body = await self.body()
        if len(body) <= LARGE_BYTES:
            return await super().json()
        return await asyncio.get_running_loop().run_in_executor(_parsing, parse_large, body, self._kind)


# One thread: two would take the GIL from the loop twice as often.
_parsing = ThreadPoolExecutor(1, "pagetide-bodies")


def parse_large(body: bytes, kind: type[BaseModel] | None) -> Any:
    """`body` as an object of `kind`; None: as JSON. Raises ApiError."""
    check_counts(body)
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is no JSON: {error}") from None
    try:
        return data if kind is None else kind.model_validate(data)
    except ValidationError as error:
        raise from_validation(list(error.errors(include_url=False, include_input=False))) from None


def check_counts(body: bytes) -> None:
    """Raise ApiError if a body has more values than a large one may have. Counts only: it need not be JSON."""
    plain = body.replace(b"\\\\", b"").replace(
        b'\\"', b""
    )  # of what is left, every quotation mark begins or ends a text
    num_texts = plain.count(b'"') // 2
    _check(num_texts, MOST_TEXTS, "texts and names")
    structure = b"".join(plain.split(b'"')[::2])
    _check(structure.count(b"{") + structure.count(b"["), MOST_CONTAINERS, "objects and lists")
    _check(structure.count(b","), MOST_VALUES, "values")


def _check(count: int, most: int, what: str) -> None:
    if count > most:
        raise invalid(
            f"the body has {count:,} {what}; a body of more than {LARGE_BYTES:,} bytes may have {most:,}: send several requests"
        )
