"""Grammars of calls in the formats of families: what they let through, and that the parser reads it as the calls it is."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pagetide.api.sampling_params import SamplingParams
from pagetide.server.answers import AnswerReader
from pagetide.server.call_grammar import CallGrammar, CannotConstrain
from pagetide.server.defaults import by_prompt_end
from pagetide.server.messages import ReasoningGrammar, Submit
from pagetide.server.response_parser import Part, ResponseParser
from pagetide.server.response_templates import ResponseTemplate, template_named, templates

llguidance = pytest.importorskip("llguidance")
TOKENIZER = llguidance.LLTokenizer("byte")
DIVE = {
    "type": "object", "required": ["depth"], "additionalProperties": False,
    "properties": {
        "depth": {"type": "integer", "minimum": 0}, "note": {"type": "string"}, "mood": {"enum": ["calm", "wild"]},
        "team": {"type": "array", "items": {"$ref": "#/$defs/Name"}}, "by": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "$defs": {"Name": {"type": "string", "minLength": 2}},
}  # fmt: skip
FUNCTIONS: dict[str, Any] = {"dive": DIVE, "look": {"type": "object", "properties": {}, "additionalProperties": False}}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("dive", {"depth": 3}), ("look", {}),
    ("dive", {"depth": 0, "note": "deep <b>, \"wet\"", "mood": "wild", "team": ["Ann", "Bob"], "by": "me"}),
]  # fmt: skip
# A template for each way of a family to write calls
WRITTEN = [
    replace(one, calls=replace(one.calls, written=(replace(way, needs=""),)))
    for one in templates().values() if one.calls is not None for way in one.calls.written
]  # fmt: skip
HERMES = template_named("hermes")


def name_of(template: ResponseTemplate) -> str:
    return template.name


def text_of(template: ResponseTemplate, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as the family's chat template writes them."""
    assert template.calls is not None
    written = template.calls.written[0]
    texts = []
    for number, (name, arguments) in enumerate(calls):
        parameters = ""
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            shown = value if is_text else json.dumps(value, ensure_ascii=False)
            one = written.parameter.replace("KEY", key).replace("TYPED", "true" if is_text else "false")
            parameters += one.replace("VALUE", shown)
        text = written.call.replace("NAME", name).replace("INDEX", str(number))
        dumped = json.dumps(arguments, ensure_ascii=False)
        texts.append(text.replace("ARGUMENTS", dumped).replace("PARAMETERS", parameters))
    return written.begin + written.between.join(texts) + written.end


