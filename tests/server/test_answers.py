"""Reasoning and tool calls in OpenAI's chats: a scripted model's answers, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from durable_rig import CALL, DIVING, FrontEnd, KeptRequests, scripted

PATH = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "dive", "parameters": {"type": "object"}}}]
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Dive"}], "tools": TOOLS}


async def message_of(server: FrontEnd, **fields: Any) -> dict[str, Any]:
    """The message of an answer and its finish reason. Its stream adds up to the same."""
    body = BODY | fields
    (choice,) = json.loads((await server.ask(PATH, body)).body)["choices"]
    whole = choice["message"] | {"finish_reason": choice["finish_reason"]}
    events = (await server.ask(PATH, body | {"stream": True})).events
    added: dict[str, Any] = {"role": "assistant", "content": ""}
    for event in events[:-1]:
        (part,) = json.loads(event.split(b"data: ")[1])["choices"]
        for name, value in part["delta"].items():
            if name != "role":
                added[name] = added.get(name, type(value)()) + value
        added["finish_reason"] = part["finish_reason"]
    calls = [{**call, "index": number} for number, call in enumerate(whole.get("tool_calls", ()))]
    ids = [call.pop("id") for call in calls]
    assert all(call.pop("id") not in ids for call in added.get("tool_calls", ()))  # each response has ids of its own
    assert added == whole | {"content": whole["content"] or ""} | ({"tool_calls": calls} if calls else {})
    return whole


async def test_reasoning_stands_beside_content_and_calls() -> None:
    async with FrontEnd(KeptRequests(DIVING)) as server:
        message = await message_of(server)
        assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Down we go.", "Hmm.", "Hmm.")
        (call,) = message["tool_calls"]
        assert (call["function"], message["finish_reason"]) == ({"name": "dive", "arguments": '{"depth": 3}'}, "tool_calls")
        assert "reasoning" not in await message_of(server, include_reasoning=False)
        message = await message_of(server, tools=None)
        assert (message["content"], message["reasoning"]) == (f"Down we go.\n{CALL}", "Hmm.")


async def test_reasoning_that_the_prompt_begins() -> None:
    async with FrontEnd(KeptRequests(("Hm.", "</think>", "Hi"), prompt_end="<|im_start|>assistant\n<think>\n")) as server:
        message = await message_of(server)
        assert (message["content"], message["reasoning_content"], message["finish_reason"]) == ("Hi", "Hm.", "stop")
        message = await message_of(
            server, response_format={"type": "json_object"}
        )  # the constraint holds from the first token on
        assert message["content"] == "Hm.</think>Hi"


async def test_of_a_call_that_is_cut_off_nothing_is_left() -> None:
    queue = KeptRequests(reason="length")
    async with FrontEnd(queue) as server:
        for size in range(1, len(CALL), 5):
            queue.texts = ("Down. ", CALL[:size])
            message = await message_of(server)
            assert (message["content"].rstrip(" <"), message["finish_reason"]) == ("Down.", "length")
            assert "tool_calls" not in message


async def test_options_of_reasoning_reach_the_chat_template() -> None:
    async with FrontEnd(KeptRequests(("Hi",))) as server:
        asked = []
        for fields in (
            {"enable_thinking": False}, {"reasoning_effort": "none"}, {"reasoning_effort": "high"},
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
        ):  # fmt: skip
            await server.ask(PATH, BODY | fields)
            template = server.last_request["template"]
            asked.append({name: template.get(name) for name in ("enable_thinking", "thinking", "reasoning_effort")})
        off = {"enable_thinking": False, "thinking": False}
        assert asked == [
            off | {"reasoning_effort": None}, off | {"reasoning_effort": "none"},
            {"enable_thinking": None, "thinking": None, "reasoning_effort": "high"},
            {"enable_thinking": False, "thinking": True, "reasoning_effort": None},
        ]  # fmt: skip


async def test_an_answer_of_a_given_form_may_be_a_call_at_every_endpoint() -> None:
    schema = {"type": "object", "properties": {"note": {"type": "string"}}}
    function = {"name": "dive", "parameters": {"type": "object"}}
    of_anthropic = {"name": "dive", "input_schema": {"type": "object"}}
    ask: dict[str, Any] = {"model": "kept", "messages": BODY["messages"], "stream": False}
    form = {"type": "json_schema", "schema": schema}
    bodies: dict[str, dict[str, Any]] = {
        PATH: ask | {"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        "/v1/responses": {
            "model": "kept",
            "input": "Dive",
            "tools": [{"type": "function", **function}],
            "text": {"format": form},
        },
        "/v1/messages": ask | {"tools": [of_anthropic], "max_tokens": 9, "output_config": {"format": form}},
        "/api/chat": ask | {"tools": TOOLS, "format": schema},
    }
    answer = json.dumps({"note": CALL})
    async with scripted() as server:
        for constrains in (True, False):
            server.engine.info = msgspec.structs.replace(server.engine.info, constrains=constrains)
            for path, body in bodies.items():
                server.engine.queue.texts = (answer,)
                said = (await server.ask(path, body)).body.decode()
                assert json.dumps(answer)[1:-1] in said, path
                params = server.last_request["params"]
                assert ("json_schema" in params, "(calls | answer)" in params.get("grammar", "")) == (
                    not constrains,
                    constrains,
                )
                server.engine.queue.texts = ("<think>Hm.</think>\n", CALL)
                said = (await server.ask(path, body)).body.decode()
                assert ("<tool_call>" not in said, '"depth' in said.replace("\\", "")) == (constrains, True), path
