"""What the demo shows: pages in all sizes, exactly as many lines as the terminal has, none too wide, nothing lost; the map of
the pool against an oracle from the tables; a live page in a real pseudo-terminal, with resizes and signals; lines for a pipe.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_states import PROSE, demo_state, shared_state
from fakes import World
from monitors import wait_until
from rich.console import Console
from rich.segment import Segment, SegmentLines
from terminals import ESCAPES, Terminal, terminal

from pagetide.common.units import MIB
from pagetide.demo.block_map import CACHED, FREE, UNMAPPED, BlockHolders, MapShape, holders_of, map_lines, tile_holders
from pagetide.demo.display import LINE_S, LivePage, fitted, open_display, print_result
from pagetide.demo.page import DemoState, Holding, column_of, demo_line, demo_page, holding_lines, wrapped
from pagetide.frames.source import FrameSource, MemoryFigures, PoolFacts
from pagetide.monitor.view.symbols import ASCII, UNICODE, Symbols
from pagetide.scheduler.request import Request, Sampling

SIZES = [(80, 24), (100, 30), (200, 50), (60, 15), (30, 8), (5, 2), (1, 1)]
PAGES = [
    demo_state(),
    demo_state(num_panes=1),
    demo_state(num_blocks=5000),
    replace(demo_state(), pool=None),
    replace(demo_state(), history=(), panes=()),
    shared_state(),
    shared_state(1),
    replace(shared_state(), holdings=()),
]


def drawn(state: DemoState, width: int, height: int, symbols: Symbols = UNICODE, **options: Any) -> list[str]:
    """The page as a console of that size gets it."""
    file = io.StringIO()
    options |= {"force_terminal": True, "color_system": "256", "legacy_windows": False}
    lines = fitted(demo_page(state, 83.2, width, height, symbols), width, height)
    Console(file=file, width=width, height=height, **options).print(SegmentLines(lines, new_lines=True), end="")
    return file.getvalue().split("\n")[:-1]


def test_a_page_has_the_size_of_its_terminal() -> None:
    for number, state in enumerate(PAGES):
        for width, height in SIZES:
            for symbols in (UNICODE, ASCII):
                lines = drawn(state, width, height, symbols)
                told = f"page {number} in {width} x {height}"
                assert len(lines) == height, told
                plain = [ESCAPES.sub("", line) for line in lines]
                assert all(len(line) <= width for line in plain), told
                if symbols is ASCII:
                    assert "".join(plain).isascii(), told


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 50)])
def test_all_that_matters_is_on_the_page(width: int, height: int) -> None:
    plain, shared = (
        ESCAPES.sub("", "\n".join(drawn(state, width, height, no_color=True))) for state in (demo_state(), shared_state())
    )
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
    for said in (
        "engine A", "engine B", "external", "done 15/16", "run 10", "wait 12", "preempted 13", "recalls 14", "321 MiB",
        "programs grown",
    ):  # fmt: skip
        assert said in shared, said


def test_a_narrow_page_says_it_in_fewer_words() -> None:
    plain = [ESCAPES.sub("", line).rstrip() for line in drawn(demo_state(), 60, 15)]
    assert plain[2] == " run  8  wait  4  preempted  5  done  1/24  1,523 tokens/s"
    assert " A-X requests  · free  + cached  _ no memory" in plain


def test_without_colours_there_are_none() -> None:
    for state in PAGES:
        coloured = {code for line in drawn(state, 100, 30) for code, _ in ESCAPES.findall(line)}
        plain = {code for line in drawn(state, 100, 30, no_color=True) for code, _ in ESCAPES.findall(line)}
        assert plain <= {"0", "1", "2"} < coloured | {"0", "1", "2"}


def test_plain_lines_fit_a_terminal_of_80_columns() -> None:
    assert demo_line(demo_state(), 83.21) == (" 83.2s   1/24 done  run  8  wait  4  pool 108/111  preempted  5  1,523 tokens/s")
    assert demo_line(DemoState("title", "now"), 1.0) == ""
    line = demo_line(shared_state(), 83.21)
    assert line == " 83.2s  A   8.0 MiB 15/16 done  B  60.0 MiB  0/16 done  external  87.0 MiB"
    assert len(line) <= 80 and demo_line(replace(shared_state(), holdings=()), 1.0) == ""


def test_a_column_of_the_chart_adds_up() -> None:
    def column(programs: int, kv: tuple[int, int], external: int) -> str:
        return column_of(Holding(programs, kv, external, (False, False)), 100, 10)

    assert column(0, (0, 0), 0) == ".........."
    assert column(10, (20, 30), 20) == "#AABBB..xx"
    assert column(0, (50, 50), 0) == "AAAAABBBBB"
    assert column(0, (4, 4), 0) == "B.........", "edges are rounded, not heights"
    assert column(0, (80, 0), 40) == "AAAAAAAAxx", "measured at different instants"
    assert column(200, (0, 0), 0) == "##########"


def test_the_engines_kv_has_a_chart_of_its_own_that_it_fills() -> None:
    grown = tuple(Holding(0, (8 * MIB * n, 4 * MIB), 0, (False, False)) for n in range(1, 6))
    state = replace(shared_state(), holdings=grown)
    lines = ["".join(segment.text for segment in line) for line in holding_lines(state, 14, 16, UNICODE)]
    assert lines == [
        " 321 MiB limit: 1,359 MiB of the device, less programs and weights", *[" " * 9 + "....."] * 2, "       0 .....",
        "  48 MiB KV of the engines",
        *(" " * 9 + row for row in ("     ", "    A", "   BA", "   AA", "  BAA", " BAAA", " AAAA", "AAAAA")),
        "       0 AAAAA", " recalls      ", lines[-1],
    ]  # fmt: skip
    assert len(holding_lines(state, 14, 14, UNICODE)) == 14 and "KV of the engines" in lines[-1]
    for held, top in ((1, 16), (17, 24), (24, 24), (25, 32), (33, 48), (49, 64), (65, 96), (97, 128), (129, 192)):
        one = replace(state, holdings=(Holding(0, (held * MIB, 0), 0, (False, False)),))
        assert holding_lines(one, 14, 16, UNICODE)[4][0].text == f"{top} MiB".rjust(8)


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


# Shows a page until a line comes on standard input.
PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.WARNING)
from demo_states import demo_state
from pagetide.demo.display import open_display
try:
    with open_display(demo_state(), silent=False):
        logging.warning("in between")
        sys.stdin.readline()
    print("four lines of result")
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(130)
"""
TITLE = "24 prompts, one KV pool of 223 blocks for a need of 456"


