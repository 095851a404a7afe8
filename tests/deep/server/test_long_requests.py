"""Requests of a few megabytes: their conversion blocks the server's event loop, so its work grows with their length alone.

Of calls and of definitions, work that grows with the square of the number runs into the time limit of a test.
"""

from __future__ import annotations

from typing import Any

from pagetide.server.answers import AnswerReader
from pagetide.server.anthropic import MessagesRequest
from pagetide.server.ollama import OllamaChatRequest
from pagetide.server.openai_responses import ResponsesRequest
from pagetide.server.requests import ChatRequest
from pagetide.server.response_templates import template_named

NUM = 80_000
USER: dict[str, Any] = {"role": "user", "content": "x"}


def message_fields(chat: ChatRequest) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_unset=True) for message in chat.messages]


def test_many_messages_in_a_row() -> None:
    joined = [{"role": "user", "content": [{"type": "text", "text": "x"}] * NUM}]
    assert message_fields(MessagesRequest(model="m", max_tokens=1, messages=[USER] * NUM).as_chat()) == joined
    assert message_fields(ResponsesRequest(input=[USER] * NUM).as_chat()) == joined
    blocks = [{"type": "thinking", "thinking": "Hm. " * 8}] * NUM
    (answer,) = message_fields(
        MessagesRequest(model="m", max_tokens=1, messages=[{"role": "assistant", "content": blocks}]).as_chat()
    )
    assert answer["reasoning_content"] == "Hm. " * 8 * NUM


def test_many_calls_and_their_results() -> None:
    call = {"function": {"name": "dive", "arguments": {}}}
    results = [{"role": "tool", "content": "wet", "tool_name": name} for name in ("look", "dive") * NUM]
    talk = [{"role": "assistant", "tool_calls": [call] * NUM}, *results]
    _, *found = message_fields(OllamaChatRequest(model="m", messages=talk).as_chat())
    answered = [one.get("tool_call_id") for one in found]
    assert answered[::2] == [None] * NUM and answered[1::2] == [f"{number:09}" for number in range(1, NUM + 1)]


def test_many_tools_and_parameters() -> None:
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(NUM)]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools[1:]}}
    assert AnswerReader({"tools": tools, "tool_choice": choice}).params() == {}
    # definitions that each parameter's schema repeats
    names = [f"p{number}" for number in range(NUM // 2)]
    integers = {name: {"type": "integer"} for name in names}
    shared = {"$defs": integers, "properties": integers}
    strict = {"name": "dive", "strict": True, "parameters": {"type": "object", **shared}}
    reader = AnswerReader({"tools": [{"type": "function", "function": strict}]}, template_named("qwen3-coder"), constrains=True)
    assert "grammar" not in reader.params()
