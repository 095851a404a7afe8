"""The self-check on a real device: everything passes, the result is kept, and a fault in its process harms no other."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from pagetide.engine.self_check.cache import Cache
from pagetide.engine.self_check.check import self_check
from pagetide.engine.self_check.identity import identity_of
from pagetide.engine.self_check.parts import check_part, cuda_seams
from pagetide.engine.self_check.process import try_parts
from pagetide.engine.self_check.report import ABSENT, FAILED, PARTS, PASSED, POOL

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("part", PARTS)
def test_each_part_passes_or_is_not_there(part: str) -> None:
    outcome = check_part(part, cuda_seams(0))
    if outcome.state == ABSENT:
        pytest.skip(f"{part}: {outcome.reason}")
    assert outcome.state == PASSED, outcome.reason
    print(f"{part}: {outcome.seconds:.2f} s")


def test_swaps_pass_over_one_allocation_too() -> None:
    outcome = check_part("swaps", cuda_seams(0, failed=[POOL]))
    assert outcome.state == PASSED, outcome.reason


def test_a_first_check_passes_in_its_processes_and_the_second_is_the_kept_one(tmp_path: Path) -> None:
    first = self_check(0, cache=Cache(tmp_path))
    assert (first.state, first.cached) == (PASSED, False), first.to_dict()
    print(f"tried in {sum(one.seconds for one in first.outcomes):.2f} s, without the start of processes")
    second = self_check(0, cache=Cache(tmp_path))
    assert second.cached is True
    assert second.outcomes == first.outcomes
    assert json.loads(json.dumps(dict(first.identity))) == first.identity


def test_a_fault_on_the_device_costs_its_part_and_neither_the_others_nor_this_process() -> None:
    program = """
import json, sys, torch
from dataclasses import replace
from pagetide.engine.self_check import child
from pagetide.engine.self_check.identity import identity_of
from pagetide.engine.self_check.parts import cuda_seams
request = json.loads(sys.argv[1])
answers = child.private_output()
def faulty():
    torch.zeros(3, device="cuda")[torch.tensor([1 << 20], device="cuda")].sum().item()
seams = replace(cuda_seams(0), makers={"triton": faulty})
child.answer(answers, {"identity": identity_of(0)})
child.serve(request["parts"], lambda: seams, answers)
"""

    def command(parts: Sequence[str], failed: Collection[str]) -> list[str]:
        return [sys.executable, "-P", "-c", program, json.dumps({"parts": list(parts)})]

    triton, swaps = try_parts(["triton", "swaps"], command, identity_of(0))
    if triton.state == ABSENT:
        pytest.skip(f"triton: {triton.reason}")
    assert (triton.state, swaps.state) == (FAILED, PASSED), (triton.reason, swaps.reason)
    assert float(torch.ones(4, device="cuda").sum()) == 4


def test_an_engine_starts_with_it_and_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagetide import LLM, SamplingParams

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for cached in (False, True):
        with LLM("demo", device="cuda", kv_memory="64MiB", share=False) as llm:
            told = llm.stats()["self_check"]
            assert (told["state"], told["cached"]) == (PASSED, cached), told
            assert llm.generate("The sea was", SamplingParams(max_new_tokens=4))[0].token_ids
