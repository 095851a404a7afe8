"""OpenAI's own client against a real server: `pagetide serve demo` over a socket. The oracle is `LLM`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from durable_rig import FrontEnd, KeptRequests, scripted
from servers import ServerProcess

from pagetide import LLM, SamplingParams

SERVER = ["demo", "--device", "cpu", "--dtype", "float32", "--kv-memory", "24MiB", "--no-share", "--max-seqs", "16"]
CONVERSATION: Any = [{"role": "user", "content": "Where is the whale?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="cpu", dtype="float32", kv_memory="16MiB", share=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with ServerProcess(SERVER, tmp_path_factory.mktemp("server") / "log", OMP_NUM_THREADS="1") as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60)


def complete(client: Any, prompt: Any = "Call me", **fields: Any) -> Any:
    return client.completions.create(model="demo", prompt=prompt, **fields)


def chat(client: Any, messages: Any = CONVERSATION, **fields: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=messages, **fields)


def test_a_stream_adds_up_to_the_whole(client: Any) -> None:
    ask: dict[str, Any] = {"prompt": ["The sea", "A ship"], "max_tokens": 12, "seed": 1, "n": 2}
    whole = complete(client, **ask)
    texts, reasons, usage = [""] * 4, [None] * 4, None
    for chunk in complete(client, **ask, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
        usage = chunk.usage
    assert (texts, reasons) == ([one.text for one in whole.choices], [one.finish_reason for one in whole.choices])
    assert usage is not None and usage == whole.usage and whole.id.startswith("cmpl-")
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize(
    "extra", [{}, {"length_penalty": 2.0, "early_stopping": True}, {"length_penalty": -1.0, "early_stopping": "never"}]
)
def test_beams_are_those_of_llm(client: Any, llm: LLM, extra: dict[str, Any]) -> None:
    (wanted,) = llm.generate("Call me", SamplingParams(max_new_tokens=12, num_beams=4, n=4, temperature=0, **extra))
    fields: Any = {"max_tokens": 12, "extra_body": {"use_beam_search": True, **extra}}
    texts = [choice.text for choice in complete(client, n=4, **fields).choices]
    assert texts == [one.text for one in wanted.completions] and len(set(texts)) == 4
    streamed = dict.fromkeys(range(4), "")
    for chunk in complete(client, n=4, **fields, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert list(streamed.values()) == texts
    (wanted,) = llm.chat(CONVERSATION, SamplingParams(max_new_tokens=12, num_beams=2, n=2, temperature=0, **extra))
    answers = [choice.message.content for choice in chat(client, n=2, **fields).choices]
    assert answers == [one.text for one in wanted.completions]


def check_places(choice: Any) -> None:
    """Each token is where its `text_offset` says, or nowhere in the text."""
    entries, end = list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)), 0
    for token, place in entries:
        assert place == end
        end += len(token) if choice.text.startswith(token, place) else 0
    assert end == len(choice.text)


def test_log_probabilities_of_completions(client: Any, llm: LLM) -> None:
    (wanted,) = llm.generate("Call me", SamplingParams(max_new_tokens=3, temperature=0, logprobs=2, prompt_logprobs=1))
    entries, ids = wanted.completions[0].logprobs, wanted.prompt_token_ids
    assert entries is not None and wanted.prompt_logprobs is not None
    (choice,) = complete(client, max_tokens=3, temperature=0, logprobs=2).choices
    assert choice.logprobs.token_logprobs == pytest.approx([one.logprob for one in entries], abs=1e-4)
    assert "".join(choice.logprobs.tokens) == choice.text and choice.logprobs.text_offset[0] == 0
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)
    # the form of evaluation harnesses: the prompt is scored, nothing is generated
    (scored,) = complete(client, [ids], max_tokens=0, echo=True, logprobs=1, temperature=0).choices
    told = [one.logprob for one in wanted.prompt_logprobs if one is not None]
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.token_logprobs[1:] == pytest.approx(told, abs=1e-4) and scored.text.endswith("Call me")
    check_places(scored)
    fields: Any = {"max_tokens": 3, "temperature": 0, "logprobs": 1, "stream": True}
    extra = {"return_token_ids": True, "prompt_logprobs": 0}
    for prompt in ("Call me", ids):  # streamed: the first chunk has the prompt's
        (streamed,) = (chunk.choices[0] for chunk in complete(client, prompt, **fields, echo=True, extra_body=extra))
        assert streamed.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(told, abs=1e-4)
        assert streamed.prompt_token_ids == ids and len(streamed.prompt_logprobs) == len(ids)
        assert len(streamed.token_ids) == 3 == len(streamed.logprobs.tokens) - len(ids)
        check_places(streamed)
    first, *others = complete(client, ids, **fields, extra_body={"return_token_ids": True})
    assert first.choices[0].prompt_token_ids == ids
    assert not any(hasattr(one.choices[0], "prompt_token_ids") for one in others)


def test_log_probabilities_of_chats(client: Any) -> None:
    extra = {"return_token_ids": True, "prompt_logprobs": 0}
    first, *others = chat(client, max_tokens=3, stream=True, extra_body=extra)
    assert len(first.prompt_token_ids) == len(first.prompt_logprobs) > 10
    assert others[-1].choices[0].finish_reason == "length" and not hasattr(others[0], "prompt_logprobs")
    (choice,) = chat(client, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2).choices
    content = choice.logprobs.content
    assert "".join(one.token for one in content) == choice.message.content
    assert all(bytes(one.bytes).decode() == one.token and len(one.top_logprobs) == 2 for one in content)


def test_structured_output_and_tool_calls(client: Any) -> None:
    schema = {"type": "object", "properties": {"depth": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["depth"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "dive", "schema": schema}}
    (choice,) = chat(client, max_tokens=60, seed=1, response_format=form).choices
    assert 9 >= json.loads(choice.message.content)["depth"]
    choices = {"structured_outputs": {"choice": ["Ahab", "Ishmael"]}}
    assert complete(client, "Who? ", max_tokens=20, extra_body=choices).choices[0].text in ("Ahab", "Ishmael")
    tools = [{"type": "function", "function": {"name": "dive", "parameters": schema}}]
    ask: dict[str, Any] = {"max_tokens": 80, "seed": 2, "tools": tools}
    (called,) = chat(client, **ask, tool_choice="required", parallel_tool_calls=False).choices
    (call,) = called.message.tool_calls[:1]
    assert (called.finish_reason, call.function.name) == ("tool_calls", "dive")
    assert json.loads(call.function.arguments)["depth"] <= 9
    named = {"type": "function", "function": {"name": "dive"}}
    arguments = ""
    for chunk in chat(client, **ask, tool_choice=named, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            arguments += part.function.arguments
    assert json.loads(arguments)["depth"] <= 9


def test_what_a_hint_keeps_is_in_the_usage_and_in_the_metrics(client: Any) -> None:
    talk: Any = [{"role": "user", "content": "the sea and the ship " * 40}]
    usage = chat(client, talk, max_tokens=1, extra_body={"prompt_cache_options": {"ttl": "30m"}}).usage
    written = usage.prompt_tokens_details.cache_write_tokens
    assert 0 <= usage.prompt_tokens - written - usage.prompt_tokens_details.cached_tokens < 16
    page = httpx2.get(str(client.base_url).replace("/v1/", "/metrics")).text
    (line,) = [line for line in page.splitlines() if line.startswith("pagetide_retained_kv_blocks{")]
    assert float(line.split()[-1]) == usage.prompt_tokens // 16


REFUSED: list[tuple[dict[str, Any], int, str | None, str | None]] = [
    ({"model": "moby"}, 404, "model_not_found", "model"),
    ({"prompt": "word " * 3000}, 400, "context_length_exceeded", "prompt"),
    ({"max_tokens": 5000}, 400, "context_length_exceeded", "prompt"),
    ({"temperature": -1}, 400, None, "temperature"),
    ({"n": 0}, 400, None, "n"),
    ({"prompt": [[5, 99_999]]}, 400, None, None),
    ({"prompt": []}, 400, None, "prompt"),
    ({"suffix": "end"}, 400, None, "suffix"),
    ({"stop": [""]}, 400, None, "stop"),
    ({"extra_body": {"max_token": 3}}, 400, None, "max_token"),
    ({"extra_body": {"structured_outputs": {"regex": "("}}}, 400, None, None),
    ({"extra_body": {"logit_bias": {"a": 1}}}, 400, None, "logit_bias"),
]


def test_what_cannot_be_served_is_refused(client: Any) -> None:
    for fields, status, code, param in REFUSED:
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(**({"model": "demo", "prompt": "Call me", "max_tokens": 4} | fields))
        body = caught.value.body
        assert (caught.value.status_code, body["code"], body["param"]) == (status, code, param), fields
        assert body["message"] and caught.value.response.headers["x-request-id"]


async def test_readers_see_no_difference_in_a_durable_stream() -> None:
    async with FrontEnd(KeptRequests()) as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
        stream = await client.completions.create(model="kept", prompt="Call me", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "The whale swims — deep."
        await client.close()


async def test_reasoning_and_calls_in_chats_and_responses() -> None:
    """With a model that says a given text."""
    async with scripted() as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
        function: Any = {"name": "dive", "parameters": {"type": "object"}}
        asked: dict[str, Any] = {"model": "kept", "tools": [{"type": "function", "function": function}]}
        async with client.chat.completions.stream(messages=CONVERSATION, **asked) as stream:
            async for _ in stream:
                pass
            streamed = (await stream.get_final_completion()).choices[0]
        whole = (await client.chat.completions.create(messages=CONVERSATION, **asked)).choices[0]
        for choice in (streamed, whole):
            assert (choice.message.content, choice.finish_reason) == ("Down we go.", "tool_calls")
            assert choice.message.tool_calls is not None and choice.message.tool_calls[0].function.name == "dive"
        assert whole.message.reasoning_content == "Hmm."  # type: ignore[attr-defined]
        items: dict[str, Any] = {"model": "kept", "input": "Dive", "tools": [{"type": "function", **function}], "store": False}
        response = await client.responses.create(**items)
        reasoning, _, call = response.output
        assert (reasoning.content[0].text, response.output_text, call.name) == ("Hmm.", "Down we go.", "dive")
        async with client.responses.stream(**items) as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            last = await stream.get_final_response()
        assert "".join(deltas) == "Down we go." and [one.type for one in last.output] == [one.type for one in response.output]
        server.engine.queue.texts = ("It is wet.",)
        talk = [{"role": "user", "content": "Dive"}, *response.output]
        talk.append({"type": "function_call_output", "call_id": call.call_id, "output": "wet"})
        assert (await client.responses.create(**items | {"input": talk})).output_text == "It is wet."
        await client.close()
