"""Anthropic's messages: what they are as a chat, and a scripted model's answers in Anthropic's form, whole and streamed."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import pytest
from durable_rig import PROMPT, failing_after, scripted

from pagetide.server.anthropic import BILLING_BLOCK, MessagesRequest
from pagetide.server.errors import ApiError
from pagetide.server.keys import ApiKey, ApiKeys

PATH = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"depth": {"type": "integer"}}}
TOOLS = [
    {"name": "dive", "description": "Go down.", "input_schema": SCHEMA},
    {"name": "web_search", "type": "web_search_20250305"},
]
BODY: dict[str, Any] = {"model": "kept", "max_tokens": 64, "messages": [{"role": "user", "content": "Dive"}], "tools": TOOLS}
BLOCKS = [
    {"type": "thinking", "thinking": "Hmm.", "signature": "pagetide"},
    {"type": "text", "text": "Down we go."},
    {"type": "tool_use", "name": "dive", "input": {"depth": 3}},
]


def messages_of(**fields: Any) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_unset=True) for message in MessagesRequest(**(BODY | fields)).as_chat().messages]


def test_blocks_become_messages_of_a_chat() -> None:
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "Dive", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "text", "text": "Down."},
            {"type": "tool_use", "id": "call_1", "name": "dive", "input": {"depth": 3}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "wet"}]},
            {"type": "text", "text": "And now?"}, {"type": "document", "source": {"type": "text", "data": "A chart"}},
        ]},
    ]  # fmt: skip
    call = {"id": "call_1", "type": "function", "function": {"name": "dive", "arguments": {"depth": 3}}}
    assert messages_of(messages=talk, system=[{"type": "text", "text": "Be brief."}]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Dive"},
        {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [call], "content": "Down."},
        {"role": "tool", "tool_call_id": "call_1", "content": "wet"},
        {"role": "user", "content": "And now?\nA chart"},
    ]


def test_messages_of_the_system_between_others_become_the_users() -> None:
    """As Claude Code sends them; many chat templates take one message of the system alone, and no two of the user in a row."""
    talk = [
        {"role": "user", "content": "Dive"}, {"role": "system", "content": "Agents: none."},
        {"role": "assistant", "content": "Down."}, {"role": "system", "content": [{"type": "text", "text": "It is late."}]},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip

    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    assert messages_of(messages=talk, system="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts("Dive", "Agents: none.")},
        {"role": "assistant", "content": "Down."},
        {"role": "user", "content": parts("It is late.", "And now?")},
    ]


def test_fields_become_those_of_a_chat() -> None:
    chat = MessagesRequest(**BODY, stop_sequences=["END"], thinking={"type": "enabled", "budget_tokens": 1024}).as_chat()
    assert (chat.max_tokens, chat.stop, chat.enable_thinking, chat.tool_choice) == (64, ["END"], True, None)
    assert chat.tools is not None and [(one.function.name, one.function.parameters) for one in chat.tools] == [("dive", SCHEMA)]
    for choice, wanted in (
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)), ({"type": "none"}, ("none", True)),
    ):  # fmt: skip
        chat = MessagesRequest(**BODY, tool_choice=choice).as_chat()
        assert (chat.tool_choice, chat.parallel_tool_calls) == wanted
    chat = MessagesRequest(**BODY, tool_choice={"type": "tool", "name": "dive"}, output_config={"effort": "high"}).as_chat()
    assert chat.tool_choice is not None and not isinstance(chat.tool_choice, str)
    assert (chat.tool_choice.function.name, chat.reasoning_effort) == ("dive", "high")
    chat = MessagesRequest(**BODY | {"tools": [{"name": "a" * 128, "input_schema": {}}]}).as_chat()
    assert chat.tools is not None and chat.tools[0].function.name == "a" * 128
    prefilled = [*BODY["messages"], {"role": "assistant", "content": "Down"}]
    options = MessagesRequest(**BODY | {"messages": prefilled}).as_chat().template()
    assert options == {"add_generation_prompt": False, "continue_final_message": True}
    for fields, said in (
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "type 'image' is not supported"),
        ({"tools": None, "tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "tool"}}, "needs a name"),
        ({"output_config": {"effort": 3}}, "reasoning_effort"),
    ):
        with pytest.raises(ApiError, match=said):
            MessagesRequest(**BODY | fields).as_chat()


def test_a_billing_block_that_changes_with_each_turn_leaves_prefixes_equal() -> None:
    """Claude Code's first block has a hash of the conversation."""
    asked, turns = list(BODY["messages"]), []
    for turn in range(2):
        system = [
            {"type": "text", "text": f"{BILLING_BLOCK} cc_version=2.1; cch={turn:05x};"},
            {"type": "text", "text": "Be brief."},
        ]
        turns.append(messages_of(messages=asked, system=system))
        asked = [*asked, {"role": "assistant", "content": "Down."}, {"role": "user", "content": "Up"}]
    first, second = turns
    assert first[0] == {"role": "system", "content": "Be brief."} and second[: len(first)] == first


