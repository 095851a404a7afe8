"""OpenAI's responses: what they are as a chat, and a scripted model's answers in their form, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from durable_rig import DIVING, failing_after, scripted

from pagetide.server.errors import ApiError
from pagetide.server.openai_responses import ResponsesRequest

PATH = "/v1/responses"
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit.",
    "format": {"type": "grammar", "definition": "start: A"},
}
DIVE = {"type": "function", "name": "dive", "parameters": {"type": "object"}, "strict": False}
BODY: dict[str, Any] = {"model": "kept", "input": "Dive", "tools": [DIVE, PATCH, {"type": "web_search"}], "store": False}
SCRIPT = (*DIVING, '\n<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin Patch"}}</tool_call>')


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


ITEMS = [
    {"type": "reasoning", "status": "completed", "summary": [],
     "content": [{"type": "reasoning_text", "text": "Hmm."}]},
    {"type": "message", "status": "completed", "role": "assistant",
     "content": [{"type": "output_text", "text": "Down we go.", "annotations": [], "logprobs": []}]},
    {"type": "function_call", "status": "completed", "name": "dive", "arguments": '{"depth": 3}'},
    {"type": "custom_tool_call", "status": "completed", "name": "apply_patch", "input": "*** Begin Patch"},
]  # fmt: skip


def test_items_become_messages_of_a_chat() -> None:
    given = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "Dive"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Down."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]},
        {"type": "function_call", "call_id": "c1", "name": "dive", "arguments": '{"depth": 3}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "x"},
        {"type": "function_call_output", "call_id": "c1", "output": "wet"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        {"type": "web_search_call", "id": "w"},
        {"role": "user", "content": "And now?"},
    ]
    chat = ResponsesRequest(**BODY | {"input": given, "instructions": "You dive.", "reasoning": {"effort": "low"}}).as_chat()
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "dive", "arguments": '{"depth": 3}'}},
        {"id": "c2", "type": "function", "function": {"name": "apply_patch", "arguments": {"input": "x"}}},
    ]
    assert [message.model_dump(exclude_unset=True) for message in chat.messages] == [
        {"role": "system", "content": [{"type": "text", "text": "You dive."}, {"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "Dive"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.\nSo.",
            "content": [{"type": "output_text", "text": "Down."}],
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "c1", "content": "wet"},
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
        {"role": "user", "content": "And now?"},
    ]
    assert chat.reasoning_effort == "low" and chat.tools is not None
    dive, patch = (tool.function for tool in chat.tools)
    assert (dive.name, dive.parameters, patch.name) == ("dive", {"type": "object"}, "apply_patch")
    assert (
        patch.parameters is not None and patch.parameters["required"] == ["input"] and "start: A" in (patch.description or "")
    )


def test_what_needs_a_state_is_refused() -> None:
    for fields, said in (
        ({"previous_response_id": "resp_1"}, "previous_response_id is not served: responses are not kept"),
        ({"background": True}, "send the whole conversation"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "an item of type 'item_reference'"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"input": [{"role": "robot", "content": "x"}]}, "role"),
        (
            {
                "tool_choice": {"type": "allowed_tools", "tools": None},
                "tools": [{"type": "custom", "name": 1, "description": 2}],
            },
            "name",
        ),
        ({"input": [{"type": "reasoning", "content": 5, "summary": "x"}]}, "has no message"),
    ):
        with pytest.raises(ApiError, match=said):
            ResponsesRequest(**BODY | fields).as_chat()


async def test_an_answer_whole_and_streamed() -> None:
    async with scripted(*SCRIPT) as server:
        whole = json.loads((await server.ask(PATH, BODY)).body)
        assert without_ids(whole["output"]) == ITEMS
        assert (whole["object"], whole["status"], whole["incomplete_details"], whole["error"]) == (
            "response",
            "completed",
            None,
            None,
        )
        answer = await server.ask(PATH, BODY | {"stream": True})
        events = [json.loads(one.split(b"data: ")[1]) for one in answer.events]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert all(
            one.startswith(f"event: {event['type']}\n".encode()) for one, event in zip(answer.events, events, strict=True)
        )
        assert [event["type"] for event in events[:3]] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
        ]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        last = events[-1]
        assert (last["type"], last["response"]["output"], without_ids(done)) == ("response.completed", done, ITEMS)
        assert last["response"]["usage"] == whole["usage"]
        for kind, name, wanted in (
            ("output_text", "text", "Down we go."), ("reasoning_text", "text", "Hmm."),
            ("function_call_arguments", "arguments", '{"depth": 3}'), ("custom_tool_call_input", "input", "*** Begin Patch"),
        ):  # fmt: skip
            deltas = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
            (ended,) = [event for event in events if event["type"] == f"response.{kind}.done"]
            assert "".join(deltas) == ended[name] == wanted


async def test_the_arguments_of_a_custom_tool_without_its_input_are_the_input() -> None:
    call = '<tool_call>{"name": "apply_patch", "arguments": {"patch": "*** Begin Patch"}}</tool_call>'
    async with scripted(call) as server:
        (item,) = json.loads((await server.ask(PATH, BODY)).body)["output"]
        assert (item["type"], item["input"]) == ("custom_tool_call", '{"patch": "*** Begin Patch"}')


async def test_tools_of_a_namespace_are_named_with_it_before_the_model_alone() -> None:
    """The form in which Codex 0.171 sends the tools of an MCP server, and what it takes back."""
    sea = {
        "type": "namespace",
        "name": "mcp__sea",
        "description": "The sea.",
        "tools": [DIVE | {"description": "Down."}, DIVE | {"name": "rise"}],
    }
    own = {"type": "namespace", "name": "functions", "description": "", "tools": [PATCH]}
    earlier = [
        {"type": "additional_tools", "tools": [DIVE, sea, sea | {"name": "mcp__lake__", "tools": [PATCH]}]},
        {"role": "user", "content": "Dive"},
        {"type": "function_call", "call_id": "c1", "name": "dive", "namespace": "mcp__sea", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "wet"},
    ]  # fmt: skip
    names = ("dive", "mcp__sea__dive", "mcp__sea__rise", "apply_patch", "mcp__lake__apply_patch")
    call = '<tool_call>{"name": "%s", "arguments": {"input": "x"}}</tool_call>'
    body = BODY | {"tools": [DIVE, sea, own], "input": earlier}
    async with scripted(*(call % name for name in names)) as server:
        output = json.loads((await server.ask(PATH, body)).body)["output"]
        kinds = ["function_call"] * 3 + ["custom_tool_call"] * 2
        spaces = [None, "mcp__sea", "mcp__sea", "functions", "mcp__lake__"]
        said = [(item["type"], item["name"], item.get("namespace")) for item in output]
        assert said == list(zip(kinds, ("dive", "dive", "rise", "apply_patch", "apply_patch"), spaces, strict=True))
        sent = server.last_request
        functions = [tool["function"] for tool in sent["template"]["tools"]]
        assert [one["name"] for one in functions] == list(names)
        assert [one["description"] for one in functions[1:3]] == ["The sea.\n\nDown.", ""]
        assert sent["messages"][1]["tool_calls"][0]["function"]["name"] == "mcp__sea__dive"
        choice = {"type": "function", "name": "rise", "namespace": "mcp__sea"}
        await server.ask(PATH, body | {"tool_choice": choice})
        assert server.last_request["params"]["json_schema"]["type"] == "object"
        twice = await server.ask(PATH, body | {"tools": [sea, DIVE | {"name": "mcp__sea__rise"}]})
        assert twice.status == 400 and b"two functions 'mcp__sea__rise'" in twice.body


async def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    async with scripted("Down", " <tool_call>", reason="length") as server:
        whole = json.loads((await server.ask(PATH, BODY)).body)
        assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        (item,) = whole["output"]
        assert item["content"][0]["text"].strip() == "Down"
        answer = await server.ask(PATH, BODY | {"stream": True})
        assert answer.events[-1].startswith(b"event: response.incomplete\n")


async def test_a_stream_that_fails_ends_with_the_items_so_far() -> None:
    async with scripted("Hi", " there") as server:
        server.engine.deliver = failing_after(2)
        answer = await server.ask(PATH, BODY | {"stream": True})
        events = [json.loads(one.split(b"data: ")[1]) for one in answer.events]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.failed", "failed")
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hi"


async def test_allowed_tools_are_those_that_are_found() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "apply_patch"}]}
    async with scripted(*SCRIPT[2:]) as server:
        whole = json.loads((await server.ask(PATH, BODY | {"tool_choice": choice})).body)
        assert [item["type"] for item in whole["output"]] == ["message", "function_call", "custom_tool_call"]
        sent = server.last_request
        assert [tool["function"]["name"] for tool in sent["template"]["tools"]] == ["dive", "apply_patch"]
        await server.ask(PATH, BODY | {"tool_choice": choice | {"mode": "required"}})
        schema = server.last_request["params"]["json_schema"]
        assert [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]] == ["apply_patch"]
        hosted = {"tool_choice": choice | {"tools": [{"type": "mcp", "server_label": "sea", "name": "dive"}]}}
        assert (await server.ask(PATH, BODY | hosted)).status == 200 and "json_schema" not in server.last_request["params"]
        refused = await server.ask(PATH, BODY | {"tool_choice": choice | {"tools": [{"type": "function", "name": "swim"}]}})
        assert refused.status == 400 and b"tool_choice allows 'swim'" in refused.body
