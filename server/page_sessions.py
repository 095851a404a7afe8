"""Sessions of the page: a browser proves its API key once, and then sends a cookie that counts as the key for an hour."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from .keys import ApiKey, ApiKeys

COOKIE = "pagetide_session"
SESSION_S = 3600
MOST_SESSIONS = 32  # of a key; a further one ends its oldest
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class PageSession:
    """A session. It keeps digests alone, so that nothing in memory can be sent as a cookie or a key."""

    digest: bytes  # of the cookie's value
    key_digest: bytes
    ends_at: float  # by the clock of the sessions


class PageSessions:
    """The sessions of a server, in memory only. One ends by time, with its key, or by `end`.

    Args:
        keys: The keys of the server, of which one is looked up each time: a session of a removed key finds none.
        clock: Seconds, monotonic.
    """

    def __init__(self, keys: ApiKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._clock = clock
        self._sessions: dict[bytes, PageSession] = {}  # by their digest, oldest first

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, key: ApiKey) -> str:
        """Begin a session of `key`. Returns the value of its cookie: 256 random bits."""
        self._forget_ended()
        ours = [one for one in self._sessions.values() if one.key_digest == key.digest]
        for one in ours[: max(len(ours) - MOST_SESSIONS + 1, 0)]:
            del self._sessions[one.digest]
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        session = PageSession(_digest(token), key.digest, self._clock() + SESSION_S)
        self._sessions[session.digest] = session
        return token

    def find(self, cookie: str | None) -> PageSession | None:
        """The session of a Cookie header; None if it names none, or one that has ended.

        Looked up by the SHA-256 of what the client sent: how long that takes tells nothing of another session's value.
        """
        token = _token(cookie)
        session = None if token is None else self._sessions.get(_digest(token))
        return session if session is not None and self.key_of(session) is not None else None

    def key_of(self, session: PageSession) -> ApiKey | None:
        """The key of a session; None once it has ended."""
        if self._sessions.get(session.digest) is not session or self._clock() >= session.ends_at:
            return None
        return self._keys.of_digest(session.key_digest)

    def end(self, session: PageSession) -> None:
        """End a session. Idempotent."""
        self._sessions.pop(session.digest, None)

    def _forget_ended(self) -> None:
        for one in [one for one in self._sessions.values() if self.key_of(one) is None]:
            del self._sessions[one.digest]


def set_cookie(token: str, secure: bool) -> str:
    """The Set-Cookie header that begins a session.

    Args:
        secure: Whether the client came by TLS.
    """
    return _cookie(token, SESSION_S, secure)


def clear_cookie(secure: bool) -> str:
    """The Set-Cookie header that takes the cookie away."""
    return _cookie("", 0, secure)


def _cookie(value: str, age_s: int, secure: bool) -> str:
    return f"{COOKIE}={value}; HttpOnly; SameSite=Strict; Path=/; Max-Age={age_s}" + ("; Secure" if secure else "")


def _token(cookie: str | None) -> str | None:
    # By hand: http.cookies gives up at a cookie of another program on this host that is no RFC 6265.
    for part in (cookie or "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value
    return None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
