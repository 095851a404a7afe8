"""OpenAI's own client against a real server: `pagetide serve demo` over a socket. The oracle is `LLM`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from servers import ServerProcess

from pagetide import LLM, SamplingParams

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")
httpx2 = pytest.importorskip("httpx2")
from pagetide.server.errors import ApiError  # noqa: E402
from pagetide.server.requests import CompletionRequest  # noqa: E402

ADMIN = {"Authorization": "Bearer sk-operator-1"}
CONVERSATION: Any = [{"role": "user", "content": "Where is the whale?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    arguments = [
        "demo",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--kv-memory",
        "24MiB",
        "--no-share",
        "--max-seqs",
        "16",
    ]
    log = tmp_path_factory.mktemp("server") / "log"
    with ServerProcess(arguments, log, PAGETIDE_ADMIN_KEY="sk-operator-1", OMP_NUM_THREADS="1") as server:
        yield server


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="cpu", dtype="float32", kv_memory="16MiB", share=False) as llm:
        yield llm


@pytest.fixture
def client(server: ServerProcess) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60)


def stats(server: ServerProcess) -> dict[str, float]:
    """The samples of /metrics without labels but the state of blocks."""
    samples = {}
    for line in httpx2.get(f"{server.url}/metrics").text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            state = name.partition('state="')[2].partition('"')[0]
            samples[name.partition("{")[0] + (f":{state}" if state else "")] = float(value)
    return samples


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_completion_has_the_tokens_of_llm(client: Any, llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.9, seed=3)
    (wanted,) = llm.generate("Call me", params)
    found = client.completions.create(
        model="demo",
        prompt="Call me",
        max_tokens=24,
        temperature=0.8,
        top_p=0.9,
        seed=3,
        extra_body={"return_token_ids": True},
    )
    (choice,) = found.choices
    assert (choice.text, choice.token_ids, choice.finish_reason) == (
        wanted.text,
        wanted.token_ids,
        wanted.finish_reason,
    )
    assert choice.prompt_token_ids == wanted.prompt_token_ids and found.id.startswith("cmpl-")
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(wanted.prompt_token_ids), len(wanted.token_ids))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_stream_adds_up_to_the_whole(client: Any) -> None:
    ask: dict[str, Any] = {"model": "demo", "prompt": ["The sea", "A ship"], "max_tokens": 12, "seed": 1, "n": 2}
    whole = client.completions.create(**ask)
    texts, reasons, usage = [""] * 4, [None] * 4, None
    for chunk in client.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
        usage = chunk.usage
    assert (texts, reasons) == ([one.text for one in whole.choices], [one.finish_reason for one in whole.choices])
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens


def test_chat_has_the_tokens_of_llm_and_streams_the_same(client: Any, llm: LLM) -> None:
    ids = llm.render(CONVERSATION)
    (wanted,) = llm.generate([ids], SamplingParams(max_new_tokens=30, temperature=1.0, seed=5, stop=["\n\n"]))
    ask: dict[str, Any] = {"model": "demo", "messages": CONVERSATION, "max_tokens": 30, "seed": 5, "temperature": 1.0,
                           "stop": "\n\n"}  # fmt: skip
    (choice,) = client.chat.completions.create(**ask).choices
    assert (choice.message.content, choice.finish_reason) == (wanted.text, wanted.finish_reason)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == wanted.text
    assert chunks[-2].choices[0].finish_reason == wanted.finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage.prompt_tokens == len(ids)


@pytest.mark.parametrize(
    "extra", [{}, {"length_penalty": 2.0, "early_stopping": True}, {"length_penalty": -1.0, "early_stopping": "never"}]
)
def test_beams_are_those_of_llm(client: Any, llm: LLM, extra: dict[str, Any]) -> None:
    (wanted,) = llm.generate("Call me", SamplingParams(max_new_tokens=12, num_beams=4, n=4, temperature=0, **extra))
    asked: Any = {
        "model": "demo", "prompt": "Call me", "max_tokens": 12, "n": 4, "extra_body": {"use_beam_search": True, **extra},
    }  # fmt: skip
    found = client.completions.create(**asked)
    texts = [choice.text for choice in found.choices]
    assert texts == [one.text for one in wanted.completions] and len(set(texts)) == 4
    streamed = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert list(streamed.values()) == texts
    (chat,) = llm.chat(CONVERSATION, SamplingParams(max_new_tokens=12, num_beams=2, n=2, temperature=0, **extra))
    asked = {"model": "demo", "messages": CONVERSATION, "max_tokens": 12, "n": 2, "extra_body": asked["extra_body"]}
    answers = client.chat.completions.create(**asked).choices
    assert [answer.message.content for answer in answers] == [one.text for one in chat.completions]


@pytest.mark.parametrize("field", [{"best_of": 4}, {"logprobs": 2}, {"prompt_logprobs": 0}, {"stop": ["a"]}])
def test_what_beams_exclude_is_refused(field: dict[str, Any]) -> None:
    body = CompletionRequest(prompt="a", n=4, use_beam_search=True, **field)
    with pytest.raises(ApiError, match=f"{next(iter(field))} cannot be given with use_beam_search"):
        body.params()


def test_a_second_turn_finds_the_first_in_the_cache(client: Any) -> None:
    said = [
        {
            "role": "user",
            "content": "Tell me of the sea, and of the ships on it, and of the men in them. " * 3,
        }
    ]
    first = client.chat.completions.create(model="demo", messages=said, max_tokens=4, seed=1)
    again = client.chat.completions.create(model="demo", messages=said, max_tokens=4, seed=1)
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens - 16 <= cached < first.usage.prompt_tokens and cached % 16 == 0


def check_places(choice: Any) -> None:
    """Each token is where its `text_offset` says, or nowhere in the text."""
    entries, end = list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)), 0
    for token, place in entries:
        assert place == end
        end += len(token) if choice.text.startswith(token, place) else 0
    assert end == len(choice.text)


def test_log_probabilities(client: Any, llm: LLM) -> None:
    (wanted,) = llm.generate("Call me", SamplingParams(max_new_tokens=3, temperature=0, logprobs=2, prompt_logprobs=1))
    entries = wanted.completions[0].logprobs
    assert entries is not None and wanted.prompt_logprobs is not None
    (choice,) = client.completions.create(
        model="demo", prompt="Call me", max_tokens=3, temperature=0, logprobs=2
    ).choices
    assert choice.logprobs.token_logprobs == pytest.approx([one.logprob for one in entries], abs=1e-4)
    assert "".join(choice.logprobs.tokens) == choice.text and choice.logprobs.text_offset[0] == 0
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)
    # the form of evaluation harnesses: the prompt is scored, nothing is generated
    (scored,) = client.completions.create(
        model="demo", prompt=[wanted.prompt_token_ids], max_tokens=0, echo=True, logprobs=1, temperature=0
    ).choices
    told = [one.logprob for one in wanted.prompt_logprobs if one is not None]
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.token_logprobs[1:] == pytest.approx(told, abs=1e-4) and scored.text.endswith("Call me")
    check_places(scored)
    ids = wanted.prompt_token_ids
    for prompt in ("Call me", ids):  # streamed: the first chunk has the prompt's
        asked: Any = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": 3,
            "temperature": 0,
            "logprobs": 1,
            "stream": True,
        }
        extra = {"return_token_ids": True, "prompt_logprobs": 0}
        (streamed,) = (chunk.choices[0] for chunk in client.completions.create(**asked, echo=True, extra_body=extra))
        assert streamed.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(told, abs=1e-4)
        assert streamed.prompt_token_ids == ids and len(streamed.prompt_logprobs) == len(ids)
        assert len(streamed.token_ids) == 3 == len(streamed.logprobs.tokens) - len(ids)
        check_places(streamed)
    first, *others = client.completions.create(**asked, extra_body={"return_token_ids": True})
    assert first.choices[0].prompt_token_ids == ids and not any(
        hasattr(one.choices[0], "prompt_token_ids") for one in others
    )
    first, *others = client.chat.completions.create(
        model="demo", messages=CONVERSATION, max_tokens=3, stream=True, extra_body=extra
    )
    assert len(first.prompt_token_ids) == len(first.prompt_logprobs) > 10
    assert others[-1].choices[0].finish_reason == "length" and not hasattr(others[0], "prompt_logprobs")
    chat = client.chat.completions.create(
        model="demo", messages=CONVERSATION, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content
    assert "".join(one.token for one in content) == chat.choices[0].message.content
    assert all(bytes(one.bytes).decode() == one.token and len(one.top_logprobs) == 2 for one in content)


def test_structured_output_and_tool_calls(client: Any) -> None:
    schema = {"type": "object", "properties": {"depth": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["depth"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "dive", "schema": schema}}
    chat = client.chat.completions.create(
        model="demo", messages=CONVERSATION, max_tokens=60, seed=1, response_format=form
    )
    assert 9 >= json.loads(chat.choices[0].message.content)["depth"]
    choices = {"structured_outputs": {"choice": ["Ahab", "Ishmael"]}}
    picked = client.completions.create(model="demo", prompt="Who? ", max_tokens=20, extra_body=choices)
    assert picked.choices[0].text in ("Ahab", "Ishmael")
    tools = [{"type": "function", "function": {"name": "dive", "parameters": schema}}]
    ask: dict[str, Any] = {"model": "demo", "messages": CONVERSATION, "max_tokens": 80, "seed": 2, "tools": tools}
    called = client.chat.completions.create(**ask, tool_choice="required", parallel_tool_calls=False).choices[0]
    (call,) = called.message.tool_calls[:1]
    assert (called.finish_reason, call.function.name) == ("tool_calls", "dive") and json.loads(call.function.arguments)[
        "depth"
    ] <= 9
    named = {"type": "function", "function": {"name": "dive"}}
    arguments = ""
    for chunk in client.chat.completions.create(**ask, tool_choice=named, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            arguments += part.function.arguments
    assert json.loads(arguments)["depth"] <= 9


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("guided_json", ': write "structured_outputs": {"json": ...}, or "response_format"'),
        ("guided_regex", ': write "structured_outputs": {"regex": ...}'),
        ("guided_grammar", ': write "structured_outputs": {"grammar": ...}'),
        ("guided_choice", ': write "structured_outputs": {"choice": ...}'),
        ("do_sample", ': write "temperature": 0 for greedy output, or a "temperature" above 0'),
        ("max_token", "; did you mean 'max_tokens'?"),
        ("quux", ""),
    ],
)
def test_unknown_fields_are_answered(field: str, said: str) -> None:
    body = CompletionRequest.model_validate({"prompt": "a", field: 1})
    with pytest.raises(ApiError) as caught:
        body.check_fields(ignores_unknown=False)
    assert str(caught.value) == f"unknown field {field!r}{said}"
    body.check_fields(ignores_unknown=True)


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
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
    ],
)
def test_what_cannot_be_served_is_refused(
    client: Any, fields: dict[str, Any], status: int, code: str, param: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**({"model": "demo", "prompt": "Call me", "max_tokens": 4} | fields))
    body = caught.value.body
    assert (caught.value.status_code, body["code"], body["param"]) == (status, code, param)
    assert body["message"] and caught.value.response.headers["x-request-id"]


def test_a_request_that_is_left_gives_its_blocks_back(server: ServerProcess, client: Any) -> None:
    stream = client.completions.create(
        model="demo", prompt="It was a dark and", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert stats(server)["vllm:num_requests_running"] == 1
    stream.close()
    eventually(lambda: stats(server)["pagetide_kv_blocks:live"] == 0)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(
            model="demo", prompt="It was", max_tokens=900, extra_body={"ignore_eos": True}
        )
    eventually(lambda: stats(server)["pagetide_kv_blocks:live"] == 0)
    assert stats(server)["vllm:num_requests_running"] == 0


def test_models_tokens_and_health(server: ServerProcess, client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["demo"] and client.models.retrieve(
        "demo"
    ).max_model_len == 1024
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("moby")
    tokens = httpx2.post(f"{server.url}/tokenize", json={"prompt": "the sea", "return_token_strs": True}).json()
    assert (tokens["count"], tokens["token_strs"]) == (3, ["<|bos|>", "the", " sea"])
    assert httpx2.post(f"{server.url}/detokenize", json={"tokens": tokens["tokens"][1:]}).json() == {
        "prompt": "the sea"
    }
    assert httpx2.get(f"{server.url}/health").status_code == 200
    assert httpx2.get(f"{server.url}/ready").json()["models"] == {"demo": "ready"}
    assert httpx2.get(f"{server.url}/version").json()["version"]
    samples = stats(server)
    assert samples["vllm:generation_tokens_total"] > 0 and samples["vllm:time_to_first_token_seconds_count"] > 0


def test_the_door_is_guarded(server: ServerProcess) -> None:
    models = f"{server.url}/v1/models"
    assert httpx2.get(models, headers={"host": "evil.example"}).status_code == 403
    assert httpx2.get(models, headers={"origin": "http://evil.example"}).status_code == 403
    assert httpx2.get(models, headers={"origin": server.url}).status_code == 200
    for path in ("/sleep", "/admin/models/load"):
        assert httpx2.post(f"{server.url}{path}", json={}).status_code == 401
        assert (
            httpx2.post(f"{server.url}{path}", json={}, headers={"Authorization": "Bearer sk-guessed-1"}).status_code
            == 401
        )
    assert httpx2.get(f"{server.url}/nowhere").json()["error"]["message"] == "there is no /nowhere"
    assert httpx2.get(f"{server.url}/v1/completions").status_code == 405
    broken = httpx2.post(
        f"{server.url}/v1/completions", content=b'{"prompt": ', headers={"content-type": "application/json"}
    )
    assert broken.status_code == 400 and "no JSON" in broken.json()["error"]["message"]


def test_sleep_frees_the_memory_and_waking_up_serves_again(server: ServerProcess, client: Any) -> None:
    ask: dict[str, Any] = {"model": "demo", "prompt": "Call me", "max_tokens": 8, "seed": 7}
    before = client.completions.create(**ask).choices[0].text
    assert httpx2.post(f"{server.url}/sleep", headers=ADMIN, timeout=60).status_code == 200
    assert httpx2.get(f"{server.url}/is_sleeping").json() == {"is_sleeping": True}
    with pytest.raises(openai.APIStatusError, match="asleep") as caught:
        client.completions.create(**ask)
    assert caught.value.status_code == 503
    assert httpx2.post(f"{server.url}/wake_up", headers=ADMIN, timeout=120).status_code == 200
    assert client.completions.create(**ask).choices[0].text == before
