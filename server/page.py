"""The page: its static files, its sessions, and what it asks for of the engines."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response

from ..version import __version__
from .choices import json_encode
from .errors import ApiError
from .feed import DEFAULT_RATE, PageFeed
from .guard import RequestContext, is_same_origin
from .keys import ApiKeys
from .models import ModelRegistry
from .page_sessions import PageSessions, clear_cookie, set_cookie
from .streams import StreamedResponse, header_value

FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
}
_NO_STORE = {"cache-control": "no-store"}


class _File(NamedTuple):
    content: bytes
    media_type: str
    tag: str


class PageFiles:
    """The static files of the page, read once. A path is looked up among theirs, so none leads anywhere else."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {f"/page/{path.relative_to(folder).as_posix()}": _read(path) for path in _pages(folder)}
        if "/page/index.html" in self._files:
            self._files["/page/"] = self._files["/page/index.html"]

    @property
    def paths(self) -> frozenset[str]:
        """The paths of requests that get a file, or are led to one."""
        return frozenset(self._files) | {"/", "/page", "/page/"}

    def add_to(self, app: FastAPI) -> None:
        """Add the endpoints. Those of other paths below /page are to be added before."""

        @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
        @app.api_route("/page", methods=["GET", "HEAD"], include_in_schema=False)
        async def to_page() -> Response:
            return RedirectResponse("/page/", 307)

        @app.api_route("/page/{path:path}", methods=["GET", "HEAD"], include_in_schema=False)
        async def file(request: Request) -> Response:
            found = self._files.get(request.scope["path"])
            if found is None:
                raise ApiError(404, f"there is no {request.url.path}")
            headers = {"etag": found.tag}
            if header_value(request.scope["headers"], b"if-none-match") == found.tag:
                return Response(status_code=304, headers=headers)
            return Response(found.content, headers=headers, media_type=found.media_type)


def _pages(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in _TYPES and path.is_file():
            yield path


def _read(path: Path) -> _File:
    content = path.read_bytes()
    return _File(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


class PageEndpoints:
    """The page of a server.

    Args:
        files: The static files; replaced by tests.
    """

    def __init__(self, models: ModelRegistry, keys: ApiKeys, files: PageFiles | None = None) -> None:
        self.files = PageFiles() if files is None else files
        self.feed = PageFeed(models)
        self.sessions = PageSessions(keys)
        self._models = models
        self._keys = keys

    def add_to(self, app: FastAPI) -> None:
        """Add the endpoints."""
        self._add_session(app)
        self._add_views(app)
        self.files.add_to(app)

    def _add_session(self, app: FastAPI) -> None:
        @app.get("/page/info", include_in_schema=False)
        async def info(request: Request) -> Response:
            key = RequestContext.of(request.scope).key
            return _json(
                {
                    "mode": "live",
                    "needs_key": self._keys.has_users,
                    "has_keys": bool(self._keys),
                    "signed_in": key is not None,
                    "admin": key is not None and key.admin,
                    "version": __version__,
                }
            )

        @app.post("/page/session", include_in_schema=False)
        async def begin(request: Request) -> Response:
            context = RequestContext.of(request.scope)
            names = {name for name, _ in request.scope["headers"]}
            if names & {b"origin", b"sec-fetch-site"} and not is_same_origin(request.scope):
                raise ApiError(403, "only the page of this server may begin a session")
            if context.key is None or context.session is not None:
                message = "the API key is unknown: send `Authorization: Bearer KEY` with one of this server's keys"
                raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
            cookie = set_cookie(self.sessions.begin(context.key), request.scope["scheme"] == "https")
            return _json({"admin": context.key.admin}, {"set-cookie": cookie})

        @app.delete("/page/session", include_in_schema=False)
        async def end(request: Request) -> Response:
            context = RequestContext.of(request.scope)
            if context.session is not None:
                self.sessions.end(context.session)
            return _json({"signed_in": False}, {"set-cookie": clear_cookie(request.scope["scheme"] == "https")})

    def _add_views(self, app: FastAPI) -> None:
        @app.get("/page/events", include_in_schema=False)
        async def events(request: Request, rate: float = DEFAULT_RATE) -> Response:
            context = RequestContext.of(request.scope)
            session, name = context.session, None if context.key is None else context.key.name

            def may_look() -> bool:
                return session is None or self.sessions.key_of(session) is not None

            held = AsyncExitStack()
            viewer = held.enter_context(self.feed.viewer(rate, name, may_look))
            stream = StreamedResponse(viewer.events(), held)
            stream.headers["x-accel-buffering"] = "no"  # nginx would keep the frames back
            return stream

        @app.get("/page/block", include_in_schema=False)
        async def block(request: Request, block: int, model: str | None = None) -> Response:
            key = RequestContext.of(request.scope).key
            engine = self._models.get(model).engine
            return _json(await engine.call("block", block=block, text=key is not None and key.admin))

        @app.get("/page/explain", include_in_schema=False)
        async def explain(model: str | None = None, request: str | None = None) -> Response:
            one = self._models.get(model)
            if request is not None:
                return _json(await one.engine.call("explain", request=request))
            left = [each.departure for each in self._models if each.departure is not None]
            unloads = [{"what": "unload", **asdict(each)} for each in left if one.name in (each.victim, each.taker)]
            decisions = await one.engine.call("explain", request=None) if one.can_serve else []
            return _json([*sorted(unloads, key=lambda each: each["at"]), *decisions])


def _json(data: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(json_encode(data), 200, _NO_STORE | (headers or {}), "application/json")
