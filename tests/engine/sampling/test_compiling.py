"""Constraints are compiled once each, before a request is queued, and other requests do not wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import pagetide
from pagetide import LLM, AsyncLLM, RequestRejected, SamplingParams
from pagetide.engine.errors import EngineClosed
from pagetide.engine.sampling.constraints import Constraints
from pagetide.scheduler.request import Constraint

pytest.importorskip("llguidance")

TOKENIZER = AutoTokenizer.from_pretrained(Path(pagetide.__file__).resolve().parents[1] / "engine" / "demo_model")
SLOW, QUICK = "[ab]{3}", "[cd]{3}"
FAR_S = 60.0  # for what comes at once, or never
OPTIONS: dict[str, Any] = {"device": "cpu", "kv_memory": "1MiB", "share": False}


class Compiler:
    """Stands in the way of `Constraints.compiled`: SLOW takes until it is let go."""

    def __init__(self, real: Callable[[Constraints, Constraint], Any]) -> None:
        self.real = real
        self.begun = threading.Event()
        self.let_go = threading.Event()
        self.texts: list[str] = []

    def __call__(self, constraints: Constraints, constraint: Constraint) -> Any:
        self.texts.append(constraint[1])
        if constraint[1] == SLOW:
            self.begun.set()
            assert self.let_go.wait(FAR_S)
        return self.real(constraints, constraint)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    made = Compiler(Constraints.compiled)
    monkeypatch.setattr(Constraints, "compiled", lambda self, constraint: made(self, constraint))
    yield made
    made.let_go.set()


def asking(regex: str) -> SamplingParams:
    return SamplingParams(regex=regex, temperature=1.0, seed=0, max_new_tokens=20)


def test_it_is_compiled_once_for_all_who_ask_meanwhile(compiler: Compiler) -> None:
    constraints = Constraints(TOKENIZER, len(TOKENIZER))
    with ThreadPoolExecutor(4) as elsewhere:
        asked = [elsewhere.submit(constraints.of(("regex", SLOW)).compile) for _ in range(4)]
        assert compiler.begun.wait(FAR_S)
        compiler.let_go.set()
        for one in asked:
            one.result(FAR_S)
    assert compiler.texts == [SLOW]


def test_a_long_complaint_is_cut() -> None:
    with pytest.raises(RequestRejected) as refused:
        Constraints(TOKENIZER, len(TOKENIZER)).of(("grammar", "start: " + "x" * 100_000)).compile()
    assert len(str(refused.value)) < 500


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **OPTIONS) as made:
        yield made


def test_other_threads_generate_meanwhile(llm: LLM, compiler: Compiler) -> None:
    """And once it is queued the engine compiles nothing any more, however many others come."""
    with ThreadPoolExecutor(1) as elsewhere:
        slow = elsewhere.submit(llm.generate, "The sea", asking(SLOW))
        assert compiler.begun.wait(FAR_S)
        (quick,) = llm.generate("The sea", asking(QUICK))
        assert llm.stats()["running"] == llm.stats()["waiting"] == 0
        compiler.let_go.set()
        (output,) = slow.result(FAR_S)
    assert set(quick.text or "") <= {"c", "d"} and set(output.text or "") <= {"a", "b"}
    assert compiler.texts == [SLOW, QUICK]


def test_a_request_that_runs_is_never_compiled_for_again(llm: LLM, compiler: Compiler) -> None:
    compiler.let_go.set()
    constraints = llm._manager.open().encoder.constraints
    for chunk in llm.stream("The sea", asking("[ab]{9}")):
        for i in range(70):
            constraints.of(("regex", f"{len(compiler.texts)} {i}"))  # each a new one
        assert constraints.matcher(("regex", "[ab]{9}")) is not None  # as when it is admitted again
        assert chunk is not None
    assert compiler.texts == ["[ab]{9}"]


def test_several_prompts_of_one_call_are_prepared_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, params = llm._manager, SamplingParams(bad_words=["x", "y"], stop="z", max_new_tokens=1)
    asked = manager.intake.encode(["a", "b", "c", "d"], [params, params, SamplingParams(), params])
    assert [one.prepared is asked[0].prepared for one in asked] == [True, True, False, True]


def test_other_tasks_generate_meanwhile_and_a_drain_waits(compiler: Compiler) -> None:
    async def run() -> None:
        async with AsyncLLM("demo", **OPTIONS) as llm:
            slow = asyncio.create_task(llm.generate("The sea", asking(SLOW)))
            await asyncio.to_thread(compiler.begun.wait, FAR_S)
            (quick,) = await asyncio.wait_for(llm.generate("The sea", asking(QUICK)), FAR_S)
            (plain,) = await asyncio.wait_for(llm.generate("The sea", SamplingParams(max_new_tokens=2)), FAR_S)
            assert set(quick.text or "") <= {"c", "d"} and len(plain.token_ids) == 2
            forgotten = asyncio.create_task(llm.generate("The sea", asking("[gh]{2}")))
            await asyncio.sleep(0)
            forgotten.cancel()
            draining = asyncio.create_task(llm.drain())
            await llm.stats()  # the thread has had its turn
            assert not draining.done() and not slow.done()
            compiler.let_go.set()
            (output,) = await asyncio.wait_for(slow, FAR_S)
            assert set(output.text or "") <= {"a", "b"}
            await asyncio.wait_for(draining, FAR_S)
            with pytest.raises(EngineClosed):
                await llm.generate("The sea")

    asyncio.run(run())
