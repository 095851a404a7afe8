"""Ollama's API: what its bodies are as chats, and a scripted model's answers in its form, whole and streamed."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import pytest
from durable_rig import CALL, PROMPT, FrontEnd, scripted
from hypothesis import given
from hypothesis import strategies as st

from pagetide.server.config import ModelOptions
from pagetide.server.errors import ApiError
from pagetide.server.keys import ApiKey, ApiKeys
from pagetide.server.models import ServedModel
from pagetide.server.ollama import API_VERSION, NOT_SERVED, OllamaChatRequest, OllamaGenerateRequest, listed, running

TOOLS = [{"type": "function", "function": {"name": "dive", "parameters": {"type": "object"}}}]
CHAT: dict[str, Any] = {"model": "kept:latest", "messages": [{"role": "user", "content": "Dive"}], "tools": TOOLS}
GENERATE: dict[str, Any] = {"model": "kept", "prompt": "Dive"}
END = {
    "done": True, "done_reason": "stop", "load_duration": 0, "prompt_eval_count": len(PROMPT),
    "prompt_eval_duration": 100_000_000, "eval_duration": 800_000_000,
}  # fmt: skip


async def lines_of(server: FrontEnd, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a stream, which is what these paths answer unless told not to."""
    answer = await server.client.post(path, json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson"), answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def test_messages_become_those_of_a_chat() -> None:
    talk = [
        {"role": "System", "content": "Be brief."},
        {"role": "user", "content": "Dive"},
        {"role": "assistant", "thinking": "Hm.", "tool_calls": [
            {"function": {"name": "dive", "arguments": {"depth": 3}}}, {"function": {"name": "look", "arguments": {}}},
            {"id": "c9", "function": {"name": "dive", "arguments": {"depth": 4}}},
        ]},
        {"role": "tool", "content": "seen", "tool_name": "look"},
        {"role": "tool", "content": "deeper", "tool_call_id": "c9"},
        {"role": "tool", "content": "wet"},
    ]  # fmt: skip
    chat = OllamaChatRequest(**CHAT | {"messages": talk}).as_chat()
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in (
            ("000000001", "dive", {"depth": 3}), ("000000002", "look", {}), ("c9", "dive", {"depth": 4}),
        )
    ]  # fmt: skip
    assert [message.model_dump(exclude_unset=True) for message in chat.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Dive"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "seen", "tool_call_id": "000000002", "name": "look"},
        {"role": "tool", "content": "deeper", "tool_call_id": "c9"},
        {"role": "tool", "content": "wet", "tool_call_id": "000000001"},
    ]


_NAMES, _IDS = st.sampled_from(["dive", "look"]), st.sampled_from([None, "a", "b"])


@given(st.lists(st.tuples(_IDS, _NAMES), max_size=6), st.lists(st.tuples(_IDS, st.none() | _NAMES), max_size=8))
def test_a_result_answers_the_first_open_call_of_its_id_or_function(
    calls: list[tuple[str | None, str]], results: list[tuple[str | None, str | None]]
) -> None:
    asked = [{"id": call_id, "function": {"name": name, "arguments": {}}} for call_id, name in calls]
    told = [{"role": "tool", "content": "x", "tool_call_id": call_id, "tool_name": name} for call_id, name in results]
    _, *found = OllamaChatRequest(**CHAT | {"messages": [{"role": "assistant", "tool_calls": asked}, *told]}).as_chat().messages
    unanswered = [(call_id or f"{number:09}", name) for number, (call_id, name) in enumerate(calls, 1)]
    for message, (call_id, name) in zip(found, results, strict=True):
        fitting = [one for one in unanswered if one[0] == call_id] or [one for one in unanswered if name in (None, one[1])]
        wanted = fitting[0][0] if fitting else call_id
        assert message.model_dump(exclude_unset=True).get("tool_call_id") == wanted
        if fitting:
            unanswered.remove(fitting[0])


