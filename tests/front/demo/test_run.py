"""`pagetide demo` and `pagetide demo --shared` by their parts: loads, visits, processes that end early, results and claims.

One engine process serves a trace in tests/deep/examples/test_tide.py; here they are stopped or fakes behind `poll`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagetide.cli import main
from pagetide.common.units import MIB
from pagetide.demo import engines, run, shared
from pagetide.demo.block_map import BlockHolders
from pagetide.demo.device_use import DeviceSample, Visitor
from pagetide.demo.display import NoDisplay
from pagetide.demo.prompts import demo_prompts, passages, waves
from pagetide.demo.recall import RecallResult
from pagetide.demo.results import DemoResult, DemoRun, taken
from pagetide.demo.shared import SharedResult
from pagetide.demo.shared_view import SharedState
from pagetide.engine import llm as llm_module
from pagetide.engine.requests.outputs import Completion, RequestOutput, Timings


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


def test_the_first_line_needs_no_torch() -> None:
    """It is drawn before PyTorch is imported, which takes seconds."""
    code = """
import sys
from pagetide import cli
from pagetide.demo import run
def drawn(options, display):
    print("torch" in sys.modules, "transformers" in sys.modules)
    raise SystemExit
run.run_demo = drawn
cli.main(["demo"])
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["Loading PyTorch and the bundled model ...", "False False"], done.stderr


