"""`AsyncLLM` as programs with event loops use it: what comes in and out, who goes away, and how it ends."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from async_rig import Ends, Work, is_idle, life, loads, until, works
from engines import prompts as prompts_of
from families import VOCAB, tiny
from nearly import alike

from pagetide import LLM, AsyncLLM, EngineClosed, RequestOutput, RequestRejected, SamplingParams
from pagetide.engine import build
from pagetide.engine.errors import ConfigError, NotEnoughMemory

MIB = 1 << 20
BLOCK = 8192  # bytes that a block of 16 tokens takes of so small a pool, about
ACQUIRE = build.acquire_lease
SHARED = {"device": "cpu", "kv_memory": MIB}


@pytest.fixture(scope="module")
def oracle() -> Iterator[LLM]:
    with LLM(tiny("llama"), **SHARED) as llm:
        yield llm


@pytest.fixture(scope="module")
def shared() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(tiny("llama"), **SHARED)
    yield llm
    asyncio.run(llm.stop())


@pytest.fixture
def llm(shared: AsyncLLM) -> Iterator[AsyncLLM]:
    """The engine that most tests share; each has to leave it idle."""
    yield shared
    asyncio.run(until(lambda: is_idle(shared)))
    shared._manager.open().core.scheduler.check_invariants()


@pytest.fixture
def load() -> Iterator[Callable[..., AsyncLLM]]:
    with loads(SHARED) as make:
        yield make


def up_to(new: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, **more)


LONG = up_to(480)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def watch_steps(llm: AsyncLLM, told: Callable[[Any], None]) -> None:
    """Tell of each plan before it runs, on the stepper's thread."""
    runner = llm._manager.open().core.runner
    begin = runner.begin

    def watched(plan: Any) -> Any:
        told(plan)
        return begin(plan)

    runner.begin = watched


async def go_on_for(llm: AsyncLLM, steps: int) -> None:
    """From one pause to the next, which is asked for while the last of so many steps runs."""
    numbers, reached, gate = itertools.count(1), threading.Event(), threading.Event()

    def told(plan: Any) -> None:
        if next(numbers) == steps:
            reached.set()
            assert gate.wait(60)

    runner = llm._manager.open().core.runner
    begin = runner.begin
    watch_steps(llm, told)
    llm.resume()
    await until(reached.is_set)
    pausing = asyncio.create_task(llm.pause())
    await asyncio.sleep(0)
    gate.set()
    await pausing
    runner.begin = begin


TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


async def test_every_call_gives_what_llm_gives() -> None:
    """Text, tokens, continuations, stops and seeds; conversations; chunk by chunk; one by one."""
    prompts = ["Natásha went to the window and " * 3, [5, 6, 7]]
    params = [up_to(12, temperature=0, stop="e"), up_to(9, temperature=1.0, seed=3, n=3)]
    talk, greedy = [{"role": "user", "content": "the tide"}], up_to(5, temperature=0)
    with LLM("demo", **SHARED) as sync:
        sync._manager.open().encoder.tokenizer.chat_template = TEMPLATE
        expected, chatted = sync.generate(prompts, params), sync.chat(talk, greedy)
        ids, rendered = sync.tokenize(prompts[0]), sync.render(talk)
    async with AsyncLLM("demo", **SHARED) as llm:
        llm._manager.open().encoder.tokenizer.chat_template = TEMPLATE
        assert alike(await llm.generate(prompts, params)) == alike(expected)
        assert alike(await llm.generate(iter(prompts), iter(params))) == alike(expected)
        assert alike(await llm.chat(talk, greedy)) == alike(chatted)
        assert alike(await llm.generate(rendered, greedy))[0].completions == alike(chatted)[0].completions
        assert (await llm.tokenize(prompts[0]), await llm.render(talk)) == (ids, rendered)
        for interval in (1, 4):
            chunks = [chunk async for chunk in llm.stream(prompts, params, stream_interval=interval)]
            for index, output in enumerate(expected):
                for number, completion in enumerate(output.completions):
                    own = [c for c in chunks if (c.index, c.number) == (index, number)]
                    assert "".join(c.text for c in own) == completion.text
                    assert [t for c in own for t in c.token_ids] == completion.token_ids
                    assert all(len(c.token_ids) >= interval for c in own[:-1])
                    assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + [completion.finish_reason]
            last = sorted((c for c in chunks if c.output), key=lambda c: c.index)
            assert alike([c.output for c in last]) == alike(expected)
        assert alike([o async for o in llm.generate_each(prompts, iter(params))]) == alike(expected)
        stats = await llm.stats()
        assert (stats["model"], stats["running"], stats["waiting"]) == ("demo", 0, 0)
        assert await llm.explain() == []
        hits = stats["prefix_cache"]["hit_tokens"]
        assert hits > 0
        await llm.reset_prefix_cache()
        await llm.generate(prompts, params)
        assert (await llm.stats())["prefix_cache"]["hit_tokens"] == hits