def test_options_become_fields_of_a_chat() -> None:
    options = {
        "num_predict": 7, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop": ["END"],
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "repeat_penalty": 1.1,
    }  # fmt: skip
    chat = OllamaChatRequest(**CHAT, options=options).as_chat()
    assert chat.params() == {
        "max_new_tokens": 7, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop": ["END"],
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "repetition_penalty": 1.1, "ignore_eos": False,
    }  # fmt: skip
    assert chat.stream and not OllamaChatRequest(**CHAT, stream=False).as_chat().stream
    free = OllamaChatRequest(
        **CHAT, options={"num_predict": -1, "seed": -1, "repeat_penalty": 1.1, "repeat_last_n": 0}
    ).as_chat()
    assert free.params() == {"ignore_eos": False}
    for form, constraint in (("json", {"type": "object"}), ({"type": "array"}, {"type": "array"}), ("", None)):
        assert OllamaGenerateRequest(**GENERATE, format=form).as_chat().params().get("json_schema") == constraint
    for think, thinking, effort in ((True, True, None), (False, False, None), ("high", True, "high"), (None, None, None)):
        chat = OllamaGenerateRequest(**GENERATE, think=think).as_chat()
        assert (chat.enable_thinking, chat.reasoning_effort) == (thinking, effort)
    with_system = OllamaGenerateRequest(**GENERATE, system="Be brief.").as_chat()
    assert [message.role for message in with_system.messages] == ["system", "user"]


