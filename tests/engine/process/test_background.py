"""Threads that go on after a fault, and say so."""

from __future__ import annotations

import threading

import pytest
from monitors import wait_until

from pagetide import LLM, SamplingParams
from pagetide.engine.memory.engine_memory import EngineMemory
from pagetide.engine.process.background import BackgroundThread
from pagetide.engine.requests.manager import KEEPER_BUSY_WAIT_S


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
        serve, failed, again = llm._manager._serve_memory, threading.Event(), threading.Event()

        def broken() -> float | None:
            if not failed.is_set():
                failed.set()
                raise RuntimeError("planted")
            again.set()
            return serve()

        monkeypatch.setattr(llm._manager, "_serve_memory", broken)
        llm.generate(["the sea"] * 40, SamplingParams(max_new_tokens=64, ignore_eos=True), progress=False)
        grown = llm.stats()["memory"]["grown_bytes"]
        assert grown > 0 and failed.wait(30) and again.wait(30)
        wait_until(lambda: llm.stats()["memory"]["given_back_bytes"], "idle memory to go")
        told = {"alive": True, "faults": 1, "last_fault": "RuntimeError: planted"}
        assert llm.stats()["threads"]["pagetide-memory"] == told


def test_the_memory_thread_leaves_steps_to_a_caller_that_makes_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries keep buffers for each thread that computes."""
    with LLM("demo", device="cpu", share=False, kv_memory={"min": "1MiB", "max": "8MiB"}) as llm:
        manager, steps = llm._manager, list[int]()
        llm.generate("the sea", SamplingParams(max_new_tokens=2), progress=False)
        assert manager.open().core.clock() - manager._stepped_at < 60.0
        with monkeypatch.context() as patch:
            patch.setattr(EngineMemory, "due", property(lambda self: True))
            patch.setattr(manager, "_advance", lambda engine, ahead=True: steps.append(threading.get_ident()))
            patch.setattr("pagetide.engine.requests.manager.STEPPING_S", 3600.0)  # no machine takes so long
            for ago_s, made in ((0.0, 0), (1800.0, 0), (7200.0, 1)):
                manager._stepped_at = manager.open().core.clock() - ago_s
                assert manager._serve_memory() == KEEPER_BUSY_WAIT_S  # as the thread does, which may do so too
                assert steps.count(threading.get_ident()) == made