async def test_beams_and_their_aborts(load: Callable[..., AsyncLLM], oracle: LLM) -> None:
    """They are several requests of one group. A stop ends them during a pause too."""
    llm, params = load(), up_to(20, num_beams=3, n=2)
    expected = oracle.generate([[5, 6], [7]], params)
    ends = Ends(llm)
    task = asyncio.create_task(llm.generate([8], up_to(60, num_beams=4)))
    assert alike(await llm.generate([[5, 6], [7]], params)) == alike(expected)
    task.cancel()
    await until(lambda: is_idle(llm))
    scheduler = llm._manager.open().core.scheduler
    task = asyncio.create_task(llm.generate([8], up_to(300, num_beams=4)))
    await until(lambda: scheduler.num_running)
    await llm.pause()
    queued = asyncio.create_task(llm.generate([[5], [6]], LONG))
    await until(lambda: len(llm._manager.delivery.groups) == 4 + 2)
    await llm.stop()
    assert [o.finish_reason for o in [*await task, *await queued]] == ["aborted"] * 3
    assert len({end.request_id for end in ends.finished}) == len(ends.finished) == len(ends.added)
    idle = load()
    await idle.stop()
    async with idle:
        pass


async def test_bad_calls_are_refused_and_change_nothing(llm: AsyncLLM) -> None:
    before = await llm.stats()
    for prompts, params in (([], None), ([[5], []], None), ([[5]], [up_to(1)] * 2), ("text", None)):
        with pytest.raises(RequestRejected):
            await llm.generate(prompts, params)
        with pytest.raises(RequestRejected):
            await anext(llm.stream(prompts, params))
    with pytest.raises(RequestRejected, match="priority must be"):
        await llm.generate([5], priority="high")
    with pytest.raises(RequestRejected, match="tokenizer"):
        await llm.chat([{"role": "user", "content": "x"}])
    with pytest.raises(RequestRejected, match="outside the vocabulary"):
        await llm.tokenize([5, 999])
    for name, call in (
        ("stream_interval", functools.partial(llm.stream, [5], stream_interval=0)),
        ("look_ahead", functools.partial(llm.generate_each, [[5]], look_ahead=0)),
        ("prompts must be an iterable", functools.partial(llm.generate_each, "text")),
    ):
        with pytest.raises(RequestRejected, match=name):
            call()
    assert await llm.stats() == before
    with pytest.raises(ConfigError, match="max_waiting"):
        AsyncLLM("demo", max_waiting=0)
    with pytest.raises(TypeError, match="AsyncLLM has no argument"):
        AsyncLLM("demo", gpu_memory_utilization=0.9)


async def test_prompts_are_taken_ahead_within_bounds_and_kept_in_order(llm: AsyncLLM, oracle: LLM) -> None:
    prompts, taken = prompts_of(range(2, 32), VOCAB), 0
    params = [up_to(1 + i % 9) for i in range(30)]
    expected = tokens_of(oracle.generate(prompts, params))

    def source() -> Iterator[list[int]]:
        nonlocal taken
        for prompt in itertools.cycle(prompts):
            taken += 1
            yield prompt

    outputs = llm.generate_each(source(), itertools.cycle(params), look_ahead=7)
    given = 0
    async for output in outputs:
        assert output.token_ids == expected[given % 30]
        given += 1
        assert taken <= given - 1 + 7
        if given == 75:
            break
    await outputs.aclose()
    assert taken >= 75


async def test_one_that_cannot_be_served_has_an_output_at_its_place(llm: AsyncLLM, oracle: LLM) -> None:
    prompts = [[5], [], 5, [7], "text", [5] * 600]
    outputs = [o async for o in llm.generate_each(prompts, up_to(3))]
    assert [o.finish_reason for o in outputs] == ["length", "error", "error", "length", "error", "error"]
    assert "prompt is empty" in outputs[1].error and outputs[4].prompt == "text"
    assert "the prompt cannot be read: TypeError" in outputs[2].error
    with pytest.raises(RequestRejected, match="2 sampling_params, and more prompts"):
        [o async for o in llm.generate_each([[5]] * 3, [up_to(1)] * 2)]