@pytest.mark.parametrize(("fields", "said"), [
    ({"suffix": "end"}, "suffix is not supported"), ({"template": "{{ .Prompt }}"}, "template is not supported"),
    ({"context": [1, 2]}, "context is not supported"), ({"images": ["AAAA"]}, "only text is served"),
    ({"raw": True, "system": "x"}, "no system message"), ({"options": {"temperature": -1}}, "temperature"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError, match=said):
        OllamaGenerateRequest(**GENERATE | fields).as_chat().params()


async def test_a_chat_whole_and_streamed() -> None:
    async with scripted() as server:
        whole = json.loads((await server.ask("/api/chat", CHAT | {"stream": False})).body)
        (call,) = whole["message"].pop("tool_calls")
        assert call.pop("id") and call == {"function": {"index": 0, "name": "dive", "arguments": {"depth": 3}}}
        assert whole["message"] == {"role": "assistant", "content": "Down we go.", "thinking": "Hmm."}
        assert whole.items() >= END.items() and whole["total_duration"] > 0 and whole["eval_count"] > 0
        *lines, last = await lines_of(server, "/api/chat", CHAT)
        assert not any(line["done"] for line in lines) and last["message"] == {"role": "assistant", "content": ""}
        times = {"created_at": ..., "total_duration": ..., "message": ...}
        assert {name: last[name] for name in last if name not in times} == {
            name: whole[name] for name in whole if name not in times
        }
        said = {name: "".join(line["message"].get(name, "") for line in lines) for name in ("content", "thinking")}
        assert said == {"content": "Down we go.", "thinking": "Hmm."}
        (call,) = [call for line in lines for call in line["message"].get("tool_calls", ())]
        assert call["function"]["arguments"] == {"depth": 3}
        scored = await lines_of(server, "/api/chat", CHAT | {"logprobs": True, "options": {"num_ctx": 4096}})
        assert [one["logprob"] for line in scored for one in line.get("logprobs", ())][:2] == [-0.5, -1.5]


async def test_a_prompt_goes_through_the_chat_template_unless_it_is_raw() -> None:
    async with scripted() as server:
        whole = json.loads((await server.ask("/api/generate", GENERATE | {"stream": False})).body)
        assert (whole["response"], whole["thinking"]) == (f"Down we go.\n{CALL}", "Hmm.") and whole.items() >= END.items()
        assert server.last_request["messages"] == [{"role": "user", "content": "Dive"}]
        *lines, last = await lines_of(server, "/api/generate", GENERATE | {"raw": True})
        assert "".join(line["response"] for line in lines) == "".join(server.engine.queue.texts)
        assert (last["response"], last["done_reason"], server.last_request["prompt"]) == ("", "stop", "Dive")
        assert "messages" not in server.last_request


async def test_models_as_ollama_lists_them() -> None:
    async with scripted("Hi") as server:
        (tag,) = (await server.client.get("/api/tags")).json()["models"]
        assert (tag["name"], tag["model"]) == ("kept:latest", "kept:latest")
        shown = json.loads((await server.ask("/api/show", {"model": tag["name"], "name": tag["name"]})).body)
        assert shown["capabilities"] == ["completion", "tools", "thinking"] and shown["template"] == "{{ messages }}"
        assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == 1 << 20
        (one,) = (await server.client.get("/api/ps")).json()["models"]
        assert (one["name"], one["context_length"], one["digest"]) == ("kept:latest", 1 << 20, tag["digest"])
        assert (await server.client.get("/api/version")).json() == {"version": API_VERSION}
        for path, body in (("/api/chat", CHAT | {"messages": []}), ("/api/generate", {"model": "kept", "keep_alive": -1})):
            found = json.loads((await server.ask(path, body)).body)
            assert (found["done"], found["done_reason"]) == (True, "load")
        assert not server.engine.queue.requests
        chat = {"model": tag["name"], "messages": [{"role": "user", "content": "Dive"}]}  # as VS Code asks
        assert json.loads((await server.ask("/v1/chat/completions", chat)).body)["model"] == "kept"


def test_sizes_are_those_of_the_engine() -> None:
    model = ServedModel(ModelOptions("user/whale:7b", "here"))
    stats = {"0": {"weights_bytes": 100, "kv_bytes": 20, "device": "cuda:0"}}
    assert (listed(model, stats)["name"], listed(model, stats)["size"], listed(model, {})["size"]) == ("user/whale:7b", 100, 0)
    with pytest.raises(ApiError, match="is loading"):
        running(model, stats)


async def test_errors_have_ollamas_form() -> None:
    async with scripted("Hi", keys=ApiKeys([ApiKey("ann", sha256(b"sk-ann-12345").digest())])) as server:
        assert "API key" in json.loads((await server.ask("/api/chat", CHAT)).body)["error"]
        server.client.headers["authorization"] = "Bearer sk-ann-12345"
        for body, status, said in (
            (CHAT | {"model": "moby"}, 404, "does not exist"), ({"messages": []}, 400, "model is missing"),
            (CHAT | {"options": {"num_predct": 3}}, 400, "did you mean 'num_predict'"),
            (CHAT | {"options": {"mirostat": 2}}, 400, "mirostat is served as 0"),
            (CHAT | {"keep_alive": "5x"}, 400, "or a duration"),
            (CHAT | {"messages": [{"role": "user", "content": "x", "images": ["AAAA"]}]}, 400, "only text is served"),
            (CHAT | {"messages": [], "keep_alive": "0s"}, 400, "POST /sleep"),
        ):  # fmt: skip
            answer = await server.ask("/api/chat", body)
            found = json.loads(answer.body)
            assert (answer.status, list(found)) == (status, ["error"]) and said in found["error"]
        for path in NOT_SERVED:
            answer = await server.ask(path.format(digest="sha256:0"), {"model": "kept", "input": "x"})
            assert (answer.status, json.loads(answer.body)) == (400, {"error": NOT_SERVED[path]})
        server.models.get("kept").options = ModelOptions("kept", "kept", response_format="plain")
        for fields, said in (
            (CHAT, "does not support tools"),
            (CHAT | {"tools": None, "think": True}, "does not support thinking"),
        ):
            assert said in json.loads((await server.ask("/api/chat", fields)).body)["error"]
