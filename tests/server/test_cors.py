"""Pages of other origins read every answer, refusals too; pages of foreign ones get none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")
from page_rig import PageServer

from pagetide.server.app import AppOptions
from pagetide.server.guard import GuardRules
from pagetide.server.keys import ApiKey, ApiKeys, digest_of

ORIGIN = "https://app.example"
KEY = {"Authorization": "Bearer sk-alice-1234"}
ASK = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
KEYS = ApiKeys([ApiKey("alice", digest_of("sk-alice-1234"))])


@pytest.mark.parametrize("origins", [(ORIGIN,), ("*",)])
@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v1/models", KEY, 200),
        ("GET", "/v1/models", {}, 401),
        ("GET", "/v1/models/none", KEY, 404),
        ("POST", "/sleep", KEY, 403),
        ("POST", "/v1/completions", KEY | {"X-Body-Bytes": "100"}, 413),
        ("POST", "/v1/completions", KEY, 429),
        ("OPTIONS", "/v1/completions", ASK, 200),
    ],
)
def test_pages_of_an_allowed_origin_read_every_answer(
    origins: tuple[str, ...], method: str, path: str, headers: dict[str, str], status: int
) -> None:
    found = asyncio.run(asked(origins, method, path, headers | {"Origin": ORIGIN}))
    assert found.status_code == status
    assert found.headers["access-control-allow-origin"] in (ORIGIN, "*")
    assert "x-request-id" in found.headers
    if method != "OPTIONS":
        assert found.headers["access-control-expose-headers"] == "retry-after, x-request-id"


@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
@pytest.mark.parametrize(
    "headers", [{"Origin": "https://evil.example"}, {"Origin": ORIGIN, "Host": "evil.example"}], ids=["origin", "host"]
)
def test_foreign_pages_and_hosts_are_refused(method: str, headers: dict[str, str]) -> None:
    found = asyncio.run(asked((ORIGIN,), method, "/health", ASK | headers))
    assert found.status_code == 403
    assert found.headers.get("access-control-allow-origin") != "https://evil.example"


async def asked(origins: tuple[str, ...], method: str, path: str, headers: dict[str, str]) -> Any:
    """The answer of a server with an empty queue."""
    options = AppOptions(rules=GuardRules(origins=origins, most_body_bytes=50))
    async with PageServer(keys=KEYS, options=options) as server, server.client() as client:
        server.server.admission.num_places = server.server.admission.limit
        body = b" " * int(headers.pop("X-Body-Bytes", "0"))
        return await client.request(method, path, headers=headers, content=body)
