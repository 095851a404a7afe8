"""Reasoning and calls in the formats of model families, whole and in pieces of any size.

The texts are those that the families' published chat templates and encoders write; configs/response_templates names them.
"""

from __future__ import annotations

import json
import random
import re
import sys
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetide.server.answers import AnswerReader
from pagetide.server.response_parser import Part, ResponseParser
from pagetide.server.response_templates import PLAIN_TEMPLATE, TemplateInvalid, choose_template, template_named, templates

DIVE: dict[str, Any] = {
    "properties": {
        "odd": {"type": 5, "anyOf": 5, "enum": 5},
        "depth": {"type": "integer"},
        "note": {"type": "string"},
        "deep": {"type": "boolean"},
    }
}
SCHEMAS: dict[str, dict[str, Any]] = {"dive": DIVE, "surface": {}}


class Said(NamedTuple):
    content: str
    reasoning: str
    calls: list[tuple[str, Any]]


def said(parts: list[Part]) -> Said:
    """What parts add up to. The arguments of each call are the JSON of an object."""
    calls = [(part.name, json.loads(part.text)) for part in parts if part.kind == "call"]
    assert all(isinstance(arguments, dict) for _, arguments in calls)
    content, reasoning = ("".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning"))
    return Said(content, reasoning, calls)


def read(name: str, text: str, sizes: Any = None, is_cut: bool = False, calls: bool = True, **options: Any) -> Said:
    """A text as a parser reads it, in pieces of these sizes."""
    parser = ResponseParser(template_named(name), SCHEMAS if calls else None, **options)
    parts, at = list[Part](), 0
    while at < len(text):
        size = len(text) if sizes is None else next(sizes)
        parts += parser.feed(text[at : at + size])
        at += size
    return said(parts + parser.finish(is_cut))


DIVED = [("dive", {"depth": 3, "note": "a </tool_call> \"b\""}), ("surface", {})]  # fmt: skip
# Per family: reasoning, a word before, and two calls, of which the first has a mark in its text.
ANSWERS: dict[str, str] = {
    "hermes": (
        '<think>\nHm.\n</think>\n\nDown.\n<tool_call>\n{"name": "dive", "arguments": {"depth": 3, "note": "a'
        ' </tool_call> \\"b\\""}}\n</tool_call>\n<tool_call>\n{"name": "surface", "arguments": {}}\n'
        '</tool_call>'
    ),
    "qwen3-coder": (
        '<think>\nHm.\n</think>\n\nDown.\n\n<tool_call>\n<function=dive>\n<parameter=depth>\n3\n</parameter>\n'
        '<parameter=note>\na </tool_call> "b"\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n'
        '<function=surface>\n</function>\n</tool_call>'
    ),
    "glm4": (
        '\n<think>Hm.</think>\nDown.\n<tool_call>dive\n<arg_key>depth</arg_key>\n<arg_value>3</arg_value>\n'
        '<arg_key>note</arg_key>\n<arg_value>a </tool_call> "b"</arg_value>\n</tool_call>\n<tool_call>'
        'surface\n</tool_call>'
    ),
    "minimax-m2": (
        '<think>\nHm.\n</think>\n\nDown.\n<minimax:tool_call>\n<invoke name="dive">\n<parameter name="depth">'
        '3</parameter>\n<parameter name="note">a </tool_call> "b"</parameter>\n</invoke>\n<invoke'
        ' name="surface">\n</invoke>\n</minimax:tool_call>'
    ),
    "deepseek-v3": (
        '<think>\nHm.\n</think>\n\nDown.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>dive\n'
        '```json\n{"depth": 3, "note": "a </tool_call> \\"b\\""}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>'
        'function<｜tool▁sep｜>surface\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseek-v3.1": (
        '<think>Hm.</think>Down.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>dive<｜tool▁sep｜>{"depth": 3,'
        ' "note": "a </tool_call> \\"b\\""}<｜tool▁call▁end｜><｜tool▁call▁begin｜>surface<｜tool▁sep｜>'
        '{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "kimi-k2": (
        '<think>Hm.</think>Down.<|tool_calls_section_begin|><|tool_call_begin|>'
        'functions.dive:0<|tool_call_argument_begin|>{"depth": 3, "note": "a </tool_call>'
        ' \\"b\\""}<|tool_call_end|><|tool_call_begin|>functions.surface:1<|tool_call_argument_begin|>'
        '{}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "kimi-k3": (
        '<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Down.<|close|>response<|sep|>'
        '<|open|>tools<|sep|><|open|>call tool="dive" index="1"<|sep|><|open|>argument key="depth"'
        ' type="number"<|sep|>3<|close|>argument<|sep|><|open|>argument key="note" type="string"<|sep|>a'
        ' </tool_call> "b"<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="surface"'
        ' index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>'
    ),
    "mistral": (
        '[THINK]Hm.[/THINK]Down.[TOOL_CALLS]dive[ARGS]{"depth": 3, "note": "a </tool_call>'
        ' \\"b\\""}[TOOL_CALLS]surface[ARGS]{}'
    ),
    "gemma4": (
        '<|channel>thought\nHm.\n<channel|>Down.<|tool_call>call:dive{depth:3,note:<|"|>a </tool_call>'
        ' "b"<|"|>}<tool_call|><|tool_call>call:surface{}<tool_call|>'
    ),
    "gpt-oss": (
        '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>'
        'Down.<|end|><|start|>assistant to=functions.dive<|channel|>commentary <|constrain|>'
        'json<|message|>{"depth": 3, "note": "a </tool_call> \\"b\\""}<|call|><|start|>assistant<|channel|>'
        'commentary to=functions.surface <|constrain|>json<|message|>{}'
    ),
    "nemotron": (
        '<think>\nHm.\n</think>\n\nDown.\n<TOOLCALL>[{"name": "dive", "arguments": {"depth": 3, "note": "a'
        ' </tool_call> \\"b\\""}}, {"name": "surface", "arguments": {}}]</TOOLCALL>'
    ),
    "phi4": (
        '<think>\nHm.\n</think>\n\nDown.<|tool_call|>[{"name": "dive", "arguments": {"depth": 3, "note": "a'
        ' </tool_call> \\"b\\""}}, {"name": "surface", "arguments": {}}]<|/tool_call|>'
    ),
    "granite3": (
        '<think>Hm.</think>\nDown.<|tool_call|>[{"arguments": {"depth": 3, "note": "a </tool_call>'
        ' \\"b\\""}, "name": "dive"}, {"name": "surface", "arguments": {}}]'
    ),
    "lfm2": (
        '<think>Hm.</think>\nDown.<|tool_call_start|>[dive(depth=3, note=\'a </tool_call> "b"\'),'
        ' surface()]<|tool_call_end|>'
    ),
}  # fmt: skip
for _version, _section, _space in (("v3.2", "function_calls", ""), ("v4", "tool_calls", ""), ("v4.1", " calls", " ")):
    ANSWERS[f"deepseek-{_version}"] = (
        f'<think>Hm.</think>Down.\n\n<｜DSML｜{_section}>\n<｜DSML｜{_space}invoke name="dive">\n'
        f'<｜DSML｜{_space}parameter name="depth" '
        f'string="false">3</｜DSML｜{_space}parameter>\n<｜DSML｜{_space}parameter name="note" string="true">a </tool_call> "b"'
        f'</｜DSML｜{_space}parameter>\n</｜DSML｜{_space}invoke>\n<｜DSML｜{_space}invoke name="surface"/>\n'
        f"</｜DSML｜{_section}>"
    )


@pytest.mark.parametrize("name", ANSWERS)
def test_reasoning_content_and_calls_of_each_family_however_the_text_is_cut(name: str) -> None:
    text, wanted = ANSWERS[name], Said("Down.", "Hm.", DIVED)
    assert read(name, text) == wanted
    assert read(name, text, iter(lambda: 1, 0)) == wanted
    for seed in range(5):
        draw = random.Random(seed)
        assert read(name, text, iter(lambda draw=draw: draw.randint(1, 20), 0)) == wanted


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("name", ANSWERS)
def test_of_an_answer_that_is_cut_off_anywhere_no_mark_or_half_call_is_content(name: str, is_special: bool) -> None:
    text = ANSWERS[name]
    for size in range(len(text)):
        found = read(name, text[:size], is_cut=True, hidden=template_named(name).marks if is_special else ())
        content, reasoning = found.content.rstrip("<[").strip(), found.reasoning.rstrip("<[").strip()  # not yet a mark
        assert "Down.".startswith(content) and "Hm.".startswith(reasoning), (text[:size], found)
        assert found.calls == DIVED[: len(found.calls)], (text[:size], found)


@pytest.mark.parametrize(("name", "text", "wanted"), [
    ("deepseek-v3", ANSWERS["deepseek-v3"].partition("{")[0] + "{}\n```<\ufffd", Said("Down.", "Hm.", [])),
    ("deepseek-v4", "Down.\n\n<\ufffd", Said("Down.\n\n<", "", [])), ("hermes", "1 \ufffd", Said("1 \ufffd", "", [])),
    ("llama3", '{"name": "di', Said("", "", [])), ("llama3", '{"name": "Di', Said('{"name": "Di', "", [])),
    ("llama3", '{"name": "dive', Said("", "", [])), ("llama4", "[surf", Said("", "", [])),
])  # fmt: skip
def test_cuts_amid_a_character_of_a_mark_or_a_name(name: str, text: str, wanted: Said) -> None:
    assert read(name, text, is_cut=True) == read(name, text, iter(lambda: 1, 0), is_cut=True) == wanted
    assert "\ufffd" not in text or "\ufffd" in read(name, text).content, "of an answer that ends all text is there"


CASES: list[tuple[str, str, Said]] = [
    # Without a mark
    ("llama3", '{"name": "dive", "parameters": {"depth": 1}}', Said("", "", [("dive", {"depth": 1})])),
    ("llama3", '<|python_tag|>{"name": "dive", "parameters": {}}; {"name": "surface", "parameters": {}}',
     Said("", "", [("dive", {}), ("surface", {})])),
    ("llama3", '{"type": "function", "name": "dive", "parameters": {}}', Said("", "", [("dive", {})])),
    ("llama4", "[dive(depth=1, note='it\\'s', deep=True), surface()]",
     Said("", "", [("dive", {"depth": 1, "note": "it's", "deep": True}), ("surface", {})])),
    ("llama4", "<|python_start|>[dive(note=\"a\")]<|python_end|>", Said("", "", [("dive", {"note": "a"})])),
    ("llama4", '{"name": "dive", "parameters": {}}', Said("", "", [("dive", {})])),
    ("lfm2", '<|tool_call_start|>[{"name": "dive", "arguments": {}}, {"name": "surface"}]<|tool_call_end|>',
     Said("", "", [("dive", {}), ("surface", {})])),
    ("gemma3", "```tool_code\n[dive(depth=1)]\n```", Said("", "", [("dive", {"depth": 1})])),
    ("mistral", '[{"name": "dive", "arguments": {"depth": 1}}]', Said("", "", [("dive", {"depth": 1})])),
    ("mistral", '[TOOL_CALLS] [{"name": "dive", "arguments": "{\\"depth\\": 1}"}]', Said("", "", [("dive", {"depth": 1})])),
    ("mistral", '[TOOL_CALLS]dive[CALL_ID]abc123456[ARGS]{}', Said("", "", [("dive", {})])),
    # What is no call
    *((name, text, Said(text, "", [])) for name, text in (
        ("llama3", '{"a": 1} is a dict'), ("llama3", '{"name": "Ada", "arguments": {}}'), ("llama3", "The sea {is} deep"),
        ("llama4", "[dive](http://sea)"), ("llama4", "[swim()]"), ("llama4", "[dive(=1)]"),
        ("mistral", "[sic] no call"),
        ("hermes", "1 < 2, and <tool is no mark\n"), ("hermes", "The <think> mark and </think> in a text"),
        ("hermes", '<tool_call>{"name": "dive", "arguments": [1]}</tool_call>'), ("hermes", "<tool_call>{}</tool_call>"),
        ("hermes", '<tool_call>{"name": "dive", "arguments": {"a": 1, "a": 2}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "dive", "arguments": {"depth": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "dive", "arguments": {"depth": 01}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "dive", "arguments": NaN}</tool_call>'),
        ("hermes", '<tool_call>{"name": "dive"'), ("qwen3-coder", "<tool_call>\n<function=dive>\n<parameter=depth>\n3"),
        ("gpt-oss", "Plain text"), ("gemma4", "<|tool_call>call:bad no brace<tool_call|>"),
        ("deepseek-v3", "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>dive\n```json\n{}\n```<｜tool▁calls▁end｜>"),
    )),
    # Beside calls
    ("hermes", 'then<tool_call>{"name": "surface"}</tool_call>bye', Said("then\nbye", "", [("surface", {})])),
    ("hermes", 'then <tool_call>{"name": "surface"}</tool_call>\n<tool_call>{"name": "surface"}</tool_call>\nbye',
     Said("then bye", "", [("surface", {})] * 2)),
    ("hermes", '<tool_call>{"name": "surface", {</tool_call> <tool_call>{"name": "surface"}</tool_call>',
     Said('<tool_call>{"name": "surface", {</tool_call>', "", [("surface", {})])),
    ("hermes", '<tool_call>{"name": "surface"}', Said("", "", [("surface", {})])),  # the end of the turn closes it
    ("kimi-k2", "A. <|tool_calls_section_begin|><|tool_call_begin|>functions.surface:0<|tool_call_argument_begin|>{}"
     "<|tool_call_end|><|tool_calls_section_end|> B.", Said("A.  B.", "", [("surface", {})])),
    ("qwen3-coder", "<function=surface>\n</function>\n</tool_call>", Said("", "", [("surface", {})])),
    ("qwen3-coder", "<tool_call>\n<function=dive>\n<parameter=note>\na\n<parameter=depth>\n3\n</parameter>\n"
     "</function>\n</tool_call>",
     Said("", "", [("dive", {"note": "a", "depth": 3})])),
    ("qwen3-coder", "<tool_call>\n<function=dive>\n<parameter=deep>\nTrue\n</parameter>\n<parameter=x>\n1\n"
     "</parameter>\n</function>\n"
     "</tool_call>", Said("", "", [("dive", {"deep": True, "x": "1"})])),
    ("hermes", '<tool_call>{"name": "dive", "arguments": {"note": "\\ud800"}}</tool_call>',
     Said("", "", [("dive", {"note": "\ufffd"})])),
    ("hermes", '<tool_call>{"name": "\\udc00x", "arguments": {"note": "\\ud83d\\ude00"}}</tool_call>',
     Said("", "", [("\ufffdx", {"note": "\U0001f600"})])),
    ("hermes", f'<tool_call>{{"name": "dive", "arguments": {{"depth": {"9" * 400}}}}}</tool_call>',
     Said("", "", [("dive", {"depth": int("9" * 400)})])),
    ("hermes", '<tool_call>{"name": "dive", "arguments": {"note": "a\nb"}}</tool_call>',
     Said("", "", [("dive", {"note": "a\nb"})])),
    ("gpt-oss", " to=functions.dive<|channel|>commentary<|message|>{}", Said("", "", [("dive", {})])),
    ("gpt-oss", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>",
     Said("", "a\nb", [])),
]  # fmt: skip


STRAY = [
    ("gpt-oss", "<|start|>no message<|constrain|>", "no message"),
    ("gpt-oss", "<|channel|>final<|message|>It<|constrain|> is<|channel|>wet.<|return|>", "It iswet."),
    ("mistral", "It is[TOOL_CALLS][ARGS] wet.", "It is wet."),
    ("mistral", "It is[TOOL_CALLS][[TOOL_CALLS] wet.", "It is[ wet."),
]


@given(st.sampled_from(STRAY), st.data())
def test_marks_in_the_wrong_place_are_no_content(case: tuple[str, str, str], data: st.DataObject) -> None:
    name, text, content = case
    hidden = template_named(name).marks
    assert read(name, text, hidden=hidden) == Said(content, "", [])
    assert read(name, text, iter(lambda: data.draw(st.integers(1, 12)), 0), hidden=hidden) == Said(content, "", [])


@given(st.sampled_from(CASES), st.data())
def test_cases(case: tuple[str, str, Said], data: st.DataObject) -> None:
    name, text, wanted = case
    assert read(name, text) == wanted
    assert read(name, text, iter(lambda: data.draw(st.integers(1, 12)), 0)) == wanted


def test_a_call_amid_reasoning_ends_it_where_the_format_says_so() -> None:
    call = '<tool_call>{"name": "surface"}</tool_call>'
    assert read("hermes", f"Hm.\n{call}", prompt_end="<think>\n") == Said("", "Hm.", [("surface", {})])
    assert read("hermes", "Say <tool_call> now.</think>Hi", prompt_end="<think>\n") == Said("Hi", "Say <tool_call> now.", [])
    text = f"<think>Hm. {call} No.</think>\n\nHi"
    assert read("hermes", text) == read("hermes", text, iter(lambda: 1, 0)) == Said("No.\n\nHi", "Hm.", [("surface", {})])
    text = "[THINK]Say [TOOL_CALLS]surface[ARGS]{} now.[/THINK]Hi"
    assert read("mistral", text) == Said("Hi", "Say [TOOL_CALLS]surface[ARGS]{} now.", [])


def test_the_end_of_the_prompt_says_whether_the_answer_begins_with_reasoning() -> None:
    for end, wanted in (
        ("<|im_start|>assistant\n<think>\n", Said("Hi", "Hm.", [])),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Said("Hm.</think>Hi", "", [])),
        ("<|im_start|>assistant\n", Said("Hm.</think>Hi", "", [])),
    ):
        assert read("hermes", "Hm.</think>Hi", prompt_end=end) == wanted


