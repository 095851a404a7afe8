"""Printed once, and live in real pseudo-terminals: what is on the screen, what keys and signals do, what is left behind."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import termios
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from snapshots import leased_snapshot, sample_snapshot
from terminals import DEADLINE_S, ESCAPES, Terminal, start, terminal

from pagetide.monitor.snapshot import Snapshot
from pagetide.monitor.view.keys import Keys, keys_of
from pagetide.monitor.view.live import render_leases, render_once, run_live
from pagetide.monitor.view.page import render


def printed(snapshot: Snapshot, encoding: str = "utf-8", print_it: Any = render_once, **options: Any) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    environment = options.pop("environment", {})
    print_it(snapshot, Console(file=file, _environ=environment, **options))
    file.flush()
    return file.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


def page(snapshot: Snapshot, width: int) -> list[str]:
    return ["".join(segment.text for segment in line) for line in render(snapshot, width=width).lines]


def test_into_a_pipe_goes_plain_text_with_all_processes() -> None:
    snapshot = sample_snapshot(2, num_processes=100)
    text = printed(snapshot, width=100)
    assert "\x1b" not in text
    assert text.count("worker --rank") == 200
    assert text.splitlines()[1:] == page(snapshot, 100)[1:]  # the first line has the time of day
    assert "\x1b" not in printed(snapshot, force_terminal=True, environment={"TERM": "dumb"})
    assert printed(snapshot, encoding="latin-1", width=80).isascii()


def test_on_a_terminal_it_has_colours_unless_they_are_not_wanted() -> None:
    colourful = printed(sample_snapshot(2), width=80, force_terminal=True, color_system="standard")
    codes = {code for code, _ in ESCAPES.findall(colourful)}
    assert {"1", "2", "32", "33", "36", "0", "1;31"} <= codes  # bold, dim, green, yellow, cyan, an alarm
    for plain in ({"no_color": True}, {"environment": {"NO_COLOR": "1"}}):
        text = printed(sample_snapshot(2), width=80, force_terminal=True, color_system="standard", **plain)
        assert {code for code, _ in ESCAPES.findall(text)} <= {"1", "2", "0"}
        assert ESCAPES.sub("", text).splitlines()[1:] == page(sample_snapshot(2), 80)[1:]


def test_leases_alone_are_those_of_the_page() -> None:
    text = printed(leased_snapshot(), print_it=render_leases, width=100)
    assert "\x1b" not in text
    lines = text.splitlines()
    (begin,) = (number for number, line in enumerate(page(leased_snapshot(), 100)) if "GRANTED" in line)
    assert lines == page(leased_snapshot(), 100)[begin : begin + 5]
    shown = printed(leased_snapshot(), print_it=render_leases, width=100, force_terminal=True, color_system="standard")
    assert {"1;31", "33", "36"} <= {code for code, _ in ESCAPES.findall(shown)}  # overdue, recalling, an engine
    assert ESCAPES.sub("", shown) == text
    assert printed(leased_snapshot(), encoding="latin-1", print_it=render_leases, width=100).isascii()
    for width, said in ((80, " no engine holds a lease\n"), (12, "no engine h…\n")):
        assert printed(sample_snapshot(1), print_it=render_leases, width=width) == said


def test_what_is_no_terminal_gets_one_print_after_the_other() -> None:
    file = io.StringIO()
    snapshots = iter([sample_snapshot(1), sample_snapshot(2)])

    def read() -> Snapshot:
        if (snapshot := next(snapshots, None)) is None:
            raise KeyboardInterrupt
        return snapshot

    run_live(read, interval_s=1e-6, console=Console(file=file, width=80))
    for interval_s in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be above 0 seconds"):
            run_live(read, interval_s=interval_s, console=Console(file=io.StringIO()))
    assert [line.split()[0] for line in file.getvalue().splitlines() if "NVIDIA H200" in line] == ["0", "0", "1"]


LIVE = """
import sys
from rich.console import Console
from snapshots import sample_snapshot
from pagetide.monitor.view.live import run_live

reads = 0

def read():
    global reads
    reads += 1
    {reading}
    return sample_snapshot(min(reads, 2), num_processes=4)