@contextmanager
def shown(**environ: str) -> Iterator[Terminal]:
    """The program in a terminal, once its page is there; the terminal has to be left as it was."""
    with terminal(PROGRAM, env={"LANG": "C.UTF-8", **environ}) as screen:
        screen.wait_until(lambda: "RECALL" in screen.text)
        yield screen


def test_a_page_fills_the_terminal_follows_its_size_and_leaves_it_as_it_was() -> None:
    with shown() as screen:
        assert screen.alternate and not screen.cursor_shown and TITLE in screen.text
        screen.resize(50, 12)
        screen.wait_until(lambda: "24 prompts, one KV pool o…" in screen.text)
        screen.resize(120, 40)
        screen.wait_until(lambda: TITLE in screen.text and max(screen.rows) == 40)
        screen.type(b"\n")
        assert screen.status() == 0
        assert "four lines of result" in screen.text
        assert "WARNING:root:in between" in screen.text, "what was logged meanwhile"


def test_without_colours_letters_remain() -> None:
    with shown(NO_COLOR="1") as screen:
        screen.wait_until(lambda: re.search(r"without memory", screen.text) and re.search(r"A {2}A {2}A", screen.text))
        assert {code for code, letter in screen.escapes if letter == "m"} <= {"0", "1", "2"}
        screen.type(b"\n")


@pytest.mark.parametrize(
    ("number", "status", "said"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 128 + signal.SIGTERM, "")]
)
def test_a_signal_that_ends_the_process_restores_the_terminal_first(number: int, status: int, said: str) -> None:
    with shown() as screen:
        screen.process.send_signal(number)
        assert screen.status() == status
        assert said in screen.text and "Traceback" not in screen.text


def test_a_stopped_process_leaves_the_terminal_and_comes_back() -> None:
    with shown() as screen:
        screen.escapes.clear()
        screen.process.send_signal(signal.SIGTSTP)
        screen.wait_until(lambda: {("?1049", "l"), ("?25", "h")} <= screen.escapes)
        screen.process.send_signal(signal.SIGCONT)  # a process group without a shell is not stopped at all
        screen.wait_until(lambda: screen.alternate and "RECALL" in screen.text)
        screen.type(b"\n")


def test_a_dumb_terminal_gets_plain_lines() -> None:
    with shown(TERM="dumb") as screen:
        screen.wait_until(lambda: "tokens/s" in screen.text)
        assert not screen.escapes
        screen.type(b"\n")