async def test_an_async_source_may_wait_for_outputs_and_may_fail(llm: AsyncLLM, oracle: LLM) -> None:
    """Each prompt is what the last one gave, so that nothing may be waited for ahead; then an error of the source's own."""
    answers: asyncio.Queue[list[int]] = asyncio.Queue()

    async def source() -> AsyncIterator[list[int]]:
        prompt = [5, 6]
        for _ in range(4):
            yield prompt
            prompt = await answers.get()
        raise KeyError("of the source's own")

    given: list[list[int]] = []

    async def follow() -> None:
        async for output in llm.generate_each(source(), up_to(4), look_ahead=3):
            given.append(output.token_ids)
            answers.put_nowait(output.token_ids)

    with pytest.raises(KeyError, match="of the source's own"):
        await follow()
    expected: list[list[int]] = [[5, 6]]
    for _ in range(4):
        expected += tokens_of(oracle.generate(expected[-1], up_to(4)))
    assert given == expected[1:]


@pytest.fixture(scope="module")
def catalogue(oracle: LLM) -> list[Work]:
    return works(40, oracle.generate)


def test_many_loops_and_a_fifth_of_the_callers_go_away(load: Callable[..., AsyncLLM], catalogue: list[Work]) -> None:
    llm = load(kv_memory=40 * BLOCK, max_seqs=16, max_waiting=20)
    seen = life(llm, catalogue, seed=1, tasks=200)
    assert 10 < seen["left"] < 80


def held_blocks(llm: AsyncLLM) -> int:
    """What those that run come to, sharing nothing."""
    scheduler = llm._manager.open().core.scheduler
    rows = np.array([s.row for s in scheduler.state.by_row.values()], np.int64)
    return int(scheduler.cache.row_tables.held_blocks(rows).sum()) if len(rows) else 0


async def test_a_slow_reader_piles_nothing_up(llm: AsyncLLM, oracle: LLM) -> None:
    """What came meanwhile is one chunk."""
    (expected,) = oracle.generate([5, 6], up_to(50))
    stream = llm.stream([5, 6], up_to(50))
    first = await anext(stream)
    await until(lambda: not llm._manager.delivery.groups)
    assert not stream._chunks and llm._engine_thread._outbox.is_empty
    (last,) = [chunk async for chunk in stream]
    assert first.token_ids + last.token_ids == expected.token_ids
    assert last.finish_reason == "length" and len(first.token_ids) < 50


async def test_one_call_for_each_loop_and_step(llm: AsyncLLM) -> None:
    calls: list[int] = []

    async def streamed(i: int) -> None:
        async for _ in llm.stream([5 + i], up_to(20)):
            pass

    loop, steps = asyncio.get_running_loop(), []
    send = loop.call_soon_threadsafe

    def counted(callback: Any, *arguments: Any, **more: Any) -> Any:
        if threading.current_thread() is llm._engine_thread:
            calls.append(len(arguments[0]))
        return send(callback, *arguments, **more)

    loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
    step = llm._manager.step
    llm._manager.step = lambda: (steps.append(0), step())[1]  # type: ignore[method-assign]
    await llm.pause()  # so that all begin together
    tasks = [asyncio.create_task(streamed(i)) for i in range(20)]
    await until(lambda: len(llm._manager.delivery.groups) == 20)
    llm.resume()
    await asyncio.gather(*tasks)
    del llm._manager.step
    assert sum(calls) > 100 and len(calls) <= len(steps) + 25


async def test_two_readers_of_a_stream_and_closing_it_under_one(llm: AsyncLLM) -> None:
    stream = llm.stream([5], LONG)
    await anext(stream)
    await llm.pause()
    await asyncio.sleep(0)

    async def rest() -> list[Any]:
        return [chunk async for chunk in stream]

    reader = asyncio.create_task(rest())
    await until(lambda: stream._reading and not stream._chunks)
    with pytest.raises(RuntimeError, match="another task is reading"):
        await anext(stream)
    await stream.aclose()
    assert all(chunk.finish_reason is None for chunk in await reader)
    llm.resume()


