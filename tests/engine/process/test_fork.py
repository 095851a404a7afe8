"""A forked child of a process with an engine is told at once that it has none; the parent's goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from pagetide import LLM, AsyncLLM, SamplingParams
from pagetide.engine.errors import EngineClosed

OPTIONS = {"device": "cpu", "kv_memory": "8MiB", "share": False}
SHORT = SamplingParams(max_new_tokens=4, temperature=0)
LONG = SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True)


def in_a_fork(does: Callable[[], None]) -> str:
    """What `does` raises in a forked child, which has a minute."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(60)
        told = "nothing was raised"
        try:
            does()
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        finally:
            os.write(write, told.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        told = file.read()
    assert os.waitpid(child, 0)[1] == 0, "the child hung"
    return told


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate([5], SHORT),
    "stream": lambda llm: list(llm.stream([5], SHORT)),
    "stats": lambda llm: llm.stats(),
    "explain": lambda llm: llm.explain(),
    "close": lambda llm: llm.close(),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in a step of another thread"])
def test_a_forked_child_has_no_engine(llm: LLM, busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate([5], SHORT)[0].token_ids
    long: list[object] = []
    thread = threading.Thread(target=lambda: long.extend(llm.generate([[6], [7]], LONG, progress=False)))
    if busy:
        inside, goes_on = threading.Event(), threading.Event()
        runner = llm._manager.open().core.runner
        begin = runner.begin

        def slow(plan):
            inside.set()
            assert goes_on.wait(60)
            return begin(plan)

        monkeypatch.setattr(runner, "begin", slow)
        thread.start()
        assert inside.wait(60)
    told = {name: in_a_fork(lambda call=call: call(llm)) for name, call in CALLS.items()}
    if busy:
        goes_on.set()
        thread.join()
        assert [output.finish_reason for output in long] == ["length", "length"]
    for name, raised in told.items():
        assert raised.startswith("EngineClosed: ") and "is a fork of it" in raised, name
    assert llm.generate([5], SHORT)[0].token_ids == expected


async def test_an_async_engine_in_a_fork() -> None:
    async def awaited(call) -> None:
        await call()

    async with AsyncLLM("demo", **OPTIONS) as llm:
        expected = (await llm.generate([5], SHORT))[0].token_ids
        task = asyncio.create_task(llm.generate([6], LONG))
        await asyncio.sleep(0)
        for call in (lambda: llm.generate([5], SHORT), lambda: llm.pause(), lambda: llm.stop()):
            told = in_a_fork(lambda call=call: asyncio.run(awaited(call)))
            assert told.startswith("EngineClosed: ") and "is a fork of it" in told
        assert (await llm.generate([5], SHORT))[0].token_ids == expected
        assert (await task)[0].finish_reason == "length"
        await llm.sleep()
        for call in (llm.sleep, llm.wake_up, llm.stop):
            told = in_a_fork(lambda call=call: asyncio.run(awaited(call)))
            assert told.startswith("EngineClosed: ") and "is a fork of it" in told
        await llm.wake_up()
        assert (await llm.generate([5], SHORT))[0].token_ids == expected


def test_leaving_a_with_block_in_a_fork_is_quiet(llm: LLM) -> None:
    def leaves() -> None:
        llm.__exit__(None, None, None)
        raise EngineClosed("left")

    assert in_a_fork(leaves) == "EngineClosed: left"
    assert llm.generate([5], SHORT)[0].finish_reason == "length"
