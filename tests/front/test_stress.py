"""What `pagetide stress` finds wrong, and its report; tests/deep/front/test_stress.py runs it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagetide import scene, stress
from pagetide.common.units import MIB
from pagetide.demo.engines import DemoOutput, DemoRequest
from pagetide.demo.shared import DeviceSample
from pagetide.scene import LeaseWatch, Scene, Swing
from pagetide.server.messages import Score
from pagetide.stress import CLIENTS, SHOWN_FAULTS, StressReport, StressRun, faults_of, growths, run_stress, without_ties


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


def watched(views: Sequence[Any], card: object = None) -> Scene:
    """A scene whose broker tells of these leases."""
    device: Any = SimpleNamespace(leases=lambda: views, capacity_bytes=100 * MIB, card=card)
    return Scene(device, [], 0)


def test_what_must_not_be_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that is exceeded, of this machine's memory as the kernel says, of a card by its record; and promises broken."""
    kept: dict[str, Any] = {"state": "ok", "recall_target_bytes": None, "recall_age_ms": None, "granted_bytes": 20 * MIB}
    views = [SimpleNamespace(pid=i, name=f"engine {i}", min_bytes=5 * MIB, held_bytes=20 * MIB, **kept) for i in range(3)]
    resident = {0: 20 * MIB, 1: 27 * MIB, 2: 29 * MIB}
    monkeypatch.setattr(scene, "resident_bytes", resident.get)
    for card in (None, "a card"):
        made = watched(views, card)
        made.engines = {0: "engine 0", 1: "engine 1", 2: "engine 2", 9: "one without a lease"}
        views[2].held_bytes = 29 * MIB
        watch = LeaseWatch(made)
        watch._began = 0.0
        watch._look()
        assert [fault.split(": ")[1] for fault in made.faults] == ["engine 2 held 29.00 MiB, and its lease granted 20.00 MiB"]
        assert watch.worst == 9 * MIB
    views[0].granted_bytes, views[1].granted_bytes = MIB, 95 * MIB
    views[1].recall_target_bytes, views[1].state = 4 * MIB, "overdue"
    made.faults.clear()
    watch._views()
    assert made.faults == [
        "116.00 MiB are granted of a device of 100.00 MiB",
        "engine 0 is granted less than its minimum",
        "engine 1 is recalled below its minimum",
    ]
    assert watch.recalls == {(1, 4 * MIB)} and watch.overdue == {("engine 1", 4 * MIB)}
    with watch.killing() as after_the_broker:
        after_the_broker |= {0: 60 * MIB, 1: 60 * MIB}
    assert made.faults[-1] == "120.00 MiB are held without a broker"


class Held:
    """An external process that a driver refuses what is above `most`."""

    pid = -1

    def __init__(self, most: int = 1 << 40) -> None:
        self.held_bytes, self.most = 0, most

    def hold(self, num_bytes: int) -> None:
        self.held_bytes = num_bytes if num_bytes <= self.most else self.held_bytes


def test_a_piece_that_does_not_come_is_named_and_a_swing_goes_up_and_down(monkeypatch: pytest.MonkeyPatch) -> None:
    made, external = watched([]), Held(80 * MIB)
    made.externals = [external]  # type: ignore[list-item]
    monkeypatch.setattr(made, "free_bytes", lambda: 100 * MIB - external.held_bytes)
    assert made.take(external, 80 * MIB) and not made.take(external, 30 * MIB)  # type: ignore[arg-type]
    assert made.take(external, 10 * MIB)  # type: ignore[arg-type]
    assert made.faults == [
        "30.00 MiB for an external process beside 80.00 MiB: 20.00 MiB were free after 0 s",
        "the driver refused 10.00 MiB to an external process",
    ]
    clock, held = [0.0], set()

    def wait(seconds: float) -> None:
        clock[0] += max(seconds, 0.001)
        held.add(external.held_bytes)

    monkeypatch.setattr(scene, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(made, "_ended", SimpleNamespace(wait=wait, is_set=lambda: clock[0] > 500))
    made.faults.clear()
    external.hold(10 * MIB)
    made.swing(200.0, 10 * MIB, 60 * MIB, Swing(8 * MIB, 0.1))
    assert max(held) == 60 * MIB and 10 * MIB <= min(held) < 18 * MIB and made.faults == []
    made.swing(1e9, 10 * MIB, 60 * MIB, Swing(8 * MIB, 0.1))
    assert 500 < clock[0] < 510, "it was ended"


def test_on_a_card_a_tie_is_no_fault() -> None:
    """The tokens that the engine with room would take are told with their log-probabilities."""
    likely = [(9, b"a", -0.5), (2, b"b", -0.5004), (7, b"c", -0.6)]

    async def serve(requests: Sequence[DemoRequest]) -> list[DemoOutput]:
        assert [(one.prompt, one.params["logprobs"]) for one in requests] == [([1, 1], 5)]
        return [DemoOutput([1], scores=[Score.of(9, b"a", -0.5, 1, likely)])]

    roomy: Any = SimpleNamespace(serve=serve)
    right = [output([1, 2, 3]) for _ in range(4)]
    ours = [output([1, 2, 3]), output([1, 9, 4]), output([1, 7, 3]), None]
    found = asyncio.run(without_ties(roomy, ours, right))
    assert found == [ours[0], right[1], ours[2], None]
    assert [fault.split(": ")[0] for fault in faults_of("A", found, right)] == ["A, request 2", "A, request 3"]


def test_an_engine_that_never_answers_and_a_monitor_that_ended_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answers(requests: Sequence[DemoRequest]) -> list[DemoOutput]:
        return [output([1])]

    async def hangs(requests: Sequence[DemoRequest]) -> list[DemoOutput]:
        await asyncio.sleep(1000)
        return []

    monkeypatch.setattr(stress, "LATE_S", 0.05)
    monkeypatch.setattr(stress, "PAUSE_S", (0.0, 0.0))
    engines = [SimpleNamespace(pid=pid, name=f"{pid}", serve=serve, outputs=[]) for pid, serve in enumerate((answers, hangs))]
    device = SimpleNamespace(monitor_ended=None)
    shared: Any = SimpleNamespace(engines=engines, device=device, external=None)
    run = StressRun(shared, 0, AsyncExitStack())
    run.waiting = [iter([DemoRequest([1], {})] * 20) for _ in engines]
    asyncio.run(run._serve_clients(time.monotonic() + 0.5))
    assert len(run.outputs[0]) == 20 and None not in run.outputs[0]
    assert run.outputs[1] == [None] * CLIENTS, "each client waits for one"
    run.look_at_monitor()
    device.monitor_ended = "was killed by SIGKILL"
    for _ in range(3):
        run.look_at_monitor()
    assert run.scene.faults == ["the monitor was killed by SIGKILL"]


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
    for image, said in ((tmp_path / "none" / "a.svg", "there is no folder"), (tmp_path, "that is a folder")):
        with pytest.raises(ValueError, match=said):
            run_stress(image=image)
