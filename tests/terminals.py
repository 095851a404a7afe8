"""Pseudo-terminals with a program in them: what is on the screen, keys, resizes, signals."""

from __future__ import annotations

import fcntl
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).resolve().parent
DEADLINE_S = 60.0
ESCAPES = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
# The terminal becomes that of the session, and signals are as for what a shell starts, whatever the tests' process ignores.
IN_CONTROL = """
import fcntl, signal, termios
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
"""


class Terminal:
    """A terminal with a program in it. Understands what the view sends and no more."""

    def __init__(self, descriptor: int, process: subprocess.Popen[bytes]) -> None:
        self.descriptor = descriptor
        self.process = process
        self.alternate = False
        self.cursor_shown = True
        self.rows: dict[int, str] = {}  # what was written to the screen that is shown, since it is shown
        self.escapes: set[tuple[str, str]] = set()  # (parameters, letter) of all that have come
        self._unread = b""
        self._row, self._column = self._saved = 1, 1

    def type(self, keys: bytes) -> None:
        os.write(self.descriptor, keys)

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def wait_until(self, true: Callable[[], object]) -> None:
        """Take in output until `true`."""
        deadline = time.monotonic() + DEADLINE_S
        while not true():
            assert time.monotonic() < deadline, f"did not come to be; the screen shows:\n{self.text}"
            if select.select([self.descriptor], [], [], 0.05)[0]:
                self._take()

    def status(self) -> int:
        """The exit status, once the program has ended and all its output is taken in."""
        self.wait_until(lambda: self.process.poll() is not None)
        while select.select([self.descriptor], [], [], 0)[0] and self._take():
            pass
        return self.process.wait()

    @property
    def text(self) -> str:
        return "\n".join(self.rows[row].rstrip() for row in sorted(self.rows))

    def _take(self) -> bool:
        try:
            data = os.read(self.descriptor, 65536)
        except OSError:  # Linux says so at the end
            return False
        self._unread += data
        text = self._unread.decode(errors="ignore")  # the rest of a character may be still to come
        if begun := re.search(r"\x1b(\[[0-9;?]*)?\Z", text):  # and that of a sequence
            text = text[: begun.start()]
        self._unread = self._unread[len(text.encode()) :]
        self._show(text)
        return bool(data)

    def _show(self, text: str) -> None:
        position = 0
        for escape in ESCAPES.finditer(text):
            self._write(text[position : escape.start()])
            position = escape.end()
            self.escapes.add((escape[1], escape[2]))
            match escape.groups():
                case ("?1049", "h"):
                    self.alternate, self.rows = True, {}
                    self._saved = self._row, self._column
                case ("?1049", "l"):
                    self.alternate, self.rows = False, {}
                    self._row, self._column = self._saved
                case ("?25", mode):
                    self.cursor_shown = mode == "h"
                case (place, "H"):
                    self._row, self._column = map(int, place.split(";")) if place else (1, 1)
        self._write(text[position:])

    def _write(self, text: str) -> None:
        for character in text:
            if character == "\n":
                self._row += 1
            elif character == "\r":
                self._column = 1
            else:
                row = self.rows.get(self._row, "").ljust(self._column - 1)
                self.rows[self._row] = row[: self._column - 1] + character + row[self._column :]
                self._column += 1


def start(
    theirs: int, program: str, *arguments: str, stdin: int | None = None, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A program in the terminal whose inner end `theirs` is, of 80 x 24 cells."""
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(TESTS))))
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", IN_CONTROL + program, *arguments],
        stdin=theirs if stdin is None else stdin,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=environment | {"TERM": "xterm-256color", "PYTHONPATH": path, "PYTHONUTF8": "1"} | dict(env or {}),
    )


@contextmanager
def terminal(
    program: str, *arguments: str, stdin: int | None = None, env: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """A program in a terminal, which must be as it was before once the program has ended."""
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    process = start(theirs, program, *arguments, stdin=stdin, env=env)
    try:
        shown = Terminal(ours, process)
        yield shown
        shown.status()
        assert not shown.alternate
        assert shown.cursor_shown
        assert termios.tcgetattr(theirs) == before
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(theirs)
        os.close(ours)