def test_a_pipe_gets_a_line_a_second(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with open_display(DemoState("title", "Loading ..."), silent=False) as show:
        assert capsys.readouterr().out == "Loading ...\n"
        for _ in range(25):
            now[0] += LINE_S / 10
            show(demo_state())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "RECALL: half of the pool, 11.62 MiB, must go back to the system."
    assert [line.split()[0] for line in lines[1:]] == ["0.1s", "1.2s", "2.3s"], "sampled 10 times a second"
    assert all(len(line) <= 80 for line in lines)
    with open_display(demo_state(), silent=True) as show:
        show(demo_state())
    assert capsys.readouterr() == ("", "")


def test_an_error_of_a_page_is_raised_by_the_run() -> None:
    from rich.console import Console

    def broken(state: DemoState, *_: object) -> list[object]:
        if state.title == "broken":
            raise ZeroDivisionError("in the page")
        return []

    with Path(os.devnull).open("w") as nowhere:
        console = Console(file=nowhere, force_terminal=True)
        before = logging.getLogger().handlers[:]
        with LivePage(DemoState("title", "now"), console, broken) as page:  # type: ignore[arg-type]
            page.show(DemoState("broken", "now"))
            wait_until(lambda: page.error is not None, "the thread has drawn")
            with pytest.raises(ZeroDivisionError, match="in the page"):
                page.show(DemoState("another", "now"))
        assert logging.getLogger().handlers == before


def test_a_result_is_broken_at_spaces(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((16, 24)))
    lines = ["5 preemptions, half the pool", "taken", ""]
    print_result(lines)
    assert capsys.readouterr().out.splitlines() == lines, "in a pipe"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_result(lines)
    assert capsys.readouterr().out.splitlines() == ["5 preemptions,", "half the pool", "taken", ""]


def oracle(world: World, numbers: dict[str, int]) -> list[int]:
    """The holder of each block but the null block, one by one."""
    pool, rows = world.cache.pool, world.scheduler.rows.request_ids
    found = []
    for block in range(1, pool.num_blocks):
        seated = (row for row, name in enumerate(rows) if name is not None)
        if in_rows := [row for row in seated if any(block in table.of(row) for table in world.cache.tables)]:
            found.append(min(numbers[rows[row]] for row in in_rows))
        elif block // pool.blocks_per_extent not in pool.mapped_extents.tolist():
            found.append(UNMAPPED)
        else:
            found.append(CACHED if block in pool.cached_blocks.tolist() else FREE)
    return found


@pytest.mark.parametrize("per", [None, 3])
def test_each_block_shows_its_holder(per: int | None) -> None:
    """Requests with a common prefix share blocks; in the elastic pool, four of six extents have memory."""
    world = World(
        17, block_size=4, max_seqs=4, max_step_tokens=12, blocks_per_extent=per, num_mapped=None if per is None else 4,
        caching=True,
    )  # fmt: skip
    common = world.prompt(8)
    numbers = {}
    source = FrameSource(lambda: world.scheduler, PoolFacts("", 0, 0), lambda: MemoryFigures({}))
    for number, length in enumerate((3, 9, 5, 1, 12)):
        numbers[f"r{number}"] = number
        prompt = np.concatenate([common, world.prompt(length)])
        world.add_request(Request(f"r{number}", prompt, Sampling(6), label=str(number)))
    seen = set()
    while world.scheduler.has_work:
        world.finish(world.due())
        sample = holders_of(source.take(full=True))
        expected = oracle(world, numbers)
        assert sample.holders.tolist() == expected
        assert sample.num_held == sum(holder >= 0 for holder in expected) == world.cache.pool.counts().live
        assert sample.num_mapped == len(expected) - expected.count(UNMAPPED)
        assert sample.num_blocks == 17
        seen |= set(expected)
    assert {0, 1, 2, 3, 4, FREE, CACHED} <= seen and (UNMAPPED in seen) == (per is not None)


def test_tiles_are_as_large_as_fits() -> None:
    for num_blocks in (1, 7, 64, 223, 456, 2000):
        for width, height in itertools.product((1, 10, 58, 78, 198), (1, 4, 8, 20)):
            shape = MapShape.of(num_blocks, width, height)
            assert shape.columns * shape.width <= width
            lines = -(-num_blocks // (shape.columns * shape.blocks_per_tile)) * shape.height
            assert lines <= height
            for w, h in itertools.product(range(1, min(6, width) + 1), range(1, 4)):
                is_larger = w * h > shape.width * shape.height
                assert not (is_larger and -(-num_blocks // (width // w)) * h <= height)
            assert shape.blocks_per_tile == 1 or num_blocks > width * height


def test_a_tile_of_several_blocks_shows_the_most_frequent_holder() -> None:
    holders = np.array([0, 1, 1, FREE, FREE, 2, UNMAPPED, UNMAPPED], np.int16)
    assert tile_holders(holders, 1) == holders.tolist()
    assert tile_holders(holders, 3) == [1, FREE, UNMAPPED]
    assert tile_holders(holders, 8) == [1]


@pytest.mark.parametrize(("symbols", "free"), [(UNICODE, "·"), (ASCII, "-")])
def test_the_map_is_readable_without_colours_and_these_tell_neighbours_apart(symbols: object, free: str) -> None:
    holders = np.array([0, 0, 25, 26, 51, 52, FREE, CACHED, UNMAPPED], np.int16)
    lines = map_lines(BlockHolders(holders), 9, 1, symbols)  # type: ignore[arg-type]
    assert ["".join(segment.text for segment in line) for line in lines] == [f"AAZazA{free}+_"]
    (line,) = map_lines(BlockHolders(np.arange(12, dtype=np.int16)), 12, 1, symbols)  # type: ignore[arg-type]
    assert len({str(segment.style) for segment in line}) == 12
