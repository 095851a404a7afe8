"""Streams of a durable engine that are cut after any event and continued on another server: nothing is lost or sent twice."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
httpx2 = pytest.importorskip("httpx2")
from durable_rig import (  # noqa: E402
    FAR_S,
    TEXTS,
    Deliver,
    DurableEngine,
    FrontEnd,
    KeptRequest,
    KeptRequests,
    at_once,
    one_by_one,
    only,
)

from pagetide.server.chat import ChatCompletion  # noqa: E402
from pagetide.server.completions import TextCompletion  # noqa: E402
from pagetide.server.config import ServeConfig  # noqa: E402
from pagetide.server.engine_client import Batch, EngineClient, Generation, RequestFailed, SlowReader  # noqa: E402
from pagetide.server.keys import ApiKey, ApiKeys, digest_of  # noqa: E402
from pagetide.server.models import ModelOptions, ModelRegistry  # noqa: E402
from pagetide.server.requests import ChatRequest, CompletionRequest  # noqa: E402
from pagetide.server.resume import DurableRequest  # noqa: E402
from pagetide.server.run import serve_on  # noqa: E402

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
ASKED = {"messages": [{"role": "user", "content": "?"}]}
TOOLS = {"tools": [{"type": "function", "function": {"name": "dive", "parameters": {"type": "object"}}}]}
CALLS = (
    "Well", " <to", 'ol_call>{"name": "dive", "argu', 'ments": {"a": ',
    '1}}</tool_call><tool_call>{"name": "dive", "arguments": {}}', "</tool", "_call>", "", "",
)  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...] | None]] = {
    "text": (TEXT, {"prompt": "Call me"}, None),
    "usage": (TEXT, {"prompt": "Call me", **USAGE}, None),
    "n": (TEXT, {"prompt": "Call me", "n": 2, "logprobs": 1, "echo": True, "return_token_ids": True, **USAGE}, None),
    "logprobs": (TEXT, {"prompt": "Call me", "logprobs": 1, "return_token_ids": True}, None),
    "best_of": (TEXT, {"prompt": "Call me", "n": 2, "best_of": 3, **USAGE}, None),
    "scored": (TEXT, {"prompt": "Call me", "logprobs": 1, "echo": True, "prompt_logprobs": 1}, None),
    "chat": (CHAT, {**ASKED, **USAGE}, None),
    "chat_n": (CHAT, {**ASKED, "n": 3, "logprobs": True, "return_token_ids": True}, None),
    "chat_scored": (CHAT, {**ASKED, "n": 2, "prompt_logprobs": 1, **USAGE}, None),
    "calls": (CHAT, {**ASKED, **TOOLS, "logprobs": True, "return_token_ids": True, **USAGE}, CALLS),
    "calls_n": (CHAT, {**ASKED, **TOOLS, "n": 2}, CALLS),
    "named": (CHAT, {**ASKED, **TOOLS, "tool_choice": {"type": "function", "function": {"name": "dive"}}}, ('{"a"', ":1}")),
}  # fmt: skip
KEYS = ApiKeys([ApiKey("alice", digest_of("sk-alice-1")), ApiKey("bob", digest_of("sk-bob-12"))])


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 4 * FAR_S))


def queue_of(texts: tuple[str, ...] | None) -> KeptRequests:
    return KeptRequests() if texts is None else KeptRequests(texts)


def id_of(event: bytes) -> str:
    """The id of an event."""
    line, _, data = event.partition(b"\n")
    assert line.startswith(b"id: ") and data.startswith(b"data: ")
    return line[4:].decode()


def said(events: list[bytes]) -> dict[Any, Any]:
    """What events say, however pieces are joined: by choice the texts, tokens, log-probabilities and calls; and the rest."""
    found: dict[Any, Any] = defaultdict(list)
    for event in events:
        data = event.split(b"data: ", 1)[1].strip()
        if data == b"[DONE]":
            found["ends"].append(True)
            continue
        body = json.loads(data)
        if not body["choices"]:
            found["usage"].append(body["usage"])
        found["head"] = [(body["id"], body["created"], body["model"], body["object"])]
        for choice in body["choices"]:
            index, logprobs = choice["index"], choice["logprobs"] or {}
            delta = choice.get("delta", choice)
            for name in ("text", "content"):
                found[index, "text"].append(delta.get(name) or "")
            found[index, "calls"] += delta.get("tool_calls") or []
            found[index, "roles"] += [delta["role"]] if "role" in delta else []
            found[index, "ids"] += choice.get("token_ids") or []
            found[index, "logprobs"] += logprobs.get("token_logprobs") or logprobs.get("content") or []
            found[index, "places"] += logprobs.get("text_offset") or []
            found[index, "reasons"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return {name: "".join(value) if name[1] == "text" else value for name, value in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_stream_that_is_cut_after_any_event_goes_on_with_the_next_one(case: str) -> None:
    path, body, texts = CASES[case]

    async def main() -> None:
        queue = queue_of(texts)
        async with FrontEnd(queue) as first, FrontEnd(queue) as second:
            whole = await first.ask(path, body | {"stream": True})
            assert whole.status == 200 and whole.events[-1].endswith(b"data: [DONE]\n\n") and len(whole.events) > 1
            ids = [id_of(event) for event in whole.events]
            assert len(set(ids[:-1])) == len(ids) - 1, "the usage and the end alone may have the same id"
            for at, last in enumerate(ids, 1):
                rest = await second.ask(path, body | {"stream": True}, Last_Event_ID=last)
                assert rest.events == (whole.events[at:] or whole.events[-1:]), last
            assert queue.num_begun == 1 and second.engine.cancelled == []
            unmarked = [event.partition(b"\n")[2] for event in whole.events]
            assert json.loads(unmarked[0][6:])["id"] == ids[0].partition("/")[0]

    run(main())


def test_a_stream_with_several_prompts_goes_on_with_the_rest_of_each() -> None:
    body = {"prompt": ["one", "two"], "n": 2, "logprobs": 1, "stream": True, "stream_options": {"include_usage": True}}

    async def main() -> None:
        queue = queue_of(None)
        async with FrontEnd(queue) as first, FrontEnd(queue) as second:
            whole = await first.ask(TEXT, body)
            for at, event in enumerate(whole.events[:-1], 1):
                rest = await second.ask(TEXT, body, Last_Event_ID=id_of(event))
                assert said([*whole.events[:at], *rest.events]) == said(whole.events)
            base = id_of(whole.events[0]).partition("/")[0]
            assert set(queue.requests) == {f"{base}.0", f"{base}.1"}

    run(main())


def test_the_readers_of_openai_see_no_difference() -> None:
    async def main() -> None:
        async with FrontEnd(queue_of(None)) as server:
            client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
            stream = await client.completions.create(model="kept", prompt="Call me", stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "The whale swims — deep."
            await client.close()

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_an_idempotency_key_names_one_request_on_all_servers(stream: bool) -> None:
    body = {**ASKED, **TOOLS, "stream": stream}

    async def main() -> None:
        queue = queue_of(CALLS)
        async with FrontEnd(queue, keys=KEYS) as first, FrontEnd(queue, keys=KEYS) as second:
            alice = {"Authorization": "Bearer sk-alice-1", "Idempotency_Key": "k-1"}
            bob = alice | {"Authorization": "Bearer sk-bob-12"}
            one, two = await first.ask(CHAT, body, **alice), await second.ask(CHAT, body, **alice)
            assert (one.status, one.body, queue.num_begun) == (200, two.body, 1)
            others = [
                await first.ask(CHAT, body, **bob),
                await first.ask(CHAT, body, **alice | {"Idempotency_Key": "k-2"}),
            ]
            assert queue.num_begun == 3 and len({one.body, *(other.body for other in others)}) == 3
            refused = await second.ask(CHAT, body | {"seed": 1}, **alice)
            assert (refused.status, json.loads(refused.body)["error"]["code"]) == (422, "idempotency_conflict")
            assert queue.num_begun == 3 and not second.engine.cancelled
            if not stream:
                assert json.loads(one.body)["created"] == 1_000_001_000
            else:
                place = id_of(one.events[1])
                assert (await second.ask(CHAT, body, **alice, Last_Event_ID=place)).events == one.events[2:]
                other = await second.ask(CHAT, body, **bob, Last_Event_ID=place)
                assert other.status == 400 and b"Idempotency-Key" in other.body
                del bob["Idempotency_Key"]
                other = await second.ask(CHAT, body, **bob, Last_Event_ID=place)
                assert (other.status, json.loads(other.body)["error"]["code"]) == (404, "request_not_found")

    run(main())


BASE = "cmpl-" + "0" * 24


@pytest.mark.parametrize(
    ("headers", "fields", "status"),
    [
        ({"Last_Event_ID": f"{BASE}/0"}, {}, 404),
        ({"Last_Event_ID": f"{BASE}/end"}, {}, 404),
        ({"Last_Event_ID": f"{BASE}/0,0"}, {}, 400),
        ({"Last_Event_ID": f"{BASE}/1.1"}, {}, 400),
        ({"Last_Event_ID": f"{BASE}/1"}, {"stream": False}, 400),
        ({"Last_Event_ID": f"chat{BASE}/1"}, {}, 400),
        ({"Last_Event_ID": f"{BASE}/"}, {}, 400),
        ({"Last_Event_ID": f"{BASE}/-1"}, {}, 400),
        ({"Last_Event_ID": f"{BASE}/{'1' * 10}"}, {}, 400),
        ({"Last_Event_ID": BASE}, {}, 400),
        ({"Last_Event_ID": ""}, {}, 400),
        ({"Idempotency_Key": ""}, {}, 400),
        ({"Idempotency_Key": "a b"}, {}, 400),
        ({"Idempotency_Key": "k" * 256}, {}, 400),
        ({"Idempotency_Key": "k" * 255}, {}, 200),
    ],
)
def test_headers_that_name_nothing_are_refused(headers: dict[str, str], fields: dict[str, Any], status: int) -> None:
    async def main() -> None:
        queue = queue_of(None)
        async with FrontEnd(queue) as server:
            answer = await server.ask(TEXT, {"prompt": "Call me", "stream": True, **fields}, **headers)
            assert answer.status == status
            if status == 404:
                assert json.loads(answer.body)["error"]["code"] == "request_not_found"
            assert queue.num_begun == int(status == 200)

    run(main())


def test_another_body_does_not_continue_a_stream() -> None:
    async def main() -> None:
        async with FrontEnd(queue_of(None)) as server:
            whole = await server.ask(TEXT, {"prompt": "Call me", "stream": True})
            other = await server.ask(TEXT, {"prompt": "Call", "stream": True}, Last_Event_ID=id_of(whole.events[0]))
            assert (other.status, json.loads(other.body)["error"]["code"]) == (422, "idempotency_conflict")

    run(main())


def test_a_server_without_durable_requests_takes_no_notice_of_the_headers() -> None:
    async def main() -> None:
        queue = queue_of(None)
        async with FrontEnd(queue) as server:
            server.engine.is_durable = False
            for headers in ({}, {"Last_Event_ID": "x", "Idempotency_Key": ""}):
                answer = await server.ask(TEXT, {"prompt": "Call me", "stream": True}, **headers)
                assert answer.status == 200 and all(event.startswith(b"data: ") for event in answer.events)
            for kept in queue.requests.values():
                assert not kept.request.keys() & {"tenant", "fingerprint", "attach"}
            assert queue.num_begun == 2

    run(main())


def test_a_client_with_an_idempotency_key_leaves_its_request_running() -> None:
    async def main() -> None:
        queue = queue_of(None)
        async with FrontEnd(queue, only(4)) as server:
            body = {"prompt": "Call me", "stream": True}
            events = await server.leave_after(TEXT, body, 1)
            await eventually(lambda: bool(server.engine.cancelled))
            assert server.engine.left == []
            assert id_of(events[0]).partition("/")[0] + ".0" == server.engine.cancelled[0]
            (key,) = await server.leave_after(TEXT, body, 1, Idempotency_Key="k")
            await eventually(lambda: bool(server.engine.left))
            assert len(server.engine.cancelled) == 1 and not server.server.durable_batches
            server.engine.deliver = one_by_one
            rest = await server.ask(TEXT, body, Idempotency_Key="k", Last_Event_ID=id_of(key))
            assert said([key, *rest.events])[0, "text"] == "The whale swims — deep."
            counted = (await server.client.get("/metrics")).text
            assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="kept"} 1.0' in counted

    run(main())


def test_a_request_is_charged_to_its_key_once() -> None:
    keys = ApiKeys([ApiKey("alice", digest_of("sk-alice-1"), tokens_per_minute=40)])

    async def main() -> None:
        async with FrontEnd(queue_of(None), keys=keys) as server:
            headers = {"Authorization": "Bearer sk-alice-1"}
            body = {"prompt": "Call me", "stream": True}
            for key, status in (("k", 200), ("l", 429), ("k", 200), ("k", 200)):  # 8 + 16 tokens are reserved, 21 used
                answer = await server.ask(TEXT, body, **headers, Idempotency_Key=key)
                assert answer.status == status
            assert [one.rpartition("-")[0] for one in server.engine.cancelled] == ["cmpl"] and not server.engine.left

    run(main())


def test_a_refused_reader_of_a_request_that_was_there_before_does_not_abort_it() -> None:
    keys = ApiKeys([ApiKey("alice", digest_of("sk-alice-1"), max_blocks=1)])

    async def main() -> None:
        async with FrontEnd(queue_of(None), keys=keys) as server:
            headers = {"Authorization": "Bearer sk-alice-1"}
            body = {"prompt": "Call me", "max_tokens": 8, "stream": True}
            refused = await server.ask(TEXT, body, **headers, Idempotency_Key="k")
            assert refused.status == 400 and len(server.engine.cancelled) == 1 and not server.engine.left
            refused = await server.ask(TEXT, body, **headers, Idempotency_Key="k")
            assert refused.status == 400 and len(server.engine.cancelled) == len(server.engine.left) == 1

    run(main())


def test_output_that_is_kept_elsewhere_may_arrive_at_once() -> None:
    async def main() -> None:
        engine = DurableEngine(queue_of(None), at_once)
        for is_durable in (True, False):
            engine.is_durable = is_durable
            batch = Batch(engine, most_unread=3)
            batch.submit(params={}, streams=True, **({"durable_id": "a", "fingerprint": ""} if is_durable else {}))
            if is_durable:
                assert len((await batch.read())[0][1]) == len(TEXTS)
            else:
                with pytest.raises(SlowReader):
                    await batch.read()

    run(main())


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(FAR_S):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_server_that_shuts_down_closes_its_streams_and_leaves_their_requests() -> None:
    queue, found = queue_of(None), {}
    engine: DurableEngine
    config = ServeConfig(models=(ModelOptions("kept", "kept"),), drain_timeout=0.05)

    async def start(reference: str, options: Any, name: str) -> DurableEngine:
        return engine

    async def serve(listening: socket.socket) -> None:
        nonlocal engine
        engine, stop = DurableEngine(queue, only(4)), asyncio.Event()
        serving = asyncio.create_task(serve_on(config, ApiKeys(), listening, ModelRegistry(start), stop))
        while len(queue.requests) < 3:
            await asyncio.sleep(0.005)
        stop.set()
        found["status"] = await serving

    def ask(name: str, body: dict[str, Any], **headers: str) -> None:
        read = b""
        try:
            with httpx2.stream("POST", f"{url}{TEXT}", json=body, headers=headers, timeout=FAR_S) as answer:
                for part in answer.iter_raw():
                    read += part
            found[name] = answer.status_code
        except httpx2.RemoteProtocolError:
            found[name] = read

    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        threads = [threading.Thread(target=lambda: asyncio.run(serve(listening)))]
        threads += [
            threading.Thread(target=ask, args=("stream", {"prompt": "a", "stream": True})),
            threading.Thread(target=ask, args=("whole", {"prompt": "b"})),
            threading.Thread(target=ask, args=("key", {"prompt": "c"}), kwargs={"Idempotency-Key": "k"}),
        ]
        threads[0].start()
        while not engine_is_ready(url):
            pass
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join(FAR_S)
    assert (found["status"], found["whole"], found["key"]) == (0, 503, 503)
    read = found["stream"]
    assert read.count(b"\n\n") >= 1 and b"error" not in read and b"[DONE]" not in read
    prompts = {kept.request["durable_id"]: kept.request["prompt"] for kept in queue.requests.values()}
    assert [prompts[one] for one in engine.cancelled] == ["b"], "its client has no name for it"
    assert sorted(prompts[one] for one in engine.left) == ["a", "c"]


def engine_is_ready(url: str) -> bool:
    try:
        return bool(httpx2.get(f"{url}/ready", timeout=FAR_S).status_code == 200)
    except httpx2.TransportError:
        return False


def test_models_of_other_processes_neither_sleep_nor_are_unloaded_here() -> None:
    async def main() -> None:
        keys = ApiKeys([ApiKey("ops", digest_of("sk-ops-123"), admin=True)])
        async with FrontEnd(queue_of(None), keys=keys) as server:
            headers = {"Authorization": "Bearer sk-ops-123"}
            slept = await server.client.post("/sleep", headers=headers)
            assert slept.status_code == 400 and "workers do not take sleep" in slept.text
            gone = await server.client.post("/admin/models/unload", headers=headers, json={"name": "kept"})
            assert gone.status_code == 400
            await server.client.post("/wake_up", headers=headers)
            assert server.models.get("kept").state == "ready"
            assert (await server.ask(TEXT, {"prompt": "Call me"})).status == 200

    run(main())


def test_the_metrics_have_every_worker_and_what_the_queue_says() -> None:
    async def main() -> None:
        async with FrontEnd(queue_of(None)) as server:
            page = (await server.client.get("/metrics")).text
            assert "pagetide_model_ready" in page and "vllm:num_requests_running" not in page
            server.engine.answers = {
                "stats": {"workers": {"w1": STATS, "w2": STATS | {"running": 5}}},
                "fleet_metrics": {
                    "pagetide_fleet_queued": {"help": "Waiting", "type": "gauge", "samples": [[{"tenant": "a"}, 3]]},
                    "pagetide_fleet_ended_total": {"help": "Ended", "type": "counter", "samples": [[{}, 4]]},
                },
            }
            page = (await server.client.get("/metrics")).text
            for line in (
                'vllm:num_requests_running{engine="w1",model_name="kept"} 2.0',
                'vllm:num_requests_running{engine="w2",model_name="kept"} 5.0',
                'vllm:iteration_tokens_total_count{engine="w2",model_name="kept"} 3.0',
                'pagetide_fleet_queued{tenant="a"} 3.0',
                "pagetide_fleet_ended_total 4.0",
            ):
                assert line in page.splitlines()
            server.engine.answers["fleet_metrics"] = RequestFailed("unavailable", "no queue")
            assert "pagetide_fleet" not in (await server.client.get("/metrics")).text

    run(main())


STATS: dict[str, Any] = {
    "running": 2, "waiting": 1, "waiting_for_others": 0, "preemptions": 0, "generated_tokens": 9, "prompt_tokens": 8,
    "cached_prompt_tokens": 0, "computed_tokens": 17, "recomputed_tokens": 0, "forks": 0, "steps": 3, "block_size": 16,
    "blocks": {"usable": 9, "limit": 9, "mapped": 9, "free": 7, "live": 2, "cached": 0, "in_flight": 0, "draining": 0},
    "extents": {"mapped": 1, "total": 1}, "host_tier": None, "prefix_cache": None, "dtype": "none", "device": "cpu",
    "attention": "none", "weights_bytes": 0, "kv_bytes": 0, "memory": None,
    "step_tokens": {"up_to": [1, 8], "steps": [1, 1, 1]},
}  # fmt: skip


# ---- without a server -------------------------------------------------------------------------------------------------


def scattered(seed: int) -> Deliver:
    """Deliver records in random portions."""

    def deliver(kept: KeptRequest, generation: Generation) -> asyncio.Task[None]:
        draw = random.Random(seed)

        async def give() -> None:
            for record in kept.records:
                while generation.pieces and draw.random() < 0.4:
                    await asyncio.sleep(0)
                generation.take(record)

        return asyncio.create_task(give())

    return deliver


async def events_of(queue: KeptRequests, deliver: Deliver, case: str, place: str | None) -> list[bytes]:
    path, body, _ = CASES[case]
    engine: EngineClient = DurableEngine(queue, deliver)
    kind = "cmpl" if path == TEXT else "chatcmpl"
    headers = [(b"idempotency-key", b"k")] + ([] if place is None else [(b"last-event-id", place.encode())])
    durable = DurableRequest.of(kind, headers, "", case.encode(), True)
    work: TextCompletion | ChatCompletion
    if path == TEXT:
        work = TextCompletion(engine, CompletionRequest(**body, stream=True), "m", None, None, durable)
    else:
        work = ChatCompletion(engine, ChatRequest(**body, stream=True), "m", None, "hermes", None, None, durable)
    await work.begin()
    return [event async for event in work.events()]


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(sorted(CASES)), st.lists(st.text('{}<>"tool_cal: ab \n', max_size=5), min_size=4, max_size=12),
    st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0, 1)), max_size=5),
)  # fmt: skip
def test_any_cuts_of_any_portions_add_up_to_the_whole(
    case: str, texts: list[str], cuts: list[tuple[int, float]]
) -> None:
    async def main() -> None:
        queue = queue_of((*(CASES[case][2] or ()), *texts))
        whole = said(await events_of(queue, at_once, case, None))
        one = said(await events_of(queue, one_by_one, case, None))
        assert one.keys() == whole.keys()
        read: list[bytes] = []
        for seed, share in cuts:
            place = id_of(read[-1]) if read else None
            more = await events_of(queue, scattered(seed), case, place)
            read += more[:-1][: 1 + int(share * len(more))]
        read += await events_of(queue, at_once, case, id_of(read[-1]) if read else None)
        assert said(read) == one
        assert queue.num_begun == 1

    run(main())