def test_without_tools_calls_are_content_and_special_marks_are_none() -> None:
    text = '<think>a</think>Hi <tool_call>{"name": "surface"}</tool_call>'
    assert read("hermes", text, calls=False) == Said('Hi <tool_call>{"name": "surface"}</tool_call>', "a", [])
    assert read("mistral", "Hi [TOOL_CALLS]x", calls=False, hidden=["[TOOL_CALLS]"]) == Said("Hi x", "", [])
    text = "<|channel|>commentary to=functions.dive<|message|>{}"
    assert read("gpt-oss", text, calls=False, hidden=template_named("gpt-oss").marks) == Said("{}", "", [])


FRAGMENTS = [
    *sorted({mark for one in templates().values() for mark in one.marks}),
    "{", "}", '"', "'", "[", "]", "(", ")", ",", ":", "=", "\\", "\n", " ", "<", "well", "dive", "surface", "1",
    "null", '{"name": "dive"',
    '{"name": "surface"}', '"arguments": {"depth": 1}}', "depth", "<|", "</", "ä", "\\u00e4", "assistant",
    " to=functions.dive", "analysis",
]  # fmt: skip


@given(st.sampled_from(sorted(templates())), st.lists(st.sampled_from(FRAGMENTS), max_size=14), st.booleans(), st.data())
def test_any_text_in_any_cuts_adds_up_to_the_whole(name: str, fragments: list[str], is_cut: bool, data: st.DataObject) -> None:
    text = "".join(fragments)
    whole = read(name, text, is_cut=is_cut)
    assert read(name, text, iter(lambda: data.draw(st.integers(1, 9)), 0), is_cut=is_cut) == whole
    if not is_cut and not whole.calls:  # nothing is lost but marks and white space
        kept = whole.reasoning + whole.content
        rest = text
        for mark in sorted(template_named(name).marks, key=len, reverse=True):
            rest, kept = rest.replace(mark, ""), kept.replace(mark, "")
        assert sorted("".join(kept.split())) == sorted("".join(rest.split())) or "assistant" in text or "functions" in text, (
            text,
            whole,
        )


