"""Weights in a CUDA arena over a driver that is not there: faults at all calls of a move and a sleep, many sleeps, a lease."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from arena_rig import CPU, Rig, checked_rig
from families import tiny
from monitors import wait_until

from pagetide.allocator.broker_client import BrokerClient
from pagetide.allocator.errors import AllocatorError
from pagetide.engine.config import EngineConfig
from pagetide.engine.loading.arena_weights import ArenaWeights
from pagetide.engine.loading.checkpoint import Checkpoint
from pagetide.engine.memory.lease_holder import Sharing, lease_host_copy
from pagetide.engine.memory.planning import plan_memory
from pagetide.monitor.watching import watch

MIB = 1 << 20


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Rig]:
    yield from checked_rig(monkeypatch, caplog)


def test_a_fault_at_any_call_of_a_move_leaves_the_model_as_it_was(rig: Rig) -> None:
    expected, failed = rig.logits(), 0
    for number in itertools.count():
        rig.fail(number)
        try:
            weights = rig.sleepers()
        except AllocatorError:
            failed += 1
        else:
            if not rig.failed:
                break
            rig.driver.faults = []
            del weights  # a later call made up for it
            rig.model = tiny("llama")
        rig.driver.faults = []
        gc.collect()
        assert torch.equal(rig.logits(), expected), number
        assert rig.driver.leaks() == [] and rig.leased == [], number
    rig.driver.faults = []
    assert failed > 50


@pytest.mark.parametrize("level", [1, 2])
def test_a_fault_at_any_call_of_a_sleep_is_made_up_for_by_the_next(rig: Rig, level: Any) -> None:
    expected, weights, failed = rig.logits(), rig.sleepers(), 0
    for number in itertools.count():
        rig.fail(number)
        try:
            weights.drop(level)
        except AllocatorError:
            failed += 1
        else:
            if not rig.failed:
                break
        rig.driver.faults = []
        weights.drop(level)
        assert rig.driver.taken_bytes == 0 and len(rig.driver.locked) == len(rig.leased) == (level == 1), number
        weights.fill()
        assert torch.equal(rig.logits(), expected), number
    rig.driver.faults = []
    assert failed > 5


def test_a_hundred_sleeps_take_no_memory(rig: Rig) -> None:
    expected, weights = rig.logits(), rig.sleepers()

    def resident(count: int) -> int:
        for number in range(count):
            weights.drop(1 + number % 2)  # type: ignore[arg-type]
            weights.fill()
            assert torch.equal(rig.logits(), expected)
        rig.driver.calls.clear()
        gc.collect()
        return int(psutil.Process().memory_info().rss)

    before = resident(30)
    assert resident(100) <= before + 4 * MIB


def test_the_copy_on_the_host_is_leased_while_it_takes_memory(rig: Rig, tmp_path: Any) -> None:
    rig.model.save_pretrained(tmp_path)
    config = EngineConfig.resolve(str(tmp_path), device="cpu", kv_memory="1MiB")
    plan = plan_memory(config, Checkpoint.open(config.model), CPU, torch.float32)

    def acquire(size: int) -> Sharing | None:
        return lease_host_copy(config, plan, size)

    weights = ArenaWeights.of(rig.model, CPU, acquire)
    with watch() as watched:

        def leases() -> list[Any]:
            return [one for one in BrokerClient(watched.directory.socket).leases() if one.pid == psutil.Process().pid]

        (one,) = leases()
        assert one.name == f"{plan.model}/copy" and one.granted_bytes == one.min_bytes == weights.num_bytes
        held = {"weights": weights.num_bytes}
        wait_until(lambda: leases()[0].held == held)
        weights.drop(1)
        assert len(leases()) == 1
        weights.drop(2)
        wait_until(lambda: leases() == [])
        weights.fill()
        assert len(leases()) == 1
        del weights
        rig.model = None
        gc.collect()
        wait_until(lambda: leases() == [])
