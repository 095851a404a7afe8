"""Patterns of configurations match what Python's do, and do not take for ever."""

from __future__ import annotations

import re

import pytest

from pagetide.engine.loading import name_patterns
from pagetide.engine.loading.name_patterns import matches

NAMES = [f"model.layers.{i}.{leaf}" for i in range(12) for leaf in ("mlp.down_proj", "self_attn.q_proj")] + ["lm_head"]


def test_names_that_patterns_match() -> None:
    """Here, or in another process where a pattern might take long."""
    patterns = [
        r".*layers\.\d+\.mlp",
        "lm",
        "layers",
        "",
        r"model\.layers\.(1|2)\..*q_proj$",
        "(a|lm)_head",
        r"(\w+\.)+down_proj$",
    ]
    expected = {one: {name for name in NAMES if re.match(one, name)} for one in patterns}
    assert matches(patterns, NAMES) == expected
    assert [len(expected[one]) for one in patterns] == [12, 1, 0, 25, 2, 1, 12]


@pytest.mark.parametrize("pattern", ["(", "(a|b", "*", "(?P<a", "a{3,1}(b)"])
def test_a_pattern_that_is_none(pattern: str) -> None:
    with pytest.raises(re.error):
        matches([pattern], NAMES)


@pytest.mark.parametrize("pattern", ["(a+)+$", ".*.*.*.*.*.*.*.*z", "(a|aa)+$"])
def test_a_pattern_that_takes_for_ever(pattern: str, monkeypatch) -> None:
    monkeypatch.setattr(name_patterns, "_MOST_S", 1.0)
    with pytest.raises(ValueError, match=r"its patterns (take more than|cannot be matched \(timed out\))"):
        matches([pattern], ["a" * 200 + "b"])
