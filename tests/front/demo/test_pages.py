"""The pages of the demo in all sizes: exactly as many lines as the terminal has, none too wide, nothing lost."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from demo_states import PROSE, demo_state, shared_state
from rich.console import Console
from rich.segment import Segment, SegmentLines

from pagetide.demo.display import fitted
from pagetide.demo.shared_view import Holding, column_of, shared_line, shared_page
from pagetide.demo.text_panes import wrapped
from pagetide.demo.view import DemoState, demo_line, demo_page
from pagetide.monitor.view.symbols import ASCII, UNICODE, Symbols

SIZES = [(80, 24), (100, 30), (200, 50), (60, 15), (30, 8), (5, 2), (1, 1)]
ESCAPES = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
PAGES = [
    (demo_page, demo_state()),
    (demo_page, demo_state(num_panes=1)),
    (demo_page, demo_state(num_blocks=5000)),
    (demo_page, replace(demo_state(), pool=None)),
    (demo_page, replace(demo_state(), history=(), panes=())),
    (shared_page, shared_state()),
    (shared_page, shared_state(1)),
    (shared_page, replace(shared_state(), holdings=())),
]


def drawn(page: Any, state: Any, width: int, height: int, symbols: Symbols = UNICODE, **options: Any) -> list[str]:
    """The page as a console of that size gets it."""
    file = io.StringIO()
    console = Console(
        file=file, width=width, height=height, force_terminal=True, color_system="256", legacy_windows=False, **options
    )
    console.print(
        SegmentLines(fitted(page(state, 83.2, width, height, symbols), width, height), new_lines=True), end=""
    )
    return file.getvalue().split("\n")[:-1]


@pytest.mark.parametrize(("page", "state"), PAGES)
@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("symbols", [UNICODE, ASCII])
def test_a_page_has_the_size_of_its_terminal(page: Any, state: Any, width: int, height: int, symbols: Symbols) -> None:
    lines = drawn(page, state, width, height, symbols)
    assert len(lines) == height
    plain = [ESCAPES.sub("", line) for line in lines]
    assert all(len(line) <= width for line in plain)
    if symbols is ASCII:
        assert "".join(plain).isascii()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 50)])
def test_all_that_matters_is_on_the_page(width: int, height: int) -> None:
    text = "\n".join(drawn(demo_page, demo_state(), width, height, no_color=True))
    plain = ESCAPES.sub("", text)
    for said in (
        "RECALL: half of the pool, 11.62 MiB, must go back to the system.", "running  8", "waiting  4", "preempted  5",
        "done  1/24", "1,523 tokens/s", "1:23", "A-X held by that request", "free", "cached prefix", "without memory",
        "running, 0 tokens", "running, 1 tokens",
    ):  # fmt: skip
        assert said in plain, said
    assert "THE FIELDS LAY" in plain.replace("\n", " "), "the newest text"
    for letter in "ABCDEFGHIJKL":
        assert len(re.findall(rf"(?<![A-Za-z]){letter}(?![a-z])", plain)) >= 8, "its blocks in the map"
    caption = "the run so far: █ blocks held, ░ with memory and free; full height 223"
    assert (caption in plain) == (height >= 28), "the chart, where there is room for one, says what it is"
    text = "\n".join(drawn(shared_page, shared_state(), width, height, no_color=True))
    plain = ESCAPES.sub("", text)
    for said in (
        "engine A", "engine B", "external", "done 15/16", "run 10", "wait 12", "preempted 13", "recalls 14", "321 MiB",
        "programs grown",
    ):  # fmt: skip
        assert said in plain, said


def test_a_narrow_page_says_it_in_fewer_words() -> None:
    plain = [ESCAPES.sub("", line).rstrip() for line in drawn(demo_page, demo_state(), 60, 15)]
    assert plain[2] == " run  8  wait  4  preempted  5  done  1/24  1,523 tokens/s"
    assert " A-X requests  · free  + cached  _ no memory" in plain


def test_without_colours_there_are_none() -> None:
    for page, state in PAGES:
        coloured = {code for line in drawn(page, state, 100, 30) for code, _ in ESCAPES.findall(line)}
        plain = {code for line in drawn(page, state, 100, 30, no_color=True) for code, _ in ESCAPES.findall(line)}
        assert plain <= {"0", "1", "2"} < coloured | {"0", "1", "2"}


def test_plain_lines_fit_a_terminal_of_80_columns() -> None:
    assert demo_line(demo_state(), 83.21) == (
        " 83.2s   1/24 done  run  8  wait  4  pool 108/111  preempted  5  1,523 tokens/s"
    )
    assert demo_line(DemoState("title", "now"), 1.0) == ""
    line = shared_line(shared_state(), 83.21)
    assert line == " 83.2s  A   8.0 MiB 15/16 done  B  60.0 MiB  0/16 done  external  87.0 MiB"
    assert len(line) <= 80 and shared_line(replace(shared_state(), holdings=()), 1.0) == ""


def test_a_column_of_the_chart_adds_up() -> None:
    def column(programs: int, kv: tuple[int, int], external: int) -> str:
        return column_of(Holding(programs, kv, external, (False, False)), 100, 10)

    assert column(0, (0, 0), 0) == ".........."
    assert column(10, (20, 30), 20) == "#AABBB..xx"
    assert column(0, (50, 50), 0) == "AAAAABBBBB"
    assert column(0, (4, 4), 0) == "B.........", "edges are rounded, not heights"
    assert column(0, (80, 0), 40) == "AAAAAAAAxx", "measured at different instants"
    assert column(200, (0, 0), 0) == "##########"


@pytest.mark.parametrize("width", [1, 7, 12, 40, 300])
def test_wrapped_text_is_complete_and_fits(width: int) -> None:
    prompt, text = PROSE[:100], PROSE[100:400]
    lines = wrapped(prompt, text, width)
    words = ["".join(segment.text for segment in line) for line in lines]
    assert all(len(line) <= width for line in words)
    joined = "".join(words) if width < 12 else " ".join(words)
    assert joined.replace(" ", "") == (prompt + text).replace(" ", "")
    dim = "".join(segment.text for line in lines for segment in line if segment.style is not None)
    assert dim.replace(" ", "") == prompt.replace(" ", "")
    assert wrapped("", "", width) == []


def test_wide_characters_take_two_cells() -> None:
    lines = wrapped("", "你好 装好 之后敲一句", 6)
    assert all(Segment.get_line_length(line) <= 6 for line in lines)
    assert "".join(segment.text for line in lines for segment in line) == "你好装好之后敲一句"
