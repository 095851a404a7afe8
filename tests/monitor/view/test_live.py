"""Printed once, and live in real pseudo-terminals: what is on the screen, what keys and signals do, what is left behind."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
from typing import Any

import pytest
from rich.console import Console
from snapshots import leased_snapshot, sample_snapshot
from terminals import DEADLINE_S, ESCAPES, Terminal, start, terminal

from pagetide.monitor.snapshot import Snapshot
from pagetide.monitor.view.live import render_leases, render_once, run_live
from pagetide.monitor.view.page import render

# ---- once ---------------------------------------------------------------------------------------


def printed(snapshot: Snapshot, encoding: str = "utf-8", print_it: Any = render_once, **options: Any) -> str:
    """What `print_it` writes to a console with these options."""
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


def test_on_a_terminal_it_has_colours_unless_they_are_not_wanted() -> None:
    colourful = printed(sample_snapshot(2), width=80, force_terminal=True, color_system="standard")
    codes = {code for code, _ in ESCAPES.findall(colourful)}
    assert {"1", "2", "32", "33", "36", "0", "1;31"} <= codes  # bold, dim, green, yellow, cyan, an alarm
    for plain in ({"no_color": True}, {"environment": {"NO_COLOR": "1"}}):
        text = printed(sample_snapshot(2), width=80, force_terminal=True, color_system="standard", **plain)
        assert {code for code, _ in ESCAPES.findall(text)} <= {"1", "2", "0"}
        assert ESCAPES.sub("", text).splitlines()[1:] == page(sample_snapshot(2), 80)[1:]


def test_a_dumb_terminal_gets_plain_text() -> None:
    assert "\x1b" not in printed(sample_snapshot(2), force_terminal=True, environment={"TERM": "dumb"})


def test_without_utf_8_it_is_ascii() -> None:
    assert printed(sample_snapshot(2), encoding="latin-1", width=80).isascii()


def test_leases_alone_are_those_of_the_page() -> None:
    text = printed(leased_snapshot(), print_it=render_leases, width=100)
    assert "\x1b" not in text
    lines = text.splitlines()
    (begin,) = (number for number, line in enumerate(page(leased_snapshot(), 100)) if "GRANTED" in line)
    assert lines == page(leased_snapshot(), 100)[begin : begin + 5]
    colourful = printed(
        leased_snapshot(), print_it=render_leases, width=100, force_terminal=True, color_system="standard"
    )
    assert {"1;31", "33", "36"} <= {code for code, _ in ESCAPES.findall(colourful)}  # overdue, recalling, an engine
    assert ESCAPES.sub("", colourful) == text
    assert printed(leased_snapshot(), encoding="latin-1", print_it=render_leases, width=100).isascii()


def test_that_there_are_no_leases_is_a_sentence() -> None:
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
    assert [line.split()[0] for line in file.getvalue().splitlines() if "NVIDIA H200" in line] == ["0", "0", "1"]


@pytest.mark.parametrize("interval_s", [0.0, -1.0, float("nan")])
def test_an_interval_that_is_none_is_refused(interval_s: float) -> None:
    with pytest.raises(ValueError, match="must be above 0 seconds"):
        run_live(lambda: sample_snapshot(1), interval_s=interval_s, console=Console(file=io.StringIO()))


# ---- live ---------------------------------------------------------------------------------------

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


def test_it_draws_on_the_alternate_screen_and_q_ends_it() -> None:
    with terminal(live()) as shown:
        shown.wait_until(lambda: "q quit" in shown.text)
        assert shown.alternate and not shown.cursor_shown
        expected = page(sample_snapshot(1, num_processes=4), 80)
        lines = shown.text.splitlines()
        assert len(lines) == 24
        assert lines[2] == expected[2]
        assert [line for line in lines if "worker" in line] == [line for line in expected if "worker" in line]
        shown.type(b"q")
        assert shown.status() == 0
    assert "returned" in shown.text
    assert "NVIDIA" not in shown.text


def test_it_reads_anew_at_its_interval() -> None:
    with terminal(live(interval_s=0.01)) as shown:
        shown.wait_until(lambda: devices(shown) == 2)
        shown.type(b"Q")
        assert shown.status() == 0


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


def test_keys_sort_the_processes() -> None:
    def marked() -> str | None:
        found = re.search(r"(\w+)[▾▴]", shown.text)
        return found and found[1]

    with terminal(live()) as shown:
        for key, column in ((b"", "MEMORY"), (b"p", "PID"), (b"x\x1b[Au", "USER"), (b"m", "MEMORY")):
            shown.type(key)
            shown.wait_until(lambda column=column: marked() == column)
        shown.type(b"q")
        assert shown.status() == 0


def test_ctrl_c_ends_it_without_a_word() -> None:
    with terminal(live()) as shown:
        shown.wait_until(lambda: "q quit" in shown.text)
        shown.type(b"\x03")
        assert shown.status() == 0
    assert shown.text == "returned"


def test_an_error_is_told_on_the_screen_that_was_there_before() -> None:
    with terminal(live(0.01, "if reads == 3: raise RuntimeError('the record is gone')")) as shown:
        assert shown.status() == 1
    assert "RuntimeError: the record is gone" in shown.text
    assert "NVIDIA" not in shown.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_that_ends_it_leaves_the_terminal_as_it_was(number: signal.Signals) -> None:
    with terminal("import atexit; atexit.register(print, 'tidied')\n" + live()) as shown:
        shown.wait_until(lambda: "q quit" in shown.text)
        os.kill(shown.process.pid, number)
        assert shown.status() == 128 + number
    assert shown.text == "tidied"


def test_handlers_of_the_caller_go_first() -> None:
    handler = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit('told to end'))"
    with terminal(live(reading=handler)) as shown:
        shown.wait_until(lambda: "q quit" in shown.text)
        os.kill(shown.process.pid, signal.SIGTERM)
        assert shown.status() == 1
    assert shown.text == "told to end"


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


def test_without_keys_it_works_too() -> None:
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
