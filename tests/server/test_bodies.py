"""Large bodies: what is counted in them is there, and the thread that parses them gives what FastAPI would have given."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

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


def test_more_values_than_a_large_body_may_have() -> None:
    for body, what in (
        (b'{"stop":[' + b'"x",' * MOST_TEXTS + b'"x"]}', "65,538 texts and names"),
        (b"[" + b"[]," * MOST_CONTAINERS + b"1]", "16,385 objects and lists"),
        (b"[" + b"5," * (MOST_VALUES + 1) + b"5]", "1,310,721 values"),
    ):
        with pytest.raises(ApiError, match=f"the body has {what}; a body of more than 4,096 bytes may have") as caught:
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
        with pytest.raises(ApiError, match="objects and lists too deeply: the limit is 100 levels"):
            parse(deep)
    texts = json.dumps({"a": "[" * 500 + '"' + "{" * 500}).encode()
    for flat in (b"[" * 100 + b"]" * 100, b"[" + b"[]," * 200 + b"1]", texts):
        assert parse(flat) == json.loads(flat)
    with pytest.raises(ApiError, match="the body is not JSON"):
        parse(b'{"prompt":')


def test_compressed_bodies_are_refused() -> None:
    for body, encoding in ((b"\x1f\x8b\x08", ""), (b"{}", "gzip"), (b"{}", " BR")):
        with pytest.raises(ApiError, match="the body is compressed") as caught:
            check_encoding(body, encoding)
        assert caught.value.status == 415, (body, encoding)
    check_encoding(b"{}", "identity")


async def test_a_body_is_json_whatever_its_content_type() -> None:
    app = FastAPI()
    app.router.route_class = BodyRoute
    add_errors(app)

    @app.post("/")
    async def answer(body: DetokenizeRequest) -> int:
        return len(body.tokens)

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps({"tokens": [5] * size}).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    types = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", "application/json")
    for headers in ([], *([(b"content-type", one.encode())] for one in types)):
        for size in (1, 2 * LARGE_BYTES):
            sent: list[Any] = []
            scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}
            await app(scope, receive, send)
            assert (sent[0]["status"], sent[1]["body"]) == (200, str(size).encode()), headers


def test_sequences_of_a_request_are_bounded() -> None:
    most = MOST_SEQUENCES // 16
    for fields in ({"n": 16}, {"best_of": 16}, {"n": 4, "best_of": 16}):
        body = {"prompt": ["a"] * most} | fields
        assert len(CompletionRequest.model_validate(body).prompts()) == most
        said = "129 prompts of 16 sequences each are 2,064 sequences, and a request may have 2,048"
        with pytest.raises(ApiError, match=said):
            CompletionRequest.model_validate(body | {"prompt": ["a"] * (most + 1)}).prompts()
