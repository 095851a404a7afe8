"""Hints of how long prompts are worth keeping: what requests say, what their keys allow, and what reaches the engine."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import pytest
from durable_rig import PROMPT, scripted
from msgspec.structs import replace

from pagetide.cache.retention import Retention
from pagetide.server.anthropic import MessagesRequest
from pagetide.server.errors import ApiError
from pagetide.server.keys import ApiKey, ApiKeys
from pagetide.server.openai_responses import ResponsesRequest
from pagetide.server.requests import ChatRequest, CompletionRequest
from pagetide.server.retention_hints import MOST_S, duration_s

TALK = [{"role": "user", "content": "Dive"}]
SHORT, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
DAY = Retention(MOST_S)


def kv_hints(*directives: dict[str, Any], **others: Any) -> dict[str, Any]:
    action = {"action_id": "a", "action_type": "kv.retain", "action_version": "0.1", "payload": {"directives": directives}}
    return {
        "kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": [{"action_type": "kv.fetch"}, action | others]}
    }


@pytest.mark.parametrize(
    ("text", "seconds"), [("30m", 1800), ("1h30m", 5400), ("90", 90), ("1.5s", 1.5), ("-1m", -60), ("0", 0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "1x", "1 m", "9" * 200_000 + "x", "1.5" * 50_000])
def test_texts_that_are_no_durations(text: str) -> None:
    """Refused in a time that grows with their length, not with its square: the event loop waits."""
    with pytest.raises(ValueError, match="give seconds"):
        duration_s(text)


@pytest.mark.parametrize(("fields", "hint"), [
    ({}, None), ({"prompt_cache_options": {"mode": "explicit"}}, None), ({"prompt_cache_retention": "in_memory"}, None),
    ({"prompt_cache_options": {"ttl": "30m"}}, Retention(1800)), ({"prompt_cache_retention": "24h"}, DAY),
    ({"prompt_cache_options": {"ttl": "9999h"}}, DAY), (kv_hints(), None),
    (kv_hints({"priority": 50}), DAY), (kv_hints({"covers_output": True, "duration": 9}), None),
    (kv_hints({"end": 64, "duration": 9}, {"start": 64, "end": 96, "duration": 5}), Retention(9, 96)),
    (kv_hints({"end": 64, "duration": 9}, {"start": 64, "duration": 5}), Retention(9)),
    (kv_hints({"end": 64, "duration": 9}) | {"prompt_cache_options": {"ttl": "30s"}}, Retention(30)),
])  # fmt: skip
def test_openais_and_vllms_fields(fields: dict[str, Any], hint: Retention | None) -> None:
    assert ChatRequest(messages=TALK, **fields).retention == hint
    assert CompletionRequest(prompt="Dive", **fields).retention == hint
    if "kv_hints" not in fields:
        assert ResponsesRequest(input="Dive", **fields).as_chat().retention == hint


@pytest.mark.parametrize(("fields", "hint"), [
    ({}, None), ({"cache_control": SHORT}, Retention(300)), ({"system": [{"type": "text", "text": "x", "cache_control": LONG}]},
     Retention(3600)),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": SHORT}]}]}, Retention(300)),
    ({"messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x", "cache_control": LONG}]}]}]},
     Retention(3600)),
    ({"tools": [{"name": "dive", "input_schema": {}, "cache_control": LONG}], "cache_control": SHORT}, Retention(3600)),
])  # fmt: skip
def test_anthropics_cache_control(fields: dict[str, Any], hint: Retention | None) -> None:
    body = {"model": "kept", "max_tokens": 8, "messages": TALK} | fields
    assert MessagesRequest(**body).as_chat().retention == hint


@pytest.mark.parametrize("control", [{"type": "ephemeral", "ttl": "2h"}, {"type": "eternal"}, "ephemeral", {}])
def test_another_cache_control_is_refused(control: Any) -> None:
    with pytest.raises(ApiError, match='of "5m" or "1h"'):
        MessagesRequest(model="kept", max_tokens=8, messages=TALK, cache_control=control).as_chat()


async def test_hints_reach_the_engine_within_the_limits_of_their_key() -> None:
    limited = ApiKey("ann", sha256(b"sk-ann-12345").digest(), max_retention_s=600, max_retained_blocks=64)
    for keys, wanted in ((ApiKeys([limited]), Retention(600.0, None, "ann", 64)), (ApiKeys(), Retention(1800.0))):
        async with scripted("Hi", keys=keys) as server:
            server.client.headers["authorization"] = "Bearer sk-ann-12345"
            for path, body in (("/v1/chat/completions", {"messages": TALK}), ("/v1/completions", {"prompt": "Dive"})):
                await server.ask(path, body)
                assert "retention" not in server.last_request
                await server.ask(path, body | {"prompt_cache_options": {"ttl": "30m"}})
                assert server.last_request["retention"] == wanted


async def test_what_is_written_to_the_cache_is_in_the_usage() -> None:
    hint, cached = {"prompt_cache_options": {"ttl": "30m"}}, 3
    async with scripted("Hi") as server:
        server.engine.info = replace(server.engine.info, block_size=2)
        chat = json.loads((await server.ask("/v1/chat/completions", {"messages": TALK} | hint)).body)
        assert chat["usage"]["prompt_tokens_details"] == {"cached_tokens": cached, "cache_write_tokens": len(PROMPT) - cached}
        body = {"model": "kept", "max_tokens": 8, "messages": TALK, "cache_control": SHORT}
        usage = json.loads((await server.ask("/v1/messages", body)).body)["usage"]
        assert (usage["input_tokens"], usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]) == (0, 5, cached)
        response = json.loads((await server.ask("/v1/responses", {"input": "Dive"} | hint)).body)
        assert response["usage"]["input_tokens_details"] == {"cached_tokens": cached, "cache_write_tokens": 5}


async def test_what_is_no_hint_is_refused() -> None:
    async with scripted("Hi") as server:
        for fields, said in (
            ({"prompt_cache_options": {"ttl": "soon"}}, "prompt_cache_options.ttl: give seconds, or a duration"),
            ({"prompt_cache_options": {"ttl": "-1m"}}, "a time above 0"),
            ({"kv_hints": {"actions": [{}]}}, "action_type is missing"),
            (kv_hints({"start": 64, "end": 64}), "a range ends behind its start, got 64 to 64"),
            (kv_hints({"duration": 0}), "directives.0.duration of a kv.retain payload"),
        ):  # fmt: skip
            answer = await server.ask("/v1/chat/completions", {"messages": TALK} | fields)
            assert answer.status == 400 and said in json.loads(answer.body)["error"]["message"]
