"""Streams of a durable engine that are cut after any event and continued on another server: nothing is lost or sent twice."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from durable_rig import TEXTS, DurableEngine, FrontEnd, KeptRequest, KeptRequests, at_once, one_by_one, only
from hypothesis import given
from hypothesis import strategies as st
from page_rig import FAR_S, eventually, httpx2

from pagetide.server.chat import ChatCompletion
from pagetide.server.completions import TextCompletion
from pagetide.server.config import ModelOptions, ServeConfig
from pagetide.server.engine_client import Batch, Generation, SlowReader
from pagetide.server.keys import ApiKey, ApiKeys, digest_of
from pagetide.server.models import ModelRegistry, ServedModel
from pagetide.server.requests import ChatRequest, CompletionRequest
from pagetide.server.resume import DurableRequest
from pagetide.server.run import serve_on

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
}
KEYS = ApiKeys([ApiKey("alice", digest_of("sk-alice-1")), ApiKey("bob", digest_of("sk-bob-12"))])


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
async def test_a_stream_that_is_cut_after_any_event_goes_on_with_the_next_one(case: str) -> None:
    path, body, texts = CASES[case]
    queue = KeptRequests(texts or TEXTS)
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
        assert json.loads(unmarked[0][6:])["id"] == ids[0].partition("@")[0]


async def test_a_stream_with_several_prompts_goes_on_with_the_rest_of_each() -> None:
    body = {"prompt": ["one", "two"], "n": 2, "logprobs": 1, "stream": True, "stream_options": {"include_usage": True}}
    queue = KeptRequests()
    async with FrontEnd(queue) as first, FrontEnd(queue) as second:
        whole = await first.ask(TEXT, body)
        for at, event in enumerate(whole.events[:-1], 1):
            rest = await second.ask(TEXT, body, Last_Event_ID=id_of(event))
            assert said([*whole.events[:at], *rest.events]) == said(whole.events)
        base = id_of(whole.events[0]).partition("@")[0]
        assert set(queue.requests) == {f"{base}.0", f"{base}.1"}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_idempotency_key_names_one_request_on_all_servers(stream: bool) -> None:
    body = {**ASKED, **TOOLS, "stream": stream}
    queue = KeptRequests(CALLS)
    async with FrontEnd(queue, keys=KEYS) as first, FrontEnd(queue, keys=KEYS) as second:
        alice = {"Authorization": "Bearer sk-alice-1", "Idempotency_Key": "k-1"}
        bob = alice | {"Authorization": "Bearer sk-bob-12"}
        one, two = await first.ask(CHAT, body, **alice), await second.ask(CHAT, body, **alice)
        assert (one.status, one.body, queue.num_begun) == (200, two.body, 1)
        others = [await first.ask(CHAT, body, **one) for one in (bob, alice | {"Idempotency_Key": "k-2"})]
        assert queue.num_begun == 3 and len({one.body, *(other.body for other in others)}) == 3
        refused = await second.ask(CHAT, body | {"seed": 1}, **alice)
        assert (refused.status, json.loads(refused.body)["error"]["code"]) == (422, "idempotency_conflict")
        assert queue.num_begun == 3 and not second.engine.cancelled
        if not stream:
            assert json.loads(one.body)["created"] == 1_000_001_000
        else:
            place = id_of(one.events[1])
            assert (await second.ask(CHAT, body, **alice, Last_Event_ID=place)).events == one.events[2:]
            queue.requests.clear()  # they were forgotten
            again = await first.ask(CHAT, body, **alice)
            assert again.events != one.events
            mixed = await second.ask(CHAT, body, **alice, Last_Event_ID=place)
            assert mixed.status == 404 and b"another one began" in mixed.body and not second.engine.cancelled
            place = id_of(again.events[1])
            other = await second.ask(CHAT, body, **bob, Last_Event_ID=place)
            assert other.status == 400 and b"Idempotency-Key" in other.body
            del bob["Idempotency_Key"]
            other = await second.ask(CHAT, body, **bob, Last_Event_ID=place)
            assert (other.status, json.loads(other.body)["error"]["code"]) == (404, "request_not_found")


BASE = "cmpl-" + "0" * 24


NAMELESS: list[tuple[dict[str, str], dict[str, Any], int]] = [
    *(({"Last_Event_ID": f"{BASE}/{place}"}, {}, 404) for place in ("0", "end")),
    *(({"Last_Event_ID": f"{BASE}/{place}"}, {}, 400) for place in ("0,0", "1.1", "", "-1", "1" * 10)),
    ({"Last_Event_ID": f"{BASE}/1"}, {"stream": False}, 400),
    *(({"Last_Event_ID": one}, {}, 400) for one in (f"chat{BASE}/1", BASE, "")),
    *(({"Idempotency_Key": one}, {}, 400) for one in ("", "a b", "k" * 256)),
]


async def test_headers_that_name_nothing_are_refused() -> None:
    queue = KeptRequests()
    async with FrontEnd(queue) as server:
        for headers, fields, status in NAMELESS:
            answer = await server.ask(TEXT, {"prompt": "Call me", "stream": True, **fields}, **headers)
            assert (answer.status, queue.num_begun) == (status, 0), headers
            assert status != 404 or json.loads(answer.body)["error"]["code"] == "request_not_found"
        answer = await server.ask(TEXT, {"prompt": "Call me", "stream": True}, Idempotency_Key="k" * 255)
        assert (answer.status, queue.num_begun) == (200, 1)


async def test_another_body_does_not_continue_a_stream() -> None:
    async with FrontEnd(KeptRequests()) as server:
        whole = await server.ask(TEXT, {"prompt": "Call me", "stream": True})
        other = await server.ask(TEXT, {"prompt": "Call", "stream": True}, Last_Event_ID=id_of(whole.events[0]))
        assert (other.status, json.loads(other.body)["error"]["code"]) == (422, "idempotency_conflict")


async def test_a_server_without_durable_requests_takes_no_notice_of_the_headers() -> None:
    queue = KeptRequests()
    async with FrontEnd(queue) as server:
        server.engine.is_durable = False
        for headers in ({}, {"Last_Event_ID": "x", "Idempotency_Key": ""}):
            answer = await server.ask(TEXT, {"prompt": "Call me", "stream": True}, **headers)
            assert answer.status == 200 and all(event.startswith(b"data: ") for event in answer.events)
        for kept in queue.requests.values():
            assert not kept.request.keys() & {"tenant", "fingerprint", "attach"}
        assert queue.num_begun == 2


async def test_a_client_with_an_idempotency_key_leaves_its_request_running() -> None:
    queue = KeptRequests()
    async with FrontEnd(queue, only(4)) as server:
        body = {"prompt": "Call me", "stream": True}
        events = await server.leave_after(TEXT, body, 1)
        await eventually(lambda: bool(server.engine.cancelled))
        assert server.engine.left == []
        assert id_of(events[0]).partition("@")[0] + ".0" == server.engine.cancelled[0]
        (key,) = await server.leave_after(TEXT, body, 1, Idempotency_Key="k")
        await eventually(lambda: bool(server.engine.left))
        assert len(server.engine.cancelled) == 1 and not server.server.durable_batches
        server.engine.deliver = one_by_one
        rest = await server.ask(TEXT, body, Idempotency_Key="k", Last_Event_ID=id_of(key))
        assert said([key, *rest.events])[0, "text"] == "The whale swims — deep."
        counted = (await server.client.get("/metrics")).text
        assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="kept"} 1.0' in counted


async def test_a_request_is_cancelled_by_its_id_or_its_idempotency_key_and_for_its_own_key_alone() -> None:
    async with FrontEnd(KeptRequests(), keys=KEYS) as server:
        known = {(f"cmpl-{'5' * 24}", "alice"): 2, (f"chatcmpl-{'5' * 24}", "bob"): 0}
        server.engine.answers["cancel"] = lambda response_id, tenant: known.get((response_id, tenant))
        asked = DurableRequest.of("cmpl", [(b"idempotency-key", b"mine")], "alice", b"", False)
        known[asked.base_id, "alice"] = 3

        async def delete(path: str, key: str, **headers: str) -> tuple[int, Any]:
            named = {"authorization": f"Bearer {key}"} | {name.replace("_", "-"): one for name, one in headers.items()}
            answer = await server.client.delete(path, headers=named)
            return answer.status_code, answer.json()

        ended = {"id": f"cmpl-{'5' * 24}", "object": "text_completion.deleted", "deleted": True, "cancelled": 2}
        assert await delete(f"{TEXT}/cmpl-{'5' * 24}", "sk-alice-1") == (200, ended)
        ended = {"id": f"chatcmpl-{'5' * 24}", "object": "chat.completion.deleted", "deleted": False, "cancelled": 0}
        assert await delete(f"{CHAT}/chatcmpl-{'5' * 24}", "sk-bob-12") == (200, ended)
        assert (await delete(TEXT, "sk-alice-1", idempotency_key="mine"))[1]["cancelled"] == 3
        mine = {"idempotency_key": "mine"}
        foreign = [(f"{TEXT}/cmpl-{'5' * 24}", "sk-bob-12", {}), (TEXT, "sk-bob-12", mine), (CHAT, "sk-alice-1", mine)]
        for path, key, given in [*foreign, (f"{CHAT}/cmpl-{'5' * 24}", "sk-alice-1", {})]:
            status, told = await delete(path, key, **given)
            assert (status, told["error"]["code"]) == (404, "request_not_found")
        for given in ({}, {"idempotency_key": "a b"}):
            assert (await delete(TEXT, "sk-alice-1", **given))[0] == 400
        assert (await delete(TEXT, "wrong"))[0] == 401


async def test_a_request_is_charged_to_its_key_once() -> None:
    keys = ApiKeys([ApiKey("alice", digest_of("sk-alice-1"), tokens_per_minute=25)])
    async with FrontEnd(KeptRequests(), keys=keys) as server:
        wrong = {"n": "x" * 1200}  # 5 tokens, where 4 are left: 8 + 16 are reserved, 21 used
        told = (("k", {}, 200), ("l", {}, 429), ("k", {}, 200), ("k", {}, 200), ("k", wrong, 400), ("k", {}, 429))
        for key, more, status in told:
            headers = {"Authorization": "Bearer sk-alice-1", "Idempotency_Key": key}
            assert (await server.ask(TEXT, {"prompt": "Call me", "stream": True} | more, **headers)).status == status
        assert [one.rpartition("-")[0] for one in server.engine.cancelled] == ["cmpl"] and not server.engine.left


async def test_a_refused_reader_of_a_request_that_was_there_before_does_not_abort_it() -> None:
    keys = ApiKeys([ApiKey("alice", digest_of("sk-alice-1"), max_blocks=1)])
    headers = {"Authorization": "Bearer sk-alice-1", "Idempotency_Key": "k"}
    async with FrontEnd(KeptRequests(), keys=keys) as server:
        for num_left in (0, 1):
            refused = await server.ask(TEXT, {"prompt": "Call me", "max_tokens": 8, "stream": True}, **headers)
            assert (refused.status, len(server.engine.cancelled), len(server.engine.left)) == (400, 1, num_left)


async def test_a_request_that_is_refused_as_a_whole_leaves_none_of_its_prompts() -> None:
    async with FrontEnd(KeptRequests(), only(1)) as server:
        base = DurableRequest.of("cmpl", [(b"idempotency-key", b"k")], "", b"", False).base_id
        server.engine.queue.requests[f"{base}.1"] = KeptRequest({"fingerprint": "of another body"}, 0, [])
        refused = await server.ask(TEXT, {"prompt": ["a", "b", "c"]}, Idempotency_Key="k")
        assert refused.status == 422 and server.engine.left == []
        assert server.engine.cancelled == [f"{base}.0", f"{base}.2"]


async def test_output_that_is_kept_elsewhere_may_arrive_at_once() -> None:
    engine = DurableEngine(KeptRequests(), at_once)
    tokens, num_bytes = {"most_unread": 3}, {"most_unread_bytes": 3 * 128}
    for is_durable, most in ((True, tokens | num_bytes), (False, tokens), (False, num_bytes)):
        engine.is_durable = is_durable
        batch = Batch(engine, **most)
        batch.submit(params={}, streams=True, **({"durable_id": "a", "fingerprint": ""} if is_durable else {}))
        if is_durable:
            assert len((await batch.read())[0][1]) == len(TEXTS)
        else:
            with pytest.raises(SlowReader):
                await batch.read()


async def test_a_server_that_shuts_down_closes_its_streams_and_leaves_their_requests() -> None:
    queue, stop = KeptRequests(), asyncio.Event()
    engine = DurableEngine(queue, only(4))
    config = ServeConfig(models=(ModelOptions("kept", "kept"),), drain_timeout=0.05)

    async def start(reference: str, options: Any, name: str) -> DurableEngine:
        return engine

    async def ask(body: dict[str, Any], **headers: str) -> int | bytes:
        """The status, or what was read of a stream that ends without an end."""
        read = b""
        try:
            async with client.stream("POST", TEXT, json=body, headers=headers) as answer:
                async for part in answer.aiter_raw():
                    read += part
        except httpx2.RemoteProtocolError:
            return read
        return int(answer.status_code)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        serving = asyncio.create_task(serve_on(config, ApiKeys(), listening, ModelRegistry(start), stop))
        async with httpx2.AsyncClient(base_url=url, timeout=FAR_S) as client:
            while (await client.get("/ready")).status_code != 200:
                pass
            asking = asyncio.gather(
                ask({"prompt": "a", "stream": True}), ask({"prompt": "b"}), ask({"prompt": "c"}, **{"Idempotency-Key": "k"})
            )
            await eventually(lambda: len(queue.requests) == 3)
            stop.set()
            read, whole, named = await asking
            assert (await serving, whole, named) == (0, 503, 503)
    assert read.count(b"\n\n") >= 1 and b"error" not in read and b"[DONE]" not in read
    prompts = {kept.request["durable_id"]: kept.request["prompt"] for kept in queue.requests.values()}
    assert [prompts[one] for one in engine.cancelled] == ["b"], "its client has no name for it"
    assert sorted(prompts[one] for one in engine.left) == ["a", "c"]


async def test_models_of_other_processes_neither_sleep_nor_are_unloaded_here() -> None:
    keys = ApiKeys([ApiKey("ops", digest_of("sk-ops-123"), admin=True)])
    async with FrontEnd(KeptRequests(), keys=keys) as server:
        headers = {"Authorization": "Bearer sk-ops-123"}
        slept = await server.client.post("/sleep", headers=headers)
        assert slept.status_code == 400 and "workers do not take sleep" in slept.text
        gone = await server.client.post("/admin/models/unload", headers=headers, json={"name": "kept"})
        assert gone.status_code == 400
        await server.client.post("/wake_up", headers=headers)
        assert server.models.get("kept").state == "ready"
        assert (await server.ask(TEXT, {"prompt": "Call me"})).status == 200


def scattered(seed: int) -> Callable[[KeptRequest, Generation], asyncio.Task[None]]:
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


async def events_of(queue: KeptRequests, deliver: Any, case: str, place: str | None) -> list[bytes]:
    path, body, _ = CASES[case]
    model = ServedModel(ModelOptions("m", "m", response_format="hermes"))
    model.process, model.state = DurableEngine(queue, deliver), "ready"
    kind = "cmpl" if path == TEXT else "chatcmpl"
    headers = [(b"idempotency-key", b"k")] + ([] if place is None else [(b"last-event-id", place.encode())])
    durable = DurableRequest.of(kind, headers, "", case.encode(), True)
    work: TextCompletion | ChatCompletion
    if path == TEXT:
        work = TextCompletion(model, CompletionRequest(**body, stream=True), None, None, durable)
    else:
        work = ChatCompletion(model, ChatRequest(**body, stream=True), None, None, durable)
    await work.begin()
    return [event async for event in work.events()]


@given(
    st.sampled_from(sorted(CASES)),
    st.lists(st.text('{}<>"tool_cal: ab \n', max_size=5), min_size=4, max_size=12),
    st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0, 1)), max_size=5),
)
def test_any_cuts_of_any_portions_add_up_to_the_whole(case: str, texts: list[str], cuts: list[tuple[int, float]]) -> None:
    async def main() -> None:
        queue = KeptRequests((*(CASES[case][2] or ()), *texts))
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

    asyncio.run(main())
