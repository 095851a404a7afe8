"""Calls that a real engine has to write in the formats of families: a model that has learned none of them, constrained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from servers import ServerProcess

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
    assert "the format gemma4 cannot be constrained: strict functions are not held to" in running.said
    assert "the format gemma4 cannot be constrained: calls that have to be are JSON" in running.said
