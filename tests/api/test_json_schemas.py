"""JSON schemas as llguidance has to read them, against what llguidance then accepts."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from pagetide.api.json_schemas import FORMATS, readable
from pagetide.engine.sampling.constraints import _trouble

llguidance = pytest.importorskip("llguidance")
TOKENIZER = llguidance.LLTokenizer("byte")
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "name": {"type": "string"}}, "required": ["kind"]}
DEFINED = {"$defs": {"Cat": CAT, "Dog": DOG, "a/b": DOG}}


def matcher(schema: Any) -> Any:
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_flexible": False})
    return llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)


def accepts(made: Any, text: str) -> bool:
    trial, tokens = made.deep_copy(), TOKENIZER.tokenize_str(text)
    return trial.try_consume_tokens(tokens) == len(tokens) and bool(trial.is_accepting())


def test_formats_that_are_checked_and_those_that_assert_nothing() -> None:
    for name in FORMATS:
        kept = {"type": "string", "format": name}
        assert readable(kept) == kept and not matcher(kept).is_error() and not accepts(matcher(kept), '"?"'), name
    for name in ("password", "byte", "binary", "uri-reference", "regex", "idn-email", "int32", "of-mine"):
        assert matcher({"type": "string", "format": name}).is_error(), f"llguidance knows {name}: add it to FORMATS"
        schema = {"properties": {"format": {"type": "string", "format": name}}, "enum": [{"format": name}]}
        assert readable(schema) == {"properties": {"format": {"type": "string"}}, "enum": [{"format": name}]}


def test_numbers_keep_their_bounds() -> None:
    numbers = (-10, -1.5, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 1.5, 10, 10.5, 4e9, 4e9 + 0.5)
    lows, highs = ("minimum", "exclusiveMinimum"), ("exclusiveMaximum", "maximum")
    for low, high in itertools.combinations(numbers, 2):
        for name, other in itertools.product(lows, highs):
            schema = {"type": "number", name: low, other: high}
            made, between = matcher(readable(schema)), (low + high) / 2
            assert accepts(made, f"{between:.12g}"), schema
            for text in {f"{number:{form}}" for number in (low, high) for form in (".12g", ".1f", ".2f")} | {"-0"}:
                value = float(text)
                valid = low <= value <= high and (name, value) != (lows[1], low) and (other, value) != (highs[0], high)
                assert valid or not accepts(made, text), (schema, text)
    assert readable({"exclusiveMinimum": 0, "maximum": 1}) == {"exclusiveMinimum": 0, "maximum": 1}
    assert readable({"exclusiveMinimum": 10**400, "maximum": 0.5}) == {"exclusiveMinimum": 10**400, "maximum": 0.5}
    assert readable({"exclusiveMinimum": True, "minimum": 0, "maximum": 0.5})["exclusiveMinimum"] is True  # draft 4


@pytest.mark.parametrize(
    "branches",
    [
        [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        [CAT, {"$ref": "#/$defs/a~1b"}],
        [{"$ref": "#/$defs/Cat"}, {"type": "null"}, {"type": ["string", "number"]}],
        [{"const": 1}, {"const": "1"}, {"enum": [2, True, None]}],
        [{"const": "auto"}, {"type": "integer"}],
    ],
)
def test_branches_that_exclude_each_other_are_any_of_them(branches: list[Any]) -> None:
    for inner in ({"oneOf": branches}, {"oneOf": branches, "discriminator": {"propertyName": "kind"}}):
        schema = {"type": "object", "properties": {"x": inner}, **DEFINED}
        assert readable(schema)["properties"]["x"] == {"anyOf": branches} | {k: inner[k] for k in inner if k != "oneOf"}
        assert not matcher(readable(schema)).is_error()


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"enum": [1.0]}],
        [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Cat"}],
        [{"$ref": "#/$defs/none"}, {"type": "null"}],
        [{"$ref": "#"}, {"type": "null"}],
        [{"$ref": "other.json"}, {"type": "null"}],
        [CAT, {**DOG, "required": []}],
        [CAT, {"properties": DOG["properties"], "required": ["kind"]}],  # which is no object, perhaps
        [True, False],
        "x",
    ],
)
def test_other_branches_are_left_to_the_library(branches: Any) -> None:
    schema = {"oneOf": branches, **DEFINED}
    assert readable(schema) == schema


def test_references_are_those_of_the_schema_with_an_id() -> None:
    tool = {"$id": "tool:0", "properties": {"x": {"oneOf": [{"$ref": "#/$defs/Cat"}, {"type": "null"}]}}, **DEFINED}
    assert "anyOf" in readable({"items": tool, "$defs": {"Cat": {"type": "null"}}})["items"]["properties"]["x"]


def test_places_of_draft_7_and_dynamic_anchors_are_those_of_plain_references() -> None:
    red, color = {"enum": ["red"]}, {"properties": {"c": {"$ref": "#C"}}, "required": ["c"]}
    dynamic = {"properties": {"c": {"$dynamicRef": "#C"}, "n": {"$dynamicRef": "#node"}}, "required": ["c"]}
    for schema in (
        {**color, "definitions": {"x": {"$id": "#C", **red}}},
        {**color, "$defs": {"x": {"$dynamicAnchor": "C", **red}}},
        {**dynamic, "$dynamicAnchor": "node", "$defs": {"x": {"$anchor": "C", **red}}},
        {**dynamic, "$id": "http://e/", "$dynamicAnchor": "node", "$defs": {"x": {"$dynamicAnchor": "C", **red}}},
    ):
        made = matcher(readable({"type": "object", **schema}))
        assert accepts(made, '{"c":"red"}') and not accepts(made, '{"c":"blue"}'), schema
        if "$dynamicRef" in str(schema):
            assert accepts(made, '{"c":"red","n":{"c":"red"}}') and not accepts(made, '{"c":"red","n":{}}'), schema
    several = {"$dynamicRef": "#C", "$defs": {"x": {"$dynamicAnchor": "C"}, "y": {"$id": "y", "$dynamicAnchor": "C"}}}
    assert readable(several) == several and "$dynamicRef" in str(matcher(several).get_error())
    assert readable({"properties": {"$id": {"$id": "#"}}, "const": {"$id": "#a"}}) == {
        "properties": {"$id": {}},
        "const": {"$id": "#a"},
    }


def test_a_schema_that_only_refers_to_itself_is_refused_with_a_reason() -> None:
    assert "it refers to itself" in str(_trouble(matcher({"anyOf": [{"$ref": "#"}]}), TOKENIZER))


def test_hostile_unions_take_bounded_work_and_are_left_to_the_library() -> None:
    """Definitions that double at each level, that refer to themselves, and long lists of branches, names and values."""
    double = {f"d{i}": {"type": "object", "required": ["x", "y"]} for i in range(40)}
    for i in range(1, 40):
        double[f"d{i}"]["properties"] = {name: {"$ref": f"#/$defs/d{i - 1}"} for name in "xy"}
    own = {"type": "object", "required": ["n"], "properties": {"n": {"$ref": "#/$defs/own"}}}
    names = {"type": "object", "required": [*map(str, range(3000))], "properties": {str(i): {} for i in range(3000)}}
    for branches in (
        [{"$ref": "#/$defs/d39"}] * 2, [{"$ref": "#/$defs/own"}] * 2, [{"$ref": "#/$defs/names"}] * 64,
        [{"const": i} for i in range(65)], [{"enum": [*range(10_000)]}, {"enum": [-1]}], [{"const": [1]}, {"const": [1.0]}],
    ):  # fmt: skip
        schema = {"oneOf": branches, "$defs": {**double, "own": own, "names": names}}
        assert readable(schema) == schema
    many = {"allOf": [{"oneOf": [{"type": "null"}, {"type": "string"}]}] * 65}
    assert ["anyOf" in each for each in readable(many)["allOf"]] == [True] * 64 + [False]
