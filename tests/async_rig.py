"""Callers on many event loops at once, a fifth of whom go away at random: `life` checks every token and every end."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from families import tiny

from pagetide import AsyncLLM, EngineClosed, SamplingParams

PATIENCE_S = 120.0

Work = tuple[list[int], SamplingParams, list[int]]  # a prompt, how to continue it, and the tokens that it must give


def works(count: int, oracle: Callable[..., Any], vocab: int = 160) -> list[Work]:
    """Ragged prompts, some of which begin alike; half are greedy."""
    rng = np.random.default_rng(5)
    common = rng.integers(1, vocab, 40).tolist()
    prompts, params = [], []
    for i in range(count):
        own = rng.integers(1, vocab, int(rng.integers(1, 30))).tolist()
        prompts.append((common if i % 3 == 0 else []) + own)
        params.append(SamplingParams(max_new_tokens=2 + i % 17, temperature=float(i % 2), seed=i))
    outputs = oracle(prompts, params)
    return [(p, s, o.token_ids) for p, s, o in zip(prompts, params, outputs, strict=True)]


class Ends:
    """Counts which requests were queued, and which ended, as the core itself tells."""

    def __init__(self, llm: AsyncLLM) -> None:
        core = llm._manager.open().core
        self.added: list[str] = []
        self.finished: list[Any] = []
        step, add = core.step, core.add

        def watched_step(ahead: bool) -> Any:
            emissions = step(ahead)
            self.finished += emissions.finished
            return emissions

        def watched_add(request: Any) -> None:
            add(request)
            self.added.append(request.request_id)

        core.step, core.add = watched_step, watched_add

    def check(self) -> None:
        """One end each."""
        assert sorted(end.request_id for end in self.finished) == sorted(self.added)
        assert {end.reason for end in self.finished} <= {"stop", "length", "aborted"}, self.finished


def is_idle(llm: AsyncLLM) -> bool:
    """Nobody is served, nothing is held."""
    thread, manager = llm._engine_thread, llm._manager
    scheduler = manager.open().core.scheduler
    return (
        thread._calls.is_empty
        and thread._outbox.is_empty
        and not (
            thread._draining
            or manager.delivery.groups
            or manager.has_work
            or scheduler.num_waiting
            or scheduler.cache.pool.counts().live
        )
    )


@contextlib.contextmanager
def loads(shared: dict[str, Any]) -> Iterator[Callable[..., AsyncLLM]]:
    """Makes engines of a tiny model that no token ends, with these options and others, and stops them at the end."""
    made: list[AsyncLLM] = []

    def make(**options: Any) -> AsyncLLM:
        made.append(AsyncLLM(tiny("llama"), **shared | options))
        return made[-1]

    yield make
    for llm in made:
        asyncio.run(llm.stop())


async def until(condition: Callable[[], Any]) -> None:
    """Wait for what another thread does."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


