"""Text of other people's processes, numbers, bars and charts: what is written, and in how many cells."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from pagetide.common.units import GIB, MIB
from pagetide.monitor.view.numbers import amount, brief, full_in, percent, rate, share_of, used_of_total
from pagetide.monitor.view.symbols import ASCII, UNICODE, Symbols, bar, chart, chart_columns, chart_reach, stacked_bar
from pagetide.monitor.view.text import cut, left, printable, right

# Halves of surrogate pairs too: Python keeps them for the bytes of a command line that are no UTF-8.
ANY_TEXT = st.text(st.characters(), max_size=60)
SYMBOLS = st.sampled_from([UNICODE, ASCII])


def test_only_printable_characters_of_a_known_width_are_left() -> None:
    for text, shown in {
        "python train.py --lr 3e-4": "python train.py --lr 3e-4",
        "a\tb\r\nc   d ": "a b c d",  # python -c 'several lines'
        "\x1b[31mred\x1b[0m": "�[31mred�[0m",
        "\x9b31m \x07 \x7f \x00": "�31m � � �",
        "\x1b]52;c;cm0gLXJm\x07": "�]52;c;cm0gLXJm�",  # would write into the clipboard
        "a\u202eb\u2066c\u200bd\ufeffe": "a�b�c�d�e",  # turns the direction, isolates, has no width
        "caf\u0065\u0301": "café",
        "z\u0335\u0489\u0301algo": "zalgo",
        "\udcff\udc80.bin": "��.bin",  # bytes that are no UTF-8
        "\u2028line\u2029": "line",
        "[bold red]not markup[/] :smile:": "[bold red]not markup[/] :smile:",
        "模型 🚀": "模型 🚀",
    }.items():
        assert printable(text, ascii_only=False) == shown
    assert printable("café 模型\x1b[0m", ascii_only=True) == "caf? ???[0m"


def test_what_is_too_long_ends_in_an_ellipsis() -> None:
    for width, shown in {8: "train.py", 7: "train.…", 1: "…", 0: ""}.items():
        assert cut("train.py", width, UNICODE) == shown
    for width, shown in {8: "模型模型", 7: "模型模…", 6: "模型…"}.items():
        assert cut("模型模型", width, UNICODE) == shown, "half a character is none"
    assert cut("", 3, UNICODE) == ""
    assert [cut("train.py", width, ASCII) for width in (8, 7, 3, 2, 0)] == ["train.py", "trai...", "...", "..", ""]
    assert cut("x" * 2_000_000, 5, UNICODE) == "xxxx…"
    assert cut(" " * 2_000_000 + "x", 5, UNICODE) == "…", "there is more than what was looked at"


@given(ANY_TEXT, st.integers(0, 40), SYMBOLS)
def test_a_cell_of_a_table_has_its_width_whatever_stands_in_it(text: str, width: int, symbols: Symbols) -> None:
    assert cell_len(cut(text, width, symbols)) <= width
    for cell in (left(text, width, symbols), right(text, width, symbols)):
        assert cell.cell_length == width
        assert cell.text.isprintable()
        assert symbols is UNICODE or cell.text.isascii()
        cell.text.encode()


NAN, INF = float("nan"), float("inf")


def test_shares_and_amounts() -> None:
    assert (share_of(1, 4), share_of(None, 4), share_of(1, None), share_of(1, 0)) == (0.25, None, None, None)
    assert [percent(share, "–") for share in (0.0, 0.704, 1.0, None, NAN)] == ["0%", "70%", "100%", "–", "–"]
    sizes = {None: "–", 0: "0 MiB", 614 * MIB: "614 MiB", 1000 * MIB: "1.0 GiB", 98 * GIB + 205 * MIB: "98.2 GiB"}
    assert [amount(size, "–") for size in (*sizes, 1007 * GIB)] == [*sizes.values(), "1007 GiB"]
    assert used_of_total(98 * GIB, 141 * GIB, "–") == ("98.0", "141.0", "GiB")
    assert used_of_total(98 * GIB, 1007 * GIB, "–") == ("98", "1007", "GiB")
    assert used_of_total(90 * MIB, 512 * MIB, "–") == ("90", "512", "MiB")
    assert used_of_total(None, 141 * GIB, "–") == ("–", "141.0", "GiB")
    assert used_of_total(None, None, "–") == ("–", "–", "GiB")


def test_rates_and_the_end_of_memory_within_an_hour() -> None:
    rates = {None: "", NAN: "", 0.0: "steady", -0.04 * MIB: "steady"}
    rates |= {12.3 * MIB: "+12.3 MiB/s", -1.4 * MIB: "-1.4 MiB/s"}
    assert [rate(bytes_per_second) for bytes_per_second in (*rates, 2.5 * GIB)] == [*rates.values(), "+2.5 GiB/s"]
    ends = {None: "", NAN: "", INF: "", 3601.0: "", 3599.0: "full in 59 min", 59.9: "full in 59 s", 0.2: "full now"}
    assert [full_in(seconds) for seconds in ends] == list(ends.values())


def test_short_times_are_in_milliseconds() -> None:
    assert [brief(s) for s in (0.0124, 0.999, 1.0, 61)] == ["12 ms", "999 ms", "1 s", "1 min"]


def test_a_bar_is_exact_to_half_a_cell() -> None:
    shares = {0.0: "────", 0.06: "────", 0.07: "╾───", 0.5: "━━──", 0.63: "━━╾─", 1.0: "━━━━", 1.7: "━━━━"}
    nothing = dict.fromkeys((-0.5, None, float("nan"), float("inf")), "────")
    for share, drawn in (shares | nothing).items():
        assert "".join(bar(share, 4, UNICODE)) == drawn
    assert bar(0.5, 0, UNICODE) == bar(0.5, -3, UNICODE) == ("", "")


def test_a_stacked_bar_is_the_bar_of_the_sum_in_pieces() -> None:
    assert stacked_bar([0.25, 0.25, 0.25], 8, UNICODE) == (["━━", "━━", "━━"], "──")
    assert stacked_bar([0.0, 0.0], 4, UNICODE) == (["", ""], "────")
    assert stacked_bar([0.5, 0.0, 0.13], 4, UNICODE) == (["━━", "", "╾"], "─")
    assert stacked_bar([0.9, 0.9], 4, UNICODE) == (["━━━━", ""], "")
    assert stacked_bar([0.5, 0.5], 0, UNICODE) == (["", ""], "")


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(0, 40))
def test_pieces_of_a_stacked_bar_are_the_bar_and_exact_to_a_cell(shares: list[float], width: int) -> None:
    pieces, rest = stacked_bar(shares, width, UNICODE)
    assert ("".join(pieces), rest) == bar(sum(shares), width, UNICODE)
    if sum(shares) <= 1:
        assert all(abs(len(piece) - share * width) <= 1.5 for piece, share in zip(pieces, shares, strict=True))


def test_a_chart_has_eight_heights_a_line() -> None:
    eighths = [height / 8 for height in range(9)]
    assert chart(eighths, 1, UNICODE) == ["▁▁▂▃▄▅▆▇█"]  # a known zero is seen
    assert chart([0.0, 0.25, 0.5, 0.625, 1.0, 1.5, None], 2, UNICODE) == ["   ▂██ ", "▁▄████ "]
    assert chart([0.0, 0.5, 1.0, None], 1, ASCII) == [".-# "]
    assert chart([], 3, UNICODE) == ["", "", ""]
    assert chart([0.5], 0, UNICODE) == []


@given(st.lists(st.none() | st.integers(0, 99), max_size=80), st.integers(1, 30), st.integers(0, 1000))
def test_columns_are_groups_of_values_by_their_number(history: list[int | None], width: int, newest: int) -> None:
    size = max(1, len(history) // width)
    groups: dict[int, list[int]] = {}
    for number, value in zip(range(newest - len(history) + 1, newest + 1), history, strict=True):
        groups.setdefault(number // size, []).extend([] if value is None else [value])
    expected = [max(values, default=None) for _, values in sorted(groups.items())]
    assert chart_columns(history, width, newest) == expected[-width:]


def test_how_far_back_a_chart_reaches() -> None:
    assert [chart_reach(256, width) for width in (300, 256, 200, 100, 60, 1, 0)] == [256, 256, 200, 200, 240, 256, 0]
    assert chart_reach(5, 60) == 5
