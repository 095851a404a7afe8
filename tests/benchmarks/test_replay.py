"""The replay benchmark: its clock against sums by hand, its stub against a plain one, its numbers, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_results import read_results

from benchmarks.replay_clock import GPUS, MODELS, ReplayClock, Roofline
from benchmarks.replay_run import PoolShare, Replay, ReplaySettings, replay, settings_for
from benchmarks.replay_stub import ReplayStub
from benchmarks.replay_traces import BadTrace, Trace, agentic, azure, mooncake, synthetic
from pagetide.cache.block_table import BlockCopies
from pagetide.cache.host_tier import Swaps
from pagetide.scheduler.plan import NO_TOKENS, Plan, Resize, Result

ROOT = Path(__file__).resolve().parents[2]
ROOFLINE = Roofline(GPUS["h200"], MODELS["llama-3.1-8b"])
FREE_COPIES = replace(GPUS["h200"], host_bytes_per_s=1e30)
BLOCK_BYTES = 512 * 2 * 2 * 32 * 8 * 128  # K and V of 512 tokens, 2 bytes a number


def plan(starts: list[int], lengths: list[int], samples: list[bool], **more: Any) -> Plan:
    rows = np.arange(len(starts))
    return Plan(0, rows, np.array(starts, np.int64), np.array(lengths, np.int64), np.array(samples, np.bool_), **more)


def seconds_by_hand(starts: list[int], lengths: list[int], samples: list[bool]) -> float:
    layer = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    head = 4096 * 128256
    attended = sum(start + i + 1 for start, length in zip(starts, lengths, strict=True) for i in range(length))
    flops = 2 * layer * sum(lengths) + 2 * head * sum(samples) + 4 * 32 * 32 * 128 * attended
    read = 2 * (layer + head) + 131_072 * (sum(starts) + 2 * sum(lengths))
    return max(flops / 989e12, read / 4.8e12) + 1e-3


@pytest.mark.parametrize(
    ("starts", "lengths", "samples"),
    [
        ([100, 7], [1, 1], [True, True]),
        ([100, 0], [1, 8000], [True, True]),
        ([100, 512], [1, 700], [True, False]),
        ([99], [1], [False]),
    ],
)
def test_the_clock_is_the_roofline(starts: list[int], lengths: list[int], samples: list[bool]) -> None:
    seconds = ReplayClock(ROOFLINE, 512).step_s(plan(starts, lengths, samples))
    assert seconds == pytest.approx(seconds_by_hand(starts, lengths, samples), rel=1e-12)


def test_rows_that_decode_on_cost_what_they_would_alone() -> None:
    clock, rows = ReplayClock(ROOFLINE, 512), np.array([3, 5])
    for step in range(5):
        starts = [100 + step, 7_000 + step]
        decoding = replace(plan(starts, [1, 1], [True, True]), rows=rows)  # the very same array, as the scheduler's
        assert clock.step_s(decoding) == pytest.approx(seconds_by_hand(starts, [1, 1], [True, True]), rel=1e-12)
    assert clock.step_s(plan([0], [600], [True])) == pytest.approx(seconds_by_hand([0], [600], [True]), rel=1e-12)


def test_moves_and_resizes_are_charged() -> None:
    clock, blocks = ReplayClock(ROOFLINE, 512), np.arange(1, 4, dtype=np.int32)
    moving = plan([], [], [], copies=BlockCopies(blocks, blocks + 4), resize=Resize(np.arange(2), np.arange(5)))
    assert clock.step_s(moving) == pytest.approx(1e-3 + 3 * 2 * BLOCK_BYTES / 4.8e12 + 2 * 140e-6 + 5 * 127e-6)


def test_host_copies_are_charged_by_the_link() -> None:
    clock, three = (
        ReplayClock(Roofline(GPUS["h200"], MODELS["llama-3.1-8b"], gpus=2), 512),
        np.arange(1, 4, dtype=np.int32),
    )
    swaps = Swaps(three, three, three[:1], three[:1], BlockCopies(three[:2], three[1:]), num_before=1)
    before, beside = BLOCK_BYTES / 100e9 + 2 * 2 * BLOCK_BYTES / 9.6e12, 3 * BLOCK_BYTES / 100e9
    assert clock.copy_s(plan([], [], [], swaps=swaps)) == pytest.approx((before, beside))
    assert clock.copy_s(plan([], [], [])) == (0, 0)
    empty = Swaps(NO_TOKENS, NO_TOKENS, NO_TOKENS, NO_TOKENS)
    assert clock.copy_s(plan([], [], [], swaps=empty)) == (0, 0)


class Plain(Replay):
    """Also keeps every token's time of every request, step by step."""

    def __init__(self, trace: Trace, settings: ReplaySettings) -> None:
        super().__init__(trace, settings)
        self.times: dict[str, list[float]] = {str(number): [] for number in range(len(trace.turns))}
        self.expected_s = self.out_blocks = self.in_blocks = 0.0
        execute = self.stub.execute

        def recorded(plan: Plan, now: float, *more: Any) -> Result:
            result = execute(plan, now, *more)
            for row in plan.rows[plan.samples]:
                self.times[self.scheduler.rows.request_ids[row]].append(now)
            if plan.swaps is not None:
                self.out_blocks += len(plan.swaps.out_slots)
                self.in_blocks += len(plan.swaps.in_slots)
            return result

        self.stub.execute = recorded  # type: ignore[method-assign]


