"""A real server, `pagetide serve demo` over a socket: its answers are those of `LLM`, and it sleeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest
from servers import ServerProcess

from pagetide import LLM, SamplingParams

pytestmark = pytest.mark.xdist_group("real server")
ADMIN = {"Authorization": "Bearer sk-operator-1"}
ENGINE = ["--device", "cpu", "--dtype", "float32", "--kv-memory", "16MiB", "--no-share", "--max-seqs", "16"]
FAR_S = 120.0
PROMPTS = [f"{number}. It was a dark and stormy night at sea, and the whale" for number in range(8)]
CONVERSATION = [{"role": "user", "content": "Where is the whale?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="cpu", dtype="float32", kv_memory="16MiB", share=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of the server, which ends without an error."""
    log = tmp_path_factory.mktemp("server") / "log"
    with ServerProcess(["demo", *ENGINE], log, PAGETIDE_ADMIN_KEY="sk-operator-1", OMP_NUM_THREADS="1") as server:
        with httpx.Client(base_url=server.url, timeout=FAR_S) as client:
            yield client
        assert server.end(15) == 0 and "Traceback" not in server.said


def body_of(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": "demo", "prompt": PROMPTS[number], "seed": number, "temperature": 1.0, "max_tokens": 24, "ignore_eos": True,
        "return_token_ids": True,
    } | fields  # fmt: skip


def whole(client: Any, number: int) -> list[int]:
    return list(client.post("/v1/completions", json=body_of(number)).json()["choices"][0]["token_ids"])


def events(client: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream."""
    with client.stream("POST", path, json=body | {"stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def streamed(client: Any, number: int) -> list[int]:
    found = events(client, "/v1/completions", body_of(number))
    return [token for event in found for token in event["choices"][0]["token_ids"]]


def test_the_tokens_of_llm_whole_and_streamed_at_the_same_time(client: Any, llm: LLM) -> None:
    params = [SamplingParams(max_new_tokens=24, temperature=1.0, seed=n, ignore_eos=True) for n in range(8)]
    wanted = [output.token_ids for output in llm.generate(PROMPTS, params, progress=False)]
    with ThreadPoolExecutor(16) as pool:
        wholes = [pool.submit(whole, client, number) for number in range(8)]
        streams = [pool.submit(streamed, client, number) for number in range(8)]
        assert [one.result() for one in wholes] == wanted == [one.result() for one in streams]


def test_a_long_answer_comes_in_parts_and_one_beyond_the_plan_is_refused(client: Any) -> None:
    asked = {"prompt": "A storm", "seed": 1, "max_tokens": 24, "ignore_eos": True, "n": 2, "logprobs": 1024}
    answer = client.post("/v1/completions", json=asked)
    assert answer.headers["transfer-encoding"] == "chunked" and len(answer.content) > 1 << 20
    found = [event["choices"][0] for event in events(client, "/v1/completions", asked)]
    for choice in answer.json()["choices"]:
        own = [one["logprobs"] for one in found if one["index"] == choice["index"]]
        for name, values in choice["logprobs"].items():
            assert [value for one in own for value in one[name]] == values
    refused = client.post("/v1/completions", json=asked | {"n": 128, "max_tokens": 1000, "best_of": 128})
    assert refused.status_code == 400 and "128,000 tokens in all and 1,024 log-probabilities" in refused.text


def test_chat_has_the_text_of_llm_and_streams_the_same(client: Any, llm: LLM) -> None:
    ids = llm.render(CONVERSATION)
    (wanted,) = llm.generate([ids], SamplingParams(max_new_tokens=30, temperature=1.0, seed=5, stop=["\n\n"]))
    asked = {"messages": CONVERSATION, "max_tokens": 30, "seed": 5, "temperature": 1.0, "stop": "\n\n"}
    answer = client.post("/v1/chat/completions", json=asked).json()
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (wanted.text, wanted.finish_reason)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    found = [event["choices"][0] for event in events(client, "/v1/chat/completions", asked)]
    assert "".join(choice["delta"].get("content") or "" for choice in found) == wanted.text
    assert found[-1]["finish_reason"] == wanted.finish_reason


def test_models_tokens_health_and_paths_that_there_are_not(client: Any) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("demo", 1024)
    tokens = client.post("/tokenize", json={"prompt": "the sea", "return_token_strs": True}).json()
    assert (tokens["count"], tokens["token_strs"]) == (3, ["<|bos|>", "the", " sea"])
    assert client.post("/detokenize", json={"tokens": tokens["tokens"][1:]}).json() == {"prompt": "the sea"}
    assert client.get("/health").status_code == 200
    assert client.get("/ready").json()["models"] == {"demo": "ready"}
    assert client.get("/version").json()["version"]
    assert client.get("/nowhere").json()["error"]["message"] == "there is no /nowhere"
    assert client.get("/v1/completions").status_code == 405


def test_sleep_frees_the_memory_and_a_request_wakes_it_up(client: Any) -> None:
    before = whole(client, 3)
    assert client.post("/sleep", headers=ADMIN).status_code == 200
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert whole(client, 3) == before
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