def accepts(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(TOKENIZER, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


def parse(template: ResponseTemplate, text: str, prompt_end: str = "") -> list[Part]:
    parser = ResponseParser(template, FUNCTIONS, prompt_end=prompt_end)
    return parser.feed(text) + parser.finish()


@pytest.mark.parametrize("template", WRITTEN, ids=name_of)
def test_calls_as_a_family_writes_them(template: ResponseTemplate) -> None:
    grammar = CallGrammar(template, FUNCTIONS, {})
    required, single = grammar.required(is_single=False), grammar.required(is_single=True)
    for calls in (CALLS[:1], CALLS[2:], CALLS):
        text = text_of(template, calls)
        assert [(part.name, json.loads(part.text)) for part in parse(template, text) if part.kind == "call"] == calls
        assert accepts(required, text) and accepts(single, text) == (len(calls) == 1), text
    for more in ({"depth": -1}, {"depth": "x"}, {"mood": "sad"}, {"team": ["A"]}, {"x": 1}):
        text = text_of(template, [("dive", {"depth": 3} | more)])
        assert not accepts(required, text), text
    for name, arguments in (("swim", {"depth": 3}), ("dive", {})):
        assert not accepts(required, text_of(template, [(name, arguments)]))
    text = text_of(template, [("dive", {"depth": 3, "mood": "wild"})])
    assert accepts(required, text) and not accepts(required, text.replace("wild", "\n\nwild")), "a text with a line end"
    assert not accepts(required, "No.") and accepts(required, text_of(template, CALLS[:1]).replace("\n", ""))


@pytest.mark.parametrize("template", [one for one in WRITTEN if one.reasoning_open], ids=name_of)
def test_reasoning_comes_before_calls(template: ResponseTemplate) -> None:
    opener, closer = template.reasoning_open[0], template.reasoning_close[0]
    grammar = CallGrammar(template, FUNCTIONS, {})
    text = f"Hm, <b>.\n{closer}\n\n" + text_of(template, CALLS[:1])
    assert accepts(grammar.required(False), opener + text) and not accepts(grammar.required(False), text)
    assert accepts(grammar.required(False, "begun"), text) and not accepts(grammar.required(False, "none"), opener + text)
    kinds = [part.kind for part in parse(template, text, prompt_end=opener)]
    assert kinds[-1] == "call" and set(kinds) == {"reasoning", "call"}


@pytest.mark.parametrize("template", WRITTEN, ids=name_of)
def test_strict_functions_in_an_answer_of_any_text(template: ResponseTemplate) -> None:
    grammar = CallGrammar(template, FUNCTIONS, {})
    if template.name == "llama3":
        for make in (grammar.automatic, partial(grammar.required, True, answer={"json_schema": ANSWER})):
            with pytest.raises(CannotConstrain, match="begin without a mark"):
                make()
        return
    automatic = grammar.automatic()
    right, wrong = (text_of(template, [("dive", {"depth": depth})]) for depth in (3, -3))
    for text, fits in (
        ("Down we go.\n", True), ("", True), (f"Down.\n{right}", True), (f"Down.\n{right}\nAgain.\n{right}", True),
        (f"Down.\n{wrong}", False), (f"<think>\nHm.\n</think>\n\n{right}", True),
    ):  # fmt: skip
        assert accepts(automatic, text) == fits, text


ANSWER: dict[str, Any] = {
    "type": "object", "properties": {"note": {"type": "string"}, "deep": {"type": "boolean"}}, "required": ["note"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize("template", [one for one in WRITTEN if one.name in ("hermes", "deepseek-v4", "mistral")], ids=name_of)
def test_calls_or_an_answer_of_a_form_and_nothing_else(template: ResponseTemplate) -> None:
    either = CallGrammar(template, FUNCTIONS, {}).required(False, answer={"json_schema": ANSWER})
    calls, wrong = text_of(template, CALLS), text_of(template, [("dive", {"depth": -1})])
    answer = json.dumps({"note": calls, "deep": True}, ensure_ascii=False)
    for text, fits in (
        (calls, True), (answer, True), ('{\n  "note": "x"\n}', True), ('{"note": 3}', False), ("It is wet.", False),
        (wrong, False), (calls + answer, False), (answer + calls, False), ("", False),
    ):  # fmt: skip
        assert accepts(either, text) == fits, text
    opener, closer = template.reasoning_open[0], template.reasoning_close[0]
    begun = CallGrammar(template, FUNCTIONS, {}).required(True, "begun", {"json_schema": ANSWER})
    assert accepts(either, f"{opener}Hm.{closer}\n\n{answer}") and not accepts(begun, f"Hm.{closer}{calls}")
    assert accepts(begun, f"Hm.{closer}{answer}") and not accepts(begun, answer)
    for size in (1, len(answer)):
        parser, parts = ResponseParser(template, FUNCTIONS, is_either=True), list[Part]()
        for at in range(0, len(answer), size):
            parts += parser.feed(answer[at : at + size])
        assert {part.kind for part in parts} == {"content"}
        assert "".join(part.text for part in parts + parser.finish()) == answer
    parser = ResponseParser(template, FUNCTIONS, is_either=True)
    read = parser.feed(f"{opener}Hm.{closer}{calls}") + parser.finish()
    assert [(part.name, json.loads(part.text)) for part in read if part.kind == "call"] == CALLS
    assert not [part for part in read if part.kind == "content"]


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder"])
def test_functions_that_are_not_strict_are_held_to_what_can_be_held(name: str) -> None:
    template = template_named(name)
    code = {"type": "string", "pattern": "^[A-Z]+$"} if name == "qwen3-coder" else {"type": "string", "minLength": 2}
    odd = {
        "type": "object",
        "not": {"required": ["x"]},
        "properties": {"n": {"type": "integer"}, "code": code, "r": {"$ref": "#/properties/n"}},
    }
    grammar = CallGrammar(template, {"odd": odd}, {}, lenient=["odd"]).required(True, answer={"json_schema": ANSWER})
    assert accepts(grammar, text_of(template, [("odd", {"n": 3, "code": "ab", "r": 4})]))
    assert not accepts(grammar, text_of(template, [("odd", {"n": "x"})])), "what can be held is"
    if name == "qwen3-coder":
        with pytest.raises(CannotConstrain):
            CallGrammar(template, {"odd": odd}, {})


CHAIN = {str(at): {"anyOf": [{"$ref": f"#/$defs/{at + 1}"}]} for at in range(3000)} | {"3000": {}}


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder"])
@pytest.mark.parametrize("parameters", [
    {"properties": {"a": {"type": "string", "pattern": "^(?!x)"}}}, {"properties": {"a": {"type": "dict"}}},
    {"properties": {"a": {"$ref": "#/$defs/none"}}}, {"properties": None}, {"type": "string"}, {"required": [3]},
    {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": CHAIN}, {"properties": {"a": False}, "required": ["a"]},
    {"properties": {"a": 3, "b b": {}, "c[]": {}}},
])  # fmt: skip
def test_a_function_that_is_not_strict_takes_no_answer_and_no_calls_away(name: str, parameters: dict[str, Any]) -> None:
    """Its arguments are held to nothing where its schema cannot be, and those of other functions are."""
    template = template_named(name)
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object"} | parameters}}
    fields = {"tools": [*TOOLS, odd], "response_format": {"type": "json_object"}, "constraint": FORM}
    grammar = AnswerReader(fields, template, added_tokens={}, constrains=True).params()["grammar"]
    is_named = "properties" in parameters and parameters["properties"] is not None
    arguments: dict[str, Any] = {"a": "x" if "pattern" in str(parameters) else 1} if is_named or name == "hermes" else {}
    assert accepts(grammar, text_of(template, [("odd", arguments)])) and accepts(grammar, "{}")
    assert accepts(grammar, text_of(template, CALLS[:1])) and not accepts(grammar, text_of(template, [("dive", {})]))


def test_what_explains_parameters_is_no_part_of_a_grammar() -> None:
    noted = {"title": "t", "description": "x" * 140_000, "default": "d", "examples": ["e"], "$comment": "c"}
    for name in ("hermes", "qwen3-coder"):
        template, properties = template_named(name), {"title": {"type": "integer"} | noted, "note": {"type": "array"} | noted}
        schema = {"type": "object", "properties": properties, "required": ["title"]} | noted
        grammar = CallGrammar(template, {"f": schema}, {}).required(True)
        assert accepts(grammar, text_of(template, [("f", {"title": 3})])) and len(grammar) < 2_000
        assert not accepts(grammar, text_of(template, [("f", {"title": "x"})]))


@pytest.mark.parametrize(("form", "right", "wrong"), [
    ({"regex": "a/b\\/?|[/\\n]\nc"}, ("a/b", "a/b/", "/\nc", "\n\nc"), ("ab", "a/b/c")),
    ({"grammar": '%llguidance {}\nstart: call "}" // of its own\ncall: /[0-9]/'}, ("3}",), ("3", "}")),
    ({"json_schema": '{"type": "integer"}'}, ("12",), ('"a"',)), ({"json_schema": "true"}, ("[1]",), ("a",)),
    ({"json_schema": {"x-guidance": {"whitespace_flexible": False}, "type": "array"}}, ("[1,2]",), ("[1, 2]",)),
])  # fmt: skip
def test_forms_of_an_answer_beside_calls(form: dict[str, Any], right: tuple[str, ...], wrong: tuple[str, ...]) -> None:
    either = CallGrammar(HERMES, FUNCTIONS, {}).required(False, answer=form)
    for text in (*right, text_of(HERMES, CALLS)):
        assert accepts(either, text), text
    assert not any(accepts(either, text) for text in wrong)
    for text in ("{", "[" * 99_999):
        with pytest.raises(CannotConstrain, match="no JSON, or too deep"):
            CallGrammar(HERMES, FUNCTIONS, {}).required(False, answer={"json_schema": text})


def test_special_tokens_are_named_by_their_ids() -> None:
    template = template_named("deepseek-v3.1")
    ids = {"<｜tool▁calls▁begin｜>": 7, "<｜tool▁call▁end｜>": 8}
    grammar = CallGrammar(template, FUNCTIONS, ids)
    assert 'calls: <[7]> call ( call)* "<｜tool▁calls▁end｜>"' in grammar.required(False)
    assert "arguments_0 <[8]>" in grammar.required(False) and "TEXT <[7]>" in grammar.automatic()


@pytest.mark.parametrize(("name", "parameters", "said"), [
    ("gpt-oss", {}, "gpt-oss cannot be constrained"), ("gemma4", {}, "gemma4 cannot be constrained"),
    ("glm4", {"minProperties": 1}, "cannot hold 'minProperties'"),
    ("glm4", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "a pattern, a format or a length"),
    ("glm4", {"properties": {"a": {"$ref": "#/properties/b"}}}, "leads out of a parameter"),
    ("glm4", {"properties": {"a>": {"type": "integer"}}}, "cannot be named"),
    ("glm4", {"required": [3]}, "malformed"), ("glm4", {"required": [[1]]}, "malformed"),
    ("hermes", {"properties": {"x" * 140_000: {}}}, "longer than the"),
])  # fmt: skip
def test_what_cannot_be_constrained_says_so(name: str, parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(CannotConstrain, match=said):
        CallGrammar(template_named(name), {"f": {"type": "object"} | parameters}, {}).required(False)


@pytest.mark.parametrize("template", [one for one in WRITTEN if one.calls and one.calls.written[0].parameter], ids=name_of)
def test_parameters_that_are_named_as_places_are(template: ResponseTemplate) -> None:
    values = {"VALUE": 1, "ENV_VALUE": 2, "TYPED": 3, "KEY": 4}
    schema = {"type": "object", "properties": {key: {"type": "integer"} for key in values}, "required": [*values]}
    text = text_of(template, [("f", dict(zip("abcd", values.values(), strict=True)))])
    for letter, key in zip("abcd", values, strict=True):
        text = re.sub(rf"(?<=[=>\"]){letter}(?=[>\"<])", key, text)
    assert accepts(CallGrammar(template, {"f": schema}, {}).required(True), text), text
    (part,) = (part for part in ResponseParser(template, {"f": schema}).feed(text) if part.kind == "call")
    assert json.loads(part.text) == values


def test_a_text_that_has_to_fit_a_pattern_is_json_where_attributes_say_so() -> None:
    template = template_named("deepseek-v4")
    schema = {"type": "object", "properties": {"code": {"type": "string", "pattern": "^[A-Z]+$"}}, "required": ["code"]}
    grammar = CallGrammar(template, {"f": schema}, {}).required(True)
    value = '<｜DSML｜parameter name="code" string="false">"{}"</｜DSML｜parameter>'
    call = f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n{value}\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    assert accepts(grammar, call.format("ABC")) and not accepts(grammar, call.format("abc"))
    (part,) = ResponseParser(template, {"f": schema}).feed(call.format("ABC"))
    assert json.loads(part.text) == {"code": "ABC"}


FORM = {"json_schema": {"type": "object"}}
TOOLS = [{"type": "function", "function": {"name": "dive", "parameters": DIVE, "strict": True}}]


@pytest.mark.parametrize(("fields", "name", "kinds"), [
    ({"tool_choice": "required"}, "hermes", {"grammar"}), ({"tool_choice": "required"}, "gpt-oss", {"json_schema"}),
    ({"tool_choice": {"type": "function", "function": {"name": "dive"}}}, "mistral", {"grammar"}), ({}, "hermes", {"grammar"}),
    ({}, "gemma4", set()), ({"tool_choice": "none"}, "hermes", set()),
    ({"tools": [{"type": "function", "function": {"name": "dive"}}]}, "hermes", set()),
    ({"response_format": {"type": "json_object"}, "constraint": FORM}, "hermes", {"json_schema", "grammar"}),
    ({"response_format": {"type": "json_object"}, "constraint": FORM, "tool_choice": "none"}, "hermes", set()),
    ({"response_format": {"type": "json_object"}, "constraint": FORM}, "gpt-oss", set()),
    ({"response_format": {"type": "json_object"}, "constraint": FORM, "tools": None}, "hermes", set()),
    ({"response_format": {"type": "json_object"}, "constraint": FORM, "tool_choice": "required"}, "mistral",
     {"json_schema", "grammar"}),
])  # fmt: skip
def test_when_calls_are_constrained(fields: dict[str, Any], name: str, kinds: set[str]) -> None:
    reader = AnswerReader({"tools": TOOLS} | fields, template_named(name), added_tokens={}, constrains=True)
    assert set(reader.params()) == kinds and reader.params().get("json_schema") != FORM["json_schema"]
    free = AnswerReader({"tools": TOOLS} | fields, template_named(name), added_tokens={})
    assert "grammar" not in free.params()
    if template := reader.template():
        assert "strict" not in template["tools"][0]["function"]


def test_a_named_call_is_read_in_the_format_of_the_family() -> None:
    choice = {"type": "function", "function": {"name": "dive"}}
    reader = AnswerReader({"tools": TOOLS, "tool_choice": choice}, HERMES, added_tokens={}, constrains=True)
    text = text_of(HERMES, CALLS[:1])
    answer = reader.read(0, text)
    assert [(call.name, call.text) for call in answer.calls] == [("dive", '{"depth": 3}')] and not answer.content
    other = reader.reasoning_grammar()
    assert other is not None and other.opens == ("<think>",) and accepts(other.grammar, f"Hm.</think>\n\n{text}")


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "glm4", "minimax-m2", "kimi-k2"])
def test_what_reasoning_says_of_calls_is_no_call_where_a_grammar_holds_those_behind_it(name: str) -> None:
    template = template_named(name)
    wrong, right = (text_of(template, [("dive", {"depth": depth})]) for depth in (-9, 3))
    form = {"response_format": {"type": "json_object"}, "constraint": FORM}
    for fields, end in ((form, "{}"), (form, right), ({"tool_choice": "required"}, right)):
        reader = AnswerReader({"tools": TOOLS} | fields, template, added_tokens={}, constrains=True)
        text = f"<think>maybe {wrong} no.</think>{end}"
        assert accepts(reader.params()["grammar"], text)
        answer = reader.read(0, text)
        assert answer.reasoning == f"maybe {wrong} no." and answer.content == ("" if end == right else end)
        assert [call.text for call in answer.calls] == (['{"depth": 3}'] if end == right else [])


@pytest.mark.parametrize(
    ("end", "grammar"), [("assistant\n<think>\n", "begun"), ("<think>\n\n</think>\n\n", "some"), ("", "some")]
)
def test_the_end_of_the_prompt_chooses_the_grammar(end: str, grammar: str) -> None:
    submit = Submit(1, {}, reasoning_grammar=ReasoningGrammar(("<think>",), "begun"))
    assert by_prompt_end(submit, SamplingParams(grammar="some"), end).grammar == grammar
    assert by_prompt_end(Submit(1, {}), SamplingParams(grammar="some"), end).grammar == "some"
