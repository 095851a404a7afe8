"""`Fleet` gives what an `AsyncLLM` gives: outputs, chunks, refusals and cancellation; and goes on when a worker dies."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pagetide import AsyncLLM, EngineClosed, Fleet, FleetError, RequestRejected, SamplingParams, StreamChunk
from pagetide.api.arguments import UnknownArgument
from pagetide.fleet.call import CallOptions
from pagetide.fleet.links import QueueUnavailable
from pagetide.fleet.messages import NewRequest, Submission
from pagetide.scheduler.request import PromptTooLong
from tests.fleet_calls import LONG, PARAMETERS, PROMPTS, check_a_death, check_chunks, check_outputs, plain, talking_engines
from tests.fleet_rig import FleetRig, IdleRig
from tests.fleet_stand_ins import until


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    """The engine behind each worker; the deep tier gives each its own."""
    with talking_engines(tmp_path_factory.mktemp("models"), 1) as (llm,):
        yield llm


@pytest.fixture
def rig(oracle: AsyncLLM, tmp_path: Path) -> FleetRig:
    """A fleet of one worker."""
    return IdleRig(tmp_path, "talk", first=oracle)


@pytest.fixture
def fleet(rig: FleetRig) -> Fleet:
    return rig.fleet()


@pytest.mark.parametrize("name", ["best_of with logprobs", "stop strings"])
async def test_outputs_are_those_of_an_engine(name: str, fleet: Fleet, oracle: AsyncLLM) -> None:
    await check_outputs(fleet, oracle, PARAMETERS[name])


@pytest.mark.parametrize(("name", "interval"), [("n", 5), ("beams", 1), ("logprobs", 1)])
async def test_chunks_add_up_to_the_output(name: str, interval: int, fleet: Fleet, oracle: AsyncLLM) -> None:
    await check_chunks(fleet, oracle, PARAMETERS[name], interval)


async def test_parameters_of_each_prompt_from_iterators(fleet: Fleet, oracle: AsyncLLM) -> None:
    each = list(PARAMETERS.values())[:3]
    expected = await oracle.generate(PROMPTS, each)
    outputs = await fleet.generate(iter(PROMPTS), iter(each))  # type: ignore[arg-type]
    assert list(map(plain, outputs)) == list(map(plain, expected))
    (one,) = await fleet.generate("The sea", each[0], priority=-3, cache_salt="mine")
    (other,) = await oracle.generate("The sea", each[0])
    assert plain(one) == plain(other)


async def test_conversations_and_the_model(fleet: Fleet, oracle: AsyncLLM) -> None:
    messages = [{"role": "user", "content": "Where is he?"}]
    params = PARAMETERS["greedy"]
    for options in ({}, {"polite": True}):
        expected = await oracle.chat([messages, messages[:1]], params, **options)
        assert list(map(plain, await fleet.chat([messages, messages], params, **options))) == list(map(plain, expected))
        chunks = [chunk async for chunk in fleet.stream_chat(messages, params, **options)]
        assert "".join(chunk.text for chunk in chunks) == expected[0].text
        assert await fleet.render(messages, **options) == await oracle.render(messages, **options)
    assert await fleet.tokenize("Call me") == await oracle.tokenize("Call me")
    tokenizer = await fleet.get_tokenizer()
    assert tokenizer is not None and tokenizer is fleet.tokenizer
    assert dataclasses.replace(fleet.facts, device="cpu") == oracle.facts
    assert repr(fleet) == "Fleet('link', 'fleet', talk)"
    stats = await fleet.stats()
    assert [worker["name"] for worker in stats["workers"]] == ["first"]


async def test_the_prefix_cache_is_counted(fleet: Fleet) -> None:
    prompt, params = list(range(100, 200)), SamplingParams(max_new_tokens=2, temperature=0)
    counts = []
    for salt in ("a", "a", "b"):
        (output,) = await fleet.generate([prompt], params, cache_salt=salt)
        counts.append(output.num_cached_tokens)
    assert counts == [0, 96, 0]


async def test_prompts_one_by_one(fleet: Fleet, oracle: AsyncLLM) -> None:
    prompts: list[Any] = ["Call", [], "me", [99_999], "Ishmael", {"prompt": "Some", "cache_salt": "x"}]
    params = PARAMETERS["greedy"]
    expected = [plain(output) async for output in oracle.generate_each(prompts, params)]
    taken = 0

    async def source() -> AsyncIterator[Any]:
        nonlocal taken
        for prompt in prompts:
            taken += 1
            yield prompt

    assert [plain(output) async for output in fleet.generate_each(prompts, params)] == expected
    outputs = fleet.generate_each(source(), params, look_ahead=2)
    found = []
    async for output in outputs:
        found.append(plain(output))
        assert taken <= len(found) + 2
    assert found == expected
    with pytest.raises(RequestRejected, match="there are 1 sampling_params, and more prompts"):
        async for _ in fleet.generate_each(["a", "b"], [params]):
            pass
    with pytest.raises(RequestRejected, match="must be an iterable of prompts, got str"):
        fleet.generate_each("one", params)


async def _reads(stream: AsyncIterator[StreamChunk]) -> None:
    async for _ in stream:
        pass


async def test_a_call_with_an_invalid_prompt_is_refused_as_a_whole(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
    calls: list[tuple[type[Exception], str, Callable[[Any], Awaitable[Any]]]] = [
        (RequestRejected, "prompt is empty", lambda it: it.generate(["fine", []])),
        (RequestRejected, "outside the vocabulary", lambda it: it.generate([[5], [4096]])),
        (PromptTooLong, "may have 1,023 at most", lambda it: it.generate(["fine", [7] * 1024])),
        (RequestRejected, "2 prompts, but 1 sampling_params", lambda it: it.generate(["a", "b"], [LONG])),
        (RequestRejected, "another cache_salt", lambda it: it.generate([{"prompt": "a", "cache_salt": "x"}], cache_salt="y")),
        (RequestRejected, "priority must be", lambda it: it.generate("a", priority=5000)),
        (
            RequestRejected,
            "cannot be streamed with n 1",
            lambda it: _reads(it.stream("a", SamplingParams(best_of=2, temperature=1.0))),
        ),
        (RequestRejected, "regex", lambda it: it.generate(["fine", "a"], [LONG, SamplingParams(regex="(")])),
        (RequestRejected, "messages must be a list", lambda it: it.chat("where")),
    ]
    for kind, text, call in calls:
        with pytest.raises(kind) as expected:
            await call(oracle)
        with pytest.raises(kind, match=text) as found:
            await call(fleet)
        assert type(found.value) is type(expected.value) and str(found.value) == str(expected.value)
    with pytest.raises(RequestRejected, match="stream_interval must be an integer of at least 1"):
        fleet.stream("a", stream_interval=0)
    assert rig.server.queue.counters.accepted == 0


async def test_what_a_fleet_cannot_do_says_so(rig: FleetRig, fleet: Fleet) -> None:
    processors = SamplingParams(logits_processors=[lambda ids, scores: scores])
    with pytest.raises(RequestRejected, match="logits_processors are code and no plain data"):
        await fleet.generate(["fine", "a"], [LONG, processors])
    with pytest.raises(RequestRejected, match="cannot be sent to a worker"):
        await fleet.generate("a", cache_salt="\ud800")
    for name in ("import_request", "pause", "reset_prefix_cache", "explain", "frame", "block", "config"):
        with pytest.raises(AttributeError, match=f"'Fleet' object has no attribute '{name}': "):
            getattr(fleet, name)
    with pytest.raises(AttributeError, match=r"'Fleet' object has no attribute 'novelty'$"):
        _ = fleet.novelty
    with pytest.raises(UnknownArgument, match=r"Fleet\.generate has no argument 'max_tokens'"):
        await fleet.generate("a", max_tokens=3)  # type: ignore[call-arg]
    assert rig.server.queue.counters.accepted == 0


async def test_a_prompt_that_the_queue_refuses_ends_the_call(
    rig: FleetRig, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: NewRequest) -> Submission | None:
        return Submission(kind="too_long", error="no room") if request.prompt_token_ids == [9, 9] else None

    monkeypatch.setattr(rig.server.queue, "_refusal", refuse)
    with pytest.raises(PromptTooLong, match="no room"):
        await fleet.generate(["fine", [9, 9]], LONG)
    with pytest.raises(PromptTooLong, match="no room"):
        await _reads(fleet.stream([[9, 9], "fine"], LONG))
    await until(lambda: rig.is_empty)
    each = [output.finish_reason async for output in fleet.generate_each(["a", [9, 9]], PARAMETERS["greedy"])]
    assert each == ["length", "error"]
    monkeypatch.setattr(rig.server.queue, "_refusal", lambda _: Submission(kind="unavailable", error="full"))
    with pytest.raises(FleetError, match="full"):
        await fleet.generate("a")


async def test_what_is_not_awaited_any_more_is_aborted(rig: FleetRig, fleet: Fleet) -> None:
    async def ends(work: Callable[[], Awaitable[None]]) -> None:
        cancelled = rig.server.queue.counters.cancelled
        await work()
        gc.collect()
        await until(lambda: rig.is_empty)
        assert rig.server.queue.counters.cancelled == cancelled + 2

    async def cancel_task() -> None:
        task = asyncio.create_task(fleet.generate(["a", "b"], LONG))
        await until(lambda: bool(rig.workers["first"]._tasks))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def close() -> None:
        stream = fleet.stream(["a", "b"], LONG)
        await anext(stream)
        await stream.aclose()
        assert [chunk async for chunk in stream] == []

    async def collect() -> None:
        await anext(fleet.stream(["a", "b"], LONG))

    async def leave_loop() -> None:
        async for _ in fleet.generate_each(["a", "b", "c"], [PARAMETERS["greedy"], LONG, LONG]):
            await until(lambda: rig.server.queue.counters.accepted == accepted + 3)
            break

    async def close_outputs() -> None:
        call = fleet.begin(["a", "b"], LONG)
        await until(lambda: call.num_generated > 3)
        call.close()

    rig.hold(2, LONG.max_new_tokens)
    for work in (cancel_task, close, collect, leave_loop, close_outputs):
        accepted = rig.server.queue.counters.accepted
        await ends(work)


async def test_a_cancelled_submission_leaves_nothing(rig: FleetRig, fleet: Fleet) -> None:
    for turns in range(30):
        task = asyncio.create_task(fleet.generate(["a", "b"], LONG))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: rig.is_empty)


async def test_stop_gives_the_outputs_so_far(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
    rig.hold(4, LONG.max_new_tokens)
    task = asyncio.create_task(fleet.generate(["Call me", "b"], [LONG, PARAMETERS["greedy"]]))
    stream = fleet.stream("The sea", LONG)
    chunks = [await anext(stream)]
    await until(lambda: any(len(call.outputs) == 2 and call.outputs[1].end for call in fleet._calls))
    await fleet.stop()
    one, two = await task
    (whole,) = await oracle.generate("Call me", LONG)
    assert (one.finish_reason, two.finish_reason) == ("aborted", "length")
    assert 0 < len(one.token_ids) < LONG.max_new_tokens and one.token_ids == whole.token_ids[: len(one.token_ids)]
    chunks += [chunk async for chunk in stream]
    assert chunks[-1].finish_reason == "aborted" and chunks[-1].output is not None
    await fleet.stop()
    await until(lambda: rig.is_empty)
    for call in (fleet.generate("a"), fleet.stats(), fleet.render([]), fleet.connect()):
        with pytest.raises(EngineClosed, match="this Fleet is stopped"):
            await call
    with pytest.raises(EngineClosed):
        _ = fleet.tokenizer


async def test_drain_lets_calls_end(fleet: Fleet) -> None:
    task = asyncio.create_task(fleet.generate("Call me", PARAMETERS["greedy"]))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(fleet.stop(timeout_s=None))
    await asyncio.sleep(0)
    with pytest.raises(EngineClosed, match="being drained"):
        await fleet.generate("a")
    (output,) = await task
    assert output.finish_reason == "length"
    await stopping


async def test_connecting_happens_on_first_use_and_again_after_an_error(rig: FleetRig) -> None:
    open_link = Mock(side_effect=[QueueUnavailable("away"), FleetError("no fleet"), rig.link])
    fleet = Fleet()
    fleet._open_link = open_link
    with pytest.raises(FleetError, match="not connected yet: use `async with`"):
        _ = fleet.facts
    for text in ("away", "no fleet"):
        with pytest.raises(FleetError, match=text):
            await fleet.generate("a")
    assert (await fleet.generate("a", PARAMETERS["greedy"]))[0].finish_reason == "length"
    await fleet.stop()


def test_a_fleet_belongs_to_one_loop(oracle: AsyncLLM, tmp_path: Path) -> None:
    async def main() -> Fleet:
        async with FleetRig(tmp_path, "talk", first=oracle) as rig, rig.fleet() as fleet:
            other = rig.fleet()
            await other.connect()
            await fleet.stop()
            return other

    fleet = asyncio.run(main())
    with pytest.raises(RuntimeError, match="belongs to another event loop"):
        asyncio.run(fleet.generate("a"))


async def test_requests_go_on_when_a_worker_dies(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
    rig.add("second", oracle)
    await until(lambda: rig.server.queue.workers.find("second") is not None)
    await check_a_death(rig, fleet, oracle, "logprobs", 16)


async def test_a_named_request_goes_on_and_begins_anew_after_an_error(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
    counters, options = rig.server.queue.counters, CallOptions(name="a run's line")
    rig.hold(3)
    task = asyncio.create_task(fleet.outcome("Call me", LONG, options))
    await until(lambda: counters.recorded_tokens > 0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    rig.hold(math.inf)
    found = await fleet.outcome("Call me", LONG, options)
    (expected,) = await oracle.generate("Call me", LONG)
    assert plain(found) == plain(expected)
    assert (counters.accepted, counters.cancelled) == (1, 0)
    rig.hold(3)
    task = asyncio.create_task(fleet.outcome("me", LONG, CallOptions(name="another")))
    await until(lambda: len(rig.server.queue.entries) == 1)
    (number,) = rig.server.queue.entries
    await rig.server.leave("somebody", [number], cancels=True)
    with pytest.raises(FleetError, match="cancelled by its client"):
        await task
    rig.hold(math.inf)
    again = await fleet.outcome("me", LONG, CallOptions(name="another"))
    assert again.finish_reason == "length" and counters.accepted == 3
