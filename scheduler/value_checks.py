"""Checks of single parameter values. They raise ValueError with the name and at most 80 characters of the value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np


def is_list(value: Any) -> bool:
    """Whether `value` is an iterable, but not text, bytes or a mapping."""
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


def check_most(name: str, values: Sized | None, most: int) -> None:
    """Check that there are at most `most` entries. None is valid."""
    if values is not None and len(values) > most:
        raise ValueError(f"{name} must have at most {most:,} entries, got more")


def check_strings(name: str, strings: Sequence[object], most: int, longest: int) -> None:
    """Check for at most `most` strings, none empty or longer than `longest` characters."""
    check_most(name, strings, most)
    for one in strings:
        if not isinstance(one, str) or not one:
            raise ValueError(f"{name} must be non-empty strings, got {one!r:.80}")
        if len(one) > longest:
            raise ValueError(f"{name} must have at most {longest} characters each, got {len(one):,}: {one!r:.80}")


def check_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    """Check for an integer (numpy's too) from `least` to `most`. None is valid."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name} must be an integer, got {value!r:.80}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")


def check_number(name: str, value: object, low: float, high: float, rule: str, open_below: bool = False) -> None:
    """Check for a finite number from `low` (or above it) to `high`; `rule` says so in words. None is valid."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise ValueError(f"{name} must be a number, got {value!r:.80}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or (open_below and number <= low):
        raise ValueError(f"{name} {rule}, got {value}")