async def test_calls_wait_for_room_first_come_first_served(load: Callable[..., AsyncLLM]) -> None:
    llm = load(max_seqs=1, max_waiting=3)
    ends = Ends(llm)
    await llm.pause()
    done: list[int] = []

    async def one(i: int) -> None:
        await llm.generate([5 + i], up_to(3))
        done.append(i)

    tasks = []
    for i in range(12):
        tasks.append(asyncio.create_task(one(i)))
        await asyncio.sleep(0)
    await until(lambda: llm._engine_thread._calls.num_waiting == 9)
    assert (await llm.stats())["waiting"] == 3
    most: list[int] = []
    watch_steps(llm, lambda plan: most.append(llm._manager.open().core.scheduler.num_waiting))
    for i in (5, 11):
        tasks[i].cancel()
    await until(lambda: llm._engine_thread._calls.num_waiting == 7)
    llm.resume()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert max(most) <= 3
    whole = await llm.generate([[5], [6], [7], [8], [9]], up_to(2))  # a call is let in as a whole
    assert len(whole) == 5
    assert len(ends.added) == 15, "who was cancelled while waiting was never queued"
    ends.check()
    assert is_idle(llm)


async def test_a_pause_keeps_everything_where_it_is(llm: AsyncLLM, oracle: LLM) -> None:
    prompts = prompts_of([35, 26, 21, 12], VOCAB)
    expected = tokens_of(oracle.generate(prompts, up_to(40)))
    await llm.pause()
    running = [asyncio.create_task(llm.generate(p, up_to(40))) for p in prompts[:3]]
    await until(lambda: len(llm._manager.delivery.groups) == 3)
    await go_on_for(llm, 5)
    await llm.pause()
    before = await llm.stats()
    assert (before["running"], before["waiting"], before["blocks"]["live"]) == (3, 0, held_blocks(llm))
    later = asyncio.create_task(llm.generate(prompts[3], up_to(40)))
    await until(lambda: len(llm._manager.delivery.groups) == 4)
    assert await llm.stats() == before | {"waiting": 1}
    assert not any(task.done() for task in (later, *running))
    hasty = asyncio.create_task(llm.pause())
    await asyncio.sleep(0)
    hasty.cancel()  # which takes back its own pause, not that of others
    assert await llm.stats() == before | {"waiting": 1}
    llm.resume()  # one of the two pauses that hold
    assert await llm.stats() == before | {"waiting": 1}
    llm.resume()
    outputs = await asyncio.gather(*running, later)
    assert [output.token_ids for (output,) in outputs] == expected
    hasty = asyncio.create_task(llm.pause())
    await asyncio.sleep(0)
    hasty.cancel()
    assert tokens_of(await llm.generate(prompts[0], up_to(40))) == expected[:1]


async def test_a_drain_refuses_who_comes_and_waits_for_who_is_there(load: Callable[..., AsyncLLM]) -> None:
    """Those included that wait for room; a pause ends, as nothing would end in it."""
    llm = load(max_seqs=2, max_waiting=2)
    await llm.pause()
    tasks = [asyncio.create_task(llm.generate([5 + i], up_to(4))) for i in range(9)]
    stream = llm.stream([5], up_to(4))
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    await llm.drain()
    assert not llm._manager.delivery.groups
    assert [output.finish_reason for task in tasks for output in await task] == ["length"] * 9
    await first
    assert [chunk async for chunk in stream][-1].finish_reason == "length"
    with pytest.raises(EngineClosed, match="being drained"):
        await llm.generate([5])
    with pytest.raises(EngineClosed, match="being drained"):
        await anext(llm.stream([5]))
    assert (await llm.stats())["running"] == 0
    await llm.drain()


