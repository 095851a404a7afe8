"""Tool calls in the formats of models, whole and in pieces of any size."""

from __future__ import annotations

import json
import sys
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetide.engine.sampling.json_schemas import readable
from pagetide.server.tools import ToolCalls, ToolParser, ToolsInvalid, detect_parser

DIVING = {"type": "object", "properties": {"depth": {"$ref": "#/$defs/Depth"}}, "$defs": {"Depth": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "dive", "parameters": DIVING}},
    {"type": "function", "function": {"name": "surface"}},
]


def calls_of(choice: Any = "auto", parser: ToolParser = "hermes", **fields: Any) -> ToolCalls:
    return ToolCalls({"tools": TOOLS, "tool_choice": choice, **fields}, parser, "chatcmpl-1")


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
    # without arguments
    ("hermes", '<tool_call>{"name": "surface"}</tool_call>', "", [("surface", "{}")]),
    ("hermes", '<tool_call>{"name": "surface", "arguments": null, "id": "a"}</tool_call>', "", [("surface", "{}")]),
    ("llama3", '{"parameters": "{}", "name": "surface"}', "", [("surface", "{}")]),
    # no calls of these tools
    *((parser, text, text, []) for parser in ("llama3", "mistral") for text in (
        '{"name": "Ada", "age": 36}', '[{"name": "Ada"}, {"name": "dive", "arguments": {}}]', '{"name": "dive", "age": 3}',
        '{"name": "dive", "arguments": 3}', '{"name": "dive", "arguments": [1]}', '{"name": "dive", "arguments": "deep"}',
        '{"name": "dive", "argum', '[{"depth": 3}, {"depth": 4}]; ', '{"name": "dive", "arguments": {"depth": 0x3}}',
        '{"arguments": {}, "name": "dive", "name": "surface"}', '{"name": "dive", "arguments": {}, "parameters": {}}',
        '{"name": "dive", "arguments": "{\\"depth\\": NaN}"}', '{"name": "dive", "arguments": {"note": "\t\\x"}} ',
    )),
    *(("hermes", f"<tool_call>{text}</tool_call>\n", f"<tool_call>{text}</tool_call>\n", []) for text in (
        '\n<function=dive>\n<parameter=depth>\n{"name": "dive", "arguments": {}}\n</parameter>\n</function>\n',
        '{"name": "swim", "arguments": {}}', '{"name": "dive", "arguments": true}', "dive", '{"name": "dive"',
        '{"name": "dive", "arguments": {"depth": }}', '{"name": "dive", "arguments": {"dep',  # it is cut off
    )),
    # text beside calls
    ("llama3", '{"name": "surface", "parameters": {}}\nThat is {all}; ', "That is {all};", [("surface", "{}")]),
    ("mistral", 'Now:\n[TOOL_CALLS] [{"name": "surface", "arguments": {}}] so, {"name": "dive", "arguments": {}}]',
     "Now:\n] so,", [("surface", "{}"), ("dive", "{}")]),
    ("mistral", 'Now [TOOL_CALLS] {"name": "swim"} {"name": "dive", "arguments": {}}',
     'Now [TOOL_CALLS] {"name": "swim"} {"name": "dive", "arguments": {}}', []),
    ("hermes", '<tool_call>{"name": "surface"}</tool_call>\nand </tool_call> <tool_call>{"name": "swim"}</tool_call>',
     'and </tool_call> <tool_call>{"name": "swim"}</tool_call>', [("surface", "{}")]),
    ("hermes", 'then<tool_call>{"name": "surface"}</tool_call>\n<tool_call>{"name": "surface"}</tool_call>bye \n', "then\nbye",
     [("surface", "{}")] * 2),
    ("hermes", '<tool_call>{"name": "surface", {</tool_call> <tool_call>{"name": "surface"}</tool_call>',
     '<tool_call>{"name": "surface", {</tool_call>', [("surface", "{}")]),
    ("llama3", 'then <|python_tag|>{"name": "surface"}; {"name": "surface"} bye', "then bye", [("surface", "{}")] * 2),
    ("mistral", '[TOOL_CALLS] well [TOOL_CALLS][{"name": "surface"}]', "[TOOL_CALLS] well", [("surface", "{}")]),
]  # fmt: skip


def test_formats() -> None:
    for parser, text, content, calls in CASES:
        message, called = calls_of(parser=parser).parse(0, text)
        found = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        assert (message["content"] or "", found, called) == (content, calls, bool(calls)), text


