"""Command-line arguments that several benchmarks share, with their checks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from pagetide.common.units import parse_bytes

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"  # beside the checkout
BUILT_IN = "none"


def parser_of(doc: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """A parser with `--json FILE`, `--seed` and, with a default, `--rounds`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="where the figures go, with samples, machine and versions")
    parser.add_argument("--seed", type=int, default=0)
    if rounds is not None:
        parser.add_argument("--rounds", type=whole, default=rounds, help="default %(default)s")
    return parser


def names_of(kinds: Sequence[str], what: str) -> Callable[[str], list[str]]:
    """The type of an argument that holds some of these names, with commas between them."""

    def names(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in kinds]:
            raise argparse.ArgumentTypeError(f"there is no {what} {', '.join(unknown)}; there are {', '.join(kinds)}")
        return text.split(",")

    return names


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


def above_0(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"a number above 0 is needed, got {text!r}")
    return number


def size(text: str) -> int:
    """Bytes, such as 512MiB."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
