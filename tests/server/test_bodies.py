"""Large bodies: what is counted in them is there, and the thread that parses them gives what FastAPI would have given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from fastapi import FastAPI

from pagetide.server import bodies
from pagetide.server.app import add_errors
from pagetide.server.bodies import (
    LARGE_BYTES,
    MOST_CONTAINERS,
    MOST_TEXTS,
    MOST_VALUES,
    BodyRoute,
    check_counts,
    check_encoding,
    parse_large,
    parse_small,
)
from pagetide.server.errors import ApiError
from pagetide.server.requests import MOST_SEQUENCES, ChatRequest, CompletionRequest, DetokenizeRequest

TEXTS = st.text(alphabet=st.sampled_from('a"\\{}[],:\n\u6587'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> tuple[int, int, int]:
    """Texts and names, objects and lists, separators."""
    if isinstance(value, str):
        return 1, 0, 0
    if not isinstance(value, dict | list):
        return 0, 0, 0
    within = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
    texts, containers, separators = (sum(one) for one in zip(*within, strict=True)) if within else (0, 0, 0)
    names = len(value) if isinstance(value, dict) else 0
    return texts + names, containers + 1, separators + max(len(value) - 1, 0)


@given(VALUES, st.booleans())
def test_counts_are_those_of_the_parsed_body(value: Any, escapes: bool) -> None:
    body = json.dumps(value, ensure_ascii=escapes).encode()
    with pytest.MonkeyPatch.context() as patch:
        seen: list[int] = []
        patch.setattr(bodies, "_check", lambda count, most, what: seen.append(count))
        check_counts(body)
    assert tuple(seen) == counted(value)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b'{"stop":[' + b'"x",' * MOST_TEXTS + b'"x"]}', "65,538 texts and names"),
        (b"[" + b"[]," * MOST_CONTAINERS + b"1]", "16,385 objects and lists"),
        (b"[" + b"5," * (MOST_VALUES + 1) + b"5]", "1,310,721 values"),
    ],
)
def test_more_values_than_a_large_body_may_have(body: bytes, what: str) -> None:
    with pytest.raises(ApiError, match=f"the body has {what}; a body of more than 65,536 bytes may have") as caught:
        parse_large(body, CompletionRequest)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "prompt",
    [[151_643] * 1_000_000, "\u6587" * 1_300_000, "a" * 8_000_000, [[5] * 500] * 2048, ["the sea"] * 2048],
    ids=["ids of a million tokens", "escaped text", "text", "prompts of ids", "prompts of text"],
)
def test_the_largest_prompts_fit_and_are_what_was_sent(prompt: Any) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
    assert LARGE_BYTES < len(body) or prompt == ["the sea"] * 2048
    assert len(body) <= 8 << 20
    found = parse_large(body, CompletionRequest)
    assert isinstance(found, CompletionRequest) and found.prompt == prompt and found.max_tokens == 1


def test_faults_of_a_large_body_have_their_place() -> None:
    message = '{"role":"user","content":"a"}'
    with pytest.raises(ApiError) as caught:
        parse_large(f'{{"messages":[{message},{{"role":"whale"}}]}}'.encode(), ChatRequest)
    assert caught.value.param == "messages.1.role"
    for body in (b'{"prompt":"a"', b'{"prompt":"\xed"}'[:-1], b'"\x00"', b"9" * 5000 + b"x"):
        with pytest.raises(ApiError, match="the body is no"):
            parse_large(body, CompletionRequest)


@pytest.mark.parametrize("parse", [parse_small, lambda body: parse_large(body, None)], ids=["small", "large"])
def test_bodies_that_are_no_plain_json_say_what_they_are(parse: Callable[[bytes], Any]) -> None:
    with pytest.raises(ApiError, match=r"the body is not UTF-8: its byte 11 is 0xff; JSON is sent in UTF-8"):
        parse(b'{"prompt":"\xff"}')
    for deep in (b"[" * 101 + b"]" * 101, b'{"a":' * 101 + b"1" + b"}" * 101, b"[" * 40_000, b'["\\"",[' + b"[" * 99):
        with pytest.raises(ApiError, match="objects and lists nested more than 100 deep"):
            parse(deep)
    for flat in (
        b"[" * 100 + b"]" * 100,
        b"[" + b"[]," * 200 + b"1]",
        json.dumps({"a": "[" * 500 + '"' + "{" * 500}).encode(),
    ):
        assert parse(flat) == json.loads(flat)
    with pytest.raises(ApiError, match="the body is no JSON"):
        parse(b'{"prompt":')


@pytest.mark.parametrize(("body", "encoding"), [(b"\x1f\x8b\x08", ""), (b"{}", "gzip"), (b"{}", " BR")])
def test_compressed_bodies_are_refused(body: bytes, encoding: str) -> None:
    with pytest.raises(ApiError, match="the body is compressed") as caught:
        check_encoding(body, encoding)
    assert caught.value.status == 415
    check_encoding(b"{}", "identity")


@pytest.mark.parametrize(
    "kind",
    [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", "application/json"],
)
@pytest.mark.parametrize("size", [1, 2 * LARGE_BYTES])
def test_a_body_is_json_whatever_its_content_type(kind: str | None, size: int) -> None:
    app = FastAPI()
    app.router.route_class = BodyRoute
    add_errors(app)

    @app.post("/")
    async def answer(body: DetokenizeRequest) -> int:
        return len(body.tokens)

    body = json.dumps({"tokens": [5] * size}).encode()
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if kind is None else [(b"content-type", kind.encode())]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}
    asyncio.run(app(scope, receive, send))
    assert (sent[0]["status"], sent[1]["body"]) == (200, str(size).encode())


@pytest.mark.parametrize(("n", "best_of"), [(16, None), (None, 16), (4, 16)])
def test_sequences_of_a_request_are_bounded(n: int | None, best_of: int | None) -> None:
    most = MOST_SEQUENCES // 16
    fields: dict[str, Any] = {"n": n, "best_of": best_of}
    assert len(CompletionRequest(prompt=["a"] * most, **fields).prompts()) == most
    with pytest.raises(
        ApiError, match=r"129 prompts of 16 sequences each are 2,064 sequences, and a request may have 2,048"
    ):
        CompletionRequest(prompt=["a"] * (most + 1), **fields).prompts()