def run_threads(*targets: Callable[[], None]) -> None:
    """Run all at once; what one raises is raised here. A hang shows where each thread is."""
    errors: list[BaseException] = []

    def guarded(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback(sys.__stderr__)
        raise AssertionError("a thread hangs")
    if errors:
        raise errors[0]


async def generated(llm: AsyncLLM, work: Work) -> str:
    prompt, params, expected = work
    (output,) = await llm.generate(prompt, params)
    assert (output.token_ids, output.finish_reason) == (expected, "length")
    return "done"


async def streamed(llm: AsyncLLM, work: Work) -> str:
    prompt, params, expected = work
    tokens: list[int] = []
    async for chunk in llm.stream(prompt, params, stream_interval=1 + len(prompt) % 3):
        tokens += chunk.token_ids
        if len(prompt) % 5 == 0:
            await asyncio.sleep(0.002)  # slow
    assert (tokens, chunk.finish_reason) == (expected, "length")
    return "done"


async def one_by_one(llm: AsyncLLM, work: Work) -> str:
    prompt, params, expected = work
    outputs = [output async for output in llm.generate_each([prompt] * 2, params, look_ahead=1)]
    assert [output.token_ids for output in outputs] == [expected] * 2
    return "done"


async def cancelled(llm: AsyncLLM, work: Work, after: int) -> str:
    calls = (generated, streamed, one_by_one)
    task = asyncio.create_task(calls[after % 3](llm, work))
    for _ in range(after):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return "left"


async def timed_out(llm: AsyncLLM, work: Work, after: int) -> str:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(after / 1000):
            await (generated, streamed)[after % 2](llm, work)
    return "left"


async def closed(llm: AsyncLLM, work: Work, after: int) -> str:
    stream = llm.stream(work[0], work[1])
    for _ in range(after % 4):
        with contextlib.suppress(StopAsyncIteration):
            await anext(stream)
    await stream.aclose()
    await stream.aclose()
    assert [chunk async for chunk in stream] == []
    return "left"


async def broken_off(llm: AsyncLLM, work: Work, after: int) -> str:
    async for _ in llm.stream(work[0], work[1]):
        break
    async for _ in llm.generate_each([work[0]] * 3, work[1]):
        break
    return "left"


async def collected(llm: AsyncLLM, work: Work, after: int) -> str:
    cycle: dict[str, Any] = {"stream": llm.stream(work[0], work[1])}
    cycle["self"] = cycle
    await anext(cycle["stream"])
    del cycle
    gc.collect(0)
    return "left"


async def left_to_its_loop(llm: AsyncLLM, work: Work, after: int) -> str:
    """Another thread's loop is closed while it has a stream open and a call under way."""

    def run() -> None:
        loop = asyncio.new_event_loop()
        stream = llm.stream(work[0], work[1])
        loop.run_until_complete(anext(stream))
        call = loop.create_task(generated(llm, work))
        for _ in range(1 + after % 5):
            loop.run_until_complete(asyncio.sleep(0))
        if after % 2:
            loop.run_until_complete(asyncio.sleep(0.005))
        call._log_destroy_pending = False  # so it is meant
        loop.close()
        kept.append((stream, call))  # not even collected

    await asyncio.to_thread(run)
    return "left"


kept: list[Any] = []
WAYS_IN = (generated, generated, streamed, streamed, one_by_one)
WAYS_OUT = (cancelled, cancelled, timed_out, closed, broken_off, collected, left_to_its_loop)


async def _caller(llm: AsyncLLM, work: Work, rng: random.Random) -> str:
    await asyncio.sleep(rng.random() / 20)
    if rng.random() < 0.2:
        return await rng.choice(WAYS_OUT)(llm, work, rng.randrange(40))
    return await rng.choice(WAYS_IN)(llm, work)


def life(llm: AsyncLLM, catalogue: list[Work], seed: int, *, threads: int = 8, tasks: int = 500) -> Counter[str]:
    """So many tasks on the loops of so many threads. Returns how many were done, and how many left; all else is checked."""
    before, ends, seen = set(threading.enumerate()), Ends(llm), Counter[str]()

    def run(number: int) -> None:
        rng = random.Random(f"{seed} {number}")

        async def main() -> list[str]:
            mine = tasks // threads + (number < tasks % threads)
            callers = [_caller(llm, rng.choice(catalogue), random.Random(rng.random())) for _ in range(mine)]
            ended = await asyncio.gather(*callers)
            gc.collect(0)
            await until(lambda: len(asyncio.all_tasks()) == 1)  # generators left to the collector are closed in tasks
            return ended

        seen.update(asyncio.run(main()))

    run_threads(*(lambda number=number: run(number) for number in range(threads)))
    gc.collect()
    asyncio.run(until(lambda: is_idle(llm)))
    kept.clear()
    ends.check()
    llm._manager.open().core.scheduler.check_invariants()
    left = {thread.name.partition("_")[0] for thread in set(threading.enumerate()) - before}
    assert left <= {"pagetide-encode", "pagetide-swaps"}, left  # which begin with their first work
    assert sum(seen.values()) == tasks
    return seen


def stopped_under_fire(llm: AsyncLLM, catalogue: list[Work], loops: int = 4) -> None:
    """Callers on several loops that do not cease, until they are told that it is stopped; each call has its tokens or that."""
    ends, begun = Ends(llm), threading.Semaphore(0)

    async def calls(rng: random.Random) -> None:
        with contextlib.suppress(EngineClosed):
            while True:
                prompt, params, expected = rng.choice(catalogue)
                (output,) = await llm.generate(prompt, params)
                assert output.token_ids == expected[: len(output.token_ids)]
                assert output.finish_reason == ("length" if output.token_ids == expected else "aborted")
                begun.release()

    async def callers(number: int) -> None:
        await asyncio.gather(*(calls(random.Random(10 * number + i)) for i in range(5)))

    def stop() -> None:
        for _ in range(20):
            assert begun.acquire(timeout=PATIENCE_S)
        asyncio.run(llm.stop())

    run_threads(stop, *(lambda number=number: asyncio.run(callers(number)) for number in range(loops)))
    ends.check()
    assert not llm._engine_thread.is_alive()


@contextlib.contextmanager
def switched_every(interval_s: float) -> Iterator[None]:
    """Within, threads are switched so often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval_s)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