def test_where_the_pool_is_one_allocation_there_is_no_recall(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: a pool of fixed size, on no private device."""
    made: list[dict[str, Any]] = []
    plan = replace(engines.plan_pool("cpu", 100), device="cuda")
    monkeypatch.setattr(llm_module, "LLM", lambda *_, **options: made.append(options) or nullcontext())
    with engines.open_engines(plan, least_blocks=10, roomy_blocks=200) as (_, _, device):
        assert device is None
    assert (made[0]["kv_memory"], made[0]["share"]) == (plan.kv_bytes, False)


def chunk(text: str, output: object = None) -> Any:
    return SimpleNamespace(text=text, token_ids=[1] * len(text), output=output)


def test_two_panes_show_requests_that_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two that stream; one that was preempted stays, one that has ended is replaced after a moment."""
    now, held, waiting = [100.0], {0, 1, 2, 3}, set[int]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(run, "sample_pool", lambda *_: (BlockHolders(np.array(sorted(held), np.int16)), waiting))
    engine: Any = SimpleNamespace(stats=lambda: {"steps": 7, "running": 3, "waiting": 2, "preemptions": 1})
    options = run.DemoOptions("cpu")
    watched = run.Watched(NoDisplay(), options.first_state(), [f"prompt {i}" for i in range(24)], options.sampling())

    def panes(after_s: float = 0.2) -> list[tuple[int, str, str]]:
        now[0] += after_s
        watched.look(engine, 0, None)
        return [(pane.number, pane.state, pane.text) for pane in watched.state.panes]

    assert panes() == []
    watched.take(2, chunk("ab"))
    assert panes() == [(2, "running, 2 tokens", "ab")]
    watched.take(0, chunk("c"))
    watched.take(1, chunk("d"))
    assert panes() == [(2, "running, 2 tokens", "ab"), (0, "running, 1 token", "c")]
    held.discard(2)
    assert panes() == [(2, "running, 2 tokens", "ab"), (0, "running, 1 token", "c")], "its last token is to come"
    waiting.add(2)
    watched.take(0, chunk("", output=object()))
    held.discard(0)
    assert panes() == [(2, "preempted, waits, 2 tokens", "ab"), (0, "ended, 1 token", "c")]
    assert panes(run.ENDED_S) == [(2, "preempted, waits, 2 tokens", "ab"), (1, "running, 1 token", "d")]
    state = watched.state
    panes(0.01)
    assert watched.state is state, "sampled no more than ten times a second"
    assert len(state.history) == 6 and state.counts is not None and state.counts.running == 3


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
    shown: list[SharedState] = []

    class Display(NoDisplay):
        def show(self, state: object) -> None:
            assert isinstance(state, SharedState)
            shown.append(state)

    told: list[list[dict[str, Any]]] = [[], []]  # the messages of engine processes
    engines: Any = [SimpleNamespace(poll=lambda own=own: [own.pop() for _ in list(own)]) for own in told]
    counts = tuple(replace(shared.EngineCounts(), total=16) for _ in engines)
    state = replace(shared.FIRST_STATE, capacity_bytes=1000 * MIB, engines=counts)
    watched = shared.SharedRun(Display(), state, engines, [16, 16])

    def sample(at_s: float, other: int, kv: tuple[int, int], external: int, recalling: Any) -> SharedState:
        one = DeviceSample(at_s, (other * MIB, 300 * MIB), (kv[0] * MIB, kv[1] * MIB), external * MIB, 0, recalling)
        watched._show(one, [watched._counts(number) for number in range(2)])
        return shown[-1]

    first = sample(0.0, 300, (8, 8), 10, (False, False))
    assert watched._wanted(0.0) == 0, "the pools are small"
    assert first.contended_bytes == 390 * MIB and first.now == "Idle: pools give their memory back."
    told[0].append({"progress": {"running": 3, "waiting": 1, "preemptions": 0, "done": 2, "recalls": 0}})
    busy = sample(0.3, 305, (40, 8), 10, (False, False))
    assert busy.now == "Engine A has requests: pools grow as these need memory."
    assert busy.holdings[-1].programs == 5 * MIB and busy.engines[0].done == 2
    sample(0.4, 300, (40, 24), 10, (False, False))
    assert watched._wanted(0.4) == watched._wanted(0.4 + shared.VISIT_S - 0.1) == shared.VISIT_BYTES
    assert watched._wanted(0.5 + shared.VISIT_S) == 0
    told[0].append({"progress": {"running": 3, "waiting": 1, "preemptions": 2, "done": 2, "recalls": 1}})
    recalled = sample(0.6, 300, (30, 24), 110, (False, True))
    assert recalled.now == "RECALL: engine A and engine B must give memory back." and recalled.alarm
    assert sample(0.7, 300, (30, 24), 110, (False, False)).holdings[-1].recalled == (True, True), "in the same column"
    later = sample(0.7 + shared.RECALL_SHOWN_S, 300, (30, 8), 110, (False, False))
    assert later.now == "The external process holds memory; the engines share the rest." and not later.alarm
    told[1].append({"served": True})
    assert sample(3.0, 300, (30, 8), 10, (False, False)).engines[1].done == 16
    assert [len(one.holdings) for one in shown] == [1, 2, 2, 3, 3, 4, 5], "a column for each quarter of a second"
    visitor: Any = Visitor(Process(0), Process(0), 1, 1.0)  # type: ignore[arg-type]
    result = watched.result(visitor, ())
    assert result.most_kv_bytes == (40 * MIB, 24 * MIB) and result.most_external_bytes == 100 * MIB
    assert result.most_held_bytes == (600 + 54 + 110) * MIB and result.capacity_bytes == 1000 * MIB


def test_the_load_suits_the_model() -> None:
    for number, job in enumerate(shared.engine_jobs(seed=3)):
        assert len(job.arrivals) == sum(requests for _, requests in shared.BURSTS[number])
        assert all(one.prompt_tokens + one.output_tokens < 1024 for one in job.arrivals)
        assert [one.at_s for one in job.arrivals] == sorted(one.at_s for one in job.arrivals)
    assert shared.engine_jobs(3) == shared.engine_jobs(3) != shared.engine_jobs(4)
    assert shared.PIECE_BYTES < shared.HEADROOM


STATS = {"device": "cpu", "steps": 339, "preemptions": 6, "recomputed_tokens": 1388, "peak_used_blocks": 193}
RECALL = RecallResult(1, 24 * MIB, 12 * MIB, 13 * MIB, 17 * MIB)


def output(number: int, token_ids: list[int], reason: Any = "length") -> RequestOutput:
    completion = Completion(f"text {number}", token_ids, reason, Timings(0.1, 0.2), num_preemptions=number)
    return RequestOutput(str(number), f"prompt {number}", [1, 2, 3], (completion,))


def result(**changes: Any) -> DemoResult:
    """Two requests, three tokens each, in two seconds."""
    outputs = [output(0, [5, 6, 7]), output(1, [8, 9, 10])]
    pressed = DemoRun(outputs, 2.0, STATS, RECALL)
    free = DemoRun(outputs, 1.0, {**STATS, "preemptions": 0})
    return replace(DemoResult(pressed, free, 223, 456), **changes)


def test_four_lines_end_in_the_claim() -> None:
    assert result().lines() == [
        "2 prompts, 6 tokens at 3 tokens/s, in 223 blocks where 456 are needed",
        "1 recall: the pool went from 24.00 MiB to 12.00 MiB, then grew by 17.00 MiB",
        "1,388 tokens recomputed after preemptions; with room for all, 0 preemptions",
        "6 preemptions, half the pool taken, 0 tokens changed",
    ]
    assert result().is_success and all(len(line) <= 80 for line in result().lines())


@pytest.mark.parametrize("which", ["pressed", "free"])
def test_changed_tokens_and_requests_not_served_fail_the_demo(which: str) -> None:
    run = getattr(result(), which)
    for tokens, reason, said in [
        ([8, 9, 11], "length", "1 token changed"),
        ([8], "length", "2 tokens changed"),
        ([9, 8], "length", "3 tokens changed"),
        ([8, 9, 10], "error", "1 request failed, 0 tokens changed"),
    ]:
        changed = result(**{which: replace(run, outputs=[run.outputs[0], output(1, tokens, reason)])})
        assert changed.claim() == f"6 preemptions, half the pool taken, {said}"
        assert not changed.is_success
        assert changed.table()["tokens equal to an unpressured run"] is (reason == "error")


def test_where_nothing_was_recalled_the_claim_does_not_say_so() -> None:
    one = result()
    fixed = replace(one, pressed=replace(one.pressed, recall=None))
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
SHARED = SharedResult(1359 * MIB, 1356 * MIB, (68 * MIB, 72 * MIB), 227 * MIB, 30, 4, (ENGINE, ENGINE))


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
    prompts = demo_prompts(24, seed=3)
    assert prompts == demo_prompts(24, seed=3) != demo_prompts(24, seed=4)
    texts = passages()
    assert all(prompt in texts[i % len(texts)] for i, prompt in enumerate(prompts))
    assert max(len(prompt.split()) for prompt in prompts) > 8 * min(len(prompt.split()) for prompt in prompts)


def test_the_first_wave_fills_the_pool() -> None:
    assert waves([5, 5, 5, 5], usable=11) == [range(3), range(3, 4)]
    assert waves([5, 5], usable=10) == waves([5, 5], usable=99) == [range(2)]
