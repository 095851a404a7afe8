"""The first layer of the server: host and origin, API keys, admission, limits of the body, request ids, the access log.

It stands between two layers for pages of other origins (CORS): a browser's question passes its checks of Host and Origin, and
all responses are marked, its refusals too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .admission import RequestAdmission
from .choices import json_encode
from .config import LOOPBACK, MOST_BODY_BYTES
from .errors import ApiError, error_body
from .keys import ApiKey, ApiKeys
from .page_sessions import PageSession, PageSessions
from .streams import TURN, has_arrived, has_left, header_value

log = logging.getLogger(__name__)
access_log = logging.getLogger("pagetide.access")

_DIGITS = 20  # of a body's length: `int` takes some thousands only
BODY_S = 30.0  # a body that takes longer is refused
OPEN_PATHS = ("/health", "/live", "/ready")
ADMIN_PATHS = ("/admin/", "/sleep", "/unload", "/wake_up")
COOKIE_PATHS = ("/page/", "/v1/")  # where the page's cookie counts as its key
KEYLESS_PATHS = ("/page/info", "/page/session")  # a key is looked for, and not needed
# That answer HEAD
HEAD_PATHS = (
    "/health",
    "/live",
    "/ready",
    "/version",
    "/metrics",
    "/load",
    "/page/info",
    "/v1/models",
    "/api/tags",
    "/api/version",
)
GENERATING_PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat", "/api/generate",
)  # fmt: skip
CONVERTING_PATHS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")  # take no place, and count for their key
# The status of a request whose client left before there was one, as nginx has it
LEFT = 499
EXPOSED_HEADERS = ("retry-after", "x-request-id")  # to pages of other origins
# Of the page and all that it asks for. It runs its own scripts alone, and is shown in no other page.
PAGE_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+))(?::[0-9]{0,5})?", re.ASCII)
_SCOPE_KEY = "pagetide.request"


@dataclass(slots=True)
class RequestContext:
    """What the first layer knows of a request."""

    request_id: str
    key: ApiKey | None = None
    session: PageSession | None = None  # that the key came from
    status: int = 0
    facts: dict[str, Any] = field(default_factory=dict)  # for the access log
    tokens: tuple[int, int] | None = None  # of the prompts and of the outputs, for the access log on a terminal
    is_refused: bool = False  # for what it says; 429 says when to send the same again

    @property
    def tenant(self) -> str:
        """The name of the key; "" without one."""
        return "" if self.key is None else self.key.name

    @classmethod
    def of(cls, scope: Scope) -> RequestContext:
        """The context of a request that passed the guard."""
        context = scope[_SCOPE_KEY]
        assert isinstance(context, cls)
        return context


@dataclass(frozen=True, slots=True)
class AccessEntry:
    """A request in the access log. Its text is JSON."""

    fields: dict[str, Any]
    tokens: tuple[int, int] | None  # of the prompts and of the outputs

    def __str__(self) -> str:
        return json.dumps(self.fields)


@dataclass(frozen=True, slots=True)
class GuardRules:
    """What the guard lets through.

    Attributes:
        hosts: Names in the Host header; empty allows all (a server beyond loopback).
        origins: Origins of pages that may call; "*" allows all.
        metrics_need_key: Whether `/metrics` needs a key, where there are keys.
        open_paths: Further paths that need no key: those of static files.
    """

    hosts: Sequence[str] = LOOPBACK
    origins: Sequence[str] = ()
    metrics_need_key: bool = True
    most_body_bytes: int = MOST_BODY_BYTES
    open_paths: Collection[str] = ()


class Guard:
    """An ASGI layer around `app`.

    Args:
        answered: Called after each request with its method, path, status and seconds.
        sessions: Those of the page; their cookies count as keys.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        admission: RequestAdmission,
        rules: GuardRules,
        answered: Callable[[str, str, int, float], None],
        sessions: PageSessions | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._admission = admission
        self._rules = rules
        self._answered = answered
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        given = header_value(scope["headers"], b"x-request-id") or ""
        context = RequestContext(given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16))
        scope[_SCOPE_KEY] = context
        of_page = scope["path"] in ("/", "/page") or scope["path"].startswith("/page/")

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                context.is_refused = 400 <= context.status < 500 and context.status not in (429, LEFT)
                headers = [*message.get("headers", ()), (b"x-request-id", context.request_id.encode())]
                given = {name for name, _ in headers}
                if not has_arrived(scope):  # the rest of the body is not read: the connection ends with the response
                    headers.append((b"connection", b"close"))
                message["headers"] = headers + [one for one in PAGE_HEADERS if of_page and one[0] not in given]
            await send(message)
            if message["type"] == "http.response.start" and has_left(scope):
                context.status = LEFT

        try:
            await self._pass(scope, context, receive, send_marked)
        except ApiError as error:
            await send_error(error, send_marked, scope["path"])
        except Exception:
            if has_left(scope):
                context.status = LEFT
                log.debug("the client of %s left", context.request_id, exc_info=True)
                return
            if context.status:
                raise
            log.exception("the request %s failed", context.request_id)
            await send_error(ApiError(500, "the server failed on this request; see its log"), send_marked, scope["path"])
        finally:
            seconds = time.monotonic() - began
            context.status = context.status or LEFT
            self._answered(scope["method"], scope["path"], context.status, seconds)
            self._log(scope, context, seconds)

    async def _pass(self, scope: Scope, context: RequestContext, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        self._check_host(scope)
        if method == "OPTIONS":  # a browser's question about CORS has no key
            await self._app(scope, receive, send)
            return
        context.key = self._check_key(path, scope, context)
        if method == "HEAD" and (path in HEAD_PATHS or path.startswith("/v1/models/")):
            scope = {**scope, "method": "GET"}  # the protocol leaves the body out
        with ExitStack() as stack:
            scope[TURN] = self._admission.turn(context.key)
            hold = stack.enter_context(self._admission.body(context.key))
            limited = _LimitedBody(scope, receive, self._rules.most_body_bytes, hold)
            if method == "POST" and path in GENERATING_PATHS:
                stack.enter_context(self._admission.request(context.key))
            elif method == "POST" and path in CONVERTING_PATHS:
                stack.enter_context(self._admission.call(context.key))
            await self._app(scope, limited, send)
            if context.is_refused:
                self._admission.charge_refused(context.key, limited.num_bytes)

    def _check_host(self, scope: Scope) -> None:
        """Refuse names that a web page could have bound to this address (DNS rebinding), and foreign pages."""
        given = [value for name, value in scope["headers"] if name == b"host"]
        if len(given) > 1:
            raise ApiError(400, "the request has several Host headers")
        host = given[0].decode("latin-1") if given else ""
        hosts = self._rules.hosts
        nameless = not given and scope["http_version"] == "1.0"  # no browser sends that
        if hosts and not nameless and ((found := _HOST.fullmatch(host)) is None or (found[1] or found[2]).lower() not in hosts):
            raise ApiError(403, f"this server does not answer as {host!r:.200}: use one of {', '.join(hosts)}")
        origin = header_value(scope["headers"], b"origin")
        foreign = header_value(scope["headers"], b"sec-fetch-site") in ("cross-site", "same-site")
        if origin is None and foreign and scope["method"] not in ("GET", "HEAD"):
            raise ApiError(403, "a page of another origin sent this request, without naming its origin")
        if origin is None or "*" in self._rules.origins or origin in self._rules.origins:
            return
        if origin.partition("://")[2] != host:
            raise ApiError(403, f"pages of {origin!r:.200} may not call this server: see --cors-origin")

    def _check_key(self, path: str, scope: Scope, context: RequestContext) -> ApiKey | None:
        authorization = header_value(scope["headers"], b"authorization")
        if authorization is None and (given := header_value(scope["headers"], b"x-api-key")):  # of Anthropic's clients
            authorization = f"Bearer {given}"
        is_open = path in OPEN_PATHS or path in self._rules.open_paths
        if is_open or (path == "/metrics" and not self._rules.metrics_need_key):
            return None
        key = self._keys.find(authorization) if authorization else self._key_of_cookie(path, scope, context)
        if path in KEYLESS_PATHS:
            return key
        if path.startswith(ADMIN_PATHS):
            if not self._keys.has_admin:
                raise ApiError(403, "there is no admin key: set PAGETIDE_ADMIN_KEY, or `admin: true` in the key file")
            if key is not None and not key.admin:
                raise ApiError(403, f"the key {key.name} is not an admin key")
        elif not self._keys.has_users:
            return key
        if key is None:
            message = (
                "the API key is wrong"
                if authorization
                else "there is no API key: send `Authorization: Bearer KEY`, or `x-api-key: KEY`"
            )
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return key

    def _key_of_cookie(self, path: str, scope: Scope, context: RequestContext) -> ApiKey | None:
        if self._sessions is None or not path.startswith(COOKIE_PATHS):
            return None
        session = self._sessions.find(header_value(scope["headers"], b"cookie"))
        if session is None or not is_same_origin(scope):
            return None
        context.session = session
        return self._sessions.key_of(session)

    def _log(self, scope: Scope, context: RequestContext, seconds: float) -> None:
        if not access_log.isEnabledFor(logging.INFO):
            return
        client = scope.get("client") or ("", 0)
        entry = {
            "method": scope["method"],
            "path": scope["path"],
            "status": context.status,
            "seconds": round(seconds, 4),
            "client": client[0],
            "request_id": context.request_id,
            "key": None if context.key is None else context.key.name,
            **context.facts,
        }
        access_log.info("%s", AccessEntry(entry, context.tokens))


def is_same_origin(scope: Scope) -> bool:
    """Whether a page of this server sent the request, and no other site in its name (CSRF).

    Browsers say where a request comes from; over plain HTTP from another machine they say nothing for GET, and no other
    site can read its answer.
    """
    headers = scope["headers"]
    if (site := header_value(headers, b"sec-fetch-site")) is not None:
        return site == "same-origin"
    if (origin := header_value(headers, b"origin")) is not None:
        return origin.partition("://")[2] == header_value(headers, b"host")
    return scope["method"] in ("GET", "HEAD")


class _LimitedBody:
    """The `receive` of a request whose body may not be too long, nor come too slowly. `hold` counts what arrives."""

    def __init__(self, scope: Scope, receive: Receive, most_bytes: int, hold: Callable[[int], None]) -> None:
        length = (header_value(scope["headers"], b"content-length") or "0").lstrip("0") or "0"
        if not length.isascii() or not length.isdigit() or len(length) > _DIGITS or int(length) > most_bytes:
            raise _too_large(most_bytes)
        self._receive = receive
        self._hold = hold
        self._most_bytes = most_bytes
        self.num_bytes = 0
        self._complete = False
        self._until = time.monotonic() + BODY_S

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout(max(self._until - time.monotonic(), 0.0)):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_S:g} s") from None
        if message["type"] == "http.request":
            self.num_bytes += (count := len(message.get("body", b"")))
            self._complete = not message.get("more_body", False)
            if self.num_bytes > self._most_bytes:
                raise _too_large(self._most_bytes)
            self._hold(count)
        return message


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"the body of a request may have {most_bytes:,} bytes at most")


async def send_error(error: ApiError, send: Send, path: str = "") -> None:
    """Send `error` as the response of the endpoint at `path`."""
    body = json_encode(error_body(error, path))
    headers = {"content-type": "application/json", "content-length": str(len(body))} | error.headers
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


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
