"""Numbers of the command line, refused with a sentence."""

from __future__ import annotations

import argparse


def whole(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on is needed, got {text!r}")
    return int(text)


def from_0(text: str) -> float:
    """A number that is not negative."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"a number from 0 on is needed, got {text!r}")
    return number


def above_0(text: str) -> float:
    """A number above 0."""
    if not (number := from_0(text)):
        raise argparse.ArgumentTypeError(f"a number above 0 is needed, got {text!r}")
    return number