async def test_an_answer_whole_and_streamed() -> None:
    async with scripted() as server:
        whole = json.loads((await server.ask(PATH, BODY)).body)
        ids = [block.pop("id") for block in whole["content"] if block["type"] == "tool_use"]
        assert whole["content"] == BLOCKS and len(ids) == 1
        assert (whole["type"], whole["role"], whole["model"], whole["stop_reason"]) == (
            "message",
            "assistant",
            "kept",
            "tool_use",
        )
        cached, num_output = 3, whole["usage"]["output_tokens"]
        usage = {"input_tokens": len(PROMPT) - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
        assert whole["usage"] == usage | {"output_tokens": num_output}
        answer = await server.ask(PATH, BODY | {"stream": True})
        events = [json.loads(one.split(b"data: ")[1]) for one in answer.events]
        assert [one.split(b"\n")[0].removeprefix(b"event: ").decode() for one in answer.events] == [
            one["type"] for one in events
        ]
        assert added_up(events) == BLOCKS
        assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["output_tokens"] == 0
        delta, stop = events[-2:]
        assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None} and delta["usage"] == whole["usage"]
        assert stop == {"type": "message_stop"}


def added_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that events make, as a client adds them up. Each begins empty, and ends before the next begins."""
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append(event["content_block"])
            texts, is_open = [], True
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(blocks) - 1
            delta = event["delta"]
            kind = delta["type"].removesuffix("_delta")
            if kind == "input_json":
                texts.append(delta["partial_json"])
            else:
                blocks[-1][kind] += delta[kind]
        elif event["type"] == "content_block_stop":
            is_open = False
            if blocks[-1]["type"] == "tool_use":
                assert blocks[-1]["input"] == {} and blocks[-1].pop("id")
                blocks[-1]["input"] = json.loads("".join(texts))
    assert not is_open
    return blocks


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_reasons(stream: bool) -> None:
    for fields, texts, reason, wanted in (
        ({}, ("Hi",), "stop", "end_turn"),
        ({"max_tokens": 1}, ("Hi",), "length", "max_tokens"),
        ({}, ("Hi",), "length", "model_context_window_exceeded"),
        ({"stop_sequences": ["END"]}, ("Hi",), "stop", "stop_sequence"),
        ({"max_tokens": 3}, ("Hi ", "<tool_call>", '{"name": "di'), "length", "max_tokens"),
    ):
        async with scripted(*texts, reason=reason) as server:
            server.engine.answers["detokenize"] = "Hi END"
            answer = await server.ask(PATH, BODY | fields | {"stream": stream})
            events = [json.loads(one.split(b"data: ")[1]) for one in answer.events] if stream else []
            body = events[-2]["delta"] if stream else json.loads(answer.body)
            assert (body["stop_reason"], body["stop_sequence"]) == (wanted, "END" if wanted == "stop_sequence" else None)
            blocks = added_up(events) if stream else body["content"]
            assert "".join(block["text"] for block in blocks).strip() == "Hi"


async def test_white_space_alone_makes_no_block() -> None:
    async with scripted(" ", "\n") as server:
        assert json.loads((await server.ask(PATH, BODY)).body)["content"] == []
        assert b"content_block" not in (await server.ask(PATH, BODY | {"stream": True})).body


async def test_tokens_of_a_prompt_are_counted() -> None:
    async with scripted() as server:
        asked: dict[str, Any] = {}
        server.engine.answers["tokenize"] = lambda **arguments: asked.update(arguments) or {"tokens": [1, 2, 3], "texts": None}
        body = {name: value for name, value in BODY.items() if name != "max_tokens"}
        answer = await server.ask(f"{PATH}/count_tokens", body)
        assert (answer.status, json.loads(answer.body)) == (200, {"input_tokens": 3})
        assert asked["messages"] == [{"role": "user", "content": "Dive"}]
        assert [tool["function"]["name"] for tool in asked["template"]["tools"]] == ["dive"]


async def test_errors_have_anthropics_form() -> None:
    async with scripted("Hi", keys=ApiKeys([ApiKey("ann", sha256(b"sk-ann-12345").digest())])) as server:
        answer = await server.ask(PATH, BODY)
        assert (answer.status, json.loads(answer.body)["error"]["type"]) == (401, "authentication_error")
        server.client.headers["x-api-key"] = "sk-ann-12345"
        for body, status, kind, said in (
            (BODY | {"model": "moby"}, 404, "not_found_error", "does not exist"),
            ({"model": "kept", "messages": BODY["messages"]}, 400, "invalid_request_error", "max_tokens is missing"),
            (BODY | {"max_token": 3}, 400, "invalid_request_error", "did you mean 'max_tokens'"),
            (BODY | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "image"),
        ):
            answer = await server.ask(PATH, body)
            found = json.loads(answer.body)
            assert (answer.status, found["type"], found["error"]["type"]) == (status, "error", kind)
            assert said in found["error"]["message"]
        wrong = await server.client.post(PATH, content=b"{}", headers={"host": "elsewhere"})
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (403, "permission_error")
        assert json.loads((await server.ask(PATH, BODY | {"model": "claude-opus-4-6"})).body)["model"] == "kept"


async def test_a_stream_that_fails_ends_with_an_event_of_the_error() -> None:
    async with scripted("Hi", " there") as server:
        server.engine.deliver = failing_after(2)
        answer = await server.ask(PATH, BODY | {"stream": True})
        assert answer.events[-1].startswith(b"event: error\n") and b"[DONE]" not in answer.body
        assert json.loads(answer.events[-1].split(b"data: ")[1])["error"]["type"] == "api_error"