@pytest.mark.parametrize("timeout_s", [0.0, None])
async def test_stop_with_fifty_in_flight(load: Callable[..., AsyncLLM], oracle: LLM, timeout_s: float | None) -> None:
    """K 74. Running, queued, waiting for room, streams read and unread: all are told; then everything is refused."""
    new = 200 if timeout_s == 0 else 12
    before = set(threading.enumerate())
    llm = load(max_seqs=8, max_waiting=20)
    arena, ends = llm._manager.open().arena, Ends(llm)
    tasks = [asyncio.create_task(llm.generate([5 + i, 6], up_to(new))) for i in range(48)]
    stream = llm.stream([5, 6], up_to(new))
    unread = llm.stream([6, 6], up_to(new), priority=-1)
    first = await anext(unread)
    waiting = asyncio.create_task(anext(stream))
    groups, calls = llm._manager.delivery.groups, llm._engine_thread._calls
    await until(lambda: ends.added and len(groups) + calls.num_waiting + len(ends.finished) == 50)
    await asyncio.gather(llm.stop(timeout_s), llm.stop(timeout_s))
    assert set(threading.enumerate()) <= before
    assert arena.mapped_bytes == 0
    outputs = [output for task in tasks for output in await task]
    assert {o.finish_reason for o in outputs} == ({"aborted"} if timeout_s == 0 else {"length"})
    (whole,) = oracle.generate([5, 6], up_to(new))
    assert outputs[0].token_ids == whole.token_ids[: len(outputs[0].token_ids)]
    last = await waiting
    chunks = [last, *[chunk async for chunk in stream]]
    assert chunks[-1].finish_reason == outputs[0].finish_reason
    rest = [first, *[chunk async for chunk in unread]]
    assert rest[-1].output.token_ids == [t for chunk in rest for t in chunk.token_ids]
    await llm.stop()
    never = llm.stream([5])
    for call in (
        lambda: llm.generate([5]), lambda: anext(never), llm.stats, llm.pause, llm.drain, llm.explain,
        lambda: llm.tokenize([5]), lambda: anext(llm.generate_each([[5]])),
    ):  # fmt: skip
        with pytest.raises(EngineClosed, match="create a new one"):
            await call()
    with pytest.raises(EngineClosed):
        llm.resume()
    assert len(ends.added) == 50
    ends.check()


async def test_a_stop_whose_time_is_up_aborts_the_rest(load: Callable[..., AsyncLLM]) -> None:
    """A step is held up until it is."""
    llm = load()
    held = threading.Event()
    watch_steps(llm, lambda plan: held.wait(60))
    task = asyncio.create_task(llm.generate([5], LONG))
    await until(lambda: llm._manager.delivery.groups)
    stopping = asyncio.create_task(llm.stop(0.01))
    await until(lambda: llm._engine_thread._inbox.qsize() >= 2)  # a drain, and the end
    held.set()
    await stopping
    (output,) = await task
    assert output.finish_reason == "aborted"


async def test_one_that_is_forgotten_gives_its_memory_back_and_ends_its_thread() -> None:
    """Not while a stream of it is open."""
    before = set(threading.enumerate())
    stream = AsyncLLM(tiny("llama"), **SHARED).stream([5, 6], up_to(5))
    gc.collect()
    await anext(stream)
    arena = stream._submission._llm._manager.open().arena
    assert [chunk async for chunk in stream][-1].finish_reason == "length"
    assert arena.mapped_bytes > 0
    del stream
    await until(lambda: arena.mapped_bytes == 0)
    await until(lambda: set(threading.enumerate()) <= before)


async def test_a_cancelled_call_is_gone_at_the_next_step(load: Callable[..., AsyncLLM], oracle: LLM) -> None:
    """H 59, of which the scheduler's tests have every state: the caller is cancelled while a step runs."""
    llm = load()
    scheduler, ends = llm._manager.open().core.scheduler, Ends(llm)
    expected = tokens_of(oracle.generate([[5], [6]], up_to(30)))
    after: list[tuple[bool, bool]] = []  # by step, from the cancelled one on
    loop, cancelled = asyncio.get_running_loop(), threading.Event()
    await llm.pause()
    other = asyncio.create_task(llm.generate([5], up_to(30)))
    task = asyncio.create_task(llm.generate([6], up_to(30), priority=1))
    await until(lambda: len(llm._manager.delivery.groups) == 2)

    def cancel() -> None:
        task.cancel()
        task.add_done_callback(lambda _: cancelled.set())

    def told(plan: Any) -> None:
        own = next((s for s in scheduler.state.by_id.values() if s.request.priority == 1), None)
        if cancelled.is_set():
            after.append((own is None, scheduler.cache.pool.counts().live == held_blocks(llm)))
        elif own is not None and own.row is not None and scheduler.rows.known[own.row] > 6:
            loop.call_soon_threadsafe(cancel)
            assert cancelled.wait(60)

    watch_steps(llm, told)
    llm.resume()
    assert tokens_of(await other) == expected[:1]
    with pytest.raises(asyncio.CancelledError):
        await task
    assert after and set(after) == {(True, True)}
    ends.check()
    (aborted,) = [end for end in ends.finished if end.reason == "aborted"]
    assert len(aborted.token_ids) >= 6 and aborted.token_ids.tolist() == expected[1][: len(aborted.token_ids)]
    assert is_idle(llm)