run_live(read, interval_s={interval_s}, console=Console())
print("returned")
"""
# What a shell does with its jobs: the view is the foreground, until it is stopped.
SHELL = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job = subprocess.Popen([sys.executable, "-P", "-c", sys.argv[1]], process_group=0)
os.tcsetpgrp(0, job.pid)
_, status = os.waitpid(job.pid, os.WUNTRACED)
os.tcsetpgrp(0, os.getpgrp())
print("stopped by", os.WSTOPSIG(status) if os.WIFSTOPPED(status) else status, flush=True)
input()
os.tcsetpgrp(0, job.pid)
os.kill(job.pid, signal.SIGCONT)
sys.exit(job.wait())
"""


def live(interval_s: float = 3600.0, reading: str = "pass") -> str:
    """The program: one GPU at the first reading, two from then on; `reading` is done before."""
    return LIVE.format(interval_s=interval_s, reading=reading)


def devices(shown: Terminal) -> int:
    return shown.text.count("NVIDIA H200")


def test_it_draws_on_the_alternate_screen_keys_sort_and_q_ends_it() -> None:
    with terminal(live()) as shown:
        shown.wait_until(lambda: "q quit" in shown.text)
        assert shown.alternate and not shown.cursor_shown
        expected = page(sample_snapshot(1, num_processes=4), 80)
        lines = shown.text.splitlines()
        assert len(lines) == 24
        assert lines[2] == expected[2]
        assert [line for line in lines if "worker" in line] == [line for line in expected if "worker" in line]
        for key, column in ((b"", "MEMORY"), (b"p", "PID"), (b"x\x1b[Au", "USER"), (b"m", "MEMORY")):
            shown.type(key)
            shown.wait_until(lambda column=column: re.findall(r"(\w+)[▾▴]", shown.text) == [column])
        shown.type(b"Q")
        assert shown.status() == 0
    assert "returned" in shown.text
    assert "NVIDIA" not in shown.text


def test_it_follows_the_size_of_the_terminal_at_once() -> None:
    with terminal(live()) as shown:
        shown.wait_until(lambda: "q quit" in shown.text)
        shown.resize(120, 50)
        shown.wait_until(lambda: len(shown.text.splitlines()) == 50)
        shown.wait_until(lambda: shown.rows[1].rstrip()[-1].isdigit() and len(shown.rows[1].rstrip()) == 119)
        shown.rows.clear()
        shown.resize(40, 10)
        shown.wait_until(lambda: len(shown.rows) == 10)
        assert max(map(len, shown.rows.values())) == 40
        assert devices(shown) == 0  # a row each, without its name
        shown.type(b"q")
        assert shown.status() == 0


def test_an_error_is_told_on_the_screen_that_was_there_before() -> None:
    with terminal(live(0.01, "if reads == 3: raise RuntimeError('the record is gone')")) as shown:
        assert shown.status() == 1
    assert "RuntimeError: the record is gone" in shown.text
    assert "NVIDIA" not in shown.text


TIDIED = "import atexit; atexit.register(print, 'tidied')\n" + live()
HANDLED = live(reading="import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit('told to end'))")


@pytest.mark.parametrize(
    ("number", "program", "status", "left"),
    [
        (None, live(), 0, "returned"),  # Ctrl-C
        *((number, TIDIED, 128 + number, "tidied") for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)),
        (signal.SIGTERM, HANDLED, 1, "told to end"),  # handlers of the caller go first
    ],
    ids=["Ctrl-C", "SIGTERM", "SIGHUP", "SIGQUIT", "handled"],
)
def test_what_ends_it_leaves_the_terminal_as_it_was(number: int | None, program: str, status: int, left: str) -> None:
    with terminal(program) as shown:
        shown.wait_until(lambda: "q quit" in shown.text)
        shown.type(b"\x03") if number is None else os.kill(shown.process.pid, number)
        assert shown.status() == status
    assert shown.text == left


