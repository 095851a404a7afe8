"""Text of other people's processes: what of it reaches a terminal, and in how many cells."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.segment import Segment

from pagetide.monitor.view.symbols import ASCII, UNICODE, Symbols
from pagetide.monitor.view.text import BOLD, blank, crop, cut, left, printable, right, spread, trimmed, width_of

# Halves of surrogate pairs too: Python keeps them for the bytes of a command line that are no UTF-8.
ANY_TEXT = st.text(st.characters(), max_size=60)
SYMBOLS = st.sampled_from([UNICODE, ASCII])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("python train.py --lr 3e-4", "python train.py --lr 3e-4"),
        ("a\tb\r\nc   d ", "a b c d"),  # python -c 'several lines'
        ("\x1b[31mred\x1b[0m", "�[31mred�[0m"),
        ("\x9b31m \x07 \x7f \x00", "�31m � � �"),
        ("\x1b]52;c;cm0gLXJm\x07", "�]52;c;cm0gLXJm�"),  # would write into the clipboard
        ("a\u202eb\u2066c\u200bd\ufeffe", "a�b�c�d�e"),  # turns the direction, isolates, has no width
        ("caf\u0065\u0301", "café"),
        ("z\u0335\u0489\u0301algo", "zalgo"),
        ("\udcff\udc80.bin", "��.bin"),  # bytes that are no UTF-8
        ("\u2028line\u2029", "line"),
        ("[bold red]not markup[/] :smile:", "[bold red]not markup[/] :smile:"),
        ("模型 🚀", "模型 🚀"),
    ],
)
def test_only_printable_characters_of_a_known_width_are_left(text: str, shown: str) -> None:
    assert printable(text, ascii_only=False) == shown


def test_in_ascii_what_is_not_ascii_is_a_question_mark() -> None:
    assert printable("café 模型\x1b[0m", ascii_only=True) == "caf? ???[0m"


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("train.py", 8, "train.py"),
        ("train.py", 7, "train.…"),
        ("train.py", 1, "…"),
        ("train.py", 0, ""),
        ("模型模型", 8, "模型模型"),
        ("模型模型", 7, "模型模…"),
        ("模型模型", 6, "模型…"),  # half a character is none
        ("", 3, ""),
    ],
)
def test_what_is_too_long_ends_in_an_ellipsis(text: str, width: int, shown: str) -> None:
    assert cut(text, width, UNICODE) == shown


def test_in_ascii_the_ellipsis_is_three_dots_or_as_many_as_fit() -> None:
    assert [cut("train.py", width, ASCII) for width in (8, 7, 3, 2, 0)] == ["train.py", "trai...", "...", "..", ""]


def test_a_command_line_of_two_million_characters_is_looked_at_in_part() -> None:
    assert cut("x" * 2_000_000, 5, UNICODE) == "xxxx…"
    assert cut(" " * 2_000_000 + "x", 5, UNICODE) == "…"  # there is more than what was looked at


@given(ANY_TEXT, st.integers(0, 40), SYMBOLS)
def test_a_cell_of_a_table_has_its_width_whatever_stands_in_it(text: str, width: int, symbols: Symbols) -> None:
    assert cell_len(cut(text, width, symbols)) <= width
    for cell in (left(text, width, symbols), right(text, width, symbols)):
        assert cell.cell_length == width
        assert cell.text.isprintable()
        assert symbols is UNICODE or cell.text.isascii()
        cell.text.encode()


def test_a_line_is_spread_cropped_and_trimmed() -> None:
    line = spread([Segment("left", BOLD)], [Segment("right")], 12)
    assert (text_of(line), width_of(line)) == ("left   right", 12)
    assert text_of(spread([Segment("left")], [Segment("right")], 7)) == "left ri"
    assert text_of(crop([Segment("模型模型")], 5)) == "模型 "
    assert trimmed([Segment("left ", BOLD), blank(3), Segment(" ")]) == [Segment("left", BOLD)]
    assert trimmed([blank(3)]) == []


def text_of(line: list[Segment]) -> str:
    return "".join(segment.text for segment in line)
