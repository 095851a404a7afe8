"""Calls in the formats of families, written by chance within their grammars, and by a real engine that has learned none."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from servers import ServerProcess

from pagetide.server.call_grammar import CallGrammar
from pagetide.server.response_parser import ResponseParser
from pagetide.server.response_templates import templates

FORMATS = ("hermes", "qwen3-coder", "deepseek-v4", "glm4", "nemotron", "gemma4")  # the last one cannot be constrained
CONFIG = "device: cpu\ndtype: float32\nkv_memory: 4MiB\nmax_seqs: 4\nmodels:\n" + "".join(
    f"  - {{model: demo, name: {name}, response_format: {name}}}\n" for name in FORMATS
)
DIVE = {
    "type": "object", "required": ["depth", "side"], "additionalProperties": False,
    "properties": {"depth": {"type": "integer", "minimum": 0, "maximum": 9}, "side": {"enum": ["port", "starboard"]}},
}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "dive", "description": "Go down.", "parameters": DIVE, "strict": True}},
    {"type": "function", "function": {"name": "surface"}},
]
# Without reasoning, which this model would not end
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Dive"}], "tools": TOOLS, "max_tokens": 400,
    "extra_body": {"enable_thinking": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "serve.yaml").write_text(CONFIG)
    arguments = ["--config", str(folder / "serve.yaml"), "--no-share"]
    with ServerProcess(arguments, folder / "log", OMP_NUM_THREADS="1") as server:
        yield server


def fits(call: Any) -> bool:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "surface":
        return bool(arguments == {})
    return set(arguments) == {"depth", "side"} and 0 <= arguments["depth"] <= 9 and arguments["side"] in ("port", "starboard")


@pytest.mark.parametrize("name", FORMATS)
def test_required_and_named_calls(running: ServerProcess, name: str) -> None:
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0, timeout=120)
    for seed in range(3):
        fields = {**ASKED, "model": name, "seed": seed}
        (choice,) = client.chat.completions.create(**fields, tool_choice="required", parallel_tool_calls=False).choices
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        assert len(choice.message.tool_calls or ()) == 1 and fits(choice.message.tool_calls[0])  # type: ignore[index]
        named: Any = {"type": "function", "function": {"name": "dive"}}
        (choice,) = client.chat.completions.create(**fields, tool_choice=named).choices
        (call,) = choice.message.tool_calls or ()
        assert call.function.name == "dive" and fits(call)  # type: ignore[union-attr]
        parts = [chunk.choices[0].delta for chunk in client.chat.completions.create(**fields, tool_choice=named, stream=True)]
        (streamed,) = [one for part in parts for one in part.tool_calls or ()]
        assert (streamed.function.name, streamed.function.arguments) == ("dive", call.function.arguments)  # type: ignore[union-attr]


def test_strict_functions_leave_an_answer_free_and_what_cannot_be_held_is_logged(running: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0, timeout=120)
    for name in ("hermes", "gemma4"):
        fields: dict[str, Any] = {**ASKED, "model": name, "seed": 1, "max_tokens": 24}
        (strict,) = client.chat.completions.create(**fields).choices
        free = [{"type": "function", "function": {**one["function"], "strict": False}} for one in TOOLS]
        (other,) = client.chat.completions.create(**fields | {"tools": free}).choices
        assert strict.message.content == other.message.content
    client.chat.completions.create(**fields, tool_choice="required")  # of the last model
    assert "the format gemma4 cannot be constrained: strict functions are not held to" in running.said
    assert "the format gemma4 cannot be constrained: calls that have to be are JSON" in running.said


REPORT = {
    "type": "object", "required": ["air", "wet"], "additionalProperties": False,
    "properties": {"air": {"type": "integer", "minimum": 0, "maximum": 9}, "wet": {"type": "boolean"}},
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_with_a_form_or_a_call(running: ServerProcess, name: str) -> None:
    """A bias for the first character of either chooses it. Where calls cannot be constrained there is an answer."""
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0, timeout=120)
    form: Any = {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT}}
    for first in "{<":
        *_, token = httpx2.post(f"{running.url}/tokenize", json={"model": name, "prompt": first}).json()["tokens"]
        asked = {**ASKED, "model": name, "response_format": form, "logit_bias": {token: 100}, "tool_choice": "auto"}
        for seed in range(2):
            (choice,) = client.chat.completions.create(**asked, seed=seed).choices
            if first == "<" and name != "gemma4":
                assert choice.message.tool_calls and all(map(fits, choice.message.tool_calls)) and not choice.message.content
            else:
                report = json.loads(choice.message.content or "")
                assert set(report) == {"air", "wet"} and 0 <= report["air"] <= 9 and not choice.message.tool_calls
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked = {"model": name, "input": "Dive", "tools": tools, "text": {"format": {**form, **form["json_schema"]}}}
    for item in client.responses.create(**asked, reasoning={"effort": "none"}, max_output_tokens=400).output:
        assert item.type == "function_call" or json.loads(item.content[0].text).keys() == {"air", "wet"}  # type: ignore[union-attr]
    form = {"type": "json_schema", "schema": REPORT}
    body = {"model": name, "messages": ASKED["messages"], "max_tokens": 400, "thinking": {"type": "disabled"}}
    body |= {
        "tools": [{"name": "surface", "input_schema": {"type": "object", "properties": {}}}],
        "output_config": {"format": form},
    }
    for block in httpx2.post(f"{running.url}/v1/messages", json=body, timeout=120).json()["content"]:
        assert block["type"] == "tool_use" or json.loads(block["text"]).keys() == {"air", "wet"}


SCHEMA = {
    "type": "object", "required": ["depth", "crew"], "additionalProperties": False,
    "properties": {
        "depth": {"type": "integer", "minimum": 0, "maximum": 99}, "side": {"enum": ["port", "star board", "<b>"]},
        "fast": {"type": "boolean"}, "air": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 1, "maximum": 9}]},
        "crew": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/Diver"}},
    },
    "$defs": {"Diver": {
        "type": "object", "required": ["name"], "additionalProperties": False,
        "properties": {"name": {"enum": ["Ann \"A\"", "Bob\nB"]}, "age": {"type": "integer", "minimum": 10, "maximum": 20}},
    }},
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, one in templates().items() if one.calls is not None and one.calls.written])
def test_what_a_grammar_lets_through_is_calls_that_fit(name: str) -> None:
    """Bytes drawn at random among those allowed. The parser reads calls by their schemas, or an answer by its own."""
    llguidance, jsonschema = pytest.importorskip("llguidance"), pytest.importorskip("jsonschema_rs")
    tokenizer, template = llguidance.LLTokenizer("byte"), templates()[name]
    functions: dict[str, Any] = {"dive": SCHEMA, "look": {"type": "object", "properties": {}, "additionalProperties": False}}
    masters = []
    for answer in (None, {"json_schema": REPORT}) if name != "llama3" else (None,):
        grammar = CallGrammar(template, functions, {}).required(False, "none", answer)
        masters.append(llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0))
    for seed in range(24):
        master, is_either = masters[seed % len(masters)], seed % len(masters) == 1
        draw, matcher, found = random.Random(seed), master.deep_copy(), bytearray()
        while not matcher.is_stopped() and not (matcher.is_accepting() and draw.random() < 0.3):
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:256]
            token = draw.choice(np.flatnonzero(mask).tolist())
            assert matcher.consume_token(token)
            found.append(token)
        text = found.decode()
        parser = ResponseParser(template, functions, is_either=is_either)
        parts = parser.feed(text) + parser.finish()
        if is_either and parts[0].kind == "content" and parts[0].text.strip():
            assert jsonschema.is_valid(REPORT, json.loads("".join(part.text for part in parts)))
            continue
        assert parts and {part.kind for part in parts if part.text.strip()} == {"call"}, text
        for part in parts:
            if part.kind == "call":
                assert jsonschema.is_valid(functions[part.name], json.loads(part.text)), text