@pytest.mark.parametrize("host_slots", [0, 40])
def test_latencies_and_bytes_are_those_of_a_plain_count(host_slots: int) -> None:
    """A pool that is far too small, so that sequences are preempted, and a co-tenant who takes from it."""
    trace = synthetic(80, rate=20.0)
    settings = settings_for(trace, Roofline(GPUS["a100"], MODELS["llama-3.1-8b"]), 512)
    settings = replace(settings, num_blocks=120, host_slots=host_slots, tenant=PoolShare.parse("0:0,3:0.8,9:0.1"))
    run = Plain(trace, settings)
    run.serve()
    run.scheduler.check_invariants()
    outcome = run.outcome(0.0, 0.0)
    times = [run.times[str(number)] for number in range(len(trace.turns))]
    assert outcome.ended.all() and [len(some) for some in times] == [turn.output_tokens for turn in trace.turns]
    first = [some[0] - turn.at_s for some, turn in zip(times, trace.turns, strict=True)]
    assert outcome.ttft_s == pytest.approx(first)
    assert np.sort(outcome.gaps_s) == pytest.approx(np.sort(np.concatenate([np.diff(some) for some in times])))
    means = [np.diff(some).mean() if len(some) > 1 else np.nan for some in times]
    assert outcome.tpot_s == pytest.approx(means, nan_ok=True)
    assert outcome.modelled_s == max(some[-1] for some in times)
    counters = outcome.counters
    assert counters.preemptions and counters.given_back_extents
    assert counters.demoted_bytes == run.out_blocks * BLOCK_BYTES
    assert counters.promoted_bytes == run.in_blocks * BLOCK_BYTES
    assert bool(host_slots) == bool(counters.demoted_bytes)
    assert outcome.copy_s >= (counters.demoted_bytes + counters.promoted_bytes) / 25e9 * (1 - 1e-9)
    assert host_slots or outcome.copy_s == 0


def test_copies_beside_computing_are_hidden_by_it() -> None:
    trace = synthetic(80, rate=20.0)
    settings = settings_for(trace, ROOFLINE, 512)
    settings = replace(settings, num_blocks=120, host_slots=100)
    outcome = replay(trace, settings)
    computing = replay(trace, replace(settings, roofline=replace(settings.roofline, gpu=FREE_COPIES)))
    assert 0 < computing.copy_s < outcome.copy_s / 1e6
    assert computing.busy_s < outcome.busy_s < computing.busy_s + outcome.copy_s


def test_a_prompt_whose_last_chunk_is_one_token_has_a_first_token() -> None:
    trace = synthetic(1)
    stub = ReplayStub(trace, 4)
    stub.execute(plan([], [], []), 0.0)
    stub.execute(plan([5], [1], [True]), trace.turns[0].at_s + 2.0)
    assert stub.ttft_s[0] == pytest.approx(2.0)


MOONCAKE = '{"timestamp": 3000, "input_length": 600, "output_length": 9, "hash_ids": [4, 5]}'
AGENTIC = '{"timestamp": 3000, "session": 1, "sub": 0, "input_length": 130, "output_length": 9, "hash_runs": [[7, 2]]}'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10"


