"""LangChain's models for OpenAI's, Anthropic's and Ollama's APIs against a real server with a model that says a given text."""

from __future__ import annotations

from typing import Any

import pytest
from durable_rig import scripted

langchain_openai, langchain_anthropic, langchain_ollama, messages = (
    pytest.importorskip(name, reason="the extra test-all brings it")
    for name in ("langchain_openai", "langchain_anthropic", "langchain_ollama", "langchain_core.messages")
)


def dive(depth: int) -> str:
    """Go down."""
    return f"wet at {depth}"


def chat_model(kind: str, url: str) -> Any:
    """A model as LangChain's own quick starts make it, with another address."""
    if kind == "anthropic":
        return langchain_anthropic.ChatAnthropic(model="claude-opus-4-6", base_url=url, api_key="unused", max_retries=0)
    if kind == "ollama":
        return langchain_ollama.ChatOllama(model="kept", base_url=url)
    own = {"use_responses_api": True} if kind == "responses" else {}
    return langchain_openai.ChatOpenAI(model="kept", base_url=f"{url}/v1", api_key="unused", max_retries=0, **own)


KINDS = ("chats", "responses", "anthropic", "ollama")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_tool_over_two_turns_whole_and_streamed(kind: str) -> None:
    asked = messages.HumanMessage("Dive")
    async with scripted() as server:
        model = chat_model(kind, server.url).bind_tools([dive])
        whole = await model.ainvoke([asked])
        streamed = None
        async for chunk in model.astream([asked]):
            streamed = chunk if streamed is None else streamed + chunk
        for answer in (whole, streamed):
            (call,) = answer.tool_calls
            assert (answer.text, call["name"], call["args"]) == ("Down we go.", "dive", {"depth": 3})
        assert whole.usage_metadata["output_tokens"] > 0 < whole.usage_metadata["input_tokens"]
        server.engine.queue.texts = ("It is wet.",)
        result = messages.ToolMessage(dive(**call["args"]), tool_call_id=call["id"])
        assert (await model.ainvoke([asked, answer, result])).text == "It is wet."
        first, second, third = server.last_request["messages"]
        (earlier,) = second["tool_calls"]
        assert (first["role"], third["content"], earlier["function"]["name"]) == ("user", "wet at 3", "dive")
        assert third["tool_call_id"] == earlier["id"]
        (tool,) = server.last_request["template"]["tools"]
        assert tool["function"]["parameters"]["properties"]["depth"]["type"] == "integer"


@pytest.mark.parametrize("kind", KINDS)
async def test_structured_output(kind: str) -> None:
    schema = {
        "title": "Dive", "description": "A dive.", "type": "object", "required": ["depth"], "additionalProperties": False,
        "properties": {"depth": {"type": "integer"}},
    }  # fmt: skip
    async with scripted('{"depth": 3}') as server:
        model = chat_model(kind, server.url).with_structured_output(schema, method="json_schema")
        assert await model.ainvoke("How deep?") == {"depth": 3}
        assert server.last_request["params"]["json_schema"]["properties"] == {"depth": {"type": "integer"}}
