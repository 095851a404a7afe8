"""`LLM.locked_engine`: the engine's parts, held still for tools that measure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from families import VOCAB, tiny
from monitors import wait_until

from pagetide import LLM, SamplingParams
from pagetide.engine.errors import EngineClosed
from pagetide.scheduler.request import Request, Sampling

PROMPT = [5, 9, 3]
GREEDY = SamplingParams(max_new_tokens=10, temperature=0, ignore_eos=True)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(tiny("llama"), kv_memory="1MiB", share=False, overlap=True) as llm:
        yield llm


def test_it_is_the_engine_and_no_step_is_pending(llm: LLM) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    tokens = [*next(stream).token_ids]
    assert llm._manager.engine is not None and llm._manager.engine.core.is_ahead
    before = llm.stats()["steps"]
    with llm.locked_engine() as engine:
        assert engine is llm._manager.engine and engine.encoder.vocab_size == VOCAB
        assert not engine.core.is_ahead
        assert before <= llm.stats()["steps"] <= engine.core.scheduler.stats.steps, "earlier ones are told from within"
    for chunk in stream:
        tokens += chunk.token_ids
    expected, own = llm.generate(PROMPT, GREEDY)[0].token_ids, list[int]()
    assert tokens == expected, "what was pending reached its caller"
    with llm.locked_engine() as engine:  # a tool makes steps of its own
        engine.core.add(Request("own", np.array(PROMPT, np.int32), Sampling(10), arrival=engine.core.clock()))
        while engine.core.has_work:
            own += engine.core.step().tokens
    assert own == expected


def test_other_threads_wait_until_it_is_let_go(llm: LLM) -> None:
    outputs: list[Any] = []
    thread = threading.Thread(target=lambda: outputs.extend(llm.generate(PROMPT, GREEDY)))
    with llm.locked_engine() as engine:
        thread.start()
        wait_until(lambda: llm._engine_thread._inbox.qsize(), "the thread to wait")
        assert engine.core.scheduler.stats.steps == 0
    thread.join()
    assert len(outputs[0].token_ids) == 10


def test_a_call_from_within_is_refused_and_takes_nothing(llm: LLM) -> None:
    with llm.locked_engine() as engine:
        for call in (llm.explain, lambda: llm.generate(PROMPT, GREEDY), llm.locked_engine().__enter__):
            with pytest.raises(RuntimeError, match=r"inside locked_engine\(\)"):
                call()
            assert llm._engine_thread.is_inside, "still held"
            assert not engine.core.has_work
    assert llm.stats()["running"] == 0


def test_what_a_tool_raises_lets_the_engine_go(llm: LLM) -> None:
    with pytest.raises(ZeroDivisionError), llm.locked_engine():
        _ = 1 // 0
    assert len(llm.generate(PROMPT, GREEDY)[0].token_ids) == 10


def test_a_closed_engine_is_not_given(llm: LLM) -> None:
    llm.close()
    with pytest.raises(EngineClosed), llm.locked_engine():
        pass
    assert not llm._engine_thread.is_inside