def lines_run(name: str, text: str, piece: int) -> int:
    """The lines of Python that run for a text in pieces."""
    parser, lines, before = ResponseParser(template_named(name), SCHEMAS), 0, sys.gettrace()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        for at in range(0, len(text), piece):
            parser.feed(text[at : at + piece])
            lines += len(parser._reader.text) // 16  # what is held is copied with the next piece
        parser.finish()
    finally:
        sys.settrace(before)
    return lines


SHAPES = (
    ("hermes", '<tool_call>{"name": "dive", "arguments": {"note": "%s"}}'), ("hermes", "<tool_call>%s"), ("hermes", "a%s"),
    ("hermes", "<think>%s"), ("hermes", '<tool_call>{"name": "surface"}%s'), ("mistral", "[TOOL_CALLS][%s"), ("llama3", "%s"),
    ("qwen3-coder", "<tool_call>\n<function=dive>\n<parameter=note>\n%s"), ("gpt-oss", "<|channel|>%s"), ("gemma4",
    "<|tool_call>call:dive{a:%s"),
)  # fmt: skip
FILLERS = (
    "a",
    " ",
    "<",
    "{",
    "[1,",
    '\\"',
    "0",
    "<tool_call>",
    "[TOOL_CALLS]{",
    "</parameter>",
    "<|channel|>",
    '{"name": "surface"}',
    "\n",
)


