"""The fixtures of `canitoolcall`: outputs of nine families, each with the right parse. docs/clients.md explains the misses."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pagetide.server.call_grammar import CallGrammar
from pagetide.server.response_parser import Part, ResponseParser
from pagetide.server.response_templates import template_named

pytest.importorskip("canitoolcall")
from canitoolcall.fixtures import default_fixtures_dir

TEMPLATES = {
    "qwen3-hermes": "hermes", "qwen3-xml": "qwen3-coder", "glm": "glm4", "mistral": "mistral", "gemma4": "gemma4",
    "gpt-oss": "gpt-oss", "V3-0324": "deepseek-v3", "V3.1": "deepseek-v3.1", "V3.2": "deepseek-v3.2", "V4-Flash": "deepseek-v4",
    "V4.1-Flash": "deepseek-v4.1", "K3": "kimi-k3", "kimi": "kimi-k2", "Llama-4": "llama4", "llama": "llama3",
}  # fmt: skip
WITHOUT_SPECIAL_MARKS = ("qwen3-hermes", "qwen3-xml", "glm")  # their marks are ordinary added tokens
MISSES = {
    "glm/glm47-missing-last-close-arg-value", "gpt-oss/llamacpp-builtin-python-recipient",
    "kimi/k2i-vllm-noise-between-markers",
    "llama/l4-truncated-missing-close-bracket", "qwen3-xml/bug-coder-text-after-call",
}  # fmt: skip

Parsed = tuple[str, str, list[tuple[str, Any]]]


def fixtures() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each fixture with its family."""
    for folder in sorted(default_fixtures_dir().iterdir()):
        if (folder / "family.json").exists():
            family = json.loads((folder / "family.json").read_text("utf-8"))
            for file in sorted(folder.glob("*.jsonl")):
                for line in file.read_text("utf-8").splitlines():
                    yield json.loads(line), family


def parser_of(fixture: dict[str, Any], family: dict[str, Any]) -> ResponseParser:
    """A parser as a server makes it for this request and model."""
    model = fixture["models"][0]
    name = next(
        name
        for key, name in TEMPLATES.items()
        if key == fixture["family"] or model.endswith(key) or key in model.split("/")[-1]
    )
    described = next((one for one in family["reference_models"] if one["repo"] == model), {})
    prompt_end = fixture.get("generation_prompt") or described.get("default_generation_prompt", "")
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in fixture["tools"]}
    hidden = (
        () if fixture["family"] in WITHOUT_SPECIAL_MARKS else [mark for mark in family["markers"] if not mark.startswith("</")]
    )
    return ResponseParser(template_named(name), schemas, hidden, prompt_end)


def parsed(fixture: dict[str, Any], family: dict[str, Any], sizes: Iterator[int]) -> Parsed:
    """The output as it is parsed in pieces of these sizes."""
    parser, parts, text, at = parser_of(fixture, family), list[Part](), fixture["raw_output"], 0
    while at < len(text):
        size = next(sizes)
        parts += parser.feed(text[at : at + size])
        at += size
    parts += parser.finish(is_cut="truncated" in fixture["tags"])
    content, reasoning = ("".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning"))
    return content, reasoning, [(part.name, json.loads(part.text)) for part in parts if part.kind == "call"]


def is_right(fixture: dict[str, Any], found: Parsed) -> bool:
    content, reasoning, calls = found
    if (wanted := fixture.get("expected")) is None:
        return not calls and ("no_tool_calls" in fixture["expected_error"]["accept"] or content == fixture["raw_output"])
    texts = (wanted["content"] or "").strip(), (wanted["reasoning_content"] or "").strip()
    named = [(call["name"], call["arguments"]) for call in wanted["tool_calls"]]
    return ((content.strip(), reasoning.strip()), calls) == (texts, named)


def test_every_fixture_whole_and_cut_everywhere() -> None:
    count, misses = 0, set[str]()
    for fixture, family in fixtures():
        whole = parsed(fixture, family, itertools.repeat(1 << 20))
        draw = random.Random(fixture["id"])
        for sizes in (
            itertools.repeat(1),
            iter(lambda draw=draw: draw.randint(1, 8), 0),
            iter(lambda draw=draw: draw.randint(1, 40), 0),
        ):
            assert parsed(fixture, family, sizes) == whole, fixture["id"]
        count += 1
        misses |= set() if is_right(fixture, whole) else {fixture["id"]}
    assert (count, misses) == (469, MISSES)


def test_grammars_let_through_what_families_write() -> None:
    """The others are cut off, or are not as a chat template writes calls (keys in another order, spaces, Python's words)."""
    llguidance = pytest.importorskip("llguidance")
    tokenizer, found = llguidance.LLTokenizer("byte"), Counter[bool]()
    for fixture, family in fixtures():
        template, text = parser_of(fixture, family)._template, fixture["raw_output"].rstrip()
        calls = (fixture.get("expected") or {}).get("tool_calls")
        if not calls or "malformed" in fixture["tags"] or template.calls is None or not template.calls.written:
            continue
        special = [mark for mark in ("[ARGS]",) if mark in text]
        way = replace(template.calls.written_with(special), needs="")
        functions = {
            tool["function"]["name"]: {"type": "object"} | (tool["function"].get("parameters") or {})
            for tool in fixture["tools"]
        }
        grammar = CallGrammar(replace(template, calls=replace(template.calls, written=(way,))), functions, {})
        rules = grammar.required(is_single=False) if template.name == "llama3" else grammar.automatic()
        matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(rules), log_level=0)
        tokens = tokenizer.tokenize_str(text)
        found[matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())] += 1
    assert (found[True], found.total()) == (225, 257)
