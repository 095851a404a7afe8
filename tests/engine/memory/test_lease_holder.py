"""An engine's lease without a broker: what counts of a process, and engines that find nobody to share with, or do not share."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pagetide import LLM, SamplingParams
from pagetide.allocator.errors import MinimumsExceedCapacity
from pagetide.allocator.host_arena import HostArena
from pagetide.engine.errors import NotEnoughMemory
from pagetide.engine.memory import lease_holder
from pagetide.engine.memory.lease_holder import LeaseHolder, release_name, take_name

MIB = 1 << 20


def test_engines_of_one_process_do_not_count_each_others_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagetide.engine.memory.lease_holder.process_bytes", lambda device: 1000 * MIB)
    host, gpu = torch.device("cpu"), torch.device("cuda", 0)
    first, second, elsewhere = LeaseHolder(host, 100 * MIB), LeaseHolder(host, 200 * MIB), LeaseHolder(gpu, 50 * MIB)
    arena = HostArena(4, 4 * MIB)
    arena.map([0, 1])
    try:
        assert (first.base_bytes, second.base_bytes) == (800 * MIB, 900 * MIB)
        second.arena = arena
        assert (first.base_bytes, second.base_bytes) == (792 * MIB, 892 * MIB)
        assert elsewhere.base_bytes == 1000 * MIB
        elsewhere.arena = arena
        assert elsewhere.base_bytes == 1000 * MIB, "torch knows nothing of an arena on CUDA"
        second.uncounted = lambda: 50 * MIB
        assert (first.base_bytes, second.base_bytes) == (842 * MIB, 942 * MIB), "weights that wake up are not in memory yet"
        fourth = LeaseHolder(gpu, 80 * MIB)
        elsewhere.uncounted = lambda: 50 * MIB
        assert (elsewhere.base_bytes, fourth.base_bytes) == (970 * MIB, 1000 * MIB), "nor of weights in an arena there"
        fourth.close()
        second.close()
        second.close()
        assert first.base_bytes == 1000 * MIB
    finally:
        for holder in (first, second, elsewhere):
            holder.close()
        arena.close()


def test_bytes_of_suspended_requests_are_no_engines_while_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagetide.engine.memory.lease_holder.process_bytes", lambda device: 1000 * MIB)
    engine = LeaseHolder(torch.device("cpu"), 100 * MIB)
    try:
        stores = [np.empty((size, MIB), np.uint8) for size in (3, 5)]
        for store in stores:
            LeaseHolder.count(store)
        del store
        assert (engine.base_bytes, LeaseHolder.suspended_bytes()) == (992 * MIB, 8 * MIB)
        stores.pop()
        assert (engine.base_bytes, LeaseHolder.suspended_bytes()) == (997 * MIB, 3 * MIB)
        stores.clear()
        assert (engine.base_bytes, LeaseHolder.suspended_bytes()) == (1000 * MIB, 0)
    finally:
        engine.close()


def test_a_copy_that_is_refused_says_what_the_host_has_and_waits_for_no_other_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an engine that is loading may need less later."""
    there, waited = {"loading": {}, "other/copy": {"weights": 100}}, list[float]()

    class Client:
        def __init__(self, socket: object) -> None:
            self.held = there.copy()

        def leases(self) -> list[Any]:
            of = {"device_uuid": "host", "pid": 0, "granted_bytes": 100}
            return [SimpleNamespace(name=name, held=held, **of) for name, held in self.held.items()]

    def refuse(*_: object, **terms: object) -> Any:
        raise MinimumsExceedCapacity("too much")

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        there.pop("loading")

    watched = SimpleNamespace(directory=SimpleNamespace(socket=""), close=lambda: None)
    monkeypatch.setattr(lease_holder, "watch", lambda: watched)
    monkeypatch.setattr(lease_holder, "device_info", lambda *_: SimpleNamespace(uuid="host"))
    monkeypatch.setattr(lease_holder, "free_host_bytes", lambda: 7)
    monkeypatch.setattr(lease_holder, "BrokerClient", Client)
    monkeypatch.setattr(lease_holder.Lease, "register", refuse)
    monkeypatch.setattr(lease_holder, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    config: Any = SimpleNamespace(share=True)
    plan: Any = SimpleNamespace(model="demo", free_bytes=9)
    with pytest.raises(NotEnoughMemory, match="too much") as raised:
        lease_holder.lease_host_copy(config, plan, 100)
    assert (raised.value.asked_bytes, raised.value.free_bytes, len(waited)) == (100, 7, 1)


def test_an_engine_has_the_name_of_its_model_again_after_another_of_that_name_has_ended() -> None:
    assert [take_name("org/demo"), take_name("org/demo"), take_name("a" * 90)] == ["org/demo", "org/demo-2", "a" * 80]
    release_name("org/demo")
    assert [take_name("org/demo"), take_name("org/demo")] == ["org/demo", "org/demo-3"]
    for name in ("org/demo", "org/demo-2", "org/demo-3", "a" * 80):
        release_name(name)


def test_without_a_place_for_a_broker_it_works_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "no folder").write_text("")
    monkeypatch.setenv("PAGETIDE_RUNTIME_DIR", str(tmp_path / "no folder"))
    with caplog.at_level(logging.WARNING, "pagetide.engine.memory.lease_holder"), LLM("demo") as llm:
        assert len(llm.generate([[5, 6]], SamplingParams(max_new_tokens=4, ignore_eos=True))[0].token_ids) == 4
        assert llm.stats()["memory"]["lease"] is None
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and warnings[0].startswith("memory is not shared with other engines: ")


def test_who_does_not_want_to_share_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGETIDE_RUNTIME_DIR", str(tmp_path / "run"))
    with LLM("demo", share=False) as llm:
        assert llm.stats()["memory"]["lease"] is None
    assert not (tmp_path / "run").exists()