def test_traces_are_read(tmp_path: Path) -> None:
    (tmp_path / "mooncake_conversation_0-20min.jsonl").write_text(f"{MOONCAKE}\n{MOONCAKE}\n")
    first, second = mooncake(tmp_path).turns
    assert (first.at_s, second.at_s, second.prompt_tokens, second.ids.tolist()) == (3.0, 4.5, 600, [4, 5])
    (tmp_path / "agentic_sessions.jsonl").write_text(AGENTIC)
    assert agentic(tmp_path).turns[0].ids.tolist() == [7, 8]
    (tmp_path / "azure2023_code_0-20min.csv").write_text(f"{AZURE}\n2023-11-16 18:17:05.4799600,7,11\n")
    first, second = azure(tmp_path, "code").turns
    assert (first.at_s, second.prompt_tokens, second.output_tokens) == (0.0, 7, 11)
    assert second.at_s == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (None, "cannot be read"),
        ("", "holds no request"),
        (MOONCAKE + "\n{", "line 2 of"),
        ("[1]", "a JSON object"),
        (MOONCAKE.replace("output_length", "output"), "'output_length' is missing"),
        (MOONCAKE.replace("600", "-600"), "at least 1 token of prompt, got -600"),
        (MOONCAKE.replace("3000", "-3000"), "from 0 s on"),
    ],
)
def test_a_broken_trace_is_refused_with_its_line(tmp_path: Path, broken: str | None, why: str) -> None:
    if broken is not None:
        (tmp_path / "mooncake_conversation_0-20min.jsonl").write_text(broken)
    with pytest.raises(BadTrace, match=why):
        mooncake(tmp_path)


@pytest.mark.parametrize("text", ["x", "0:1", "0:-0.1", "-1:0.2", "nan:0.2", "5:0.1,5:0.2", ""])
def test_a_co_tenant_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="co-tenant"):
        PoolShare.parse(text)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.replay", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280
    )


def test_the_program_writes_what_it_rests_on(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason='the picture needs the extra "examples"')
    file, picture = tmp_path / "new" / "figures.json", tmp_path / "new" / "picture"
    done = command("--trace", "synthetic", "--requests", "40", "--json", str(file), "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    for words in (
        "2 x NVIDIA H200 SXM (989 TFLOP/s",
        "Llama-3.1-8B",
        "log-normal",
        "copies at 100 GB/s beside computing",
        "SLO:",
    ):
        assert words in done.stdout
    content = read_results(file)
    clock, replays = content["parameters"]["modelled_clock"], content["parameters"]["replays"]
    assert clock["gpu"]["name"] == "NVIDIA H200 SXM" and clock["gpu"]["flops"] == 989e12 and clock["gpus"] == 2
    assert clock["model"]["layers"] == 32 and clock["share_of_peaks_reached"] == 1.0
    assert list(replays) == ["alone", "co-tenant", "co-tenant, host tier"]
    assert replays["alone"]["block_bytes"] == BLOCK_BYTES and replays["alone"]["host_tier_bytes"] == 0
    assert content["parameters"]["slo"] == {"ttft_s": 5.0, "tpot_s": 0.1}
    names = {figure["name"] for figure in content["figures"]}
    for name in (
        "tokens computed twice",
        "swapped out",
        "time to first token, p99",
        "time between tokens, p50",
        "goodput",
    ):
        assert {f"{column}: {name}" for column in replays} <= names
    assert picture.with_suffix(".png").stat().st_size and picture.with_suffix(".svg").stat().st_size


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--gpus", "-1"], "a whole number from 1 on"),
        (["--trace", "nope"], "invalid choice"),
        (["--data", "no-such-folder"], "there is no folder"),
        (["--tenant", "0:2"], "a share in"),
        (["--slo", "0,1"], "above 0 s"),
        (["--trace", "synthetic", "--requests", "5", "--blocks", "1"], "too small"),
        (["--no-cache", "--host-gb", "4"], "take either"),
    ],
)
def test_the_program_refuses_with_a_sentence(arguments: list[str], why: str) -> None:
    done = command(*arguments)
    assert done.returncode != 0 and why in done.stderr and "Traceback" not in done.stderr
