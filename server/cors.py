"""Cross-origin requests (CORS): the headers by which pages of other origins may read responses, the guard's refusals too.

The guard stands between the two layers: a browser's question passes its checks of Host and Origin, and all
responses are marked.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

EXPOSED_HEADERS = ("retry-after", "x-request-id")


class CorsHeaders(CORSMiddleware):
    """Marks the responses of `app` for pages of `origins`; "*" is all."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(app, allow_origins=origins, expose_headers=EXPOSED_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            await self.simple_response(scope, receive, send, Headers(scope=scope))
        else:
            await self.app(scope, receive, send)


class CorsQuestions(CORSMiddleware):
    """Answers what browsers ask before such a request ("preflight"), and leaves all else to `app`."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])

    async def simple_response(self, scope: Scope, receive: Receive, send: Send, request_headers: Headers) -> None:
        """Leave the request to `app`."""
        await self.app(scope, receive, send)
