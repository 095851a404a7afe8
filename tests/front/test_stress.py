"""What `pagetide stress` finds wrong, and its report; tests/deep/front/test_stress.py runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagetide.common.units import MIB
from pagetide.demo.engines import DemoOutput
from pagetide.demo.shared import DeviceSample
from pagetide.stress import SHOWN_FAULTS, StressReport, StressRun, faults_of, growths, run_stress


def output(tokens: list[int], reason: str = "length") -> DemoOutput:
    return DemoOutput([1], token_ids=tokens, finish_reason=reason)


def test_each_fault_is_named() -> None:
    right = [output([1, 2, 3]) for _ in range(6)]
    ours = [output([1, 2, 3]), output([1, 9, 3]), output([1, 2]), None, output([1], "error"), output([1, 2, 3])]
    right[5] = output([1], "")
    assert faults_of("engine A", ours, right) == [
        "engine A, request 1: token 1 is 9, undisturbed 2",
        "engine A, request 2: token 2 is none, undisturbed 3",
        "engine A, request 3: it was lost (no answer)",
        "engine A, request 4: it was lost (error)",
        "engine A, request 5: it was not served undisturbed (no end)",
    ]


def test_a_lease_that_is_exceeded_at_two_looks_is_named() -> None:
    """Not one that is being recalled, nor one that is seen so once."""
    kept: dict[str, Any] = {"state": "ok", "recall_target_bytes": None, "granted_bytes": 10 * MIB}
    views = [SimpleNamespace(lease_id=i, name=f"engine {i}", held_bytes=10 * MIB, **kept) for i in range(3)]
    shared: Any = SimpleNamespace(engines=[], device=SimpleNamespace(leases=lambda: views))
    run = StressRun(shared, 0, None)  # type: ignore[arg-type]
    for held in ((11, 11, 11), (10, 11, 11), (11, 11, 11)):
        for view, size in zip(views, held, strict=True):
            view.held_bytes = size * MIB
        views[2].state = "recalling"
        run.check_leases()
    assert set(run.faults) == {f"engine 1 held {11 * MIB:,} bytes, and its lease granted {10 * MIB:,}"}


def test_growth_is_between_the_first_and_the_last_third() -> None:
    samples = [DeviceSample(float(i), (100 * MIB + i * MIB, 100 * MIB), (0, 0), 0) for i in range(30)]
    samples[3] = DeviceSample(3.0, (900 * MIB, 100 * MIB), (0, 0), 0)  # one that stands out
    assert growths(samples) == pytest.approx((20 * MIB, 0), abs=MIB)
    assert growths(samples[:2]) == ()


def report(faults: tuple[str, ...] = (), recall_s: tuple[float, ...] = (0.02, 0.3)) -> StressReport:
    return StressReport(60.0, 7, 400, 9000, 12, recall_s, 1, 3, 80, 0.4, 0.25, (MIB, -MIB), 90 * MIB, 100 * MIB, faults)


def test_the_report() -> None:
    lines = report().lines()
    assert lines[0] == "PASS: no token changed, no request lost, memory within every limit"
    assert lines[1] == "60 s, seed 7: 400 requests, 9,000 tokens, 12 preemptions, 1 kill"
    assert lines[2].startswith("2 recalls ordered, at most 300 ms; the external process took 80 pieces")
    assert report(recall_s=()).lines()[2].startswith("0 recalls ordered; ")
    assert lines[3].endswith("ms; programs grew by +1 MiB and -1 MiB")
    assert replace(report(), growth_bytes=()).lines()[3] == "longest gap between two tokens 250 ms"
    failed = report(tuple(f"fault {i}" for i in range(SHOWN_FAULTS + 2)))
    assert not failed.has_passed and failed.to_dict()["passed"] is False
    assert failed.lines()[0] == f"FAIL: {SHOWN_FAULTS + 2} faults"
    assert failed.lines()[SHOWN_FAULTS : SHOWN_FAULTS + 2] == [f"  fault {SHOWN_FAULTS - 1}", "  and 2 more (--json has them)"]


def test_what_cannot_be_is_refused_before_the_run(tmp_path: Path) -> None:
    for seconds in (4, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="at least 5"):
            run_stress(seconds=seconds)
    with pytest.raises(ValueError, match="there is no folder"):
        run_stress(image=tmp_path / "none" / "a.svg")
