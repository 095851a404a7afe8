"""Threads that go on after a fault, and say so."""

from __future__ import annotations

import threading

import pytest
from monitors import wait_until

from pagetide import LLM, SamplingParams
from pagetide.engine.process.background import BackgroundThread


@pytest.mark.parametrize("error", [RuntimeError("planted"), MemoryError(), SystemExit(3)])
def test_a_turn_that_raises_is_counted_and_the_next_one_comes(error: BaseException, caplog) -> None:
    turns = iter([True, error, error, True, False])

    def turn() -> bool:
        what = next(turns)
        if isinstance(what, BaseException):
            raise what
        return what

    thread = BackgroundThread("a name", turn, pause_s=0.0)
    assert thread.to_dict() == {"alive": False, "faults": 0, "last_fault": None}
    thread.start()
    thread.join(30)
    told = f"{type(error).__name__}: {error}"
    assert thread.to_dict() == {"alive": False, "faults": 2, "last_fault": told}
    assert next(turns, None) is None and caplog.text.count("the thread a name failed; it continues") == 2


def test_the_memory_thread_of_an_engine_survives_its_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is idle goes back though the thread has failed, and the statistics tell of the fault."""
    with LLM("demo", device="cpu", kv_memory={"min": "1MiB", "max": "8MiB"}, share=False, idle_s=0.2) as llm:
        serve, failed, again = llm._engine_thread._serve_memory, threading.Event(), threading.Event()

        def broken() -> float:
            if not failed.is_set():
                failed.set()
                raise RuntimeError("planted")
            again.set()
            return serve()

        monkeypatch.setattr(llm._engine_thread, "_serve_memory", broken)
        llm.generate(["the sea"] * 40, SamplingParams(max_new_tokens=64, ignore_eos=True), progress=False)
        grown = llm.stats()["memory"]["grown_bytes"]
        assert grown > 0 and failed.wait(30) and again.wait(30)
        wait_until(lambda: llm.stats()["memory"]["given_back_bytes"], "idle memory to go")
        told = {"alive": True, "faults": 1, "last_fault": "RuntimeError: planted"}
        assert llm.stats()["threads"]["pagetide-memory"] == told
