"""What an engine makes of a self-check: on a CPU nothing, on CUDA the parts that failed are not used."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from pagetide import LLM
from pagetide.allocator.errors import DriverUnavailable
from pagetide.engine import build as building
from pagetide.engine import executor
from pagetide.engine.build import build
from pagetide.engine.config import EngineConfig
from pagetide.engine.errors import ConfigError
from pagetide.engine.self_check import check as checking
from pagetide.engine.self_check.report import FAILED, PARTS, PASSED, CheckReport, PartOutcome

CONFIG = EngineConfig.resolve("demo", device="cpu", kv_memory="16MiB", share=False, host_kv_memory="8MiB")


def report(*failed: str) -> CheckReport:
    outcomes = [PartOutcome(part, *((FAILED, "it crashed") if part in failed else (PASSED, None))) for part in PARTS]
    return CheckReport("cuda:0", {"name": "NVIDIA H200", "driver": "580.82.07"}, tuple(outcomes), True, "/cache/x.json")


def noted(monkeypatch: pytest.MonkeyPatch, checked: CheckReport | None) -> dict[str, dict[str, Any]]:
    """What `build` asks for where a device's parts matter, by call."""
    asked: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(building, "_self_check", lambda config: checked)

    def call(name: str, inner: Any, *arguments: Any, **given: Any) -> Any:
        asked[name] = given
        return inner(*arguments, **given)

    for name in ("_open_pool", "open_host_pool", "choose", "make_runner"):
        monkeypatch.setattr(building, name, partial(call, name, getattr(building, name)))
    return asked


@pytest.mark.parametrize("failed", [(), ("pool", "triton", "graphs"), ("swaps", "varlen")])
def test_an_engine_does_without_each_part_that_failed(monkeypatch: pytest.MonkeyPatch, failed: tuple[str, ...]) -> None:
    asked = noted(monkeypatch, report(*failed))
    with closing(build(CONFIG)) as engine:
        told = engine.stats()["self_check"]
    assert asked["_open_pool"] == {"elastic": "pool" not in failed}
    assert asked["open_host_pool"] == {"pins": "swaps" not in failed}
    assert asked["make_runner"]["captures"] is ("graphs" not in failed)
    assert set(asked["choose"]["faults"]) == set(failed)
    assert told["state"] == (FAILED if failed else PASSED)
    assert {part for part, one in told["parts"].items() if one["state"] == FAILED} == set(failed)


def test_an_attention_that_was_asked_for_and_failed_is_refused_before_anything_is_loaded(monkeypatch) -> None:
    noted(monkeypatch, report("triton"))
    monkeypatch.setattr(building, "load_checked", lambda *arguments: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="attention='triton' failed in the self-check of cpu: it crashed"):
        build(replace(CONFIG, attention="triton"))


def test_a_pool_that_failed_or_has_no_driver_is_one_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*shape: Any, **options: Any) -> None:
        raise DriverUnavailable("no cuda-bindings")

    def opened(elastic: bool) -> Any:
        return executor.open_arena(plan, torch.device("cuda", 0), elastic=elastic)

    plan = building.plan_only(CONFIG)
    monkeypatch.setattr(executor, "CudaArena", lambda *shape, **options: "extents")
    monkeypatch.setattr(executor, "TensorArena", lambda *shape: "one")
    assert (opened(elastic=True), opened(elastic=False)) == ("extents", "one")
    monkeypatch.setattr(executor, "CudaArena", missing)
    assert opened(elastic=True) == "one"


@pytest.mark.parametrize(("self_check", "indices"), [(True, [1]), (False, [])])
def test_on_cuda_it_runs_before_anything_else_and_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, self_check: bool, indices: list[int]
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(building, "choose_device", lambda device: torch.device("cuda", 1))

    def check(index: int) -> CheckReport:
        asked.append(index)
        found = report("graphs")
        checking.say(found)
        return found

    monkeypatch.setattr(checking, "at_start", check)
    found = building._self_check(replace(CONFIG, self_check=self_check))
    assert asked == indices
    assert found == (report("graphs") if self_check else None)
    assert ("graphs failed and is disabled: it crashed" in caplog.text) is self_check


def test_on_a_cpu_nothing_of_it_is_imported_and_the_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("pagetide.engine.self_check")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pagetide.engine.self_check", None)  # importing it raises
    with LLM("demo", device="cpu", kv_memory="16MiB", share=False) as llm:
        assert llm.stats()["self_check"] == {"state": "not run", "reason": "the device is a CPU"}


def test_an_engine_that_wants_none_says_so() -> None:
    with closing(build(CONFIG)) as engine:
        on_cuda = replace(engine, plan=replace(engine.plan, device="cuda:0"))
        assert on_cuda.stats()["self_check"] == {"state": "not run", "reason": "self_check=False"}
