"""Ollama's own client against a real server with a model that says a given text."""

from __future__ import annotations

from typing import Any

import pytest
from durable_rig import PROMPT, scripted

ollama = pytest.importorskip("ollama")


def dive(depth: int) -> str:
    """Go down.

    Args:
        depth: How deep.
    """
    return f"wet at {depth}"


async def test_a_chat_with_a_tool_over_two_turns() -> None:
    talk: list[Any] = [{"role": "user", "content": "Dive"}]
    async with scripted() as server:
        client = ollama.AsyncClient(host=server.url)
        whole = await client.chat("kept", talk, tools=[dive], think=True)
        (call,) = whole.message.tool_calls
        assert (whole.message.content, whole.message.thinking) == ("Down we go.", "Hmm.")
        assert (call.function.name, call.function.arguments, whole.done_reason) == ("dive", {"depth": 3}, "stop")
        assert whole.prompt_eval_count == len(PROMPT) and whole.eval_duration > 0 < whole.total_duration
        content, thinking, calls, last = "", "", [], None
        async for last in await client.chat("kept:latest", talk, tools=[dive], stream=True, keep_alive="10m"):
            content, thinking = content + (last.message.content or ""), thinking + (last.message.thinking or "")
            calls += last.message.tool_calls or ()
        assert (content, thinking, calls) == (whole.message.content, whole.message.thinking, [call])
        assert last is not None and last.done and last.eval_count == whole.eval_count
        server.engine.queue.texts = ("It is wet.",)
        talk += [whole.message, {"role": "tool", "content": dive(**call.function.arguments), "tool_name": "dive"}]
        assert (await client.chat("kept", talk, tools=[dive])).message.content == "It is wet."
        asked, answered, result = server.last_request["messages"]
        assert asked["role"] == "user" and answered["reasoning_content"] == "Hmm." and result["content"] == "wet at 3"
        assert result["tool_call_id"] == answered["tool_calls"][0]["id"] and result["name"] == "dive"
        (tool,) = server.last_request["template"]["tools"]
        assert tool["function"]["parameters"]["properties"]["depth"]["type"] == "integer"


async def test_prompts_schemas_and_options() -> None:
    schema = {"type": "object", "properties": {"depth": {"type": "integer"}}}
    async with scripted('{"depth": 3}') as server:
        client = ollama.AsyncClient(host=server.url)
        options = ollama.Options(num_predict=32, temperature=0.0, num_ctx=4096, repeat_penalty=1.1, stop=["END"])
        answer = await client.generate("kept", "How deep?", format=schema, options=options, system="Be brief.")
        assert (answer.response, answer.done_reason) == ('{"depth": 3}', "stop")
        params = server.last_request["params"]
        assert (params["json_schema"], params["max_new_tokens"], params["repetition_penalty"]) == (schema, 32, 1.1)
        streamed = [part.response async for part in await client.generate("kept", "Call me", raw=True, stream=True)]
        assert ("".join(streamed), server.last_request["prompt"]) == ('{"depth": 3}', "Call me")


async def test_models_and_errors() -> None:
    async with scripted("Hi") as server:
        client = ollama.AsyncClient(host=server.url)
        (model,) = (await client.list()).models
        shown = await client.show(model.model)
        assert shown.capabilities == ["completion", "tools", "thinking"]
        assert [one.model for one in (await client.ps()).models] == [model.model]
        assert (await client.generate(model.model)).done_reason == "load"
        for call, status, said in (
            (client.chat("moby", [{"role": "user", "content": "x"}]), 404, "does not exist"),
            (client.embed("kept", "x"), 400, "embeddings are not served"),
            (client.pull("kept"), 400, "pagetide serve MODEL"), (client.delete("kept"), 400, "pagetide serve MODEL"),
            (client.generate("kept", "x", suffix="y"), 400, "suffix is not supported"),
            (client.generate("kept", "x", images=[b"x"]), 400, "only text is served"),
        ):  # fmt: skip
            with pytest.raises(ollama.ResponseError, match=said) as caught:
                await call
            assert caught.value.status_code == status
