"""The modelled clock against sums by hand, and the traces: what is read of them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.kept_prefixes import endless_hits, tiers
from benchmarks.load import BadTrace, agentic, azure, mooncake
from benchmarks.modelled_clock import H200, LLAMA_8B, Roofline
from benchmarks.prefix_hits import made_loads
from pagetide.scheduler.plan import Plan


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
    rows = np.arange(len(starts))
    plan = Plan(0, rows, np.array(starts, np.int64), np.array(lengths, np.int64), np.array(samples, np.bool_))
    seconds = Roofline(H200, LLAMA_8B).plan_s(plan)
    assert seconds == pytest.approx(seconds_by_hand(starts, lengths, samples), rel=1e-12)


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
    first, second = azure(tmp_path).turns
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


@pytest.mark.parametrize("num_blocks", [0, 2_000])
def test_a_tier_for_all_blocks_finds_what_an_endless_pool_finds_and_writes_each_once(num_blocks: int) -> None:
    prompts = made_loads(0)["conversations"][:300]
    endless, num_all = endless_hits(prompts)
    hits, read, written = tiers(prompts, num_blocks, num_all)
    assert (hits, written) == (endless, num_all)
    assert (read == endless) == (num_blocks == 0)
    fewer, _, again = tiers(prompts, num_blocks, num_all // 8)
    assert fewer < endless
    assert again > num_all
