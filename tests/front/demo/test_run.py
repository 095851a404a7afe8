"""`pagetide demo` and `pagetide demo --shared` by their parts: loads, visits, processes that end early, results and claims.

Engine processes serve in tests/deep/front/demo and tests/deep/examples/test_tide.py; here engines are fakes.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagetide.cli import main
from pagetide.common.units import MIB
from pagetide.demo import run, shared
from pagetide.demo.block_map import BlockHolders
from pagetide.demo.engines import DemoEngine, DemoOutput, while_looking
from pagetide.demo.page import DemoState
from pagetide.demo.results import DemoResult, EngineRun, RecallResult, SharedResult, taken
from pagetide.demo.shared import DeviceSample, Visitor


def test_numbers_that_make_no_demo(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--prompts", "15"], "at least 16 prompts"),
        (["--pool", "0"], "must be in (0, 1], got 0.0"),
        (["--pool", "1.5"], "must be in (0, 1], got 1.5"),
        (["--pool", "nan"], "must be in (0, 1], got nan"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
    ):
        assert main(["demo", "--device", "cpu", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("pagetide: ") and message in err and err.count("\n") == 1


def test_this_process_needs_no_torch() -> None:
    """The first line is drawn at once, and so much memory less is held."""
    code = """
import sys
from pagetide import cli
from pagetide.demo import run
async def drawn(options, show):
    print("torch" in sys.modules, "transformers" in sys.modules)
    raise SystemExit
run.run_demo = drawn
cli.main(["demo"])
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["Loading PyTorch and the bundled model ...", "False False"], done.stderr


def fake_engine(**stats: Any) -> DemoEngine:
    """An engine without a process, with these statistics."""

    async def call(method: str, **_: Any) -> dict[str, Any]:
        assert method == "stats"
        return {"running": 0, "waiting": 0, "preemptions": 0, "steps": 0, **stats, "memory": {"recalls": 0}}

    return DemoEngine("engine", SimpleNamespace(call=call))  # type: ignore[arg-type]


