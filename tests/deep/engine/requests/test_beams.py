"""Beams and forks of other families, and in every way: those of transformers, and what each continuation gives alone."""

from __future__ import annotations

import pytest
from beam_rig import WAYS, check_few_candidates, check_ways, family, ours, prompt, theirs, tokens
from engines import TinyEngine
from families import FAMILIES
from fork_rig import check_forks

ENDS_OF_WAYS = ["plain", "penalised"]


@pytest.mark.parametrize(
    ("name", "pressure", "ways"),
    [
        ("llama", "room for all", WAYS), ("llama", "preempted, nothing kept", WAYS), ("gemma2", "preempted", WAYS),
        ("gpt2", "preempted", ENDS_OF_WAYS), ("gpt_oss", "preempted", ENDS_OF_WAYS),
    ],
)  # fmt: skip
def test_the_beams_of_transformers(name: str, pressure: str, ways: list[str]) -> None:
    check_ways(name, pressure, ways)


@pytest.mark.parametrize(("num_beams", "allowed", "steps", "usable"), [(2, 1, 1, 120), (4, 1, 3, 13), (6, 2, 2, 120)])
def test_fewer_candidates_than_beams(num_beams: int, allowed: int, steps: int, usable: int) -> None:
    check_few_candidates(num_beams, allowed, steps, usable)


def test_a_pool_for_one_beam_is_enough_for_all() -> None:
    ids = prompt(6)
    expected = theirs("llama", ids, (), num_beams=3, num_return_sequences=3)
    for limits in ({"usable": 8}, {"usable": 100, "max_seqs": 1}):  # 31 tokens at most; a beam comes to 29
        engine = TinyEngine(family("llama"), block_size=4, **limits)
        assert tokens(ours(engine, ids, (), num_beams=3, n=3)) == expected


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"llama"}))
def test_forks_have_the_tokens_that_each_has_alone(name: str) -> None:
    check_forks(name)
