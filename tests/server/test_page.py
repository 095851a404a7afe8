"""The page's endpoints over real sockets: static files, sessions by cookie, headers, and what each key may see."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from page_pools import POLICY
from page_rig import ALICE, FAR_S, OPS, MadeUpEngine, PageServer, eventually, looking, two_keys

from pagetide.server import page_sessions
from pagetide.server.keys import ApiKey, ApiKeys, digest_of
from pagetide.server.page_sessions import PageSessions, set_cookie
from pagetide.server.residency import Departure
from pagetide.version import __version__

HERE = {"Sec-Fetch-Site": "same-origin"}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "page"
    (folder / "parts").mkdir(parents=True)
    (tmp_path / "secret.js").write_text("no file of the page")
    (folder / "index.html").write_text("<!doctype html>")
    (folder / "parts" / "a.js").write_text("export {};")
    (folder / "notes.txt").write_text("no type of the page")
    return folder


async def cookie_of(client: Any, key: dict[str, str], **headers: str) -> dict[str, str]:
    """The Cookie header of a new session."""
    answer = await client.post("/page/session", headers=key | headers)
    assert answer.status_code == 200
    client.cookies.clear()
    return {"Cookie": answer.headers["set-cookie"].partition(";")[0]}


async def test_static_files_need_no_key(files: Path) -> None:
    async with PageServer(keys=two_keys(), files=files) as server, server.client() as client:
        for path in ("/", "/page"):
            moved = await client.get(path)
            assert (moved.status_code, moved.headers["location"]) == (307, "/page/")
        kinds = {"/page/": "text/html", "/page/index.html": "text/html", "/page/parts/a.js": "text/javascript"}
        for path, kind in kinds.items():
            found = await client.get(path)
            assert found.status_code == 200 and found.headers["content-type"] == f"{kind}; charset=utf-8"
            name = path.removeprefix("/page/") or "index.html"
            assert found.content == (files / name).read_bytes() and found.headers["cache-control"] == "no-cache"
            again = await client.get(path, headers={"If-None-Match": found.headers["etag"]})
            assert again.status_code == 304 and again.content == b""
            assert (await client.head(path)).status_code == 200


async def test_no_path_leads_out_of_the_folder(files: Path) -> None:
    paths = [
        "/page/../secret.js", "/page/..%2fsecret.js", "/page/%2e%2e/secret.js", "/page/parts/../../secret.js",
        "/page//secret.js", "/page/..\\secret.js", "/page/notes.txt", "/page/parts", "/page/a\0.js", "//page/",
        "/page/./index.html", "/PAGE/",
    ]  # fmt: skip
    for given, status in ((None, b"404"), (two_keys(), b"401")):
        async with PageServer(keys=given, files=files) as server:
            for path in paths:
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
                answer = await reader.read()
                writer.close()
                assert answer.split()[1] in (status, b"400"), path
                assert b"no file" not in answer and b"no type" not in answer, path


async def test_every_path_of_the_page_has_its_headers(files: Path) -> None:
    async with PageServer(keys=two_keys(), files=files) as server, server.client() as client:
        paths = ["/", "/page", "/page/", "/page/parts/a.js", "/page/none.js", "/page/info", "/page/block?block=1",
                 "/page/explain", "/page/events"]  # fmt: skip
        for path in paths:
            for method in ("GET", "POST", "DELETE"):  # refused ones too
                answer = await client.request(method, path)
                headers = answer.headers
                assert headers.get_list("content-security-policy") == [POLICY], path
                assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
                assert headers.get_list("cache-control") in (["no-cache"], ["no-store"])
        async with looking(client) as none:
            assert none.response.status_code == 401
        async with client.stream("GET", "/page/events", headers=ALICE) as answer:
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["content-type"].startswith("text/event-stream")
        assert "content-security-policy" not in (await client.get("/health")).headers


async def test_a_session_stands_for_its_key_on_the_page_and_in_the_prompt_box(files: Path) -> None:
    async with PageServer(keys=two_keys(), files=files) as server, server.client() as client:
        without_key = {"mode": "live", "needs_key": True, "has_keys": True, "signed_in": False, "admin": False,
                    "version": __version__}  # fmt: skip
        assert (await client.get("/page/info")).json() == without_key
        answer = await client.post("/page/session", headers=ALICE)
        assert answer.json() == {"admin": False}
        cookie, *attributes = answer.headers["set-cookie"].split("; ")
        assert attributes == ["HttpOnly", "SameSite=Strict", "Path=/", "Max-Age=3600"]
        assert len(cookie.partition("=")[2]) == 43  # 256 bits
        client.cookies.clear()
        signed_in = {"Cookie": f"other={{}}; {cookie}; last=1", **HERE}
        assert (await client.get("/page/info", headers=signed_in)).json() == without_key | {"signed_in": True}
        assert (await client.get("/v1/models", headers=signed_in)).status_code == 200
        block = (await client.get("/page/block?block=3", headers=signed_in)).json()
        assert block == {"asked": {"block": 3, "text": False}}  # text is for admins
        why = await client.get("/page/explain?request=r1&model=one", headers=signed_in)
        assert why.json() == {"asked": {"request": "r1"}}
        for victim, taker in (("one", "two"), ("two", "one"), ("two", "three")):
            server.models.get("one").departure = Departure(victim, 1.5, taker, 0.25, 8.0, 10, 3.0)
            told = {"what": "unload", "victim": victim, "at": 1.5, "taker": taker, "value": 0.25, "idle_s": 8.0}
            told |= {"num_bytes": 10, "resident_s": 3.0, "num_suspended": 0}
            why = await client.get("/page/explain?model=one", headers=signed_in)
            assert why.json() == ([told, "asked"] if "one" in (victim, taker) else ["asked"])
        for path in ("/metrics", "/version", "/load", "/is_sleeping"):
            assert (await client.get(path, headers=signed_in)).status_code == 401
        assert (await client.delete("/page/session", headers=signed_in)).status_code == 200
        assert (await client.get("/v1/models", headers=signed_in)).status_code == 401
        assert (await client.get("/page/info", headers=signed_in)).json() == without_key


async def test_the_limits_of_a_key_are_those_of_its_session(files: Path) -> None:
    limited = ApiKey("alice", digest_of("sk-alice-1234"), tokens_per_minute=1000)
    async with PageServer(keys=ApiKeys([limited]), files=files) as server, server.client() as client:
        cookie = await cookie_of(client, ALICE) | HERE
        server.server.admission.reserve_tokens(limited, 100_000)
        refused = await client.post("/v1/completions", headers=cookie, json={"model": "one", "prompt": "a"})
        assert refused.status_code == 429 and "the key alice may use 1,000 tokens a minute" in refused.text


async def test_an_admins_session_sees_text_and_has_the_buttons_of_models_alone(files: Path) -> None:
    async with PageServer(keys=two_keys(), files=files) as server, server.client() as client:
        cookie = await cookie_of(client, OPS) | HERE
        assert (await client.get("/page/info", headers=cookie)).json()["admin"]
        block = (await client.get("/page/block?model=one&block=3", headers=cookie)).json()
        assert block == {"asked": {"block": 3, "text": True}}
        for path in ("/sleep", "/wake_up", "/admin/models/load", "/admin/models/unload"):
            assert (await client.post(path, headers=cookie, json={"model": "one"})).status_code == 401
        assert server.models.is_ready and server.engine.calls == ["block"]
        model = server.models.get("one")
        for action, state in (("sleep", "asleep"), ("wake", "ready"), ("stop", "unloaded"), ("load", "ready")):
            answer = await client.post(f"/page/model?model=one&action={action}", headers=cookie)
            assert (answer.status_code, answer.json(), model.state) == (200, {"state": state}, state)
        others = [(await cookie_of(client, ALICE) | HERE, 403), (cookie | {"Sec-Fetch-Site": "same-site"}, 403), ({}, 401)]
        for headers, status in others:
            assert (await client.post("/page/model?model=one&action=stop", headers=headers)).status_code == status
        assert model.state == "ready" and model.goings == {"asked": 2}


OTHER_SITES = [
    ("GET", {"Sec-Fetch-Site": "same-origin"}, 200),
    ("GET", {"Sec-Fetch-Site": "same-site"}, 401),  # another port of this machine
    ("GET", {"Sec-Fetch-Site": "cross-site"}, 401),
    ("GET", {"Sec-Fetch-Site": "none"}, 401),
    ("GET", {}, 200),  # plain HTTP from another machine: browsers say nothing, and others cannot read the answer
    ("POST", {}, 401),
    ("POST", {"Sec-Fetch-Site": "same-origin"}, 404),  # of the model
    ("POST", {"Sec-Fetch-Site": "same-site"}, 403),
    ("POST", {"Origin": "http://127.0.0.1:{port}"}, 404),
    ("POST", {"Origin": "http://127.0.0.1:1"}, 403),
    ("POST", {"Origin": "null"}, 403),
]


async def test_other_sites_cannot_use_the_cookie(files: Path) -> None:
    async with PageServer(keys=two_keys(), files=files) as server, server.client() as client:
        cookie = await cookie_of(client, ALICE)
        for method, headers, status in OTHER_SITES:
            given = {name: value.format(port=server.port) for name, value in headers.items()}
            path = "/v1/models" if method == "GET" else "/v1/completions"
            answer = await client.request(method, path, headers=cookie | given, json={"model": "none", "prompt": "a"})
            assert answer.status_code == status, (method, headers)


async def test_sessions_begin_with_a_key_of_this_server_and_from_its_page(files: Path) -> None:
    async with PageServer(keys=two_keys(), files=files) as server, server.client() as client:
        wrong = await client.post("/page/session", headers={"Authorization": "Bearer sk-guessed-1"})
        assert wrong.status_code == 401 and "set-cookie" not in wrong.headers
        assert (await client.post("/page/session")).status_code == 401
        cookie = await cookie_of(client, ALICE) | HERE
        assert (await client.post("/page/session", headers=cookie)).status_code == 401  # no session by a session
        foreign = await client.post("/page/session", headers=ALICE | {"Sec-Fetch-Site": "cross-site"})
        assert foreign.status_code == 403 and len(server.server.page.sessions) == 1
        gone = {"Cookie": "pagetide_session=" + "A" * 43, **HERE}
        assert (await client.get("/page/events", headers=gone)).status_code == 401
    # Without keys: open to all that reach it.
    async with PageServer(files=files) as server, server.client() as client:
        assert not (await client.get("/page/info")).json()["needs_key"]
        assert (await client.get("/page/block?block=1")).json() == {"asked": {"block": 1, "text": False}}
        assert (await client.post("/page/session", headers=ALICE)).status_code == 401


async def test_a_stream_ends_with_its_session(files: Path) -> None:
    async with PageServer(keys=two_keys(), files=files) as server, server.client() as client:
        cookie = await cookie_of(client, ALICE) | HERE
        async with client.stream("GET", "/page/events", headers=cookie) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            await client.delete("/page/session", headers=cookie)
            async with asyncio.timeout(FAR_S):
                async for _ in lines:
                    pass
        await eventually(lambda: not server.server.page.feed.viewers)


async def test_the_access_log_has_a_line_for_a_stream_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pagetide.access")

    def lines() -> list[Any]:
        found = [json.loads(one.message) for one in caplog.records if one.name == "pagetide.access"]
        return [one for one in found if one["path"] == "/page/events"]

    async with PageServer() as server, server.client() as client:
        async with looking(client) as reader:
            for _ in range(3):
                await reader.frame()
            assert lines() == []
        await eventually(lambda: len(lines()) == 1)
        assert lines()[0]["status"] == 200
        await client.get("/page/none.js")
        page = (await client.get("/metrics")).text
        assert 'http_requests_total{handler="/page/events",method="GET",status="2xx"} 1.0' in page
        assert 'http_requests_total{handler="/page/{path}",method="GET",status="4xx"} 1.0' in page


def test_sessions_end_by_time_with_their_key_and_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_sessions, "MOST_SESSIONS", 3)
    now, given = [0.0], two_keys()
    sessions = PageSessions(given, lambda: now[0])
    alice, ops = given._keys
    cookies = [set_cookie(sessions.begin(alice), secure=True) for _ in range(3)]
    assert all(one.endswith("; Secure") for one in cookies)
    admin = set_cookie(sessions.begin(ops), secure=False)

    def found(cookie: str) -> ApiKey | None:
        session = sessions.find(cookie.partition(";")[0])
        return None if session is None else sessions.key_of(session)

    assert [found(one) for one in [*cookies, admin]] == [alice] * 3 + [ops]
    now[0] = 1.0
    cookies.append(set_cookie(sessions.begin(alice), secure=True))  # ends alice's oldest, and no other's
    assert [found(one) for one in [*cookies, admin]] == [None, alice, alice, alice, ops]
    now[0] = page_sessions.SESSION_S
    assert [found(one) for one in [*cookies, admin]] == [None, None, None, alice, None]
    sessions.begin(alice)
    assert len(sessions) == 2  # those that have ended are forgotten
    given._keys = (ops,)
    assert found(cookies[3]) is None


async def test_sleep_and_wake_up_of_a_model_come_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, call = asyncio.Event(), MadeUpEngine.call

    async def gated(engine: MadeUpEngine, method: str, **arguments: Any) -> Any:
        found = await call(engine, method, **arguments)
        await gate.wait()
        return found

    async with PageServer() as server:
        monkeypatch.setattr(MadeUpEngine, "call", gated)
        models, model, calls = server.models, server.models.get("one"), server.engine.calls
        steps = models.sleep(model, 0.0), models.wake_up(model), models.sleep(model, 0.0), models.wake_up(model)
        changes = [asyncio.create_task(one) for one in steps]
        for _ in range(10):
            await asyncio.sleep(0)
        assert (calls, model.state) == (["sleep"], "asleep")
        gate.set()
        await asyncio.gather(*changes)
        assert (calls, model.state) == (["sleep", "wake_up"] * 2, "ready")