async def test_closing_twice_or_what_has_ended_changes_nothing(llm: AsyncLLM) -> None:
    """H 60."""
    stream = llm.stream([5], up_to(3))
    assert len([chunk async for chunk in stream]) <= 3
    before = await llm.stats()
    await stream.aclose()
    await stream.aclose()
    unread = llm.stream([5], up_to(3))
    await unread.aclose()
    assert [chunk async for chunk in unread] == []
    task = asyncio.create_task(llm.generate([5], up_to(1)))
    await task
    task.cancel()
    llm._engine_thread.cancel(stream._submission._call)
    stats = await llm.stats()
    assert (stats["steps"], stats["running"]) == (before["steps"] + 1, 0)


@pytest.mark.parametrize("error", [RuntimeError("planted"), SystemExit("planted"), KeyboardInterrupt("planted")])
async def test_an_error_in_a_step_ends_its_requests_with_it(
    load: Callable[..., AsyncLLM], oracle: LLM, error: BaseException
) -> None:
    """J 70, and what is no Exception: nobody hangs, the thread goes on with the rest."""
    llm = load(max_seqs=3)
    ends = Ends(llm)
    expected = tokens_of(oracle.generate([[5 + i] for i in range(6)], up_to(20)))
    steps = itertools.count(1)

    def told(plan: Any) -> None:
        if next(steps) == 7:
            raise error

    watch_steps(llm, told)
    await llm.pause()
    tasks = [asyncio.create_task(llm.generate([5 + i], up_to(20))) for i in range(5)]
    await until(lambda: len(llm._manager.delivery.groups) == 5)
    stream = llm.stream([10], up_to(20))
    reading = asyncio.create_task(anext(stream))
    await until(lambda: len(llm._manager.delivery.groups) == 6)
    llm.resume()
    outputs = [output for task in tasks for output in await task]
    await reading
    last = [chunk async for chunk in stream][-1].output
    ended = ("error", f"{type(error).__name__}: planted")
    assert [(o.finish_reason, o.error) for o in outputs] == [ended] * 3 + [("length", None)] * 2
    assert tokens_of([*outputs[3:], last]) == expected[3:]
    assert [o.token_ids == e[:6] for o, e in zip(outputs[:3], expected, strict=False)] == [True] * 3
    assert tokens_of(await llm.generate([5], up_to(20))) == expected[:1]
    assert len({end.request_id for end in ends.finished}) == len(ends.finished) == 7
    assert is_idle(llm)


def why(end: Any) -> str:
    """What a caller is told: by its output where it was queued."""
    return repr(end.__cause__) if isinstance(end, EngineClosed) else end[0].completions[0].error


