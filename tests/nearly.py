"""Outputs compared up to the last bits of their log-probabilities, which depend on what else a step computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest


def nearly(value: Any) -> Any:
    """Plain data to compare with: its floats may differ in their last bits."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.astuple(value)
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-4)
    if isinstance(value, dict):
        return {key: nearly(one) for key, one in value.items()}
    return type(value)(map(nearly, value)) if isinstance(value, list | tuple) else value