def test_two_panes_show_requests_that_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two that stream; one that was preempted stays, one that has ended is replaced after a moment."""
    now, held, waiting = [100.0], {0, 1, 2, 3}, set[int]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(run, "holders_of", lambda _: BlockHolders(np.array(sorted(held), np.int16)))
    engine = fake_engine(steps=7, running=3, waiting=2, preemptions=1)
    engine.outputs = outputs = [DemoOutput(f"prompt {i}") for i in range(24)]

    async def frame() -> dict[str, Any]:
        rows = [[row, f"id-{row}", str(row)] for row in held]
        return {"rows": rows, "waiting": [len(waiting), [["id", str(one)] for one in waiting]]}

    monkeypatch.setattr(engine, "frame", frame)
    watched = run.WatchedEngine(lambda state: None, run.DemoOptions("cpu").first_state(), engine, 24)

    def panes(after_s: float = 0.2) -> list[tuple[int, str, str]]:
        now[0] += after_s
        asyncio.run(watched.look())
        return [(pane.number, pane.state, pane.text) for pane in watched.state.panes]

    def stream(number: int, text: str) -> None:
        outputs[number].text += text
        outputs[number].token_ids += [1] * len(text)

    assert panes() == []
    stream(2, "ab")
    assert panes() == [(2, "running, 2 tokens", "ab")]
    stream(0, "c")
    stream(1, "d")
    assert panes() == [(2, "running, 2 tokens", "ab"), (0, "running, 1 token", "c")]
    held.discard(2)
    assert panes() == [(2, "running, 2 tokens", "ab"), (0, "running, 1 token", "c")], "its last token is to come"
    waiting.add(2)
    outputs[0].ended_at = now[0]
    held.discard(0)
    assert panes() == [(2, "preempted, waits, 2 tokens", "ab"), (0, "ended, 1 token", "c")]
    assert panes(run.ENDED_S) == [(2, "preempted, waits, 2 tokens", "ab"), (1, "running, 1 token", "d")]
    assert len(watched.state.history) == 6
    (counts,) = watched.state.engines
    assert (counts.running, counts.waiting, counts.preemptions, counts.done, counts.steps) == (3, 2, 1, 1, 7)


def test_what_looking_raises_ends_the_work() -> None:
    async def look() -> None:
        raise ValueError("a page that cannot be drawn")

    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(ValueError, match="cannot be drawn"):
        asyncio.run(while_looking(work(), look))
    assert ended in ([], [True]), "it had not begun, or was cancelled"


class Process:
    """What the external process and its device answer."""

    def __init__(self, free_bytes: int) -> None:
        self.held_bytes, self._total = 0, free_bytes

    def hold(self, num_bytes: int) -> None:
        self.held_bytes = num_bytes

    def free_bytes(self) -> int:
        return self._total - self.held_bytes


def test_the_external_process_comes_and_goes_in_pieces() -> None:
    process: Any = Process(40 * MIB)
    visitor = Visitor(process, process, piece_bytes=16 * MIB, piece_s=1.0)
    held = []
    for at_s, wanted in ((0.0, 64), (0.5, 64), (1.0, 64), (2.0, 64), (3.0, 0), (4.0, 0), (5.0, 0)):
        visitor.advance(at_s, wanted * MIB)
        held.append(process.held_bytes // MIB)
    assert held == [16, 16, 32, 32, 16, 0, 0]
    assert (visitor.pieces, visitor.refused) == (2, 1)


def test_what_is_watched_becomes_states_and_figures() -> None:
    shown: list[DemoState] = []
    engines = [fake_engine(), fake_engine()]
    stats = [{"running": 0, "waiting": 0, "preemptions": 0, "memory": {"recalls": 0}} for _ in engines]
    for engine, own in zip(engines, stats, strict=True):
        engine.stats, engine.outputs = own, [DemoOutput("") for _ in range(16)]
    state = replace(shared.FIRST_STATE, capacity_bytes=1000 * MIB)
    watched = shared.WatchedDevice(shown.append, state, engines, [[None] * 16] * 2)

    def sample(at_s: float, other: int, kv: tuple[int, int], external: int, recalling: Any) -> DemoState:
        watched.take(DeviceSample(at_s, (other * MIB, 300 * MIB), (kv[0] * MIB, kv[1] * MIB), external * MIB, recalling))
        return shown[-1]

    assert watched.wanted_bytes() == 0 and not watched.awaits_a_recall()
    first = sample(0.0, 300, (8, 8), 10, (False, False))
    assert watched.wanted_bytes() == 0, "the pools are small"
    assert first.contended_bytes == 390 * MIB and first.now == "Idle: pools give their memory back."
    stats[0] |= {"running": 3, "waiting": 1}
    engines[0].outputs[0].ended_at = engines[0].outputs[1].ended_at = 0.1
    busy = sample(0.3, 305, (40, 8), 10, (False, False))
    assert busy.now == "Engine A has requests: pools grow as these need memory."
    assert busy.holdings[-1].programs == 5 * MIB and busy.engines[0].done == 2
    sample(0.4, 300, (40, 24), 10, (False, False))
    assert watched.wanted_bytes() == 390 * MIB - shared.HEADROOM - shared.VISIT_LEAVES
    assert watched.awaits_a_recall(), "the external process has come, and nothing was recalled yet"
    stats[0] |= {"preemptions": 2, "memory": {"recalls": 1}}
    recalled = sample(0.6, 300, (30, 24), 110, (False, True))
    assert recalled.now == "RECALL: engine A and engine B must give memory back." and recalled.alarm
    assert not watched.awaits_a_recall()
    assert sample(0.7, 300, (30, 24), 110, (False, False)).holdings[-1].recalled == (True, True), "in the same column"
    later = sample(0.7 + shared.RECALL_SHOWN_S, 300, (30, 8), 110, (False, False))
    assert later.now == "The external process holds memory; the engines share the rest." and not later.alarm
    for output in engines[1].outputs:
        output.ended_at = 2.0
    assert sample(0.3 + shared.VISIT_S, 300, (30, 8), 10, (False, False)).engines[1].done == 16
    assert watched.wanted_bytes() == 390 * MIB - shared.HEADROOM - shared.VISIT_LEAVES
    sample(0.5 + shared.VISIT_S, 300, (30, 8), 10, (False, False))
    assert watched.wanted_bytes() == 0, "it leaves"
    assert not watched.awaits_a_recall()
    sample(0.5 + shared.VISIT_S + shared.BETWEEN_S, 300, (8, 8), 10, (False, False))
    assert watched.awaits_a_recall(), "it is to come once more"
    assert [len(one.holdings) for one in shown] == [1, 2, 2, 3, 3, 4, 5, 6, 7], "a column for each quarter of a second"
    visitor: Any = Visitor(Process(0), Process(0), 1, 1.0)  # type: ignore[arg-type]
    result = watched.result(visitor, [EngineRun([], [], 1.0, own) for own in stats])
    assert result.most_kv_bytes == (40 * MIB, 24 * MIB) and result.most_external_bytes == 100 * MIB
    assert result.most_held_bytes == (600 + 54 + 110) * MIB and result.capacity_bytes == 1000 * MIB
    roomy = fake_engine()
    roomy.outputs = [DemoOutput("", ended_at=1.0) for _ in range(20)]
    asyncio.run(watched.compare(roomy))
    assert [one.done for one in shown[-1].engines] == [16, 4] and shown[-1].now.startswith("The same again")


def test_the_load_suits_the_model() -> None:
    for number, trace in enumerate(shared.arrivals(seed=3)):
        assert len(trace) == sum(requests for _, requests in shared.BURSTS[number]) + shared.MOST_FURTHER
        assert all(one.prompt_tokens + one.output_tokens < 1024 for one in trace)
        assert [one.at_s for one in trace[: -shared.MOST_FURTHER]] == sorted(
            at_s for at_s, n in shared.BURSTS[number] for _ in range(n)
        )
    assert shared.arrivals(3) == shared.arrivals(3) != shared.arrivals(4)
    assert shared.PIECE_BYTES < shared.HEADROOM


STATS = {"steps": 339, "preemptions": 6, "recomputed_tokens": 1388, "peak_used_blocks": 193}
RECALL = RecallResult(1, 24 * MIB, 12 * MIB, 13 * MIB, 17 * MIB)


def output(number: int, token_ids: list[int], reason: Any = "length") -> DemoOutput:
    return DemoOutput(f"prompt {number}", f"text {number}", token_ids, reason, num_preemptions=number)


def result(**changes: Any) -> DemoResult:
    """Two requests, three tokens each, in two seconds."""
    outputs = [output(0, [5, 6, 7]), output(1, [8, 9, 10])]
    run = EngineRun(outputs, outputs, 2.0, STATS)
    return replace(DemoResult(run, "cpu", 223, 456, 0, RECALL), **changes)


def test_four_lines_end_in_the_claim() -> None:
    assert result().lines() == [
        "2 prompts, 6 tokens at 3 tokens/s, in 223 blocks where 456 are needed",
        "1 recall: the pool went from 24.00 MiB to 12.00 MiB, then grew by 17.00 MiB",
        "1,388 tokens recomputed after preemptions; with room for all, 0 preemptions",
        "6 preemptions, half the pool taken, 0 tokens changed",
    ]
    assert result().is_success and all(len(line) <= 80 for line in result().lines())


@pytest.mark.parametrize("which", ["outputs", "with_room"])
def test_changed_tokens_and_requests_not_served_fail_the_demo(which: str) -> None:
    run = result().run
    for tokens, reason, said in [
        ([8, 9, 11], "length", "1 token changed"),
        ([8], "length", "2 tokens changed"),
        ([9, 8], "length", "3 tokens changed"),
        ([8, 9, 10], "error", "1 request failed, 0 tokens changed"),
    ]:
        changed = result(run=replace(run, **{which: [run.outputs[0], output(1, tokens, reason)]}))
        assert changed.claim() == f"6 preemptions, half the pool taken, {said}"
        assert not changed.is_success
        assert changed.table()["tokens equal to an unpressured run"] is (reason == "error")


def test_where_nothing_was_recalled_the_claim_does_not_say_so() -> None:
    fixed = result(recall=None)
    assert fixed.lines()[1] == "the pool of this device is one allocation: no memory was recalled"
    assert fixed.claim() == "6 preemptions, no memory taken, 0 tokens changed"
    assert "recalls of the pool's memory" not in fixed.table()


def test_shares_in_words() -> None:
    half = "half the pool"
    shares = {0.0: "no memory", 0.2: "20% of the pool", 0.45: half, 0.5: half, 0.6: "60% of the pool"}
    assert {share: taken(share) for share in shares} == {share: f"{said} taken" for share, said in shares.items()}
    assert RECALL.share == 0.5 and RecallResult(0, 0, 0, 0, 0).share == 0.0


def test_the_table_has_every_figure() -> None:
    one = result()
    lines = one.table_lines(60)
    assert "    text 1" in lines and "... prompt 1  [3 tokens, length, preempted 1 x]" in lines
    assert f"  {'grown again, KiB':<36}{'17,408':>12}" in lines
    assert f"  {'tokens equal to an unpressured run':<36}{'yes':>12}" in lines
    assert all(len(line) <= 60 for line in lines)
    told = one.to_dict()
    assert one.table().items() <= told.items() and told["claim"] == one.claim()
    assert [text["text"] for text in told["outputs"]] == ["text 0", "text 1"]


ENGINE = {
    "requests": 16, "tokens": 600, "preemptions": 3, "failed": 0, "changed_tokens": 0,
    "memory": {"recalls": 5, "given_back_bytes": 100 * MIB},
}  # fmt: skip
SHARED = SharedResult(1359 * MIB, 1356 * MIB, (68 * MIB, 72 * MIB), 227 * MIB, 30, 4, (ENGINE, {"name": "engine B", **ENGINE}))


def test_the_claim_of_the_shared_device() -> None:
    assert SHARED.lines() == [
        "32 requests, 1,200 tokens; the pools grew to 68 MiB and 72 MiB",
        "10 recalls, 6 preemptions, 200 MiB given back; external: 227 MiB",
        "at most 1,356 of 1,359 MiB were held at any time",
        "32 requests served, none failed, 0 tokens changed, memory never above the limit",
    ]
    assert SHARED.is_success and all(len(line) <= 80 for line in SHARED.lines())
    assert SHARED.to_dict()["engines"][1] == {"name": "engine B", **ENGINE}


def test_whatever_is_not_so_fails_the_shared_demo() -> None:
    for changes, claim in [
        ({"engines": (ENGINE, {**ENGINE, "failed": 2})}, "2 failed, 0 tokens changed, memory never above"),
        ({"engines": ({**ENGINE, "changed_tokens": 1}, ENGINE)}, "none failed, 1 token changed, memory never above"),
        ({"most_held_bytes": 1360 * MIB}, "none failed, 0 tokens changed, memory above"),
    ]:
        one = replace(SHARED, **changes)
        served = 30 if "2 failed" in claim else 32
        assert one.claim() == f"{served} requests served, {claim} the limit" and not one.is_success


def test_prompts_are_pieces_of_the_held_out_text() -> None:
    prompts, again, other = ([str(one.prompt) for one in run.DemoOptions(seed=seed).requests()] for seed in (3, 3, 4))
    assert prompts == again != other
    texts = run.passages()
    assert all(prompt in texts[i % len(texts)] for i, prompt in enumerate(prompts))
    assert max(len(prompt.split()) for prompt in prompts) > 8 * min(len(prompt.split()) for prompt in prompts)


def test_the_first_requests_fill_the_pool() -> None:
    assert [run.num_filling(blocks, usable) for blocks, usable in (([5] * 4, 11), ([5] * 2, 10), ([5] * 2, 99))] == [3, 2, 2]