def in_pieces(parser: ToolParser, text: str, data: st.DataObject) -> tuple[str, list[tuple[str, str]], bool]:
    """Content, calls, and whether there are calls, of a text that comes in pieces of drawn sizes."""
    stream, deltas, at = calls_of(parser=parser), list[dict[str, Any]](), 0
    while at < len(text):
        size = data.draw(st.integers(1, 12))
        deltas += stream.stream(0, text[at : at + size], ends=False)[0]
        at += size
    last, called = stream.stream(0, "", ends=True)
    return *joined(deltas + last), called


@given(st.sampled_from(CASES), st.data())
def test_pieces_of_any_size_add_up_to_the_whole(case: tuple[ToolParser, str, str, list[Any]], data: st.DataObject) -> None:
    parser, text, content, calls = case
    assert in_pieces(parser, text, data) == (content, calls, bool(calls))


FRAGMENTS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<tool", "<", "[", "]", ", ", "; ", "\n", " ",
    "{", "}", '"', "well", '{"name": "dive", "arguments": {"depth": 1}}', '{"name": "surface"}', '{"name": "Ada"}',
    '{"name": "dive", "arg', '{"arguments": "{}", "name": "surface"}', '{"name": "dive", "arguments": [1]}', ":", "\\u00e4",
    '{"arguments": {"depth": -1.5e3}, "name": "dive"}', '{"name": "dive", "arguments": {"depth": 01}}', "\\", "1", "null",
)  # fmt: skip


@given(st.sampled_from(["hermes", "mistral", "llama3"]), st.lists(st.sampled_from(FRAGMENTS), max_size=9), st.data())
def test_pieces_of_any_text_add_up_to_the_whole(parser: ToolParser, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    message, called = calls_of(parser=parser).parse(0, text)
    content, calls, streamed = in_pieces(parser, text, data)
    whole = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    assert (calls, streamed, content) == (whole, called, message["content"] or "")
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    assert called or content == text


@given(st.sampled_from(["hermes", "mistral", "llama3"]), st.text(alphabet='[{<tol_ca>}]":,n \\', max_size=60))
def test_no_text_breaks_the_parser(parser: ToolParser, text: str) -> None:
    whole, called = calls_of(parser=parser).parse(0, text)
    assert called or whole["content"] == text


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON_VALUES, st.integers(0, 3), st.data())
def test_arguments_are_any_json_object_and_only_one(value: Any, indent: int, data: st.DataObject) -> None:
    arguments = json.dumps({"a": value}, indent=indent or None, ensure_ascii=indent == 1)
    call = f'{{"name": "dive", "arguments": {arguments}}}'
    assert in_pieces("llama3", call, data) == ("", [("dive", arguments)], True)
    place = data.draw(st.integers(0, len(call) - 1))
    broken = call[:place] + data.draw(st.sampled_from(["", '"', "{", "]", ",", "\\", "x", "\n"])) + call[place + 1 :]
    try:
        pairs = json.loads(broken, object_pairs_hook=list)
        expected = dict(pairs) if isinstance(pairs, list) and len(dict(pairs)) == len(pairs) else {}
    except ValueError:
        expected = {}
    message, called = calls_of(parser="llama3").parse(0, broken)
    assert called == (expected.get("name") == "dive" and isinstance(expected.get("arguments"), list)), broken
    assert called or message["content"] == broken


class Counted(str):
    """A text that counts the characters of its slices and sums."""

    copied = 0

    def _count(self, text: str) -> Counted:
        Counted.copied += len(text)
        return Counted(text)

    def __getitem__(self, place: Any) -> Counted:
        return self._count(super().__getitem__(place))

    def __add__(self, other: str) -> Counted:
        return self._count(super().__add__(other))

    def __radd__(self, other: str) -> Counted:
        return self._count(other + str(self))


def work_of(parser: ToolParser, text: str, piece: int) -> int:
    """The lines of Python that run, and the characters that are copied, for a text in pieces."""
    tools, lines, before = calls_of(parser=parser), 0, sys.gettrace()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    Counted.copied = 0
    sys.settrace(trace)
    try:
        for at in range(0, len(text), piece):
            tools.stream(0, Counted(text[at : at + piece]), ends=at + piece >= len(text))
    finally:
        sys.settrace(before)
    return lines + Counted.copied


FILLERS = ("a", " ", "<", "{", "[1,", '\\"', "0", "<tool_call>", "[TOOL_CALLS]{", "\\u00e4", "]", '{"name": "surface"}')