@pytest.mark.parametrize("piece", [1, 100_000])
def test_the_work_grows_with_the_text_and_no_faster(piece: int) -> None:
    for name, shape in SHAPES:
        for filler in FILLERS:
            once, twice = (lines_run(name, shape % (filler * size), piece) for size in (40, 80))
            assert twice < 2.3 * once + 60, (shape, filler, once, twice)


def test_the_format_follows_the_tokenizer_and_its_chat_template() -> None:
    for source, name in (
        ("{{ '<tool_call>' }}", "hermes"), ("<tool_call><function=x><parameter=y>", "qwen3-coder"), ("<|python_tag|>",
        "llama3"),
        ("<tool_call>{name}<arg_key>k</arg_key><arg_value>", "glm4"), ("[TOOL_CALLS]", "mistral"), ("plain", "plain"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜> ```json", "deepseek-v3"), ("<｜tool▁call▁begin｜><｜tool▁sep｜>",
        "deepseek-v3.1"),
        ("<|header_start|> Environment: ipython <|python_start|>", "llama4"),
        ("<|start|>assistant<|channel|>final<|message|>", "gpt-oss"), ("{{ '</think>' }}", "think"),
    ):  # fmt: skip
        assert choose_template(source).name == name
    assert choose_template(None) is PLAIN_TEMPLATE
    field = {"open_pattern": r"\s*<call\|>", "close": "</call>", "content": "json", "transform": {"function": "{content}"}}
    own = {"fields": {"content": {}, "thinking": {"open": "<r>", "close": "</r>"}, "tool_calls": field}}
    template = choose_template("<tool_call>", json.dumps(own))
    parser = ResponseParser(template, SCHEMAS)
    assert said(parser.feed('<r>Hm.</r>Hi<call|>{"name": "surface"}</call>') + parser.finish()) == Said(
        "Hi", "Hm.", [("surface", {})]
    )
    gemma = {"fields": {"tool_calls": {"open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "content_args": {"x": 1}}}}
    assert choose_template("", json.dumps(gemma)).name == "gemma4"
    for odd in (
        {"fields": {"thinking": 5}},
        {"fields": [1]},
        {"fields": {"tool_calls": {"transform": [1], "open": "<x>"}}},
        {},
    ):
        assert choose_template("{{ '<tool_call>' }}", json.dumps(odd)).name == "hermes"
    with pytest.raises(TemplateInvalid, match="it is one of deepseek-v3, "):
        template_named("xml")


def test_ids_of_calls_are_those_that_the_format_takes() -> None:
    tools = {"tools": [{"type": "function", "function": {"name": "surface"}}]}
    text = "[TOOL_CALLS]surface[ARGS]{}[TOOL_CALLS]surface[ARGS]{}"
    ids = [call.call_id for call in AnswerReader(tools, template_named("mistral"), "chatcmpl-1").read(0, text).calls]
    assert [len(one) for one in ids] == [9, 9] and len(set(ids)) == 2
    (part,) = AnswerReader(tools, template_named("kimi-k2")).stream(
        0, "<|tool_call_begin|>functions.surface:3<|tool_call_argument_begin|>{}<|tool_call_end|>", ends=True
    )
    assert (part.call_id, part.name) == ("functions.surface:3", "surface")


def test_tokens_of_reasoning_are_counted_by_their_marks() -> None:
    reader = AnswerReader({}, template_named("hermes"), added_tokens={"<think>": 7, "</think>": 8})
    for ids in ([7, 1], [1, 8], [2, 3]):
        reader.count_tokens(0, ids)
    assert reader.num_reasoning_tokens == 4
    reader = AnswerReader({}, template_named("hermes"), added_tokens={"<think>": 7, "</think>": 8})
    reader.prompt_end = "<think>\n"
    reader.count_tokens(0, [1, 8, 2])
    assert reader.num_reasoning_tokens == 2
    assert AnswerReader({}, template_named("hermes")).num_reasoning_tokens is None


HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")


@pytest.mark.parametrize("messages", [
    ["<|channel|>analysis<|message|>Hm, 3.<|end|>", "<|start|>assistant<|channel|>final<|message|>Hi<|return|>"],
    ["<|channel|>analysis<|message|>a<|channel|>b<|end|>",
     "<|start|>assistant<|channel|>commentary to=functions.dive <|constrain|>json<|message|>{}<|call|>",
     "<|start|>assistant<|channel|>analysis<|message|>more"],
    [" to=functions.dive<|message|>{}<|call|>", "<|start|>assistant<|channel|>analysis<|message|>x<|end|>"],
    ["<|message|>x<|channel|>final<|message|>Hi"],
])  # fmt: skip
def test_tokens_of_reasoning_are_those_of_its_messages(messages: list[str]) -> None:
    """Each mark is a token, and each character of other texts: of messages that are reasoning all are counted."""
    tools = [{"type": "function", "function": {"name": "dive"}}]
    ids = {mark: 1000 + number for number, mark in enumerate(HARMONY)}
    pieces = [re.findall("|".join(map(re.escape, HARMONY)) + "|(?s:.)", text) for text in messages]
    tokens = [token for piece in pieces for token in piece]
    wanted = sum(len(piece) for piece in pieces if "analysis" in "".join(piece))
    for size in (1, 3, len(tokens)):
        reader = AnswerReader({"tools": tools}, template_named("gpt-oss"), special_tokens=HARMONY, added_tokens=ids)
        for at in range(0, len(tokens), size):
            some = tokens[at : at + size]
            reader.stream(1, "".join(some), ends=at + size >= len(tokens), is_cut=True)
            reader.count_tokens(1, [ids.get(token, 1) for token in some])
        assert reader.num_reasoning_tokens == wanted, size


def test_reasoning_can_be_left_out() -> None:
    text = "<think>Hm.</think>Hi"
    answer = AnswerReader({"include_reasoning": False}, template_named("hermes")).read(0, text)
    assert (answer.content, answer.reasoning) == ("Hi", "")


def test_marks_that_are_special_tokens_are_kept_for_the_parser_and_are_no_content() -> None:
    special, template = ("<s>", "[TOOL_CALLS]", "[ARGS]"), template_named("mistral")
    reader = AnswerReader({}, template, special_tokens=special)
    assert reader.params() == {"kept_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]}
    assert reader.read(0, "then [TOOL_CALLS]bye ").content == "then bye "
    shown = AnswerReader({"skip_special_tokens": False}, template, special_tokens=special)
    assert shown.params() == {} and shown.read(0, "then [TOOL_CALLS]bye").content == "then [TOOL_CALLS]bye"
    assert AnswerReader({}, PLAIN_TEMPLATE, special_tokens=special).params() == {}
    answers = AnswerReader({"response_format": {"type": "json_object"}}, template, special_tokens=special)
    assert answers.params() == {} and answers.is_plain