def test_ctrl_z_gives_the_terminal_back_for_a_while() -> None:
    with terminal(SHELL, live()) as shown:
        shown.wait_until(lambda: "q quit" in shown.text)
        shown.type(b"\x1a")
        shown.wait_until(lambda: f"stopped by {signal.SIGTSTP.value}" in shown.text)
        assert not shown.alternate and shown.cursor_shown
        shown.type(b"\n")
        shown.wait_until(lambda: shown.alternate and "q quit" in shown.text)
        shown.type(b"q")
        assert shown.status() == 0
    assert "returned" in shown.text


def test_without_keys_it_reads_anew_at_its_interval_too() -> None:
    with open(os.devnull, "rb") as nothing, terminal(live(0.01), stdin=nothing.fileno()) as shown:
        shown.wait_until(lambda: devices(shown) == 2)
        assert "q quit" not in shown.text
        os.kill(shown.process.pid, signal.SIGINT)
        assert shown.status() == 0


def test_a_terminal_that_goes_away_ends_it() -> None:
    ours, theirs = pty.openpty()
    process = start(theirs, live())
    try:
        shown = Terminal(ours, process)
        shown.wait_until(lambda: "q quit" in shown.text)
    finally:
        os.close(theirs)
        os.close(ours)
    assert process.wait(DEADLINE_S) != 0


class Typist:
    """Types at one end of a terminal what a program reads as keys at the other."""

    def __init__(self, typing: int, reading: int, keys: Keys) -> None:
        self.typing, self.reading, self.keys = typing, reading, keys

    def __call__(self, text: bytes) -> list[str] | None:
        os.write(self.typing, text)
        return self.keys.read()


@pytest.fixture
def typed() -> Iterator[Typist]:
    typing, reading = pty.openpty()
    with keys_of(reading) as keys:
        yield Typist(typing, reading, keys)
    os.close(typing)
    os.close(reading)


def test_keys_come_one_by_one_and_are_not_shown(typed: Typist) -> None:
    assert typed(b"q") == ["q"]  # without a line's end
    assert typed(b"mp\xc3\xa9") == ["m", "p", "é"]
    assert typed(b"m\xc3") == ["m"]
    assert typed(b"\xa9\r\t\x7f\x01") == ["é", "enter", "tab", "backspace"]
    flags = termios.tcgetattr(typed.reading)[3]
    assert flags & termios.ISIG
    assert not flags & (termios.ECHO | termios.ICANON)


def test_other_keys_are_no_letters(typed: Typist) -> None:
    sequences = (
        b"\x1b[C", b"\x1b[1;5D", b"\x1b[3~", b"\x1bOq", b"\x1b[I", b"\x1b[200~", b"\x1b[<0;10;5M", b"\x1b[?1;2c",
        b"\x1b[[A",  # of the Linux console
    )  # fmt: skip
    for sequence in sequences:
        assert typed(b"u" + sequence + b"m") == ["u", "m"]
        assert typed(sequence[:-1]) == [], "the rest comes later, as over a slow line"
        assert typed(sequence[-1:] + b"p") == ["p"]


def test_keys_that_move_have_names_however_they_are_split(typed: Typist) -> None:
    names = {
        b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[1;2B": "down", b"\x1b[5~": "pageup", b"\x1b[6~": "pagedown",
        b"\x1b[H": "home", b"\x1b[1~": "home", b"\x1bOF": "end", b"\x1b[8~": "end", b"\x1b[Z": "tab",
    }  # fmt: skip
    for sequence, name in names.items():
        assert typed(b"j" + sequence + sequence + b"k") == ["j", name, name, "k"]
        for byte in range(len(sequence) - 1):
            assert typed(sequence[byte : byte + 1]) == []
        assert typed(sequence[-1:] + b"x") == [name, "x"]


def test_the_escape_key_keeps_no_other_key_back(typed: Typist) -> None:
    assert typed(b"\x1b") == [] and typed.keys.escape_pending
    assert typed(b"q") == ["escape", "q"]
    assert typed(b"\x1b") == []
    assert typed.keys.take_escape() == ["escape"] and typed.keys.take_escape() == []


def test_what_is_no_terminal_has_no_keys_and_their_end_is_told() -> None:
    reading, writing = os.pipe()
    try:
        with keys_of(reading) as keys:
            assert keys is None
        os.close(writing)
        assert Keys(reading).read() is None
    finally:
        os.close(reading)
