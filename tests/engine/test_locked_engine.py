"""`LLM.locked_engine`: the engine's parts, held still for tools that measure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from families import VOCAB, tiny
from monitors import wait_until

from pagetide import LLM, SamplingParams
from pagetide.engine.errors import EngineClosed
from pagetide.scheduler.request import Request, Sampling

PROMPT = [5, 9, 3]
GREEDY = SamplingParams(max_new_tokens=30, temperature=0, ignore_eos=True)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(tiny("llama"), kv_memory="1MiB", share=False, overlap=True) as llm:
        yield llm


def test_it_is_the_engine_and_no_step_is_pending(llm: LLM) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    tokens = [*next(stream).token_ids]
    assert llm._manager.engine is not None and llm._manager.engine.core.is_ahead
    with llm.locked_engine() as engine:
        assert engine is llm._manager.engine and engine.encoder.vocab_size == VOCAB
        assert not engine.core.is_ahead
        steps = engine.core.scheduler.stats.steps
    assert llm.stats()["steps"] == steps
    for chunk in stream:
        tokens += chunk.token_ids
    assert tokens == llm.generate(PROMPT, GREEDY)[0].token_ids, "what was pending reached its caller"


def test_other_threads_wait_until_it_is_let_go(llm: LLM) -> None:
    outputs: list[Any] = []
    thread = threading.Thread(target=lambda: outputs.extend(llm.generate(PROMPT, GREEDY)))
    with llm.locked_engine() as engine:
        thread.start()
        wait_until(lambda: llm._manager.lock._waiting, "the thread to wait")
        assert engine.core.scheduler.stats.steps == 0
    thread.join()
    assert len(outputs[0].token_ids) == 30


def test_a_tool_makes_steps_of_its_own(llm: LLM) -> None:
    expected = llm.generate(PROMPT, GREEDY)[0].token_ids
    tokens: list[int] = []
    with llm.locked_engine() as engine:
        engine.core.add(Request("own", np.array(PROMPT, np.int32), Sampling(30), arrival=engine.core.clock()))
        while engine.core.has_work:
            tokens += engine.core.step().tokens
    assert tokens == expected


@pytest.mark.parametrize(
    "call",
    [lambda llm: llm.explain(), lambda llm: llm.generate(PROMPT, GREEDY), lambda llm: llm.locked_engine().__enter__()],
)
def test_a_call_from_within_is_refused_and_takes_nothing(llm: LLM, call: Callable[[LLM], object]) -> None:
    with llm.locked_engine() as engine:
        with pytest.raises(RuntimeError, match=r"inside locked_engine\(\)"):
            call(llm)
        assert not llm._manager.lock.acquire(blocking=False), "still locked"
        assert not engine.core.has_work
    assert llm.stats()["running"] == 0


def test_statistics_are_told_from_within(llm: LLM) -> None:
    with llm.locked_engine():
        assert llm.stats()["running"] == 0


def test_what_a_tool_raises_lets_the_engine_go(llm: LLM) -> None:
    with pytest.raises(ZeroDivisionError), llm.locked_engine():
        _ = 1 // 0
    assert len(llm.generate(PROMPT, GREEDY)[0].token_ids) == 30


def test_a_closed_engine_is_not_given(llm: LLM) -> None:
    llm.close()
    with pytest.raises(EngineClosed), llm.locked_engine():
        pass
    assert llm._manager.lock.acquire(blocking=False)
