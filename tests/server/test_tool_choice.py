"""The choice of tools: what it demands of the text, and what it makes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagetide.api.json_schemas import readable
from pagetide.server.answers import Answer, AnswerReader
from pagetide.server.tool_choice import ToolsInvalid

DIVING = {"type": "object", "properties": {"depth": {"$ref": "#/$defs/Depth"}}, "$defs": {"Depth": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "dive", "parameters": DIVING}},
    {"type": "function", "function": {"name": "surface"}},
]


def reader_of(choice: Any = "auto", **fields: Any) -> AnswerReader:
    return AnswerReader({"tools": TOOLS, "tool_choice": choice, **fields}, response_id="chatcmpl-1")


def calls_in(answer: Answer) -> list[tuple[str, str]]:
    return [(call.name, call.text) for call in answer.calls]


def test_a_required_call_that_is_cut_off_leaves_no_content() -> None:
    whole = '[{"name":"dive","parameters":{"depth":4}},{"name":"sur'
    for size in range(len(whole)):
        answer = reader_of("required").read(0, whole[:size], is_cut=True)
        assert not answer.content and calls_in(answer) == ([("dive", '{"depth": 4}')] if size > 41 else []), whole[:size]


def test_required_calls_are_constrained_to_an_array_of_calls() -> None:
    reader = reader_of("required", parallel_tool_calls=False)
    schema = reader.params()["json_schema"]
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    assert [item["properties"]["name"]["const"] for item in schema["items"]["anyOf"]] == ["dive", "surface"]
    answer = reader.read(0, '[{"name":"dive","parameters":{"depth":4}}]')
    assert (answer.content, calls_in(answer)) == ("", [("dive", '{"depth": 4}')])


def test_references_of_each_tool_are_its_own() -> None:
    """Definitions of one name, of draft 7, and a reference to the root; a tool without parameters takes none."""
    llguidance = pytest.importorskip("llguidance")
    red, blue = {"enum": ["red"]}, {"enum": ["blue"]}
    item = {"type": "object", "required": ["c"], "additionalProperties": False}
    schemas = [
        {**item, "properties": {"c": {"$ref": "#/$defs/Item"}}, "$defs": {"Item": red}},
        {**item, "properties": {"c": {"$ref": "#/$defs/Item"}}, "$defs": {"Item": blue}},
        {**item, "properties": {"c": {"$ref": "#/definitions/Item"}}, "definitions": {"Item": blue}},
        {**item, "properties": {"c": red, "n": {"$ref": "#"}, "d": {"$ref": "#/properties/c"}}},
        {**item, "properties": {"c": {"$ref": "own#/$defs/Item"}}, "$defs": {"Item": red}, "$id": "own"},
        {"properties": {"c": red, "$id": {"const": {"$id": "own"}}}, "required": ["c"], "$defs": {"o": {"$id": "urn:t"}}},
        {"type": ["null", "object"], "properties": {"c": red}, "required": ["c"], "$defs": {"o": {"$id": "urn:t"}}},
        *(
            {**item, "$id": "own", "properties": {"c": {"$ref": to}}, "definitions": {"x": {"$id": name, **color}}}
            for to, name in (("#T", "#T"), ("part", "part"))
            for color in (red, blue)
        ),
        {**item, "$id": "#T", "properties": {"c": red, "n": {"$ref": "#T"}}},
    ]
    functions = [{"name": f"f{i}", "parameters": schema} for i, schema in enumerate(schemas)] + [{"name": "f12"}]
    tools = [{"type": "function", "function": function} for function in functions]
    schema = reader_of("required", tools=tools).params()["json_schema"]
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(readable(schema)))
    tokenizer = llguidance.LLTokenizer("byte")

    def fits(number: int, arguments: Any) -> bool:
        matcher = llguidance.LLMatcher(tokenizer, grammar)
        text = json.dumps([{"name": f"f{number}", "parameters": arguments}], separators=(",", ":"))
        tokens = tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())

    for number in range(12):
        right, wrong = ("blue", "red") if number in (1, 2, 8, 10) else ("red", "blue")
        assert fits(number, {"c": right}) and not fits(number, {"c": wrong}), number
    assert fits(3, {"c": "red", "n": {"c": "red", "n": {"c": "red"}, "d": "red"}})
    assert not any(fits(number, {"c": "red", "n": {}}) for number in (3, 11))
    assert fits(12, {}) and not fits(12, {"c": 1})
    assert not any(fits(number, other) for number in (5, 6) for other in list[Any]([None, "hi", [1], {}]))
    named = reader_of({"type": "function", "function": {"name": "surface"}}).params()["json_schema"]
    assert named["properties"] == {} and named["additionalProperties"] is False


def test_a_named_function_takes_the_text_as_its_arguments() -> None:
    named = {"type": "function", "function": {"name": "dive"}}
    reader = reader_of(named)
    assert reader.params()["json_schema"]["properties"] == DIVING["properties"]
    assert reader.stream(0, '{"depth"', ends=False) == []
    (call,) = reader.stream(0, ":4} ", ends=True)
    assert (call.name, call.text) == ("dive", '{"depth": 4}')
    cut = reader_of(named).read(0, '{"depth": 4', is_cut=True)
    assert (cut.content, cut.calls) == ("", [])


def test_contradictions_are_refused() -> None:
    swim, json_answer = {"type": "function", "function": {"name": "swim"}}, {"structured_outputs": {"regex": "a"}}
    for choice, fields in (("required", {"tools": None}), (swim, {}), ("required", json_answer)):
        with pytest.raises(ToolsInvalid) as caught:
            reader_of(choice, **fields)
        assert caught.value.param == "tool_choice", (choice, fields)
    own, far = {"$id": "own", "type": "integer"}, {"$defs": {"o": {"$id": "urn:t", "const": 1}}}
    refusals: tuple[tuple[Any, ...], ...] = (
        ("two functions 'f0'", {}, {}, {}),
        (r"the \$id of a tool's parameters must be a text", {"$id": ["x"]}),
        (r"have the \$id 'urn:own'", {"$id": "urn:own", "title": "a"}, {"$id": "urn:own"}),
        ("is no URI", {"not": {"$id": "http://["}}),
        (r"have the \$id 'urn:t'", far, {"anyOf": [{"not": {"$id": "urn:t#", "const": True}}]}),
        (r"have the \$id 'http://e/own'", {"$id": "http://e/a", "items": own}, {"$id": "http://e/b", "items": own | {"x": 1}}),
        *(("'f0' permit no object", none) for none in ({"type": "array"}, {"type": ["null"]}, {"enum": ["hi"]}, {"const": 1})),
    )
    for message, *schemas in refusals:
        functions = [{"name": f"f{i if len(schemas) < 3 else 0}", "parameters": each} for i, each in enumerate(schemas)]
        with pytest.raises(ToolsInvalid, match=message) as caught:
            reader_of("required", tools=[{"type": "function", "function": one} for one in functions]).params()
        assert caught.value.param == "tools", message


def test_the_chat_template_gets_the_tools() -> None:
    assert json.dumps(reader_of().template()["tools"]) == json.dumps(TOOLS)
    assert reader_of("none").template() == {}


def test_an_answer_of_a_given_form_is_no_call() -> None:
    text = '[{"name": "dive", "arguments": {}}]'
    form = {"type": "json_object"}
    answer = reader_of(response_format=form).read(0, text)
    assert (answer.content, answer.calls) == (text, [])
    demanded = reader_of("required", response_format=form)  # as agents do that have a form for their last answer
    assert demanded.params()["json_schema"]["type"] == "array"
    assert calls_in(demanded.read(0, text)) == [("dive", "{}")]
