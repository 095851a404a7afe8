"""What an engine makes of a self-check: on a CPU nothing, on CUDA the parts that failed are not used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagetide import LLM
from pagetide.allocator.errors import DriverUnavailable
from pagetide.engine import build as building
from pagetide.engine import executor
from pagetide.engine.build import Engine, build
from pagetide.engine.config import EngineConfig
from pagetide.engine.errors import ConfigError
from pagetide.engine.self_check import check as checking
from pagetide.engine.self_check.report import FAILED, PARTS, PASSED, CheckReport, PartOutcome

CONFIG = EngineConfig.resolve("demo", device="cpu", kv_memory="16MiB", share=False, host_kv_memory="8MiB")


def report(*failed: str) -> CheckReport:
    outcomes = [
        PartOutcome(part, FAILED if part in failed else PASSED, "it crashed" if part in failed else None)
        for part in PARTS
    ]
    return CheckReport("cuda:0", {"name": "NVIDIA H200", "driver": "580.82.07"}, tuple(outcomes), True, "/cache/x.json")


class PromptInput:
    """What `build` asks for where a device's parts matter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, checked: CheckReport | None) -> None:
        self.pool: dict[str, Any] = {}
        self.host: dict[str, Any] = {}
        self.kernel: dict[str, Any] = {}
        self.graphs: bool | None = None
        monkeypatch.setattr(building, "_self_check", lambda config: checked)
        for name, options in (("_open_pool", self.pool), ("open_host_pool", self.host), ("choose", self.kernel)):
            monkeypatch.setattr(building, name, self._noting(getattr(building, name), options))
        make = building.make_runner

        def noting(model: Any, arena: Any, plan: Any, config: EngineConfig, *others: Any, **given: Any) -> Any:
            self.graphs = config.cuda_graphs and given["captures"]
            return make(model, arena, plan, config, *others, **given)

        monkeypatch.setattr(building, "make_runner", noting)

    @staticmethod
    def _noting(call: Any, options: dict[str, Any]) -> Any:
        def noting(*arguments: Any, **given: Any) -> Any:
            options.update(given)
            return call(*arguments, **given)

        return noting


@pytest.fixture
def closing() -> Iterator[list[Engine]]:
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("failed", [(), ("pool", "triton"), ("graphs",), ("swaps", "varlen")])
def test_an_engine_does_without_each_part_that_failed(
    monkeypatch: pytest.MonkeyPatch, closing: list[Engine], failed: tuple[str, ...]
) -> None:
    asked = PromptInput(monkeypatch, report(*failed))
    closing.append(build(CONFIG))
    assert asked.pool == {"elastic": "pool" not in failed}
    assert asked.host == {"pins": "swaps" not in failed}
    assert asked.graphs is ("graphs" not in failed)
    assert set(asked.kernel["faults"]) == set(failed)
    told = closing[0].stats()["self_check"]
    assert told["state"] == (FAILED if failed else PASSED)
    assert {part for part, one in told["parts"].items() if one["state"] == FAILED} == set(failed)


def test_graphs_that_nobody_wants_stay_off(monkeypatch: pytest.MonkeyPatch, closing: list[Engine]) -> None:
    asked = PromptInput(monkeypatch, report())
    closing.append(build(replace(CONFIG, cuda_graphs=False)))
    assert asked.graphs is False


def test_an_attention_that_was_asked_for_and_failed_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    PromptInput(monkeypatch, report("triton"))
    monkeypatch.setattr(building, "load_checked", lambda *arguments: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="attention='triton' failed in the self-check of cpu: it crashed"):
        build(replace(CONFIG, attention="triton"))


@pytest.mark.parametrize("elastic", [True, False])
def test_a_pool_that_failed_is_one_allocation(monkeypatch: pytest.MonkeyPatch, elastic: bool) -> None:
    monkeypatch.setattr(executor, "CudaArena", lambda *shape, **options: ("extents", *shape))
    monkeypatch.setattr(executor, "TensorArena", lambda *shape: ("one", *shape))
    plan = building.plan_only(CONFIG)
    kind, *_ = executor.open_arena(plan, torch.device("cuda", 0), elastic=elastic)  # type: ignore[misc]
    assert kind == ("extents" if elastic else "one")


def test_a_driver_that_is_missing_is_one_allocation_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*shape: Any, **options: Any) -> None:
        raise DriverUnavailable("no cuda-bindings")

    monkeypatch.setattr(executor, "CudaArena", missing)
    monkeypatch.setattr(executor, "TensorArena", lambda *shape: "one")
    assert executor.open_arena(building.plan_only(CONFIG), torch.device("cuda", 0), elastic=True) == "one"


# ---- whether it runs


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
    assert ("graphs is switched off, as it failed: it crashed" in caplog.text) is self_check


def test_on_a_cpu_nothing_of_it_is_imported_and_the_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("pagetide.engine.self_check")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pagetide.engine.self_check", None)  # importing it raises
    with LLM("demo", device="cpu", kv_memory="16MiB", share=False) as llm:
        assert llm.stats()["self_check"] == {"state": "not run", "reason": "the device is a CPU"}


def test_an_engine_that_wants_none_says_so(closing: list[Engine]) -> None:
    engine = build(CONFIG)
    closing.append(engine)
    on_cuda = replace(engine, plan=replace(engine.plan, device="cuda:0"))
    assert on_cuda.stats()["self_check"] == {"state": "not run", "reason": "self_check=False"}
