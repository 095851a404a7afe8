"""The lines, the table and the exit status of the demo, from given runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pagetide.demo.prompts import demo_prompts, passages, waves
from pagetide.demo.recall import RecallResult
from pagetide.demo.results import DemoResult, DemoRun, changed_tokens, counted, taken
from pagetide.demo.shared import SharedResult
from pagetide.engine.requests.outputs import Completion, RequestOutput, Timings
from pagetide.monitor.units import MIB

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
@pytest.mark.parametrize(
    ("tokens", "said"), [([8, 9, 11], "1 token changed"), ([8], "2 tokens changed"), ([9, 8], "3 tokens changed")]
)
def test_changed_tokens_are_counted_and_fail_the_demo(which: str, tokens: list[int], said: str) -> None:
    one = result()
    run = getattr(one, which)
    changed = replace(one, **{which: replace(run, outputs=[run.outputs[0], output(1, tokens)])})
    assert changed.claim() == f"6 preemptions, half the pool taken, {said}"
    assert not changed.is_success and changed.table()["tokens equal to an unpressured run"] is False


@pytest.mark.parametrize("which", ["pressed", "free"])
def test_a_request_that_was_not_served_fails_the_demo(which: str) -> None:
    one = result()
    run = getattr(one, which)
    changed = replace(one, **{which: replace(run, outputs=[run.outputs[0], output(1, [8, 9, 10], "error")])})
    assert changed.claim() == "6 preemptions, half the pool taken, 1 request failed, 0 tokens changed"
    assert not changed.is_success


def test_where_nothing_was_recalled_the_claim_does_not_say_so() -> None:
    one = result()
    fixed = replace(one, pressed=replace(one.pressed, recall=None))
    assert fixed.lines()[1] == "the pool of this device is one allocation: no memory was recalled"
    assert fixed.claim() == "6 preemptions, no memory taken, 0 tokens changed"
    assert "recalls of the pool's memory" not in fixed.table()


def test_shares_in_words() -> None:
    shares = {
        0.0: "no memory",
        0.2: "20% of the pool",
        0.45: "half the pool",
        0.5: "half the pool",
        0.6: "60% of the pool",
    }
    assert {share: taken(share) for share in shares} == {share: f"{said} taken" for share, said in shares.items()}
    assert RECALL.share == 0.5 and RecallResult(0, 0, 0, 0, 0).share == 0.0
    assert counted(1, "token") == "1 token" and counted(1000, "token") == "1,000 tokens"
    assert changed_tokens([[1, 2], [3]], [[1, 3, 4], [3]]) == 2


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


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({"engines": (ENGINE, {**ENGINE, "failed": 2})}, "2 failed, 0 tokens changed, memory never above the limit"),
        (
            {"engines": ({**ENGINE, "changed_tokens": 1}, ENGINE)},
            "none failed, 1 token changed, memory never above the limit",
        ),
        ({"most_held_bytes": 1360 * MIB}, "none failed, 0 tokens changed, memory above the limit"),
    ],
)
def test_whatever_is_not_so_fails_the_shared_demo(changes: dict[str, Any], claim: str) -> None:
    one = replace(SHARED, **changes)
    served = 30 if "2 failed" in claim else 32
    assert one.claim() == f"{served} requests served, {claim}" and not one.is_success


def test_prompts_are_pieces_of_the_held_out_text() -> None:
    prompts = demo_prompts(24, seed=3)
    assert prompts == demo_prompts(24, seed=3) != demo_prompts(24, seed=4)
    texts = passages()
    assert all(prompt in texts[i % len(texts)] for i, prompt in enumerate(prompts))
    assert max(len(prompt.split()) for prompt in prompts) > 8 * min(len(prompt.split()) for prompt in prompts)


def test_the_first_wave_fills_the_pool() -> None:
    assert waves([5, 5, 5, 5], usable=11) == [range(3), range(3, 4)]
    assert waves([5, 5], usable=10) == waves([5, 5], usable=99) == [range(2)]
