"""Pages of other origins read every answer, refusals too; pages of foreign ones get none."""

from __future__ import annotations

from page_rig import ALICE, PageServer, two_keys

from pagetide.server.app import AppOptions
from pagetide.server.guard import GuardRules

ORIGIN = "https://app.example"
ASK = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


ASKED = [
    ("GET", "/v1/models", ALICE, 200),
    ("GET", "/v1/models", {}, 401),
    ("GET", "/v1/models/none", ALICE, 404),
    ("POST", "/sleep", ALICE, 403),
    ("POST", "/v1/completions", ALICE | {"X-Body-Bytes": "100"}, 413),
    ("POST", "/v1/completions", ALICE, 429),
    ("OPTIONS", "/v1/completions", ASK, 200),
]


async def test_pages_of_an_allowed_origin_read_every_answer_and_foreign_ones_none() -> None:
    for origins in ((ORIGIN,), ("*",)):
        options = AppOptions(rules=GuardRules(origins=origins, most_body_bytes=50))
        async with PageServer(keys=two_keys(), options=options) as server, server.client() as client:
            server.server.admission.num_places = server.server.admission.limit  # its queue is full
            for method, path, headers, status in ASKED:
                body = b" " * int(headers.get("X-Body-Bytes", "0"))
                found = await client.request(method, path, headers=headers | {"Origin": ORIGIN}, content=body)
                assert found.status_code == status and "x-request-id" in found.headers, (method, path)
                assert found.headers["access-control-allow-origin"] in (ORIGIN, "*")
                if method != "OPTIONS":
                    assert found.headers["access-control-expose-headers"] == "retry-after, x-request-id"
            for foreign in ({"Origin": "https://evil.example"}, {"Origin": ORIGIN, "Host": "evil.example"}):
                for method in ("GET", "OPTIONS") if origins == (ORIGIN,) else ():
                    found = await client.request(method, "/health", headers=ASK | foreign)
                    assert found.status_code == 403, foreign
                    assert found.headers.get("access-control-allow-origin") != "https://evil.example"
