"""OpenAI's agents SDK against a real server with a model that says given texts: a run with a tool, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from durable_rig import CALL, FrontEnd, scripted
from pydantic import BaseModel

agents = pytest.importorskip("agents", reason="the extra test-all brings it: openai-agents")

MODELS = {"chats": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}


class Report(BaseModel):
    """What an agent is to answer."""

    wet: bool


@agents.function_tool
def dive(depth: int) -> str:
    """Go down."""
    return f"wet at {depth}"


def says(server: FrontEnd, answer: str) -> None:
    """Let the model call the tool, and say `answer` once it has the result."""
    queue, begin = server.engine.queue, server.engine.queue.begin

    def chosen(request: dict[str, Any]) -> Any:
        queue.texts = (answer,) if request["messages"][-1]["role"] == "tool" else ("<think>Hm.</think>", CALL)
        return begin(request)

    queue.begin = chosen  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def without_tracing() -> Iterator[None]:
    """It would send what happens to OpenAI."""
    agents.set_tracing_disabled(True)
    yield
    agents.set_tracing_disabled(False)


@pytest.mark.parametrize("kind", MODELS)
async def test_an_agent_calls_its_tool_and_answers(kind: str) -> None:
    async with scripted() as server:
        says(server, "It is wet.")
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
        agent = agents.Agent(name="Diver", instructions="You dive.", tools=[dive], model=MODELS[kind]("kept", client))
        assert (await agents.Runner.run(agent, "Dive")).final_output == "It is wet."
        asked = server.last_request["messages"]
        assert [message["role"] for message in asked] == ["system", "user", "assistant", "tool"]
        assert (asked[-1]["content"], asked[-1]["tool_call_id"]) == ("wet at 3", asked[-2]["tool_calls"][0]["id"])
        streamed = agents.Runner.run_streamed(agent, "Dive")
        kinds = [event.item.type async for event in streamed.stream_events() if event.type == "run_item_stream_event"]
        assert streamed.final_output == "It is wet."
        assert [one for one in kinds if one != "reasoning_item"] == [
            "tool_call_item",
            "tool_call_output_item",
            "message_output_item",
        ]
        await client.close()


@pytest.mark.parametrize("kind", MODELS)
async def test_an_agent_whose_answer_has_a_form_calls_its_tool_first(kind: str) -> None:
    async with scripted() as server:
        server.engine.info = msgspec.structs.replace(server.engine.info, constrains=True)
        says(server, '{"wet": true}')
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
        agent = agents.Agent(name="Diver", tools=[dive], model=MODELS[kind]("kept", client), output_type=Report)
        assert (await agents.Runner.run(agent, "Dive")).final_output == Report(wet=True)
        assert "(calls | answer)" in server.last_request["params"]["grammar"]
        await client.close()
