"""Outputs compared up to the last bits of log-probabilities, or up to times: what else a step computes shows there."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pagetide import RequestOutput


def nearly(value: Any) -> Any:
    """Plain data to compare with: its floats may differ in their last bits."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.astuple(value)
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-4)
    if isinstance(value, dict):
        return {key: nearly(one) for key, one in value.items()}
    return type(value)(map(nearly, value)) if isinstance(value, list | tuple) else value


def alike(outputs: list[RequestOutput]) -> list[Any]:
    """All but the times and ids, and what depends on what ran before."""
    found = []
    for output in outputs:
        completions = tuple(dataclasses.replace(one, timings=None, num_preemptions=0) for one in output.completions)
        found.append(dataclasses.replace(output, request_id="", num_cached_tokens=0, completions=completions))
    return found
