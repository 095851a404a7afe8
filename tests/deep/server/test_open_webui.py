"""The requests that the source of Open WebUI 0.12.4 makes, against a real server with a model that says a given text.

It was not run itself: its package brings gigabytes. What it reads of the answers is looked at here.
"""

from __future__ import annotations

import json
from typing import Any

from durable_rig import FrontEnd, scripted

HEADERS = {
    "Content-Type": "application/json", "Authorization": "Bearer unused", "X-OpenWebUI-User-Name": "Ann Diver",
    "X-OpenWebUI-User-Id": "4f1c", "X-OpenWebUI-User-Email": "ann@example.org", "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "c1",
}  # fmt: skip
PARAMETERS = {"type": "object", "properties": {"depth": {"type": "integer"}}, "required": ["depth"]}
DIVE = {"type": "function", "function": {"name": "dive", "description": "Go down.", "parameters": PARAMETERS}}
ASKED: list[dict[str, Any]] = [{"role": "system", "content": "You dive."}, {"role": "user", "content": "Dive"}]
# The settings of its "advanced parameters", where each is named as its API names it
PARAMS = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["END"], "frequency_penalty": 0.1, "presence_penalty": 0.1}
OPTIONS = {
    **PARAMS, "top_k": 40, "min_p": 0.05, "repeat_penalty": 1.1, "repeat_last_n": -1, "num_ctx": 2048, "num_keep": 24,
    "num_batch": 512, "num_thread": 2, "num_gpu": 0, "use_mmap": True, "use_mlock": False, "num_predict": 64,
}  # fmt: skip


async def stream(server: FrontEnd, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a stream, of events or of lines."""
    answer = await server.client.post(path, content=json.dumps(body), headers=HEADERS)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith(("data: ", "{"))]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_an_openai_connection() -> None:
    async with scripted() as server:
        (model,) = (await server.client.get("/v1/models", headers=HEADERS)).json()["data"]
        assert model["id"] == "kept"
        body = {
            "stream": True, "model": "kept", "messages": ASKED, "tools": [DIVE], "stream_options": {"include_usage": True},
            "reasoning_effort": "low", "max_tokens": 64, "logit_bias": {"5": -1}, **PARAMS,
        }  # fmt: skip
        chunks = await stream(server, "/v1/chat/completions", body)
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        said, thought = ("".join(delta.get(key) or "" for delta in deltas) for key in ("content", "reasoning_content"))
        (call,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert (said, thought) == ("Down we go.", "Hmm.") and (call["index"], call["type"]) == (0, "function")
        assert chunks[-1]["usage"]["total_tokens"] > 0 and not chunks[-1]["choices"]
        server.engine.queue.texts = ("It is wet.",)
        (own,) = [{"id": call["id"], "type": "function", "index": 0, "function": call["function"]}]
        talk = [*ASKED, {"role": "assistant", "content": said, "tool_calls": [own]}]
        talk.append({"role": "tool", "tool_call_id": call["id"], "content": "wet"})
        chunks = await stream(server, "/v1/chat/completions", body | {"messages": talk})
        assert "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]) == "It is wet."
        assert [message["role"] for message in server.last_request["messages"]] == ["system", "user", "assistant", "tool"]
        title = {"model": "kept", "messages": ASKED[1:], "stream": False, "max_tokens": 1000}
        whole = (await server.client.post("/v1/chat/completions", json=title, headers=HEADERS)).json()
        assert whole["choices"][0]["message"]["content"] == "It is wet."


async def test_an_openai_connection_of_the_kind_responses() -> None:
    async with scripted() as server:
        tool = {"type": "function", "name": "dive", "description": "Go down.", "parameters": PARAMETERS, "strict": False}
        question = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Dive"}]}
        body = {
            "stream": True, "model": "kept", "tools": [tool], "input": [question], "instructions": "You dive.",
            "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 64,
        }  # fmt: skip
        events = await stream(server, "/v1/responses", body)
        assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == "Down we go."
        output = events[-1]["response"]["output"]
        assert events[-1]["type"] == "response.completed" and events[-1]["response"]["usage"]["total_tokens"] > 0
        server.engine.queue.texts = ("It is wet.",)
        result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "wet"}
        events = await stream(server, "/v1/responses", body | {"input": [question, *output, result]})
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "It is wet."
        assert [message["role"] for message in server.last_request["messages"]] == ["system", "user", "assistant", "tool"]


async def test_an_ollama_connection() -> None:
    async with scripted() as server:
        assert (await server.client.get("/api/version", headers=HEADERS)).json()["version"].count(".") == 2
        (model,) = (await server.client.get("/api/tags", headers=HEADERS)).json()["models"]
        (running,) = (await server.client.get("/api/ps", headers=HEADERS)).json()["models"]
        assert model["model"] == model["name"] == running["model"] and running["expires_at"]
        shown = await server.client.post("/api/show", json={"name": model["model"], "model": model["model"]}, headers=HEADERS)
        assert "tools" in shown.json()["capabilities"]
        body = {
            "model": model["model"], "messages": ASKED, "stream": True, "tools": [DIVE], "options": OPTIONS, "keep_alive": "5m",
            "think": True,
        }  # fmt: skip
        lines = await stream(server, "/api/chat", body)
        said, thought = ("".join(line["message"].get(key, "") for line in lines) for key in ("content", "thinking"))
        (call,) = [call for line in lines for call in line["message"].get("tool_calls", ())]
        assert (said, thought, call["function"]["arguments"]) == ("Down we go.", "Hmm.", {"depth": 3})
        assert lines[-1]["done"] and lines[-1]["eval_count"] > 0 < lines[-1]["prompt_eval_count"]
        server.engine.queue.texts = ("It is wet.",)
        own = {"index": 0, "id": call["id"], "function": {"name": "dive", "arguments": {"depth": 3}}}
        talk = [*ASKED, {"role": "assistant", "content": "", "thinking": "Hmm.", "tool_calls": [own]}]
        talk.append({"role": "tool", "content": "wet", "tool_call_id": call["id"]})
        lines = await stream(server, "/api/chat", body | {"messages": talk})
        assert "".join(line["message"]["content"] for line in lines) == "It is wet."
        earlier, result = server.last_request["messages"][-2:]
        assert (earlier["reasoning_content"], result["tool_call_id"]) == ("Hmm.", call["id"])


async def test_unloading_says_what_to_do() -> None:
    async with scripted() as server:
        answer = await server.client.post(
            "/api/generate", json={"model": "kept", "keep_alive": 0, "prompt": ""}, headers=HEADERS
        )
        assert answer.status_code == 400 and "POST /sleep" in answer.json()["error"]
