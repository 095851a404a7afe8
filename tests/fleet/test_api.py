"""`Fleet` gives what an `AsyncLLM` gives: outputs, chunks, refusals and cancellation; and goes on when a worker dies."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagetide import (
    AsyncLLM,
    EngineClosed,
    Fleet,
    FleetError,
    RequestOutput,
    RequestRejected,
    SamplingParams,
    StreamChunk,
)
from pagetide.engine.loading.models import BUILT_IN_FILE
from pagetide.fleet.call import CallOptions
from pagetide.fleet.links import QueueUnavailable
from pagetide.fleet.messages import NewRequest, Submission
from pagetide.scheduler.errors import PromptTooLong, UnknownArgument
from tests.fleet_rig import FAR_S, FleetRig

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if polite %}Sir, {% endif %}"
PROMPTS: list[Any] = ["Call me Ishmael. Some years ago", [5, 6, 7, 8], {"prompt": "Natásha went", "label": "the third"}]
LONG = SamplingParams(max_new_tokens=300, temperature=0, ignore_eos=True)

PARAMETERS = {
    "greedy": SamplingParams(max_new_tokens=24, temperature=0),
    "the model's defaults": SamplingParams(max_new_tokens=12, seed=1),
    "sampled": SamplingParams(max_new_tokens=24, temperature=0.9, top_k=40, top_p=0.9, seed=7, repetition_penalty=1.1),
    "n": SamplingParams(max_new_tokens=16, temperature=1.0, n=3, seed=2),
    "best_of": SamplingParams(max_new_tokens=12, temperature=1.0, n=2, best_of=5, seed=3),
    "best_of with logprobs": SamplingParams(max_new_tokens=8, temperature=1.0, best_of=3, seed=3, logprobs=1),
    "beams": SamplingParams(max_new_tokens=8, num_beams=4, n=3, temperature=0),
    "logprobs": SamplingParams(max_new_tokens=6, temperature=0.8, seed=4, n=2, logprobs=2, prompt_logprobs=1),
    "stop strings": SamplingParams(max_new_tokens=60, temperature=0, stop=["the", "\n"]),
    "stop ids, bias": SamplingParams(max_new_tokens=40, temperature=0, stop_token_ids=[260], logit_bias={263: -5.0}),
    "bad words": SamplingParams(max_new_tokens=12, temperature=0, bad_words=["whale", "I"], min_new_tokens=5),
}  # fmt: skip


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[AsyncLLM]]:
    """The demo model with a chat template, named by a models file: the oracle, and two engines for workers."""
    models = tmp_path_factory.mktemp("models") / "models.yaml"
    folder = BUILT_IN_FILE.parent.parent / "engine" / "demo_model"
    models.write_text(json.dumps({"talk": {"path": str(folder), "tokenizer": {"chat_template": TEMPLATE}}}), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGETIDE_CONFIG", str(models))
        each = [
            AsyncLLM("talk", device="cpu", kv_memory="32MiB", max_seqs=8, kv_events=True, share=False) for _ in range(3)
        ]
        yield each
        for llm in each:
            asyncio.run(llm.stop())


Check = Callable[[FleetRig, Fleet, AsyncLLM], Awaitable[None]]


@pytest.fixture
def with_fleet(engines: list[AsyncLLM], tmp_path: Path) -> Callable[..., None]:
    """Runs a test with a fleet of one worker, or of two, and sees to it that nothing is left of its requests."""

    def run(check: Check, num_workers: int = 1) -> None:
        async def main() -> None:
            workers = dict(zip(("first", "second"), engines[1 : 1 + num_workers], strict=False))
            async with FleetRig(tmp_path, "talk", **workers) as rig:
                async with rig.fleet() as fleet:
                    await check(rig, fleet, engines[0])
                await rig.until(lambda: rig.is_empty)
            async with asyncio.timeout(FAR_S):
                for llm in workers.values():
                    while (await llm.stats())["running"]:  # the current step is the last that computes them
                        await asyncio.sleep(0.005)

        asyncio.run(main())

    return run


def plain(output: RequestOutput) -> dict[str, Any]:
    """What two engines have in common of an output."""
    data = output.to_dict()
    data["request_id"] = data["request_id"] != ""
    del data["num_cached_tokens"]
    for completion in data["completions"]:
        del completion["timings"], completion["num_preemptions"]
    return data


def joined(chunks: list[StreamChunk]) -> dict[tuple[int, int], tuple[str, list[int], list[Any]]]:
    """Text, tokens and log-probabilities of each continuation."""
    found: dict[tuple[int, int], tuple[str, list[int], list[Any]]] = {}
    for chunk in chunks:
        text, ids, scores = found.get((chunk.index, chunk.number), ("", [], []))
        found[chunk.index, chunk.number] = text + chunk.text, ids + chunk.token_ids, scores + list(chunk.logprobs or ())
    return found


def check_times(output: RequestOutput) -> None:
    for completion in output.completions:
        times = completion.timings
        assert times.first_token_s is not None and times.queued_s is not None
        assert 0 <= times.queued_s <= times.first_token_s <= times.total_s < 60


# -- outputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", PARAMETERS.values(), ids=PARAMETERS.keys())
def test_outputs_are_those_of_an_engine(params: SamplingParams, with_fleet: Any) -> None:
    async def check(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
        expected = await oracle.generate(PROMPTS, params)
        outputs = await fleet.generate(PROMPTS, params)
        assert list(map(plain, outputs)) == list(map(plain, expected))
        assert len({output.request_id for output in outputs}) == len(PROMPTS)
        for output in outputs:
            check_times(output)

    with_fleet(check)


@pytest.mark.parametrize("name", ["greedy", "n", "beams", "logprobs", "stop strings"])
@pytest.mark.parametrize("interval", [1, 5])
def test_chunks_add_up_to_the_output(name: str, interval: int, with_fleet: Any) -> None:
    async def check(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
        params = PARAMETERS[name]
        expected = await oracle.generate(PROMPTS, params)
        stream = fleet.stream(PROMPTS, params, stream_interval=interval)
        chunks = [chunk async for chunk in stream]
        assert {chunk.index: plain(chunk.output) for chunk in chunks if chunk.output is not None} == dict(
            enumerate(map(plain, expected))
        )
        assert joined(chunks) == {
            (index, number): (completion.text, completion.token_ids, list(completion.logprobs or ()))
            for index, output in enumerate(expected)
            for number, completion in enumerate(output.completions)
        }
        for chunk in chunks:
            assert chunk.completion is not None or len(chunk.token_ids) >= interval
            assert (chunk.output is None) or chunk.completion is not None
        assert stream.num_generated == sum(len(c.token_ids) for output in expected for c in output.completions)
        assert stream.requests == ()
        assert [chunk async for chunk in stream] == []

    with_fleet(check)


def test_parameters_of_each_prompt_from_iterators(with_fleet: Any) -> None:
    async def check(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
        each = list(PARAMETERS.values())[:3]
        expected = await oracle.generate(PROMPTS, each)
        outputs = await fleet.generate(iter(PROMPTS), iter(each))  # type: ignore[arg-type]
        assert list(map(plain, outputs)) == list(map(plain, expected))
        (one,) = await fleet.generate("The sea", each[0], priority=-3, cache_salt="mine")
        (other,) = await oracle.generate("The sea", each[0])
        assert plain(one) == plain(other)

    with_fleet(check)


def test_conversations_and_the_model(with_fleet: Any) -> None:
    async def check(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
        messages = [{"role": "user", "content": "Where is he?"}]
        params = PARAMETERS["greedy"]
        for options in ({}, {"polite": True}):
            expected = await oracle.chat([messages, messages[:1]], params, **options)
            assert list(map(plain, await fleet.chat([messages, messages], params, **options))) == list(
                map(plain, expected)
            )
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

    with_fleet(check)


def test_the_prefix_cache_is_counted(with_fleet: Any) -> None:
    async def check(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
        prompt, params = list(range(100, 200)), SamplingParams(max_new_tokens=2, temperature=0)
        counts = []
        for salt in ("a", "a", "b"):
            (output,) = await fleet.generate([prompt], params, cache_salt=salt)
            counts.append(output.num_cached_tokens)
        assert counts == [0, 96, 0]

    with_fleet(check)


def test_prompts_one_by_one(with_fleet: Any) -> None:
    async def check(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
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

    with_fleet(check)


# -- refusals ----------------------------------------------------------------------------------------------------------


async def _reads(stream: AsyncIterator[StreamChunk]) -> None:
    async for _ in stream:
        pass


def test_a_call_with_an_invalid_prompt_is_refused_as_a_whole(with_fleet: Any) -> None:
    async def check(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
        calls: list[tuple[type[Exception], str, Callable[[Any], Awaitable[Any]]]] = [
            (RequestRejected, "prompt is empty", lambda it: it.generate(["fine", []])),
            (RequestRejected, "outside the vocabulary", lambda it: it.generate([[5], [4096]])),
            (PromptTooLong, "may have 1,023 at most", lambda it: it.generate(["fine", [7] * 1024])),
            (RequestRejected, "2 prompts, but 1 sampling_params", lambda it: it.generate(["a", "b"], [LONG])),
            (RequestRejected, "another cache_salt", lambda it: it.generate(
                [{"prompt": "a", "cache_salt": "x"}], cache_salt="y")),
            (RequestRejected, "priority must be", lambda it: it.generate("a", priority=5000)),
            (RequestRejected, "cannot be streamed with n 1", lambda it: _reads(
                it.stream("a", SamplingParams(best_of=2, temperature=1.0)))),
            (RequestRejected, "regex", lambda it: it.generate(["fine", "a"], [LONG, SamplingParams(regex="(")])),
            (RequestRejected, "messages must be a list", lambda it: it.chat("who")),
        ]  # fmt: skip
        for kind, text, call in calls:
            with pytest.raises(kind) as expected:
                await call(oracle)
            with pytest.raises(kind, match=text) as found:
                await call(fleet)
            assert type(found.value) is type(expected.value) and str(found.value) == str(expected.value)
        with pytest.raises(RequestRejected, match="stream_interval must be an integer of at least 1"):
            fleet.stream("a", stream_interval=0)
        assert rig.server.queue.counters.accepted == 0

    with_fleet(check)


def test_what_a_fleet_cannot_do_says_so(with_fleet: Any) -> None:
    async def check(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
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

    with_fleet(check)


def test_a_prompt_that_the_queue_refuses_ends_the_call(with_fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
        def refuse(request: NewRequest) -> Submission | None:
            return Submission(kind="too_long", error="no room") if request.prompt_token_ids == [9, 9] else None

        monkeypatch.setattr(rig.server.queue, "_refusal", refuse)
        with pytest.raises(PromptTooLong, match="no room"):
            await fleet.generate(["fine", [9, 9]], LONG)
        with pytest.raises(PromptTooLong, match="no room"):
            await _reads(fleet.stream([[9, 9], "fine"], LONG))
        await rig.until(lambda: rig.is_empty)
        each = [output.finish_reason async for output in fleet.generate_each(["a", [9, 9]], PARAMETERS["greedy"])]
        assert each == ["length", "error"]
        monkeypatch.setattr(rig.server.queue, "_refusal", lambda _: Submission(kind="unavailable", error="full"))
        with pytest.raises(FleetError, match="full"):
            await fleet.generate("a")

    with_fleet(check)


# -- cancellation and the end ------------------------------------------------------------------------------------------


def test_what_is_not_awaited_any_more_is_aborted(with_fleet: Any) -> None:
    async def check(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
        async def ends(work: Callable[[], Awaitable[None]]) -> None:
            cancelled = rig.server.queue.counters.cancelled
            await work()
            gc.collect()
            await rig.until(lambda: rig.is_empty)
            assert rig.server.queue.counters.cancelled == cancelled + 2

        async def cancel_task() -> None:
            task = asyncio.create_task(fleet.generate(["a", "b"], LONG))
            await rig.until(lambda: bool(rig.workers["first"]._tasks))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        async def time_out() -> None:
            with pytest.raises(TimeoutError):
                await timed()

        async def timed() -> None:
            async with asyncio.timeout(None) as scope:
                ending = asyncio.create_task(end_once_it_runs(scope))
                await fleet.generate(["a", "b"], LONG)
            await ending

        async def end_once_it_runs(scope: asyncio.Timeout) -> None:
            await rig.until(lambda: bool(rig.workers["first"]._tasks))
            scope.reschedule(asyncio.get_running_loop().time())

        async def close() -> None:
            stream = fleet.stream(["a", "b"], LONG)
            await anext(stream)
            await stream.aclose()
            assert [chunk async for chunk in stream] == []

        async def collect() -> None:
            await anext(fleet.stream(["a", "b"], LONG))

        async def leave_loop() -> None:
            async for _ in fleet.generate_each(["a", "b", "c"], [PARAMETERS["greedy"], LONG, LONG]):
                await rig.until(lambda: rig.server.queue.counters.accepted == accepted + 3)
                break

        async def close_outputs() -> None:
            call = fleet.begin(["a", "b"], LONG)
            await rig.until(lambda: call.num_generated > 3)
            call.close()

        for work in (cancel_task, time_out, close, collect, leave_loop, close_outputs):
            accepted = rig.server.queue.counters.accepted
            await ends(work)

    with_fleet(check)


def test_a_cancelled_submission_leaves_nothing(with_fleet: Any) -> None:
    async def check(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
        for turns in range(30):
            task = asyncio.create_task(fleet.generate(["a", "b"], LONG))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await rig.until(lambda: rig.is_empty)

    with_fleet(check)


def test_stop_gives_the_outputs_so_far(with_fleet: Any) -> None:
    async def check(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
        task = asyncio.create_task(fleet.generate(["Call me", "b"], [LONG, PARAMETERS["greedy"]]))
        stream = fleet.stream("The sea", LONG)
        chunks = [await anext(stream)]
        await rig.until(lambda: any(len(call.outputs) == 2 and call.outputs[1].end for call in fleet._calls))
        await fleet.stop()
        one, two = await task
        (whole,) = await oracle.generate("Call me", LONG)
        assert (one.finish_reason, two.finish_reason) == ("aborted", "length")
        assert 0 < len(one.token_ids) < 300 and one.token_ids == whole.token_ids[: len(one.token_ids)]
        chunks += [chunk async for chunk in stream]
        assert chunks[-1].finish_reason == "aborted" and chunks[-1].output is not None
        await fleet.stop()
        await rig.until(lambda: rig.is_empty)
        for call in (fleet.generate("a"), fleet.stats(), fleet.render([]), fleet.connect()):
            with pytest.raises(EngineClosed, match="this Fleet is stopped"):
                await call
        with pytest.raises(EngineClosed):
            _ = fleet.tokenizer

    with_fleet(check)


def test_drain_lets_calls_end(with_fleet: Any) -> None:
    async def check(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
        task = asyncio.create_task(fleet.generate("Call me", PARAMETERS["greedy"]))
        await asyncio.sleep(0)
        stopping = asyncio.create_task(fleet.stop(timeout_s=None))
        await asyncio.sleep(0)
        with pytest.raises(EngineClosed, match="being drained"):
            await fleet.generate("a")
        (output,) = await task
        assert output.finish_reason == "length"
        await stopping

    with_fleet(check)


def test_connecting_happens_on_first_use_and_again_after_an_error(engines: list[AsyncLLM], tmp_path: Path) -> None:
    async def main() -> None:
        async with FleetRig(tmp_path, "talk", first=engines[1]) as rig:
            links: list[Any] = [QueueUnavailable("away"), FleetError("no fleet"), rig.link]
            fleet = Fleet()
            fleet._open_link = lambda: _given(links.pop(0))
            with pytest.raises(FleetError, match="not connected yet: use `async with`"):
                _ = fleet.facts
            for text in ("away", "no fleet"):
                with pytest.raises(FleetError, match=text):
                    await fleet.generate("a")
            assert (await fleet.generate("a", PARAMETERS["greedy"]))[0].finish_reason == "length"
            await fleet.stop()

    asyncio.run(main())


def _given(link: Any) -> Any:
    if isinstance(link, Exception):
        raise link
    return link


def test_a_fleet_belongs_to_one_loop(engines: list[AsyncLLM], tmp_path: Path) -> None:
    async def main() -> Fleet:
        async with FleetRig(tmp_path, "talk", first=engines[1]) as rig, rig.fleet() as fleet:
            other = rig.fleet()
            await other.connect()
            await fleet.stop()
            return other

    fleet = asyncio.run(main())
    with pytest.raises(RuntimeError, match="belongs to another event loop"):
        asyncio.run(fleet.generate("a"))


# -- workers that die --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sampled", "n", "best_of", "logprobs", "beams"])
def test_requests_go_on_when_a_worker_dies(name: str, with_fleet: Any) -> None:
    async def check(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
        most = 24 if name == "beams" else 60
        params = dataclasses.replace(PARAMETERS[name], max_new_tokens=most, ignore_eos=True, stop=None)
        prompts = [*PROMPTS, "To be", "The tide"]
        expected = await oracle.generate(prompts, params)
        task = asyncio.create_task(fleet.generate(prompts, params))
        await rig.until(lambda: rig.server.queue.counters.recorded_tokens > 0 or (name == "beams" and _runs(rig)))
        await rig.kill("first")
        assert rig.server.queue.counters.requeued > 0
        assert list(map(plain, await task)) == list(map(plain, expected))

    with_fleet(check, num_workers=2)


def _runs(rig: FleetRig) -> bool:
    return bool(rig.workers["first"]._tasks)


def test_a_stream_goes_on_when_a_worker_dies(with_fleet: Any) -> None:
    async def check(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
        (expected,) = await oracle.generate("Call me", LONG)
        stream = fleet.stream("Call me", LONG)
        chunks = [await anext(stream)]
        (worker,) = [one.name for one in rig.workers.values() if one._tasks]
        await rig.kill(worker)
        chunks += [chunk async for chunk in stream]
        assert joined(chunks) == {(0, 0): (expected.text, expected.token_ids, [])}

    with_fleet(check, num_workers=2)


# -- requests with names -----------------------------------------------------------------------------------------------


def test_a_name_stands_for_one_request(with_fleet: Any) -> None:
    async def check(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
        params, counters = PARAMETERS["n"], rig.server.queue.counters
        options = CallOptions(name="run 1 line 1")
        first = await fleet.outcome("Call me", params, options)
        second = await fleet.outcome("Call me", params, options)
        assert plain(first) == plain(second) and first.request_id == second.request_id
        async with rig.fleet() as other:
            assert plain(await other.outcome("Call me", params, options)) == plain(first)
        assert counters.accepted == 1

    with_fleet(check)


def test_a_named_request_goes_on_and_begins_anew_after_an_error(with_fleet: Any) -> None:
    async def check(rig: FleetRig, fleet: Fleet, oracle: AsyncLLM) -> None:
        counters, options = rig.server.queue.counters, CallOptions(name="a run's line")
        task = asyncio.create_task(fleet.outcome("Call me", LONG, options))
        await rig.until(lambda: counters.recorded_tokens > 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        found = await fleet.outcome("Call me", LONG, options)
        (expected,) = await oracle.generate("Call me", LONG)
        assert plain(found) == plain(expected)
        assert (counters.accepted, counters.cancelled) == (1, 0)
        task = asyncio.create_task(fleet.outcome("me", LONG, CallOptions(name="another")))
        await rig.until(lambda: len(rig.server.queue.entries) == 1)
        (number,) = rig.server.queue.entries
        await rig.server.leave("somebody", [number], cancels=True)
        with pytest.raises(FleetError, match="cancelled by its client"):
            await task
        again = await fleet.outcome("me", LONG, CallOptions(name="another"))
        assert again.finish_reason == "length" and counters.accepted == 3

    with_fleet(check)
