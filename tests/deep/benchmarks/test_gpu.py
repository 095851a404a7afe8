"""What `make gpu` measures, on a CPU at tiny sizes: every part runs, and what is not measured is told with its reason."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_lease import ScriptedLease

from benchmarks.figures import Figure
from benchmarks.gpu import __main__ as program
from benchmarks.gpu import attention, bandwidth, decode, parts
from benchmarks.gpu.bench import TINY, Bench, DeviceClock
from benchmarks.gpu.parts import (
    BOUNDS,
    BY_NAME,
    SPECS,
    Item,
    Note,
    PartResult,
    PartRunner,
    Spec,
    Unmeasured,
    items_of,
    with_needs,
)
from benchmarks.gpu.recall import PoolRig

CEILINGS = {bandwidth.MEMORY: 40.0, bandwidth.TO_HOST: 10.0, bandwidth.FROM_HOST: 10.0}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The tiny one, with an external process that stays for half a second."""
    return Bench(DeviceClock("cpu"), TINY, str(tmp_path_factory.mktemp("model")), memory_s=0.5)


def of_part(name: str, bench: Bench, **known: float) -> dict[str, Item]:
    """What a part gives, by name; all bounds of the part are among it."""
    bench.known = dict(CEILINGS) | known
    items = {item.title if isinstance(item, Note) else item.name: item for item in items_of(BY_NAME[name], bench)}
    assert {bound.name for bound in BOUNDS.values() if bound.part == name} <= items.keys()
    return items


def measured(items: dict[str, Item], *keys: str) -> bool:
    return all(isinstance(items[BOUNDS[key].name], Figure) for key in keys)


def test_the_devices_limits(bench: Bench) -> None:
    bench.known = {}
    names = [item.name for item in items_of(BY_NAME["bandwidth"], bench) if isinstance(item, Figure)]
    assert CEILINGS.keys() <= bench.known.keys() == set(names)


def test_quantized_products(bench: Bench) -> None:
    items = of_part("quantized", bench)
    forms = ("bfloat16", "int4 in groups of 32", "int4 in groups of 64", "fp8")
    assert {f"product, {form}, 1 rows" for form in forms} <= items.keys()


@pytest.mark.parametrize("overlap", [False, True])
def test_decode(bench: Bench, overlap: bool) -> None:
    items = of_part("decode", dataclasses.replace(bench, overlap=overlap))
    assert measured(items, "rows_share", "one_share")
    for rows in (TINY.rows, 1):
        share = items[f"... {rows}: share of steps that were begun ahead"]
        assert isinstance(share, Figure) and share.value == overlap


@pytest.mark.stress
def test_the_peer(bench: Bench) -> None:
    ours = {decode.MANY: 1000.0, decode.ONE: 100.0, decode.FIRST: 10.0}
    assert measured(of_part("peer", bench, **ours), "rows", "first_token")


@pytest.mark.stress
def test_attention_of_every_kernel_that_is_there(bench: Bench) -> None:
    items = of_part("attention", bench)
    assert measured(items, "attention")
    timed = [name for name, item in items.items() if isinstance(item, Figure) and name.endswith(": torch")]
    assert len(timed) == 1


def test_a_kernel_that_is_wrong_is_not_timed(bench: Bench) -> None:
    from pagetide.engine.attention.torch_kernel import TorchKernel

    storage = attention.storage_of(bench, 3 * TINY.attention_context, 16)
    work = attention.work_of(bench, storage, TorchKernel(), [40, 17])
    right = work.run(TorchKernel(), 0)
    item = attention._timed(bench, "a", TorchKernel(), work, right * 2, 1.0)
    assert isinstance(item, Unmeasured) and "wrong" in item.reason
    assert isinstance(attention._timed(bench, "a", TorchKernel(), work, right, 1.0), Figure)


def test_swaps(bench: Bench) -> None:
    assert measured(of_part("swap", bench), "swap_out", "swap_in")


def test_sleeps(bench: Bench) -> None:
    assert measured(of_part("sleep", bench), "wake_first")


@pytest.mark.stress  # which mostly wait for the broker: it grants nothing for 2 s after a recall
@pytest.mark.parametrize("overlap", [False, True])
def test_recalls(bench: Bench, overlap: bool) -> None:
    one = dataclasses.replace(bench, overlap=overlap)
    assert measured(of_part("recall", one), "recall_free", "recall_live", "resizing")


@pytest.mark.stress
def test_an_engine_beside_an_external(bench: Bench) -> None:
    items = of_part("memory", dataclasses.replace(bench, overlap=True))
    assert measured(items, "failures", "held")
    failures = items[BOUNDS["failures"].name]
    assert isinstance(failures, Figure) and failures.value == 0


