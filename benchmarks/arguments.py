"""Command-line arguments that several benchmarks share, with their checks."""

from __future__ import annotations

import argparse
from pathlib import Path

from pagetide.monitor.units import parse_bytes

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"  # beside the checkout
BUILT_IN = "none"


def add_data(parser: argparse.ArgumentParser, what: str, built_in: str) -> None:
    """Add `--data DIR`: `args.data` is the folder with `what`, or None for what is `built_in`."""
    parser.add_argument(
        "--data", type=_folder, default=DATA if DATA.is_dir() else None, metavar="DIR",
        help=f"folder with {what}; {BUILT_IN!r}: {built_in} (default: ../shared/data where it exists, else {BUILT_IN!r})",
    )  # fmt: skip


def _folder(text: str) -> Path | None:
    if text == BUILT_IN:
        return None
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}; name another, or {BUILT_IN!r}")
    return Path(text)


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


def size(text: str) -> int:
    """Bytes, such as 512MiB."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
