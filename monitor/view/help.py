"""The help page of the live view: keys, colours, words."""

from __future__ import annotations

import textwrap

from rich.segment import Segment

from .device_summary import RED_FROM, YELLOW_FROM
from .leases import bar_legend
from .listing import HOST_MIN_BYTES
from .symbols import Symbols, chart
from .text import BOLD, BUSY, DIM, ENGINE, GREEN, RED, YELLOW, Line, blank, crop, cut

_KEY_WIDTH = 12
_KEYS = (
    ("q", "end the view (Ctrl-C too)"),
    ("? h", "this page; q, Esc or ? closes it"),
    ("m p u", "sort the processes by memory, pid or user"),
    ("r", "reverse the order"),
    ("/", "filter processes, leases and reservations by command, user, owner, engine name or pid; Esc clears the filter"),
    ("a", f"show all processes, or hide those of the host below {HOST_MIN_BYTES >> 20} MiB (or --min-memory)"),
    ("e", "show the newest events, or hide them again: what took memory, gave it back, was refused or recalled from"),
    ("up down j k", "scroll the processes by one line, or select a lease"),
    ("PgUp PgDn", "scroll by a page; Home and End go to the first and the last"),
    ("Tab", "move the arrows from the processes to the leases, and back"),
    ("R", "recall memory from the selected lease: asks for a size, then for a yes"),
    ("L", "limit the selected lease: asks for a size, then for a yes"),
)
_WORDS = (
    ("HELD", "what the engine holds of the device at most"),
    ("GRANTED", "what it may hold now"),
    ("SPARE", "the part of HELD that the engine can give back without affecting a request"),
    ("MIN MAX", "what it is guaranteed, and how far it may grow"),
    ("WANTED", "what a program without a lease has reserved; more than HELD: the rest waits in the queue of its device"),
    (
        "IDLE",
        "time in which the process did not use the device (a GPU: compute; the host: 1 % of a core); empty below a minute",
    ),
    ("OWNER", "its container, systemd unit or pod; vram-monitor owners has the sums"),
    ("KIND", "C compute, G graphics, H host"),
)


def help_lines(width: int, symbols: Symbols) -> list[Line]:
    """All lines of the page, in at most `width` cells."""
    lines: list[Line] = [[Segment(cut("keys", width, symbols), BOLD)], *_table(_KEYS, width, symbols), []]
    mark = symbols.bar * 2
    used = f"{YELLOW_FROM:.0%}", f"{RED_FROM:.0%}"
    legends: list[Line] = [
        [
            Segment("memory: ", DIM), Segment(mark, GREEN), Segment(f" below {used[0]} used  ", DIM),
            Segment(mark, YELLOW), Segment(f" to {used[1]}  ", DIM), Segment(mark, RED), Segment(" above", DIM),
        ],
        [Segment("lease ", DIM), *bar_legend(symbols)],
        [
            Segment("process: ", DIM), Segment(mark, ENGINE), Segment(" with a lease  ", DIM),
            Segment(mark, BUSY), Segment(" without; also the load", DIM),
        ],
        [
            Segment("history: ", DIM), Segment(chart([0.0, 0.25, 0.5, 0.75, 1.0], 1, symbols)[0], GREEN + DIM),
            Segment(" from its lowest to its highest value, as written", DIM),
        ],
    ]  # fmt: skip
    lines += [[Segment(cut("colours", width, symbols), BOLD)], *([blank(1), *legend] for legend in legends), []]
    lines += [[Segment(cut("words", width, symbols), BOLD)], *_table(_WORDS, width, symbols)]
    return [crop(line, width) for line in lines]


def _table(rows: tuple[tuple[str, str], ...], width: int, symbols: Symbols) -> list[Line]:
    """The texts wrapped beside their keys."""
    lines: list[Line] = []
    for key, text in rows:
        for number, part in enumerate(textwrap.wrap(text, max(width - _KEY_WIDTH - 2, 8))):
            lines.append([Segment(f" {'' if number else key:<{_KEY_WIDTH}} "), Segment(part, DIM)])
    return lines
