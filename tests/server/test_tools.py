"""Tool calls in the formats of models, whole and in pieces of any size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pydantic")

from pagetide.server.errors import ApiError
from pagetide.server.requests import ChatRequest
from pagetide.server.tools import ToolCalls, ToolParser, detect_parser

DIVING = {"type": "object", "properties": {"depth": {"$ref": "#/$defs/Depth"}}, "$defs": {"Depth": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "dive", "parameters": DIVING}},
    {"type": "function", "function": {"name": "surface"}},
]


def calls_of(choice: Any = "auto", parser: ToolParser = "hermes", **fields: Any) -> ToolCalls:
    body = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "tool_choice": choice, **fields}
    return ToolCalls(ChatRequest.model_validate(body), parser, "chatcmpl-1")


def joined(deltas: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls (name, arguments) of deltas, as a client adds them up."""
    content, calls = "", dict[int, tuple[str, str]]()
    for delta in deltas:
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            name, arguments = calls.get(call["index"], ("", ""))
            assert (call.get("id") is not None) == (name == "")  # once, at its beginning
            function = call["function"]
            calls[call["index"]] = name + function.get("name", ""), arguments + function["arguments"]
    return content, [calls[index] for index in range(len(calls))]


CASES: list[tuple[ToolParser, str, str, list[tuple[str, str]]]] = [
    (
        "hermes",
        'Down.\n<tool_call>\n{"name": "dive", "arguments": {"depth": 3, "note": "}<tool_call>\\""}}\n</tool_call>\n'
        '<tool_call>\n{"name": "surface", "arguments": {}}\n</tool_call>',
        "Down.",
        [("dive", '{"depth": 3, "note": "}<tool_call>\\""}'), ("surface", "{}")],
    ),
    ("hermes", '<tool_call>{"arguments": {"depth": [1, {}]}, "name": "dive"}</tool_call>', "",
     [("dive", '{"depth": [1, {}]}')]),
    ("hermes", '<tool_call>{"name": "dive", "arguments": "{\\"depth\\": 1}"}</tool_call>', "", [("dive", '{"depth": 1}')]),
    ("hermes", "1 < 2, and <tool is no mark\n", "1 < 2, and <tool is no mark\n", []),
    ("mistral", '[TOOL_CALLS] [{"name": "dive", "arguments": {"depth": 1}}, {"name": "surface", "arguments": {}}]', "",
     [("dive", '{"depth": 1}'), ("surface", "{}")]),
    ("mistral", '[{"name": "dive", "arguments": {"depth": 1}}]', "", [("dive", '{"depth": 1}')]),
    ("mistral", "[sic] no call", "[sic] no call", []),
    ("llama3", '{"name": "dive", "parameters": {"depth": 1}}', "", [("dive", '{"depth": 1}')]),
    ("llama3", '<|python_tag|>{"name": "dive", "parameters": {}}; {"name": "surface", "parameters": {}}', "",
     [("dive", "{}"), ("surface", "{}")]),
    ("llama3", "The sea {is} deep", "The sea {is} deep", []),
    ("none", '<tool_call>{"name": "dive"}</tool_call>', '<tool_call>{"name": "dive"}</tool_call>', []),
]  # fmt: skip


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES)
def test_formats(parser: ToolParser, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    message, called = calls_of(parser=parser).parse(0, text)
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    assert (message["content"] or "", found, called) == (content, calls, bool(calls))


@given(st.sampled_from(CASES), st.data())
def test_pieces_of_any_size_add_up_to_the_whole(
    case: tuple[ToolParser, str, str, list[Any]], data: st.DataObject
) -> None:
    parser, text, content, calls = case
    stream, deltas, at = calls_of(parser=parser), list[dict[str, Any]](), 0
    while at < len(text):
        size = data.draw(st.integers(1, 9))
        deltas += stream.stream(0, text[at : at + size], ends=False)[0]
        at += size
    last, called = stream.stream(0, "", ends=True)
    assert joined(deltas + last) == (content, calls) and called == bool(calls)


@given(st.sampled_from(["hermes", "mistral", "llama3"]), st.text(alphabet='[{<tol_ca>}]":,n \\', max_size=60))
def test_no_text_breaks_the_parser(parser: ToolParser, text: str) -> None:
    whole, called = calls_of(parser=parser).parse(0, text)
    assert called or whole["content"].strip() == text.strip()


def test_a_call_that_is_cut_off_keeps_what_came() -> None:
    deltas, called = calls_of().stream(0, 'Well <tool_call>{"name": "dive", "arguments": {"dep', ends=True)
    assert called and joined(deltas) == ("Well", [("dive", '{"dep')])


@pytest.mark.parametrize("size", range(len('[{"name":"dive","parameters":{"depth":4}},{"name":"sur')))
def test_a_required_call_that_is_cut_off_leaves_no_content(size: int) -> None:
    text = '[{"name":"dive","parameters":{"depth":4}},{"name":"sur'[:size]
    arguments = text[29:40]
    wanted = [("dive", arguments)] if size > 15 else []
    tools = calls_of("required")
    deltas = [delta for character in text for delta in tools.stream(0, character, ends=False)[0]]
    deltas += tools.stream(0, "", ends=True)[0]
    content, calls = joined(deltas)
    assert content == "" and all("content" not in delta for delta in deltas)
    message, called = calls_of("required").parse(0, text)
    assert not message["content"] and called == bool(calls)
    assert calls == wanted


def test_required_calls_are_constrained_to_an_array_of_calls() -> None:
    tools = calls_of("required", parallel_tool_calls=False)
    schema = tools.params()["json_schema"]
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    assert [item["properties"]["name"] for item in schema["items"]["anyOf"]] == [
        {"const": "dive"},
        {"const": "surface"},
    ]
    assert schema["$defs"] == DIVING["$defs"] and "$defs" not in schema["items"]["anyOf"][0]["properties"]["parameters"]
    deltas, called = tools.stream(0, '[{"name":"dive","parameters":{"depth":4}}]', ends=True)
    assert called and joined(deltas) == ("", [("dive", '{"depth":4}')])


def test_a_named_function_takes_the_text_as_its_arguments() -> None:
    tools = calls_of({"type": "function", "function": {"name": "dive"}})
    assert tools.params()["json_schema"]["properties"] == DIVING["properties"]
    first, _ = tools.stream(0, '{"depth"', ends=False)
    second, _ = tools.stream(0, ":4}", ends=True)
    assert joined(first + second) == ("", [("dive", '{"depth":4}')])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": None, "choice": "required"}, "tool_choice"),
        ({"choice": {"type": "function", "function": {"name": "swim"}}}, "tool_choice"),
        ({"choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], param: str) -> None:
    choice = fields.pop("choice")
    with pytest.raises(ApiError) as caught:
        calls_of(choice, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_the_format_follows_the_chat_template() -> None:
    templates = {
        "... <tool_call> ...": "hermes",
        "[TOOL_CALLS]": "mistral",
        "<|python_tag|>": "llama3",
        "plain": "none",
    }
    assert {template: detect_parser(template) for template in templates} == templates
    assert detect_parser(None) == "none"


def test_tools_reach_the_template_unless_none_may_be_called() -> None:
    assert json.dumps(calls_of().template()["tools"]) == json.dumps(TOOLS)
    assert calls_of("none").template() == {}