def test_engines_under_pressure(bench: Bench) -> None:
    short = of_part("stress", dataclasses.replace(bench, ends_at=time.monotonic() + 20))
    assert isinstance(short[BOUNDS["faults"].name], Unmeasured) and len(short) == 1, "it would not end in time"
    items = of_part("stress", dataclasses.replace(bench, memory_s=5.0))
    faults, note = items[BOUNDS["faults"].name], items["stress"]
    assert isinstance(faults, Figure) and faults.value == 0, items
    assert isinstance(note, Note) and note.lines[0].startswith("5 s: ") and len(note.lines) == 2
    assert note.lines[1].endswith("on host memory")
    assert "... between two tokens of a request, at most" in items


def test_a_part_brings_what_it_needs() -> None:
    assert [spec.name for spec in with_needs(["peer"])] == ["bandwidth", "decode", "peer"]
    assert with_needs(spec.name for spec in SPECS) == list(SPECS)
    assert {bound.part for bound in BOUNDS.values()} <= BY_NAME.keys()


def counts(bench: Bench) -> Iterator[Item]:
    """A part, as those below: found by this module's name in the process that parts run in."""
    yield Figure("one", bench.known.get("one", 0.0) + 1, "x")


def breaks(bench: Bench) -> Iterator[Item]:
    yield Figure("before", 1.0, "x")
    raise ValueError("it is broken")


def ends(bench: Bench) -> Iterator[Item]:
    yield Figure("before", 1.0, "x")
    os._exit(1)


def hangs(bench: Bench) -> Iterator[Item]:
    yield Figure("before", 1.0, "x")
    threading.Event().wait()


def run(runner: PartRunner, name: str, box_s: float = 60, **known: float) -> PartResult:
    """The part as it is at its end."""
    *_, part = runner.run(Spec(name, "test_gpu", 1, function=name), box_s, known)
    return part


@pytest.mark.stress
def test_a_part_that_breaks_ends_or_hangs_keeps_what_it_gave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # where the process finds this file
    monkeypatch.setattr(parts, "GRACE_S", 0.0)
    with PartRunner(program.arguments(["--device", "cpu", "--tiny"]), str(tmp_path)) as runner:
        broken, counted, ended = run(runner, "breaks"), run(runner, "counts", one=4.0), run(runner, "ends")
        hung = run(runner, "hangs", box_s=1)
    assert counted.items == [Figure("one", 5.0, "x")] and counted.error is None and counted.device == {"device": "cpu"}
    assert [part.items for part in (broken, ended)] == [[Figure("before", 1.0, "x")]] * 2
    assert broken.error == "ValueError: it is broken"
    assert ended.error == "its process ended"
    assert hung.error == "it took longer than its 1 s"


def test_results_of_an_earlier_run_stay_and_bounds_are_told(tmp_path: Path) -> None:
    first = PartResult(
        "recall", [parts.bounded("recall_free", 4.0, [4.0]), parts.unmeasured("recall_live", "no | host")], {}, 0
    )
    second = PartResult(
        "memory", [Figure("steps", 2.0, "ms"), Note("memory", ("a line",))], {"device": "cpu"}, 0, error="it broke"
    )
    parts.write({"recall": first.to_dict()}, tmp_path)
    parts.write(parts.read(tmp_path / "gpu.json") | {"memory": second.to_dict()}, tmp_path)
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert list(kept) == ["recall", "memory"]
    assert kept["recall"]["figures"][0]["meets"] is True and kept["recall"]["figures"][0]["samples"] == [4.0]
    assert kept["recall"]["versions"].keys() >= {"pagetide", "torch", "transformers", "numpy"}
    table = (tmp_path / "gpu.md").read_text()
    assert "| recall of free blocks | ≤ 10 ms | 4 ms | yes |" in table
    assert "| recall of live blocks / their copy | ≤ 1.3 x | unmeasured: no / host | |" in table
    assert "holds | ≥ 0.9 x | unmeasured: it broke | |" in table
    assert f"generate_batch | ≥ 1.5 x | unmeasured: {parts.NOT_YET} | |" in table
    assert "| steps | 2 ms |" in table and "a line" in table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.md"]


def test_without_time_a_part_is_told_as_unmeasured(tmp_path: Path) -> None:
    assert program.main(["--device", "cpu", "--tiny", "--budget-s", "1", "--results", str(tmp_path)]) == 1
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert list(results) == list(BY_NAME)
    assert {part["error"] for part in results.values()} == {"no time left of 1 s"}


def test_a_pool_is_not_grown_before_its_last_recall_is_answered() -> None:
    """The grant falls with the answer only; growth before it would be called off."""

    class Answering(ScriptedLease):
        def ask(self, target_bytes: int, *, expires_s: float, waiting_s: float = 0.0, keep_bytes: int = 0) -> None:
            super().ask(target_bytes, expires_s=expires_s)
            if len(self.asked) == 2:
                self.answer_unmapped(self.held_bytes)
            elif len(self.asked) == 3:
                self.grant(target_bytes)

    rig = object.__new__(PoolRig)
    rig.lease = lease = Answering(granted_bytes=48, min_bytes=8, held_bytes=16)
    lease.recall_to(16)
    rig.have_granted(32)
    assert lease.recall is None and lease.asked == [48] * 3 and lease.granted_bytes == 48