SHAPES: tuple[tuple[ToolParser, str], ...] = (
    ("hermes", '<tool_call>{"name": "dive", "arguments": {"note": "%s"}}'), ("hermes", "<tool_call>%s"), ("hermes", "a%s"),
    ("hermes", '<tool_call>{"name": "surface"}%s'), ("mistral", "[TOOL_CALLS][%s"), ("mistral", '[{"name": "surface"}%s'),
    ("llama3", '{"name": "dive", "arguments": {"depth": %s}}'), ("llama3", "%s"),
)  # fmt: skip


@pytest.mark.parametrize("piece", [1, 100_000])
def test_the_work_grows_with_the_text_and_no_faster(piece: int) -> None:
    for (parser, shape), filler in product(SHAPES, FILLERS):
        once, twice = (work_of(parser, shape % (filler * size), piece) for size in (50, 100))
        assert twice < 2.2 * once, (shape, filler)


def test_marks_that_are_special_tokens_stay_in_the_text_and_are_no_content() -> None:
    special = ("<s>", "[TOOL_CALLS]", "<tool_call>")
    asked: dict[str, Any] = {"tools": TOOLS}
    for parser, mark in (("mistral", "[TOOL_CALLS]"), ("hermes", "<tool_call>")):
        tools = ToolCalls(asked, parser, "chatcmpl-1", special)
        assert tools.params() == {"kept_special_tokens": [mark]}
        assert tools.parse(0, f"then {mark}bye ") == ({"content": "then bye "}, False)
        deltas, called = tools.stream(0, f'then {mark}{{"name": "surface"}}', ends=True)
        assert called and joined(deltas) == ("then", [("surface", "{}")])
        shown = ToolCalls({**asked, "skip_special_tokens": False}, parser, "chatcmpl-1", special)
        assert shown.params() == {} and shown.parse(0, f"then {mark}bye")[0] == {"content": f"then {mark}bye"}
    assert ToolCalls(asked, "llama3", "chatcmpl-1", special).params() == {}
    assert ToolCalls({**asked, "tool_choice": "none"}, "mistral", "chatcmpl-1", special).params() == {}


def test_a_required_call_that_is_cut_off_leaves_no_content() -> None:
    whole = '[{"name":"dive","parameters":{"depth":4}},{"name":"sur'
    for size in range(len(whole)):
        text = whole[:size]
        tools = calls_of("required")
        deltas = [delta for character in text for delta in tools.stream(0, character, ends=False)[0]]
        deltas += tools.stream(0, "", ends=True)[0]
        content, calls = joined(deltas)
        assert content == "" and all("content" not in delta for delta in deltas), text
        message, called = calls_of("required").parse(0, text)
        assert not message["content"] and called == bool(calls), text
        assert calls == ([("dive", text[29:40])] if size > 29 else []), text


def test_required_calls_are_constrained_to_an_array_of_calls() -> None:
    tools = calls_of("required", parallel_tool_calls=False)
    schema = tools.params()["json_schema"]
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    assert [item["properties"]["name"]["const"] for item in schema["items"]["anyOf"]] == ["dive", "surface"]
    deltas, called = tools.stream(0, '[{"name":"dive","parameters":{"depth":4}}]', ends=True)
    assert called and joined(deltas) == ("", [("dive", '{"depth":4}')])


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
    schema = calls_of("required", tools=tools).params()["json_schema"]
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
    named = calls_of({"type": "function", "function": {"name": "surface"}}).params()["json_schema"]
    assert named["properties"] == {} and named["additionalProperties"] is False


def test_a_named_function_takes_the_text_as_its_arguments() -> None:
    tools = calls_of({"type": "function", "function": {"name": "dive"}})
    assert tools.params()["json_schema"]["properties"] == DIVING["properties"]
    first, _ = tools.stream(0, '{"depth"', ends=False)
    second, _ = tools.stream(0, ":4}", ends=True)
    assert joined(first + second) == ("", [("dive", '{"depth":4}')])


def test_contradictions_are_refused() -> None:
    swim, json_answer = {"type": "function", "function": {"name": "swim"}}, {"response_format": {"type": "json_object"}}
    for choice, fields in (("required", {"tools": None}), (swim, {}), ("required", json_answer)):
        with pytest.raises(ToolsInvalid) as caught:
            calls_of(choice, **fields)
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
            calls_of("required", tools=[{"type": "function", "function": one} for one in functions]).params()
        assert caught.value.param == "tools", message


def test_the_format_follows_the_chat_template_which_gets_the_tools() -> None:
    templates = {"a <tool_call> b": "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3", "plain": "none"}
    assert {template: detect_parser(template) for template in templates} == templates
    assert detect_parser(None) == "none"
    assert json.dumps(calls_of().template()["tools"]) == json.dumps(TOOLS)
    assert calls_of("none").template() == {}
