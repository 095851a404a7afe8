"""Anthropic's own client against a real server with a model that says a given text."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from durable_rig import CALL, scripted
from pydantic import BaseModel

anthropic = pytest.importorskip("anthropic")

SCHEMA = {"type": "object", "properties": {"depth": {"type": "integer"}}}
ASKED: dict[str, Any] = {
    "model": "claude-opus-4-6", "max_tokens": 64, "messages": [{"role": "user", "content": "Dive"}],
    "tools": [{"name": "dive", "description": "Go down.", "input_schema": SCHEMA}],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}  # fmt: skip


async def test_messages_and_streams_and_a_second_turn() -> None:
    async with scripted() as server:
        server.engine.answers["tokenize"] = {"tokens": [1, 2, 3], "texts": None}
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
            whole = await client.messages.create(**ASKED)
            thinking, text, call = whole.content
            assert (thinking.thinking, text.text, call.name, call.input) == ("Hmm.", "Down we go.", "dive", {"depth": 3})
            assert whole.stop_reason == "tool_use"
            async with client.messages.stream(**ASKED) as stream:
                said = "".join([text async for text in stream.text_stream])
                streamed = await stream.get_final_message()
            assert said == text.text and streamed.usage.output_tokens == whole.usage.output_tokens
            left_out = {"id": ..., "content": {2: {"id"}}, "usage": ...}
            assert streamed.model_dump(exclude=left_out) == whole.model_dump(exclude=left_out)
            server.engine.queue.texts = ("It is wet.",)
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "wet"}
            talk = [*ASKED["messages"], {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
            last = await client.messages.create(**ASKED | {"messages": talk})
            assert (last.content[0].text, last.stop_reason) == ("It is wet.", "end_turn")
            sent = server.last_request["messages"]
            assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
            assert sent[1]["reasoning_content"] == "Hmm." and sent[1]["tool_calls"][0]["id"] == call.id
            counted = await client.messages.count_tokens(model="kept", messages=ASKED["messages"])
            assert counted.input_tokens == 3


class Report(BaseModel):
    """What the model is to answer."""

    wet: bool


async def test_an_answer_of_a_type_or_a_call() -> None:
    async with scripted() as server, anthropic.AsyncAnthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        server.engine.info = msgspec.structs.replace(server.engine.info, constrains=True)
        server.engine.queue.texts = ("<think>Hm.</think>\n", CALL)
        called = await client.messages.parse(**ASKED, output_format=Report)
        assert (called.stop_reason, called.content[-1].name) == ("tool_use", "dive")
        assert "(calls | answer)" in server.last_request["params"]["grammar"]
        server.engine.queue.texts = ('{"wet": true}',)
        assert (await client.messages.parse(**ASKED, output_format=Report)).parsed_output == Report(wet=True)


async def test_errors_are_the_clients_own() -> None:
    async with scripted() as server, anthropic.AsyncAnthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await client.messages.create(**ASKED | {"model": "moby"})
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
        with pytest.raises(anthropic.BadRequestError, match="is not supported, only"):
            await client.messages.create(**ASKED | {"messages": [{"role": "user", "content": [image]}]})
