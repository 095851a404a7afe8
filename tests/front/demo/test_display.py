"""Displays: a live page in a real pseudo-terminal, with resizes and signals, and plain lines for a pipe."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from demo_states import demo_state

from pagetide.demo.display import LINE_S, LivePage, PlainLines, open_display, print_result
from pagetide.demo.view import DRAWINGS, DemoState

TESTS = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0
SGR = re.compile(r"\x1b\[([0-9;]*)m")

# Shows a page until a line comes on standard input; the file that argument 1 names then says what happened.
PROGRAM = f"""
import logging, sys
sys.path.insert(0, {str(TESTS)!r})
logging.basicConfig(level=logging.WARNING)
from demo_states import demo_state
from pagetide.demo.display import open_display
from pagetide.demo.view import DRAWINGS
try:
    with open_display(demo_state(), DRAWINGS, silent=False) as display:
        logging.warning("in between")
        sys.stdin.readline()
    print("four lines of result")
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(130)
"""


class Screen:
    """A program in a pseudo-terminal, what it has written, and the codes of its colours and styles."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process, self.fd, self.written, self.colours = process, fd, "", set[str]()

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def until(self, pattern: str) -> str:
        """Read until `pattern` has come, and forget what came before its end. Returns that."""
        deadline = time.monotonic() + DEADLINE_S
        while (found := re.search(pattern, self.written, re.DOTALL)) is None:
            assert time.monotonic() < deadline, f"{pattern!r} did not come: {self.written[-3000:]!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.written += os.read(self.fd, 65536).decode(errors="replace")
                    self.colours |= set(SGR.findall(self.written))
                    self.written = SGR.sub("", self.written)
                except OSError:  # the program has ended
                    assert re.search(pattern, self.written, re.DOTALL), self.written[-3000:]
        seen, self.written = self.written[: found.end()], self.written[found.end() :]
        return seen


@contextmanager
def shown(width: int = 80, height: int = 24, **environ: str) -> Iterator[Screen]:
    """The program in a terminal of that size."""
    main, other = pty.openpty()
    variables = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM], stdin=other, stdout=other, stderr=other, start_new_session=True,
        env={**variables, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONUTF8": "1", **environ},
    )  # fmt: skip
    os.close(other)
    try:
        yield Screen(process, main)
    finally:
        process.kill()
        process.wait()
        os.close(main)


ENTERED, LEFT = r"\x1b\[\?1049h", r"\x1b\[\?1049l\x1b\[\?25h|\x1b\[\?1049l.*?\x1b\[\?25h"


def test_a_page_fills_the_terminal_follows_its_size_and_leaves_it_as_it_was() -> None:
    with shown() as screen:
        screen.until(ENTERED)
        frame = screen.until("24 prompts, one KV pool of 223 blocks for a need of 456   ")
        screen.until("RECALL")
        assert "\x1b[?25l" in frame or "\x1b[?25l" in screen.written
        screen.resize(50, 12)
        screen.until("24 prompts, one KV pool o…")
        screen.resize(120, 40)
        screen.until("24 prompts, one KV pool of 223 blocks for a need of 456      ")
        os.write(screen.fd, b"\n")
        screen.until(LEFT)
        end = screen.until("four lines of result")
        assert "WARNING:root:in between" in end, "what was logged meanwhile"
        assert screen.process.wait(DEADLINE_S) == 0


def test_without_colours_letters_remain() -> None:
    with shown(NO_COLOR="1") as screen:
        screen.until(ENTERED)
        assert re.search(r"A {2}A {2}A", screen.until("without memory.*RECALL"))
        assert screen.colours <= {"0", "1", "2"}


def test_an_interrupt_restores_the_terminal_and_says_so() -> None:
    with shown() as screen:
        screen.until("RECALL")
        screen.process.send_signal(signal.SIGINT)
        screen.until(LEFT)
        assert screen.until("interrupted").count("\n") <= 2
        assert screen.process.wait(DEADLINE_S) == 130


def test_a_signal_that_ends_the_process_restores_the_terminal_first() -> None:
    with shown() as screen:
        screen.until("RECALL")
        screen.process.send_signal(signal.SIGTERM)
        screen.until(LEFT)
        assert screen.process.wait(DEADLINE_S) == 128 + signal.SIGTERM


def test_a_stopped_process_leaves_the_terminal_and_comes_back() -> None:
    with shown() as screen:
        screen.until("RECALL")
        screen.process.send_signal(signal.SIGTSTP)
        screen.until(LEFT)
        screen.process.send_signal(signal.SIGCONT)  # a process group without a shell is not stopped at all
        screen.until(ENTERED)
        screen.until("RECALL")


def test_a_dumb_terminal_gets_plain_lines() -> None:
    with shown(TERM="dumb") as screen:
        assert "\x1b" not in screen.until("tokens/s")


# ---- in this process ------------------------------------------------------------------------------


def test_a_pipe_gets_what_happens_at_once_and_a_line_a_second(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with open_display(DemoState("title", "Loading ..."), DRAWINGS, silent=False) as display:
        assert isinstance(display, PlainLines)
        assert capsys.readouterr().out == "Loading ...\n"
        for _ in range(25):
            now[0] += LINE_S / 10
            display.show(demo_state())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "RECALL: half of the pool, 11.62 MiB, must go back to the system."
    assert [line.split()[0] for line in lines[1:]] == ["0.1s", "1.2s", "2.3s"], "sampled 10 times a second"
    assert all(len(line) <= 80 for line in lines)


def test_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with open_display(demo_state(), DRAWINGS, silent=True) as display:
        display.show(demo_state())
    assert capsys.readouterr() == ("", "")


def test_an_error_of_a_page_is_raised_by_the_run() -> None:
    from rich.console import Console

    def broken(state: DemoState, *_: object) -> list[object]:
        if state.title == "broken":
            raise ZeroDivisionError("in the page")
        return []

    with Path(os.devnull).open("w") as nowhere:
        console = Console(file=nowhere, force_terminal=True)
        page = LivePage(DemoState("title", "now"), broken, console)  # type: ignore[arg-type]
        before = logging.getLogger().handlers[:]
        with page:
            page.show(DemoState("broken", "now"))
            page._thread.join(DEADLINE_S)
            with pytest.raises(ZeroDivisionError, match="in the page"):
                page.show(DemoState("another", "now"))
        assert logging.getLogger().handlers == before


def test_a_result_is_broken_at_spaces_only_where_the_terminal_is_narrower(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((16, 24)))
    lines = ["5 preemptions, half the pool", "taken", ""]
    print_result(lines)
    assert capsys.readouterr().out.splitlines() == lines, "in a pipe"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_result(lines)
    assert capsys.readouterr().out.splitlines() == ["5 preemptions,", "half the pool", "taken", ""]