def test_whoever_comes_as_the_engine_breaks_is_told_why(
    load: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the cause of what every call raises: of calls that wait for room or are being tokenised, of later ones, of a stream
    left unread. All end, and memory is back.
    """
    llm = load(max_waiting=2)
    manager, arena = llm._manager, llm._manager.open().arena
    encoder, model, broken = manager.open().encoder, weakref.ref(manager.open().core.runner.model), threading.Event()
    encode = encoder.encode

    def slow(*given: Any) -> Any:
        assert broken.wait(60)
        return encode(*given)

    async def main() -> None:
        unread = llm.stream([5], LONG)
        await llm.pause()
        first, queued = asyncio.create_task(anext(unread)), asyncio.create_task(llm.generate([6], LONG))
        await until(lambda: len(manager.delivery.groups) == 2)
        llm.resume()
        await first
        room = [asyncio.create_task(llm.generate([[5]] * 2, LONG)) for _ in range(8)]
        await until(lambda: llm._engine_thread._calls.num_waiting)
        encoder.encode = slow  # type: ignore[method-assign]
        late = [asyncio.create_task(ask) for ask in (llm.generate([5]), llm.tokenize([5]), anext(llm.stream([5])))]
        await asyncio.sleep(0)
        monkeypatch.setattr(manager, "_advance", lambda engine: 1 / 0)
        await until(lambda: manager.engine is None)
        broken.set()
        await until(lambda: llm._engine_thread.ended)
        refusals = await asyncio.gather(*late, return_exceptions=True)
        for end in await asyncio.gather(queued, *room, return_exceptions=True):
            assert "ZeroDivisionError" in why(end)
        del end
        for ask in (llm.generate([5]), llm.stats(), llm.drain(), llm.pause(), anext(llm.generate_each([[5]]))):
            refusals += await asyncio.gather(ask, return_exceptions=True)
        last = [chunk async for chunk in unread][-1]
        assert last.finish_reason == "error" and "ZeroDivisionError" in last.completion.error
        for refusal in refusals:
            assert isinstance(refusal, EngineClosed) and isinstance(refusal.__cause__, ZeroDivisionError)
        await llm.stop()

    asyncio.run(main())
    assert arena.mapped_bytes == 0 and "the engine's thread failed" in caplog.text
    gc.collect()
    assert model() is None, "what broke the engine holds its weights"


async def test_a_long_tokenising_holds_nobody_up_and_can_be_left(load: Callable[..., AsyncLLM]) -> None:
    llm = load()
    ends, encoder, gate = Ends(llm), llm._manager.open().encoder, threading.Event()
    encode = encoder.encode
    encoder.encode = lambda *given: (gate.wait(60), encode(*given))[1]  # type: ignore[method-assign]
    tasks = [asyncio.create_task(llm.generate([5 + i], up_to(2))) for i in range(3)]
    assert (await llm.stats())["waiting"] == 0
    tasks[0].cancel()
    tasks[2].cancel()
    await asyncio.wait([tasks[0], tasks[2]])
    gate.set()
    await tasks[1]
    assert len(ends.added) == 1
    ends.check()


async def test_an_error_of_the_tokenizer_is_its_own_requests() -> None:
    async with AsyncLLM("demo", **SHARED) as llm:
        encoder = llm._manager.open().encoder
        encode = encoder.encode

        def broken(prompt: Any, params: Any) -> Any:
            if prompt == "bad":
                raise StopIteration("piece id is out of range")
            return encode(prompt, params)

        encoder.encode = broken
        good = [asyncio.create_task(llm.generate("the tide", up_to(5, temperature=0))) for _ in range(3)]
        with pytest.raises(RuntimeError) as caught:
            await llm.generate(["fine", "bad"], up_to(5))
        assert "out of range" in str(caught.value.__cause__)
        assert len({tuple(output.token_ids) for task in good for output in await task}) == 1
        assert (await llm.stats())["waiting"] == 0


async def test_an_engine_that_sleeps_wakes_up_with_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded again, and tokens are the same; a model that others use, or without a file, is loaded again."""
    tiny("llama", hidden_size=192, intermediate_size=256).save_pretrained(tmp_path)
    loads: list[Any] = []
    load = build.load_checked
    monkeypatch.setattr(build, "load_checked", lambda *args, **more: loads.append(1) or load(*args, **more))
    prompts, params = [[5, 6, 7], [8, 9]], up_to(6, temperature=0)
    async with AsyncLLM(str(tmp_path), **SHARED) as llm:
        expected = tokens_of(await llm.generate(prompts, params))
        for level in (1, 2, 1):
            await llm.sleep(level)
            await llm.sleep(2)
            with pytest.raises(EngineClosed, match="asleep: wake it up"):
                await llm.generate(prompts, params)
            await llm.wake_up()
            await llm.wake_up()
            assert tokens_of(await llm.generate(prompts, params)) == expected and len(loads) == 1
        monkeypatch.setenv("PAGETIDE_CACHE_SIZE", "0")
        for _ in range(2):
            await llm.sleep()
            monkeypatch.setattr(build, "acquire_lease", _no_memory)
            with pytest.raises(NotEnoughMemory):
                await llm.wake_up()
            monkeypatch.setattr(build, "acquire_lease", ACQUIRE)
            await llm.wake_up()
            assert tokens_of(await llm.generate(prompts, params)) == expected
        model = weakref.ref(llm._engine_thread.open().core.runner.model)
    assert model() is None, "it is free when the engine has ended"
    with pytest.raises(EngineClosed):
        await llm.sleep()
    with pytest.raises(EngineClosed):
        await llm.wake_up()


async def test_cancelled_changes_go_on_and_stop_waits_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine at a time, whatever calls are cancelled or come at once; none of it is left after `stop`."""
    tiny("llama").save_pretrained(tmp_path)
    entered, goes = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slowly(*arguments: Any) -> Any:
        loop.call_soon_threadsafe(entered.set)
        assert goes.wait(30)
        return ACQUIRE(*arguments)

    async def waking() -> asyncio.Task[None]:
        entered.clear(), goes.clear()
        task = asyncio.create_task(llm.wake_up())
        await entered.wait()
        return task

    llm, earlier = AsyncLLM(str(tmp_path), **SHARED), _steppers()
    kept = weakref.ref(llm._engine_thread.open().kept)
    running, falling = asyncio.create_task(llm.generate([5, 6], LONG)), None
    await until(lambda: llm._manager.has_work)
    await llm.pause()
    falling = asyncio.create_task(llm.sleep(2, timeout_s=None))
    await asyncio.sleep(0)
    falling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await falling
    assert (await running)[0].finish_reason == "aborted"
    monkeypatch.setattr(build, "acquire_lease", slowly)
    cancelled = await waking()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    others = [asyncio.create_task(one) for one in (llm.wake_up(), llm.sleep(), llm.sleep(2), llm.wake_up())]
    goes.set()
    await asyncio.gather(*others)
    await llm.wake_up()
    assert len(await llm.generate([5, 6], up_to(3))) == 1 and len(_steppers()) == len(earlier)
    await llm.sleep()
    last = await waking()
    stopping = asyncio.create_task(llm.stop())
    goes.set()
    await asyncio.gather(last, stopping)
    assert len(_steppers()) == len(earlier) - 1 and kept() is None
    for again in (llm.wake_up, llm.sleep):
        with pytest.raises(EngineClosed, match="is closed"):
            await again()


def _steppers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "pagetide-steps"]


async def test_a_sleeper_that_is_stopped_is_freed_and_a_changed_checkpoint_is_loaded(tmp_path: Path) -> None:
    model, other = tiny("llama", hidden_size=192), tiny("llama", hidden_size=192, seed=1)
    model.save_pretrained(tmp_path)
    async with AsyncLLM(str(tmp_path), **SHARED) as llm:
        kept = weakref.ref(llm._engine_thread.open().kept)
        first = tokens_of(await llm.generate([[5, 6]], up_to(8, temperature=0)))
        await llm.sleep(2)
        other.save_pretrained(tmp_path)
        await llm.wake_up()
        second = tokens_of(await llm.generate([[5, 6]], up_to(8, temperature=0)))
        kept_now = weakref.ref(llm._engine_thread.open().kept)
        assert kept_now() is not kept() and second != first
        await llm.sleep()
    assert kept_now() is None
    async with AsyncLLM(other, **SHARED) as llm:
        assert tokens_of(await llm.generate([[5, 6]], up_to(8, temperature=0))) == second


async def test_requests_go_on_after_a_sleep_that_suspends_them(llm: AsyncLLM, tmp_path: Path) -> None:
    """With the tokens of an engine that never slept; one that is stopped meanwhile ends them as aborted."""
    params, prompts = up_to(40, temperature=0), [[5, 6, 7], [*range(5, 40)]]
    expected = tokens_of(await llm.generate(prompts, params))
    tiny("llama").save_pretrained(tmp_path)
    sleeper = AsyncLLM(str(tmp_path), **SHARED, host_kv_memory=MIB)
    stream, left = sleeper.stream(prompts[1], params), sleeper.stream([9, 8], LONG)
    told = (await anext(stream)).token_ids
    await anext(left)
    running = asyncio.create_task(sleeper.generate(prompts, params))
    await go_on_for(sleeper, 4)
    await sleeper.sleep(suspends=True)
    assert sleeper._manager.engine is None and not running.done()
    with pytest.raises(EngineClosed, match="asleep: wake it up"):
        await sleeper.generate([5], up_to(3))
    await left.aclose()
    await sleeper.wake_up()
    sleeper.resume()
    assert tokens_of(await running) == expected
    assert told + [token async for chunk in stream for token in chunk.token_ids] == expected[1]
    assert is_idle(sleeper)
    last = asyncio.create_task(sleeper.generate([5, 6], LONG))
    await until(lambda: sleeper._manager.has_work)
    await sleeper.sleep(2, suspends=True)
    await sleeper.stop()
    assert (await last)[0].finish_reason == "aborted"


async def test_a_loaded_model_keeps_its_weights_in_a_sleep() -> None:
    model = tiny("llama")
    async with AsyncLLM(model, **SHARED) as llm:
        expected = tokens_of(await llm.generate([[5, 6]], up_to(4, temperature=0)))
        await llm.sleep()
        await llm.wake_up()
        assert tokens_of(await llm.generate([[5, 6]], up_to(4, temperature=0))) == expected


def _no_memory(*arguments: Any) -> None:
    raise NotEnoughMemory(2, 1, "the model", "free some")
